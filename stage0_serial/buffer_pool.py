"""Memory that comes back by itself: a buffer is free again when no array that looks into it is alive."""

import sys

import numpy as np

# Page faults on fresh memory cost more than the arithmetic on it, so activations must live in memory that was used
# before. NumPy makes every view of a view point at the one array that owns the memory, and CPython counts those
# references: asking for the count replaces any bookkeeping of who is done with what.

SMALL = 1 << 14  # bytes; below this malloc's own free lists are as good
ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register


class BufferPool:
    """Arrays over recycled memory. Not shared between threads: every lane has its own."""

    def __init__(self):
        self.owners = {}  # size class in bytes -> [(array that owns that much memory, offset of its first cache line)]
        probe = [(np.empty(0, np.uint8), 0)]
        self.unused = next(sys.getrefcount(owner) for owner, _ in probe)  # the count where nobody looks into it

    def empty(self, shape, dtype):
        """An uninitialised, aligned, C-contiguous array of `shape`."""
        dtype = np.dtype(dtype)
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        if nbytes < SMALL:
            return np.empty(shape, dtype)
        size = size_class(nbytes)
        owners = self.owners.setdefault(size, [])
        for owner, offset in owners:
            if sys.getrefcount(owner) == self.unused:
                return np.ndarray(shape, dtype, owner, offset)
        owner = np.empty(size + ALIGNMENT, np.uint8)
        offset = -owner.ctypes.data % ALIGNMENT
        owners.append((owner, offset))
        return np.ndarray(shape, dtype, owner, offset)

    @property
    def nbytes(self):
        """Bytes held, used and unused."""
        return sum(size * len(owners) for size, owners in self.owners.items())


def size_class(nbytes):
    """nbytes rounded up to one of eight steps between powers of two, so that growing shapes reuse buffers too."""
    step = max(SMALL, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step
