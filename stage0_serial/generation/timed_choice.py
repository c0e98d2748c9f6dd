"""The fastest of several ways to compute the same: timed when it is first needed, and kept in a file for later runs.

In stages 0 and 1 only generation chooses by timing. A choice can change the last bits of logits, but no training curve.
"""

import time

import numpy as np
import threadpoolctl

from gpt2core.tuned_choices import cache_directory, cache_file, processor, read_choices, write_choices


def stored_choice(what, names, time_ways):
    """One of `names`: from the file, or the result of time_ways(), which is then added to the file.

    what: the name of the choice in the file; it states all that the choice depends on, except the CPU and the versions
    of NumPy and of the libraries for matrix products.
    """
    directory = cache_directory()
    tuned_for = f"{processor()}, {blas_version()}, NumPy {np.__version__}"
    file = directory and cache_file(directory, tuned_for)
    name = read_choices(file, tuned_for).get(what) if file else None
    if name not in names:
        name = time_ways()
        if file:
            write_choices(file, tuned_for, {what: name})
    return name


def fastest_way(ways, seconds):
    """The name of the way whose shortest call takes the least time. ways: {name: function without arguments}.

    A way is called until `seconds` have passed, at least once. Its first calls may be slow, because BLAS threads of the
    previous way still wait in a busy loop.
    """
    times = {}
    for name, way in ways.items():
        end, calls = time.perf_counter() + seconds, []
        while not calls or time.perf_counter() < end:
            start = time.perf_counter()
            way()
            calls.append(time.perf_counter() - start)
        times[name] = min(calls)
    return min(times, key=times.get)


def blas_version():
    """The name, version and kernels of NumPy's BLAS library."""
    for library in threadpoolctl.threadpool_info():
        if library["user_api"] == "blas" and library["internal_api"] != "mkl":
            return f"{library['internal_api']} {library['version']} {library.get('architecture', '')}".strip()
    return "unknown BLAS"
