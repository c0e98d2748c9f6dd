"""LayerNorm, with or without the residual addition before it. Each array is read once or written once.

    s = x + (a + a_bias);  h = (s - mean) rstd,  rstd = 1 / sqrt(var + eps);  y = h w + b           (Ba et al. 2016)
    g = dy w;  dx = ds + rstd (g - mean(g) - h mean(g h))
    dw = sum dy h, db = sum dy, da_bias = sum dx, each over the rows

x is the residual stream before the addition and s after it. a + a_bias is the output of the attention or MLP branch:
the product that computes a omits its bias, and this kernel adds it. mean, var and mean(...) are over one row.
A program keeps whole rows in registers, so the mean and the variance of a row need no additional memory traffic.

A fused kernel computes with s and dx as they are stored, rounded to their dtype. So the results have the same bits if a
model is cut after the addition (pipeline, recomputation): then residual_add() stores s, LayerNorm reads it, and
residual_bias_gradient() adds the stored dx, which is its ds.
"""

# N rows, C channels, P programs that divide the rows

from pathlib import Path

import triton
import triton.language as tl

from stage2_cuda.kernels.column_sums import column_sums
from stage2_cuda.runtime import cuda_launch
from stage2_cuda.runtime.cuda_launch import CudaSource
from stage2_cuda.runtime.triton_launch import launch

TILE_ELEMENTS = 2048  # elements of a tile, which consists of whole rows; a longer row is a tile by itself
# The largest P of the backward kernel: 4 programs for each of an H200's 132 multiprocessors, or 2 of the kernel in CUDA
# C. These are constants, so that the order of the sums depends only on the shape and the dtype.
PROGRAMS, CUDA_PROGRAMS = 528, 264
CUDA_FILE = Path(__file__).with_name("layernorm_backward.cu")
CUDA_CHANNELS = 256, 512, 768  # with 1024, the kernel in CUDA C would need too many registers
CUDA_THREADS = 128  # per block; more threads would have too few registers
CUDA_ROWS = CUDA_THREADS // 32  # that a block computes at a time: a warp computes one row
MIN_ROWS = 8  # rows per backward program; with fewer rows, adding the partial sums takes longer than computing them
PIPELINE_TILES = 8  # a backward program with at least this many tiles loads the next tile in advance


