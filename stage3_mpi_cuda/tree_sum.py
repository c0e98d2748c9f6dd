"""The sum of several arrays in the canonical tree, in one pass: what each rank does with the parts that others sent it.

    5 rows  ((0+1) + (2+3)) + 4                                                 (gpt2core/parallel/tree_sum.py)

NCCL's own all-reduce adds up along a ring or a tree of GPUs, which depends on their number, and rounds to the type of
the array at every hop. Here the order is fixed, sums are float32 (float64 of float64), and rounding comes once, last.
"""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements of one program


def tree_sum(out, rows):
    """out (n) = the canonical sum of rows (p, n), of out's type; p is compiled in."""
    count, n = rows.shape
    launch(tree_sum_kernel, (triton.cdiv(n, BLOCK),), out, rows, n, COUNT=count, BLOCK=BLOCK, num_warps=4)


@triton.jit
def tree_of(rows, at, stride, mask, COUNT: tl.constexpr):
    """The sum of COUNT rows from `rows` on: the largest power of two below COUNT of them, and then the others."""
    if COUNT == 1:
        x = tl.load(rows + at, mask, 0)
        total = x if x.dtype == tl.float64 else x.to(tl.float32)
    else:
        HALF: tl.constexpr = triton.next_power_of_2(COUNT) // 2
        left = tree_of(rows, at, stride, mask, HALF)
        total = left + tree_of(rows + HALF * stride, at, stride, mask, COUNT - HALF)
    return total


@triton.jit
def tree_sum_kernel(out, rows, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tree_of(rows, at, tl.cast(n, tl.int64), at < n, COUNT)
    tl.store(out + at, total, at < n)
