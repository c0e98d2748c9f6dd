"""A whole step as one CUDA graph: recorded once, replayed from then on, with no Python between its kernels."""

import contextlib

DEVICE_TO_HOST = 2  # cudaMemcpyKind


class Recorded:
    """`function()` of fixed memory: the first call runs it, the second records it, and every call after replays it.

    The first call compiles kernels and chooses algorithms, none of which can be recorded. What the function allocates
    while it is recorded comes from a pool of its own, which lives as long as the graph. No call waits for the device.
    before(): called before each, on the stream that it runs on. stream: where it is recorded and replayed, by default
    one of its own; work that the caller has on another one is waited for. `held_before`: bytes that the default pool
    held when it was emptied for the recording.

    The results, arrays in lists and tuples, are copied to the host as part of the graph: host arrays, to be read once
    the device is done, and overwritten by the next call. Those of the first call are on the device still.
    """

    def __init__(self, function, before=lambda: None, stream=None):
        import cupy
        import cupyx

        self.pinned = cupyx.empty_pinned
        self.cupy, self.function, self.before, self.graph = cupy, function, before, None
        self.stream = stream or cupy.cuda.Stream(non_blocking=True)
        self.pool, self.calls, self.held_before = cupy.cuda.MemoryPool(), 0, 0

    def __call__(self):
        self.calls += 1
        cuda = self.cupy.cuda
        if cuda.get_current_stream().ptr != self.stream.ptr:
            cuda.get_current_stream().synchronize()  # what was uploaded for this call has arrived
        if self.calls == 1:
            self.before()
            return self.function()
        if self.graph is None:
            shared = self.cupy.get_default_memory_pool()
            self.held_before = shared.total_bytes()
            shared.free_all_blocks()
            with cuda.using_allocator(self.pool.malloc), self.stream:
                self.stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
                try:
                    self.results = self.to_host(self.function())
                except BaseException as error:
                    error.add_note("This was while a step was recorded as a graph: --no-graph trains without one.")
                    with contextlib.suppress(cuda.runtime.CUDARuntimeError):  # the cause is the one on its way
                        self.stream.end_capture()
                    raise
                self.graph = self.stream.end_capture()
        with self.stream:
            self.before()
        self.graph.launch(self.stream)
        return self.results

    def to_host(self, results):
        """The same lists and tuples of host arrays, to which the current stream copies."""
        if results is None:
            return None
        if isinstance(results, (list, tuple)):
            return type(results)(map(self.to_host, results))
        host = self.pinned(results.shape, results.dtype)
        stream = self.cupy.cuda.get_current_stream().ptr
        # not get(), which CuPy refuses while it records, as pages that move could not be read later: these do not
        self.cupy.cuda.runtime.memcpyAsync(host.ctypes.data, results.data.ptr, host.nbytes, DEVICE_TO_HOST, stream)
        return host
