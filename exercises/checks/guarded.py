"""An array with NaN before and after it in memory, so that a kernel that reads or writes there is found."""

import numpy as np

GUARD = 64  # elements of NaN before and after an array


def guarded(array):
    """(a copy of a float32 array, contiguous, with NaN before and after it in memory; the flat memory)."""
    array = np.asarray(array, np.float32)
    flat = np.full(array.size + 2 * GUARD, np.nan, np.float32)
    inside = flat[GUARD : GUARD + array.size].reshape(array.shape)
    inside[...] = array
    return inside, flat
