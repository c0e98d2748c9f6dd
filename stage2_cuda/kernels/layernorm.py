"""LayerNorm, by itself or fused with the residual addition: each array is read once or written once.

    s = x + (a + a_bias);  h = (s - mean) rstd,  rstd = 1 / sqrt(var + eps);  y = h w + b           (Ba et al. 2016)
    g = dy w;  dx = ds + rstd (g - mean(g) - h mean(g h))
    dw = sum dy h, db = sum dy, da_bias = sum dx over the rows

Both kernels keep a few whole rows in registers, so the mean and the variance of a row cost no memory traffic.
"""

# N rows, C channels, P programs that share the rows

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

TILE_ELEMENTS = 2048  # a tile is whole rows with about this many elements; a longer row is one tile
# Programs of the backward kernel: 4 for each of an H200's 132 multiprocessors. The number is constant, so that the
# order of the sums depends only on the shape.
PROGRAMS = 528
MIN_ROWS = 8  # rows per backward program; with fewer, adding the partial sums takes longer than computing them
PIPELINE_TILES = 8  # the next tile is prefetched if a backward program has at least this many tiles


def tile_shape(channels):
    """(rows, columns) of a tile; both are powers of two, as Triton requires."""
    width = triton.next_power_of_2(channels)
    return max(1, TILE_ELEMENTS // width), width


def layernorm_partials_shape(n, channels):
    """The shape (P, 3C) of the float32 scratch of residual_layernorm_backward() for n rows."""
    rows, _ = tile_shape(channels)
    return min(PROGRAMS, triton.cdiv(n, max(MIN_ROWS, rows))), 3 * channels


def residual_layernorm_forward(s, y, mean, rstd, x, a, a_bias, w, b, eps):
    """s (N, C) = x + (a + a_bias), y (N, C) = LayerNorm(s) w + b; mean, rstd (N) float32 are kept for backward.

    x, a (N, C) and a_bias, w, b (C) have the dtype of the activations; the norm is computed in float32 from the stored
    s. With s, a and a_bias None, y = LayerNorm(x) w + b.
    """
    n, channels = x.shape
    rows, width = tile_shape(channels)
    arguments = s, y, mean, rstd, x, a, a_bias, w, b, n, channels, 1 / channels, float(eps)
    launch(forward_kernel, (triton.cdiv(n, rows),), *arguments, BLOCK_ROWS=rows, BLOCK_COLS=width, num_warps=4)


def residual_layernorm_backward(dx, partials, ds, dy, s, w, mean, rstd):
    """dx (N, C) = the gradient of x, and of a; ds (N, C): the gradient of s from the residual stream, or None.

    partials: float32 scratch of layernorm_partials_shape(N, C). column_sums.add_partials(partials, dw, db, da_bias)
    then gives the other three gradients.
    """
    (n, channels), programs = dy.shape, partials.shape[0]
    rows, width = tile_shape(channels)
    warps = 4 if width == 1024 else max(2, width // 1024)  # measured on an H200
    stages = 2 if n >= PIPELINE_TILES * rows * programs else 1
    arguments = dx, partials, ds, dy, s, w, mean, rstd, n, channels, 1 / channels
    options = dict(BLOCK_ROWS=rows, BLOCK_COLS=width, STAGES=stages, num_warps=warps)
    launch(backward_kernel, (programs,), *arguments, **options)


@triton.jit
def forward_kernel(
    s_ptr, y_ptr, mean_ptr, rstd_ptr, x_ptr, a_ptr, a_bias_ptr, w_ptr, b_ptr, n, n_cols, inv_n_cols, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLS)
    row_mask, col_mask = rows < n, cols < n_cols
    mask = row_mask[:, None] & col_mask[None, :]
    offs = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]  # (BLOCK_ROWS, BLOCK_COLS)
    s = tl.load(x_ptr + offs, mask, 0).to(tl.float32)
    if a_ptr is not None:
        a = tl.load(a_ptr + offs, mask, 0).to(tl.float32)
        s += a + tl.load(a_bias_ptr + cols, col_mask, 0).to(tl.float32)[None, :]
        s = s.to(s_ptr.dtype.element_ty)  # normalize the rounded sum, which backward reads
        tl.store(s_ptr + offs, s, mask)
        s = s.to(tl.float32)
    mean = tl.sum(s, 1) * inv_n_cols  # (BLOCK_ROWS)
    h = tl.where(mask, s - mean[:, None], 0)
    rstd = 1 / tl.sqrt(tl.sum(h * h, 1) * inv_n_cols + eps)
    tl.store(mean_ptr + rows, mean, row_mask)
    tl.store(rstd_ptr + rows, rstd, row_mask)
    w = tl.load(w_ptr + cols, col_mask, 0).to(tl.float32)
    b = tl.load(b_ptr + cols, col_mask, 0).to(tl.float32)
    tl.store(y_ptr + offs, h * rstd[:, None] * w[None, :] + b[None, :], mask)


@triton.jit
def backward_kernel(
    dx_ptr, partials_ptr, ds_ptr, dy_ptr, s_ptr, w_ptr, mean_ptr, rstd_ptr, n, n_cols, inv_n_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_COLS)
    col_mask = cols < n_cols
    w = tl.load(w_ptr + cols, col_mask, 0).to(tl.float32)
    dw = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    db = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    da_bias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row_mask = rows < n
        mask = row_mask[:, None] & col_mask[None, :]
        offs = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]  # (BLOCK_ROWS, BLOCK_COLS)
        mean, rstd = tl.load(mean_ptr + rows, row_mask, 0)[:, None], tl.load(rstd_ptr + rows, row_mask, 0)[:, None]
        g = tl.load(dy_ptr + offs, mask, 0).to(tl.float32)  # dy
        h = tl.where(mask, (tl.load(s_ptr + offs, mask, 0).to(tl.float32) - mean) * rstd, 0)
        dw += g * h
        db += g
        g *= w[None, :]
        dx = (g - (tl.sum(g, 1) * inv_n_cols)[:, None] - h * (tl.sum(g * h, 1) * inv_n_cols)[:, None]) * rstd
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + offs, mask, 0).to(tl.float32)
        tl.store(dx_ptr + offs, dx, mask)
        da_bias += dx  # rows >= n add 0, because their rstd and ds are 0
    own_partials = partials_ptr + tl.program_id(0) * 3 * n_cols + cols
    tl.store(own_partials, tl.sum(dw, 0), col_mask)
    tl.store(own_partials + n_cols, tl.sum(db, 0), col_mask)
    tl.store(own_partials + 2 * n_cols, tl.sum(da_bias, 0), col_mask)
