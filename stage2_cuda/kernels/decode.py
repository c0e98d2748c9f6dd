"""One position of several sequences through the model: products bound by reading the weights, attention over the cache.

A few rows fill one tile of tl.dot, so a weight is read once for all of them. A layer is seven launches:

    h = LN(x)                                             norm_kernel
    q, k, v = h w + b, k and v into the cache             columns_kernel
    softmax(q k') v                                       attend_kernel
    partial sums of y w over a share of the rows          partial_kernel
    h = LN(x + partial sums + bias)                       norm_kernel
    g = gelu(h w + b)                                     columns_kernel
    partial sums of g w                                   partial_kernel

Who reads partial sums adds them, in a fixed order: no atomics, and no launch for the addition. One row alone has a
launch of its own kind: decode_step.py.

The sequences may be of different lengths. These are read from the device, so that one recorded step serves them all.
"""

# B sequences, one row each; C channels, H heads, D head size, V vocabulary; a weight is (K, N), lm_head (V, C)
# the cache of a layer is (B, block, 2C): k then v, heads side by side, as the projection gives them

import math
from typing import NamedTuple

import triton
import triton.language as tl

from stage2_cuda.kernels.gelu import sigmoid_of_2u
from stage2_cuda.triton_driver import launch

STORE, GELU, QKV = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what becomes of a product
LOWEST = tl.constexpr(-3.0e38)  # no infinity: -inf - -inf would be NaN
ROWS = 32  # sequences that one launch continues at most


class Tiles(NamedTuple):
    """How a launch is divided, as was fastest on an H200; the last ones are decode_step's, which has one row."""

    columns: int = 32  # of a weight, that one program owns
    depth: int = 128  # rows of a weight in a step of tl.dot; half as many in fp32
    parts: int = 4  # shares of a weight's rows, each with partial sums of its own
    part_columns: int = 32
    keys: int = 128  # of a cache, in a step
    vocabulary: int = 128  # rows of lm_head

    programs: int = 0  # among which a weight is divided; 0: as many as run at the same time
    warps: int = 8
    bytes: int = 65536  # of a weight, that a program's registers hold
    proj_rows: int = 256  # of a share
    down_rows: int = 1024
    spans: int = 8  # of the keys of a head, a power of two
    span_keys: int = 64  # of a span, in a step
    head_bytes: int = 32768  # of lm_head, in a step
    line: int = 128  # bytes of the L2 cache that one prefetch brings


class Split(NamedTuple):
    """K rows of a weight in `parts` shares of `depth`."""

    parts: int
    depth: int


def split(K, tiles):
    depth = min(256, 16 * triton.cdiv(K, 16 * tiles.parts))
    return Split(triton.cdiv(K, depth), depth)


def step_of(tiles, w):
    """Rows of a weight in a step of tl.dot: as many bytes in any precision."""
    return tiles.depth * 2 // w.dtype.itemsize


# -- what is launched --------------------------------------------------------------------------------------------------


def norm(h, s, stream, ln_w, ln_b, eps):
    """h = LN(x) (B, C), and s = x (B, C) float32, for who needs it later, or None.

    stream: x (B, C) float32, which may be s itself, and partials (parts, B, C) with their bias (C), which are to be
    added to it, or None both.
    """
    x, partials, before = stream
    B, C = h.shape
    parts, width = 1 if partials is None else len(partials), triton.next_power_of_2(C)
    arguments = h, s, x, partials, before, ln_w, ln_b, parts, B, C, 1 / C, float(eps)
    go(norm_kernel, (B,), *arguments, PARTS=triton.next_power_of_2(parts), WIDTH=width)


def columns(y, cache, h, w, bias, lengths, block, kind, tiles, precision):
    """y = f(h w + bias), h (B, K).

    kind: STORE or GELU, y (B, N); QKV, y (B, C) = q, and k and v into `cache`, at the last of lengths (B) positions.
    """
    (B, K), N = h.shape, w.shape[1]
    arguments = y, cache, h, w, bias, lengths, B, K, N, block
    options = dict(KIND=kind, ROWS=padded(B), DEPTH=step_of(tiles, w), COLUMNS=tiles.columns, PRECISION=precision)
    go(columns_kernel, (triton.cdiv(N, tiles.columns),), *arguments, num_stages=3, **options)


def attend(y, q, cache, lengths, n_head, tiles):
    """q (B, C) over the first `lengths` (B) positions of the cache (B, block, 2C) -> y (B, C)."""
    B, C = q.shape
    block, D = cache.shape[1], C // n_head
    arguments = y, q, cache, lengths, n_head, block, math.log2(math.e) / math.sqrt(D)
    go(attend_kernel, (B * n_head,), *arguments, SIZE=D, D=triton.next_power_of_2(D), KEYS=tiles.keys)


