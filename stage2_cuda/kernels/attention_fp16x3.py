"""Attention of float32 arrays on tensor cores: each product is the sum of three products of fp16 numbers.

A float32 array x is multiplied by a power of two, its scale, and written as x_high + x_low, both fp16: about 22 bits.
Then a b = a_high b_high + a_high b_low + a_low b_high, with sums in float32; a_low b_low is too small to matter. Three
products of fp16 are faster than three products of tf32, whose two tf32 numbers take 8 bytes instead of 4.

Each head of q, k, v and dy has its own scale. The largest norm of its rows, multiplied by the scale, is in
[2^14, 2^15), or smaller if the norm is below 2^-112. So

- no element of x, multiplied by the scale, exceeds 2^15; the largest fp16 number is 65504;
- |dp| <= 2^30 and |dp - delta| <= 2^31, both multiplied by the scales of dy and v, because a scalar product is at most
  the product of the norms. So ds, multiplied by 2^-16 too, does not exceed 2^15.

Errors: below 2^-22 of an element, or 2^-39 of the largest norm of the head if that is more: a row that is much smaller
than the largest one keeps fewer bits. p is at most 1 and is multiplied by 2^14. All scales are powers of two, so they
add no rounding errors. q, k, v and dy must be finite.

Launches: norms_kernel, split_kernel (which also computes delta), then forward_kernel or backward_kernel. The formulas
are those of attention.py.
"""

# Symbols and constants: see attention_forward.py. x, x_low: the high and the low fp16 numbers of a tile.
# scale: log2(e) / sqrt(D) in forward, 1 / sqrt(D) in backward; lse and delta (B, H, T_q): float32
# q_desc, k_desc, v_desc, dy_desc: descriptors of float32 arrays in norms_kernel and split_kernel, then of halves
# An array of halves (2 B, H, T, D) is contiguous fp16: x_high of batch entry b is entry b, x_low is entry B + b.
# norms (arrays, B H, tiles), scales (arrays, B H): float32; the arrays are q, k, v and in backward dy, in this order.

import triton
import triton.language as tl

from stage2_cuda.kernels.attention_backward import load_rows, query_range, row_delta
from stage2_cuda.kernels.attention_forward import (
    LN2,
    LOG2E,
    LOWEST,
    causal_mask,
    head_of_output,
    key_range,
    load_tile,
    mask_tile,
    part_of_range,
    softmax_step,
    store_tile,
)

ROWS = tl.constexpr(64)  # of one program of norms_kernel and split_kernel
NORMS = tl.constexpr(256)  # that split_kernel loads at a time
P_SCALE, DS_SCALE = tl.constexpr(2.0**14), tl.constexpr(2.0**-16)
P_UNSCALE, DS_UNSCALE = tl.constexpr(2.0**-14), tl.constexpr(2.0**16)
SMALLEST = tl.constexpr(2.0**-126)  # the smallest normal float32


# -- halves ------------------------------------------------------------------------------------------------------------


@triton.jit
def split(x):
    """x (float32, at most 2^15) as two fp16 numbers."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def multiply(a, a_low, b, b_low):
    """a b; the largest product is added last.

    Tensor cores truncate when they add, so they must not add a sum over many tiles. The callers multiply the result by
    a constant before they add it: otherwise Triton would make their sum the accumulator of tl.dot.
    """
    tile = tl.dot(a_low, b)
    tile = tl.dot(a, b_low, tile)
    return tl.dot(a, b, tile)


@triton.jit
def load_halves(desc, b, h, row, H, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    B = tl.num_programs(0) // H
    return load_tile(desc, b, h, row, BLOCK_ROWS, HEAD_DIM), load_tile(desc, B + b, h, row, BLOCK_ROWS, HEAD_DIM)


@triton.jit
def scale_of(norm):
    """The power of two that brings `norm` to [2^14, 2^15), if `norm` is at least 2^-112; otherwise 2^126."""
    # the bits 23 to 30 of a float32 are its exponent + 127
    exponent = tl.maximum(norm.to(tl.int32, bitcast=True) >> 23, 15)  # so that 1 / scale is a normal number
    return ((2 * 127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_index():
    """The index of this program's array and head in `scales`, and of its first tile in `norms` / tiles."""
    return tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def store_norm(desc, norms, H, HEAD_DIM: tl.constexpr):
    x = load_tile(desc, tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1) * ROWS, ROWS, HEAD_DIM)
    largest = tl.max(tl.abs(x))  # dividing by it avoids squares that are too large or too small for float32
    x = x / tl.where(largest > 0, largest, 1.0)
    norm = largest * tl.sqrt(tl.max(tl.sum(x * x, 1)))
    tl.store(norms + scale_index() * tl.num_programs(1) + tl.program_id(1), norm)


