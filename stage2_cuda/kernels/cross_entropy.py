"""Cross-entropy over a chunk of logits: three numbers a row, and the gradient in the place of the logits.

    maximum = max over v of logits[v];  sum = sum of exp(logits[v] - maximum);  picked = logits[target]
    loss = log(sum) - (picked - maximum);  dlogits[v] = scale (exp(logits[v] - maximum) / sum - [v = target])

Pad V to a multiple of 16, or the GPU reads element by element; what stands in the padding does not matter.
The maximum and the sum come from one reading (Milakov and Gimelshein 2018): whenever the maximum rises from m to m',
the sum so far is multiplied by exp(m - m').
"""

# N rows of this chunk, V columns that are tokens, from the token `first` on, then columns that are padding

import triton
import triton.language as tl

from stage2_cuda.triton_driver import launch

COLUMNS = 4096  # of a tile


def tile_of(columns):
    """Columns and warps of a tile."""
    width = min(COLUMNS, triton.next_power_of_2(columns))
    return width, min(8, max(1, width // 512))


def cross_entropy_forward(maxima, sums, picked, logits, targets, vocab, first=0):
    """maxima, sums, picked (N) float32 of logits (N, >= V), targets (N), vocab = V.

    picked is 0 where the target is outside [first, first + V).
    """
    width, warps = tile_of(logits.shape[1])
    arguments = maxima, sums, picked, logits, targets, vocab, logits.shape[1], first
    launch(forward_kernel, (logits.shape[0],), *arguments, COLUMNS=width, num_warps=warps)


def cross_entropy_backward(dlogits, logits, targets, maxima, sums, scale, vocab, first=0, dy=None):
    """dlogits (N, >= V) = dy scale (exp(logits - maxima) / sums - onehot), 0 in the padding; it may be logits itself.

    scale: a float; dy: an array of one element on the device, or None for 1.
    """
    width, warps = tile_of(logits.shape[1])
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], width))
    arguments = dlogits, logits, targets, maxima, sums, dy, float(scale), vocab, logits.shape[1], first
    launch(backward_kernel, grid, *arguments, COLUMNS=width, num_warps=warps)


def cross_entropy_forward_backward(dlogits, maxima, sums, picked, logits, targets, scale, vocab, first=0, dy=None):
    """Both at once, where no other rank has part of the row: its logits are read again while the cache has them."""
    width, warps = tile_of(logits.shape[1])
    arguments = dlogits, maxima, sums, picked, logits, targets, dy, float(scale), vocab, logits.shape[1], first
    launch(forward_backward_kernel, (logits.shape[0],), *arguments, COLUMNS=width, num_warps=warps)


@triton.jit
def load(logits, column, vocab, width):
    # a mask with an edge at `vocab`, which is no multiple of 16, would be loaded element by element: four times slower
    x = tl.load(logits + column, column < width, 0).to(tl.float32)
    return tl.where(column < vocab, x, float("-inf"))


@triton.jit
def statistics(logits, target, vocab, width, COLUMNS: tl.constexpr):
    """maximum, sum and picked of the row that `logits` points to."""
    own = (target >= 0) & (target < vocab)
    picked = tl.load(logits + target, own, 0).to(tl.float32)  # first: the gradient may take the place of the logits
    maximum = tl.full((), -3.0e38, tl.float32)  # no infinity: -inf - -inf would be NaN
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(0, vocab, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = load(logits, column, vocab, width)
        higher = tl.maximum(maximum, tl.max(x, 0))
        total = total * tl.exp(maximum - higher) + tl.exp(x - higher)
        maximum = higher
    return maximum, tl.sum(total, 0), picked


@triton.jit
def gradient(dlogits, logits, target, maximum, weight, factor, start, vocab, width, COLUMNS: tl.constexpr):
    """One tile of dlogits = weight exp(logits - maximum) - factor onehot."""
    column = start + tl.arange(0, COLUMNS)
    x = load(logits, column, vocab, width)
    g = weight * tl.exp(x - maximum) - tl.where(column == target, factor, 0.0)
    tl.store(dlogits + column, tl.where(column < vocab, g, 0.0), column < width)


@triton.jit
def scaled(dy, scale):
    if dy is not None:
        scale *= tl.load(dy).to(tl.float32)
    return scale


@triton.jit
def forward_kernel(maxima, sums, picked, logits, targets, vocab, width, first, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    target = tl.load(targets + row).to(tl.int32) - first
    maximum, total, logit = statistics(logits + row.to(tl.int64) * width, target, vocab, width, COLUMNS)
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
    gradient(dlogits + at, logits + at, target, maximum, weight, factor, start, vocab, width, COLUMNS)


@triton.jit
def forward_backward_kernel(
    dlogits, maxima, sums, picked, logits, targets, dy, scale, vocab, width, first, COLUMNS: tl.constexpr
):
    row, factor = tl.program_id(0), scaled(dy, scale)
    target, at = tl.load(targets + row).to(tl.int32) - first, row.to(tl.int64) * width
    maximum, total, logit = statistics(logits + at, target, vocab, width, COLUMNS)
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(picked + row, logit)
    for start in tl.range(0, width, COLUMNS):
        gradient(dlogits + at, logits + at, target, maximum, factor / total, factor, start, vocab, width, COLUMNS)
