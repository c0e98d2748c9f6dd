"""Cross-entropy over a chunk of logits: three numbers a row, and the gradient in the place of the logits.

    maximum = max over v of logits[v];  sum = sum of exp(logits[v] - maximum);  picked = logits[target]
    loss = log(sum) - (picked - maximum);  dlogits[v] = scale (exp(logits[v] - maximum) / sum - [v = target])

Pad V to a multiple of 16, or the GPU reads element by element; what stands in the padding does not matter.
The maximum and the sum come from one reading (Milakov and Gimelshein 2018): whenever the maximum rises from m to m',
the sum so far is multiplied by exp(m - m'). Each LANE columns, which one thread loads at once, have a maximum and a sum
of their own, so that no thread waits for another before the row ends.

Full tiles are read without a mask, and their gradient is written as if none of their columns were the target's, which
one thread then mends: two comparisons and two selections less for each element. And few programs with large tiles share
a processor, or the rows at work would not stay in the cache until they are read again.
"""

# N rows of this chunk, V columns that are tokens, from the token `first` on, then columns that are padding

import math

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

TILE, LANE = 32768, 8  # bytes of a tile; columns that a thread loads at once
STAGES = 3  # tiles in flight at the first reading, from memory; the second is from the cache
LOG2E = tl.constexpr(math.log2(math.e))


def tile_of(logits):
    """Columns and warps of a tile."""
    width = min(TILE // logits.itemsize, max(LANE, triton.next_power_of_2(logits.shape[1])))
    return width, max(1, width // 512)


def reading(logits, vocab):
    """How forward_kernel and forward_backward_kernel go over a row: full tiles, and one that is cut to what is left."""
    width, warps = tile_of(logits)
    full, columns = vocab // width, logits.shape[1]
    tail = triton.next_power_of_2(max(LANE, columns - full * width)) if columns > full * width else 0
    return dict(COLUMNS=width, TAIL=tail, LANE=LANE, STAGES=STAGES if full > 1 else 1, num_warps=warps)


def cross_entropy_forward(maxima, sums, picked, logits, targets, vocab, first=0):
    """maxima, sums, picked (N) float32 of logits (N, >= V), targets (N), vocab = V.

    picked is 0 where the target is outside [first, first + V).
    """
    arguments = maxima, sums, picked, logits, targets, vocab, logits.shape[1], first
    launch(forward_kernel, (logits.shape[0],), *arguments, **reading(logits, vocab))


def cross_entropy_backward(dlogits, logits, targets, maxima, sums, scale, vocab, first=0, dy=None):
    """dlogits (N, >= V) = dy scale (exp(logits - maxima) / sums - onehot), 0 in the padding; it may be logits itself.

    scale: a float; dy: an array of one element on the device, or None for 1.
    """
    width, warps = tile_of(logits)
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], width))
    arguments = dlogits, logits, targets, maxima, sums, dy, float(scale), vocab, logits.shape[1], first
    launch(backward_kernel, grid, *arguments, COLUMNS=width, num_warps=warps)


def cross_entropy_forward_backward(dlogits, maxima, sums, picked, logits, targets, scale, vocab, first=0, dy=None):
    """Both at once, where no other rank has part of the row: its logits are read again while the cache has them."""
    arguments = dlogits, maxima, sums, picked, logits, targets, dy, float(scale), vocab, logits.shape[1], first
    launch(forward_backward_kernel, (logits.shape[0],), *arguments, **reading(logits, vocab))


@triton.jit
def exp(x):
    return tl.math.exp2(x * LOG2E)  # tl.exp takes three instructions more, for results below 2^-126, which are 0 here


@triton.jit
def load(logits, column, vocab, width, CACHE: tl.constexpr):
    # a mask with an edge at `vocab`, which is no multiple of 16, would be loaded element by element: four times slower
    x = tl.load(logits + column, column < width, 0, eviction_policy=CACHE).to(tl.float32)
    return tl.where(column < vocab, x, float("-inf"))


@triton.jit
def read(peak, total, x):
    """The maxima and sums of lanes, after another tile x (lanes, LANE)."""
    higher = tl.maximum(peak, tl.max(x, 1))
    return higher, total * exp(peak - higher) + tl.sum(exp(x - higher[:, None]), 1)


@triton.jit
def nothing(LANES: tl.constexpr):
    lowest = -2.0e38  # no infinity, as -inf - -inf is NaN, and times LOG2E it must not become one
    return tl.full((LANES,), lowest, tl.float32), tl.zeros((LANES,), tl.float32)


