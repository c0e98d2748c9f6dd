"""Names in the timeline of a profiler, by NVIDIA's NVTX: forward, backward, optimizer, and the backend's kernels.

annotate() adds the names. The replay of a CUDA graph runs no Python code, so it shows no names: use --no-graph.
"""

import contextlib

from gpt2core.tracing.hooks import Hooks, around_gradients


def annotate(backend, nvtx):
    """Make each kernel method of `backend`, and runtime.range(), show its name in a profiler. nvtx: cupy.cuda.nvtx."""

    @contextlib.contextmanager
    def named_range(name):
        nvtx.RangePush(name)
        try:
            yield
        finally:
            nvtx.RangePop()

    def in_range(name, kernel, arguments, options):
        def call(function, *arguments, **options):
            with named_range(name):
                return function(*arguments, **options)

        return around_gradients(call(kernel, *arguments, **options), call)

    backend.runtime.range = named_range
    Hooks().around_kernels(backend, in_range)
