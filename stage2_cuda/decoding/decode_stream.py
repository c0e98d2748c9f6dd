"""The CUDA stream of text generation: it captures CUDA graphs, uploads inputs, and maps host memory for the tokens."""

import contextlib

import numpy as np

from stage2_cuda.runtime.cuda_graph import CapturedStep, GraphMemory
from stage2_cuda.runtime.static_inputs import empty_pinned


class EagerStream(contextlib.nullcontext):
    """The methods of DecodeStream for Triton's interpreter, on NumPy arrays. Every call completes before it returns."""

    prefill_multiple = 1  # the decoder pads prompts to a multiple of this number of tokens

    def capture(self, function):
        return function

    def compile_ahead(self, step):
        pass

    def upload(self, array, values):
        array[...] = values

    def mapped_array(self, shape, dtype):
        array = np.empty(shape, dtype)
        return array, array

    def record_event(self):
        return lambda: None


class DecodeStream:
    """A CUDA stream. Launches, copies and allocations inside `with stream:` use this stream."""

    prefill_multiple = 64  # so that one captured prefill serves 64 prompt lengths

    def __init__(self, cupy):
        self.cupy, self.stream, self.graph_memory = cupy, cupy.cuda.Stream(non_blocking=True), GraphMemory(cupy)

    def __enter__(self):
        self.cupy.cuda.get_current_stream().synchronize()  # this stream may read what the caller's stream writes
        self.stream.__enter__()

    def __exit__(self, *error):
        self.stream.__exit__(*error)

    def capture(self, function):
        """A callable that runs `function`: directly at the first call, later as a CUDA graph (see CapturedStep)."""
        return CapturedStep(function, stream=self.stream, graph_memory=self.graph_memory)

    def compile_ahead(self, step):
        """Start to compile the kernels of `step`, a result of capture(), in threads. A plain function has none."""
        if isinstance(step, CapturedStep):
            step.compile_ahead()

    def upload(self, array, values):
        """Copy `values` (NumPy) to the device array; converts them to its dtype."""
        array.set(np.ascontiguousarray(values, array.dtype), stream=self.stream)

    def mapped_array(self, shape, dtype):
        """(CuPy array, NumPy array) of the same pinned host memory: kernels write the first, the host reads the second.

        The host needs no copy; it waits for an event (record_event) before it reads.
        """
        host = empty_pinned(self.cupy, shape, dtype)
        memory = self.cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0)), host

    def record_event(self):
        """Record an event; return a function that waits until all work launched before the event has completed."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event.synchronize
