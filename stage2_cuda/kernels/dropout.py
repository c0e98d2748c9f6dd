"""Dropout of the residual stream, with the random bits of gpt2core/dropout.py: a hash, computed where it is needed.

    y = keep (x + bias) / (1 - p);  keep = hash(key, place, row, position, channel) >= 2^32 p

Forward and backward compute the same bits, so no mask is stored.
"""

# N = B*T rows, T positions, C channels

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK_ROWS, BLOCK_COLS = 4, 256
GOLDEN = tl.constexpr(0x9E3779B9)  # as in gpt2core/dropout.py


def dropout(y, x, bias, mask):
    """y = x (..., T, C), plus bias (C) unless it is None, after dropout by a Mask whose key is on the device."""
    n, (time, n_cols), p = x.size // x.shape[-1], x.shape[-2:], mask.dropout
    grid = (triton.cdiv(n, BLOCK_ROWS), triton.cdiv(n_cols, BLOCK_COLS))
    arguments = y, x, bias, p.key, mask.place, p.row, mask.position, n, time, n_cols, p.threshold, p.scale
    launch(dropout_kernel, grid, *arguments, BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, num_warps=4)


@triton.jit
def mixed(h):
    """uint32 -> uint32: the last steps of MurmurHash3."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def dropout_kernel(
    y_ptr, x_ptr, bias_ptr, key_ptr, place, first, position, n, time, n_cols, threshold, scale,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Grid (N / BLOCK_ROWS, C / BLOCK_COLS): each program computes one tile.

    first: the row of the first sequence. position: of the first token of each sequence.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    inside = (rows < n)[:, None] & (cols < n_cols)[None, :]
    offs = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
    h = mixed((tl.load(key_ptr) + place).to(tl.uint32))
    h = mixed(h + (first + rows // time).to(tl.uint32))
    h = mixed(h + (position + rows % time).to(tl.uint32))
    bits = mixed(h[:, None] + (cols.to(tl.uint32) * GOLDEN)[None, :])
    x = tl.load(x_ptr + offs, inside, 0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols, cols < n_cols, 0).to(tl.float32)[None, :]
    kept = tl.where(bits.to(tl.int64) >= threshold, x * scale, 0)
    tl.store(y_ptr + offs, kept, inside)
