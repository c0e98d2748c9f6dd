"""Gather the last rows or the last tokens of sequences that have different lengths.

The kernels read the lengths from device memory, so one captured step (a CUDA graph) works for all lengths.
"""

# B sequences, T positions, C channels

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch


def gather_last_rows(h, y, lengths):
    """h[b] = y[b, lengths[b] - 1], the row of the last position of each sequence; h (B, C), y (B, T, C).

    lengths (B) int32: the number of tokens of each sequence. If a sequence has more than T tokens, h[b] = y[b, T - 1].
    """
    B, T, C = y.shape
    width = triton.next_power_of_2(C)
    launch(last_rows_kernel, (B,), h, y, lengths, T, C, BLOCK_C=width, num_warps=4)


def gather_windows(out, ids, lengths):
    """out (B, block) = the last `block` tokens of each sequence, the oldest first. All arrays are int32.

    lengths (B): the number of tokens of each sequence. ids (B, block) is a ring buffer: it holds token number i of a
    sequence at index i % block. If a sequence has fewer than `block` tokens, these are the first elements of its row of
    `out`; the rest of the row has no meaning.
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
    oldest = tl.maximum(tl.load(lengths_ptr + b) - block, 0)  # number of the first token of the window
    tokens = tl.load(ids_ptr + b * block + (oldest + offs) % block, offs < block, 0)
    tl.store(out_ptr + b * block + offs, tokens, offs < block)
