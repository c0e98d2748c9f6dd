"""A kernel that converts a flat array to another dtype."""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 4096  # elements per program


def cast(out, x):
    """out = x converted to the dtype of `out`, rounded to nearest. Both have n elements, of any float dtypes."""
    launch(cast_kernel, (triton.cdiv(x.size, BLOCK),), out, x, x.size, BLOCK=BLOCK, num_warps=8)


@triton.jit
def cast_kernel(out_ptr, x_ptr, n, BLOCK: tl.constexpr):
    """Grid (n / BLOCK): each program converts BLOCK elements."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask), mask)  # tl.store converts to the dtype of `out`