@triton.jit
def norms_kernel(q_desc, k_desc, v_desc, dy_desc, norms, H, HEAD_DIM: tl.constexpr):
    """The largest norm of ROWS rows of array number tl.program_id(2). dy_desc is None in forward."""
    if tl.program_id(2) == 0:
        store_norm(q_desc, norms, H, HEAD_DIM)
    elif tl.program_id(2) == 1:
        store_norm(k_desc, norms, H, HEAD_DIM)
    elif tl.program_id(2) == 2:
        store_norm(v_desc, norms, H, HEAD_DIM)
    elif dy_desc is not None:
        store_norm(dy_desc, norms, H, HEAD_DIM)


@triton.jit
def split_rows(desc, halves, norms, scales, T, D, H, HEAD_DIM: tl.constexpr):
    """Store the scale of this head, and the halves of ROWS rows; returns these rows (float32, without the scale)."""
    head, start, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS, tl.num_programs(1)
    largest = 0.0
    for first in range(0, tiles, NORMS):
        offs = first + tl.arange(0, NORMS)
        norm = tl.load(norms + scale_index() * tiles + offs, mask=offs < tiles, other=0.0)
        largest = tl.maximum(largest, tl.max(norm))
    scale = scale_of(largest)
    if tl.program_id(1) == 0:
        tl.store(scales + scale_index(), scale)
    x = load_tile(desc, tl.program_id(0) // H, tl.program_id(0) % H, start, ROWS, HEAD_DIM)
    high, low = split(x * scale)
    rows, cols = start + tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    at, mask = halves + (head * T + rows)[:, None] * D + cols[None, :], (rows < T)[:, None] & (cols < D)[None, :]
    tl.store(at, high, mask=mask)
    tl.store(at + tl.num_programs(0).to(tl.int64) * T * D, low, mask=mask)
    return x


@triton.jit
def split_kernel(
    q_desc, k_desc, v_desc, dy_desc, y_desc, q_halves, k_halves, v_halves, dy_halves, delta_ptr, norms, scales,
    T_q, T_k, D, H, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Scale and halves of ROWS rows of array number tl.program_id(2); with dy also delta. In forward, dy is None."""
    if tl.program_id(2) == 0:
        split_rows(q_desc, q_halves, norms, scales, T_q, D, H, HEAD_DIM)
    elif tl.program_id(2) == 1:
        split_rows(k_desc, k_halves, norms, scales, T_k, D, H, HEAD_DIM)
    elif tl.program_id(2) == 2:
        split_rows(v_desc, v_halves, norms, scales, T_k, D, H, HEAD_DIM)
    elif dy_desc is not None:
        dy = split_rows(dy_desc, dy_halves, norms, scales, T_q, D, H, HEAD_DIM)
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        y = load_tile(y_desc, tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1) * ROWS, ROWS, HEAD_DIM)
        tl.store(delta_ptr + tl.program_id(0).to(tl.int64) * T_q + rows, row_delta(y, dy), mask=rows < T_q)


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def forward_kernel(
    y_desc, lse_ptr, q_desc, k_desc, v_desc, scales, T_q, T_k, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, IN_PARTS: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """As forward_kernel in attention_forward.py; q_desc, k_desc and v_desc are those of the halves."""
    b, h, heads = tl.program_id(0) // H, tl.program_id(0) % H, tl.num_programs(0)
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    scales += tl.program_id(0)
    # not 0, or a masked score would become -inf * 0 = NaN
    scale = tl.maximum(scale / tl.load(scales) / tl.load(scales + heads), SMALLEST)
    q, q_low = load_halves(q_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
    row_max = tl.full([BLOCK_M], LOWEST if IN_PARTS else float("-inf"), tl.float32)  # see attention_forward.py
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin, end = key_range(start_m, T_k, 0, BLOCK_M, BLOCK_N, 1, CAUSAL, MASK_KEYS)
    if IN_PARTS:
        begin, end = part_of_range(begin, end, BLOCK_N)
    for start_n in tl.range(begin, end, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k, k_low = load_halves(k_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
        s = multiply(q, q_low, k.T, k_low.T)
        s = mask_tile(s, float("-inf"), offs_m, start_m, start_n, T_k, BLOCK_N, CAUSAL, MASK_KEYS)
        p, row_max, row_sum, acc = softmax_step(s, row_max, row_sum, acc, scale)
        v, v_low = load_halves(v_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
        p_high, p_low = split(p * P_SCALE)
        acc += multiply(p_high, p_low, v, v_low) * P_UNSCALE
    lse = row_max + tl.math.log2(row_sum)
    if NATURAL:
        lse *= LN2
    if IN_PARTS:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # a part without keys: y is 0, the logsumexp is -inf
    tl.store(lse_ptr + head_of_output(tl.program_id(0).to(tl.int64), IN_PARTS) * T_q + offs_m, lse, mask=offs_m < T_q)
    y = acc / row_sum[:, None] / tl.load(scales + 2 * heads)
    store_tile(y_desc, y, b, head_of_output(h, IN_PARTS), start_m, BLOCK_M, HEAD_DIM)


# -- backward ----------------------------------------------------------------------------------------------------------


@triton.jit
def ds_halves(p, dp, delta):
    """The halves of ds * DS_SCALE, in the units of dp."""
    return split(p * (dp - delta) * DS_SCALE)


@triton.jit
def load_scales(scales):
    """The scales of q, k, v and dy of this head."""
    scales, heads = scales + tl.program_id(0), tl.num_programs(0)
    return tl.load(scales), tl.load(scales + heads), tl.load(scales + 2 * heads), tl.load(scales + 3 * heads)


@triton.jit
def dq_tile(
    dq_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, scales, b, h, start_m, T_q, T_k, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, NATURAL: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """dq of the queries [start_m, start_m + BLOCK_M). With IN_PARTS: the terms of a part of the keys.

    lse_ptr and delta_ptr point to the T_q elements of this head.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q_scale, k_scale, v_scale, dy_scale = load_scales(scales)
    q, q_low = load_halves(q_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
    dy, dy_low = load_halves(dy_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
    delta = tl.load(delta_ptr + offs_m, mask=offs_m < T_q, other=0.0) * dy_scale * v_scale
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=0.0)
    if NATURAL:
        lse *= LOG2E
    s_scale = scale * LOG2E / q_scale / k_scale
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin, end = key_range(start_m, T_k, 0, BLOCK_M, BLOCK_N, 1, CAUSAL, MASK_KEYS)
    if IN_PARTS:
        begin, end = part_of_range(begin, end, BLOCK_N)
    for start_n in tl.range(begin, end, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        k, k_low = load_halves(k_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
        s = multiply(q, q_low, k.T, k_low.T)
        v, v_low = load_halves(v_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
        dp = multiply(dy, dy_low, v.T, v_low.T)
        p = tl.math.exp2(s * s_scale - lse[:, None])
        p = mask_tile(p, 0.0, offs_m, start_m, start_n, T_k, BLOCK_N, CAUSAL, MASK_KEYS)
        ds, ds_low = ds_halves(p, dp, delta[:, None])
        dq += multiply(ds, ds_low, k, k_low) * DS_UNSCALE
    dq = dq / dy_scale * (scale / v_scale / k_scale)
    store_tile(dq_desc, dq, b, head_of_output(h, IN_PARTS), start_m, BLOCK_M, HEAD_DIM)


@triton.jit
def dkdv_tile(
    dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, scales, b, h, start_n, T_q, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys [start_n, start_n + BLOCK_N). With IN_PARTS: the terms of a part of the queries.

    Here the tiles of s, p, dp and ds are transposed.
    """
    offs_n = start_n + tl.arange(0, BLOCK_N)
    q_scale, k_scale, v_scale, dy_scale = load_scales(scales)
    k, k_low = load_halves(k_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
    v, v_low = load_halves(v_desc, b, h, start_n, H, BLOCK_N, HEAD_DIM)
    s_scale = scale * LOG2E / q_scale / k_scale
    dk, dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32), tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    begin, end = query_range(start_n, T_q, 0, BLOCK_M, BLOCK_N, 1, CAUSAL)
    if IN_PARTS:
        begin, end = part_of_range(begin, end, BLOCK_M)
    for start_m in tl.range(begin, end, BLOCK_M):
        start_m = tl.multiple_of(start_m, BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q, q_low = load_halves(q_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
        s = multiply(k, k_low, q.T, q_low.T)
        lse = load_rows(lse_ptr, 0, offs_m, start_m, T_q, EVEN, False)
        if NATURAL:
            lse *= LOG2E
        p = tl.math.exp2(s * s_scale - lse[None, :])
        if CAUSAL:
            if start_m < start_n + BLOCK_N:
                p = tl.where(causal_mask(offs_m, offs_n).T, p, 0.0)
        dy, dy_low = load_halves(dy_desc, b, h, start_m, H, BLOCK_M, HEAD_DIM)
        p_high, p_low = split(p * P_SCALE)
        dv += multiply(p_high, p_low, dy, dy_low) * P_UNSCALE
        dp = multiply(v, v_low, dy.T, dy_low.T)
        delta = load_rows(delta_ptr, 0, offs_m, start_m, T_q, EVEN, False) * dy_scale * v_scale
        ds, ds_low = ds_halves(p, dp, delta[None, :])
        dk += multiply(ds, ds_low, q, q_low) * DS_UNSCALE
    head = head_of_output(h, IN_PARTS)
    store_tile(dv_desc, dv / dy_scale, b, head, start_n, BLOCK_N, HEAD_DIM)
    store_tile(dk_desc, dk / dy_scale * (scale / v_scale / q_scale), b, head, start_n, BLOCK_N, HEAD_DIM)


@triton.jit
def backward_kernel(
    dq_desc, dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, scales, T_q, T_k, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys in the even programs, dq of BLOCK_M = BLOCK_N queries in the odd programs."""
    b, h, head_start = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T_q
    tile, n_tiles = tl.program_id(1) // 2, tl.num_programs(1) // 2
    delta_ptr, lse_ptr = delta_ptr + head_start, lse_ptr + head_start
    if tl.program_id(1) % 2 == 0:
        dkdv_tile(
            dk_desc, dv_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, scales, b, h, tile * BLOCK_N,
            T_q, H, scale, BLOCK_M, BLOCK_N, HEAD_DIM, CAUSAL, NATURAL, EVEN, IN_PARTS,
        )  # fmt: skip
    else:
        dq_tile(
            dq_desc, delta_ptr, dy_desc, lse_ptr, q_desc, k_desc, v_desc, scales, b, h, (n_tiles - 1 - tile) * BLOCK_M,
            T_q, T_k, H, scale, BLOCK_M, BLOCK_N, HEAD_DIM, CAUSAL, MASK_KEYS, NATURAL, IN_PARTS,
        )  # fmt: skip
