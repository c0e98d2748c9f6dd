"""The fastest of several ways to compute the same: timed when it is first needed, and kept in a file for later runs.

Only generation chooses by timing. A choice can change the last bits of logits, but no training curve.
"""

import itertools
import time

import numpy as np
import threadpoolctl

from gpt2core.parallel.tuned_choices import cache_directory, cache_file, processor, read_choices, write_choices


def choose(what, ways, time_ways):
    """The name of one of the `ways`: from the file, or time_ways(ways), whose result is added to the file.

    what: the name of the choice in the file; it states all that the choice depends on, except the CPU and the versions
    of NumPy and its BLAS. ways: {name: function}.
    """
    directory = cache_directory()
    tuned_for = f"{processor()}, {blas_version()}, NumPy {np.__version__}"
    file = directory and cache_file(directory, tuned_for)
    name = read_choices(file, tuned_for).get(what) if file else None
    if name not in ways:
        name = time_ways(ways)
        if file:
            write_choices(file, tuned_for, {what: name})
    return name


def fastest(ways, rounds=1, seconds=0):
    """The name of the way whose shortest call takes the least time.

    In each round a way is called at least twice in a row, and at least for so many seconds: during the first calls,
    BLAS threads of the previous way may still wait in a busy loop and use the cores.
    """
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            for call in itertools.count():
                start = time.perf_counter()
                if call >= 2 and start - began >= seconds:
                    break
                way()
                times[name].append(time.perf_counter() - start)
    return min(ways, key=lambda name: min(times[name]))


def blas_version():
    """The name, version and kernels of NumPy's BLAS library."""
    for library in threadpoolctl.threadpool_info():
        if library["user_api"] == "blas" and library["internal_api"] != "mkl":
            return f"{library['internal_api']} {library['version']} {library.get('architecture', '')}".strip()
    return "unknown BLAS"
