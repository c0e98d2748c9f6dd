"""One position of one sequence through the model: a chain of launches, each as long as its numbers take to get there.

A weight depends on nothing, and a kernel has it before its turn comes (decode.wait). What is left is a chain of five
launches a layer:

    q, k, v = LN(x) w + b, k and v into the cache         normed_row_kernel
    softmax(q k') v over the keys of one span             attend_span_kernel
    partial sums of y w over a share of the heads         joined_kernel, which first adds up the spans
    s = x + partial sums + b; g = gelu(LN(s) w + b)       normed_row_kernel
    x = s + g w + b                                       added_row_kernel

Each waits for numbers that others have just written, then for its arithmetic, and for what its warps have to tell each
other: a sum over all of them takes about as long as the numbers did. So a warp owns whole columns of a weight, whose
sums never leave it. For that a column has to lie in one piece, and these weights are used transposed. LayerNorm would
be two sums before the product; they are taken beside it instead:

    LN(x) w + b = r (x o l) w - r m (l w) + (o w + b),  m and r: mean and 1 / deviation of x;  l, o: LayerNorm's weights

What does not depend on x, w' and l w and o w + b, is made at the beginning of a text (`transpose`, `sums_of_columns`).
The variance is then the mean of the squares less the square of the mean, in fp32: a row whose mean is 30 deviations
loses three digits by that. Attention's projection keeps its weight as it is: as little as possible may be read of what
the spans have left, so its programs are few, with many columns each.
"""

# C channels, H heads, D head size; K rows and N columns of a weight, which is (N, K) where it is transposed
# the cache of a layer is (1, block, 2C): k then v, heads side by side, as the projection gives them

import math

import triton
import triton.language as tl

from stage2_cuda.decoding.batched import LOWEST, go, newest, wait
from stage2_cuda.kernels.gelu import sigmoid_of_2u
from stage2_cuda.runtime.triton_launch import launch

WARPS = 8  # of a program whose warps own columns
CHUNK = 512  # bytes of a column that a warp reads at once
SPANS = 32  # of a head at most, so that they fit the registers of who adds them up
SQUARE = 64  # rows and columns of a tile that is transposed
REGISTERS = 128  # of a thread at most, so that a program can begin beside one of the launch before it ...
FITTING = 48 << 10  # ... if its columns have no more bytes than these, in 16 bits: then nothing is spilled


