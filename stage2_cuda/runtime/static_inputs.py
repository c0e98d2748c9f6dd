"""The arguments of a captured step: NumPy arrays, copied to fixed addresses on the device, in one transfer per call."""

import numpy as np

ALIGNED = 256  # bytes: every array begins at a multiple of this
HOST_TO_DEVICE = 1  # cudaMemcpyKind


def outside_pool(cupy):
    """A context whose arrays do not come from CuPy's pool: a long-lived array would prevent the reuse of its block."""
    return cupy.cuda.using_allocator(None)


class StaticInputs:
    """Device copies of the NumPy arrays in a tree of arguments, at the same addresses for every call.

    A tree consists of nested tuples (also named tuples) and lists. Leaves that are not NumPy arrays (device arrays,
    constants) are passed unchanged and must be the same in every call. `arguments` is the tree with the device copies
    in place of NumPy arrays.
    """

    def __init__(self, cupy, tree):
        self.cupy, leaves = cupy, flatten(tree)
        arrays = [leaf for leaf in leaves if type(leaf) is np.ndarray]
        ends = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
        self.size, self.copied = ends[-1], cupy.cuda.Event(disable_timing=True)
        if self.size:
            import cupyx

            self.staging = cupyx.empty_pinned(self.size, np.uint8)
            with outside_pool(cupy):
                self.memory = cupy.empty(self.size, np.uint8)
        places = iter(zip(arrays, ends, strict=False))

        def place(leaf):
            """(view of the pinned staging memory or None, the argument of the function) for one leaf."""
            if type(leaf) is not np.ndarray:
                return None, leaf
            array, start = next(places)
            part = slice(start, start + array.nbytes)
            return tuple(memory[part].view(array.dtype).reshape(array.shape) for memory in (self.staging, self.memory))

        self.leaves = [place(leaf) for leaf in leaves]
        self.arguments = unflatten(tree, iter([leaf for _, leaf in self.leaves]))

    def upload(self, tree):
        """Copy the NumPy arrays of `tree` to the device, on the current stream.

        Raises ValueError if a leaf differs from the first call's in more than the values of a NumPy array.
        """
        leaves = flatten(tree)
        self.copied.synchronize()  # wait until the previous copy has read the staging memory
        # number: the index of the leaf among the leaves of all arguments
        for number, (leaf, (staging, kept)) in enumerate(zip(leaves, self.leaves, strict=True)):
            if staging is None:
                if leaf is not kept and not (isinstance(leaf, int | float | str) and leaf == kept):
                    raise ValueError(f"argument {number} was {kept!r:.80} in the first call and is {leaf!r:.80} now")
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
            self.copied.record(stream)


def flatten(tree):
    """The leaves of nested tuples and lists, in order."""
    if isinstance(tree, tuple | list):
        return [leaf for branch in tree for leaf in flatten(branch)]
    return [tree]


def unflatten(tree, leaves):
    """A tree of the same structure whose leaves are the next ones of the iterator `leaves`."""
    if isinstance(tree, tuple | list):
        branches = [unflatten(branch, leaves) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return next(leaves)
