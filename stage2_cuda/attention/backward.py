"""The backward kernels of launches.py: dq_kernel and dkdv_kernel, or for a short T both in one launch.

dq: one program per BLOCK_M queries; it loops over the keys, BLOCK_N at a time. dk and dv: one program per BLOCK_N keys;
it loops over the queries, BLOCK_M at a time. Every program recomputes p from the logsumexp. Each tile of dq, dk or dv
is computed by one program, without atomic additions, so every run gives the same bits.
"""

# Symbols and constants: see forward.py. scale: 1 / sqrt(D). The logsumexp is in base 2 (lse = log2 of the
# sum of exp2(s scale log2(e))), or with NATURAL a natural logarithm, which the kernel multiplies by log2(e).

import triton
import triton.language as tl

from stage2_cuda.attention.forward import (
    LOG2E,
    causal_mask,
    head_of_output,
    key_range,
    load_tile,
    mask_tile,
    part_of_range,
    store_tile,
)

# -- tiles -------------------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(x, head_start, offs_m, start_m, T_q, EVEN: tl.constexpr, USE_DESCRIPTOR: tl.constexpr):
    """Load the logsumexp or delta (BLOCK_M) of one head at the positions offs_m = start_m + [0, BLOCK_M).

    USE_DESCRIPTOR: x is a row_descriptor() of the array (B, H, T_q), in which this head begins at head_start. Otherwise
    x points to this head. EVEN: T_q is a multiple of BLOCK_M. In the innermost loop a mask costs 2 %, and pointers cost
    more, because every thread computes its own addresses.
    """
    if USE_DESCRIPTOR:
        values = x.load([head_start + start_m])
    elif EVEN:
        values = tl.load(x + offs_m)
    else:
        values = tl.load(x + offs_m, mask=offs_m < T_q, other=0.0)  # beyond T_q dy is 0: any finite value will do
    return values


@triton.jit
def query_range(
    start_n, T_q, loop, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOPS: tl.constexpr, CAUSAL: tl.constexpr,
    IN_PARTS: tl.constexpr,
):  # fmt: skip
    """[begin, end) of the queries in this loop, for the tile of keys [start_n, start_n + BLOCK_N).

    With two loops: loop 0 covers the tiles on the diagonal, loop 1 the tiles that need no mask. IN_PARTS: see
    key_range().
    """
    begin, end = 0, T_q
    if CAUSAL:
        begin = start_n // BLOCK_M * BLOCK_M
    if LOOPS == 2:
        full_begin = 0
        if CAUSAL:
            full_begin = tl.minimum(tl.cdiv(start_n + BLOCK_N, BLOCK_M) * BLOCK_M, T_q)
        if loop == 0:
            end = full_begin
        else:
            begin = full_begin
    return part_of_range(begin, end, BLOCK_M, IN_PARTS)


@triton.jit
def row_delta(y, dy):
    return tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)  # (BLOCK_M)


