"""The product of two float32 matrices as three fp16 products on tensor cores, with the precision of float32.

    x = scale (high + low),  high = fp16(x / scale),  low = fp16(x / scale - high)
    a b = scale_a scale_b (low_a high_b + high_a low_b + high_a high_b)

fp16 and tf32 both have 11 significant bits. fp16 is twice as fast and needs half the memory, but its range is smaller.
Therefore each square block of a matrix is divided by a scale, its own power of two, so that the block's largest finite
magnitude is in [2^14, 2^15). Infinity and NaN stay so, and change only the results that depend on them.

Errors: high + low differs from x / scale by less than 2^-22 times x / scale or, if x / scale is small, by less than
2^-39 times the block's largest number. The product low_a low_b, which is omitted, is below 2^-22 times a b. Tensor
cores truncate the sum when they add; in a long sum this causes an error of about 1e-8 per term. Here tensor cores add
only the few terms of one iteration. The sums of the iterations are multiplied by their scales and added in float32
arithmetic.
"""

# out (M, N) = op(a) (M, K) op(b) (K, N). op is the transpose if trans_a or trans_b: then a is (K, M), b is (N, K)

from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl

from stage2_cuda.kernels.column_sums import add_partials
from stage2_cuda.runtime.triton_launch import descriptor, launch

SCALE_BLOCK = 128  # a block of SCALE_BLOCK x SCALE_BLOCK elements has one scale
SPLIT_WARPS = 16  # warps of split_kernel
ALIGNED_COLS = 16  # high and low are padded to a multiple of 16 columns, because the GPU copies aligned rows (TMA)


