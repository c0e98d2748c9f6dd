"""Attention of float32 arrays on tensor cores: each product is the sum of three products of fp16 numbers.

A float32 array x is multiplied by powers of two and written as x_high + x_low, both fp16: about 22 bits. Then
a b = a_high b_high + a_high b_low + a_low b_high, with sums in float32; a_low b_low is too small to matter. Three
products of fp16 are faster than three products of tf32, whose two tf32 numbers take 8 bytes instead of 4.

The size of a row is the power of two with size <= norm < 2 size, for norms from 2^-112 to 2^127. x is multiplied by
2^14 / size, so no element exceeds 2^15; the largest fp16 number is 65504. There are two cases, for each head and array:

- Even: the norms of all rows, except those of zero rows, differ by at most a factor of 2^10. All rows have the size of
  the largest one, and the products of a tile are multiplied by one number. |dp| <= 2^30 and |dp - delta| <= 2^31 in
  these units, because a scalar product is at most the product of the norms. So ds, multiplied by 2^-16, does not
  exceed 2^15. p is at most 1 and is multiplied by 2^14.
- Uneven: the norms differ more, or are infinite or NaN. Each row has its own size, so a large row does not change the
  precision of others. Each column of a tile is multiplied by the size of its row. In a product that adds over these
  rows, such as p v, each row of p times the sizes has its own power of two: see weigh(). It is slower.

If one of the arrays of a head is uneven, its programs compute all products in the uneven way. Errors: below 2^-22 of an
element, or 2^-39 of the size of its row if that is more; if even 2^-29, and 2^-20 of ds of the smallest rows. Powers of
two add no rounding errors. A row that contains infinity or NaN gives NaN to all results that depend on it.

Launches: norms_kernel, split_kernel (which also computes delta), then forward_kernel or backward_kernel. The formulas
are those of attention/launches.py of stage 2.
"""

# Symbols and constants: see attention/forward.py of stage 2. x, x_low: the high and the low fp16 numbers of a tile.
# scale: log2(e) / sqrt(D) in forward; in backward 1 / sqrt(D), and score_scale is log2(e) / sqrt(D)
# lse and delta (B, H, T_q): float32
# q_desc, k_desc, v_desc, dy_desc: descriptors of float32 arrays in norms_kernel and split_kernel, then of halves
# An array of halves (2 B, H, T, D) is contiguous fp16: x_high of batch entry b is entry b, x_low is entry B + b.
# norms (2, arrays, B H, tiles): the largest and the smallest norm of the ROWS rows of a tile
# sizes (arrays, B H, 1 + stride), stride >= T: the size of all rows, or 0 if the array is uneven; then that of each row
# float32; the arrays are q, k, v and in backward dy, in this order

import triton
import triton.language as tl

from stage2_cuda.attention.backward import load_rows, query_range, row_delta
from stage2_cuda.attention.forward import (
    LN2,
    LOG2E,
    LOWEST,
    causal_mask,
    head_of_output,
    key_range,
    load_tile,
    mask_tile,
    softmax_step,
    store_tile,
)

ROWS = tl.constexpr(64)  # of one program of norms_kernel and split_kernel
NORMS = tl.constexpr(256)  # that split_kernel loads at a time
P_SCALE, DS_SCALE = tl.constexpr(2.0**14), tl.constexpr(2.0**-16)
UNIT = tl.constexpr(2.0**-14)  # x = (x_high + x_low) size UNIT
UNITS = tl.constexpr(2.0**-28)  # of a product of two numbers
EVEN_RATIO = tl.constexpr(2.0**10)
SMALLEST = tl.constexpr(2.0**-126)  # the smallest normal float32


# -- halves ------------------------------------------------------------------------------------------------------------


