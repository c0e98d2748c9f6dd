"""LayerNorm, alone or fused with the residual addition before it: each array is read once and written once.

    s = x + (a + a_bias);  h = (s - mean) r,  r = 1 / sqrt(var + eps);  y = h w + b           (Ba et al. 2016)
    g = dy w;  dx = ds + r (g - mean(g) - h mean(g h));  dw = sum dy h, db = sum dy, da_bias = sum dx over the rows

Both keep whole rows in registers, a few of them in one program, so that the two means of a row cost no memory traffic.
"""

# N rows, C channels, P programs that divide the rows

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

TILE = 2048  # elements of one program's tile of whole rows; a row that is longer has a tile of its own
PROGRAMS = 528  # backward, 4 for each of an H200's 132 processors; a constant: the order depends on the shape alone
EACH = 8  # rows at least of a program of backward, or the partial sums would take longer to add than to make
TURNS = 8  # tiles of a program, from which it pays to load the next one before this one is done


def tile_of(channels):
    """Rows and columns of a tile; Triton's tiles have sizes that are powers of two."""
    width = triton.next_power_of_2(channels)
    return max(1, TILE // width), width


def layernorm_partials_shape(n, channels):
    """The shape (P, 3C) of backward's float32 scratch."""
    rows, _ = tile_of(channels)
    return min(PROGRAMS, triton.cdiv(n, max(EACH, rows))), 3 * channels


def residual_layernorm_forward(s, y, mean, rstd, x, a, a_bias, w, b, eps):
    """s = x + (a + a_bias) and y = LayerNorm(s) w + b, (N, C); mean and rstd (N) float32, for backward.

    a, a_bias and s None: y is that of x itself.
    """
    n, channels = x.shape
    rows, width = tile_of(channels)
    arguments = s, y, mean, rstd, x, a, a_bias, w, b, n, channels, 1 / channels, float(eps)
    launch(forward_kernel, (triton.cdiv(n, rows),), *arguments, ROWS=rows, WIDTH=width, num_warps=4)


def residual_layernorm_backward(dx, partials, ds, dy, s, w, mean, rstd):
    """dx (N, C), which is da too; ds (N, C) or None. add_partials(partials, dw, db, da_bias) gives the rest, float32.

    partials: of layernorm_partials_shape(N, C), float32.
    """
    (n, channels), programs = dy.shape, partials.shape[0]
    rows, width = tile_of(channels)
    warps = 4 if width == 1024 else max(2, width // 1024)  # measured
    stages = 2 if n >= TURNS * rows * programs else 1
    arguments = dx, partials, ds, dy, s, w, mean, rstd, n, channels, 1 / channels
    options = dict(ROWS=rows, WIDTH=width, STAGES=stages, num_warps=warps)
    launch(backward_kernel, (programs,), *arguments, **options)


@triton.jit
def forward_kernel(
    s, y, mean, rstd, x, a, a_bias, w, b, n, channels, inverse, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    own, inside = row < n, column < channels
    mask = own[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * channels + column[None, :]  # (ROWS, WIDTH)
    h = tl.load(x + at, mask, 0).to(tl.float32)
    if a is not None:
        branch = tl.load(a + at, mask, 0).to(tl.float32)
        h += branch + tl.load(a_bias + column, inside, 0).to(tl.float32)[None, :]
        h = h.to(s.dtype.element_ty)  # what backward will read
        tl.store(s + at, h, mask)
        h = h.to(tl.float32)
    mu = tl.sum(h, 1) * inverse  # (ROWS)
    h = tl.where(mask, h - mu[:, None], 0)
    r = 1 / tl.sqrt(tl.sum(h * h, 1) * inverse + eps)
    tl.store(mean + row, mu, own)
    tl.store(rstd + row, r, own)
    scale = tl.load(w + column, inside, 0).to(tl.float32)
    shift = tl.load(b + column, inside, 0).to(tl.float32)
    tl.store(y + at, h * r[:, None] * scale[None, :] + shift[None, :], mask)


@triton.jit
def backward_kernel(
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
        at = row.to(tl.int64)[:, None] * channels + column[None, :]  # (ROWS, WIDTH)
        mu, r = tl.load(mean + row, row < n, 0)[:, None], tl.load(rstd + row, row < n, 0)[:, None]
        g = tl.load(dy + at, mask, 0).to(tl.float32)
        h = tl.where(mask, (tl.load(s + at, mask, 0).to(tl.float32) - mu) * r, 0)
        dw += g * h
        db += g
        g *= scale[None, :]
        g = (g - (tl.sum(g, 1) * inverse)[:, None] - h * (tl.sum(g * h, 1) * inverse)[:, None]) * r
        if ds is not None:
            g += tl.load(ds + at, mask, 0).to(tl.float32)
        tl.store(dx + at, g, mask)
        da += g  # 0 in rows beyond the last, where r is
    own = partials + tl.program_id(0) * 3 * channels + column
    tl.store(own, tl.sum(dw, 0), inside)
    tl.store(own + channels, tl.sum(db, 0), inside)
    tl.store(own + 2 * channels, tl.sum(da, 0), inside)