class ProductTile(NamedTuple):
    """A program computes block_m x block_n elements of out and adds block_k terms per iteration.

    Each of the three sizes divides SCALE_BLOCK, so that each tile of an operand has one scale.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


SMALL, LARGE = ProductTile(64, 64, 64, 4, 3), ProductTile(128, 128, 64, 8, 3)
MIN_LARGE_TILES = 264  # large tiles are faster if the result has at least this many of them
# Two programs for each of an H200's 132 multiprocessors. If the result has at most PROGRAMS / 2 tiles, the sum over K
# is divided into parts, and each part is added by other programs.
PROGRAMS = 264
MIN_PART_K = 256  # the fewest terms of the sum in one part
MAX_PARTS, SUM_BLOCK = 8, 512  # of add_parts_kernel: the most parts, and the elements of out that a program computes


class SplitOperand(NamedTuple):
    """A float32 matrix (R, C): halves[0] is high and halves[1] is low; scales[i, j] is the scale of the block (i, j).

    halves (2, R, padded C) float16; scales (R / SCALE_BLOCK, C / SCALE_BLOCK), rounded up, float32. shape: (R, C).
    """

    halves: object
    scales: object
    shape: tuple
    dtype = np.dtype(np.float32)


def split_shapes(x):
    """The shapes of the two arrays `halves` (float16) and `scales` (float32) that split() fills for x (R, C)."""
    rows, columns = x.shape
    halves = 2, rows, triton.cdiv(columns, ALIGNED_COLS) * ALIGNED_COLS
    return halves, (triton.cdiv(rows, SCALE_BLOCK), triton.cdiv(columns, SCALE_BLOCK))


def split(halves, scales, x):
    """The SplitOperand of x (R, C) float32, written to the arrays `halves` and `scales`, which have split_shapes(x).

    x: contiguous, or the first columns of a contiguous array.
    """
    rows, columns = x.shape
    # launch() needs a contiguous array: pass the whole array, whose first element is that of x
    contiguous, row_stride = (x, columns) if x.flags.c_contiguous else (x.base, x.strides[0] // x.itemsize)
    arguments = halves, scales, contiguous, rows, columns, row_stride, halves.shape[2]
    launch(split_kernel, scales.shape, *arguments, SCALE_BLOCK=SCALE_BLOCK, num_warps=SPLIT_WARPS)
    return SplitOperand(halves, scales, x.shape)


def select_tile(m, n):
    """The ProductTile for a result of shape (m, n)."""
    return LARGE if triton.cdiv(m, LARGE.block_m) * triton.cdiv(n, LARGE.block_n) >= MIN_LARGE_TILES else SMALL


def partials_shape(m, n, k):
    """The shape (P, m n) of the float32 scratch of product() if the sum over k is divided into P parts; else None.

    P is a power of two, chosen so that all multiprocessors have work.
    """
    tile, parts = select_tile(m, n), 1
    tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    while tiles * parts * 2 <= PROGRAMS and parts * 2 * MIN_PART_K <= k:
        parts *= 2
    return (parts, m * n) if parts > 1 else None


def product(out, partials, a, b, bias=None, trans_a=False, trans_b=False, accumulate=False):
    """out (M, N) float32 = op(a) op(b) + bias. a, b: SplitOperands. bias (N) float32, or None.

    accumulate: add to the contents of out. out: contiguous, or the first columns of a contiguous array.
    partials: float32 scratch of partials_shape(M, N, K), or None to compute the whole sum in one program. Scratch is
    allowed only if out is contiguous and there is no bias and no accumulate.
    """
    (m, n), k = out.shape, a.shape[0 if trans_a else 1]
    block_m, block_n, block_k, num_warps, num_stages = select_tile(m, n)
    # launch() needs a contiguous array: pass the whole array, whose first element is that of out
    contiguous, row_stride = (out, n) if out.flags.c_contiguous else (out.base, out.strides[0] // out.itemsize)
    target, parts = (contiguous, 1) if partials is None else (partials, partials.shape[0])
    part_k = triton.cdiv(triton.cdiv(k, block_k), parts) * block_k  # terms of the sum per part
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n), parts)
    a_desc = descriptor(a.halves, (1, block_k, block_m) if trans_a else (1, block_m, block_k))
    b_desc = descriptor(b.halves, (1, block_n, block_k) if trans_b else (1, block_k, block_n))
    scale_strides = a.scales.shape[1], b.scales.shape[1]
    arguments = target, a_desc, a.scales, b_desc, b.scales, bias, m, n, k, row_stride, part_k, *scale_strides
    options = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SCALE_BLOCK=SCALE_BLOCK)
    options |= dict(TRANS_A=trans_a, TRANS_B=trans_b, ACCUMULATE=accumulate)
    launch(product_kernel, grid, *arguments, **options, num_warps=num_warps, num_stages=num_stages)
    if partials is not None:
        add_parts(out.reshape(-1), partials)


def add_parts(out, partials):
    """out (K) float32 = the sum of the P rows of partials (P, K), float32, in a fixed order."""
    parts, size = partials.shape
    if parts > MAX_PARTS:
        add_partials(partials, out)  # few columns: one program for 16 of them
    else:
        grid = (triton.cdiv(size, SUM_BLOCK),)
        launch(add_parts_kernel, grid, out, partials, size, PARTS=parts, BLOCK=SUM_BLOCK, num_warps=4)


@triton.jit
def split_kernel(
    halves_ptr, scales_ptr, x_ptr, n_rows, n_cols, row_stride, padded_cols, SCALE_BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (R / SCALE_BLOCK, C / SCALE_BLOCK): each program splits one block of x (R, C) and stores its scale."""
    rows = tl.program_id(0) * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)
    cols = tl.program_id(1) * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)
    # the mask is `cols < row_stride`: with `cols < n_cols`, which may be odd, the GPU would load single elements
    mask = (rows < n_rows)[:, None] & (cols < row_stride)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * row_stride + cols[None, :], mask, 0)
    x = tl.where(cols[None, :] < n_cols, x, 0)
    # the exponent field of a float32: a number in [2^e, 2^(e + 1)) has the exponent e + 127
    finite = tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)
    exponent = tl.max(tl.max(finite, 1), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 15)  # at least 2^-112, so that the scale below is a normal number
    x *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / scale = 2^(141 - exponent)
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales_ptr + block, ((exponent - 14) << 23).to(tl.float32, bitcast=True))  # scale = 2^(exponent - 141)
    high_ptrs = halves_ptr + rows.to(tl.int64)[:, None] * padded_cols + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < padded_cols)[None, :]
    high = x.to(tl.float16)
    tl.store(high_ptrs, high, mask)
    low_ptrs = high_ptrs + tl.full((), 1, tl.int64) * n_rows * padded_cols
    tl.store(low_ptrs, (x - high.to(tl.float32)).to(tl.float16), mask)


