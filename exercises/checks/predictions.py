"""The questions of `make predict`: what a student predicts, the formula with its numbers, and the measurement.

The formulas are those of the planner (gpt2core/app/planning); the measurements run the code, on threads as ranks.
"""

# p ranks, L layers, C channels, V vocabulary, T tokens of a sequence, H heads, n parameters

import math
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from gpt2core.app.planning.flops import step_flops
from gpt2core.app.planning.layout import FP32, Layout
from gpt2core.app.planning.traffic import traffic
from gpt2core.architecture import parameter_count, parameter_shapes, unit_of
from gpt2core.arena import PAGE, SEGMENTS, round_up
from gpt2core.communicator import Solo, textbook_bytes
from gpt2core.data import Windows
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.mesh import Grid
from gpt2core.parallel.pipeline.schedules import one_f_one_b
from gpt2core.parallel.pipeline.simulator import simulate
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.presets import PRESETS

MODEL = PRESETS["tiny"]
BATCH, MICRO_BATCHES, RANKS = 16, 8, 4
SECONDS = 1.0  # for which a speed is measured


@dataclass(frozen=True)
class Question:
    """key: its name in a file of answers. unit: a key of UNITS in exercises/predict.py. formula() -> (text, value).

    measure() -> value. note: what the formula says about padding, or why the measurement differs, or "".
    """

    key: str
    text: str
    unit: str
    formula: object
    measure: object
    note: str = ""


def layout(ranks=RANKS, **parallel):
    return Layout(MODEL, ParallelConfig(**parallel), BATCH, MODEL.block_size, MICRO_BATCHES, replicas=ranks)


def trainer(world=None, **parallel):
    """A trainer of MODEL with one thread on this rank of `world`."""
    from gpt2core.engine.fast_trainer import FastTrainer
    from stage0_serial.numpy_backend import NumpyBackend

    return FastTrainer(
        MODEL, [NumpyBackend()], batch_size=BATCH, seq_len=MODEL.block_size, micro_batches=MICRO_BATCHES,
        world=world or Solo(), parallel=ParallelConfig(**parallel),
    )  # fmt: skip


# -- parameters and memory ---------------------------------------------------------------------------------------------


def parameters():
    V, T, L, C = MODEL.vocab_size, MODEL.block_size, MODEL.n_layer, MODEL.n_embd
    text = f"2 V C + T C + L (12 C^2 + 13 C) + 2 C = 2*{V}*{C} + {T}*{C} + {L}*(12*{C}^2 + 13*{C}) + 2*{C}"
    return text, 2 * V * C + T * C + L * (12 * C**2 + 13 * C) + 2 * C


def initialised():
    """The elements of the parameters of a new model."""
    from gpt2core.model import initial_parameters

    return sum(array.size for _, array in dict(initial_parameters(MODEL, 0)).items())


def padded(multiple, part_of=lambda name: "all"):
    """The numbers of MODEL with padding: a parameter has whole pages, and the parameters of a part a `multiple`.

    part_of(name): the part of a parameter.
    """
    numbers = Counter()
    for name, shape in parameter_shapes(MODEL):
        numbers[part_of(name)] += round_up(math.prod(shape), PAGE)
    return sum(round_up(count, multiple) for count in numbers.values())


GRADIENT = padded(1)  # the numbers that an all-reduce adds
FLAT = padded(SEGMENTS * PAGE)
UNITS = padded(RANKS * PAGE, unit_of)


def arrays_of(zero):
    """formula() of the flat arrays of one of RANKS ranks."""
    p = RANKS

    def formula():
        if zero == 0:
            return f"4 bytes * 4 N = 16*{FLAT}", 16 * FLAT
        if zero == 1:
            return f"4 bytes * (2 N + 2 N / p) = 8*{FLAT} + 8*{FLAT}/{p}", 8 * FLAT + 8 * FLAT // p
        return f"4 bytes * 4 N / p = 16*{UNITS}/{p}", 16 * UNITS // p

    return formula


def measured_arrays(zero):
    """measure() of the same: the parameters, gradients and moments that rank 0 keeps."""

    def bytes_of(world):
        made = trainer(world, zero=zero)
        return made.optimizer.parameters.nbytes + made.accumulator.gradients.nbytes + made.optimizer.nbytes

    return lambda: run_ranks(RANKS if zero else 1, bytes_of)[0]


# -- messages and waits ------------------------------------------------------------------------------------------------


def all_reduce_bytes():
    p = RANKS
    return f"2 (p - 1) / p * 4 N = 2*{p - 1}/{p}*4*{GRADIENT}", textbook_bytes("all_reduce", FP32 * GRADIENT, p)


def sent_bytes():
    """The bytes of the messages that rank 0 sends to sum the gradient of MODEL with the algorithm ring."""
    from stage1_mpi import collectives

    (size,) = {call.elements for call in traffic(layout(), Grid()) if call.purpose == "gradients"}

    def send(comm):
        collectives.all_reduce(comm, np.ones(size, np.float32), algorithm="ring")
        return comm.bytes_sent

    return run_ranks(RANKS, send)[0]


def bubble():
    P, M = RANKS, MICRO_BATCHES
    return f"(P - 1) / (M + P - 1) = {P - 1}/{M + P - 1}", 100 * (P - 1) / (M + P - 1)