@triton.jit
def split(x):
    """x (float32, at most 2^15) as two fp16 numbers."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def multiply(a, a_low, b, b_low, TRANSPOSED: tl.constexpr = False):
    """a b; the largest product is added last. TRANSPOSED: add in the order of b' a', which gives the same bits.

    Tensor cores truncate when they add, so they must not add a sum over many tiles. The callers multiply the result by
    a constant before they add it: otherwise Triton would make their sum the accumulator of tl.dot.
    """
    if TRANSPOSED:
        tile = tl.dot(a, b_low)
        tile = tl.dot(a_low, b, tile)
    else:
        tile = tl.dot(a_low, b)
        tile = tl.dot(a, b_low, tile)
    return tl.dot(a, b, tile)


@triton.jit
def load_halves(desc, b, h, row, H, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    B = tl.num_programs(0) // H
    return load_tile(desc, b, h, row, BLOCK_ROWS, HEAD_DIM), load_tile(desc, B + b, h, row, BLOCK_ROWS, HEAD_DIM)


@triton.jit
def exponent_of(norm):
    """The bits of the exponent of a norm (its exponent + 127), at least 15 and at most 254.

    With these limits size_of() and scale_of() are normal numbers, also for zero, infinity and NaN.
    """
    return tl.minimum(tl.maximum((norm.to(tl.int32, bitcast=True) >> 23) & 255, 15), 254)


@triton.jit
def size_of(exponent):
    """The power of two with this exponent."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(exponent):
    """2^14 / size_of(exponent)."""
    return ((2 * 127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def array_and_head():
    """The index of this program's array and head."""
    return tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def row_norms(x):
    """The norms of the rows of x; infinite or NaN if a row contains infinity or NaN."""
    # without this power of two, squares could be too large or too small for float32
    exponent = exponent_of(tl.max(tl.abs(x), 1))
    x *= scale_of(exponent)[:, None]
    return tl.sqrt(tl.sum(x * x, 1)) * UNIT * size_of(exponent)


@triton.jit
def store_norms(desc, norms, H, HEAD_DIM: tl.constexpr):
    x = load_tile(desc, tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1) * ROWS, ROWS, HEAD_DIM)
    norm = row_norms(x)
    finite = norm < float("inf")  # false for NaN
    largest = tl.max(tl.where(finite, norm, 0.0))
    smallest = tl.min(tl.where(finite, tl.where(norm > 0, norm, float("inf")), -1.0))  # -1: uneven, whatever the others
    at = norms + array_and_head() * tl.num_programs(1) + tl.program_id(1)
    tl.store(at, largest)
    tl.store(at + tl.num_programs(2) * tl.num_programs(0).to(tl.int64) * tl.num_programs(1), smallest)


@triton.jit
def norms_kernel(q_desc, k_desc, v_desc, dy_desc, norms, H, HEAD_DIM: tl.constexpr):
    """The largest and the smallest norm of ROWS rows of array number tl.program_id(2). dy_desc is None in forward."""
    if tl.program_id(2) == 0:
        store_norms(q_desc, norms, H, HEAD_DIM)
    elif tl.program_id(2) == 1:
        store_norms(k_desc, norms, H, HEAD_DIM)
    elif tl.program_id(2) == 2:
        store_norms(v_desc, norms, H, HEAD_DIM)
    elif dy_desc is not None:
        store_norms(dy_desc, norms, H, HEAD_DIM)


@triton.jit
def split_rows(desc, halves, norms, sizes, T, stride, D, H, HEAD_DIM: tl.constexpr):
    """Store the sizes and the halves of ROWS rows; returns these rows (float32, not multiplied)."""
    head, start, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS, tl.num_programs(1)
    largest, smallest, norms = 0.0, float("inf"), norms + array_and_head() * tiles
    for first in range(0, tiles, NORMS):
        offs = first + tl.arange(0, NORMS)
        at = norms + offs
        largest = tl.maximum(largest, tl.max(tl.load(at, mask=offs < tiles, other=0.0)))
        at += tl.num_programs(2) * tl.num_programs(0).to(tl.int64) * tiles
        smallest = tl.minimum(smallest, tl.min(tl.load(at, mask=offs < tiles, other=float("inf"))))
    uneven = largest > smallest * EVEN_RATIO
    x = load_tile(desc, tl.program_id(0) // H, tl.program_id(0) % H, start, ROWS, HEAD_DIM)
    exponent = exponent_of(tl.full([ROWS], largest, tl.float32))
    if uneven:
        exponent = exponent_of(row_norms(x))
    high, low = split(x * scale_of(exponent)[:, None])
    rows, cols = start + tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    sizes += array_and_head() * (1 + stride)
    if start == 0:
        tl.store(sizes, tl.where(uneven, 0.0, size_of(exponent_of(largest))))
    tl.store(sizes + 1 + rows, size_of(exponent), mask=rows < T)
    at, mask = halves + (head * T + rows)[:, None] * D + cols[None, :], (rows < T)[:, None] & (cols < D)[None, :]
    tl.store(at, high, mask=mask)
    tl.store(at + tl.num_programs(0).to(tl.int64) * T * D, low, mask=mask)
    return x


@triton.jit
def split_kernel(
    q_desc, k_desc, v_desc, dy_desc, y_desc, q_halves, k_halves, v_halves, dy_halves, delta_ptr, norms, sizes,
    T_q, T_k, stride, D, H, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Sizes and halves of ROWS rows of array number tl.program_id(2); with dy also delta. In forward, dy is None."""
    if tl.program_id(2) == 0:
        split_rows(q_desc, q_halves, norms, sizes, T_q, stride, D, H, HEAD_DIM)
    elif tl.program_id(2) == 1:
        split_rows(k_desc, k_halves, norms, sizes, T_k, stride, D, H, HEAD_DIM)
    elif tl.program_id(2) == 2:
        split_rows(v_desc, v_halves, norms, sizes, T_k, stride, D, H, HEAD_DIM)
    elif dy_desc is not None:
        dy = split_rows(dy_desc, dy_halves, norms, sizes, T_q, stride, D, H, HEAD_DIM)
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        y = load_tile(y_desc, tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1) * ROWS, ROWS, HEAD_DIM)
        tl.store(delta_ptr + tl.program_id(0).to(tl.int64) * T_q + rows, row_delta(y, dy), mask=rows < T_q)


# -- sizes -------------------------------------------------------------------------------------------------------------


@triton.jit
def sizes_of(sizes, stride, NUMBER: tl.constexpr):
    """(The size of all rows of array number NUMBER in this head, or 0 if it is uneven; a pointer to the row sizes)."""
    sizes += (NUMBER * tl.num_programs(0).to(tl.int64) + tl.program_id(0)) * (1 + stride)
    return tl.load(sizes), sizes + 1


@triton.jit
def sizes_of_all(sizes, stride):
    """sizes_of() of q, k, v and dy, as one tuple of 8."""
    q_and_k = sizes_of(sizes, stride, 0) + sizes_of(sizes, stride, 1)
    return q_and_k + sizes_of(sizes, stride, 2) + sizes_of(sizes, stride, 3)


@triton.jit
def is_uneven(sizes, stride, ARRAYS: tl.constexpr):
    """Whether one of the arrays of this head is uneven."""
    smallest = 1.0
    for number in tl.static_range(ARRAYS):
        smallest = tl.minimum(smallest, sizes_of(sizes, stride, number)[0])
    return smallest == 0


@triton.jit
def product_sizes(tile, row_factor, sizes, offs, T):
    """The tile of a product of halves, times row_factor (rows) and the sizes of the rows offs that are its columns."""
    return tile * row_factor[:, None] * tl.load(sizes + offs, mask=offs < T, other=0.0)[None, :]


@triton.jit
def weigh(w, sizes, offs, T):
    """(halves of w sizes unit, UNITS / unit (rows, 1)), for a product that adds over the rows offs of an array.

    sizes: the sizes of these rows. Each row of w has its own unit, a power of two that brings the largest element of
    w sizes to [2^14, 2^15).
    """
    w *= tl.load(sizes + offs, mask=offs < T, other=0.0)[None, :]
    exponent = exponent_of(tl.max(tl.abs(w), 1))[:, None]
    high, low = split(w * scale_of(exponent))
    return high, low, size_of(exponent) * UNITS


@triton.jit
def weighted_rows(w, x, x_low, sizes, offs, T, SCALE: tl.constexpr, UNEVEN: tl.constexpr):
    """w x, for the halves x and x_low of the rows offs of an array. sizes: the sizes of these rows.

    SCALE: a power of two that brings w into the range of fp16; with UNEVEN, weigh() chooses one for each row of w.
    """
    if UNEVEN:
        high, low, unscale = weigh(w, sizes, offs, T)
    else:
        high, low = split(w * SCALE)
        unscale = 1 / SCALE
    return multiply(high, low, x, x_low) * unscale


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def forward_tile(
    y_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, T_q, T_k, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, IN_PARTS: tl.constexpr, NATURAL: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_size, q_sizes = sizes_of(sizes, stride, 0)
    k_size, k_sizes = sizes_of(sizes, stride, 1)
    v_size, v_sizes = sizes_of(sizes, stride, 2)
    if UNEVEN:
        s_factor, scale = tl.load(q_sizes + offs_m, mask=offs_m < T_q, other=0.0) * (scale * UNITS), 1.0
    else:
        # not 0, or a masked score would become -inf * 0 = NaN
        scale = tl.maximum(scale * (q_size * UNIT) * (k_size * UNIT), SMALLEST)
    q, q_low = load_halves(q_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin, end = key_range(start_m, T_k, 0, BLOCK_M, BLOCK_N, 1, CAUSAL, MASK_KEYS, IN_PARTS)
    # two stages, so that the uneven case needs no more shared memory than the even one
    for start_n in tl.range(begin, end, BLOCK_N, num_stages=2 if UNEVEN else None):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k, k_low = load_halves(k_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
        s = multiply(q, q_low, k.T, k_low.T)
        if UNEVEN:
            s = product_sizes(s, s_factor, k_sizes, offs_n, T_k)
        s = mask_tile(s, float("-inf"), offs_m, start_m, start_n, T_k, BLOCK_N, CAUSAL, MASK_KEYS)
        p, row_max, row_sum, acc = softmax_step(s, row_max, row_sum, acc, scale)
        v, v_low = load_halves(v_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
        acc += weighted_rows(p, v, v_low, v_sizes, offs_n, T_k, P_SCALE, UNEVEN)
    lse = row_max + tl.math.log2(row_sum)
    if NATURAL:
        lse *= LN2
    if IN_PARTS:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # a part without keys: y is 0, the logsumexp is -inf
    tl.store(lse_ptr + head_of_output(tl.program_id(0).to(tl.int64), IN_PARTS) * T_q + offs_m, lse, mask=offs_m < T_q)
    y = acc / row_sum[:, None]
    if not UNEVEN:
        y *= v_size * UNIT
    store_tile(y_desc, y, b, head_of_output(h, IN_PARTS), start_m, BLOCK_M, HEAD_DIM)


@triton.jit
def forward_kernel(
    y_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, T_q, T_k, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, IN_PARTS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """As forward_kernel in attention/forward.py of stage 2; q_desc, k_desc and v_desc are those of the halves."""
    if is_uneven(sizes, stride, 3):
        forward_tile(
            y_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, T_q, T_k, H, scale,
            BLOCK_M, BLOCK_N, HEAD_DIM, CAUSAL, MASK_KEYS, IN_PARTS, NATURAL, True,
        )  # fmt: skip
    else:
        forward_tile(
            y_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, T_q, T_k, H, scale,
            BLOCK_M, BLOCK_N, HEAD_DIM, CAUSAL, MASK_KEYS, IN_PARTS, NATURAL, False,
        )  # fmt: skip


# -- backward ----------------------------------------------------------------------------------------------------------


@triton.jit
def weights_of(s, s_scale, lse, UNEVEN: tl.constexpr):
    """p = exp2(s_scale s - lse). The rounding of a large lse is large: without the minimum, p could be infinite."""
    exponent = s * s_scale - lse
    if UNEVEN:
        exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.math.exp2(exponent)


@triton.jit
def dq_tile(
    dq_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, b, h, start_m, T_q, T_k, H,
    scale, score_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, NATURAL: tl.constexpr, IN_PARTS: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    """dq of the queries [start_m, start_m + BLOCK_M). With IN_PARTS: the terms of a part of the keys.

    lse_ptr and delta_ptr point to the T_q elements of this head.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_size, q_sizes, k_size, k_sizes, v_size, v_sizes, dy_size, dy_sizes = sizes_of_all(sizes, stride)
    q, q_low = load_halves(q_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
    dy, dy_low = load_halves(dy_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
    delta = tl.load(delta_ptr + offs_m, mask=offs_m < T_q, other=0.0)
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=0.0)
    if NATURAL:
        lse *= LOG2E
    if UNEVEN:
        s_factor = tl.load(q_sizes + offs_m, mask=offs_m < T_q, other=0.0) * (score_scale * UNITS)
        dp_factor, s_scale = tl.load(dy_sizes + offs_m, mask=offs_m < T_q, other=0.0) * UNITS, 1.0
    else:
        s_scale = score_scale * (q_size * UNIT) * (k_size * UNIT)
        delta = delta * (1 / UNIT / dy_size) * (1 / UNIT / v_size)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin, end = key_range(start_m, T_k, 0, BLOCK_M, BLOCK_N, 1, CAUSAL, MASK_KEYS, IN_PARTS)
    for start_n in tl.range(begin, end, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k, k_low = load_halves(k_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
        s = multiply(q, q_low, k.T, k_low.T)
        v, v_low = load_halves(v_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
        dp = multiply(dy, dy_low, v.T, v_low.T)
        if UNEVEN:
            s = product_sizes(s, s_factor, k_sizes, offs_n, T_k)
            dp = product_sizes(dp, dp_factor, v_sizes, offs_n, T_k)
        p = weights_of(s, s_scale, lse[:, None], UNEVEN)
        p = mask_tile(p, 0.0, offs_m, start_m, start_n, T_k, BLOCK_N, CAUSAL, MASK_KEYS)
        dq += weighted_rows(p * (dp - delta[:, None]), k, k_low, k_sizes, offs_n, T_k, DS_SCALE, UNEVEN)
    if UNEVEN:
        dq *= scale
    else:
        dq = dq * (dy_size * UNIT) * (scale * (v_size * UNIT) * (k_size * UNIT))
    store_tile(dq_desc, dq, b, head_of_output(h, IN_PARTS), start_m, BLOCK_M, HEAD_DIM)


@triton.jit
def dkdv_tile(
    dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, b, h, start_n, T_q, T_k, H,
    scale, score_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, IN_PARTS: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys [start_n, start_n + BLOCK_N). With IN_PARTS: the terms of a part of the queries.

    Here the tiles of s, p, dp and ds are transposed.
    """
    offs_n = start_n + tl.arange(0, BLOCK_N)
    q_size, q_sizes, k_size, k_sizes, v_size, v_sizes, dy_size, dy_sizes = sizes_of_all(sizes, stride)
    k, k_low = load_halves(k_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
    v, v_low = load_halves(v_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
    if UNEVEN:
        s_factor = tl.load(k_sizes + offs_n, mask=offs_n < T_k, other=0.0) * (score_scale * UNITS)
        dp_factor, s_scale = tl.load(v_sizes + offs_n, mask=offs_n < T_k, other=0.0) * UNITS, 1.0
    else:
        s_scale = score_scale * (q_size * UNIT) * (k_size * UNIT)
    dk, dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32), tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    begin, end = query_range(start_n, T_q, 0, BLOCK_M, BLOCK_N, 1, CAUSAL, IN_PARTS)
    for start_m in tl.range(begin, end, BLOCK_M):
        start_m = tl.multiple_of(start_m, BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q, q_low = load_halves(q_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
        s = multiply(k, k_low, q.T, q_low.T, True)
        if UNEVEN:
            s = product_sizes(s, s_factor, q_sizes, offs_m, T_q)
        lse = load_rows(lse_ptr, 0, offs_m, start_m, T_q, EVEN, False)
        if NATURAL:
            lse *= LOG2E
        p = weights_of(s, s_scale, lse[None, :], UNEVEN)
        if CAUSAL:
            if start_m < start_n + BLOCK_N:
                p = tl.where(causal_mask(offs_m, offs_n).T, p, 0.0)
        dy, dy_low = load_halves(dy_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
        dv += weighted_rows(p, dy, dy_low, dy_sizes, offs_m, T_q, P_SCALE, UNEVEN)
        dp = multiply(v, v_low, dy.T, dy_low.T)
        delta = load_rows(delta_ptr, 0, offs_m, start_m, T_q, EVEN, False)
        if UNEVEN:
            dp = product_sizes(dp, dp_factor, dy_sizes, offs_m, T_q)
        else:
            delta = delta * (1 / UNIT / dy_size) * (1 / UNIT / v_size)
        dk += weighted_rows(p * (dp - delta[None, :]), q, q_low, q_sizes, offs_m, T_q, DS_SCALE, UNEVEN)
    if UNEVEN:
        dk *= scale
    else:
        dv *= dy_size * UNIT
        dk = dk * (dy_size * UNIT) * (scale * (v_size * UNIT) * (q_size * UNIT))
    head = head_of_output(h, IN_PARTS)
    store_tile(dv_desc, dv, b, head, start_n, BLOCK_N, HEAD_DIM)
    store_tile(dk_desc, dk, b, head, start_n, BLOCK_N, HEAD_DIM)


@triton.jit
def backward_tile(
    dq_desc, dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, T_q, T_k, H,
    scale, score_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    MASK_KEYS: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, IN_PARTS: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    b, h, head_start = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T_q
    tile, n_tiles = tl.program_id(1) // 2, tl.num_programs(1) // 2
    delta_ptr, lse_ptr = delta_ptr + head_start, lse_ptr + head_start
    if tl.program_id(1) % 2 == 0:
        dkdv_tile(
            dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, b, h, tile * BLOCK_N,
            T_q, T_k, H, scale, score_scale, BLOCK_M, BLOCK_N, HEAD_DIM, CAUSAL, NATURAL, EVEN, IN_PARTS, UNEVEN,
        )  # fmt: skip
    else:
        dq_tile(
            dq_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, b, h,
            (n_tiles - 1 - tile) * BLOCK_M, T_q, T_k, H, scale, score_scale,
            BLOCK_M, BLOCK_N, HEAD_DIM, CAUSAL, MASK_KEYS, NATURAL, IN_PARTS, UNEVEN,
        )  # fmt: skip


@triton.jit
def backward_kernel(
    dq_desc, dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, T_q, T_k, H,
    scale, score_scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    MASK_KEYS: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys in the even programs, dq of BLOCK_M = BLOCK_N queries in the odd programs."""
    if is_uneven(sizes, stride, 4):
        backward_tile(
            dq_desc, dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, T_q, T_k, H,
            scale, score_scale, BLOCK_M, BLOCK_N, HEAD_DIM, CAUSAL, MASK_KEYS, NATURAL, EVEN, IN_PARTS, True,
        )  # fmt: skip
    else:
        backward_tile(
            dq_desc, dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, sizes, stride, T_q, T_k, H,
            scale, score_scale, BLOCK_M, BLOCK_N, HEAD_DIM, CAUSAL, MASK_KEYS, NATURAL, EVEN, IN_PARTS, False,
        )  # fmt: skip
