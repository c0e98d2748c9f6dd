"""Causal attention without its T x T matrix: FlashAttention-2 (Dao 2023), forward and backward.

For q, k, v (T, D) of one head, s and p being (T, T):

    s = q k' / sqrt(D), -inf above the diagonal    lse = log(sum(exp(s)))    p = exp(s - lse)    y = p v
    dv = p' dy    dp = dy v'    delta = sum(p * dp) = sum(y * dy)    ds = p * (dp - delta)
    dq = ds k / sqrt(D)    dk = ds' q / sqrt(D)                                            (sums run along a row)

Forward and dq: a program owns M rows (queries) and walks over the columns (keys), N at a time, up to the diagonal.
dk and dv: a program owns N columns and walks down the rows from the diagonal on. It computes p a second time, but
nobody else adds to its result: no atomics, the same bits every time. Tiles above the diagonal are never touched, and
only those on it are masked. Whoever has the longest way is launched first, so that the short ones fill the end.
For a short T one launch does both, half of its programs each.

Tiles come through descriptors, which the TMA unit of a Hopper GPU copies without registers. What lies outside an array
is read as zero and never written, so that no tile needs a mask for the last rows, or for the columns beyond D.
"""

# B batch, T time, C channels, H heads, D = C // H head size, in a kernel rounded up to a power of two
# a tile is M rows of T (queries) by N columns (keys); g is a tile of dy

import math
from typing import NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2core.errors import ConfigError
from stage2_cuda.runtime.triton_launch import Pointer, launch

QUERY, KEY, VALUE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the parts of qkv
LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(x log2(e)): one instruction


class Tile(NamedTuple):
    """M rows (queries) by N columns (keys), for so many warps; `stages` tiles are in flight or in use.

    loops: 1 over all tiles, or 2, of which one has those on the diagonal and the other needs no `if` for a mask.
    """

    M: int
    N: int
    warps: int
    stages: int
    loops: int = 1


class Config(NamedTuple):
    """One tile for each kernel; with `both`, which is square, one launch computes dq, dk and dv."""

    forward: Tile | None = None
    dq: Tile | None = None
    dkdv: Tile | None = None
    both: Tile | None = None

    def __str__(self):
        """As a choice by timing is recorded: "dq 128 x 64, 4 warps, 3 stages, 1 loops"."""
        words = "{} {} x {}, {} warps, {} stages, {} loops".format
        return "; ".join(words(part, *tile) for part, tile in self._asdict().items() if tile)


ANY = 1 << 62
# For (largest D, largest T), the first that fits. 16 bits: none is faster on an H200, but for the forward of short T;
# the others are guesses, which spill few registers when compiled for it. Strict fp32 has no tensor cores to keep busy.
CONFIGS = {
    "16 bits": {
        (64, 256): Config(Tile(64, 64, 4, 3), both=Tile(64, 64, 4, 2)),
        (64, 4096): Config(Tile(128, 64, 8, 3), dq=Tile(128, 32, 4, 3), dkdv=Tile(64, 64, 4, 3)),
        (64, ANY): Config(Tile(64, 128, 4, 2), dq=Tile(128, 64, 4, 3), dkdv=Tile(64, 64, 4, 3)),
        (128, ANY): Config(Tile(64, 64, 4, 3), dq=Tile(128, 32, 8, 3), dkdv=Tile(64, 128, 8, 3)),
    },
    "ieee": {
        (64, ANY): Config(Tile(32, 32, 8, 2), dq=Tile(32, 32, 8, 2), dkdv=Tile(32, 32, 8, 2)),
        (128, ANY): Config(Tile(16, 16, 8, 2), dq=Tile(16, 16, 8, 2), dkdv=Tile(16, 16, 8, 2)),
    },
    "tf32": {
        (64, ANY): Config(Tile(64, 64, 4, 2), dq=Tile(64, 64, 4, 2), dkdv=Tile(64, 64, 4, 2)),
        (128, ANY): Config(Tile(64, 32, 8, 2), dq=Tile(64, 32, 8, 2), dkdv=Tile(32, 64, 8, 2)),
    },
    "tf32x3": {(128, ANY): Config(Tile(64, 32, 4, 2), dq=Tile(64, 32, 4, 2), dkdv=Tile(32, 64, 4, 2))},
}
TILED = (64,)  # head sizes at which, in 16 bits, lse and delta come to dk and dv by the TMA unit too: those measured


# -- tiles -------------------------------------------------------------------------------------------------------------


