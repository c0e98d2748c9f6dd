"""The constants of the model of time: documented defaults for H100 GPUs, or those that `plan --calibrate` measured."""

import itertools
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.tuned_choices import add_choices, cache_directory, cache_file, processor, read_choices

CALIBRATED = 2, 4  # numbers of ranks, powers of two: ranks share caches, bandwidth and the clock of the processor
MEASURED = (  # on the CPU
    "block_forward", "block_backward", "ends_forward", "ends_backward", "inside", "collective", "gather", "message",
    "background", "embedding", "bandwidth", "micro_batch", "again", "weights", "action", "reaction", "update",
    "step", "queries",
)  # fmt: skip


class Rate(NamedTuple):
    """The seconds of a unit for `count` sequences: overhead + parameters * parameter + count * those of one sequence.

    A sequence takes: `sequence`; its operations / flops; the bytes that kernels read and write besides products /
    bandwidth; its scores of attention * score. Each pass reads the parameters, and backward writes their gradients.
    """

    overhead: float
    flops: float
    bandwidth: float = math.inf
    sequence: float = 0.0
    score: float = 0.0
    parameter: float = 0.0

    def seconds(self, work, count, itemsize, passes=1):
        """The seconds of `count` sequences, with `passes` times the products of a Work; itemsize: bytes of a number."""
        products = work.flops / self.flops + work.numbers * itemsize / self.bandwidth
        once = self.overhead + work.parameters * self.parameter
        return once + count * (self.sequence + passes * products + work.scores * self.score)


class Link(NamedTuple):
    """The alpha-beta model (Hockney): m bytes in r rounds take call + r alpha + m beta seconds."""

    alpha: float
    beta: float
    call: float = 0.0


@dataclass(frozen=True)
class Machine:
    """block_forward, block_backward: the Rates of a block. ends_forward, ends_backward: of embedding and head.

    inside: the Link of an all-reduce inside a layer, with the wait for the slowest rank. collective, gather, message:
    the Links of other all-reduces, of the other collectives, and of a message on one host. background: of a collective
    that a rank starts while it computes. far: the Link between hosts, each of which has host_ranks ranks. embedding:
    the part of the overhead of embedding and head that the embedding has. bandwidth: bytes per second of the memory,
    for the update and for sums of gradients. micro_batch: seconds of a unit for each merged micro-batch after the first
    one, besides those of its parameters. again: seconds of a block that backward computes again, besides its forward
    pass. weights: seconds of the gradients of the parameters of a unit, besides those of its products. action: seconds
    of an F action, and of B and W together, besides those of the pass. reaction: seconds that a rank reacts later for
    each second that it has waited for a message, because its sleeps become longer. update: seconds of the update of a
    unit, besides those of its numbers: each parameter is a few calls of kernels. step: seconds of a step for everything
    else. queries: see unit_work(). overlaps: whether messages run while a rank computes. processors: the
    multiprocessors of a GPU; None: a CPU.
    """

    name: str
    block_forward: Rate
    block_backward: Rate
    ends_forward: Rate
    ends_backward: Rate
    inside: Link
    collective: Link
    gather: Link
    message: Link
    background: Link
    far: Link
    embedding: float
    bandwidth: float
    micro_batch: float
    again: float
    weights: float
    action: float
    reaction: float
    update: float
    step: float
    queries: float
    host_ranks: int
    overlaps: bool
    processors: int | None


PEAK = {"fp32": 989e12 / 3, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12}  # NVIDIA's data sheet of the H100 SXM
EFFICIENCY = 0.7  # of the peak, that large products reach: 0.69 to 0.77 in docs/RESULTS.md, "GPU products"
PROCESSORS = 132  # multiprocessors: the same data sheet
HBM = 3.35e12  # bytes per second: the same data sheet
HBM_EFFICIENCY = 0.8  # the part of it that a kernel reaches which only reads and writes
NVLINK = Link(10e-6, 1 / 350e9)  # bytes per second of an all-reduce of 4 H100 by NCCL; alpha: a launch of NCCL
NETWORK = Link(20e-6, 1 / 45e9)  # 400 Gbit/s for each GPU, of which NCCL reaches 90 %; alpha: an assumption


def h100(precision):
    """The Machine of hosts with 8 H100 each, without a measurement on this machine."""
    flops, memory = EFFICIENCY * PEAK[precision], HBM_EFFICIENCY * HBM
    block, ends = Rate(0.0, flops, memory), Rate(0.0, flops)
    return Machine(
        f"H100, {precision}, defaults", block, block, ends, ends, *[NVLINK] * 5, NETWORK, 0.0, memory, *[0.0] * 6,
        100e-6, math.inf, 8, True, PROCESSORS,
    )  # fmt: skip


def calibrated_for():
    """The text that names this machine and its libraries in the file of calibrations."""
    return f"planner of {processor()}, numpy {np.__version__}"


def calibration_file(directory=None):
    """The path of the calibration, beside the tuned choices; None if there is no home directory."""
    directory = directory or cache_directory()
    return directory and cache_file(directory, calibrated_for())


def save_calibration(constants, path, ranks):
    """Add the constants {name: list of floats} that stage1_mpi/calibrate.py measured on so many ranks.

    Raises ConfigError if the file cannot be written.
    """
    texts = {f"{ranks} ranks: {name}": repr(value) for name, value in constants.items()}
    try:
        add_choices(path, calibrated_for(), texts)
    except OSError as error:
        raise ConfigError(
            f"--calibrate: {path} cannot be written ({error.strerror or error}): make it writable, or set HOME to "
            f"another directory"
        ) from None


def host_machine(path, ranks):
    """The Machine of so many CPU ranks of this host, from the calibration; None if there is none.

    Its constants were measured on as many ranks, or on the nearest smaller number.
    """
    saved = read_choices(path, calibrated_for()) if path else {}
    for count in sorted(CALIBRATED, key=lambda count: (count > ranks, abs(count - ranks))):
        try:
            texts = {name: saved[f"{count} ranks: {name}"] for name in MEASURED}
            constants = {name: [float(n) for n in text.strip("[]").split(",")] for name, text in texts.items()}
            machine = machine_of(constants, ranks)
        except (KeyError, TypeError, ValueError):
            continue
        if can_be_measured(constants, machine):
            return machine
    return None


def can_be_measured(constants, machine):
    """Whether the constants of a calibration are finite and not negative, and no divisor of the model of time is 0."""
    rates = machine.block_forward, machine.block_backward, machine.ends_forward, machine.ends_backward
    divisors = machine.bandwidth, machine.queries, *(n for rate in rates for n in (rate.flops, rate.bandwidth))
    every = itertools.chain(*constants.values())
    return all(0 <= n < math.inf for n in every) and min(divisors) > 0 and machine.embedding <= 1


def machine_of(constants, ranks):
    """The Machine with these constants of a calibration: see save_calibration()."""
    kinds = {each.name: each.type for each in fields(Machine)}
    measured = {name: kinds[name](*constants[name]) for name in MEASURED}
    return Machine(
        f"this machine: {processor()}, calibrated", **measured, far=measured["message"], host_ranks=ranks,
        overlaps=False, processors=None,
    )  # fmt: skip
