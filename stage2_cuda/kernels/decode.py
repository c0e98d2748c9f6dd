"""One position of every sequence through the model: products bound by reading the weights, attention over the cache.

With one row a product is a sum over weights that are read once, so all that counts is that many programs read at the
same time, and that few launches stand between one weight and the next. A layer is five launches:

    q, k, v = LN(x) w + b, k and v into the cache         normed_columns_kernel
    softmax(q k') v over the keys of one span             attend_kernel
    partial sums of y w over a share of the rows          partial_kernel, which first adds up the spans
    g = gelu(LN(x + partial sums + bias) w + b)           normed_columns_kernel
    partial sums of g w                                   partial_kernel

Who reads partial sums adds them, in a fixed order: no atomics, and no launch for the addition. LayerNorm is computed
again by every program that needs it: a row of 768 numbers costs less than a launch. With more rows it costs more, so
there norm_kernel is a launch of its own, and the products are tl.dot's.

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
from stage2_cuda.triton_driver import can_overlap, launch

LOWEST = tl.constexpr(-3.0e38)  # no infinity: -inf - -inf would be NaN
ROWS = 32  # sequences that one launch continues at most


class Tiles(NamedTuple):
    """How a launch is divided.

    With `overlap` a kernel may start while the one before it ends, to read its weights meanwhile (programmatic
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


ONE_ROW = Tiles(columns=16, parts=3, part_columns=64, keys=64, vocabulary=8, share=512)
MANY_ROWS = Tiles(columns=32, parts=4, part_columns=32, keys=128, vocabulary=128)


def tiles_for(B):
    """What was fastest on an H200 for B rows."""
    return ONE_ROW._replace(overlap=can_overlap()) if B == 1 else MANY_ROWS


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


def spans(block, tiles):
    """Programs that divide the keys of one head where there is one row; a power of two."""
    return triton.next_power_of_2(triton.cdiv(block, tiles.keys))


# -- what is launched --------------------------------------------------------------------------------------------------


def normed_columns(y, cache, s, stream, ln_w, ln_b, w, bias, lengths, block, eps, tiles):
    """One row: y = gelu(LN(x) w + bias), and s = x, for who needs it later, or None.

    stream: x (1, C) float32, and partials (parts, 1, C) with their bias (C), which are to be added to it, or None both.
    Given a cache (1, block, 2C): without gelu, y (1, C) = q, and k and v into it, at the last of lengths (1) positions.
    """
    x, partials, before = stream
    K, N = w.shape
    width = triton.next_power_of_2(K)
    arguments = y, cache, s, x, partials, before, ln_w, ln_b, w, bias, lengths, K, N, block, 1 / K, float(eps)
    options = dict(PARTS=0 if partials is None else len(partials), WIDTH=width, COLUMNS=tiles.columns)
    go(normed_columns_kernel, (triton.cdiv(N, tiles.columns),), *arguments, tiles=tiles, **options)


def norm(h, s, stream, ln_w, ln_b, eps, tiles):
    """h = LN(x) (B, C), and s = x (B, C) float32, which may be x itself, or None; stream: as for normed_columns."""
    x, partials, before = stream
    B, C = h.shape
    parts, width = 0 if partials is None else len(partials), triton.next_power_of_2(C)
    arguments = h, s, x, partials, before, ln_w, ln_b, B, C, 1 / C, float(eps)
    go(norm_kernel, (B,), *arguments, tiles=tiles, PARTS=parts, WIDTH=width)


def columns(y, cache, h, w, bias, lengths, block, tiles, precision):
    """Many rows: y = gelu(h w + bias), h (B, K); the rest as for normed_columns."""
    (B, K), N = h.shape, w.shape[1]
    arguments = y, cache, h, w, bias, lengths, B, K, N, block
    options = dict(ROWS=padded(B), DEPTH=step_of(tiles, w), COLUMNS=tiles.columns, PRECISION=precision)
    go(columns_kernel, (triton.cdiv(N, tiles.columns),), *arguments, tiles=tiles, num_stages=3, **options)


def attend(y, peaks, totals, q, cache, lengths, n_head, tiles):
    """q (B, C) over the first `lengths` (B) positions of the cache (B, block, 2C) -> y (B, C).

    Given peaks and totals (H, spans) float32, for one row: y (H, spans, D) float32 of each span, not yet divided.
    """
    B, C = q.shape
    block, D = cache.shape[1], C // n_head
    count = 0 if peaks is None else peaks.shape[1]
    arguments = y, peaks, totals, q, cache, lengths, n_head, block, math.log2(math.e) / math.sqrt(D)
    options = dict(SIZE=D, D=triton.next_power_of_2(D), KEYS=tiles.keys, SPANS=count)
    go(attend_kernel, (B * n_head, count or 1), *arguments, tiles=tiles, **options)


def partial_product(partials, x, w, tiles, precision, peaks=None, totals=None, head_size=1):
    """partials (parts, B, N) float32, which add up to x (B, K) w: those of split(K).

    With peaks and totals, for one row: x is what `attend` has left of each span.
    """
    parts, B, N = partials.shape
    K = w.shape[0]
    depth = split(K, tiles).depth
    count = 0 if peaks is None else peaks.shape[1]
    arguments = partials, x, peaks, totals, w, B, K, N, depth
    options = dict(SIZE=head_size, SPANS=count, ROWS=padded(B))
    step = triton.next_power_of_2(depth) if B == 1 else step_of(tiles, w)
    options |= dict(DEPTH=step, COLUMNS=tiles.part_columns, PRECISION=precision)
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
    """Launch with as many warps as the tile of weights asks for."""
    elements = options.get("WIDTH", options.get("DEPTH", 1)) * options.get("COLUMNS", options.get("PARTS", 1))
    options["num_warps"] = min(16, max(4, triton.next_power_of_2(elements) // (32 * tiles.each)))
    if tiles.overlap:
        options["launch_pdl"] = True
    launch(kernel, grid, *arguments, OVERLAP=tiles.overlap, **options)


# -- what several kernels do -------------------------------------------------------------------------------------------
# With OVERLAP a kernel lets the next one begin at once (gdc_launch_dependents). From gdc_wait on, what the kernels
# before have written may be read, and what they have read be written. Ahead of it, all may be read that is older than
# this step: a copy to the host, or the end of a graph, lies between two steps, and there nothing overlaps.


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
def normed_columns_kernel(
    y, cache, s, x, partials, before, ln_w, ln_b, w, bias, lengths, K, N, block, inverse, eps,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    k, n = tl.arange(0, WIDTH), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (k < K)[:, None] & (n < N)[None, :]
    tile = tl.load(w + k[:, None] * N + n[None, :], inside, 0)  # first: it has the longest way, and waits for nobody
    weight, offset, added = vector(ln_w, K, WIDTH), vector(ln_b, K, WIDTH), 0.0
    if partials is not None:
        added = vector(before, K, WIDTH)
    shift = tl.load(bias + n, n < N, 0).to(tl.float32)
    position = newest(lengths, 1, block, 1) if cache is not None else 0
    if OVERLAP:
        gdc_wait()
    row = residual(x, partials, added, 0, 1, K, PARTS, WIDTH)
    if s is not None:
        if tl.program_id(0) == 0:
            tl.store(s + k, row, k < K)
    h = normalised(row, weight, offset, K, inverse, eps, WIDTH)
    value = tl.sum(h[:, None] * tile.to(tl.float32), 0) + shift
    leave(y, cache, value[None, :], 1, n, N, K, position, block, 1)


@triton.jit
def norm_kernel(
    h, s, x, partials, before, ln_w, ln_b, rows, C, inverse, eps,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    b, c = tl.program_id(0), tl.arange(0, WIDTH)
    weight, offset, added = vector(ln_w, C, WIDTH), vector(ln_b, C, WIDTH), 0.0
    if partials is not None:
        added = vector(before, C, WIDTH)
    if OVERLAP:
        gdc_wait()
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
        gdc_launch_dependents()
        gdc_wait()
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
def look(query, k, v, visible, peak, total, acc):
    """Let a query (D) attend to those of the keys k and values v (KEYS, D) that are visible (KEYS)."""
    scores = tl.where(visible, tl.sum(k.to(tl.float32) * query[None, :], 1), float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 0))
    p, shrink = tl.math.exp2(scores - higher), tl.math.exp2(peak - higher)
    return higher, total * shrink + tl.sum(p, 0), acc * shrink + tl.sum(p[:, None] * v.to(tl.float32), 0)


@triton.jit
def attend_kernel(
    y, peaks, totals, q, cache, lengths, H, block, scale,
    SIZE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SPANS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One head of one sequence, all its keys; or with SPANS, KEYS of them. scale: log2(e) / sqrt(SIZE)."""
    if OVERLAP:
        gdc_launch_dependents()
    b, h, d = tl.program_id(0) // H, tl.program_id(0) % H, tl.arange(0, D)
    C = H * SIZE
    cache += b.to(tl.int64) * block * 2 * C + h * SIZE
    q += b * C + h * SIZE
    length = tl.minimum(tl.load(lengths + b), block)
    peak, total, acc = tl.full((), LOWEST, tl.float32), tl.full((), 0, tl.float32), tl.zeros((D,), tl.float32)
    if SPANS:
        key, last = tl.program_id(1) * KEYS + tl.arange(0, KEYS), length - 1
        at = cache + key[:, None] * (2 * C) + d[None, :]
        older = (key < last)[:, None] & (d < SIZE)[None, :]
        k, v = tl.load(at, older, 0), tl.load(at + C, older, 0)  # the newest ones are of this step, and come behind
        if OVERLAP:
            gdc_wait()
        own = d < tl.where(last // KEYS == tl.program_id(1), SIZE, 0)
        new_k, new_v = tl.load(cache + last * 2 * C + d, own, 0), tl.load(cache + last * 2 * C + C + d, own, 0)
        is_last = (key == last)[:, None]
        k, v = tl.where(is_last, new_k[None, :], k), tl.where(is_last, new_v[None, :], v)
        query = tl.load(q + d, d < SIZE, 0).to(tl.float32) * scale
        peak, total, acc = look(query, k, v, key < length, peak, total, acc)  # none, if the sequence is not so long yet
        at = h * SPANS + tl.program_id(1)
        tl.store(peaks + at, peak)
        tl.store(totals + at, total)
        tl.store(y + at * SIZE + d, acc, d < SIZE)
    else:
        if OVERLAP:
            gdc_wait()
        query = tl.load(q + d, d < SIZE, 0).to(tl.float32) * scale
        for first in tl.range(0, length, KEYS):
            key = first + tl.arange(0, KEYS)
            inside = (key < length)[:, None] & (d < SIZE)[None, :]
            at = cache + key[:, None] * (2 * C) + d[None, :]
            k, v = tl.load(at, inside, 0), tl.load(at + C, inside, 0)
            peak, total, acc = look(query, k, v, key < length, peak, total, acc)
        tl.store(y + b * C + h * SIZE + d, acc / total, d < SIZE)


@triton.jit
def over_spans(x, peaks, totals, k, own, SIZE: tl.constexpr, SPANS: tl.constexpr):
    """The channels k of attention's result, from those of the spans; a span without keys has a total of 0."""
    at = (k // SIZE)[None, :] * SPANS + tl.arange(0, SPANS)[:, None]  # (SPANS, DEPTH)
    peak = tl.load(peaks + at, own[None, :], LOWEST)
    weight = tl.math.exp2(peak - tl.max(peak, 0)[None, :])
    total = tl.sum(weight * tl.load(totals + at, own[None, :], 1), 0)
    y = tl.load(x + at * SIZE + (k % SIZE)[None, :], own[None, :], 0)
    return tl.sum(weight * y, 0) / total


@triton.jit
def partial_kernel(
    partials, x, peaks, totals, w, rows, K, N, depth,
    SIZE: tl.constexpr, SPANS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    part, n = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    if ROWS == 1:  # all of the share at once
        k = part * depth + tl.arange(0, DEPTH)
        own = (tl.arange(0, DEPTH) < depth) & (k < K)
        tile = tl.load(w + k[:, None] * N + n[None, :], own[:, None] & (n < N)[None, :], 0)
        if OVERLAP:
            gdc_wait()
        if SPANS:
            h = over_spans(x, peaks, totals, k, own, SIZE, SPANS)
        else:
            h = tl.load(x + k, own, 0).to(tl.float32)
        value = tl.sum(h[:, None] * tile.to(tl.float32), 0)[None, :]
    else:
        if OVERLAP:
            gdc_wait()
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
    if OVERLAP:
        gdc_launch_dependents()
    row, v = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = v.to(tl.int64)[:, None] * K
    if ROWS == 1:
        k = tl.arange(0, DEPTH)
        tile = tl.load(w + at + k[None, :], (v < V)[:, None] & (k < K)[None, :], 0)
        if OVERLAP:
            gdc_wait()
        x = tl.load(h + k, k < K, 0).to(tl.float32)
        value = tl.sum(tile.to(tl.float32) * x[None, :], 1)[None, :]
    else:
        if OVERLAP:
            gdc_wait()
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
