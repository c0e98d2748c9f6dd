"""A whole step as one CUDA graph: recorded once, then replayed without Python between its kernels."""

import contextlib
import gc
import weakref

import numpy as np

from gpt2core.runtime import Compiled, Results
from stage2_cuda.runtime.static_inputs import StaticInputs

DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3  # cudaMemcpyKind
ALIGNED = 16  # bytes: each result begins on a multiple


class Workspace:
    """The memory of one recorded step, or of several that never run at the same time: a pool of CuPy's.

    It is released with the last step that uses it. This must be explicit: CuPy's free blocks (version 14) and the pool
    keep each other alive. `kept` lists arrays that live as long as the workspace.
    """

    def __init__(self, cupy):
        self.pool, self.kept = cupy.cuda.MemoryPool(), []
        weakref.finalize(self, release, self.pool, self.kept).atexit = False


def release(pool, kept):
    kept.clear()  # first: a block that is partly in use cannot be freed
    pool.free_all_blocks()


class RecordedStep(Compiled):
    """`function(*args)` as a CUDA graph: the first call runs it, the second records it, later calls replay it.

    The first call compiles kernels and times candidates, which cannot be recorded. Memory that the function allocates
    while it is recorded comes from a Workspace, which lives as long as the graph. No call waits for the device.
    args: see StaticInputs. The function returns a list of arrays or None. record=False: every call runs it.
    stream: where it is recorded and replayed, by default one of its own; each call first waits for the work that the
    caller has on another stream. workspace: shared with steps that never run at the same time. `held_before`: bytes
    that the default pool held when it was emptied for the recording.
    """

    def __init__(self, function, record=True, stream=None, workspace=None):
        import cupy

        super().__init__(function)
        self.cupy, self.record, self.graph, self.inputs = cupy, record, None, None
        self.stream = stream or cupy.cuda.Stream(non_blocking=True)
        self.workspace, self.calls, self.held_before = workspace or Workspace(cupy), 0, 0

    @property
    def can_overlap(self):
        """Whether a call may be made before the Results of the previous call are waited for."""
        return self.graph is not None

    def __call__(self, *args):
        if self.inputs is None:
            self.inputs = StaticInputs(self.cupy, args)
        if self.calls == 0 or not self.record:
            self.inputs.upload(args)
            results = EagerResults(self.cupy, self.function(*self.inputs.arguments) or [])
            self.calls += 1  # not before: a call that failed has not compiled everything
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
                error.add_note("This happened while a step was recorded as a graph: --no-graph trains without one.")
                with contextlib.suppress(cuda.runtime.CUDARuntimeError):  # `error` is the cause
                    self.stream.end_capture()
                raise
            self.graph = self.stream.end_capture()


@contextlib.contextmanager
def no_garbage_collection():
    """Disable garbage collection: during stream capture no memory may be freed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class EagerResults(Results):
    """Arrays of the device that a direct call returned."""

    def __init__(self, cupy, arrays):
        super().__init__(arrays)
        self.cupy = cupy

    def wait(self):
        self.cupy.cuda.runtime.deviceSynchronize()
        return [array.get() for array in self.arrays]


class Readback:
    """The results of a graph: copies of `arrays` in one device buffer, as part of what the stream records.

    copy_async() copies that buffer to one of two pinned host buffers in turn: the host may read one while the next
    replay's results arrive in the other. `kept` gets the device buffer.
    """

    def __init__(self, cupy, stream, arrays, kept):
        import cupyx

        self.copy, self.stream, self.copies = cupy.cuda.runtime.memcpyAsync, stream, 0
        ends = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        size = max(ends[-1], ALIGNED)
        kept.append(cupy.empty(size, np.uint8))
        self.device = kept[-1].data.ptr
        for array, start in zip(arrays, ends, strict=False):
            # memcpyAsync, because CuPy's own copies refuse to run during capture
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
        """Start the copy of the results of the graph that was launched last; returns PinnedResults."""
        buffer, views, event = self.buffers[self.copies % 2]
        self.copies += 1
        if views:
            self.copy(buffer.ctypes.data, self.device, buffer.nbytes, DEVICE_TO_HOST, self.stream.ptr)
        event.record(self.stream)
        return PinnedResults(views, event)


class PinnedResults(Results):
    """Host views of a pinned buffer, valid until the call after the next one."""

    def __init__(self, views, event):
        super().__init__(views)
        self.event = event

    def wait(self):
        self.event.synchronize()
        return self.arrays
