"""Rotary positions: each q and k of a row is rotated by the row's position; v is copied (Su et al. 2021).

    (a, b) -> (a cos - b sin, b cos + a sin),  angle = position 10000^(-2i / D), for channels i and i + D / 2 of a head

A program computes the cosines and sines of its rows once, for all heads.
"""

# N = B*T rows, H heads, D channels of a head, pairs D / 2

import math

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK, WARPS = 256, 2  # elements of a tile of pairs, and the warps of a program
LOG2_BASE, LOG2_2PI, TWO_PI = (tl.constexpr(x) for x in (math.log2(10000), math.log2(2 * math.pi), 2 * math.pi))


def rotary(y, qkv, n_head, position, sign):
    """y = qkv (B, T, 3C) with q and k of row t rotated by sign * the angles of position + t; computed in float32.

    The arrays are contiguous and of one dtype; D = C / n_head is even. sign: 1 (forward) or -1 (backward).
    """
    n, pairs = qkv.size // qkv.shape[-1], qkv.shape[-1] // (6 * n_head)
    width = triton.next_power_of_2(pairs)
    rows = max(1, BLOCK // width)
    arguments = y, qkv, n, qkv.shape[1], pairs, n_head, position, float(sign)
    launch(rotary_kernel, (triton.cdiv(n, rows),), *arguments, BLOCK_ROWS=rows, BLOCK_PAIRS=width, num_warps=WARPS)


@triton.jit
def cosines_and_sines(positions, i, pairs):
    """The cosines and the sines of the angles of pairs i (BLOCK_PAIRS) at `positions`, a scalar or (rows, 1); float32.

    The angle is computed in float64 and without its whole turns, so that float32 is exact enough at any position.
    """
    turns_per_position = tl.math.exp2(i.to(tl.float64) / pairs * -LOG2_BASE - LOG2_2PI)
    turns = positions.to(tl.float64) * turns_per_position
    angle = ((turns - tl.math.floor(turns + 0.5)) * TWO_PI).to(tl.float32)
    return tl.math.cos(angle), tl.math.sin(angle)


@triton.jit
def rotary_kernel(
    y_ptr, x_ptr, n, time, pairs, n_head, position, sign, BLOCK_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr
):
    """Grid (N / BLOCK_ROWS): each program computes all heads of q, k and v of its rows."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    i = tl.arange(0, BLOCK_PAIRS)
    mask = (rows < n)[:, None] & (i < pairs)[None, :]
    cos, sin = cosines_and_sines((position + rows % time)[:, None], i[None, :], pairs)  # (BLOCK_ROWS, BLOCK_PAIRS)
    sin *= sign
    heads = rows.to(tl.int64)[:, None] * (6 * n_head * pairs) + i[None, :]  # the first element of a pair, of head 0
    for head in range(3 * n_head):
        first = heads + head * (2 * pairs)
        a, b = tl.load(x_ptr + first, mask), tl.load(x_ptr + first + pairs, mask)
        if head < 2 * n_head:
            a32, b32 = a.to(tl.float32), b.to(tl.float32)
            a, b = (a32 * cos - b32 * sin).to(a.dtype), (b32 * cos + a32 * sin).to(a.dtype)
        tl.store(y_ptr + first, a, mask)
        tl.store(y_ptr + first + pairs, b, mask)
