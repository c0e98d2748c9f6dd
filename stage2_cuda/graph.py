"""A whole training step as one CUDA graph: recorded once, replayed from then on, with no Python between its kernels."""

import contextlib


class Recorded:
    """`function()` of fixed memory: the first call runs it, the second records it, and every call after replays it.

    The first call compiles kernels and chooses algorithms, none of which can be recorded. What the function allocates
    while it is recorded comes from a pool of its own, which lives as long as the graph; its results are overwritten by
    the next call. `held_before`: bytes that the default pool held when it was emptied for that.
    """

    def __init__(self, function):
        import cupy

        self.cupy, self.function, self.graph = cupy, function, None
        self.stream, self.pool, self.calls = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool(), 0
        self.held_before = 0

    def __call__(self):
        self.calls += 1
        cuda = self.cupy.cuda
        cuda.get_current_stream().synchronize()  # what was uploaded for this call has arrived
        if self.calls == 1:
            return self.function()
        if self.graph is None:
            shared = self.cupy.get_default_memory_pool()
            self.held_before = shared.total_bytes()
            shared.free_all_blocks()
            with cuda.using_allocator(self.pool.malloc), self.stream:
                self.stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
                try:
                    self.results = self.function()
                except BaseException as error:
                    error.add_note("This was while the step was recorded as a graph: --no-graph runs it without one.")
                    with contextlib.suppress(cuda.runtime.CUDARuntimeError):  # the cause is the one on its way
                        self.stream.end_capture()
                    raise
                self.graph = self.stream.end_capture()
        self.graph.launch(self.stream)
        self.stream.synchronize()
        return self.results
