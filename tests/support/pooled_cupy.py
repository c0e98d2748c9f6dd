"""A fake of CuPy whose memory pools split and merge blocks as CuPy's pools do; arrays are never written.

Two training steps of GPT-2 that used 7388 and 2743 MiB on an H200 use the same here, without any computation.
"""

import contextlib
import sys
import weakref
from types import SimpleNamespace

import numpy as np

from gpt2core.arena import round_up

UNIT = 512  # bytes; every allocation is rounded up to a multiple


class Chunk:
    """A part of a block. block: the list of its chunks in address order; free: the pool's dictionary of free chunks."""

    def __init__(self, size, block, free):
        self.size, self.block, self.free = size, block, free

    def release(self):
        """Free the chunk, merged with its free neighbours in the block."""
        at = self.block.index(self)
        start = at - (at > 0 and self.block[at - 1] in self.free)
        stop = at + 1 + (at + 1 < len(self.block) and self.block[at + 1] in self.free)
        for chunk in self.block[start:stop]:
            self.free.pop(chunk, None)
        merged = Chunk(sum(chunk.size for chunk in self.block[start:stop]), self.block, self.free)
        self.block[start:stop] = [merged]
        self.free[merged] = True


class MemoryPool:
    """Best-fit allocation from the free chunks of the current stream; otherwise a new block."""

    def __init__(self, cupy):
        self.cupy, self.total, self.free = cupy, 0, {}

    def malloc(self, size):
        free, size = self.free.setdefault(self.cupy.current, {}), round_up(size, UNIT)
        best = min((chunk for chunk in free if chunk.size >= size), key=lambda chunk: chunk.size, default=None)
        if best is None:
            self.total += size
            best = Chunk(size, [], free)
            best.block.append(best)
        free.pop(best, None)
        if best.size > size:
            rest = Chunk(best.size - size, best.block, free)
            best.block.insert(best.block.index(best) + 1, rest)
            free[rest], best.size = True, size
        return best

    def total_bytes(self):
        return self.total

    def free_all_blocks(self):
        for free in self.free.values():
            for chunk in [
                chunk for chunk in free if len(chunk.block) == 1
            ]:  # a block with several chunks is partly in use
                self.total -= chunk.size
                del free[chunk]


class EmptyArray(np.ndarray):
    """An array that is never written: only its size counts, and the operating system never maps its pages."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))

    def __setitem__(self, key, value):
        pass

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        shape = np.broadcast_shapes(*map(np.shape, inputs))
        dtype = options.get("dtype") or np.result_type(*inputs)
        return out[0] if out else sys.modules["cupy"].empty(shape, dtype)

    def astype(self, dtype, copy=True):
        same = self.dtype == dtype and not copy
        return self if same else sys.modules["cupy"].empty(self.shape, dtype)

    def min(self):
        return 0  # a valid token number

    max = min


class Stream(contextlib.AbstractContextManager):
    def __init__(self, cupy, ptr):
        self.cupy, self.ptr = cupy, ptr

    def __enter__(self):
        self.before, self.cupy.current = self.cupy.current, self

    def __exit__(self, *error):
        self.cupy.current = self.before

    def record(self, event):
        return event

    def synchronize(self, *_):
        pass

    wait_event = begin_capture = synchronize

    def end_capture(self):
        return SimpleNamespace(launch=self.synchronize)


class PooledCupy:
    """The part of CuPy that a training step uses; other attributes are those of NumPy."""

    ndarray = EmptyArray

    def __init__(self):
        self.streams, self.pool = 0, MemoryPool(self)
        self.current, self.malloc = self.stream(), self.pool.malloc
        idle = lambda *_, **__: None  # noqa: E731
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(memcpyAsync=idle, deviceSynchronize=idle, streamCaptureModeRelaxed=0),
            get_current_stream=lambda: self.current,
            Stream=self.stream,
            Event=lambda **_: SimpleNamespace(record=idle, synchronize=idle),
            MemoryPool=lambda: MemoryPool(self),
            using_allocator=self.using_allocator,
            alloc_pinned_memory=bytearray,
        )

    def __getattr__(self, name):
        return getattr(np, name)

    def stream(self, **_):
        self.streams += 1
        return Stream(self, self.streams - 1)

    @contextlib.contextmanager
    def using_allocator(self, malloc):
        before, self.malloc = self.malloc, malloc
        yield
        self.malloc = before

    def get_default_memory_pool(self):
        return self.pool

    def empty(self, shape, dtype):
        memory = np.empty(shape, dtype)
        if self.malloc and memory.nbytes:
            weakref.finalize(memory, self.malloc(memory.nbytes).release)
        return memory.view(EmptyArray)

    def ones(self, shape, dtype):
        return self.empty(shape, dtype)

    def asarray(self, array, dtype=None):
        return array if isinstance(array, EmptyArray) else self.empty(np.shape(array), dtype or array.dtype)

    def ascontiguousarray(self, array):
        assert array.flags.c_contiguous
        return array

    def concatenate(self, arrays):
        return self.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
