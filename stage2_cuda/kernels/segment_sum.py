"""Sums of equal parts of an array in float64 and in one order: the last stage of a norm, and of a loss."""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements that are added at a time


def totals(out, partials):
    """out (parts) float64 = the sum of each of so many equal parts of partials (n), n a multiple of parts."""
    launch(totals_kernel, (out.size,), out, partials, partials.size // out.size, BLOCK=BLOCK, num_warps=4)


@triton.jit
def totals_kernel(out, partials, each, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, each, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partials + tl.program_id(0) * each + at, at < each, 0).to(tl.float64)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))
