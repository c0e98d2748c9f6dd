"""Sums of equal segments of an array, in float64 and in a fixed order: the last step of a norm and of a loss."""

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements that are added at a time


def segment_sum(out, partials):
    """out (S) float64 = the sum of each of the S equal segments of partials (n), any float dtype, n a multiple of S."""
    launch(segment_sum_kernel, (out.size,), out, partials, partials.size // out.size, BLOCK=BLOCK, num_warps=4)


@triton.jit
def segment_sum_kernel(out_ptr, partials_ptr, segment_size, BLOCK: tl.constexpr):
    """Grid (S): each program adds the segment_size elements of one segment, BLOCK at a time, in float64."""
    acc = tl.zeros((BLOCK,), tl.float64)
    for start in tl.range(0, segment_size, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        ptrs = partials_ptr + tl.program_id(0) * segment_size + offs
        acc += tl.load(ptrs, offs < segment_size, 0).to(tl.float64)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))
