"""GELU (tanh form), with or without adding a bias first. Backward also computes partial sums for the bias gradient.

    x = h + bias;  u = A (x + B x^3);  s = (1 + tanh u) / 2 = 1 / (1 + exp(-2u));  y = x s  (Hendrycks and Gimpel 2016)
    dh = dy (s + 2 y (1 - s) du/dx),  du/dx = A (1 + 3 B x^2);  dbias = sum of dh over the rows

Each array is read or written once. If the arrays are in the cache, arithmetic limits the speed; so s is computed with
two hardware instructions, exp2 and rsqrt, and constant factors are combined in advance.
"""

# N rows, K columns, P programs that divide the rows

import math

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK_ROWS, BLOCK_COLS, WARPS = 2, 512, 2  # the tile, and the warps of a program
PROGRAMS = 352  # the largest P of backward; a constant, so that the order of the sums depends only on the shape

A, B = math.sqrt(2 / math.pi), 0.044715
# coefficients of exp(-2u) = exp2(x (U1 + U3 x^2))
U1, U3 = tl.constexpr(-2 * A * math.log2(math.e)), tl.constexpr(-2 * A * B * math.log2(math.e))
D0, D2 = tl.constexpr(2 * A), tl.constexpr(6 * A * B)  # coefficients of 2 du/dx = D0 + D2 x^2


def gelu_partials_shape(n, columns):
    """The shape (P, K) of the float32 scratch of bias_gelu_backward() for n rows and K columns."""
    return min(triton.cdiv(n, BLOCK_ROWS), PROGRAMS), columns


def gelu_forward(y, h):
    """y = gelu(h), both (N, K), computed in float32."""
    bias_gelu_forward(y, h, None)


def gelu_backward(dh, dy, h):
    """dh = dy * gelu'(h), all (N, K), computed in float32."""
    bias_gelu_backward(dh, None, dy, h, None)


def bias_gelu_forward(y, h, bias):
    """y = gelu(h + bias), computed in float32. y, h (N, K); bias (K) or None."""
    n, columns = h.shape
    grid = (triton.cdiv(n, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLS))
    tile = dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS)
    launch(forward_kernel, grid, y, h, bias, n, columns, **tile, num_warps=WARPS)


def bias_gelu_backward(dh, partials, dy, h, bias):
    """dh = dy * gelu'(h + bias), computed in float32. dh, dy, h (N, K); bias (K) or None.

    partials: float32 array of gelu_partials_shape(N, K) that receives partial sums of the rows of dh, or None.
    Call column_sums.add_partials(partials, dbias) afterwards to get the gradient of the bias.
    """
    n, columns = h.shape
    programs = triton.cdiv(n, BLOCK_ROWS) if partials is None else partials.shape[0]
    grid = (programs, triton.cdiv(columns, BLOCK_COLS))
    tile = dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS)
    launch(backward_kernel, grid, dh, partials, dy, h, bias, n, columns, **tile, num_warps=WARPS)


@triton.jit
def sigmoid_of_2u(x):
    """s = 1 / (1 + exp(-2u)) for x of any shape, float32."""
    r = tl.rsqrt(1 + tl.math.exp2(x * (x * x * U3 + U1)))  # in the interpreter `U3 * x` raises an error
    return r * r  # 1 / (1 + exp(-2u)); a division would take eight instructions


@triton.jit
def forward_kernel(y_ptr, h_ptr, bias_ptr, n, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Grid (N / BLOCK_ROWS, K / BLOCK_COLS): each program computes one tile of y."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (rows < n)[:, None] & (cols < n_cols)[None, :]
    offs = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]  # (BLOCK_ROWS, BLOCK_COLS)
    x = tl.load(h_ptr + offs, mask, 0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols, cols < n_cols, 0).to(tl.float32)[None, :]
    tl.store(y_ptr + offs, x * sigmoid_of_2u(x), mask)


@triton.jit
def backward_kernel(
    dh_ptr, partials_ptr, dy_ptr, h_ptr, bias_ptr, n, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """Grid (P, K / BLOCK_COLS): program p computes the row tiles p, p + P, ... of dh, and row p of partials."""
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    bias = tl.zeros((BLOCK_COLS,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, cols < n_cols, 0).to(tl.float32)
    dbias = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_ROWS), tl.num_programs(0)):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n)[:, None] & (cols < n_cols)[None, :]
        offs = rows.to(tl.int64)[:, None] * n_cols + cols[None, :]  # (BLOCK_ROWS, BLOCK_COLS)
        x = tl.load(h_ptr + offs, mask, 0).to(tl.float32) + bias[None, :]
        s = sigmoid_of_2u(x)
        dgelu = s + (s - s * s) * (x * (x * x * D2 + D0))  # s + 2 y (1 - s) du/dx, with y = x s
        dh = tl.load(dy_ptr + offs, mask, 0).to(tl.float32) * dgelu
        tl.store(dh_ptr + offs, dh, mask)
        dbias += dh
    if partials_ptr is not None:
        tl.store(partials_ptr + tl.program_id(0) * n_cols + cols, tl.sum(dbias, 0), cols < n_cols)
