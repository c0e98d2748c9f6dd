"""GELU (tanh form), by itself or fused with the bias before it: one pass over memory, the bias gradient included.

    x = h + bias;  u = A (x + B x^3);  s = (1 + tanh u) / 2 = 1 / (1 + exp(-2u));  y = x s  (Hendrycks and Gimpel 2016)
    dh = dy (s + 2 y (1 - s) du/dx),  du/dx = A (1 + 3 B x^2);  dbias = sum of dh over the rows

When the arrays are in the cache the kernels are limited by arithmetic, so the code computes s with two single
instructions (exp2 and rsqrt) and folds the constants.
"""

# N rows, K columns, P programs that share the rows

import math

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

BLOCK_ROWS, BLOCK_COLS, WARPS = 2, 512, 2  # one tile
PROGRAMS = 352  # that share the rows in backward. A constant: the order of the sums depends only on the shape

A, B = math.sqrt(2 / math.pi), 0.044715
# -2 u log2(e) = x (U1 + U3 x^2)
U1, U3 = tl.constexpr(-2 * A * math.log2(math.e)), tl.constexpr(-2 * A * B * math.log2(math.e))
D0, D2 = tl.constexpr(2 * A), tl.constexpr(6 * A * B)  # 2 du/dx = D0 + D2 x^2


def gelu_partials_shape(n, columns):
    """The shape (P, K) of the float32 scratch of bias_gelu_backward() for n rows and K columns."""
    return min(triton.cdiv(n, BLOCK_ROWS), PROGRAMS), columns


def gelu_forward(y, h):
    """y (N, K) = gelu(h (N, K))."""
    bias_gelu_forward(y, h, None)


def gelu_backward(dh, dy, h):
    """dh (N, K) = dy (N, K) * gelu'(h (N, K))."""
    bias_gelu_backward(dh, None, dy, h, None)


def bias_gelu_forward(y, h, bias):
    """y (N, K) = gelu(h (N, K) + bias (K)), computed in float32; bias may be None."""
    n, columns = h.shape
    grid = (triton.cdiv(n, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLS))
    tile = dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS)
    launch(forward_kernel, grid, y, h, bias, n, columns, **tile, num_warps=WARPS)


def bias_gelu_backward(dh, partials, dy, h, bias):
    """dh (N, K) = dy (N, K) * gelu'(h (N, K) + bias (K)); bias may be None.

    partials: float32 scratch of gelu_partials_shape(N, K), or None. column_sums.add_partials(partials, dbias) then
    gives the gradient of the bias.
    """
    n, columns = h.shape
    programs = triton.cdiv(n, BLOCK_ROWS) if partials is None else partials.shape[0]
    grid = (programs, triton.cdiv(columns, BLOCK_COLS))
    tile = dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS)
    launch(backward_kernel, grid, dh, partials, dy, h, bias, n, columns, **tile, num_warps=WARPS)


@triton.jit
def sigmoid_of_2u(x):
    r = tl.rsqrt(1 + tl.math.exp2(x * (x * x * U3 + U1)))  # constants on the right: the interpreter needs it
    return r * r  # 1 / (1 + exp(-2u)); a division would take eight instructions


@triton.jit
def forward_kernel(y_ptr, h_ptr, bias_ptr, n, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
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
        dgelu = s + (s - s * s) * (x * (x * x * D2 + D0))
        dh = tl.load(dy_ptr + offs, mask, 0).to(tl.float32) * dgelu
        tl.store(dh_ptr + offs, dh, mask)
        dbias += dh
    if partials_ptr is not None:
        tl.store(partials_ptr + tl.program_id(0) * n_cols + cols, tl.sum(dbias, 0), cols < n_cols)