@triton.jit
def lanes(start, COLUMNS: tl.constexpr, LANE: tl.constexpr):
    return start + tl.arange(0, COLUMNS // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]


@triton.jit
def statistics(
    logits, target, vocab, width,
    COLUMNS: tl.constexpr, TAIL: tl.constexpr, LANE: tl.constexpr, STAGES: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """maximum, sum and picked of the row that `logits` points to."""
    own = (target >= 0) & (target < vocab)
    picked = tl.load(logits + target, own, 0).to(tl.float32)  # first: the gradient may take the place of the logits
    peak, total = nothing(COLUMNS // LANE)
    full = vocab // COLUMNS * COLUMNS
    for start in tl.range(0, full, COLUMNS, num_stages=STAGES):
        x = tl.load(logits + lanes(start, COLUMNS, LANE), eviction_policy=CACHE).to(tl.float32)
        peak, total = read(peak, total, x)
    maximum = tl.max(peak, 0)
    if TAIL:
        last, last_total = nothing(TAIL // LANE)
        last, last_total = read(last, last_total, load(logits, lanes(full, TAIL, LANE), vocab, width, CACHE))
        maximum = tl.maximum(maximum, tl.max(last, 0))
        rest = tl.sum(last_total * exp(last - maximum), 0)
    else:
        rest = 0.0
    return maximum, tl.sum(total * exp(peak - maximum), 0) + rest, picked


@triton.jit
def gradient(
    dlogits, logits, target, maximum, weight, factor, start, vocab, width,
    COLUMNS: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """One tile of dlogits = weight exp(logits - maximum) - factor onehot."""
    column = start + tl.arange(0, COLUMNS)
    x = load(logits, column, vocab, width, CACHE)
    g = weight * exp(x - maximum) - tl.where(column == target, factor, 0.0)
    tl.store(dlogits + column, tl.where(column < vocab, g, 0.0), column < width, eviction_policy=CACHE)


@triton.jit
def scaled(dy, scale):
    if dy is not None:
        scale *= tl.load(dy).to(tl.float32)
    return scale


@triton.jit
def forward_kernel(
    maxima, sums, picked, logits, targets, vocab, width, first,
    COLUMNS: tl.constexpr, TAIL: tl.constexpr, LANE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    target, at = tl.load(targets + row).to(tl.int32) - first, row.to(tl.int64) * width
    maximum, total, logit = statistics(logits + at, target, vocab, width, COLUMNS, TAIL, LANE, STAGES, "")
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(picked + row, logit)


@triton.jit
def backward_kernel(
    dlogits, logits, targets, maxima, sums, dy, scale, vocab, width, first, COLUMNS: tl.constexpr
):  # fmt: skip
    row, factor = tl.program_id(0), scaled(dy, scale)
    target, maximum = tl.load(targets + row).to(tl.int32) - first, tl.load(maxima + row)
    at, start = row.to(tl.int64) * width, tl.program_id(1) * COLUMNS
    weight = factor / tl.load(sums + row)
    gradient(dlogits + at, logits + at, target, maximum, weight, factor, start, vocab, width, COLUMNS, "")


@triton.jit
def forward_backward_kernel(
    dlogits, maxima, sums, picked, logits, targets, dy, scale, vocab, width, first,
    COLUMNS: tl.constexpr, TAIL: tl.constexpr, LANE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, factor = tl.program_id(0), scaled(dy, scale)
    target, at = tl.load(targets + row).to(tl.int32) - first, row.to(tl.int64) * width
    logits, dlogits = logits + at, dlogits + at
    maximum, total, logit = statistics(logits, target, vocab, width, COLUMNS, TAIL, LANE, STAGES, "evict_last")
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(picked + row, logit)
    weight, full = factor / total, vocab // COLUMNS * COLUMNS
    for start in tl.range(0, full, COLUMNS, num_stages=1):  # as if no column here were the target's
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(logits + column, eviction_policy="evict_first").to(tl.float32)
        tl.store(dlogits + column, weight * exp(x - maximum), eviction_policy="evict_first")
    if TAIL:
        gradient(dlogits, logits, target, maximum, weight, factor, full, vocab, width, TAIL, "evict_first")
    tl.debug_barrier()  # that column is written by another thread before
    own = (target >= 0) & (target < full)
    tl.store(dlogits + target, weight * exp(logit - maximum) - factor, own)
