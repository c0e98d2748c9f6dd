"""For sequences of different lengths: gather each sequence's row at the last position, or its last tokens.

The kernels read the lengths from device memory, so one captured step works for all lengths.
"""

# B sequences, T positions, C channels

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch


def gather_last_rows(h, y, lengths):
    """h (B, C) = the row of y (B, T, C) at each sequence's last position, lengths (B) - 1, at most T - 1."""
    B, T, C = y.shape
    width = triton.next_power_of_2(C)
    launch(last_rows_kernel, (B,), h, y, lengths, T, C, BLOCK_C=width, num_warps=4)


def gather_windows(out, ids, lengths):
    """out (B, block) = the last `block` tokens of each sequence, in order; ids is a ring buffer: token i at i % block.

    A sequence with fewer tokens fills only the first lengths[b] elements; the others are any token ids.
    """
    B, block = ids.shape
    launch(windows_kernel, (B, triton.cdiv(block, 256)), out, ids, lengths, block, BLOCK_T=256, num_warps=4)


@triton.jit
def last_rows_kernel(h_ptr, y_ptr, lengths_ptr, T, C, BLOCK_C: tl.constexpr):
    b, cols = tl.program_id(0), tl.arange(0, BLOCK_C)
    last = tl.minimum(tl.load(lengths_ptr + b), T) - 1
    row = tl.load(y_ptr + (b.to(tl.int64) * T + last) * C + cols, cols < C, 0)
    tl.store(h_ptr + b * C + cols, row, cols < C)


@triton.jit
def windows_kernel(out_ptr, ids_ptr, lengths_ptr, block, BLOCK_T: tl.constexpr):
    b, offs = tl.program_id(0), tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.maximum(tl.load(lengths_ptr + b) - block, 0)
    tokens = tl.load(ids_ptr + b * block + (first + offs) % block, offs < block, 0)
    tl.store(out_ptr + b * block + offs, tokens, offs < block)
