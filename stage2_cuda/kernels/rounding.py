"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the expected result equals the input.

    bits(x) = 2^16 high + low;  bits(bf16(x)) = floor((bits(x) + r) / 2^16),  r uniform in [0, 2^16)

The bits of a bfloat16 number are the upper 16 bits of a float32. x is rounded away from zero with probability
low / 2^16, so the mean of the results is x. The random numbers come from a counter-based generator (Philox 4x32-10,
Salmon et al. 2011). They depend only on a key, which is derived from the run's seed and the step, and on the index of
the element in the arena (the flat buffer of all parameters). Therefore no generator state is stored, and the result
does not depend on how the arena is divided over ranks.
"""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements per program


def round_to_bf16(out, x, philox_key, offset=0):
    """out (n) uint16 = the bits of x (n) float32, stochastically rounded to bfloat16.

    philox_key (1) int64: rounding_key() of gpt2core, on the device. offset: the arena index of x[0], a multiple
    of 4.
    """
    grid = (triton.cdiv(x.size, BLOCK),)
    launch(rounding_kernel, grid, out, x, philox_key, offset, x.size, BLOCK=BLOCK, num_warps=4)


@triton.jit
def stochastic_bf16(x, philox_key_ptr, offset, BLOCK: tl.constexpr):
    """The bits (BLOCK) uint16 of x (BLOCK) float32 rounded to bfloat16. offset: the arena index (int64) of x[0]."""
    # one Philox call gives four 32-bit numbers r0 to r3, for four consecutive elements; interleaving puts them in order
    r0, r1, r2, r3 = tl.randint4x(tl.load(philox_key_ptr), offset // 4 + tl.arange(0, BLOCK // 4))
    r = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3)) >> 16
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # from the largest finite bf16 on, round to nearest (r = 2^15), which also keeps infinity unchanged
    r = tl.where(magnitude < 0x7F7F0000, r, 0x8000)
    # NaN has a magnitude above that of infinity; it stays NaN, because its quiet bit is set
    bits = tl.where(magnitude > 0x7F800000, bits | 0x400000, bits + r)
    return (bits >> 16).to(tl.uint16)


@triton.jit
def rounding_kernel(out_ptr, x_ptr, philox_key_ptr, offset, n, BLOCK: tl.constexpr):
    """Grid (n / BLOCK): each program rounds BLOCK elements."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    mask = offs < n
    rounded = stochastic_bf16(tl.load(x_ptr + offs, mask, 0), philox_key_ptr, offset + start, BLOCK)
    tl.store(out_ptr + offs, rounded, mask)
