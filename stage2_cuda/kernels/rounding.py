"""Stochastic rounding of fp32 to bf16: up or down at random, so that on average nothing is lost.

    the bits of x = 2^16 high + low;  those of its bf16 = (bits + r) / 2^16, rounded down,  r uniform in [0, 2^16)

Then x moves away from zero with probability low / 2^16, its distance from the other neighbour: the mean is x. Random
numbers are a function of a key, which is drawn from seed and step, and of an element's number (Philox 4x32-10, Salmon
et al. 2011): nothing has to be kept, and whoever rounds a part of the arena comes to the same bits.
"""

import numpy as np
import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements of one program


def key_of(seed, step):
    """int64 (1), the key of one step's random numbers, for the device."""
    return np.random.SeedSequence((seed, step)).generate_state(1, np.uint64).view(np.int64)


def round_to_bf16(out, x, key, offset=0):
    """out (n) uint16 = the bits of x (n) float32 as bf16, stochastically rounded; key: key_of() on the device.

    offset: the number of x's first element in its arena, a multiple of 4.
    """
    launch(rounding_kernel, (triton.cdiv(x.size, BLOCK),), out, x, key, offset, x.size, BLOCK=BLOCK, num_warps=4)


@triton.jit
def stochastic_bf16(x, key, offset, BLOCK: tl.constexpr):
    """The bits of x (BLOCK) float32, the elements from number `offset` (int64) on, as bf16 in uint16."""
    a, b, c, d = tl.randint4x(tl.load(key), offset // 4 + tl.arange(0, BLOCK // 4))  # 32 bits for each of 4 neighbours
    r = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)) >> 16
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    r = tl.where(magnitude < 0x7F7F0000, r, 0x8000)  # to nearest, where infinity is next; which stays so
    bits = tl.where(magnitude > 0x7F800000, bits | 0x400000, bits + r)  # NaN must not lose all bits of its fraction
    return (bits >> 16).to(tl.uint16)


@triton.jit
def rounding_kernel(out, x, key, offset, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    tl.store(out + at, stochastic_bf16(tl.load(x + at, at < n, 0), key, offset + start, BLOCK), at < n)
