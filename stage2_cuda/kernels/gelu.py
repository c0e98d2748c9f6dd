"""GELU, alone or fused with the bias before it: one pass over memory, and the bias's gradient out of the same pass.

x = h + bias;  u = A (x + B x^3);  s = (1 + tanh u) / 2 = 1 / (1 + exp(-2u));  y = x s   (Hendrycks and Gimpel 2016)
dh = dy (s + 2 y (1 - s) du/dx),  du/dx = A (1 + 3 B x^2);  dbias = sum of dh over the rows

Written down so, it is bound by its arithmetic where the arrays come from the cache; hence the forms below.
"""

# N rows, K columns, P programs that divide the rows

import math

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

ROWS, COLUMNS, WARPS = 2, 512, 2  # of one tile
PROGRAMS = 352  # that divide the rows backward; a constant, so that the order of the sums depends on the shape alone

A, B = math.sqrt(2 / math.pi), 0.044715
U1, U3 = tl.constexpr(-2 * A * math.log2(math.e)), tl.constexpr(-2 * A * B * math.log2(math.e))  # -2u log2(e) of x, x^3
D0, D2 = tl.constexpr(2 * A), tl.constexpr(6 * A * B)  # 2 du/dx of 1, x^2


def gelu_partials_shape(n, columns):
    """The shape (P, K) of backward's float32 scratch."""
    return min(triton.cdiv(n, ROWS), PROGRAMS), columns


def gelu_forward(y, h):
    """y = gelu(h), (N, K)."""
    bias_gelu_forward(y, h, None)


def gelu_backward(dh, dy, h):
    """dh = dy gelu'(h), (N, K)."""
    bias_gelu_backward(dh, None, dy, h, None)


def bias_gelu_forward(y, h, bias):
    """y = gelu(h + bias), (N, K); bias (K) or None."""
    n, columns = h.shape
    grid = (triton.cdiv(n, ROWS), triton.cdiv(columns, COLUMNS))
    launch(forward_kernel, grid, y, h, bias, n, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)


def bias_gelu_backward(dh, partials, dy, h, bias):
    """dh = dy gelu'(h + bias), (N, K); add_partials(partials, dbias) gives the bias's gradient, float32.

    partials: of gelu_partials_shape(N, K), float32, or None.
    """
    n, columns = h.shape
    programs = triton.cdiv(n, ROWS) if partials is None else partials.shape[0]
    grid = (programs, triton.cdiv(columns, COLUMNS))
    launch(backward_kernel, grid, dh, partials, dy, h, bias, n, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)


@triton.jit
def sigmoid_of_2u(x):
    r = tl.rsqrt(1 + tl.math.exp2(x * (x * x * U3 + U1)))  # constants on the right, or the interpreter fails
    return r * r  # both are single instructions; a division takes eight


@triton.jit
def forward_kernel(y, h, bias, n, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < n)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]  # (ROWS, COLUMNS)
    x = tl.load(h + at, mask, 0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column, column < columns, 0).to(tl.float32)[None, :]
    tl.store(y + at, x * sigmoid_of_2u(x), mask)


@triton.jit
def backward_kernel(dh, partials, dy, h, bias, n, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    shift = tl.zeros((COLUMNS,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + column, column < columns, 0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]  # (ROWS, COLUMNS)
        x = tl.load(h + at, mask, 0).to(tl.float32) + shift[None, :]
        s = sigmoid_of_2u(x)
        slope = s + (s - s * s) * (x * (x * x * D2 + D0))
        g = tl.load(dy + at, mask, 0).to(tl.float32) * slope
        tl.store(dh + at, g, mask)
        total += g
    if partials is not None:
        tl.store(partials + tl.program_id(0) * columns + column, tl.sum(total, 0), column < columns)
