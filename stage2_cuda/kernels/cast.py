"""Two passes over a flat array: a copy in another precision, and a multiple."""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 4096


def cast(out, x):
    """out = x, of the same number of elements, rounded to nearest where out is narrower."""
    launch(cast_kernel, (triton.cdiv(x.size, BLOCK),), out, x, x.size, BLOCK=BLOCK, num_warps=8)


def scale_in_place(x, factor):
    """x *= factor, an array of one float32 on the device; nothing is read or written where that is 1."""
    launch(scale_kernel, (triton.cdiv(x.size, BLOCK),), x, factor, x.size, BLOCK=BLOCK, num_warps=8)


@triton.jit
def cast_kernel(out, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n), at < n)


@triton.jit
def scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    multiple = tl.load(factor)
    if multiple != 1:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at, at < n).to(tl.float32) * multiple, at < n)
