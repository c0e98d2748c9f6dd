"""Names in a profiler's timeline (NVTX): forward, backward, optimizer, and every kernel method of the backend.

annotate() adds them; without it nothing is added. A step that is replayed from its graph runs no Python, so it shows
no names.
"""

import contextlib
import functools

from gpt2core.backend import Backend

KERNELS = (
    "_forward",
    "_backward",
    "_cached",
    "_step",
    "clip",
    "sum_of_squares",
)  # how kernel methods' names end


def annotate(backend, nvtx):
    """Put the kernel methods of this backend, and its runtime's ranges, into ranges of `nvtx` (cupy.cuda.nvtx)."""

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
