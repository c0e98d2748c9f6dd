"""The product of two fp32 matrices on tensor cores, which add in fp32 what they multiply in fp16: three passes.

    x = scale (high + low),  high = x / scale rounded to fp16,  low = x / scale - high, rounded to fp16
    a b = scale_a scale_b (low_a high_b + high_a low_b + high_a high_b)

fp16 has tf32's 11 bits at twice its speed, and half its bytes, but not its range. So each square block of a matrix has
a scale of its own, a power of two that brings its largest number to 2^14: the error of high + low is below 2^-22 of a
number, or 2^-39 of the largest beside it, and low_a low_b, which is left out, below 2^-22 of a b. Tensor cores cut off
what they add up, so that a long sum in them is too small by 1e-8 for each term: here a sum ends with its tile, and
tiles are added by ordinary arithmetic, times their scales.
"""

# out (M, N) = sum over K of a (M, K) times b (K, N), each of which may be stored turned: (K, M), (N, K)

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from stage2_cuda.kernels.column_sums import add_partials
from stage2_cuda.runtime.triton_launch import descriptor, launch

SQUARE, SPLIT_WARPS = 128, 16  # rows and columns of a block with one scale, and who splits it
ALIGNED = 16  # columns of the halves are rounded up to a multiple, so that each row begins where the GPU can read it


class Tile(NamedTuple):
    """M rows by N columns of the result, K of the sum at a time, all up to SQUARE; `stages` are in flight or in use."""

    M: int
    N: int
    K: int
    warps: int
    stages: int


SMALL, LARGE = Tile(64, 64, 64, 4, 3), Tile(128, 128, 64, 8, 3)
MANY = 264  # large tiles, from which they pay
PROGRAMS = 264  # two for each of an H200's 132 processors: a sum is divided where the tiles are fewer than half of that
EACH = 256  # of a sum in one part, at least


class Split(NamedTuple):
    """A matrix (R, C) of fp32 as halves (2, R, C rounded up) of fp16 and their scales (R / SQUARE, C / SQUARE)."""

    halves: object
    scales: object
    shape: tuple
    dtype = np.dtype(np.float32)


def split_shapes(x):
    """The shapes of what split() fills, float16 and float32."""
    rows, columns = x.shape
    return (2, rows, triton.cdiv(columns, ALIGNED) * ALIGNED), (triton.cdiv(rows, SQUARE), triton.cdiv(columns, SQUARE))


