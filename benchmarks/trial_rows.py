"""Variants of the kernels over rows that are being tried: what loses here is deleted, what wins moves to kernels/."""

import triton
import triton.language as tl

from stage2_cuda.kernels.column_sums import add_partials
from stage2_cuda.triton_driver import launch

LOG2E = tl.constexpr(1.4426950408889634)

# -- cross-entropy, forward and backward -------------------------------------------------------------------------------


@triton.jit
def load(logits, column, vocab, width, KEEP: tl.constexpr):
    x = tl.load(logits + column, column < width, 0, eviction_policy=KEEP).to(tl.float32)
    return tl.where(column < vocab, x, float("-inf"))


@triton.jit
def lanes_kernel(
    dlogits, maxima, sums, picked, logits, targets, scale, vocab, width, first,
    COLUMNS: tl.constexpr, LANE: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr, DROP: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """A maximum and a sum for each LANE columns that a thread loads at once, so that none waits for another."""
    row = tl.program_id(0)
    target, at = tl.load(targets + row).to(tl.int32) - first, row.to(tl.int64) * width
    logits += at
    dlogits += at
    own = (target >= 0) & (target < vocab)
    logit = tl.load(logits + target, own, 0).to(tl.float32)
    within = tl.arange(0, COLUMNS // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    peak = tl.full((COLUMNS // LANE,), -1.0e38, tl.float32)  # times log2(e) it is finite still
    total = tl.zeros((COLUMNS // LANE,), tl.float32)
    for start in tl.range(0, vocab, COLUMNS, num_stages=STAGES):
        x = load(logits, start + within, vocab, width, KEEP)
        higher = tl.maximum(peak, tl.max(x, 1))
        total = total * tl.math.exp2((peak - higher) * LOG2E) + tl.sum(
            tl.math.exp2(x * LOG2E - (higher * LOG2E)[:, None]), 1
        )
        peak = higher
    maximum = tl.max(peak, 0)
    total = tl.sum(total * tl.math.exp2((peak - maximum) * LOG2E), 0)
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(picked + row, logit)
    weight, shift = scale / total, maximum * LOG2E
    for start in tl.range(0, width, COLUMNS, num_stages=AGAIN):
        column = start + tl.arange(0, COLUMNS)
        x = load(logits, column, vocab, width, DROP)
        g = weight * tl.math.exp2(x * LOG2E - shift) - tl.where(column == target, scale, 0.0)
        tl.store(dlogits + column, tl.where(column < vocab, g, 0.0), column < width, eviction_policy=DROP)


@triton.jit
def tiles_kernel(
    dlogits, maxima, sums, picked, logits, targets, scale, vocab, width, first,
    COLUMNS: tl.constexpr, KEEP: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """The kernel as it was: one maximum for the row so far."""
    row = tl.program_id(0)
    target, at = tl.load(targets + row).to(tl.int32) - first, row.to(tl.int64) * width
    logits += at
    dlogits += at
    own = (target >= 0) & (target < vocab)
    logit = tl.load(logits + target, own, 0).to(tl.float32)
    maximum = tl.full((), -3.0e38, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(0, vocab, COLUMNS):
        x = load(logits, start + tl.arange(0, COLUMNS), vocab, width, KEEP)
        higher = tl.maximum(maximum, tl.max(x, 0))
        total = total * tl.exp(maximum - higher) + tl.exp(x - higher)
        maximum = higher
    total = tl.sum(total, 0)
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(picked + row, logit)
    for start in tl.range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = load(logits, column, vocab, width, DROP)
        g = scale / total * tl.exp(x - maximum) - tl.where(column == target, scale, 0.0)
        tl.store(dlogits + column, tl.where(column < vocab, g, 0.0), column < width, eviction_policy=DROP)


@triton.jit
def registers_kernel(
    dlogits, maxima, sums, picked, logits, targets, scale, vocab, width, first,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The whole row in registers, COUNT tiles of it, in its own type: one reading."""
    row = tl.program_id(0)
    target, at = tl.load(targets + row).to(tl.int32) - first, row.to(tl.int64) * width
    logits += at
    dlogits += at
    own = (target >= 0) & (target < vocab)
    logit = tl.load(logits + target, own, 0).to(tl.float32)
    column = tl.arange(0, COLUMNS)
    tiles = ()
    for tile in tl.static_range(COUNT):
        tiles = tiles + (tl.load(logits + tile * COLUMNS + column, tile * COLUMNS + column < width, 0),)
    tl.debug_barrier()  # the gradient takes the place of the logits
    peak = tl.full((COLUMNS,), -3.0e38, tl.float32)
    for tile in tl.static_range(COUNT):
        peak = tl.maximum(peak, tl.where(tile * COLUMNS + column < vocab, tiles[tile].to(tl.float32), -3.0e38))
    maximum = tl.max(peak, 0)
    shift = maximum * LOG2E
    total = tl.zeros((COLUMNS,), tl.float32)
    for tile in tl.static_range(COUNT):
        p = tl.math.exp2(tiles[tile].to(tl.float32) * LOG2E - shift)
        total += tl.where(tile * COLUMNS + column < vocab, p, 0.0)
    total = tl.sum(total, 0)
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(picked + row, logit)
    weight = scale / total
    for tile in tl.static_range(COUNT):
        place = tile * COLUMNS + column
        g = weight * tl.math.exp2(tiles[tile].to(tl.float32) * LOG2E - shift) - tl.where(place == target, scale, 0.0)
        tl.store(dlogits + place, tl.where(place < vocab, g, 0.0), place < width)


def cross_entropy(dlogits, maxima, sums, picked, logits, targets, scale, vocab, kind, columns, warps, **constants):
    kernel = {"lanes": lanes_kernel, "tiles": tiles_kernel, "registers": registers_kernel}[kind]
    if kind == "registers":
        constants["COUNT"] = triton.cdiv(logits.shape[1], columns)
    arguments = dlogits, maxima, sums, picked, logits, targets, float(scale), vocab, logits.shape[1], 0
    launch(kernel, (logits.shape[0],), *arguments, COLUMNS=columns, num_warps=warps, **constants)


# -- layernorm ---------------------------------------------------------------------------------------------------------


@triton.jit
def layernorm_forward_kernel(
    s, y, mean, rstd, x, a, a_bias, w, b, n, channels, inverse, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As it is, but in a loop where there are fewer programs than tiles, so that loads come early."""
    column = tl.arange(0, WIDTH)
    inside = column < channels
    bias = tl.load(a_bias + column, inside, 0).to(tl.float32)
    scale = tl.load(w + column, inside, 0).to(tl.float32)
    shift = tl.load(b + column, inside, 0).to(tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        own = row < n
        mask = own[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * channels + column[None, :]
        h = tl.load(x + at, mask, 0).to(tl.float32) + (tl.load(a + at, mask, 0).to(tl.float32) + bias[None, :])
        h = h.to(s.dtype.element_ty)
        tl.store(s + at, h, mask)
        h = h.to(tl.float32)
        mu = tl.sum(h, 1) * inverse
        h = tl.where(mask, h - mu[:, None], 0)
        r = 1 / tl.sqrt(tl.sum(h * h, 1) * inverse + eps)
        tl.store(mean + row, mu, own)
        tl.store(rstd + row, r, own)
        tl.store(y + at, h * r[:, None] * scale[None, :] + shift[None, :], mask)


def layernorm_forward(s, y, mean, rstd, x, a, a_bias, w, b, eps, rows, warps, programs=None, stages=1):
    n, channels = x.shape
    grid = (min(programs or 1 << 30, triton.cdiv(n, rows)),)
    arguments = s, y, mean, rstd, x, a, a_bias, w, b, n, channels, 1 / channels, float(eps)
    options = dict(ROWS=rows, WIDTH=triton.next_power_of_2(channels), STAGES=stages, num_warps=warps)
    launch(layernorm_forward_kernel, grid, *arguments, **options)


@triton.jit
def layernorm_backward_kernel(
    dx, partials, ds, dy, s, w, mean, rstd, n, channels, inverse,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    inside = column < channels
    scale = tl.load(w + column, inside, 0).to(tl.float32)
    dw = tl.zeros((ROWS, WIDTH), tl.float32)
    db = tl.zeros((ROWS, WIDTH), tl.float32)
    da = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * channels + column[None, :]
        mu, r = tl.load(mean + row, row < n, 0)[:, None], tl.load(rstd + row, row < n, 0)[:, None]
        g = tl.load(dy + at, mask, 0).to(tl.float32)
        h = tl.where(mask, (tl.load(s + at, mask, 0).to(tl.float32) - mu) * r, 0)
        dw += g * h
        db += g
        g *= scale[None, :]
        g = (g - (tl.sum(g, 1) * inverse)[:, None] - h * (tl.sum(g * h, 1) * inverse)[:, None]) * r
        g += tl.load(ds + at, mask, 0).to(tl.float32)
        tl.store(dx + at, g, mask)
        da += g
    own = partials + tl.program_id(0) * 3 * channels + column
    tl.store(own, tl.sum(dw, 0), inside)
    tl.store(own + channels, tl.sum(db, 0), inside)
    tl.store(own + 2 * channels, tl.sum(da, 0), inside)


def layernorm_backward(dx, partials, ds, dy, s, w, mean, rstd, rows, warps, stages):
    n, channels = dy.shape
    arguments = dx, partials, ds, dy, s, w, mean, rstd, n, channels, 1 / channels
    options = dict(ROWS=rows, WIDTH=triton.next_power_of_2(channels), STAGES=stages, num_warps=warps)
    launch(layernorm_backward_kernel, (partials.shape[0],), *arguments, **options)


# -- column sums -------------------------------------------------------------------------------------------------------


@triton.jit
def column_sums_kernel(
    partials, x, n, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask, 0).to(tl.float32)
    tl.store(partials + tl.program_id(0) * columns + column, tl.sum(total, 0), column < columns)


def column_sums(out, partials, x, rows, columns, warps, stages):
    n, width = x.shape
    grid, options = (partials.shape[0], triton.cdiv(width, columns)), dict(ROWS=rows, COLUMNS=columns)
    launch(column_sums_kernel, grid, partials, x, n, width, **options, STAGES=stages, num_warps=warps)
    add_partials(partials, out)


# -- GELU --------------------------------------------------------------------------------------------------------------

A, B = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)
EXACT, APPROXIMATE, TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
GELU_MATHS = {"exact": 0, "approximate": 1, "tanh": 2}


@triton.jit
def sigmoid_of_2u(x, MATHS: tl.constexpr):
    u = (x + x * x * x * B) * A
    if MATHS == EXACT:
        s = 1 / (1 + tl.exp(-2 * u))
    elif MATHS == APPROXIMATE:  # no denormals, no fix for huge arguments: a third of the instructions
        e = 1 + tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [u * (-2 * LOG2E)], dtype=tl.float32, is_pure=True, pack=1
        )
        s = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [e], dtype=tl.float32, is_pure=True, pack=1)
    else:
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1)
        s = 0.5 + 0.5 * t
    return s


@triton.jit
def gelu_forward_kernel(
    y, h, bias, n, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MATHS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < n)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(h + at, mask, 0).to(tl.float32)
    x += tl.load(bias + column, column < columns, 0).to(tl.float32)[None, :]
    tl.store(y + at, x * sigmoid_of_2u(x, MATHS), mask)


def gelu_forward(y, h, bias, rows, columns, warps, maths):
    n, width = h.shape
    grid, options = (triton.cdiv(n, rows), triton.cdiv(width, columns)), dict(MATHS=GELU_MATHS[maths], num_warps=warps)
    launch(gelu_forward_kernel, grid, y, h, bias, n, width, ROWS=rows, COLUMNS=columns, **options)


@triton.jit
def gelu_backward_kernel(
    dh, partials, dy, h, bias, n, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MATHS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.load(bias + column, column < columns, 0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = tl.load(h + at, mask, 0).to(tl.float32) + shift[None, :]
        g = tl.load(dy + at, mask, 0).to(tl.float32)
        s = sigmoid_of_2u(x, MATHS)
        if MATHS == EXACT:
            slope = s + 2 * x * s * (1 - s) * (1 + 3 * x * x * B) * A
        else:
            slope = s + (s - s * s) * (x * (2 * A + x * x * (6 * A * B)))
        g *= slope
        tl.store(dh + at, g, mask)
        total += g
    tl.store(partials + tl.program_id(0) * columns + column, tl.sum(total, 0), column < columns)


def gelu_backward(dh, partials, dy, h, bias, rows, columns, warps, maths, stages):
    n, width = h.shape
    grid, options = (len(partials), triton.cdiv(width, columns)), dict(MATHS=GELU_MATHS[maths], STAGES=stages)
    arguments = dh, partials, dy, h, bias, n, width
    launch(gelu_backward_kernel, grid, *arguments, ROWS=rows, COLUMNS=columns, **options, num_warps=warps)
