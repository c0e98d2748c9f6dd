"""Causal attention without the T x T matrix in memory: FlashAttention-2 (Dao 2023), forward and backward.

For q, k, v (T, D) of one head; s, p, dp and ds are (T, T), k' is the transpose of k, sums run along a row:

    s = q k' / sqrt(D), -inf above the diagonal    lse = log(sum(exp(s)))    p = exp(s - lse)    y = p v
    dv = p' dy    dp = dy v'    delta = sum(p * dp) = sum(y * dy)    ds = p * (dp - delta)
    dq = ds k / sqrt(D)    dk = ds' q / sqrt(D)

Forward and dq: one program per BLOCK_M queries; it loops over the keys, BLOCK_N at a time, up to the diagonal.
dk and dv: one program per BLOCK_N keys; it loops over the queries, BLOCK_M at a time, from the diagonal to T. The
backward programs recompute p. Each tile of dq, dk or dv is computed by one program, without atomic additions, so every
run gives the same bits. Tiles above the diagonal are skipped, and only tiles on the diagonal are masked. The programs
with the longest loops are launched first, so that all processors finish at about the same time. For a short T one
kernel computes dq, dk and dv: half of its programs compute dq, the other half dk and dv.

Kernels load and store tiles through tensor descriptors. On a Hopper GPU the TMA unit then copies them between global
and shared memory without using registers. Reads outside an array return zero and writes there are dropped, so a tile
needs no mask for the rows beyond T or the columns beyond D.
"""

# B batch, T time, C channels, H heads, D = C // H head size, HEAD_DIM = D rounded up to a power of two
# a tile of s is BLOCK_M queries (rows) by BLOCK_N keys (columns)

import math
from typing import NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2core.errors import ConfigError
from stage2_cuda.runtime.triton_launch import Pointer, launch

QUERY, KEY, VALUE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the parts of qkv
LOG2E = tl.constexpr(math.log2(math.e))  # exp(x) = exp2(x log2(e)), and exp2 is one instruction


class TileConfig(NamedTuple):
    """The tile and the launch parameters of one kernel.

    loops: 1 loop over all tiles, with a test for the diagonal in each iteration, or 2 loops: one over the tiles below
    the diagonal, which need no mask, and one over the tiles on it.
    """

    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int  # software pipeline depth: tiles in flight or in use
    loops: int = 1


class AttentionTiles(NamedTuple):
    """A TileConfig for each kernel, None for a kernel that is not launched.

    both: a square tile for the kernel that computes dq, dk and dv in one launch, in place of `dq` and `dkdv`.
    """

    forward: TileConfig | None = None
    dq: TileConfig | None = None
    dkdv: TileConfig | None = None
    both: TileConfig | None = None

    def __str__(self):
        """The text that tuning caches and state.json hold: "dq 128 x 64, 4 warps, 3 stages, 1 loops"; do not change."""
        text = "{} {} x {}, {} warps, {} stages, {} loops".format
        return "; ".join(text(kernel, *tile) for kernel, tile in self._asdict().items() if tile)


NO_LIMIT = 1 << 62
# {kind of products: {(largest D, largest T): tiles}}; the first entry that fits is used. "16 bits": the fastest on an
# H200, except for the forward pass of a short T. The others are estimates that spill few registers when compiled for
# an H200; strict fp32 ("ieee") does not use tensor cores. Positional tiles: forward, dq, dkdv.
DEFAULT_TILES = {
    "16 bits": {
        (64, 256): AttentionTiles(TileConfig(64, 64, 4, 3), both=TileConfig(64, 64, 4, 2)),
        (64, 4096): AttentionTiles(TileConfig(128, 64, 8, 3), TileConfig(128, 32, 4, 3), TileConfig(64, 64, 4, 3)),
        (64, NO_LIMIT): AttentionTiles(TileConfig(64, 128, 4, 2), TileConfig(128, 64, 4, 3), TileConfig(64, 64, 4, 3)),
        (128, NO_LIMIT): AttentionTiles(TileConfig(64, 64, 4, 3), TileConfig(128, 32, 8, 3), TileConfig(64, 128, 8, 3)),
    },
    "ieee": {
        (64, NO_LIMIT): AttentionTiles(*[TileConfig(32, 32, 8, 2)] * 3),
        (128, NO_LIMIT): AttentionTiles(*[TileConfig(16, 16, 8, 2)] * 3),
    },
    "tf32": {
        (64, NO_LIMIT): AttentionTiles(*[TileConfig(64, 64, 4, 2)] * 3),
        (128, NO_LIMIT): AttentionTiles(TileConfig(64, 32, 8, 2), TileConfig(64, 32, 8, 2), TileConfig(32, 64, 8, 2)),
    },
    "tf32x3": {
        (128, NO_LIMIT): AttentionTiles(TileConfig(64, 32, 4, 2), TileConfig(64, 32, 4, 2), TileConfig(32, 64, 4, 2)),
    },
}
# Head sizes for which dkdv_kernel also reads lse and delta through descriptors, if the arrays have 16 bits and T is a
# multiple of BLOCK_M. For these sizes it was measured to be faster.
DESCRIPTOR_HEAD_SIZES = (64,)


