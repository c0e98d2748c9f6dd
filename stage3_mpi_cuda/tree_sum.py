"""A kernel that sums the rows of an array in the canonical order. In a sum over ranks, row j is what rank j has sent.

    rows 0 to 4: ((0+1) + (2+3)) + 4                                            (see gpt2core/tree_sum.py)

NCCL's all-reduce adds along a ring or a tree of GPUs. Its order depends on the number of GPUs, and it rounds to the
dtype of the array after every addition. This kernel adds in a fixed order, in float32 (float64 arrays: in float64), and
rounds to the dtype of the array once.
"""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements of `out` that one program (Triton's word for a thread block) computes


def tree_sum(out, rows):
    """Write the sum of the p rows of `rows` (p, n) to `out` (n), rounded to out's dtype. Compiles once for each p."""
    count, n = rows.shape
    launch(tree_sum_kernel, (triton.cdiv(n, BLOCK),), out, rows, n, COUNT=count, BLOCK=BLOCK, num_warps=4)


@triton.jit
def tree_of_rows(rows_ptr, offs, stride, mask, COUNT: tl.constexpr):
    """The sum of COUNT rows, in the columns `offs`. rows_ptr: the first row; stride: elements from one row to the next.

    It is the sum of the first HALF rows plus the sum of the other rows. HALF is the largest power of two below COUNT.
    """
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
