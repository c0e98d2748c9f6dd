"""Rounding to bf16 computed by NumPy, and a backend of stage 0 whose kernels read such a copy of the parameters."""

import numpy as np

from stage0_serial.numpy_backend import NumpyBackend


def value(bits):
    """The float32 values of bf16 bits (n) uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def philox(key, counters):
    """Philox 4x32-10 (Salmon et al. 2011): counters (n, 4) -> random numbers (n, 4), 32 bits each, in uint64."""
    low, high = key & 0xFFFFFFFF, key >> 32
    c = [column.astype(np.uint64) for column in counters.T]
    for number in range(10):
        k0, k1 = ((word + number * step) & 0xFFFFFFFF for word, step in ((low, 0x9E3779B9), (high, 0xBB67AE85)))
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(second >> 32) ^ c[1] ^ np.uint64(k0), second, (first >> 32) ^ c[3] ^ np.uint64(k1), first]
        c = [word & np.uint64(0xFFFFFFFF) for word in c]
    return np.stack(c, 1)


def oracle_of_key(x, key, offset=0):
    """round_to_bf16(x, key, offset) computed by NumPy; key: of rounding_key()."""
    number = np.arange(offset // 4, (offset + x.size + 3) // 4, dtype=np.uint64)
    counters = np.stack([number & np.uint64(0xFFFFFFFF), number >> np.uint64(32), 0 * number, 0 * number], 1)
    r = philox(int(key.view(np.uint64)[0]), counters).ravel()[: x.size] >> np.uint64(16)
    bits = x.view(np.uint32).astype(np.uint64)
    r = np.where((bits & np.uint64(0x7FFFFFFF)) < 0x7F7F0000, r, 0x8000)
    return np.where(np.isnan(x), bits | np.uint64(0x400000), bits + r).astype(np.uint32) >> 16


class Float32Copy:
    """A dtype that is float32 but not equal to it, so that the Trainer keeps a copy of the parameters."""

    dtype, itemsize = np.dtype(np.float32), 4

    def __eq__(self, other):
        return False

    __hash__ = None


class Rounding(NumpyBackend):
    """Stage 0 with a copy of the parameters that is rounded to bf16 numbers, as the kernel does it."""

    rounds_stochastically = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.compute_dtype = Float32Copy()

    def cast(self, x, out, key=None, offset=0):
        bits = x.view(np.uint32)
        nearest = bits + (0x7FFF + (bits >> 16 & 1)) >> 16
        out[...] = value(nearest if key is None else oracle_of_key(x, key, offset))

    def adamw_step(self, p, *arguments):
        *arguments, copy = arguments
        super().adamw_step(p, *arguments)
        self.cast(p, copy.array, copy.key, copy.offset)