# -- tiles -------------------------------------------------------------------------------------------------------------


def head_descriptor(array, n_head, D, block_rows):
    """A descriptor of array (B, T, parts C) as (B, parts, H, T, D), in blocks of `block_rows` rows of one head."""
    B, T, columns = array.shape
    C = n_head * D
    shape, strides = [B, columns // C, n_head, T, D], [T * columns, C, D, columns, 1]
    return TensorDescriptor(Pointer(array), shape, strides, [1, 1, 1, block_rows, padded_head_size(D)])


@triton.jit
def load_tile(desc, b, part, h, row, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    return desc.load([b, part, h, row, 0]).reshape(BLOCK_ROWS, HEAD_DIM)


@triton.jit
def store_tile(desc, tile, b, part, h, row, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    desc.store([b, part, h, row, 0], tile.to(desc.dtype).reshape(1, 1, 1, BLOCK_ROWS, HEAD_DIM))


def row_descriptor(array, block_rows):
    """A descriptor of array (B, H, T) as a vector of B*H*T elements, in blocks of `block_rows`.

    T must be a multiple of block_rows; otherwise a block would contain rows of the next head.
    """
    return TensorDescriptor(Pointer(array), [array.size], [1], [block_rows])


@triton.jit
def load_rows(x, head_start, offs_m, start_m, T, EVEN: tl.constexpr, USE_DESCRIPTOR: tl.constexpr):
    """Load lse or delta (BLOCK_M) of one head at the positions offs_m = start_m + [0, BLOCK_M).

    USE_DESCRIPTOR: x is a row_descriptor of the array (B, H, T), in which this head begins at head_start. Otherwise x
    points to this head. EVEN: T is a multiple of BLOCK_M. In the innermost loop a mask costs 2 %, and pointers cost
    more, because every thread computes its own addresses.
    """
    if USE_DESCRIPTOR:
        values = x.load([head_start + start_m])
    elif EVEN:
        values = tl.load(x + offs_m)
    else:
        values = tl.load(x + offs_m, mask=offs_m < T, other=0.0)  # beyond T dy is 0: any finite value will do
    return values


@triton.jit
def key_range(start_m, T, loop, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOPS: tl.constexpr):
    """[begin, end) of the keys in this loop, for the tile of queries [start_m, start_m + BLOCK_M).

    With two loops: loop 0 covers the full tiles below the diagonal, loop 1 the tiles on it.
    """
    begin, end = 0, tl.minimum(start_m + BLOCK_M, T)
    if LOOPS == 2:
        full_end = start_m // BLOCK_N * BLOCK_N
        if loop == 0:
            end = full_end
        else:
            begin = full_end
    return begin, end


@triton.jit
def query_range(start_n, T, loop, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOPS: tl.constexpr):
    """[begin, end) of the queries in this loop, for the tile of keys [start_n, start_n + BLOCK_N).

    With two loops: loop 0 covers the tiles on the diagonal, loop 1 the full tiles below it.
    """
    begin, end = start_n // BLOCK_M * BLOCK_M, T
    if LOOPS == 2:
        full_begin = tl.minimum(tl.cdiv(start_n + BLOCK_N, BLOCK_M) * BLOCK_M, T)
        if loop == 0:
            end = full_begin
        else:
            begin = full_begin
    return begin, end


@triton.jit
def causal_mask(offs_m, offs_n):
    return offs_m[:, None] >= offs_n[None, :]  # (BLOCK_M, BLOCK_N): a query attends to its own key and earlier ones


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_step(s, row_max, row_sum, acc, scale):
    """One step of the online softmax for the scores s (BLOCK_M, BLOCK_N), in base 2.

    Returns p = exp2(scale s - new maximum), the new maximum, and row_sum (BLOCK_M) and acc (BLOCK_M, HEAD_DIM)
    rescaled to the new maximum, with p added to row_sum.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    p = tl.math.exp2(s * scale - new_max[:, None])
    rescale = tl.math.exp2(row_max - new_max)
    return p, new_max, row_sum * rescale + tl.sum(p, 1), acc * rescale[:, None]


@triton.jit
def forward_kernel(
    y_desc, lse_ptr, qkv_m, qkv_n, T, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y and lse / log(2) of BLOCK_M queries. qkv_m, qkv_n: qkv in blocks of BLOCK_M and of BLOCK_N rows.

    scale: log2(e) / sqrt(D).
    """
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # last queries first: they have the longest loops
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(qkv_m, b, QUERY, h, start_m, BLOCK_M, HEAD_DIM)
    row_max, row_sum = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = key_range(start_m, T, loop, BLOCK_M, BLOCK_N, LOOPS)
        for start_n in tl.range(begin, end, BLOCK_N):
            start_n = tl.multiple_of(start_n, BLOCK_N)
            k = load_tile(qkv_n, b, KEY, h, start_n, BLOCK_N, HEAD_DIM)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            if loop == LOOPS - 1:
                if start_n + BLOCK_N > start_m:
                    s = tl.where(causal_mask(offs_m, start_n + tl.arange(0, BLOCK_N)), s, float("-inf"))
            p, row_max, row_sum, acc = softmax_step(s, row_max, row_sum, acc, scale)
            v = load_tile(qkv_n, b, VALUE, h, start_n, BLOCK_N, HEAD_DIM)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BLOCK_M, HEAD_DIM)
    tl.store(lse_ptr + tl.program_id(0).to(tl.int64) * T + offs_m, row_max + tl.math.log2(row_sum), mask=offs_m < T)
    store_tile(y_desc, acc / row_sum[:, None], b, 0, h, start_m, BLOCK_M, HEAD_DIM)


def attention_forward(y, lse, qkv, n_head, precision="ieee", tiles=None):
    """y (B, T, C) and lse (B, H, T) float32 from qkv (B, T, 3C): columns q, then k, then v, each (H, D).

    lse is in base 2, because the kernels use exp2: log2(e) times the lse of the formula.
    precision: how tl.dot multiplies float32, "ieee", "tf32" or "tf32x3"; products of fp16 and bf16 are exact, and all
    sums are float32. tiles: AttentionTiles to use instead of DEFAULT_TILES. Raises ConfigError unless the head size is
    a multiple of 8 up to 128.
    """
    B, T, D, tiles = shapes_and_tiles(qkv, n_head, precision, tiles)
    tile = tiles.forward
    y_desc, qkv_m = (head_descriptor(array, n_head, D, tile.block_m) for array in (y, qkv))
    qkv_n = head_descriptor(qkv, n_head, D, tile.block_n)
    arguments = y_desc, lse, qkv_m, qkv_n, T, n_head, LOG2E.value / math.sqrt(D)
    options = dict(launch_options(tile, D, precision), LOOPS=tile.loops)
    launch(forward_kernel, (B * n_head, triton.cdiv(T, tile.block_m)), *arguments, **options)


# -- backward ----------------------------------------------------------------------------------------------------------


@triton.jit
def row_delta(y, dy):
    return tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)  # (BLOCK_M)


@triton.jit
def dq_tile(
    dqkv_desc, delta_ptr, dy_desc, y_desc, lse_ptr, qkv_m, qkv_n, b, h, start_m, T, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of the queries [start_m, start_m + BLOCK_M), and their delta unless delta_ptr is None.

    lse_ptr and delta_ptr point to the T elements of this head.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(qkv_m, b, QUERY, h, start_m, BLOCK_M, HEAD_DIM)
    dy = load_tile(dy_desc, b, 0, h, start_m, BLOCK_M, HEAD_DIM)
    delta = row_delta(load_tile(y_desc, b, 0, h, start_m, BLOCK_M, HEAD_DIM), dy)
    lse = tl.load(lse_ptr + offs_m, mask=offs_m < T, other=0.0)
    if delta_ptr is not None:
        tl.store(delta_ptr + offs_m, delta, mask=offs_m < T)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = key_range(start_m, T, loop, BLOCK_M, BLOCK_N, LOOPS)
        for start_n in tl.range(begin, end, BLOCK_N):
            start_n = tl.multiple_of(start_n, BLOCK_N)
            k = load_tile(qkv_n, b, KEY, h, start_n, BLOCK_N, HEAD_DIM)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            v = load_tile(qkv_n, b, VALUE, h, start_n, BLOCK_N, HEAD_DIM)
            dp = tl.dot(dy, v.T, input_precision=PRECISION)
            p = tl.math.exp2(s * (scale * LOG2E) - lse[:, None])
            if loop == LOOPS - 1:
                if start_n + BLOCK_N > start_m:
                    p = tl.where(causal_mask(offs_m, start_n + tl.arange(0, BLOCK_N)), p, 0.0)
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_tile(dqkv_desc, dq * scale, b, QUERY, h, start_m, BLOCK_M, HEAD_DIM)


@triton.jit
def dkdv_tile(
    dqkv_desc, delta_in, dy_desc, y_desc, lse_in, qkv_m, qkv_n, b, h, head_start, start_n, T, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr,
    EVEN: tl.constexpr, USE_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys [start_n, start_n + BLOCK_N). Here the tiles of s, p, dp and ds are transposed.

    lse_in and delta_in: x of load_rows(). If delta_in is None, delta is computed from y.
    """
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_tile(qkv_n, b, KEY, h, start_n, BLOCK_N, HEAD_DIM)
    v = load_tile(qkv_n, b, VALUE, h, start_n, BLOCK_N, HEAD_DIM)
    dk, dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32), tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = query_range(start_n, T, loop, BLOCK_M, BLOCK_N, LOOPS)
        for start_m in tl.range(begin, end, BLOCK_M):
            start_m = tl.multiple_of(start_m, BLOCK_M)
            offs_m = start_m + tl.arange(0, BLOCK_M)
            q = load_tile(qkv_m, b, QUERY, h, start_m, BLOCK_M, HEAD_DIM)
            s = tl.dot(k, q.T, input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
            lse = load_rows(lse_in, head_start, offs_m, start_m, T, EVEN, USE_DESCRIPTOR)
            p = tl.math.exp2(s * (scale * LOG2E) - lse[None, :])
            if loop == 0:
                if start_m < start_n + BLOCK_N:
                    p = tl.where(causal_mask(offs_m, offs_n).T, p, 0.0)
            dy = load_tile(dy_desc, b, 0, h, start_m, BLOCK_M, HEAD_DIM)
            dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision=PRECISION)  # (BLOCK_N, HEAD_DIM)
            dp = tl.dot(v, dy.T, input_precision=PRECISION)
            if delta_in is None:
                delta = row_delta(load_tile(y_desc, b, 0, h, start_m, BLOCK_M, HEAD_DIM), dy)
            else:
                delta = load_rows(delta_in, head_start, offs_m, start_m, T, EVEN, USE_DESCRIPTOR)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    store_tile(dqkv_desc, dv, b, VALUE, h, start_n, BLOCK_N, HEAD_DIM)
    store_tile(dqkv_desc, dk * scale, b, KEY, h, start_n, BLOCK_N, HEAD_DIM)


@triton.jit
def dq_kernel(
    dqkv_desc, delta_ptr, dy_desc, y_desc, lse_ptr, qkv_m, qkv_n, T, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """delta and dq of BLOCK_M queries; scale: 1 / sqrt(D)."""
    b, h, head_start = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # last queries first: they have the longest loops
    dq_tile(
        dqkv_desc, delta_ptr + head_start, dy_desc, y_desc, lse_ptr + head_start, qkv_m, qkv_n, b, h, start_m, T, scale,
        BLOCK_M, BLOCK_N, HEAD_DIM, LOOPS, PRECISION,
    )  # fmt: skip


@triton.jit
def dkdv_kernel(
    dqkv_desc, delta_in, dy_desc, lse_in, qkv_m, qkv_n, T, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr,
    EVEN: tl.constexpr, USE_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys. In this order the longest loops, those of the first keys, are launched first."""
    b, h, head_start = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0) * T
    start_n = tl.program_id(1) * BLOCK_N
    if not USE_DESCRIPTOR:  # coordinates of a descriptor have 32 bits, pointers 64
        delta_in = delta_in + tl.program_id(0).to(tl.int64) * T
        lse_in = lse_in + tl.program_id(0).to(tl.int64) * T
    dkdv_tile(
        dqkv_desc, delta_in, dy_desc, None, lse_in, qkv_m, qkv_n, b, h, head_start, start_n, T, scale,
        BLOCK_M, BLOCK_N, HEAD_DIM, LOOPS, EVEN, USE_DESCRIPTOR, PRECISION,
    )  # fmt: skip


@triton.jit
def both_kernel(
    dqkv_desc, dy_desc, y_desc, lse_ptr, qkv_desc, T, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N keys in the even programs, dq of BLOCK_M = BLOCK_N queries in the odd programs.

    Both kinds of program compute delta themselves.
    """
    b, h, head_start = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * T
    tile, n_tiles, lse_ptr = tl.program_id(1) // 2, tl.num_programs(1) // 2, lse_ptr + head_start
    if tl.program_id(1) % 2 == 0:
        start_n = tile * BLOCK_M
        dkdv_tile(
            dqkv_desc, None, dy_desc, y_desc, lse_ptr, qkv_desc, qkv_desc, b, h, 0, start_n, T, scale,
            BLOCK_M, BLOCK_N, HEAD_DIM, LOOPS, EVEN, False, PRECISION,
        )  # fmt: skip
    else:
        start_m = (n_tiles - 1 - tile) * BLOCK_M
        dq_tile(
            dqkv_desc, None, dy_desc, y_desc, lse_ptr, qkv_desc, qkv_desc, b, h, start_m, T, scale,
            BLOCK_M, BLOCK_N, HEAD_DIM, LOOPS, PRECISION,
        )  # fmt: skip


def attention_backward(dqkv, delta, dy, qkv, y, lse, n_head, precision="ieee", tiles=None):
    """dqkv (B, T, 3C) from dy (B, T, C) and the qkv, y, lse of attention_forward(); delta (B, H, T) float32: scratch.

    If `tiles` has only `dq`, dk and dv are not written. If it has only `dkdv`, dq is not written, and delta must have
    been computed by a launch with `dq`. precision, tiles: as for attention_forward().
    """
    B, T, D, tiles = shapes_and_tiles(qkv, n_head, precision, tiles)
    heads, shape_arguments = B * n_head, (T, n_head, 1 / math.sqrt(D))

    def descriptors(block_rows, *arrays):
        return [head_descriptor(array, n_head, D, block_rows) for array in arrays]

    if tile := tiles.both:
        arguments = *descriptors(tile.block_m, dqkv, dy, y), lse, *descriptors(tile.block_m, qkv)
        options = dict(launch_options(tile, D, precision), LOOPS=tile.loops, EVEN=T % tile.block_m == 0)
        grid = (heads, 2 * triton.cdiv(T, tile.block_m))
        launch(both_kernel, grid, *arguments, *shape_arguments, **options)
        return
    if tile := tiles.dq:
        dqkv_m, dy_m, y_m, qkv_m = descriptors(tile.block_m, dqkv, dy, y, qkv)
        arguments = dqkv_m, delta, dy_m, y_m, lse, qkv_m, *descriptors(tile.block_n, qkv)
        options = dict(launch_options(tile, D, precision), LOOPS=tile.loops)
        launch(dq_kernel, (heads, triton.cdiv(T, tile.block_m)), *arguments, *shape_arguments, **options)
    if tile := tiles.dkdv:
        dqkv_n, qkv_n = descriptors(tile.block_n, dqkv, qkv)
        dy_m, qkv_m = descriptors(tile.block_m, dy, qkv)
        even = T % tile.block_m == 0
        use_descriptor = even and D in DESCRIPTOR_HEAD_SIZES and qkv.dtype.itemsize == 2
        if use_descriptor:
            delta, lse = row_descriptor(delta, tile.block_m), row_descriptor(lse, tile.block_m)
        arguments = dqkv_n, delta, dy_m, lse, qkv_m, qkv_n
        options = dict(launch_options(tile, D, precision), LOOPS=tile.loops, EVEN=even, USE_DESCRIPTOR=use_descriptor)
        launch(dkdv_kernel, (heads, triton.cdiv(T, tile.block_n)), *arguments, *shape_arguments, **options)


# -- launch parameters -------------------------------------------------------------------------------------------------


def padded_head_size(D):
    return max(16, triton.next_power_of_2(D))  # tl.dot needs at least 16


def launch_options(tile, D, precision):
    """The constants and launch parameters that all attention kernels share."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "HEAD_DIM": padded_head_size(D)}
    return {**constants, "PRECISION": precision, **options}


def check_head_size(width, n_head):
    """Return D = width / n_head; raises ConfigError unless it is a multiple of 8 up to 128."""
    D, rest = divmod(width, n_head)
    if rest or D % 8 or not 8 <= D <= 128:
        raise ConfigError(f"attention takes head sizes that are multiples of 8 up to 128, not {width} / {n_head}")
    return D


def shapes_and_tiles(qkv, n_head, precision, tiles=None):
    """(B, T, D, tiles) of qkv (B, T, 3C): the given AttentionTiles, or those of DEFAULT_TILES."""
    B, T, columns = qkv.shape
    D = check_head_size(columns // 3, n_head)
    kind = "16 bits" if qkv.dtype.itemsize == 2 else precision
    if not tiles:
        entries = DEFAULT_TILES[kind].items()
        tiles = next(entry for (max_head_size, max_T), entry in entries if D <= max_head_size and T <= max_T)
    return B, T, D, tiles
