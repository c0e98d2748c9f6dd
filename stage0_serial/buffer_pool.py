"""A pool of reusable buffers: a buffer is free as soon as no array refers to its memory."""

import sys

import numpy as np

# Page faults in new memory cost more than the arithmetic on it, so activations are placed in memory that was used
# before. The pool keeps arrays that own memory and returns views of them. Every view, also a view of a view, refers to
# the owner (`base`). CPython counts these references, so the reference count of the owner shows whether any view of its
# memory still exists.

SMALL = 1 << 14  # bytes; smaller arrays need no pool, because malloc reuses small blocks equally fast
ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register


class BufferPool:
    """Arrays in reused memory. Not thread-safe: every worker has its own pool."""

    def __init__(self):
        self.owners = {}  # {size class in bytes: [(array that owns the memory, offset of its first aligned byte)]}
        probe = [(np.empty(0, np.uint8), 0)]
        # The reference count of an owner without views, measured in a loop like that of empty(): the list, the loop
        # variable and the argument of getrefcount() are references too.
        self.count_without_views = next(sys.getrefcount(owner) for owner, _ in probe)

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
            if sys.getrefcount(owner) == self.count_without_views:
                return np.ndarray(shape, dtype, owner, offset)
        owner = np.empty(size + ALIGNMENT, np.uint8)
        offset = -owner.ctypes.data % ALIGNMENT
        owners.append((owner, offset))
        return np.ndarray(shape, dtype, owner, offset)

    @property
    def nbytes(self):
        """The total size of all buffers, in use or free."""
        return sum(size * len(owners) for size, owners in self.owners.items())


def size_class(nbytes):
    """nbytes rounded up to one of at most eight sizes per power of two, so that slowly growing shapes reuse buffers."""
    step = max(SMALL, 1 << max(nbytes.bit_length() - 4, 0))
    return -(-nbytes // step) * step
