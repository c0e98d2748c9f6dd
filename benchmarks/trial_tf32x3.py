"""The product of two fp32 matrices on tensor cores, which know tf32 alone: three passes, added up in fp32.

    x = high + low,  high = x rounded to tf32,  low = x - high, rounded to tf32
    a b' = (high_a + low_a)(high_b + low_b)' ~ low_a high_b' + high_a low_b' + high_a high_b'

What is left out, low_a low_b', is below 2^-22 of a b'. Tensor cores cut off what they add up, so that a long sum in
them is too small by 1e-8 for each term: here a sum ends with its tile, and tiles are added by ordinary arithmetic.
"""

# out (M, N) = sum over K of a (M, K) times b (N, K): both with K contiguous, as tensor cores want tf32

from typing import NamedTuple

import triton
import triton.language as tl

from stage2_cuda.kernels.column_sums import add_partials
from stage2_cuda.triton_driver import descriptor, launch

SQUARE = 64  # of the tile that is split, and turned where K is not contiguous


class Tile(NamedTuple):
    """M rows by N columns of the result, K of the sum at a time; `stages` of them are in flight or in use."""

    M: int
    N: int
    K: int
    warps: int
    stages: int


K_STEP = 32  # 128 bytes, a row of the memory that tensor cores read
# Measured on an H200: 65 to 85 TFLOP/s of fp32 at the sizes of preset `paper`, 95 at those of GPT-2.
SMALL, LARGE = Tile(64, 64, K_STEP, 4, 3), Tile(128, 128, K_STEP, 8, 3)
MANY = 1024  # large tiles, from which they pay
PROGRAMS = 264  # two for each of an H200's 132 processors: a sum is divided where the tiles are fewer than half of that


def tile_of(m, n):
    return LARGE if triton.cdiv(m, LARGE.M) * triton.cdiv(n, LARGE.N) >= MANY else SMALL


def halves_shape(x, turned):
    """The shape (2, M, K) of a matrix's two halves, K rounded up to a tile's; x (M, K), or (K, M) if turned."""
    m, k = reversed(x.shape) if turned else x.shape
    return 2, m, triton.cdiv(k, K_STEP) * K_STEP


def halves(out, x, turned):
    """out (2, M, K) = high and low of x (M, K), or (K, M) if turned, float32; 0 beyond K.

    x: contiguous, or the first columns of an array that is.
    """
    (rows, columns), (_, m, k) = x.shape, out.shape
    width = x.strides[0] // x.itemsize if rows > 1 else columns
    whole = x if x.flags.c_contiguous else x.base  # a kernel is given contiguous memory
    grid = triton.cdiv(k if turned else m, SQUARE), triton.cdiv(m if turned else k, SQUARE)
    launch(halves_kernel, grid, out, whole, rows, columns, width, m, k, TURNED=turned, SQUARE=SQUARE, num_warps=8)


def parts(m, n, k):
    """In how many parts the sum over k is divided: a power of two, so that all processors are busy."""
    tile, count = tile_of(m, n), 1
    tiles = triton.cdiv(m, tile.M) * triton.cdiv(n, tile.N)
    while tiles * count * 2 <= PROGRAMS and count * 2 * 8 * tile.K <= k:
        count *= 2
    return count


def partials_shape(m, n, k):
    """The shape (P, M N) of the float32 scratch of product(), whose sum is divided; None where it is not."""
    count = parts(m, n, k)
    return (count, m * n) if count > 1 else None


def product(out, partials, a, b, bias=None, accumulate=False):
    """out (M, N) = a b' + bias (N) of halves a (2, M, K), b (2, N, K); accumulate: added to out. All float32.

    out: contiguous, or the first columns of an array that is; partials: of partials_shape(M, N, K), for which out is
    contiguous and there is neither bias nor accumulate; else None.
    """
    (m, n), k = out.shape, a.shape[2]
    tile, count = tile_of(m, n), 1 if partials is None else partials.shape[0]
    width = out.strides[0] // out.itemsize if m > 1 else n
    whole = out if out.flags.c_contiguous else out.base
    each = triton.cdiv(triton.cdiv(k, tile.K), count) * tile.K  # of the sum, in one part
    grid = (triton.cdiv(m, tile.M) * triton.cdiv(n, tile.N), count)
    tiles = (descriptor(x, (1, rows, tile.K)) for x, rows in ((a, tile.M), (b, tile.N)))
    arguments = whole if partials is None else partials, *tiles, bias, m, n, k, n if count > 1 else width, each
    options = dict(M=tile.M, N=tile.N, K=tile.K, num_warps=tile.warps, num_stages=tile.stages)
    launch(product_kernel, grid, *arguments, ACCUMULATE=accumulate, **options)
    if partials is not None:
        add_partials(partials, out.reshape(-1))


@triton.jit
def round_to_tf32(x):
    """To the nearest, halves away from zero: 10 bits of fraction stay."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def halves_kernel(out, x, rows, columns, width, m, k, TURNED: tl.constexpr, SQUARE: tl.constexpr):
    row = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE)
    column = tl.program_id(1) * SQUARE + tl.arange(0, SQUARE)
    own = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], own, 0)
    if TURNED:
        value = tl.trans(value)
        row, column = column, row
    at = out + row.to(tl.int64)[:, None] * k + column[None, :]
    inside = (row < m)[:, None] & (column < k)[None, :]
    high = round_to_tf32(value)
    tl.store(at, high, inside)
    tl.store(at + tl.full((), 1, tl.int64) * m * k, round_to_tf32(value - high), inside)


@triton.jit
def product_kernel(
    out, a, b, bias, m, n, k, width, each,
    ACCUMULATE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(n, N)
    m0, n0 = tl.program_id(0) // tiles_n * M, tl.program_id(0) % tiles_n * N
    first = tl.program_id(1) * each
    total = tl.zeros((M, N), tl.float32)
    for k0 in tl.range(first, tl.minimum(first + each, k), K):
        a_high, a_low = a.load([0, m0, k0]).reshape(M, K), a.load([1, m0, k0]).reshape(M, K)
        b_high, b_low = b.load([0, n0, k0]).reshape(N, K), b.load([1, n0, k0]).reshape(N, K)
        tile = tl.dot(a_low, b_high.T, input_precision="tf32")
        tile = tl.dot(a_high, b_low.T, tile, input_precision="tf32")
        tile = tl.dot(a_high, b_high.T, tile, input_precision="tf32")
        total += tile
    row, column = m0 + tl.arange(0, M), n0 + tl.arange(0, N)
    if bias is not None:
        total += tl.load(bias + column, column < n, 0)[None, :]
    at = out + (tl.program_id(1).to(tl.int64) * m + row)[:, None] * width + column[None, :]
    own = (row < m)[:, None] & (column < n)[None, :]
    if ACCUMULATE:
        total += tl.load(at, own, 0)
    tl.store(at, total, own)