@triton.jit
def load_rotation(rotation_ptr, row, pair, T, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """The cosines and the sines of the pairs of channels `pair` (columns) in the rows from `row` on (ROWS, columns)."""
    rows = row + tl.arange(0, ROWS)[:, None]
    of_pair = rotation_ptr + rows * (2 * PAIRS) + pair[None, :]
    return tl.load(of_pair, rows < T, 0.0), tl.load(of_pair + PAIRS, rows < T, 0.0)


@triton.jit
def rotate_back(dx, rotation_ptr, row, T, PAIRS: tl.constexpr):
    """dx (ROWS, HEAD_DIM), the gradient of rotated rows of q or k from `row` on, rotated by the opposite angles.

    rotation_ptr: that of kernels/rotary.py (T, 2, PAIRS), or None: then the result is dx.
    """
    if rotation_ptr is not None:
        ROWS: tl.constexpr = dx.shape[0]
        HEAD_DIM: tl.constexpr = dx.shape[1]
        if HEAD_DIM == 2 * PAIRS:  # both channels of a pair are in one thread
            a, b = dx.reshape(ROWS, 2, PAIRS).permute(0, 2, 1).split()  # (ROWS, PAIRS)
            cos, sin = load_rotation(rotation_ptr, row, tl.arange(0, PAIRS), T, ROWS, PAIRS)
            dx = tl.join(a * cos + b * sin, b * cos - a * sin).permute(0, 2, 1).reshape(ROWS, HEAD_DIM)
        else:
            i = tl.arange(0, HEAD_DIM)
            first = i < PAIRS
            other = tl.broadcast_to(tl.where(first, i + PAIRS, i - PAIRS)[None, :], ROWS, HEAD_DIM)
            cos, sin = load_rotation(rotation_ptr, row, i % PAIRS, T, ROWS, PAIRS)
            dx = dx * cos + tl.gather(dx, other, 1) * tl.where(first[None, :], sin, -sin)
    return dx


@triton.jit
def dq_tile(
    delta_ptr, lse2_ptr, dy_desc, y_desc, lse_ptr, q_desc, k_desc, v_desc, b, h, start_m, T_q, T_k, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, NATURAL: tl.constexpr, IN_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of the queries [start_m, start_m + BLOCK_M). With IN_PARTS: the terms of a part of the keys.

    lse_ptr, and delta_ptr and lse2_ptr unless they are None, point to the T_q elements of this head. To delta_ptr the
    program writes delta, to lse2_ptr the logsumexp in base 2.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(q_desc, b, h, start_m, BLOCK_M, HEAD_DIM)
    dy = load_tile(dy_desc, b, h, start_m, BLOCK_M, HEAD_DIM)
    delta = row_delta(load_tile(y_desc, b, h, start_m, BLOCK_M, HEAD_DIM), dy)
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < T_q, other=0.0)
    if NATURAL:
        lse *= LOG2E
    if delta_ptr is not None:
        tl.store(delta_ptr + offs_m, delta, mask=offs_m < T_q)
    if lse2_ptr is not None:
        tl.store(lse2_ptr + offs_m, lse, mask=offs_m < T_q)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = key_range(start_m, T_k, loop, BLOCK_M, BLOCK_N, LOOPS, CAUSAL, MASK_KEYS, IN_PARTS)
        for start_n in tl.range(begin, end, BLOCK_N):
            start_n = tl.multiple_of(start_n, BLOCK_N)
            k = load_tile(k_desc, b, h, start_n, BLOCK_N, HEAD_DIM)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            v = load_tile(v_desc, b, h, start_n, BLOCK_N, HEAD_DIM)
            dp = tl.dot(dy, v.T, input_precision=PRECISION)
            p = tl.math.exp2(s * (scale * LOG2E) - lse[:, None])
            if loop == LOOPS - 1:
                p = mask_tile(p, 0.0, offs_m, start_m, start_n, T_k, BLOCK_N, CAUSAL, MASK_KEYS)
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq * scale  # (BLOCK_M, HEAD_DIM)


@triton.jit
def dkdv_tile(
    delta_in, dy_desc, y_desc, lse_in, q_desc, k_desc, v_desc, b, h, head_start, start_n, T_q, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr,
    CAUSAL: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, USE_DESCRIPTOR: tl.constexpr,
    IN_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys [start_n, start_n + BLOCK_N). With IN_PARTS: the terms of a part of the queries.

    Here the tiles of s, p, dp and ds are transposed.

    lse_in and delta_in: x of load_rows(). If delta_in is None, delta is computed from y. Keys beyond T_k need no mask:
    each row of dk and dv depends on its own key only, and the rows beyond T_k are not written.
    """
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_tile(k_desc, b, h, start_n, BLOCK_N, HEAD_DIM)
    v = load_tile(v_desc, b, h, start_n, BLOCK_N, HEAD_DIM)
    dk, dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32), tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = query_range(start_n, T_q, loop, BLOCK_M, BLOCK_N, LOOPS, CAUSAL, IN_PARTS)
        for start_m in tl.range(begin, end, BLOCK_M):
            start_m = tl.multiple_of(start_m, BLOCK_M)
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(q_desc, b, h, start_m, BLOCK_M, HEAD_DIM)
            s = tl.dot(k, q.T, input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
            lse = load_rows(lse_in, head_start, offs_m, start_m, T_q, EVEN, USE_DESCRIPTOR)
            if NATURAL:
                lse *= LOG2E
            p = tl.math.exp2(s * (scale * LOG2E) - lse[None, :])
            if CAUSAL and loop == 0:
                if start_m < start_n + BLOCK_N:
                    p = tl.where(causal_mask(offs_m, offs_n).T, p, 0.0)
            dy = load_tile(dy_desc, b, h, start_m, BLOCK_M, HEAD_DIM)
            dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)  # (BLOCK_N, HEAD_DIM)
            dp = tl.dot(v, dy.T, input_precision=PRECISION)
            if delta_in is None:
                delta = row_delta(load_tile(y_desc, b, h, start_m, BLOCK_M, HEAD_DIM), dy)
            else:
                delta = load_rows(delta_in, head_start, offs_m, start_m, T_q, EVEN, USE_DESCRIPTOR)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk * scale, dv  # each (BLOCK_N, HEAD_DIM)


# -- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit
def dq_kernel(
    dq_desc, delta_ptr, lse2_ptr, dy_desc, y_desc, lse_ptr, q_desc, k_desc, v_desc, rotation_ptr, T_q, T_k, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, LOOPS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """delta and dq of BLOCK_M queries.

    lse2_ptr: None if the logsumexp is in base 2. Otherwise the logsumexp is a natural logarithm, and the program writes
    it in base 2 to lse2_ptr, for dkdv_kernel, which would otherwise convert each value in each of its programs.
    rotation_ptr, PAIRS: see rotate_back().
    """
    b, h, head_start = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T_q
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # last queries first: they have the longest loops
    if lse2_ptr is not None:
        lse2_ptr += head_start
    dq = dq_tile(
        delta_ptr + head_start, lse2_ptr, dy_desc, y_desc, lse_ptr + head_start, q_desc, k_desc, v_desc,
        b, h, start_m, T_q, T_k, scale,
        BLOCK_M, BLOCK_N, HEAD_DIM, LOOPS, CAUSAL, MASK_KEYS, lse2_ptr is not None, False, PRECISION,
    )  # fmt: skip
    store_tile(dq_desc, rotate_back(dq, rotation_ptr, start_m, T_q, PAIRS), b, h, start_m, BLOCK_M, HEAD_DIM)


@triton.jit
def dkdv_kernel(
    dk_desc, dv_desc, delta_in, dy_desc, lse2_in, q_desc, k_desc, v_desc, rotation_ptr, T_q, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, LOOPS: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, USE_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys; lse2_in: the logsumexp in base 2, delta_in: delta, both x of load_rows().

    With a causal mask the first keys have the longest loops, and are launched first. rotation_ptr, PAIRS: see
    rotate_back(); with a rotation there are T_q keys.
    """
    b, h, head_start = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0) * T_q
    start_n = tl.program_id(1) * BLOCK_N
    if not USE_DESCRIPTOR:  # coordinates of a descriptor have 32 bits, pointers 64
        delta_in = delta_in + tl.program_id(0).to(tl.int64) * T_q
        lse2_in = lse2_in + tl.program_id(0).to(tl.int64) * T_q
    dk, dv = dkdv_tile(
        delta_in, dy_desc, None, lse2_in, q_desc, k_desc, v_desc, b, h, head_start, start_n, T_q, scale,
        BLOCK_M, BLOCK_N, HEAD_DIM, LOOPS, CAUSAL, False, EVEN, USE_DESCRIPTOR, False, PRECISION,
    )  # fmt: skip
    store_tile(dv_desc, dv, b, h, start_n, BLOCK_N, HEAD_DIM)
    store_tile(dk_desc, rotate_back(dk, rotation_ptr, start_n, T_q, PAIRS), b, h, start_n, BLOCK_N, HEAD_DIM)


@triton.jit
def both_kernel(
    dq_desc, dk_desc, dv_desc, dy_desc, y_desc, lse_ptr, q_desc, k_desc, v_desc, rotation_ptr, T_q, T_k, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, LOOPS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, IN_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys in the even programs, dq of BLOCK_M = BLOCK_N queries in the odd programs.

    Both kinds of program compute delta themselves. With IN_PARTS, add_parts_kernel in
    torch_bridge/kernels/attention_parts.py adds the terms. rotation_ptr, PAIRS: as in dkdv_kernel.
    """
    b, h, head_start = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T_q
    tile, n_tiles, lse_ptr = tl.program_id(1) // 2, tl.num_programs(1) // 2, lse_ptr + head_start
    head = head_of_output(h, IN_PARTS)
    if tl.program_id(1) % 2 == 0:
        start_n = tile * BLOCK_M
        dk, dv = dkdv_tile(
            None, dy_desc, y_desc, lse_ptr, q_desc, k_desc, v_desc, b, h, 0, start_n, T_q, scale,
            BLOCK_M, BLOCK_N, HEAD_DIM, LOOPS, CAUSAL, NATURAL, EVEN, False, IN_PARTS, PRECISION,
        )  # fmt: skip
        store_tile(dv_desc, dv, b, head, start_n, BLOCK_N, HEAD_DIM)
        store_tile(dk_desc, rotate_back(dk, rotation_ptr, start_n, T_q, PAIRS), b, head, start_n, BLOCK_N, HEAD_DIM)
    else:
        start_m = (n_tiles - 1 - tile) * BLOCK_M
        dq = dq_tile(
            None, None, dy_desc, y_desc, lse_ptr, q_desc, k_desc, v_desc, b, h, start_m, T_q, T_k, scale,
            BLOCK_M, BLOCK_N, HEAD_DIM, LOOPS, CAUSAL, MASK_KEYS, NATURAL, IN_PARTS, PRECISION,
        )  # fmt: skip
        store_tile(dq_desc, rotate_back(dq, rotation_ptr, start_m, T_q, PAIRS), b, head, start_m, BLOCK_M, HEAD_DIM)
