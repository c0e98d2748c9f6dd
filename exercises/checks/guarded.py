"""Find a kernel that loads or writes outside its arrays: NaN before and after an array, and a test of each address."""

import contextlib
from unittest import mock

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

from exercises.compare import Mismatch

GUARD = 64  # elements of NaN before and after an array


def guarded(array):
    """(a copy of a float32 array, contiguous, with NaN before and after it in memory; the flat memory)."""
    array = np.asarray(array, np.float32)
    flat = np.full(array.size + 2 * GUARD, np.nan, np.float32)
    inside = flat[GUARD : GUARD + array.size].reshape(array.shape)
    inside[...] = array
    return inside, flat


@contextlib.contextmanager
def loads_only(name, array, hint):
    """A context in which a kernel in Triton's interpreter may load only elements of `array`, which is contiguous.

    Any other load raises Mismatch with `hint` before it is executed. A load whose mask is false is allowed everywhere.
    """
    first, load = array.ctypes.data, InterpreterBuilder.create_masked_load

    def checked_load(builder, pointers, mask, *rest):
        addresses = np.ravel(pointers.data)[np.ravel(mask.data).astype(bool)].astype(np.int64)
        outside = addresses[(addresses < first) | (addresses >= first + array.nbytes)]
        if outside.size:
            index = (int(outside[0]) - first) // array.itemsize
            place = f"{-index} elements before the first" if index < 0 else f"{index - array.size + 1} after the last"
            raise Mismatch(f"tl.load reads outside {name} {array.shape}: {place} element", hint)
        return load(builder, pointers, mask, *rest)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", checked_load):
        yield