def split(halves, scales, x):
    """-> x (R, C) float32 as a Split, of arrays of split_shapes(x).

    x: contiguous, or the first columns of an array that is.
    """
    rows, columns = x.shape
    whole, width = (x, columns) if x.flags.c_contiguous else (x.base, x.strides[0] // x.itemsize)
    arguments = halves, scales, whole, rows, columns, width, halves.shape[2]
    launch(split_kernel, scales.shape, *arguments, SQUARE=SQUARE, num_warps=SPLIT_WARPS)
    return Split(halves, scales, x.shape)


def tile_of(m, n):
    return LARGE if triton.cdiv(m, LARGE.M) * triton.cdiv(n, LARGE.N) >= MANY else SMALL


def partials_shape(m, n, k):
    """The shape (P, M N) of the float32 scratch of product(), whose sum is divided in P; None where it is not.

    P is a power of two, so that all processors are busy.
    """
    tile, count = tile_of(m, n), 1
    tiles = triton.cdiv(m, tile.M) * triton.cdiv(n, tile.N)
    while tiles * count * 2 <= PROGRAMS and count * 2 * EACH <= k:
        count *= 2
    return (count, m * n) if count > 1 else None


def product(out, partials, a, b, bias=None, trans_a=False, trans_b=False, accumulate=False):
    """out (M, N) float32 = op(a) op(b) + bias (N) of Splits, op the transpose where trans_a or trans_b.

    accumulate: added to out. out: contiguous, or the first columns of an array that is; partials: of partials_shape(M,
    N, K), for which out is contiguous and there is neither bias nor accumulate; else None.
    """
    (m, n), k = out.shape, a.shape[0 if trans_a else 1]
    M, N, K, warps, stages = tile_of(m, n)
    whole, width = (out, n) if out.flags.c_contiguous else (out.base, out.strides[0] // out.itemsize)
    target, count = (whole, 1) if partials is None else (partials, partials.shape[0])
    each = triton.cdiv(triton.cdiv(k, K), count) * K  # of the sum, in one part
    grid = (triton.cdiv(m, M) * triton.cdiv(n, N), count)
    a_halves = descriptor(a.halves, (1, K, M) if trans_a else (1, M, K))
    b_halves = descriptor(b.halves, (1, N, K) if trans_b else (1, K, N))
    blocks = a.scales.shape[1], b.scales.shape[1]
    arguments = target, a_halves, a.scales, b_halves, b.scales, bias, m, n, k, width, each, *blocks
    options = dict(M=M, N=N, K=K, SQUARE=SQUARE, num_warps=warps, num_stages=stages)
    launch(product_kernel, grid, *arguments, TURN_A=trans_a, TURN_B=trans_b, ACCUMULATE=accumulate, **options)
    if partials is not None:
        add_partials(partials, out.reshape(-1))


@triton.jit
def split_kernel(halves, scales, x, rows, columns, width, padded, SQUARE: tl.constexpr):
    row = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE)
    column = tl.program_id(1) * SQUARE + tl.arange(0, SQUARE)
    inside = (row < rows)[:, None] & (column < width)[None, :]  # not `columns`, which may be odd: see cross_entropy.py
    value = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], inside, 0)
    value = tl.where(column[None, :] < columns, value, 0)
    exponent = tl.max(tl.max(tl.abs(value), 1), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 15)  # 2^-112: what is below is as good as 0, and its scale would not be normal
    value *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^14 / 2^(exponent - 127)
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales + block, ((exponent - 14) << 23).to(tl.float32, bitcast=True))
    at = halves + row.to(tl.int64)[:, None] * padded + column[None, :]
    inside = (row < rows)[:, None] & (column < padded)[None, :]
    high = value.to(tl.float16)
    tl.store(at, high, inside)
    tl.store(at + tl.full((), 1, tl.int64) * rows * padded, (value - high.to(tl.float32)).to(tl.float16), inside)


@triton.jit
def load_tile(x, half: tl.constexpr, r, c, R: tl.constexpr, C: tl.constexpr, TURN: tl.constexpr):
    """Rows [r, r + R) and columns [c, c + C) of a matrix that may be stored turned."""
    if TURN:
        tile = x.load([half, c, r]).reshape(C, R).T
    else:
        tile = x.load([half, r, c]).reshape(R, C)
    return tile


@triton.jit
def load_scale(scales, blocks, r, c, SQUARE: tl.constexpr, TURN: tl.constexpr):
    """That of the element (r, c); the scales are so many `blocks` wide."""
    if TURN:
        r, c = c, r
    return tl.load(scales + r // SQUARE * blocks + c // SQUARE)


@triton.jit
def product_kernel(
    out, a, a_scales, b, b_scales, bias, m, n, k, width, each, a_blocks, b_blocks,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SQUARE: tl.constexpr,
    TURN_A: tl.constexpr, TURN_B: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(n, N)
    m0, n0 = tl.program_id(0) // tiles_n * M, tl.program_id(0) % tiles_n * N
    first = tl.program_id(1) * each
    total = tl.zeros((M, N), tl.float32)
    for k0 in tl.range(first, tl.minimum(first + each, k), K):
        scale = load_scale(a_scales, a_blocks, m0, k0, SQUARE, TURN_A)
        scale *= load_scale(b_scales, b_blocks, k0, n0, SQUARE, TURN_B)
        a_high, a_low = load_tile(a, 0, m0, k0, M, K, TURN_A), load_tile(a, 1, m0, k0, M, K, TURN_A)
        b_high, b_low = load_tile(b, 0, k0, n0, K, N, TURN_B), load_tile(b, 1, k0, n0, K, N, TURN_B)
        tile = tl.dot(a_low, b_high)
        tile = tl.dot(a_high, b_low, tile)
        tile = tl.dot(a_high, b_high, tile)
        total += tile * scale
    row, column = m0 + tl.arange(0, M), n0 + tl.arange(0, N)
    if bias is not None:
        total += tl.load(bias + column, column < n, 0)[None, :]
    at = out + (tl.program_id(1).to(tl.int64) * m + row)[:, None] * width + column[None, :]
    own = (row < m)[:, None] & (column < n)[None, :]
    if ACCUMULATE:
        total += tl.load(at, own, 0)
    tl.store(at, total, own)
