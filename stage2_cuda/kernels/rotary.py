"""Rotary positions: each q and k of a row is rotated by the row's position (Su et al. 2021).

    (a, b) -> (a cos - b sin, b cos + a sin),  angle = position 10000^(-2i / D), for channels i and i + D / 2 of a head

The cosines and sines are computed once for all sequences and heads. attention/backward.py reads them too.
"""

# N = B*T rows, H heads, D channels of a head, pairs D / 2

import math

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

ANGLES = 128  # of a program of rotation_kernel
# Of a program of rotary_kernel: pairs of its tile, heads of its tile, warps. With these a load has 16 bytes.
PAIRS_OF_TILE, HEADS, WARPS = 1024, 8, 4
LOG2_BASE, LOG2_2PI, TWO_PI = (tl.constexpr(x) for x in (math.log2(10000), math.log2(2 * math.pi), 2 * math.pi))


def compute_rotation(rotation, position):
    """rotation (T, 2, D / 2) float32: the cosines and the sines of the angles of the positions position + t."""
    n, pairs = rotation.size // 2, rotation.shape[2]
    launch(rotation_kernel, (triton.cdiv(n, ANGLES),), rotation, n, pairs, position, BLOCK=ANGLES)


def rotate(y, qkv, rotation, n_head, sign):
    """y = qkv (B, T, 3C) with q and k of row t rotated by sign * the angles of row t; computed in float32.

    The arrays are contiguous, y and qkv of one dtype; rotation: of compute_rotation(). y may be qkv: then v is neither
    read nor written. sign: 1 (forward) or -1 (backward).
    """
    n, (time, _, pairs) = qkv.size // qkv.shape[-1], rotation.shape
    width, heads = triton.next_power_of_2(pairs), (2 if y is qkv else 3) * n_head
    rows, tiles = max(1, PAIRS_OF_TILE // (HEADS * width)), triton.cdiv(heads, HEADS)
    arguments = y, qkv, rotation, n, time, pairs, n_head, heads, tiles, float(sign)
    blocks = dict(BLOCK_ROWS=rows, BLOCK_HEADS=HEADS, BLOCK_PAIRS=width)
    launch(rotary_kernel, (triton.cdiv(n, rows) * tiles,), *arguments, **blocks, num_warps=WARPS)


@triton.jit
def cosines_and_sines(positions, i, pairs):
    """The cosines and the sines of the angles of pairs i at `positions`, a scalar or of the shape of i; float32.

    The angle is computed in float64 and without its whole turns, so that float32 is exact enough at any position.
    """
    turns_per_position = tl.math.exp2(i.to(tl.float64) / pairs * -LOG2_BASE - LOG2_2PI)
    turns = positions.to(tl.float64) * turns_per_position
    angle = ((turns - tl.math.floor(turns + 0.5)) * TWO_PI).to(tl.float32)
    return tl.math.cos(angle), tl.math.sin(angle)


@triton.jit
def rotation_kernel(rotation_ptr, n, pairs, position, BLOCK: tl.constexpr):
    """Grid (n / BLOCK), n = T pairs."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, i = at // pairs, at % pairs
    cos, sin = cosines_and_sines(position + row, i, pairs)
    tl.store(rotation_ptr + at + row * pairs, cos, at < n)
    tl.store(rotation_ptr + at + row * pairs + pairs, sin, at < n)


@triton.jit
def rotary_kernel(
    y_ptr, x_ptr, rotation_ptr, n, time, pairs, n_head, heads, tiles, sign,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (N / BLOCK_ROWS * tiles), tiles = heads / BLOCK_HEADS. heads: 2H to compute q and k, 3H to copy v too."""
    rows = tl.program_id(0) // tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None, None]
    head = tl.program_id(0) % tiles * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[None, :, None]
    i = tl.arange(0, BLOCK_PAIRS)[None, None, :]
    mask = (rows < n) & (i < pairs)
    of_pair = rotation_ptr + rows % time * (2 * pairs) + i
    cos, sin = tl.load(of_pair, mask, 1.0), tl.load(of_pair + pairs, mask, 0.0) * sign
    first = rows.to(tl.int64) * (6 * n_head * pairs) + head * (2 * pairs) + i
    mask, rotates = mask & (head < heads), head < 2 * n_head
    a, b = tl.load(x_ptr + first, mask), tl.load(x_ptr + first + pairs, mask)  # (BLOCK_ROWS, BLOCK_HEADS, BLOCK_PAIRS)
    a32, b32 = a.to(tl.float32), b.to(tl.float32)
    tl.store(y_ptr + first, tl.where(rotates, (a32 * cos - b32 * sin).to(a.dtype), a), mask)
    tl.store(y_ptr + first + pairs, tl.where(rotates, (b32 * cos + a32 * sin).to(a.dtype), b), mask)
