"""List the layouts of a model on a number of ranks, with the predicted memory and time of each; choose the fastest."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from gpt2core.app.planning.layout import FP32, Layout
from gpt2core.app.planning.memory import device_terms, host_terms
from gpt2core.app.planning.step_time import step_seconds
from gpt2core.errors import ConfigError
from gpt2core.memory.gpu import BYTES, MARGIN
from gpt2core.parallel.config import RECOMPUTE, ZERO, ParallelConfig
from gpt2core.parallel.mesh import Grid
from gpt2core.parallel.micro_batches.merged import most_merged
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.tensor.shards import check_tensor_parallel

MOST_PASSES = 64  # micro-batches of a replica


@dataclass(frozen=True)
class Estimate:
    """A Layout with its predictions. memory: bytes of the rank that needs most. seconds: {term: seconds} of a step."""

    layout: Layout
    memory: int
    seconds: dict

    @property
    def total(self):
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Devices:
    """What trains: `count` ranks with `memory` bytes each. on_host: whether they are CPU ranks."""

    count: int
    memory: float
    on_host: bool
    precision: str

    @property
    def backend(self):
        """The attributes that the checks of a layout read from a backend."""
        name, dtype = "numpy" if self.on_host else "a GPU", np.dtype(np.float32)
        return SimpleNamespace(
            on_host=self.on_host, name=name, dtype=dtype, compute_dtype=dtype, precision=self.precision
        )


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(config, devices, batch_size, seq_len):
    """Yield every Layout that training accepts; raises ConfigError, the first one of a check, if there is none."""
    errors, found = [], False
    for tp, pp in itertools.product(divisors(devices.count), repeat=2):
        if devices.count % (tp * pp):
            continue
        for options in options_of(tp, pp, devices.count // (tp * pp)):
            try:
                parallel = ParallelConfig(tp=tp, pp=pp, **options)
                each = list(divided(config, parallel, devices, batch_size, seq_len))
            except ConfigError as error:
                errors.append(error)
                break
            found = found or bool(each)
            yield from each
    if not found:
        raise errors[0] if errors else ConfigError(f"`batch_size={batch_size}` cannot be divided: use another one")


def options_of(tp, pp, replicas):
    """Yield the other options of a ParallelConfig that make a difference."""
    schedules = [("1f1b", 1)] if pp == 1 else [(name, 2 if name == "interleaved" else 1) for name in SCHEDULES]
    zeros = [0] if replicas == 1 else ZERO
    for recompute, zero, (name, chunks) in itertools.product(RECOMPUTE, zeros, schedules):
        yield dict(recompute=recompute, zero=zero, pp_schedule=name, chunks=chunks)


def divided(config, parallel, devices, batch_size, seq_len):
    """Yield the Layouts with this ParallelConfig: one for each number of micro-batches.

    Raises ConfigError if the sizes of the model or the batch do not fit; a combination that is refused gives none.
    """
    replicas = devices.count // (parallel.tp * parallel.pp)
    check_tensor_parallel(config, parallel.tp)
    if batch_size % replicas:
        nearest = max(1, round(batch_size / replicas)) * replicas
        raise ConfigError(
            f"`batch_size={batch_size}` is not divisible by {replicas} data-parallel ranks: use `batch_size={nearest}`"
        )
    if config.n_layer < parallel.pp:
        raise ConfigError(f"`n_layer={config.n_layer}` is less than `pp={parallel.pp}`: use fewer ranks")
    rows, bytes_of_number = batch_size // replicas, FP32 if devices.on_host else BYTES[devices.precision]
    for count in (1 << i for i in range(MOST_PASSES.bit_length())):
        if rows % count:
            continue
        try:
            parallel.check_run(config, 1, count, replicas)
        except ConfigError:
            continue
        merged = 1
        if devices.on_host and parallel.pp == 1:
            merged = most_merged(config, 1, count, (rows, seq_len), FP32)
        yield Layout(
            config, parallel, batch_size, seq_len, count * replicas, replicas, merged, 1, bytes_of_number
        )  # fmt: skip


def estimate(layout, devices, machine):
    """The Estimate of a Layout."""
    if devices.on_host:
        memory = max(sum(host_terms(layout, Grid(pipeline=r)).values()) for r in range(layout.parallel.pp))
    else:
        ranks = device_terms(layout, devices.precision, in_order=False)
        memory = int(MARGIN * max(sum(terms.values()) for terms in ranks))
    return Estimate(layout, memory, step_seconds(layout, machine))


def estimates(config, devices, machine, batch_size, seq_len):
    """([the Estimates that fit into the memory, the fastest first], the number of all, the least memory of all)."""
    every = [estimate(layout, devices, machine) for layout in layouts(config, devices, batch_size, seq_len)]
    fitting = [each for each in every if each.memory <= devices.memory]
    return sorted(fitting, key=preference), len(every), min(each.memory for each in every)


def preference(each):
    """The order of Estimates: by time; of equal ones, the one with less memory, then with fewer options."""
    parallel = each.layout.parallel
    return each.total, each.memory, parallel.zero, parallel.pp_schedule
