"""The loss from the three numbers per row that cross-entropy keeps: see cross_entropy.py and gpt2core/ops.py.

    row loss = log(sum) - (target_logit - maximum);  loss = scale * sum of the row losses

With tensor parallelism each rank has the maximum and the sum of its own columns. rescale() makes the sums relative
to the maximum over all ranks; adding the ranks' numbers then gives those of the whole row.
"""

# N rows

import triton
import triton.language as tl

from stage2_cuda.kernels.segment_sum import segment_sum
from stage2_cuda.runtime.triton_launch import launch

BLOCK_ROWS = 4096  # rows of one program of loss_kernel
BLOCK = 1024  # rows that a program handles at a time


def partials_shape(n):
    """The shape (P) of the float64 scratch of loss() for n rows."""
    return (triton.cdiv(n, BLOCK_ROWS),)


def rescale(out, maxima, sums, target_logits, row_maxima):
    """out[0] = sums * exp(maxima - row_maxima), out[1] = target_logits.

    out (2, N), all others (N); float32. row_maxima: the maximum of `maxima` over all ranks.
    """
    n = maxima.size
    arguments = out, maxima, sums, target_logits, row_maxima, n
    launch(rescale_kernel, (triton.cdiv(n, BLOCK),), *arguments, BLOCK=BLOCK, num_warps=4)


def loss(out, partials, sums, target_logits, row_maxima, scale):
    """out (1) float64 = scale * sum over rows of log(sums) - (target_logits - row_maxima).

    sums, target_logits, row_maxima (N) float32; partials: float64 scratch of partials_shape(N); scale: a float.
    """
    n, programs = row_maxima.size, partials.size
    arguments = partials if programs > 1 else out, sums, target_logits, row_maxima, n, float(scale)
    launch(loss_kernel, (programs,), *arguments, BLOCK_ROWS=BLOCK_ROWS, BLOCK=BLOCK, num_warps=8)
    if programs > 1:
        segment_sum(out, partials)


@triton.jit
def rescale_kernel(out_ptr, maxima_ptr, sums_ptr, target_logits_ptr, row_maxima_ptr, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < n
    ratio = tl.exp(tl.load(maxima_ptr + rows, mask, 0) - tl.load(row_maxima_ptr + rows, mask, 0))
    tl.store(out_ptr + rows, tl.load(sums_ptr + rows, mask, 0) * ratio, mask)
    tl.store(out_ptr + n + rows, tl.load(target_logits_ptr + rows, mask, 0), mask)


@triton.jit
def loss_kernel(
    out_ptr, sums_ptr, target_logits_ptr, row_maxima_ptr, n, scale, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    acc = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, BLOCK_ROWS, BLOCK):
        rows = tl.program_id(0) * BLOCK_ROWS + start + tl.arange(0, BLOCK)
        mask = rows < n
        log_sum = tl.log(tl.load(sums_ptr + rows, mask, 1))
        shifted_target = tl.load(target_logits_ptr + rows, mask, 0) - tl.load(row_maxima_ptr + rows, mask, 0)
        acc += (log_sum - shifted_target).to(tl.float64)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0) * scale)
