"""Variants of the attention kernels that are being tried: what loses here is deleted, what wins moves to kernels/."""

import math

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stage2_cuda.kernels.attention import (
    KEY,
    LN2,
    LOG2E,
    QUERY,
    VALUE,
    below_diagonal,
    head_tiles,
    load_rows,
    load_tile,
    padded,
    row_delta,
    softmax_step,
    store_tile,
)  # fmt: skip
from stage2_cuda.triton_driver import Pointer, launch

SPLIT, BRANCH, MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # two loops; one that asks; one that masks all


@triton.jit
def in_registers(x, scale):
    """x times a power of two, exact: a computed operand is kept in registers, where wgmma need not fetch it again."""
    return (x.to(tl.float32) * scale).to(x.dtype)


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def forward_columns(
    acc, peak, total, q, qkv, b, h, rows, first, diagonal, end, scale,
    N: tl.constexpr, D: tl.constexpr, LOOP: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    for n in tl.range(first, end, N):
        n = tl.multiple_of(n, N)
        k = load_tile(qkv, b, KEY, h, n, N, D)
        s = tl.dot(q, k.T)
        if LOOP == BRANCH:
            if n >= diagonal:
                s = tl.where(below_diagonal(rows, n + tl.arange(0, N)), s, float("-inf"))
        elif DIAGONAL:
            s = tl.where(below_diagonal(rows, n + tl.arange(0, N)), s, float("-inf"))
        p, peak, total, acc = softmax_step(s, peak, total, acc, scale)
        v = load_tile(qkv, b, VALUE, h, n, N, D)
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, peak, total


@triton.jit
def forward_kernel(
    y, lse, qkv_m, qkv_n, T, H, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOP: tl.constexpr, QREG: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    rows = m0 + tl.arange(0, M)
    q = load_tile(qkv_m, b, QUERY, h, m0, M, D)
    if QREG:
        q = in_registers(q, 0.5)
        scale *= 2
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    diagonal, end = tl.multiple_of(m0 // N * N, N), tl.minimum(m0 + M, T)
    if LOOP == SPLIT:
        acc, peak, total = forward_columns(
            acc, peak, total, q, qkv_n, b, h, rows, 0, diagonal, diagonal, scale, N, D, LOOP, False
        )
        acc, peak, total = forward_columns(
            acc, peak, total, q, qkv_n, b, h, rows, diagonal, diagonal, end, scale, N, D, LOOP, True
        )
    else:
        acc, peak, total = forward_columns(
            acc, peak, total, q, qkv_n, b, h, rows, 0, diagonal, end, scale, N, D, LOOP, True
        )
    tl.store(lse + tl.program_id(0).to(tl.int64) * T + rows, (peak + tl.math.log2(total)) * LN2, mask=rows < T)
    store_tile(y, acc / total[:, None], b, 0, h, m0, M, D)


def forward(y, lse, qkv, n_head, M, N, warps, stages, loop=0, qreg=0, maxnreg=None):
    B, T, D = sizes(qkv, n_head)
    y, qkv_m, qkv_n = (head_tiles(x, n_head, D, rows) for x, rows in ((y, M), (qkv, M), (qkv, N)))
    arguments = y, lse, qkv_m, qkv_n, T, n_head, LOG2E.value / math.sqrt(D)
    options = limited(dict(M=M, N=N, D=padded(D), LOOP=loop, QREG=qreg, num_warps=warps, num_stages=stages), maxnreg)
    launch(forward_kernel, (B * n_head, triton.cdiv(T, M)), *arguments, **options)


@triton.jit
def persistent_kernel(
    y, lse, qkv_m, qkv_n, T, H, heads, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """One program takes tile after tile, the longest first; the loads of the next one are under way meanwhile."""
    blocks = tl.cdiv(T, M)
    for tile in tl.range(tl.program_id(0), blocks * heads, tl.num_programs(0), flatten=FLATTEN):
        head, m0 = tile % heads, (blocks - 1 - tile // heads) * M
        b, h = head // H, head % H
        rows = m0 + tl.arange(0, M)
        q = load_tile(qkv_m, b, QUERY, h, m0, M, D)
        peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        for n in tl.range(0, m0 + M, N):
            n = tl.multiple_of(n, N)
            k = load_tile(qkv_n, b, KEY, h, n, N, D)
            s = tl.dot(q, k.T)
            if n + N > m0:
                s = tl.where(below_diagonal(rows, n + tl.arange(0, N)), s, float("-inf"))
            p, peak, total, acc = softmax_step(s, peak, total, acc, scale)
            v = load_tile(qkv_n, b, VALUE, h, n, N, D)
            acc = tl.dot(p.to(v.dtype), v, acc)
        tl.store(lse + head.to(tl.int64) * T + rows, (peak + tl.math.log2(total)) * LN2, mask=rows < T)
        store_tile(y, acc / total[:, None], b, 0, h, m0, M, D)


def persistent(y, lse, qkv, n_head, M, N, warps, stages, programs, flatten=True):
    B, T, D = sizes(qkv, n_head)
    y, qkv_m, qkv_n = (head_tiles(x, n_head, D, rows) for x, rows in ((y, M), (qkv, M), (qkv, N)))
    arguments = y, lse, qkv_m, qkv_n, T, n_head, B * n_head, LOG2E.value / math.sqrt(D)
    options = dict(M=M, N=N, D=padded(D), FLATTEN=flatten, num_warps=warps, num_stages=stages)
    launch(persistent_kernel, (min(programs, B * n_head * triton.cdiv(T, M)),), *arguments, **options)


# -- dq ----------------------------------------------------------------------------------------------------------------


@triton.jit
def dq_columns(
    dq, q, dy, lse, delta, qkv, b, h, rows, first, diagonal, end, scale,
    N: tl.constexpr, D: tl.constexpr, LOOP: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    for n in tl.range(first, end, N):
        n = tl.multiple_of(n, N)
        k = load_tile(qkv, b, KEY, h, n, N, D)
        s = tl.dot(q, k.T)
        v = load_tile(qkv, b, VALUE, h, n, N, D)
        dp = tl.dot(dy, v.T)
        p = tl.math.exp2(s * scale - lse[:, None])
        if LOOP == BRANCH:
            if n >= diagonal:
                p = tl.where(below_diagonal(rows, n + tl.arange(0, N)), p, 0.0)
        elif DIAGONAL:
            p = tl.where(below_diagonal(rows, n + tl.arange(0, N)), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def dq_kernel(
    dqkv, delta, dy, y, lse, qkv_m, qkv_n, T, H, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOP: tl.constexpr, QREG: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    rows, head = m0 + tl.arange(0, M), tl.program_id(0).to(tl.int64) * T
    g = load_tile(dy, b, 0, h, m0, M, D)
    d = row_delta(load_tile(y, b, 0, h, m0, M, D), g)
    tl.store(delta + head + rows, d, mask=rows < T)
    l2 = load_rows(lse + head, rows, T) * LOG2E
    q = load_tile(qkv_m, b, QUERY, h, m0, M, D)
    factor = scale * LOG2E
    if QREG:
        q = in_registers(q, 0.5)
        g = in_registers(g, 0.5)
        factor *= 2
        d *= 0.5
    dq = tl.zeros([M, D], tl.float32)
    diagonal, end = tl.multiple_of(m0 // N * N, N), tl.minimum(m0 + M, T)
    if LOOP == SPLIT:
        dq = dq_columns(dq, q, g, l2, d, qkv_n, b, h, rows, 0, diagonal, diagonal, factor, N, D, LOOP, False)
        dq = dq_columns(dq, q, g, l2, d, qkv_n, b, h, rows, diagonal, diagonal, end, factor, N, D, LOOP, True)
    else:
        dq = dq_columns(dq, q, g, l2, d, qkv_n, b, h, rows, 0, diagonal, end, factor, N, D, LOOP, True)
    if QREG:
        scale *= 2
    store_tile(dqkv, dq * scale, b, QUERY, h, m0, M, D)


def dq(dqkv, delta, dy, qkv, y, lse, n_head, M, N, warps, stages, loop=0, qreg=0, maxnreg=None):
    B, T, D = sizes(qkv, n_head)
    dqkv, dy, y, qkv_m = (head_tiles(x, n_head, D, M) for x in (dqkv, dy, y, qkv))
    arguments = dqkv, delta, dy, y, lse, qkv_m, head_tiles(qkv, n_head, D, N), T, n_head, 1 / math.sqrt(D)
    options = limited(dict(M=M, N=N, D=padded(D), LOOP=loop, QREG=qreg, num_warps=warps, num_stages=stages), maxnreg)
    launch(dq_kernel, (B * n_head, triton.cdiv(T, M)), *arguments, **options)


# -- dk and dv ---------------------------------------------------------------------------------------------------------

POINTER, EVEN, TMA = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # how lse and delta come


@triton.jit
def statistics(x, head, m, T, M: tl.constexpr, ROWS: tl.constexpr):
    if ROWS == TMA:
        values = x.load([head, m]).reshape(M)
    elif ROWS == EVEN:
        values = tl.load(x + m + tl.arange(0, M))
    else:
        values = load_rows(x, m + tl.arange(0, M), T)
    return values


@triton.jit
def dkdv_rows(
    dk, dv, k, v, dy, lse, delta, qkv, head, b, h, columns, first, full, end, T, scale, half,
    M: tl.constexpr, D: tl.constexpr, LOOP: tl.constexpr, DIAGONAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    for m in tl.range(first, end, M):
        m = tl.multiple_of(m, M)
        q = load_tile(qkv, b, QUERY, h, m, M, D)
        s = tl.dot(k, q.T)  # (N, M)
        p = tl.math.exp2(s * scale - statistics(lse, head, m, T, M, ROWS)[None, :] * LOG2E)
        if LOOP == BRANCH:
            if m < full:
                p = tl.where(below_diagonal(m + tl.arange(0, M), columns).T, p, 0.0)
        elif DIAGONAL:
            p = tl.where(below_diagonal(m + tl.arange(0, M), columns).T, p, 0.0)
        g = load_tile(dy, b, 0, h, m, M, D)
        dv = tl.dot(p.to(g.dtype), g, dv)
        dp = tl.dot(v, g.T)
        ds = p * (dp - statistics(delta, head, m, T, M, ROWS)[None, :] * half)
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(
    dqkv, delta, dy, lse, qkv_m, qkv_n, T, H, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOP: tl.constexpr, KREG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, h, head = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0)
    n0 = tl.program_id(1) * N
    if ROWS != TMA:
        lse += head.to(tl.int64) * T
        delta += head.to(tl.int64) * T
    columns = n0 + tl.arange(0, N)
    k, v = load_tile(qkv_n, b, KEY, h, n0, N, D), load_tile(qkv_n, b, VALUE, h, n0, N, D)
    factor, half = scale * LOG2E, 1.0
    if KREG:
        k, v = in_registers(k, 0.5), in_registers(v, 0.5)
        factor *= 2
        half = 0.5
        scale *= 2
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    first, end = n0 // M * M, tl.cdiv(T, M) * M
    full = tl.minimum(tl.cdiv(n0 + N, M) * M, end)
    if LOOP == SPLIT:
        dk, dv = dkdv_rows(
            dk, dv, k, v, dy, lse, delta, qkv_m, head, b, h, columns, first, full, full, T, factor, half,
            M, D, LOOP, True, ROWS,
        )  # fmt: skip
        dk, dv = dkdv_rows(
            dk, dv, k, v, dy, lse, delta, qkv_m, head, b, h, columns, full, full, end, T, factor, half,
            M, D, LOOP, False, ROWS,
        )  # fmt: skip
    else:
        dk, dv = dkdv_rows(
            dk, dv, k, v, dy, lse, delta, qkv_m, head, b, h, columns, first, full, end, T, factor, half,
            M, D, LOOP, True, ROWS,
        )  # fmt: skip
    store_tile(dqkv, dv, b, VALUE, h, n0, N, D)
    store_tile(dqkv, dk * scale, b, KEY, h, n0, N, D)


def dkdv(dqkv, delta, dy, qkv, lse, n_head, M, N, warps, stages, loop=0, kreg=0, rows=0, maxnreg=None):
    B, T, D = sizes(qkv, n_head)
    dqkv, qkv_n, dy, qkv_m = (head_tiles(x, n_head, D, size) for x, size in ((dqkv, N), (qkv, N), (dy, M), (qkv, M)))
    if rows == TMA.value:
        lse, delta = (row_tiles(x, M) for x in (lse, delta))
    elif rows == EVEN.value and T % M:
        raise ValueError("T is not even")
    arguments = dqkv, delta, dy, lse, qkv_m, qkv_n, T, n_head, 1 / math.sqrt(D)
    sizes_ = dict(M=M, N=N, D=padded(D), LOOP=loop, KREG=kreg, ROWS=rows)
    options = limited(dict(sizes_, num_warps=warps, num_stages=stages), maxnreg)
    launch(dkdv_kernel, (B * n_head, triton.cdiv(T, N)), *arguments, **options)


# -- all of them, a program a head -------------------------------------------------------------------------------------

LOADED, REDUCED = tl.constexpr(0), tl.constexpr(1)  # how dq is added up: loaded and stored, or by the TMA unit


@triton.jit
def whole_kernel(
    dqkv_m, dqkv_n, sums, delta, dy, y, lse, qkv_m, qkv_n, T, H, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ADD: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of a whole head: sums (B, H, T, D) float32 is dq so far. T is a multiple of M and N, N one of M."""
    b, h, head = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0)
    lse += head.to(tl.int64) * T
    delta += head.to(tl.int64) * T
    within = tl.arange(0, M)[:, None] * D + tl.arange(0, D)[None, :]
    if ADD == LOADED:
        sums += head.to(tl.int64) * T * D
    factor = scale * LOG2E
    for m in tl.range(0, T, M):
        m = tl.multiple_of(m, M)
        d = row_delta(load_tile(y, b, 0, h, m, M, D), load_tile(dy, b, 0, h, m, M, D))
        tl.store(delta + m + tl.arange(0, M), d)
        if ADD == REDUCED:
            sums.store([b, 0, h, m, 0], tl.zeros([1, 1, 1, M, D], tl.float32))
    tl.debug_barrier()
    for n0 in tl.range(0, T, N, num_stages=1):
        n0 = tl.multiple_of(n0, N)
        columns = n0 + tl.arange(0, N)
        k, v = load_tile(qkv_n, b, KEY, h, n0, N, D), load_tile(qkv_n, b, VALUE, h, n0, N, D)
        dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
        full = n0 + N
        for m in tl.range(n0, T, M):
            m = tl.multiple_of(m, M)
            rows = m + tl.arange(0, M)
            q = load_tile(qkv_m, b, QUERY, h, m, M, D)
            s = tl.dot(k, q.T)  # (N, M)
            p = tl.math.exp2(s * factor - tl.load(lse + rows)[None, :] * LOG2E)
            if LOOP == BRANCH:
                if m < full:
                    p = tl.where(below_diagonal(rows, columns).T, p, 0.0)
            else:
                p = tl.where(below_diagonal(rows, columns).T, p, 0.0)
            g = load_tile(dy, b, 0, h, m, M, D)
            dv = tl.dot(p.to(g.dtype), g, dv)
            dp = tl.dot(v, g.T)
            ds = (p * (dp - tl.load(delta + rows)[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk)
            dq = tl.dot(ds.T, k)  # (M, D)
            if ADD == REDUCED:
                sums.atomic_add([b, 0, h, m, 0], dq.reshape(1, 1, 1, M, D))
            else:
                at = sums + m * D + within
                if n0 > 0:
                    dq += tl.load(at)
                if m < full:  # the last keys that these rows see
                    store_tile(dqkv_m, dq * scale, b, QUERY, h, m, M, D)
                else:
                    tl.store(at, dq)
        store_tile(dqkv_n, dv, b, VALUE, h, n0, N, D)
        store_tile(dqkv_n, dk * scale, b, KEY, h, n0, N, D)
        tl.debug_barrier()
    if ADD == REDUCED:
        for m in tl.range(0, T, M):
            m = tl.multiple_of(m, M)
            dq = sums.load([b, 0, h, m, 0]).reshape(M, D)
            store_tile(dqkv_m, dq * scale, b, QUERY, h, m, M, D)


def whole(dqkv, sums, delta, dy, qkv, y, lse, n_head, M, N, warps, stages, add=0, loop=2, maxnreg=None):
    B, T, D = sizes(qkv, n_head)
    if T % M or T % N or N % M:
        raise ValueError("T is not even")
    dqkv_m, dqkv_n, dy, y, qkv_m, qkv_n = (
        head_tiles(x, n_head, D, size) for x, size in ((dqkv, M), (dqkv, N), (dy, M), (y, M), (qkv, M), (qkv, N))
    )
    if add == REDUCED.value:
        strides = [n_head * T * D, n_head * T * D, T * D, D, 1]
        sums = TensorDescriptor(Pointer(sums), [B, 1, n_head, T, D], strides, [1, 1, 1, M, padded(D)])
    arguments = dqkv_m, dqkv_n, sums, delta, dy, y, lse, qkv_m, qkv_n, T, n_head, 1 / math.sqrt(D)
    options = limited(dict(M=M, N=N, D=padded(D), ADD=add, LOOP=loop, num_warps=warps, num_stages=stages), maxnreg)
    launch(whole_kernel, (B * n_head,), *arguments, **options)


# -- a short T in one launch -------------------------------------------------------------------------------------------


@triton.jit
def short_kernel(
    dqkv, dy, y, lse, qkv, T, H, scale, M: tl.constexpr, D: tl.constexpr, KREG: tl.constexpr, DQ: tl.constexpr
):  # fmt: skip
    """dk and dv of M columns, then dq of as many rows; delta is computed by whoever needs it."""
    b, h, head = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T
    m0, end = tl.program_id(1) * M, tl.cdiv(T, M) * M
    if DQ == 2:  # a program of its own for each half
        m0 = tl.program_id(1) // 2 * M
    own = m0 + tl.arange(0, M)
    factor = scale * LOG2E
    if (DQ == 1) | (tl.program_id(1) % 2 == 0):
        k, v = load_tile(qkv, b, KEY, h, m0, M, D), load_tile(qkv, b, VALUE, h, m0, M, D)
        dk, dv = tl.zeros([M, D], tl.float32), tl.zeros([M, D], tl.float32)
        for m in tl.range(m0, end, M):
            m = tl.multiple_of(m, M)
            rows = m + tl.arange(0, M)
            q = load_tile(qkv, b, QUERY, h, m, M, D)
            s = tl.dot(k, q.T)
            p = tl.math.exp2(s * factor - load_rows(lse + head, rows, T)[None, :] * LOG2E)
            if m < m0 + M:
                p = tl.where(below_diagonal(rows, own).T, p, 0.0)
            g = load_tile(dy, b, 0, h, m, M, D)
            d = row_delta(load_tile(y, b, 0, h, m, M, D), g)
            dv = tl.dot(p.to(g.dtype), g, dv)
            dp = tl.dot(v, g.T)
            ds = p * (dp - d[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk)
        store_tile(dqkv, dv, b, VALUE, h, m0, M, D)
        store_tile(dqkv, dk * scale, b, KEY, h, m0, M, D)
    if (DQ == 1) | (tl.program_id(1) % 2 == 1):
        q, g = load_tile(qkv, b, QUERY, h, m0, M, D), load_tile(dy, b, 0, h, m0, M, D)
        d, l2 = row_delta(load_tile(y, b, 0, h, m0, M, D), g), load_rows(lse + head, own, T) * LOG2E
        dq = tl.zeros([M, D], tl.float32)
        dq = dq_columns(dq, q, g, l2, d, qkv, b, h, own, 0, m0, m0 + M, factor, M, D, BRANCH, True)
        store_tile(dqkv, dq * scale, b, QUERY, h, m0, M, D)


def short(dqkv, dy, qkv, y, lse, n_head, M, warps, stages, parts=1):
    B, T, D = sizes(qkv, n_head)
    dqkv, dy, y, qkv = (head_tiles(x, n_head, D, M) for x in (dqkv, dy, y, qkv))
    options = dict(M=M, D=padded(D), KREG=0, DQ=parts, num_warps=warps, num_stages=stages)
    grid = B * n_head, triton.cdiv(T, M) * parts
    launch(short_kernel, grid, dqkv, dy, y, lse, qkv, T, n_head, 1 / math.sqrt(D), **options)


# -- what is launched --------------------------------------------------------------------------------------------------


def row_tiles(x, rows):
    B, H, T = x.shape
    return TensorDescriptor(Pointer(x), [B * H, T], [T, 1], [1, rows])


def sizes(qkv, n_head):
    B, T, columns = qkv.shape
    return B, T, columns // (3 * n_head)


def limited(options, maxnreg):
    return options if maxnreg is None else dict(options, maxnreg=maxnreg)
