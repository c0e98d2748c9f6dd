"""The CUDA stream of text generation: captures CUDA graphs, uploads inputs, returns tokens in mapped memory."""

import contextlib

import numpy as np

from stage2_cuda.runtime.cuda_graph import CapturedStep, Workspace


class EagerStream(contextlib.nullcontext):
    """The interface of DecodeStream for Triton's interpreter: NumPy arrays; every call completes before it returns."""

    prefill_multiple = 1  # prompts are padded to a multiple of this many tokens

    def capture(self, function):
        return function

    def upload(self, array, values):
        array[...] = values

    def mapped_array(self, shape, dtype):
        array = np.empty(shape, dtype)
        return array, array

    def record_event(self):
        return lambda: None


class DecodeStream:
    """The CUDA stream for the launches, copies and allocations inside `with stream:`."""

    prefill_multiple = 64  # so one captured prefill serves 64 prompt lengths

    def __init__(self, cupy):
        self.cupy, self.stream, self.workspace = cupy, cupy.cuda.Stream(non_blocking=True), Workspace(cupy)

    def __enter__(self):
        self.cupy.cuda.get_current_stream().synchronize()  # complete the caller's work, which this stream may read
        self.outer = self.stream.__enter__()

    def __exit__(self, *error):
        self.stream.__exit__(*error)

    def capture(self, function):
        """A callable that runs `function`: first directly, then as a CUDA graph (see CapturedStep)."""
        return CapturedStep(function, stream=self.stream, workspace=self.workspace)

    def upload(self, array, values):
        array.set(np.ascontiguousarray(values, array.dtype), stream=self.stream)

    def mapped_array(self, shape, dtype):
        """Pinned host memory that kernels can write to: (the device's array, the host's array) of the same memory."""
        import cupyx

        host = cupyx.empty_pinned(shape, dtype)
        memory = self.cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0)), host

    def record_event(self):
        """Record an event; returns a function that waits until the work launched so far has completed."""
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event.synchronize
