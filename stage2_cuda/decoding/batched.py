"""One position of every sequence through the model: products bound by reading the weights, attention over the cache.

With many rows a layer is seven launches:

    h = LN(x)                                             norm_kernel
    q, k, v = h w + b, k and v into the cache             columns_kernel
    softmax(q k') v                                       attend_kernel
    partial sums of y w over a share of the rows          partial_kernel
    h = LN(x + partial sums + b)                          norm_kernel
    g = gelu(h w + b)                                     columns_kernel
    partial sums of g w over a share of the rows          partial_kernel

The products are tl.dot's, and read each weight once for all rows. Where a product has too few columns to keep all
processors busy, its rows are divided too. Who reads partial sums adds them, in a fixed order: no atomics, and no launch
for the addition. One row has kernels of its own (decode_row.py), but for the last LayerNorm and the logits.

The sequences may be of different lengths. These are read from the device, so that one recorded step serves them all.
"""

# B sequences, one row each; C channels, H heads, D head size, V vocabulary; a weight is (K, N), lm_head (V, C)
# the cache of a layer is (B, block, 2C): k then v, heads side by side, as the projection gives them

import math
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stage2_cuda.kernels.gelu import sigmoid_of_2u
from stage2_cuda.runtime.triton_launch import can_overlap, launch

LOWEST = tl.constexpr(-3.0e38)  # no infinity: -inf - -inf would be NaN
ROWS = 32  # sequences that one launch continues at most


class Tiles(NamedTuple):
    """How a launch is divided.

    With `overlap` a kernel may start while the one before it is at work, to read its weights meanwhile (programmatic
    dependent launch).
    """

    columns: int  # of a weight, that one program owns
    parts: int  # shares of a weight's rows, each with partial sums of its own; more, where they exceed `share`
    part_columns: int
    keys: int  # of a cache: a span of one program where there is one row, else a step
    vocabulary: int  # rows of lm_head
    share: int = 256  # rows of a weight that one program takes at most
    each: int = 128  # elements of a tile of weights that one thread holds
    depth: int = 128  # of many rows: rows of a weight in a step of tl.dot; half as many in fp32
    overlap: bool = False


ONE_ROW = Tiles(columns=32, parts=3, part_columns=64, keys=32, vocabulary=8)
MANY_ROWS = Tiles(columns=32, parts=4, part_columns=32, keys=128, vocabulary=128)


def tiles_for(B):
    """What was fastest on an H200 for B rows."""
    return (ONE_ROW if B == 1 else MANY_ROWS)._replace(overlap=can_overlap())


class Split(NamedTuple):
    """K rows of a weight in `parts` shares of `depth`."""

    parts: int
    depth: int


def split(K, tiles):
    depth = min(tiles.share, 16 * triton.cdiv(K, 16 * tiles.parts))
    return Split(triton.cdiv(K, depth), depth)


def step_of(tiles, w):
    """Rows of a weight in a step of tl.dot: as many bytes in any precision."""
    return tiles.depth * 2 // w.dtype.itemsize


# -- what is launched --------------------------------------------------------------------------------------------------


def norm(h, s, stream, ln_w, ln_b, eps, tiles):
    """h = LN(x) (B, C), and s = x (B, C) float32, which may be x itself, or None.

    stream: x (B, C) float32, and partials (parts, B, C) with their bias (C), which are to be added to it, or None both.
    """
    x, partials, before = stream
    B, C = h.shape
    parts, width = 0 if partials is None else len(partials), triton.next_power_of_2(C)
    arguments = h, s, x, partials, before, ln_w, ln_b, B, C, 1 / C, float(eps)
    go(norm_kernel, (B,), *arguments, tiles=tiles, PARTS=parts, WIDTH=width)


def columns(y, cache, h, w, bias, lengths, block, tiles, precision):
    """y (B, N) = gelu(h w + bias), h (B, K).

    Given a cache (B, block, 2K): without gelu, y (B, K) = q, and k and v into it, at the last of lengths (B) positions.
    """
    (B, K), N = h.shape, w.shape[1]
    arguments = y, cache, h, w, bias, lengths, B, K, N, block
    options = dict(ROWS=padded(B), DEPTH=step_of(tiles, w), COLUMNS=tiles.columns, PRECISION=precision)
    go(columns_kernel, (triton.cdiv(N, tiles.columns),), *arguments, tiles=tiles, num_stages=3, **options)