def partial_product(partials, x, w, tiles, precision):
    """partials (parts, B, N) float32, which add up to x (B, K) w: those of split(K)."""
    parts, B, N = partials.shape
    K = w.shape[0]
    options = dict(ROWS=padded(B), DEPTH=step_of(tiles, w), COLUMNS=tiles.part_columns, PRECISION=precision)
    grid = triton.cdiv(N, tiles.part_columns), parts
    go(partial_kernel, grid, partials, x, w, B, K, N, split(K, tiles).depth, num_stages=3, **options)


def logits_tiles(V, tiles):
    """Programs that divide the vocabulary."""
    return triton.cdiv(V, tiles.vocabulary)


def unembed(logits, best, index, h, w, tiles, precision):
    """logits (B, V) float32 = h (B, C) w', and of each tile the largest, best (B, tiles) float32, and its first index.

    tiles: logits_tiles(V); index int32.
    """
    (B, V), K, count = logits.shape, h.shape[1], best.shape[1]
    options = dict(ROWS=padded(B), DEPTH=step_of(tiles, w), COLUMNS=tiles.vocabulary, PRECISION=precision)
    go(unembed_kernel, (count,), logits, best, index, h, w, B, K, V, count, num_stages=3, **options)


def last_rows(h, y, lengths):
    """h (B, C) = the row of each sequence's last position, of y (B, T, C)."""
    B, T, C = y.shape
    width = triton.next_power_of_2(C)
    launch(last_rows_kernel, (B,), h, y, lengths, T, C, WIDTH=width, num_warps=4)


def windows(out, ids, lengths):
    """out (B, block) = the last `block` of `lengths` (B) tokens in order, of which number i is in ids at i mod block.

    Where there are fewer, they come first, and what stands behind them does not matter.
    """
    B, block = ids.shape
    launch(windows_kernel, (B, triton.cdiv(block, 256)), out, ids, lengths, block, BLOCK=256, num_warps=4)


def padded(B):
    return max(16, triton.next_power_of_2(B))  # tl.dot takes no fewer rows