def tile_shape(channels):
    """(rows, columns) of a tile; both are powers of two, as Triton requires, and columns >= C."""
    width = triton.next_power_of_2(channels)
    return max(1, TILE_ELEMENTS // width), width


def backward_options(n, channels, programs):
    """The constants of a Triton kernel that adds n rows in the order of backward_kernel, for so many programs."""
    rows, width = tile_shape(channels)
    warps = 4 if width == 1024 else max(2, width // 1024)  # measured on an H200
    stages = 2 if n >= PIPELINE_TILES * rows * programs else 1
    return dict(BLOCK_ROWS=rows, BLOCK_COLS=width, STAGES=stages, num_warps=warps)


def uses_cuda(channels, dtype, *arrays):
    """Whether layernorm_backward.cu computes the backward pass; for all other cases a Triton kernel does."""
    return channels in CUDA_CHANNELS and cuda_launch.serves(dtype, *arrays)


def layernorm_partials_shape(n, channels, dtype):
    """The shape (3, P, C) of the partial sums of residual_layernorm_backward() for n rows. dtype: of dy."""
    rows, _ = tile_shape(channels)
    most = CUDA_PROGRAMS if uses_cuda(channels, dtype) else PROGRAMS
    return 3, min(most, triton.cdiv(n, max(MIN_ROWS, rows))), channels


def residual_layernorm_forward(s, y, mean, rstd, x, a, a_bias, w, b, eps):
    """s (N, C) = x + (a + a_bias), y (N, C) = LayerNorm(s); also writes mean and rstd (N) float32, for backward.

    x, a (N, C); a_bias, w, b (C). s is rounded to its dtype before the mean and the variance are computed, because
    backward reads the rounded s. If s, a and a_bias are None, y = LayerNorm(x).
    """
    n, channels = x.shape
    rows, width = tile_shape(channels)
    arguments = s, y, mean, rstd, x, a, a_bias, w, b, n, channels, 1 / channels, float(eps)
    launch(forward_kernel, (triton.cdiv(n, rows),), *arguments, BLOCK_ROWS=rows, BLOCK_COLS=width, num_warps=4)


def residual_add(s, x, a, a_bias):
    """s (N, C) = x + (a + a_bias), with the bits of s of residual_layernorm_forward(). x, a (N, C); a_bias (C)."""
    residual_layernorm_forward(s, None, None, None, x, a, a_bias, None, None, 0)


def residual_layernorm_backward(dx, partials, ds, dy, s, w, mean, rstd):
    """dx (N, C) = the gradient of x, which is also the gradient of a.

    ds (N, C): the gradient of s that comes through the residual stream, or None. dy (N, C); s, mean, rstd: from
    forward. partials: float32 array of layernorm_partials_shape(N, C, dy.dtype) that receives the partial sums for dw,
    db and da_bias. Afterwards column_sums.add_partials(partials, dw, db, da_bias) computes these three.
    """
    (n, channels), programs = dy.shape, partials.shape[1]
    if uses_cuda(channels, dy.dtype, dx, ds, dy, s, w):
        macros = ("C", channels), ("BF16", int(dy.dtype.name == "bfloat16")), ("BLOCK_THREADS", CUDA_THREADS)
        source = CudaSource((*cuda_launch.HEADERS, CUDA_FILE), macros)
        arguments = dx, partials, ds, dy, s, w, mean, rstd, n
        cuda_launch.launch(source, "layernorm_backward", programs, CUDA_THREADS, *arguments)
        return
    arguments = dx, partials, ds, dy, s, w, mean, rstd, n, channels, 1 / channels
    launch(backward_kernel, (programs,), *arguments, **backward_options(n, channels, programs))


def residual_bias_gradient(da_bias, partials, ds):
    """da_bias (C) float32 = the sum over the rows of ds (N, C), the gradient of s = x + (a + a_bias).

    The sum has the bits of residual_layernorm_backward() with dx = ds: the same partition of the rows, and the same
    order of additions. partials: float32 scratch of layernorm_partials_shape(N, C, ds.dtype)[1:].
    """
    (n, channels), programs = ds.shape, partials.shape[0]
    options = backward_options(n, channels, programs)
    if uses_cuda(channels, ds.dtype):  # the warps of layernorm_backward.cu add their sums one after the other
        options |= dict(BLOCK_ROWS=CUDA_ROWS, BLOCK_COLS=256, IN_ORDER=True, num_warps=4)
    column_sums(da_bias, partials, ds, **options)


@triton.jit
def forward_kernel(
    s_ptr, y_ptr, mean_ptr, rstd_ptr, x_ptr, a_ptr, a_bias_ptr, w_ptr, b_ptr, n, n_cols, inv_n_cols, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Grid (N / BLOCK_ROWS): each program computes BLOCK_ROWS whole rows. BLOCK_COLS >= n_cols = C.

    Without a_ptr, s is x; without y_ptr, only s is computed.
    """
    rows, cols = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLS)
    row_mask, col_mask = rows < n, cols < n_cols
    mask = row_mask[:, None] & col_mask[None, :]
    offs = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]  # (BLOCK_ROWS, BLOCK_COLS)
    s = tl.load(x_ptr + offs, mask, 0).to(tl.float32)
    if a_ptr is not None:
        a = tl.load(a_ptr + offs, mask, 0).to(tl.float32)
        s += a + tl.load(a_bias_ptr + cols, col_mask, 0).to(tl.float32)[None, :]
        s = s.to(s_ptr.dtype.element_ty)  # round first: backward reads the rounded s
        tl.store(s_ptr + offs, s, mask)
        s = s.to(tl.float32)
    if y_ptr is not None:
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
    """Grid (P): program p computes the row tiles p, p + P, ... of dx, and its sums for dw, db and da_bias.

    partials (3, P, C) has the sums for dw, then those for db, then those for da_bias.
    """
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
        dy = tl.load(dy_ptr + offs, mask, 0).to(tl.float32)
        h = tl.where(mask, (tl.load(s_ptr + offs, mask, 0).to(tl.float32) - mean) * rstd, 0)
        dw += dy * h
        db += dy
        g = dy * w[None, :]
        dx = g - (tl.sum(g, 1) * inv_n_cols)[:, None] - h * (tl.sum(g * h, 1) * inv_n_cols)[:, None]
        ds = tl.zeros_like(dx)
        if ds_ptr is not None:
            ds = tl.load(ds_ptr + offs, mask, 0).to(tl.float32)
        # round first: a model that is cut here adds the stored dx. Without the explicit fma, a compiler may round
        # da_bias + dx rstd only once
        dx = tl.fma(dx, rstd.broadcast_to(dx.shape), ds).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offs, dx, mask)
        da_bias += dx.to(tl.float32)  # rows >= n add 0, because their rstd and ds are 0
    own_partials, size = partials_ptr + tl.program_id(0) * n_cols + cols, tl.num_programs(0) * n_cols
    tl.store(own_partials, tl.sum(dw, 0), col_mask)
    tl.store(own_partials + size, tl.sum(db, 0), col_mask)
    tl.store(own_partials + 2 * size, tl.sum(da_bias, 0), col_mask)
