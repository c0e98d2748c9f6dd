"""Two elementwise kernels on a flat array: a copy in another precision, and a multiplication in place."""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 4096  # elements per program


def cast(out, x):
    """out = x converted to out's dtype, rounded to nearest; both have n elements, of any float dtype."""
    launch(cast_kernel, (triton.cdiv(x.size, BLOCK),), out, x, x.size, BLOCK=BLOCK, num_warps=8)


def scale_in_place(x, factor):
    """x *= factor. x: n elements, any float dtype; factor (1) float32 on the device.

    A factor of 1 causes no memory traffic.
    """
    launch(scale_kernel, (triton.cdiv(x.size, BLOCK),), x, factor, x.size, BLOCK=BLOCK, num_warps=8)


@triton.jit
def cast_kernel(out_ptr, x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask), mask)  # tl.store converts to the element type of out_ptr


@triton.jit
def scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1:
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < n
        tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask).to(tl.float32) * factor, mask)
