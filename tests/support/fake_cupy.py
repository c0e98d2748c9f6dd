"""A fake of CuPy on NumPy arrays: its streams can be captured, and a test sets the duration of each operation."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np


class DeviceArray(np.ndarray):
    """A NumPy array with the attribute data.ptr of a CuPy array."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))

    def get(self):
        """A copy on the host."""
        return np.array(self)


class FakeCupy:
    """The part of CuPy that cublaslt.py, tuner.py and their tests use. `clock` counts the milliseconds of all work."""

    def __init__(self):
        self.allocations, self.waits, self.clock = 0, 0, 0.0
        self.current = self.null = FakeStream(self)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                getDevice=lambda: 0,
                getDeviceProperties=lambda index: {"name": b"Fake GPU"},
                deviceSynchronize=self.wait,
            ),
            get_current_stream=lambda: self.current,
            using_allocator=nullcontext,
            Stream=lambda non_blocking: FakeStream(self),
            Event=lambda: FakeEvent(self),
            get_elapsed_time=lambda start, stop: stop.time - start.time,
        )

    def wait(self):
        self.waits += 1

    def empty(self, shape, dtype):
        self.allocations += 1
        return self.asarray(np.full(shape, 0xFF, np.uint8) if dtype == np.uint8 else np.full(shape, np.nan, dtype))

    def asarray(self, array):
        aligned = np.zeros(array.nbytes + 512, np.uint8)  # CuPy's memory is aligned to 512 bytes
        start = -aligned.ctypes.data % 512
        copy = aligned[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy.view(DeviceArray)

    def asnumpy(self, array):
        return np.array(array)


class FakeStream:
    ptr = 0

    def __init__(self, cupy):
        self.cupy, self.captured = cupy, None

    def __enter__(self):
        self.before, self.cupy.current = self.cupy.current, self
        return self

    def __exit__(self, *error):
        self.cupy.current = self.before

    def is_capturing(self):
        return self.captured is not None

    def begin_capture(self):
        self.captured = []

    def end_capture(self):
        work, self.captured = self.captured, None
        return SimpleNamespace(launch=lambda stream: [run() for run in work])

    def submit(self, run):
        self.captured.append(run) if self.is_capturing() else run()

    def synchronize(self):
        self.cupy.wait()


class FakeEvent:
    def __init__(self, cupy):
        self.cupy = cupy

    def record(self, stream):
        self.time = self.cupy.clock

    def synchronize(self):
        self.cupy.wait()