def simulated_bubble():
    return 100 * simulate(one_f_one_b(RANKS, MICRO_BATCHES)).bubble


# -- speed -------------------------------------------------------------------------------------------------------------


def rate(work):
    """How often work() runs in a second, measured for SECONDS."""
    work()
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < SECONDS:
        work()
        count += 1
    return count / passed


def product_flops():
    """The operations per second of a product of two 512 x 512 matrices with one thread of BLAS."""
    from stage0_serial.numpy_backend import NumpyBackend

    x, runtime = np.ones((512, 512), np.float32), NumpyBackend().runtime
    with runtime.one_blas_thread():
        return rate(lambda: x @ x) * 2 * 512**3


def tokens_per_second():
    needed, _ = step_flops(replace(layout(1), config=MODEL))
    each, flops = needed / (BATCH * MODEL.block_size), product_flops()
    return f"FLOP/s of a large product / FLOPs of a token = {flops:.3g} / {each:.3g}", flops / each


def trained_tokens():
    from gpt2core.training_loop import read_batch

    made = trainer()
    windows = Windows(np.arange(5000) % MODEL.vocab_size, MODEL.block_size)
    return rate(lambda: made.step(read_batch(made, windows), 1e-3)) * BATCH * MODEL.block_size


# -- attention ---------------------------------------------------------------------------------------------------------

HEADS, LENGTH = 4, 64


def kept_by(make_backend):
    """measure() of the bytes that attention keeps from forward to backward, besides its input and its result."""

    def nbytes(aux):
        arrays = aux if isinstance(aux, tuple | list) else [aux]
        return sum(getattr(array, "nbytes", 0) for array in arrays)

    def measure():
        backend = make_backend()
        qkv = backend.asarray(np.ones((1, LENGTH, 3 * 16 * HEADS), np.float32))
        return nbytes(backend.attention_forward(qkv, HEADS)[1])

    return measure


def plain():
    from gpt2core.plain_backend import PlainBackend

    return PlainBackend()


def flash():
    from stage2_cuda.cuda_backend import CudaBackend

    return CudaBackend("fp32")


def scores_bytes():
    return f"4 bytes * H T^2 = 4*{HEADS}*{LENGTH}^2", FP32 * HEADS * LENGTH**2


def logsumexp_bytes():
    return f"4 bytes * H T = 4*{HEADS}*{LENGTH}", FP32 * HEADS * LENGTH


def padding(N, rule=""):
    """The note about N, the numbers of MODEL with padding."""
    n = parameter_count(MODEL)
    pages = f"each parameter starts at a multiple of {PAGE:,} numbers"
    return (
        f"N = {N:,} has padding: {pages}{rule}. Without padding it is n = {n:,}, {100 * (n - N) / N:.1f} % to the "
        "formula; in a large model the difference is small"
    )


IN_FLAT = padding(FLAT, f", and the size of a flat buffer is a multiple of {SEGMENTS * PAGE:,} (gpt2core/arena.py)")
IN_GRADIENT = padding(GRADIENT, " (gpt2core/arena.py)")
IN_UNITS = padding(UNITS, f", and the size of a unit is a multiple of {PAGE:,} p (gpt2core/parallel/sharded/units.py)")
SPEED = (
    "The formula differs from the measurement: small matrices, and all that is no product, are slower than a large "
    "product"
)
SIZES = (
    f"preset tiny ({MODEL.n_layer} layers, C = {MODEL.n_embd}, V = {MODEL.vocab_size}, T = {MODEL.block_size}, "
    f"not tied, fp32)"
)
ON_RANKS = f"{SIZES} on {RANKS} ranks"
QUESTIONS = {
    0: (
        Question("parameters", f"the parameters of {SIZES}", "count", parameters, initialised),
        Question("memory", "the bytes of its parameters, gradients and both moments, with padding", "bytes",
                 arrays_of(0), measured_arrays(0), IN_FLAT),
        Question("tokens", "the tokens per second that it trains here with one thread", "rate", tokens_per_second,
                 trained_tokens, SPEED),
    ),
    1: (
        Question("all_reduce", f"the bytes that a rank sends in a ring all-reduce of the gradient with its padding, "
                 f"{ON_RANKS}", "bytes", all_reduce_bytes, sent_bytes, IN_GRADIENT),
        Question("zero1", "the bytes of parameters, gradients and moments of a rank with ZeRO-1, with padding",
                 "bytes", arrays_of(1), measured_arrays(1), IN_FLAT),
    ),
    2: (
        Question("attention", f"the bytes that plain attention keeps for backward besides q, k, v and y ({HEADS} "
                 f"heads, {LENGTH} tokens, fp32)", "bytes", scores_bytes, kept_by(plain)),
        Question("flash", "the bytes that flash attention keeps for the same, besides q, k, v and y", "bytes",
                 logsumexp_bytes, kept_by(flash)),
    ),
    3: (
        Question("zero3", f"the bytes of the shards of parameters, gradients and moments of a rank with ZeRO-3, "
                 f"with padding, {ON_RANKS}", "bytes", arrays_of(3), measured_arrays(3), IN_UNITS),
        Question("bubble", f"the part of its time that a rank of a pipeline waits (1F1B, {RANKS} ranks, "
                 f"{MICRO_BATCHES} micro-batches, F and B take equal times)", "percent", bubble, simulated_bubble),
    ),
}  # fmt: skip
