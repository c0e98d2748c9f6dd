"""Refuse a model that cannot fit into the memory of this host: Linux would kill the process without a message.

The library psutil is not used: it does not read the limits of control groups, which a container or a batch job has.
"""

import collections
import contextlib
import math
import os
from pathlib import Path

import numpy as np

from gpt2core.architecture import parameter_count, parameter_shapes, unit_of
from gpt2core.errors import ConfigError
from gpt2core.parallel.pipeline.placement import ranks_of_parameters


def check_host_memory(stage, backends, config, world, replicas, limit=None):
    """Raise ConfigError if the memory of this host is smaller than needed_memory(); a GPU has memory of its own.

    stage: a Stage. backends: those of this rank, one per thread. config: a RunConfig. replicas: the number of
    data-parallel ranks. limit: the bytes that the ranks on this host may use together; None: available_memory().
    """
    if not backends[0].on_host:
        return
    limit = available_memory() if limit is None else limit
    needed = needed_memory(config.model, config.parallel, len(backends), world.local_size, replicas)
    if needed > limit:
        threads = ", fewer --threads" * (len(backends) > 1)
        raise ConfigError(
            f"a model of {parameter_count(config.model):,} parameters needs at least {gib(needed)} on this host for "
            f"parameters, gradients and moments, but the host has {gib(limit)}: use a smaller model{threads}, or "
            f"more hosts with --tp or --zero 3 ({stage.many_ranks})"
        )


def needed_memory(config, parallel, threads, local_ranks, replicas):
    """A lower bound of the bytes that training allocates on one host; activations are not counted.

    config: GPT2Config. parallel: ParallelConfig. threads: of each rank; each has a sum of gradients. local_ranks: the
    ranks on this host. replicas: the number of data-parallel ranks, which divide the moments with --zero 1, also the
    gradients with 2, and also the parameters with 3. With 2 and 3, the shards of all four are in memory, and besides
    them whole parameters of the model (2) or of one unit (3), and in each thread whole gradients of one unit.
    """
    part, unit = smallest_part(config, parallel) // parallel.tp, largest_unit(config) // parallel.tp
    return int(local_ranks * sum(array_terms(part, unit, parallel, threads, replicas).values()))


def array_terms(part, unit, parallel, threads, replicas):
    """{term: bytes} of the flat arrays of a rank; the arguments after the first two are those of needed_memory().

    part, unit: the parameters that the rank would store without ZeRO, and those of the largest unit.
    """
    if parallel.zero < 2:
        moments = 2 * part / (replicas if parallel.zero else 1)
        numbers = {"parameters": part, "gradients": threads * part, "moments": moments}
    else:
        numbers = {
            "shards of parameters, gradients and moments": 4 * part / replicas,
            "whole parameters": part if parallel.zero == 2 else unit,
            "whole gradients": threads * unit,
        }
    return {term: count * np.dtype(np.float32).itemsize for term, count in numbers.items()}


def smallest_part(config, parallel):
    """The smallest number of parameters of a rank of the pipeline; of the model if there is none."""
    placement, counts = ranks_of_parameters(config, parallel.pp, parallel.chunks), [0] * parallel.pp
    for name, shape in parameter_shapes(config):
        counts[placement[name]] += math.prod(shape)
    return min(counts)


def largest_unit(config):
    """The largest number of parameters of a unit of the model."""
    counts = collections.Counter()
    for name, shape in parameter_shapes(config):
        counts[unit_of(name)] += math.prod(shape)
    return max(counts.values())


def available_memory(cgroup=Path("/proc/self/cgroup"), mount=Path("/sys/fs/cgroup")):
    """The bytes that this process may use: the memory, or the limit of its control groups if that is lower, and swap.

    cgroup, mount: the file with the control groups of this process, and the directory with their limits.
    """
    memory, swap = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                swap = int(line.split()[1]) << 10
    return min([memory, *control_group_limits(cgroup, mount)]) + swap


def control_group_limits(cgroup, mount):
    """Yield the memory limits, in bytes, of the control groups of this process and of the groups that contain them."""
    lines = []
    with contextlib.suppress(OSError):  # there is none on macOS
        lines = cgroup.read_text().splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):  # version 2 has one list of groups, version 1 one for each controller
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            group = mount / controllers / path.lstrip("/")
            for directory in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # there is no such file, or its content is "max"
                    yield int((directory / name).read_text())


def gib(count):
    """A number of bytes as text in GiB."""
    return f"{count / 2**30:.1f} GiB"
