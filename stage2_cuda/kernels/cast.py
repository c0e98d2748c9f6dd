"""Two elementwise kernels on flat arrays: conversion to another dtype, and multiplication by a factor in place."""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 4096  # elements per program


def cast(out, x):
    """out = x converted to the dtype of `out`, rounded to nearest. Both have n elements, of any float dtypes."""
    launch(cast_kernel, (triton.cdiv(x.size, BLOCK),), out, x, x.size, BLOCK=BLOCK, num_warps=8)


def scale_in_place(x, factor):
    """x *= factor. x: n elements of any float dtype; factor (1) float32 on the device.

    If the factor is 1, which is the usual case, x is neither read nor written.
    """
    launch(scale_kernel, (triton.cdiv(x.size, BLOCK),), x, factor, x.size, BLOCK=BLOCK, num_warps=8)


@triton.jit
def cast_kernel(out_ptr, x_ptr, n, BLOCK: tl.constexpr):
    """Grid (n / BLOCK): each program converts BLOCK elements."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask), mask)  # tl.store converts to the dtype of `out`


@triton.jit
def scale_kernel(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    """Grid (n / BLOCK): each program multiplies BLOCK elements in float32."""
    factor = tl.load(factor_ptr)
    if factor != 1:
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < n
        tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask).to(tl.float32) * factor, mask)