def head_tiles(array, n_head, D, rows):
    """array (B, T, parts C) as (B, parts, H, T, D), to be read and written `rows` of T at a time."""
    B, T, columns = array.shape
    C = n_head * D
    shape, strides = [B, columns // C, n_head, T, D], [T * columns, C, D, columns, 1]
    return TensorDescriptor(Pointer(array), shape, strides, [1, 1, 1, rows, padded(D)])


@triton.jit
def load_tile(x, b, part, h, row, ROWS: tl.constexpr, D: tl.constexpr):
    return x.load([b, part, h, row, 0]).reshape(ROWS, D)


@triton.jit
def store_tile(x, tile, b, part, h, row, ROWS: tl.constexpr, D: tl.constexpr):
    x.store([b, part, h, row, 0], tile.to(x.dtype).reshape(1, 1, 1, ROWS, D))


def row_tiles(array, rows):
    """array (B, H, T), to be read `rows` at a time; T is a multiple of them, or a tile had rows of the next head."""
    return TensorDescriptor(Pointer(array), [array.size], [1], [rows])


@triton.jit
def load_rows(x, head, rows, m, T, EVEN: tl.constexpr, TILED: tl.constexpr):
    """x of the rows, m the first. TILED: x is of row_tiles(), and this head's begin at `head`; else x points to them.

    In the innermost loop a mask would cost 2 %, and pointers more: every thread makes its own, the TMA unit needs none.
    """
    if TILED:
        values = x.load([head + m])
    elif EVEN:  # no tile reaches beyond T
        values = tl.load(x + rows)
    else:
        values = tl.load(x + rows, mask=rows < T, other=0.0)  # there q and dy are 0, and so is what they add
    return values


@triton.jit
def columns_seen(m0, T, loop, M: tl.constexpr, N: tl.constexpr, LOOPS: tl.constexpr):
    """[begin, end) of the columns that the rows from m0 on see in this loop: with two, first the full tiles."""
    begin, end = 0, tl.minimum(m0 + M, T)
    if LOOPS == 2:
        full = m0 // N * N
        if loop == 0:
            end = full
        else:
            begin = full
    return begin, end


@triton.jit
def rows_that_see(n0, T, loop, M: tl.constexpr, N: tl.constexpr, LOOPS: tl.constexpr):
    """[begin, end) of the rows that see the columns from n0 on in this loop: with two, last the full tiles."""
    begin, end = n0 // M * M, T
    if LOOPS == 2:
        full = tl.minimum(tl.cdiv(n0 + N, M) * M, T)
        if loop == 0:
            end = full
        else:
            begin = full
    return begin, end


@triton.jit
def below_diagonal(rows, columns):
    return rows[:, None] >= columns[None, :]  # (M, N): a query sees its own key and those before


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_step(s, peak, total, acc, scale):
    """Scores s (M, N) -> p = exp(s - peak); where the peak (M) grows, the sums total (M) and acc (M, D) shrink."""
    new = tl.maximum(peak, tl.max(s, 1) * scale)
    p = tl.math.exp2(s * scale - new[:, None])
    shrink = tl.math.exp2(peak - new)
    return p, new, total * shrink + tl.sum(p, 1), acc * shrink[:, None]


@triton.jit
def forward_kernel(
    y, lse, qkv_m, qkv_n, T, H, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y and lse / log(2) of M rows. qkv_m, qkv_n: qkv in tiles of M and of N; scale: log2(e) / sqrt(D)."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * M  # the longest first
    rows = m0 + tl.arange(0, M)
    q = load_tile(qkv_m, b, QUERY, h, m0, M, D)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = columns_seen(m0, T, loop, M, N, LOOPS)
        for n in tl.range(begin, end, N):
            n = tl.multiple_of(n, N)
            k = load_tile(qkv_n, b, KEY, h, n, N, D)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # (M, N)
            if loop == LOOPS - 1:
                if n + N > m0:
                    s = tl.where(below_diagonal(rows, n + tl.arange(0, N)), s, float("-inf"))
            p, peak, total, acc = softmax_step(s, peak, total, acc, scale)
            v = load_tile(qkv_n, b, VALUE, h, n, N, D)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (M, D)
    tl.store(lse + tl.program_id(0).to(tl.int64) * T + rows, peak + tl.math.log2(total), mask=rows < T)
    store_tile(y, acc / total[:, None], b, 0, h, m0, M, D)


def attention_forward(y, lse, qkv, n_head, precision="ieee", config=None):
    """qkv (B, T, 3C), q then k then v, heads side by side -> y (B, T, C), lse (B, H, T) float32.

    lse is to the base of 2, as exp2 wants it: log2(e) times that of the formula.
    precision: "ieee", "tf32" or "tf32x3", of the products of fp32; fp16 and bf16 have but one, summed in fp32.
    config: another `Config` than the table's. Raises ConfigError for a head size that is no multiple of 8 up to 128.
    """
    B, T, D, config = plan(qkv, n_head, precision, config)
    M, N = config.forward[:2]
    y, qkv_m, qkv_n = (head_tiles(x, n_head, D, rows) for x, rows in ((y, M), (qkv, M), (qkv, N)))
    arguments = y, lse, qkv_m, qkv_n, T, n_head, LOG2E.value / math.sqrt(D)
    options = dict(constants(config.forward, D, precision), LOOPS=config.forward.loops)
    launch(forward_kernel, (B * n_head, triton.cdiv(T, M)), *arguments, **options)


# -- backward ----------------------------------------------------------------------------------------------------------


@triton.jit
def row_delta(y, dy):
    return tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)  # (M)


@triton.jit
def dq_tile(
    dqkv, delta, dy, y, lse, qkv_m, qkv_n, b, h, m0, T, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of the rows [m0, m0 + M), and delta, if it is not None; lse and delta point to the T of this head."""
    rows = m0 + tl.arange(0, M)
    q, g = load_tile(qkv_m, b, QUERY, h, m0, M, D), load_tile(dy, b, 0, h, m0, M, D)
    d, l2 = row_delta(load_tile(y, b, 0, h, m0, M, D), g), tl.load(lse + rows, mask=rows < T, other=0.0)
    if delta is not None:
        tl.store(delta + rows, d, mask=rows < T)
    dq = tl.zeros([M, D], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = columns_seen(m0, T, loop, M, N, LOOPS)
        for n in tl.range(begin, end, N):
            n = tl.multiple_of(n, N)
            k = load_tile(qkv_n, b, KEY, h, n, N, D)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # (M, N)
            v = load_tile(qkv_n, b, VALUE, h, n, N, D)
            dp = tl.dot(g, v.T, input_precision=PRECISION)
            p = tl.math.exp2(s * (scale * LOG2E) - l2[:, None])
            if loop == LOOPS - 1:
                if n + N > m0:
                    p = tl.where(below_diagonal(rows, n + tl.arange(0, N)), p, 0.0)
            ds = p * (dp - d[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dqkv, dq * scale, b, QUERY, h, m0, M, D)


@triton.jit
def dkdv_tile(
    dqkv, delta, dy, y, lse, qkv_m, qkv_n, b, h, head, n0, T, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOPS: tl.constexpr,
    EVEN: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of the columns [n0, n0 + N), in tiles that are transposed, (N, M); delta is made of y if it is None."""
    columns = n0 + tl.arange(0, N)
    k, v = load_tile(qkv_n, b, KEY, h, n0, N, D), load_tile(qkv_n, b, VALUE, h, n0, N, D)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = rows_that_see(n0, T, loop, M, N, LOOPS)
        for m in tl.range(begin, end, M):
            m = tl.multiple_of(m, M)
            rows = m + tl.arange(0, M)
            q = load_tile(qkv_m, b, QUERY, h, m, M, D)
            s = tl.dot(k, q.T, input_precision=PRECISION)
            p = tl.math.exp2(s * (scale * LOG2E) - load_rows(lse, head, rows, m, T, EVEN, TILED)[None, :])
            if loop == 0:
                if m < n0 + N:
                    p = tl.where(below_diagonal(rows, columns).T, p, 0.0)
            g = load_tile(dy, b, 0, h, m, M, D)
            dv = tl.dot(p.to(g.dtype), g, dv, input_precision=PRECISION)  # (N, D)
            dp = tl.dot(v, g.T, input_precision=PRECISION)
            if delta is None:
                d = row_delta(load_tile(y, b, 0, h, m, M, D), g)
            else:
                d = load_rows(delta, head, rows, m, T, EVEN, TILED)
            ds = p * (dp - d[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    store_tile(dqkv, dv, b, VALUE, h, n0, N, D)
    store_tile(dqkv, dk * scale, b, KEY, h, n0, N, D)


@triton.jit
def dq_kernel(
    dqkv, delta, dy, y, lse, qkv_m, qkv_n, T, H, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """delta and dq of M rows; scale: 1 / sqrt(D)."""
    b, h, head = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T
    m0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * M  # the longest first
    dq_tile(dqkv, delta + head, dy, y, lse + head, qkv_m, qkv_n, b, h, m0, T, scale, M, N, D, LOOPS, PRECISION)


@triton.jit
def dkdv_kernel(
    dqkv, delta, dy, lse, qkv_m, qkv_n, T, H, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOPS: tl.constexpr,
    EVEN: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of N columns; the first columns, which all rows see, are launched first."""
    b, h, head = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0) * T
    n0 = tl.program_id(1) * N
    if not TILED:  # coordinates are of 32 bits, and pointers of 64
        delta, lse = delta + tl.program_id(0).to(tl.int64) * T, lse + tl.program_id(0).to(tl.int64) * T
    arrays = dqkv, delta, dy, None, lse, qkv_m, qkv_n
    dkdv_tile(*arrays, b, h, head, n0, T, scale, M, N, D, LOOPS, EVEN, TILED, PRECISION)


@triton.jit
def both_kernel(
    dqkv, dy, y, lse, qkv, T, H, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LOOPS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of M columns in the even programs, dq of M rows in the odd ones, M being N; both make their delta."""
    b, h, head = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T
    pair, pairs, lse = tl.program_id(1) // 2, tl.num_programs(1) // 2, lse + head
    if tl.program_id(1) % 2 == 0:
        n0 = pair * M
        dkdv_tile(dqkv, None, dy, y, lse, qkv, qkv, b, h, 0, n0, T, scale, M, N, D, LOOPS, EVEN, False, PRECISION)
    else:
        m0 = (pairs - 1 - pair) * M
        dq_tile(dqkv, None, dy, y, lse, qkv, qkv, b, h, m0, T, scale, M, N, D, LOOPS, PRECISION)


def attention_backward(dqkv, delta, dy, qkv, y, lse, n_head, precision="ieee", config=None):
    """dy (B, T, C), with the y and lse of forward -> dqkv (B, T, 3C); delta (B, H, T) float32 is scratch.

    A config with dq alone leaves dk and dv as they are, one with dkdv alone dq, and takes the delta that dq has left.
    """
    B, T, D, config = plan(qkv, n_head, precision, config)
    heads, numbers = B * n_head, (T, n_head, 1 / math.sqrt(D))

    def tiles(rows, *arrays):
        return [head_tiles(array, n_head, D, rows) for array in arrays]

    if both := config.both:
        dqkv, dy, y, qkv = tiles(both.M, dqkv, dy, y, qkv)
        options = dict(constants(both, D, precision), LOOPS=both.loops, EVEN=T % both.M == 0)
        launch(both_kernel, (heads, 2 * triton.cdiv(T, both.M)), dqkv, dy, y, lse, qkv, *numbers, **options)
        return
    if config.dq:
        M, N = config.dq[:2]
        dqkv_m, dy_m, y_m, qkv_m = tiles(M, dqkv, dy, y, qkv)
        arguments = dqkv_m, delta, dy_m, y_m, lse, qkv_m, *tiles(N, qkv)
        options = dict(constants(config.dq, D, precision), LOOPS=config.dq.loops)
        launch(dq_kernel, (heads, triton.cdiv(T, M)), *arguments, *numbers, **options)
    if config.dkdv:
        M, N = config.dkdv[:2]
        dqkv_n, qkv_n = tiles(N, dqkv, qkv)
        even = T % M == 0
        tiled = even and D in TILED and qkv.dtype.itemsize == 2
        delta, lse = (row_tiles(x, M) if tiled else x for x in (delta, lse))
        arguments = dqkv_n, delta, *tiles(M, dy), lse, *tiles(M, qkv), qkv_n
        options = dict(constants(config.dkdv, D, precision), LOOPS=config.dkdv.loops, EVEN=even, TILED=tiled)
        launch(dkdv_kernel, (heads, triton.cdiv(T, N)), *arguments, *numbers, **options)


# -- what is launched --------------------------------------------------------------------------------------------------


def padded(D):
    return max(16, triton.next_power_of_2(D))  # tl.dot takes no less


def constants(tile, D, precision):
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return {"M": tile.M, "N": tile.N, "D": padded(D), "PRECISION": precision, **options}


def check_head_size(width, n_head):
    """C / H; raises ConfigError where no kernel here is made for it."""
    D, rest = divmod(width, n_head)
    if rest or D % 8 or not 8 <= D <= 128:
        raise ConfigError(f"attention takes head sizes that are multiples of 8 up to 128, not {width} / {n_head}")
    return D


def plan(qkv, n_head, precision, config=None):
    """-> B, T, the head size, and the config: the given one or the table's."""
    B, T, columns = qkv.shape
    D = check_head_size(columns // 3, n_head)
    kind = "16 bits" if qkv.dtype.itemsize == 2 else precision
    if not config:
        config = next(best for (largest, longest), best in CONFIGS[kind].items() if D <= largest and T <= longest)
    return B, T, D, config