@triton.jit
def load_half(
    desc, half: tl.constexpr, row, col, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, TRANS: tl.constexpr
):  # fmt: skip
    """The float16 tile (BLOCK_ROWS, BLOCK_COLS) of high or low of op(x), whose first element is (row, col).

    desc: the descriptor of the halves of x. half: 0 for high, 1 for low. TRANS: op is the transpose.
    """
    if TRANS:
        tile = desc.load([half, col, row]).reshape(BLOCK_COLS, BLOCK_ROWS).T
    else:
        tile = desc.load([half, row, col]).reshape(BLOCK_ROWS, BLOCK_COLS)
    return tile


@triton.jit
def load_scale(scales_ptr, scale_stride, row, col, SCALE_BLOCK: tl.constexpr, TRANS: tl.constexpr):
    """The scale of the element (row, col) of op(x); TRANS: op is the transpose."""
    if TRANS:
        row, col = col, row
    return tl.load(scales_ptr + row // SCALE_BLOCK * scale_stride + col // SCALE_BLOCK)


@triton.jit
def product_kernel(
    out_ptr, a_desc, a_scales_ptr, b_desc, b_scales_ptr, bias_ptr, m, n, k, row_stride, part_k,
    a_scale_stride, b_scale_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of out, parts): each program computes one tile of out for one part of the sum over k.

    With several parts, out_ptr points to partials (parts, m n), which has one row per part.
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    start_m, start_n = tl.program_id(0) // tiles_n * BLOCK_M, tl.program_id(0) % tiles_n * BLOCK_N
    part_start = tl.program_id(1) * part_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_k in tl.range(part_start, tl.minimum(part_start + part_k, k), BLOCK_K):
        scale = load_scale(a_scales_ptr, a_scale_stride, start_m, start_k, SCALE_BLOCK, TRANS_A)
        scale *= load_scale(b_scales_ptr, b_scale_stride, start_k, start_n, SCALE_BLOCK, TRANS_B)
        a_high = load_half(a_desc, 0, start_m, start_k, BLOCK_M, BLOCK_K, TRANS_A)
        a_low = load_half(a_desc, 1, start_m, start_k, BLOCK_M, BLOCK_K, TRANS_A)
        b_high = load_half(b_desc, 0, start_k, start_n, BLOCK_K, BLOCK_N, TRANS_B)
        b_low = load_half(b_desc, 1, start_k, start_n, BLOCK_K, BLOCK_N, TRANS_B)
        tile = tl.dot(a_low, b_high)
        tile = tl.dot(a_high, b_low, tile)
        tile = tl.dot(a_high, b_high, tile)
        acc += tile * scale
    rows, cols = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, cols < n, 0)[None, :]
    out_ptrs = out_ptr + (tl.program_id(1).to(tl.int64) * m + rows)[:, None] * row_stride + cols[None, :]
    mask = (rows < m)[:, None] & (cols < n)[None, :]
    if ACCUMULATE:
        acc += tl.load(out_ptrs, mask, 0)
    tl.store(out_ptrs, acc, mask)


@triton.jit
def add_parts_kernel(out_ptr, partials_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (K / BLOCK): each program adds the PARTS rows, 2, 4 or 8, of BLOCK columns.

    The order is that of a tree: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PARTS == 2:
        total = load_pair(partials_ptr, 0, 1, size, offs)
    elif PARTS == 4:
        total = load_pair(partials_ptr, 0, 2, size, offs) + load_pair(partials_ptr, 1, 2, size, offs)
    else:
        even = load_pair(partials_ptr, 0, 4, size, offs) + load_pair(partials_ptr, 2, 4, size, offs)
        total = even + (load_pair(partials_ptr, 1, 4, size, offs) + load_pair(partials_ptr, 3, 4, size, offs))
    tl.store(out_ptr + offs, total, offs < size)


@triton.jit
def load_pair(partials_ptr, row: tl.constexpr, step: tl.constexpr, size, offs):
    """The sum of the rows `row` and `row + step`, at these columns."""
    first = partials_ptr + row * size + offs
    return tl.load(first, offs < size, 0) + tl.load(first + step * size, offs < size, 0)