def heads_of(H, D, tiles):
    """(shares that the heads are divided into, each with partial sums of its own; heads of a share)."""
    heads = max(1, min(triton.cdiv(H, tiles.parts), tiles.share // D))
    return triton.cdiv(H, heads), heads


def keys_of(block, tiles):
    """Keys of one span."""
    return max(tiles.keys, triton.next_power_of_2(triton.cdiv(block, SPANS)))


def spans(block, tiles):
    """Spans of one head; a power of two."""
    return triton.next_power_of_2(triton.cdiv(block, keys_of(block, tiles)))


# -- what is launched at the beginning of a text -----------------------------------------------------------------------


def transpose(out, w):
    """out (N, K) = w (K, N) transposed."""
    K, N = w.shape
    launch(transpose_kernel, (triton.cdiv(K, SQUARE), triton.cdiv(N, SQUARE)), out, w, K, N, SQUARE=SQUARE, num_warps=4)


def sums_of_columns(slopes, shifts, w, ln_w, ln_b, bias):
    """slopes (N) = ln_w w', shifts (N) = ln_b w' + bias, float32; w (N, K)."""
    grid, options = of_columns(w, WARPS)
    launch(sums_of_columns_kernel, grid, slopes, shifts, w, ln_w, ln_b, bias, w.shape[1], w.shape[0], **options)


# -- what is launched for a position -----------------------------------------------------------------------------------


def normed_row(y, cache, s, stream, ln_w, w, slopes, shifts, lengths, block, eps, tiles):
    """y (1, N) = gelu(LN(x) w' + bias), w (N, K), and s (1, K) = x for who needs it later, or None.

    stream: x (1, K) float32, and partials (parts, 1, K) with their bias (K), which are to be added to it, or None both.
    slopes, shifts: of sums_of_columns, which has the rest of LayerNorm and the bias.
    Given a cache (1, block, 2K): without gelu, y (1, K) = q, and k and v into it, at the last of lengths (1) positions.
    """
    x, partials, before = stream
    (N, K), (grid, options) = w.shape, of_columns(w, tiles.columns)
    arguments = y, cache, s, x, partials, before, ln_w, w, slopes, shifts, lengths, block, 1 / K, float(eps), K, N
    go(normed_row_kernel, grid, *arguments, tiles=tiles, PARTS=0 if partials is None else len(partials), **options)


def attend_spans(y, peaks, totals, q, cache, lengths, n_head, tiles):
    """Of q (1, C) over the first `lengths` (1) positions of the cache (1, block, 2C) what is left of each span.

    y (H, spans, D), peaks and totals (H, spans), float32: of the spans that there are, the sum of the values, weighted
    by exp2(score - peak), and the total of the weights.
    """
    block, D = cache.shape[1], q.shape[1] // n_head
    keys, width = keys_of(block, tiles), triton.next_power_of_2(D)
    arguments = y, peaks, totals, q, cache, lengths, n_head, block, math.log2(math.e) / math.sqrt(D)
    warps = min(8, max(1, keys * width // 2048))  # one, if it can: then there is nobody to tell anything
    options = dict(SIZE=D, D=width, KEYS=keys, SPANS=peaks.shape[1], num_warps=warps)
    go(attend_span_kernel, (n_head, peaks.shape[1]), *arguments, tiles=tiles, **options)


def joined_product(partials, y, peaks, totals, lengths, w, block, tiles):
    """partials (parts, 1, N) float32, which add up to attention's result times w (C, N): those of heads_of(H).

    y, peaks, totals: what attend_spans has left.
    """
    (H, count, D), N = y.shape, w.shape[1]
    (shares, heads), width = heads_of(H, D, tiles), triton.next_power_of_2(D)
    arguments = partials, y, peaks, totals, lengths, w, H, N, heads, block
    options = dict(SIZE=D, D=width, SPANS=count, KEYS=keys_of(block, tiles), HEADS=triton.next_power_of_2(heads))
    options |= dict(DEPTH=options["HEADS"] * width, COLUMNS=tiles.part_columns)
    go(joined_kernel, (triton.cdiv(N, tiles.part_columns), shares), *arguments, tiles=tiles, **options)


def added_row(out, s, x, w, bias, tiles):
    """out (1, N) = s + x w' + bias; s float32, x (1, K), w (N, K)."""
    grid, options = of_columns(w, WARPS)
    go(added_row_kernel, grid, out, s, x, w, bias, w.shape[1], w.shape[0], tiles=tiles, **options)


def of_columns(w, columns):
    """Grid and options of programs whose warps own columns of w (N, K): a power of two, fewer where they are long."""
    (N, K), size = w.shape, w.dtype.itemsize
    while columns > WARPS and columns * K * size > FITTING:
        columns //= 2
    options = dict(CHUNKS=triton.cdiv(K, CHUNK // size), CHUNK=CHUNK // size, COLUMNS=columns, num_warps=WARPS)
    if size == 2 and columns * K * size <= FITTING:
        options["maxnreg"] = REGISTERS
    return (triton.cdiv(N, columns),), options


# -- columns that a warp owns ------------------------------------------------------------------------------------------
# A column is a tuple of CHUNKS pieces, and those of a program are tiles (COLUMNS, CHUNK). A warp has whole rows of one.


@triton.jit
def own_columns(COLUMNS: tl.constexpr):
    return tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def columns_of(w, n, K, N, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The columns n of a transposed weight (N, K)."""
    k, tiles = tl.arange(0, CHUNK)[None, :], ()
    for c in tl.static_range(CHUNKS):
        inside = (n < N)[:, None] & (k + c * CHUNK < K)
        tiles += (tl.load(w + n[:, None] * K + k + c * CHUNK, inside, 0),)
    return tiles


@triton.jit
def row_of(x, K, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """x (K) in pieces (CHUNK)."""
    k, pieces = tl.arange(0, CHUNK), ()
    for c in tl.static_range(CHUNKS):
        pieces += (tl.load(x + k + c * CHUNK, k + c * CHUNK < K, 0).to(tl.float32),)
    return pieces


@triton.jit
def product(tiles, row, CHUNKS: tl.constexpr):
    """Of each column the sum, times a row."""
    total = tiles[0].to(tl.float32) * row[0][None, :]
    for c in tl.static_range(1, CHUNKS):
        total += tiles[c].to(tl.float32) * row[c][None, :]
    return tl.sum(total, 1)


# -- the kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def transpose_kernel(out, w, K, N, SQUARE: tl.constexpr):
    k, n = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE), tl.program_id(1) * SQUARE + tl.arange(0, SQUARE)
    tile = tl.load(w + k[:, None] * N + n[None, :], (k < K)[:, None] & (n < N)[None, :])
    tl.store(out + n[:, None] * K + k[None, :], tile.T, (n < N)[:, None] & (k < K)[None, :])


@triton.jit
def sums_of_columns_kernel(
    slopes, shifts, w, ln_w, ln_b, bias, K, N, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):
    n = own_columns(COLUMNS)
    tiles, shift = columns_of(w, n, K, N, CHUNKS, CHUNK), tl.load(bias + n, n < N, 0).to(tl.float32)
    tl.store(slopes + n, product(tiles, row_of(ln_w, K, CHUNKS, CHUNK), CHUNKS), n < N)
    tl.store(shifts + n, product(tiles, row_of(ln_b, K, CHUNKS, CHUNK), CHUNKS) + shift, n < N)


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def normed_row_kernel(
    y, cache, s, x, partials, before, ln_w, w, slopes, shifts, lengths, block, inverse, eps, K, N,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n, k = own_columns(COLUMNS), tl.arange(0, CHUNK)
    tiles = columns_of(w, n, K, N, CHUNKS, CHUNK)  # first: they have the longest way, and wait for nobody
    scales, slope, shift = row_of(ln_w, K, CHUNKS, CHUNK), tl.load(slopes + n, n < N, 0), tl.load(shifts + n, n < N, 0)
    added = ()
    if partials is not None:
        added = row_of(before, K, CHUNKS, CHUNK)
    if OVERLAP:
        wait()
    position = newest(lengths, 1, block, 1) if cache is not None else 0
    read = row_of(x, K, CHUNKS, CHUNK)  # all are on their way before one is waited for
    if partials is not None:
        for part in tl.static_range(PARTS):
            read = added_up(read, row_of(partials + part * K, K, CHUNKS, CHUNK), CHUNKS)
        read = added_up(read, added, CHUNKS)
    scaled, total, squares = (), tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range(CHUNKS):
        scaled += (read[c] * scales[c],)
        total += read[c]
        squares += read[c] * read[c]
    value = product(tiles, scaled, CHUNKS)
    mean, square = tl.reduce((total * inverse, squares * inverse), 0, add_both)
    value = (value - mean * slope) / tl.sqrt(tl.maximum(square - mean * mean, 0) + eps) + shift
    if cache is not None:
        tl.store(y + n, value, n < K)
        tl.store(cache + position * (2 * K) + n - K, value, (n >= K) & (n < N))
    else:
        tl.store(y + n, value * sigmoid_of_2u(value), n < N)
    if s is not None:
        if tl.program_id(0) == 0:
            for c in tl.static_range(CHUNKS):
                tl.store(s + k + c * CHUNK, read[c], k + c * CHUNK < K)


@triton.jit
def added_up(a, b, CHUNKS: tl.constexpr):
    pieces = ()
    for c in tl.static_range(CHUNKS):
        pieces += (a[c] + b[c],)
    return pieces


@triton.jit
def added_row_kernel(
    out, s, x, w, bias, K, N,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = own_columns(COLUMNS)
    tiles, shift = columns_of(w, n, K, N, CHUNKS, CHUNK), tl.load(bias + n, n < N, 0).to(tl.float32)
    if OVERLAP:
        wait()
    before, row = tl.load(s + n, n < N, 0), columns_of(x, 0 * n, K, 1, CHUNKS, CHUNK)  # each warp reads x for itself
    total = tl.zeros((COLUMNS, CHUNK), tl.float32)
    for c in tl.static_range(CHUNKS):
        total += tiles[c].to(tl.float32) * row[c].to(tl.float32)
    tl.store(out + n, before + (tl.sum(total, 1) + shift), n < N)


@triton.jit
def attend_span_kernel(
    y, peaks, totals, q, cache, lengths, H, block, scale,
    SIZE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SPANS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """KEYS keys of one head. scale: log2(e) / sqrt(SIZE)."""
    h, span, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    last = tl.minimum(tl.load(lengths), block) - 1
    if span * KEYS > last:
        return  # the sequence is not so long yet
    C = H * SIZE
    cache += h * SIZE
    key = span * KEYS + tl.arange(0, KEYS)
    at = cache + key[:, None] * (2 * C) + d[None, :]
    older = (key < last)[:, None] & (d < SIZE)[None, :]
    k, v = tl.load(at, older, 0), tl.load(at + C, older, 0)
    if OVERLAP:
        wait()
    own = d < tl.where(last // KEYS == span, SIZE, 0)  # the newest key and value are of this step
    query = tl.load(q + h * SIZE + d, d < SIZE, 0).to(tl.float32) * scale
    new_k = tl.load(cache + last * (2 * C) + d, own, 0).to(tl.float32)
    new_v = tl.load(cache + last * (2 * C) + C + d, own, 0).to(tl.float32)
    scores = tl.where(key < last, tl.sum(k.to(tl.float32) * query[None, :], 1), float("-inf"))
    newest_score = tl.where(last // KEYS == span, tl.sum(new_k * query, 0), float("-inf"))
    peak = tl.maximum(tl.max(scores, 0), newest_score)
    p, newest_p = tl.math.exp2(scores - peak), tl.math.exp2(newest_score - peak)
    at = h * SPANS + span
    tl.store(peaks + at, peak)
    tl.store(totals + at, tl.sum(p, 0) + newest_p)
    tl.store(y + at * SIZE + d, tl.sum(p[:, None] * v.to(tl.float32), 0) + newest_p * new_v, d < SIZE)


@triton.jit
def over_spans(y, peaks, totals, h, own, live, SIZE: tl.constexpr, D: tl.constexpr, SPANS: tl.constexpr):
    """Attention's result of the heads h (HEADS, D), from those of the first `live` spans."""
    span, d = tl.arange(0, SPANS), tl.arange(0, D)
    at, there = h[:, None] * SPANS + span[None, :], own[:, None] & (span < live)[None, :]
    peak, total = tl.load(peaks + at, there, LOWEST), tl.load(totals + at, there, 1)
    y = tl.load(y + at[:, :, None] * SIZE + d[None, None, :], there[:, :, None] & (d < SIZE)[None, None, :], 0)
    weight = tl.math.exp2(peak - tl.max(peak, 1)[:, None])
    return tl.sum(weight[:, :, None] * y, 1) / tl.sum(weight * total, 1)[:, None]


@triton.jit
def joined_kernel(
    partials, y, peaks, totals, lengths, w, H, N, heads, block,
    SIZE: tl.constexpr, D: tl.constexpr, SPANS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    part, n = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first, row = part * heads, tl.arange(0, DEPTH)
    end, h = tl.minimum(first + heads, H), first + row // D
    inside = ((h < end) & (row % D < SIZE))[:, None] & (n < N)[None, :]
    tile = tl.load(w + (h * SIZE + row % D)[:, None] * N + n[None, :], inside, 0)
    live = tl.cdiv(tl.minimum(tl.load(lengths), block), KEYS)
    if OVERLAP:
        wait()
    h = first + tl.arange(0, HEADS)
    x = tl.reshape(over_spans(y, peaks, totals, h, h < end, live, SIZE, D, SPANS), (DEPTH,))
    tl.store(partials + part * N + n, tl.sum(x[:, None] * tile.to(tl.float32), 0), n < N)
