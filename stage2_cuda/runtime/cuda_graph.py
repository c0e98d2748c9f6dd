"""A whole step as one CUDA graph: captured once, then replayed without Python between its kernels."""

import contextlib
import gc
import weakref

import numpy as np

from gpt2core.runtime import Compiled, Results
from stage2_cuda.runtime.static_inputs import StaticInputs

DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3  # cudaMemcpyKind
ALIGNED = 16  # bytes: each result begins on a multiple


class Workspace:
    """A CuPy memory pool for one captured step, or for several steps that never run at the same time.

    Its memory is released when the last step that uses it is deleted. A finalizer releases it, because free blocks and
    the pool refer to each other (CuPy 14). `kept` lists arrays that live as long as the workspace.
    """

    def __init__(self, cupy):
        self.pool, self.kept = cupy.cuda.MemoryPool(), []
        weakref.finalize(self, release, self.pool, self.kept).atexit = False


def release(pool, kept):
    kept.clear()  # first: a block that is partly in use cannot be freed
    pool.free_all_blocks()


class CapturedStep(Compiled):
    """`function(*args)` as a CUDA graph: the first call runs it, the second captures it, later calls replay it.

    The first call compiles kernels and times candidates, which is not possible during stream capture. Memory that the
    function allocates during capture comes from a Workspace, which lives as long as the graph. A replay waits for the
    previous upload of arguments and for earlier work on the caller's stream if that is another stream. It does not wait
    for its own results.

    args: see StaticInputs. The function returns a list of arrays or None. capture=False: every call runs the function.
    stream: the stream for capture and replays, by default a new one. workspace: a Workspace to share with steps that
    never run at the same time. `held_before`: bytes that the default pool held just before capture() emptied it.
    """

    def __init__(self, function, capture=True, stream=None, workspace=None):
        import cupy

        super().__init__(function)
        self.cupy, self.captures, self.graph, self.inputs = cupy, capture, None, None
        self.stream = stream or cupy.cuda.Stream(non_blocking=True)
        self.workspace, self.calls, self.held_before = workspace or Workspace(cupy), 0, 0

    @property
    def can_overlap(self):
        """Whether the next call may be made before the caller waits for the Results of the previous one."""
        return self.graph is not None

    def __call__(self, *args):
        if self.inputs is None:
            self.inputs = StaticInputs(self.cupy, args)
        if self.calls == 0 or not self.captures:
            self.inputs.upload(args)
            results = EagerResults(self.cupy, self.function(*self.inputs.arguments) or [])
            self.calls += 1  # after the function: if it raises, the next call must run it again
            return results
        current = self.cupy.cuda.get_current_stream()
        if current.ptr != self.stream.ptr:
            current.synchronize()
        self.calls += 1
        if self.graph is None:
            self.capture()
        with self.stream:
            self.inputs.upload(args)
        self.graph.launch(self.stream)
        return self.readback.copy_async()

    def capture(self):
        cuda, shared = self.cupy.cuda, self.cupy.get_default_memory_pool()
        self.held_before = shared.total_bytes()
        shared.free_all_blocks()
        with no_garbage_collection(), cuda.using_allocator(self.workspace.pool.malloc), self.stream:
            self.stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
            try:
                results = self.function(*self.inputs.arguments) or []
                self.readback = Readback(self.cupy, self.stream, results, self.workspace.kept)
            except BaseException as error:
                error.add_note("This happened while a step was captured as a graph: --no-graph trains without one.")
                with contextlib.suppress(cuda.runtime.CUDARuntimeError):  # `error` is the cause
                    self.stream.end_capture()
                raise
            self.graph = self.stream.end_capture()


@contextlib.contextmanager
def no_garbage_collection():
    """Disable garbage collection, because it could free memory during stream capture, which is not allowed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class EagerResults(Results):
    """The results of a call that was not replayed from a graph: device arrays, copied to the host by wait()."""

    def __init__(self, cupy, arrays):
        super().__init__(arrays)
        self.cupy = cupy

    def wait(self):
        self.cupy.cuda.runtime.deviceSynchronize()
        return [array.get() for array in self.arrays]


class Readback:
    """The results of a graph: every replay copies `arrays` into one device buffer.

    Create it during capture, so that the graph contains these copies. copy_async() copies the device buffer to two
    pinned host buffers in turn: the host may read one while the results of the next replay are copied to the other. The
    device buffer is appended to `kept`.
    """

    def __init__(self, cupy, stream, arrays, kept):
        import cupyx

        self.copy, self.stream, self.copies = cupy.cuda.runtime.memcpyAsync, stream, 0
        ends = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        size = max(ends[-1], ALIGNED)
        kept.append(cupy.empty(size, np.uint8))
        self.device = kept[-1].data.ptr
        for array, start in zip(arrays, ends, strict=False):
            # memcpyAsync, because CuPy's copy methods raise an error during capture
            self.copy(self.device + start, array.data.ptr, array.nbytes, DEVICE_TO_DEVICE, stream.ptr)
        self.buffers = []
        for _ in range(2):
            buffer = cupyx.empty_pinned(size, np.uint8)
            views = [
                buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
                for array, start in zip(arrays, ends, strict=False)
            ]
            self.buffers.append((buffer, views, cupy.cuda.Event(disable_timing=True)))

    def copy_async(self):
        """Start copying the results of the latest replay to the host; returns PinnedResults."""
        buffer, views, event = self.buffers[self.copies % 2]
        self.copies += 1
        if views:
            self.copy(buffer.ctypes.data, self.device, buffer.nbytes, DEVICE_TO_HOST, self.stream.ptr)
        event.record(self.stream)
        return PinnedResults(views, event)


class PinnedResults(Results):
    """Host views of a pinned buffer. The second call after the one that returned them overwrites the buffer."""

    def __init__(self, views, event):
        super().__init__(views)
        self.event = event

    def wait(self):
        self.event.synchronize()
        return self.arrays
