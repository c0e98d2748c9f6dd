"""The end of each of several sequences of different lengths: the row of its last position, and its last tokens.

The lengths are read from the device, so that one recorded step serves them all.
"""

# B sequences, T positions, C channels

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch


def last_rows(h, y, lengths):
    """h (B, C) = the row of each sequence's last position, of y (B, T, C)."""
    B, T, C = y.shape
    width = triton.next_power_of_2(C)
    launch(last_rows_kernel, (B,), h, y, lengths, T, C, WIDTH=width, num_warps=4)


def windows(out, ids, lengths):
    """out (B, block) = the last `block` of `lengths` (B) tokens in order, of which number i is in ids at i mod block.

    Where there are fewer, they come first, and what stands behind them does not matter.
    """
    B, block = ids.shape
    launch(windows_kernel, (B, triton.cdiv(block, 256)), out, ids, lengths, block, BLOCK=256, num_warps=4)


@triton.jit
def last_rows_kernel(h, y, lengths, T, C, WIDTH: tl.constexpr):
    b, c = tl.program_id(0), tl.arange(0, WIDTH)
    last = tl.minimum(tl.load(lengths + b), T) - 1
    row = tl.load(y + (b.to(tl.int64) * T + last) * C + c, c < C, 0)
    tl.store(h + b * C + c, row, c < C)


@triton.jit
def windows_kernel(out, ids, lengths, block, BLOCK: tl.constexpr):
    b, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.maximum(tl.load(lengths + b) - block, 0)
    tl.store(out + b * block + i, tl.load(ids + b * block + (first + i) % block, i < block, 0), i < block)