def go(kernel, grid, *arguments, **options):
    """Launch with as many warps as the tile asks for: 128 of its elements a thread."""
    elements = options.get("WIDTH", options.get("DEPTH", 1)) * options.get("COLUMNS", options.get("PARTS", 1))
    options["num_warps"] = min(16, max(4, elements // 4096))
    launch(kernel, grid, *arguments, **options)


# -- what several kernels do -------------------------------------------------------------------------------------------


@triton.jit
def residual(x, partials, before, row, rows, C, parts, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """x + (before + the partial sums) of one row (WIDTH)."""
    c = tl.arange(0, WIDTH)
    s = tl.load(x + row * C + c, c < C, 0)
    if partials is not None:
        part = tl.arange(0, PARTS)
        at = (part * rows + row)[:, None] * C + c[None, :]
        branch = tl.sum(tl.load(partials + at, (part < parts)[:, None] & (c < C)[None, :], 0), 0)
        s += tl.load(before + c, c < C, 0).to(tl.float32) + branch
    return s


@triton.jit
def normalised(s, w, b, C, inverse, eps, WIDTH: tl.constexpr):
    """LayerNorm of s (WIDTH), of which C are there."""
    c = tl.arange(0, WIDTH)
    h = tl.where(c < C, s - tl.sum(s, 0) * inverse, 0)
    h *= 1 / tl.sqrt(tl.sum(h * h, 0) * inverse + eps)
    return h * w.to(tl.float32) + b.to(tl.float32)


@triton.jit
def leave(y, cache, value, rows, n, N, lengths, block, KIND: tl.constexpr, ROWS: tl.constexpr):
    """Store value (ROWS, columns n) where KIND says."""
    row = tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (n < N)[None, :]
    if KIND == QKV:
        C = N // 3
        position = tl.minimum(tl.load(lengths + row, row < rows, 1), block) - 1  # of the newest token
        at = (row.to(tl.int64) * block + position)[:, None] * (2 * C) + (n - C)[None, :]
        tl.store(y + row[:, None] * C + n[None, :], value, inside & (n < C)[None, :])
        tl.store(cache + at, value, inside & (n >= C)[None, :])
    else:
        if KIND == GELU:
            value = value * sigmoid_of_2u(value)
        tl.store(y + row[:, None] * N + n[None, :], value, inside)


@triton.jit
def keys_and_values(cache, first, end, C, SIZE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr):
    """Of one head: k and v (KEYS, D) from position `first` on and before `end`; 0 outside."""
    key, d = first + tl.arange(0, KEYS), tl.arange(0, D)
    inside = (key < end)[:, None] & (d < SIZE)[None, :]
    at = cache + key[:, None] * (2 * C) + d[None, :]
    return tl.load(at, inside, 0), tl.load(at + C, inside, 0)


# -- the kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def norm_kernel(
    h, s, x, partials, before, ln_w, ln_b, parts, rows, C, inverse, eps,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0), tl.arange(0, WIDTH)
    row = residual(x, partials, before, b, rows, C, parts, PARTS, WIDTH)
    if s is not None:
        tl.store(s + b * C + c, row, c < C)
    row = normalised(row, tl.load(ln_w + c, c < C, 0), tl.load(ln_b + c, c < C, 0), C, inverse, eps, WIDTH)
    tl.store(h + b * C + c, row, c < C)


@triton.jit
def columns_kernel(
    y, cache, h, w, bias, lengths, rows, K, N, block,
    KIND: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, n = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        a = tl.load(h + row[:, None] * K + k[None, :], (row < rows)[:, None] & (k < K)[None, :], 0)
        tile = tl.load(w + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :], 0)
        value = tl.dot(a, tile, value, input_precision=PRECISION)
    value += tl.load(bias + n, n < N, 0).to(tl.float32)[None, :]
    leave(y, cache, value, rows, n, N, lengths, block, KIND, ROWS)


@triton.jit
def attend_kernel(
    y, q, cache, lengths, H, block, scale,
    SIZE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One head of one sequence. scale: log2(e) / sqrt(SIZE)."""
    b, h, d = tl.program_id(0) // H, tl.program_id(0) % H, tl.arange(0, D)
    C = H * SIZE
    length = tl.minimum(tl.load(lengths + b), block)
    query = tl.load(q + b * C + h * SIZE + d, d < SIZE, 0).to(tl.float32) * scale
    cache += b.to(tl.int64) * block * 2 * C + h * SIZE
    peak, total, acc = tl.full((), LOWEST, tl.float32), tl.full((), 0, tl.float32), tl.zeros((D,), tl.float32)
    for first in tl.range(0, length, KEYS):
        inside = first + tl.arange(0, KEYS) < length
        k, v = keys_and_values(cache, first, length, C, SIZE, D, KEYS)
        scores = tl.where(inside, tl.sum(k.to(tl.float32) * query[None, :], 1), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0))
        p, shrink = tl.math.exp2(scores - higher), tl.math.exp2(peak - higher)
        acc = acc * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)
        peak, total = higher, total * shrink + tl.sum(p, 0)
    tl.store(y + b * C + h * SIZE + d, acc / total, d < SIZE)


@triton.jit
def partial_kernel(
    partials, x, w, rows, K, N, depth,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, n = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, depth, DEPTH):
        k = first + tl.arange(0, DEPTH)
        own = (k < depth) & (part * depth + k < K)
        k += part * depth
        h = tl.load(x + row[:, None] * K + k[None, :], (row < rows)[:, None] & own[None, :], 0)
        tile = tl.load(w + k[:, None] * N + n[None, :], own[:, None] & (n < N)[None, :], 0)
        value = tl.dot(h, tile, value, input_precision=PRECISION)
    at = (part * rows + row)[:, None] * N + n[None, :]
    tl.store(partials + at, value, (row < rows)[:, None] & (n < N)[None, :])


@triton.jit
def unembed_kernel(
    logits, best, index, h, w, rows, K, V, tiles,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, v = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = v.to(tl.int64)[:, None] * K
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        a = tl.load(h + row[:, None] * K + k[None, :], (row < rows)[:, None] & (k < K)[None, :], 0)
        tile = tl.load(w + at + k[None, :], (v < V)[:, None] & (k < K)[None, :], 0)
        value = tl.dot(a, tile.T, value, input_precision=PRECISION)
    tl.store(logits + row.to(tl.int64)[:, None] * V + v[None, :], value, (row < rows)[:, None] & (v < V)[None, :])
    value = tl.where((v < V)[None, :], value, float("-inf"))
    top = tl.max(value, 1)
    first_of_equals = tl.min(tl.where(value == top[:, None], v[None, :], V - 1), 1)
    tl.store(best + row * tiles + tl.program_id(0), top, row < rows)
    tl.store(index + row * tiles + tl.program_id(0), first_of_equals, row < rows)


@triton.jit
def last_rows_kernel(h, y, lengths, T, C, WIDTH: tl.constexpr):
    b, c = tl.program_id(0), tl.arange(0, WIDTH)
    last = tl.minimum(tl.load(lengths + b), T) - 1
    row = tl.load(y + (b.to(tl.int64) * T + last) * C + c, c < C, 0)
    tl.store(h + b * C + c, row, c < C)


@triton.jit
def windows_kernel(out, ids, lengths, block, BLOCK: tl.constexpr):
    b, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.maximum(tl.load(lengths + b) - block, 0)
    tl.store(out + b * block + i, tl.load(ids + b * block + (first + i) % block, i < block, 0), i < block)
