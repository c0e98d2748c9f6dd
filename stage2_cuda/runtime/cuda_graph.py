"""A whole step as one CUDA graph: captured once, and then replayed with one launch, without Python between kernels."""

import contextlib
import gc
import weakref

import numpy as np

from gpt2core.arena import round_up
from gpt2core.runtime import Compiled, Results
from stage2_cuda.runtime import triton_launch
from stage2_cuda.runtime.static_inputs import StaticInputs, empty_pinned

DEVICE_TO_HOST, DEVICE_TO_DEVICE = 2, 3  # cudaMemcpyKind
ALIGNED = 16  # bytes: each result starts at a multiple of this in the readback buffers


class GraphMemory:
    """A CuPy memory pool for one captured step, or for several steps that never run at the same time.

    The memory is released when the last step that uses this object is deleted. This needs a finalizer: free blocks and
    their pool refer to each other (CuPy 14), so deleting the pool would not free them. `kept_arrays`: arrays that
    are kept until the memory is released.
    """

    def __init__(self, cupy):
        self.pool, self.kept_arrays = cupy.cuda.MemoryPool(), []
        weakref.finalize(self, release, self.pool, self.kept_arrays).atexit = False


def release(pool, kept_arrays):
    kept_arrays.clear()  # before the next line, because a block that is partly in use cannot be freed
    pool.free_all_blocks()


class CapturedStep(Compiled):
    """`function(*args)` as a CUDA graph, with the same results as a call of the function.

    The first call runs the function: it compiles kernels, in threads, and times candidates, which is not possible
    during stream capture. The second call captures the function as a graph and launches the graph; later calls only
    launch (replay) it. Memory that the function allocates during capture comes from a GraphMemory, which is kept as
    long as the graph. Before a replay the host waits until the previous upload of arguments is done, and until the
    caller's current stream is idle if it is not self.stream. The host does not wait for the results.

    args: see StaticInputs. The function returns a list of arrays or None. capture=False: every call runs the function.
    collectives: see Runtime.compile_step.
    stream: the stream for capture and replays, by default a new one. graph_memory: a GraphMemory to share with steps
    that never run at the same time, by default a new one. `held_before`: bytes in CuPy's default pool just before
    capture() emptied it.
    """

    def __init__(self, function, capture=True, stream=None, graph_memory=None, collectives=False):
        import cupy

        super().__init__(function)
        self.cupy, self.replays, self.graph, self.inputs = cupy, capture, None, None
        self.stream = stream or cupy.cuda.Stream(non_blocking=True)
        self.graph_memory, self.calls, self.held_before = graph_memory or GraphMemory(cupy), 0, 0
        self.compiled_ahead = collectives

    @property
    def can_overlap(self):
        """Whether the next call may be made before the caller waits for the Results of the previous one."""
        return self.graph is not None

    def __call__(self, *args):
        if self.inputs is None:
            self.inputs = StaticInputs(self.cupy, args)
        if self.calls == 0 or not self.replays:
            self.inputs.upload(args)
            self.compile_ahead()
            results = EagerResults(self.cupy, self.function(*self.inputs.arguments) or [])
            self.calls += 1  # not before the function: if it raises, the next call must run it again
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

    def compile_ahead(self, *args):
        """Start to compile the kernels of the function, unless this was done before, or it calls collectives.

        args: those of the first call.
        """
        if not self.compiled_ahead:
            self.compiled_ahead = True
            if self.inputs is None:
                self.inputs = StaticInputs(self.cupy, args)
            triton_launch.compile_ahead(self.function, *self.inputs.arguments)

    def capture(self):
        """Capture the function as self.graph, and the copies of its results as self.readback."""
        cuda, default_pool = self.cupy.cuda, self.cupy.get_default_memory_pool()
        self.held_before = default_pool.total_bytes()
        default_pool.free_all_blocks()  # of the first call; the graph needs the same amount of memory
        with no_garbage_collection(), cuda.using_allocator(self.graph_memory.pool.malloc), self.stream:
            self.stream.begin_capture(cuda.runtime.streamCaptureModeRelaxed)
            try:
                results = self.function(*self.inputs.arguments) or []
                self.readback = Readback(self.cupy, self.stream, results, self.graph_memory.kept_arrays)
            except BaseException as error:
                error.add_note("This happened while a step was captured as a graph: --no-graph trains without one.")
                with contextlib.suppress(cuda.runtime.CUDARuntimeError):  # raise `error` instead, which is the cause
                    self.stream.end_capture()
                raise
            self.graph = self.stream.end_capture()


@contextlib.contextmanager
def no_garbage_collection():
    """A context without Python's garbage collection, which could free device memory: CUDA forbids that in a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class EagerResults(Results):
    """The results of a call that ran the function: device arrays, which wait() copies to the host."""

    def __init__(self, cupy, arrays):
        super().__init__(arrays)
        self.cupy = cupy

    def wait(self):
        self.cupy.cuda.runtime.deviceSynchronize()
        return [array.get() for array in self.arrays]


class Readback:
    """Copies the results of a graph to the host: first inside the graph to one device buffer, then to pinned memory.

    Create this object during capture, so that the graph contains the copies of `arrays`, the results, to the device
    buffer. After each replay copy_async() copies the device buffer to one of two pinned host buffers, in turn: the host
    may read one while the results of the next replay are copied to the other. The device buffer is appended to
    kept_arrays.
    """

    def __init__(self, cupy, stream, arrays, kept_arrays):
        self.copy, self.stream, self.count = cupy.cuda.runtime.memcpyAsync, stream, 0
        # result i starts at byte offsets[i] of a buffer; the last offset is the size of all results
        offsets = np.cumsum([0, *(round_up(array.nbytes, ALIGNED) for array in arrays)]).tolist()
        size = max(offsets[-1], ALIGNED)
        kept_arrays.append(cupy.empty(size, np.uint8))
        self.device_address = kept_arrays[-1].data.ptr
        for array, start in zip(arrays, offsets, strict=False):
            # memcpyAsync, because CuPy's copy methods raise an error during capture
            self.copy(self.device_address + start, array.data.ptr, array.nbytes, DEVICE_TO_DEVICE, stream.ptr)
        self.buffers = []  # two of (pinned buffer, the results as views of it, event after the latest copy to it)
        for _ in range(2):
            buffer = empty_pinned(cupy, size, np.uint8)
            views = [
                buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
                for array, start in zip(arrays, offsets, strict=False)
            ]
            self.buffers.append((buffer, views, cupy.cuda.Event(disable_timing=True)))

    def copy_async(self):
        """Start copying the results of the latest replay to the host; returns PinnedResults."""
        buffer, views, event = self.buffers[self.count % 2]
        self.count += 1
        if views:
            self.copy(buffer.ctypes.data, self.device_address, buffer.nbytes, DEVICE_TO_HOST, self.stream.ptr)
        event.record(self.stream)
        return PinnedResults(views, event)


class PinnedResults(Results):
    """The results of one replay: NumPy views of a pinned buffer. The second replay after this one overwrites them."""

    def __init__(self, views, event):
        super().__init__(views)
        self.event = event

    def wait(self):
        self.event.synchronize()
        return self.arrays