def attend(y, q, cache, lengths, n_head, tiles):
    """q (B, C) over the first `lengths` (B) positions of the cache (B, block, 2C) -> y (B, C)."""
    B, C = q.shape
    block, D = cache.shape[1], C // n_head
    arguments = y, q, cache, lengths, n_head, block, math.log2(math.e) / math.sqrt(D)
    go(attend_kernel, (B * n_head,), *arguments, tiles=tiles, SIZE=D, D=triton.next_power_of_2(D), KEYS=tiles.keys)


def partial_product(partials, x, w, tiles, precision):
    """partials (parts, B, N) float32, which add up to x (B, K) w: those of split(K)."""
    parts, B, N = partials.shape
    K = w.shape[0]
    arguments = partials, x, w, B, K, N, split(K, tiles).depth
    options = dict(ROWS=padded(B), DEPTH=step_of(tiles, w), COLUMNS=tiles.part_columns, PRECISION=precision)
    go(partial_kernel, (triton.cdiv(N, tiles.part_columns), parts), *arguments, tiles=tiles, num_stages=3, **options)


def logits_tiles(V, tiles):
    """Programs that divide the vocabulary."""
    return triton.cdiv(V, tiles.vocabulary)


def unembed(logits, best, index, h, w, tiles, precision):
    """logits (B, V) float32 = h (B, C) w', and of each tile the largest, best (B, tiles) float32, and its first index.

    tiles: logits_tiles(V); index int32.
    """
    (B, V), K, count = logits.shape, h.shape[1], best.shape[1]
    depth = triton.next_power_of_2(K) if B == 1 else step_of(tiles, w)
    options = dict(ROWS=padded(B), DEPTH=depth, COLUMNS=tiles.vocabulary, PRECISION=precision)
    go(unembed_kernel, (count,), logits, best, index, h, w, B, K, V, count, tiles=tiles, num_stages=3, **options)


def padded(B):
    return 1 if B == 1 else max(16, triton.next_power_of_2(B))  # tl.dot takes no fewer rows


