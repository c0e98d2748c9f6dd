"""Names on a profiler's time line (NVTX): forward, backward, optimizer, and every kernel method of the backend.

Nothing of it is there before annotate() is called, and a step that is replayed from its graph passes no Python at all.
"""

import contextlib
import functools

from gpt2core.backend import Backend

KERNELS = ("_forward", "_backward", "_cached", "_step", "clip", "sum_of_squares")  # how their methods' names end


def annotate(backend, nvtx):
    """Put the methods of this one backend, and its spans, into ranges of `nvtx` (cupy.cuda.nvtx)."""

    @contextlib.contextmanager
    def span(name):
        nvtx.RangePush(name)
        try:
            yield
        finally:
            nvtx.RangePop()

    def named(name, method):
        @functools.wraps(method)
        def inside(*arguments, **options):
            with span(name):
                return method(*arguments, **options)

        return inside

    backend.span = span
    for name in vars(Backend):
        if name.endswith(KERNELS) and name != "compile_step":
            setattr(backend, name, named(name, getattr(backend, name)))
