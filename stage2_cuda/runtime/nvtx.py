"""Names in the timeline of a profiler, by NVIDIA's NVTX: forward, backward, optimizer, and the backend's kernels.

annotate() adds the names. The replay of a CUDA graph runs no Python code, so it shows no names: use --no-graph.
"""

import contextlib
import functools

from gpt2core.backend import Backend

KERNEL_SUFFIXES = ("_forward", "_backward", "_cached", "_step", "clip", "sum_of_squares")  # methods with these endings


def annotate(backend, nvtx):
    """Make each kernel method of `backend`, and runtime.range(), show its name in a profiler. nvtx: cupy.cuda.nvtx."""

    @contextlib.contextmanager
    def named_range(name):
        nvtx.RangePush(name)
        try:
            yield
        finally:
            nvtx.RangePop()

    def named(name, method):
        @functools.wraps(method)
        def method_in_range(*arguments, **options):
            with named_range(name):
                return method(*arguments, **options)

        return method_in_range

    backend.runtime.range = named_range
    for name in vars(Backend):
        if name.endswith(KERNEL_SUFFIXES):
            setattr(backend, name, named(name, getattr(backend, name)))
