"""A whole step as one CUDA graph: recorded once, replayed from then on, with no Python between its kernels."""

import contextlib
import gc
import weakref

import numpy as np

DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3  # cudaMemcpyKind
ALIGNED = 16  # bytes: where a result begins


class Workspace:
    """What recorded steps work in, one or several that take turns: a pool of CuPy's, and the arrays that stay there.

    It goes back to the device with the last that has it. By itself it would not: CuPy's free blocks (version 14) and
    the pool that was dropped keep each other.
    """

    def __init__(self, cupy):
        self.pool, self.kept = cupy.cuda.MemoryPool(), []
        weakref.finalize(self, give_back, self.pool, self.kept).atexit = False


def give_back(pool, kept):
    kept.clear()  # first: a block of which something is in use cannot be given back
    pool.free_all_blocks()


class Recorded:
    """`function()` of fixed memory: the first call runs it, the second records it, and every call after replays it.

    The first call compiles kernels and chooses algorithms, none of which can be recorded. What the function allocates
    while it is recorded comes from a Workspace, which lives as long as the graph. No call waits for the device.
    before(): called before each, on the stream that it runs on. stream: where it is recorded and replayed, by default
    one of its own; work that the caller has on another one is waited for. workspace: that of others with which it takes
    turns. `held_before`: bytes that the default pool held when it was emptied for the recording.

    A call returns finish(), which waits for what it began and returns the arrays that function() has in its list, or
    [] for None: host arrays, which the call after the next one overwrites; the first call's are on the device still.
    """

    def __init__(self, function, before=lambda: None, stream=None, workspace=None):
        import cupy

        self.cupy, self.function, self.before, self.graph = cupy, function, before, None
        self.stream = stream or cupy.cuda.Stream(non_blocking=True)
        self.workspace, self.calls, self.held_before = workspace or Workspace(cupy), 0, 0

    @property
    def ahead(self):
        """Whether a call may be made before the finish() of the one before it."""
        return self.graph is not None

    def __call__(self):
        cuda = self.cupy.cuda
        if cuda.get_current_stream().ptr != self.stream.ptr:
            cuda.get_current_stream().synchronize()  # what was uploaded for this call has arrived
        if self.calls == 0:
            self.before()
            results = self.function() or []
            self.calls = 1  # not before: what has failed has not compiled all that a recording needs
            return lambda: results
        self.calls += 1
        if self.graph is None:
            shared = self.cupy.get_default_memory_pool()
            self.held_before = shared.total_bytes()
            shared.free_all_blocks()
            with no_collection(), cuda.using_allocator(self.workspace.pool.malloc), self.stream:
                self.stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
                try:
                    self.results = Results(self.cupy, self.stream, self.function() or [], self.workspace.kept)
                except BaseException as error:
                    error.add_note("This was while a step was recorded as a graph: --no-graph trains without one.")
                    with contextlib.suppress(cuda.runtime.CUDARuntimeError):  # the cause is the one on its way
                        self.stream.end_capture()
                    raise
                self.graph = self.stream.end_capture()
        with self.stream:
            self.before()
        self.graph.launch(self.stream)
        return self.results.bring()


@contextlib.contextmanager
def no_collection():
    """Inside, no garbage is looked for: nobody gives memory back to the device while a stream is recorded."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Results:
    """What a graph leaves: copies of `arrays` side by side on the device, as part of what the stream is recording.

    One more copy brings them home, in turns to one of two places: the host may read from one while the next replay's
    arrive in the other. `kept` has the copies on the device.
    """

    def __init__(self, cupy, stream, arrays, kept):
        import cupyx

        self.copy, self.stream, self.brought = cupy.cuda.runtime.memcpyAsync, stream, 0
        ends = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        size = max(ends[-1], ALIGNED)
        kept.append(cupy.empty(size, np.uint8))
        self.device = kept[-1].data.ptr
        for array, at in zip(arrays, ends, strict=False):
            # not CuPy's copies, which refuse while it records, as they would with pages on the host that can move
            self.copy(self.device + at, array.data.ptr, array.nbytes, DEVICE_TO_DEVICE, stream.ptr)
        self.homes = []
        for _ in range(2):
            home = cupyx.empty_pinned(size, np.uint8)
            views = [
                home[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
                for array, at in zip(arrays, ends, strict=False)
            ]
            self.homes.append((home, views, cupy.cuda.Event(disable_timing=True)))

    def bring(self):
        """Copy what the device is about to have; returns what waits for it."""
        home, views, here = self.homes[self.brought % 2]
        self.brought += 1
        if views:
            self.copy(home.ctypes.data, self.device, home.nbytes, DEVICE_TO_HOST, self.stream.ptr)
        here.record(self.stream)

        def finish():
            here.synchronize()
            return views

        return finish
