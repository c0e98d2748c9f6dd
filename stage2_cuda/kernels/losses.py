"""The loss, from the maximum, the sum and the target's logit of each row, which cross_entropy.py computes.

    loss of a row = log(sum) - (target_logit - maximum);  loss = scale * (sum of the losses of the rows)

With tensor parallelism the columns of a row are divided over ranks, and each rank has a maximum and a sum of its own
columns. An all-reduce gives the largest maximum. rescale() makes a rank's sums relative to that maximum; then an
all-reduce adds the sums and the target logits of the ranks (loss_of_rows in gpt2core/ops.py).
"""

# N rows

import triton
import triton.language as tl

from stage2_cuda.kernels.segment_sum import segment_sum
from stage2_cuda.runtime.triton_launch import launch

ROWS_PER_PROGRAM = 4096  # of loss_kernel
BLOCK = 1024  # rows that a program reads at a time


def partials_shape(n):
    """The shape (P) of the float64 scratch of loss() for n rows."""
    return (triton.cdiv(n, ROWS_PER_PROGRAM),)


def rescale(out, maxima, sums, target_logits, row_maxima):
    """out[0] = sums * exp(maxima - row_maxima), out[1] = target_logits. All float32; out (2, N), the others (N).

    maxima, sums, target_logits: of this rank's columns. row_maxima: the maxima of the whole rows.
    """
    n = maxima.size
    arguments = out, maxima, sums, target_logits, row_maxima, n
    launch(rescale_kernel, (triton.cdiv(n, BLOCK),), *arguments, BLOCK=BLOCK, num_warps=4)


def loss(out, partials, sums, target_logits, row_maxima, scale):
    """out (1) float64 = scale * (the sum over the rows of log(sums) - (target_logits - row_maxima)).

    sums, target_logits, row_maxima (N) float32, of whole rows. partials: float64 scratch of partials_shape(N). scale: a
    float.
    """
    n, programs = row_maxima.size, partials.size
    arguments = partials if programs > 1 else out, sums, target_logits, row_maxima, n, float(scale)
    launch(loss_kernel, (programs,), *arguments, ROWS_PER_PROGRAM=ROWS_PER_PROGRAM, BLOCK=BLOCK, num_warps=8)
    if programs > 1:
        segment_sum(out, partials)


@triton.jit
def rescale_kernel(out_ptr, maxima_ptr, sums_ptr, target_logits_ptr, row_maxima_ptr, n, BLOCK: tl.constexpr):
    """Grid (N / BLOCK): each program computes BLOCK columns of out (2, N)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < n
    ratio = tl.exp(tl.load(maxima_ptr + rows, mask, 0) - tl.load(row_maxima_ptr + rows, mask, 0))
    tl.store(out_ptr + rows, tl.load(sums_ptr + rows, mask, 0) * ratio, mask)
    tl.store(out_ptr + n + rows, tl.load(target_logits_ptr + rows, mask, 0), mask)


@triton.jit
def loss_kernel(
    out_ptr, sums_ptr, target_logits_ptr, row_maxima_ptr, n, scale, ROWS_PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (P): each program computes one element of out (P) float64, from ROWS_PER_PROGRAM rows."""
    acc = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, ROWS_PER_PROGRAM, BLOCK):
        rows = tl.program_id(0) * ROWS_PER_PROGRAM + start + tl.arange(0, BLOCK)
        mask = rows < n
        log_sum = tl.log(tl.load(sums_ptr + rows, mask, 1))
        shifted_target = tl.load(target_logits_ptr + rows, mask, 0) - tl.load(row_maxima_ptr + rows, mask, 0)
        acc += (log_sum - shifted_target).to(tl.float64)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0) * scale)
