"""A kernel that sums the rows of an array in the canonical order; row j is the part that rank j sent.

    for 5 rows: ((0+1) + (2+3)) + 4                                             (see gpt2core/parallel/tree_sum.py)

NCCL's all-reduce adds along a ring or a tree of GPUs. The order depends on the number of GPUs, and every step rounds to
the dtype of the array. This kernel adds in a fixed order, in float32 (float64 arrays: in float64), and rounds once.
"""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements of one program


def tree_sum(out, rows):
    """out (n) = the sum of rows (p, n) in the canonical order, rounded to out's dtype. Each p needs one compilation."""
    count, n = rows.shape
    launch(tree_sum_kernel, (triton.cdiv(n, BLOCK),), out, rows, n, COUNT=count, BLOCK=BLOCK, num_warps=4)


@triton.jit
def tree_of_rows(rows_ptr, offs, stride, mask, COUNT: tl.constexpr):
    """Sum of the COUNT rows at rows_ptr: the sum of the first HALF rows (a power of two) plus the sum of the rest."""
    if COUNT == 1:
        x = tl.load(rows_ptr + offs, mask, 0)
        total = x if x.dtype == tl.float64 else x.to(tl.float32)
    else:
        HALF: tl.constexpr = triton.next_power_of_2(COUNT) // 2
        left = tree_of_rows(rows_ptr, offs, stride, mask, HALF)
        total = left + tree_of_rows(rows_ptr + HALF * stride, offs, stride, mask, COUNT - HALF)
    return total


@triton.jit
def tree_sum_kernel(out_ptr, rows_ptr, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    total = tree_of_rows(rows_ptr, offs, tl.cast(n, tl.int64), mask, COUNT)
    tl.store(out_ptr + offs, total, mask)
