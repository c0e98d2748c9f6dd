"""Names in a profiler's timeline (NVTX): forward, backward, optimizer, and the kernel methods of the backend.

annotate() adds the names. The replay of a CUDA graph runs no Python, so it shows no names: use --no-graph.
"""

import contextlib
import functools

from gpt2core.backend import Backend

KERNELS = ("_forward", "_backward", "_cached", "_step", "clip", "sum_of_squares")  # ends of the kernel methods' names


def annotate(backend, nvtx):
    """Open an `nvtx` range (cupy.cuda.nvtx) in each kernel method of this backend and in its runtime's range()."""

    @contextlib.contextmanager
    def named_range(name):
        nvtx.RangePush(name)
        try:
            yield
        finally:
            nvtx.RangePop()

    def named(name, method):
        @functools.wraps(method)
        def inside(*arguments, **options):
            with named_range(name):
                return method(*arguments, **options)

        return inside

    backend.runtime.range = named_range
    for name in vars(Backend):
        if name.endswith(KERNELS):
            setattr(backend, name, named(name, getattr(backend, name)))