def go(kernel, grid, *arguments, tiles, **options):
    """Launch, with as many warps as the tile of weights asks for where nothing else is said."""
    elements = options.get("WIDTH", options.get("DEPTH", 1)) * options.get("COLUMNS", options.get("PARTS", 1))
    options.setdefault("num_warps", min(16, max(4, triton.next_power_of_2(elements) // (32 * tiles.each))))
    if tiles.overlap:
        options["launch_pdl"] = True
    launch(kernel, grid, *arguments, OVERLAP=tiles.overlap, **options)


# -- what several kernels do -------------------------------------------------------------------------------------------


@triton.jit
def wait():
    """For the kernel before this one; the one behind it may begin.

    With OVERLAP a kernel is there before its turn. Ahead of wait() it may read what the kernel before the last has
    written, and all that is older, such as weights; from here on also what the last has, and write what that has read.
    If the next were let in sooner, more of them would share the processors with the one whose turn it is, and
    that costs it more than they gain.
    """
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def vector(x, C, WIDTH: tl.constexpr):
    """x (C) as WIDTH float32, the rest 0."""
    c = tl.arange(0, WIDTH)
    return tl.load(x + c, c < C, 0).to(tl.float32)


@triton.jit
def newest(lengths, rows, block, ROWS: tl.constexpr):
    """The position of each sequence's newest token (ROWS)."""
    row = tl.arange(0, ROWS)
    return tl.minimum(tl.load(lengths + row, row < rows, 1), block) - 1


@triton.jit
def residual(x, partials, added, row, rows, C, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """x + (added + the partial sums) of one row (WIDTH); without partials x alone."""
    c = tl.arange(0, WIDTH)
    s = tl.load(x + row * C + c, c < C, 0)
    if partials is not None:
        for part in tl.static_range(PARTS):  # each thread adds its own columns: no tile of all parts, which warps share
            added += tl.load(partials + (part * rows + row) * C + c, c < C, 0)
        s += added
    return s


@triton.jit
def normalised(s, weight, bias, C, inverse, eps, WIDTH: tl.constexpr):
    h = tl.where(tl.arange(0, WIDTH) < C, s - tl.sum(s, 0) * inverse, 0)
    h *= 1 / tl.sqrt(tl.sum(h * h, 0) * inverse + eps)
    return h * weight + bias


@triton.jit
def leave(y, cache, value, rows, n, N, C, position, block, ROWS: tl.constexpr):
    """Store gelu(value) (ROWS, columns n); or q alone in y, k and v in the cache at `position` (ROWS)."""
    row = tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (n < N)[None, :]
    if cache is not None:
        at = (row.to(tl.int64) * block + position)[:, None] * (2 * C) + (n - C)[None, :]
        tl.store(y + row[:, None] * C + n[None, :], value, inside & (n < C)[None, :])
        tl.store(cache + at, value, inside & (n >= C)[None, :])
    else:
        tl.store(y + row[:, None] * N + n[None, :], value * sigmoid_of_2u(value), inside)


# -- the kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def norm_kernel(
    h, s, x, partials, before, ln_w, ln_b, rows, C, inverse, eps,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0), tl.arange(0, WIDTH)
    weight, offset, added = vector(ln_w, C, WIDTH), vector(ln_b, C, WIDTH), 0.0
    if partials is not None:
        added = vector(before, C, WIDTH)
    if OVERLAP:
        wait()
    row = residual(x, partials, added, b, rows, C, PARTS, WIDTH)
    if s is not None:
        tl.store(s + b * C + c, row, c < C)
    tl.store(h + b * C + c, normalised(row, weight, offset, C, inverse, eps, WIDTH), c < C)


@triton.jit
def columns_kernel(
    y, cache, h, w, bias, lengths, rows, K, N, block,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        wait()
    row, n = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        a = tl.load(h + row[:, None] * K + k[None, :], (row < rows)[:, None] & (k < K)[None, :], 0)
        tile = tl.load(w + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :], 0)
        value = tl.dot(a, tile, value, input_precision=PRECISION)
    value += tl.load(bias + n, n < N, 0).to(tl.float32)[None, :]
    position = newest(lengths, rows, block, ROWS) if cache is not None else 0
    leave(y, cache, value, rows, n, N, K, position, block, ROWS)


@triton.jit
def attend_kernel(
    y, q, cache, lengths, H, block, scale,
    SIZE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, all its keys. scale: log2(e) / sqrt(SIZE)."""
    b, h, d = tl.program_id(0) // H, tl.program_id(0) % H, tl.arange(0, D)
    C = H * SIZE
    cache += b.to(tl.int64) * block * 2 * C + h * SIZE
    length = tl.minimum(tl.load(lengths + b), block)
    if OVERLAP:
        wait()
    query = tl.load(q + b * C + h * SIZE + d, d < SIZE, 0).to(tl.float32) * scale
    peak, total, acc = tl.full((), LOWEST, tl.float32), tl.full((), 0, tl.float32), tl.zeros((D,), tl.float32)
    for first in tl.range(0, length, KEYS):
        key = first + tl.arange(0, KEYS)
        inside = (key < length)[:, None] & (d < SIZE)[None, :]
        at = cache + key[:, None] * (2 * C) + d[None, :]
        k, v = tl.load(at, inside, 0), tl.load(at + C, inside, 0)
        scores = tl.where(key < length, tl.sum(k.to(tl.float32) * query[None, :], 1), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0))
        p, shrink = tl.math.exp2(scores - higher), tl.math.exp2(peak - higher)
        peak, total = higher, total * shrink + tl.sum(p, 0)
        acc = acc * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)
    tl.store(y + b * C + h * SIZE + d, acc / total, d < SIZE)


@triton.jit
def partial_kernel(
    partials, x, w, rows, K, N, depth,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    part, n = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    if OVERLAP:
        wait()
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
    ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, v = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = v.to(tl.int64)[:, None] * K
    if ROWS == 1:
        k = tl.arange(0, DEPTH)
        tile = tl.load(w + at + k[None, :], (v < V)[:, None] & (k < K)[None, :], 0)
        if OVERLAP:
            wait()
        x = tl.load(h + k, k < K, 0).to(tl.float32)
        value = tl.sum(tile.to(tl.float32) * x[None, :], 1)[None, :]
    else:
        if OVERLAP:
            wait()
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
