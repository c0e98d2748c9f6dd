"""The arguments of a captured step. Each call copies the NumPy arrays to the same device addresses, in one transfer.

A CUDA graph stores the addresses that its kernels read, so new data must be copied to these addresses.
"""

import numpy as np

from gpt2core.arena import round_up

ALIGNED = 256  # bytes: each array starts at a multiple of this in the common buffer
HOST_TO_DEVICE = 1  # cudaMemcpyKind


def outside_pool(cupy):
    """A context in which CuPy does not use its memory pool, where a permanent array would divide a large block."""
    return cupy.cuda.using_allocator(None)


def empty_pinned(cupy, shape, dtype):
    """A NumPy array of undefined values in pinned (page-locked) host memory, which the device can copy and map.

    cupyx.empty_pinned() does the same, but `import cupyx` also imports SciPy, if it is installed, which is slow.
    """
    memory = cupy.cuda.alloc_pinned_memory(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.ndarray(shape, dtype, buffer=memory)


class StaticInputs:
    """Device copies of the NumPy arrays in a tree of arguments, at the same addresses for every call.

    A tree is nested tuples (also named tuples) and lists; its leaves are all other objects. A leaf that is not a NumPy
    array (a device array or a constant) is passed unchanged and must be the same in every call. `arguments` is the tree
    with a device copy in place of each NumPy array. The host copies the arrays to a pinned staging buffer; one
    asynchronous transfer then copies this buffer to a device buffer of the same layout.
    """

    def __init__(self, cupy, tree):
        self.cupy, leaves = cupy, flatten(tree)
        arrays = [leaf for leaf in leaves if type(leaf) is np.ndarray]
        # array i starts at byte offsets[i] of both buffers; the last offset is their size
        offsets = np.cumsum([0, *(round_up(array.nbytes, ALIGNED) for array in arrays)]).tolist()
        self.size, self.uploaded = offsets[-1], cupy.cuda.Event(disable_timing=True)
        if self.size:
            self.staging = empty_pinned(cupy, self.size, np.uint8)
            with outside_pool(cupy):
                self.memory = cupy.empty(self.size, np.uint8)
        starts = iter(offsets)

        def static_leaf(leaf):
            """(view of the staging buffer, view of the device buffer) for a NumPy array; otherwise (None, leaf)."""
            if type(leaf) is not np.ndarray:
                return None, leaf
            start = next(starts)
            part = slice(start, start + leaf.nbytes)
            return tuple(buffer[part].view(leaf.dtype).reshape(leaf.shape) for buffer in (self.staging, self.memory))

        self.leaves = [static_leaf(leaf) for leaf in leaves]
        self.arguments = unflatten(tree, iter([argument for _, argument in self.leaves]))

    def upload(self, tree):
        """Copy the NumPy arrays of `tree` to the device, on the current stream.

        `tree` must equal the tree of the first call, except for the values in NumPy arrays; raises ValueError if it
        does not.
        """
        leaves = flatten(tree)
        self.uploaded.synchronize()  # wait until the previous transfer has read the staging buffer
        # number: the index of the leaf among the leaves of all arguments
        for number, (leaf, (staging, old)) in enumerate(zip(leaves, self.leaves, strict=True)):
            if staging is None:  # `old` is the leaf of the first call
                if leaf is not old and not (isinstance(leaf, int | float | str) and leaf == old):
                    raise ValueError(f"argument {number} was {old!r:.80} in the first call and is {leaf!r:.80} now")
            elif leaf.shape != staging.shape or leaf.dtype != staging.dtype:
                raise ValueError(
                    f"argument {number} was {staging.dtype} {staging.shape} in the first call "
                    f"and is {leaf.dtype} {leaf.shape} now"
                )
            else:
                staging[...] = leaf
        if self.size:
            stream = self.cupy.cuda.get_current_stream()
            addresses = self.memory.data.ptr, self.staging.ctypes.data
            self.cupy.cuda.runtime.memcpyAsync(*addresses, self.size, HOST_TO_DEVICE, stream.ptr)
            self.uploaded.record(stream)


def flatten(tree):
    """The leaves of nested tuples and lists, in order."""
    if isinstance(tree, tuple | list):
        return [leaf for branch in tree for leaf in flatten(branch)]
    return [tree]


def unflatten(tree, leaves):
    """A tree with the structure of `tree`, whose leaves are taken from the iterator `leaves`."""
    if isinstance(tree, tuple | list):
        branches = [unflatten(branch, leaves) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return next(leaves)
