"""A matrix product fused with the operations after it: d = activation(a b + c), in one Triton kernel.

    epilogue        c             activation
    none            None          None
    bias            bias (N)      None
    ReLU(AB + C)    c (M, N)      "relu"
    bias, GELU      bias (N)      "gelu"

A program computes one tile of d. Without the fusion, a b is written to memory and read again by a second kernel. With
the fusion, the sum stays in registers until d is written. The kernel reads operands through tensor descriptors, which
the TMA unit of a Hopper GPU executes. If a descriptor cannot have the strides of an operand, the kernel reads it
through pointers with masks. In both cases M, N and K may have any size.

The stages use cublasLt, which has the same epilogues. This kernel is for torch_bridge.matmul and for comparisons.
"""

# d (M, N) = a (M, K) times b (K, N); c (M, N); strides in elements

from typing import NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from stage2_cuda.kernels.gelu import sigmoid_of_2u
from stage2_cuda.runtime.triton_launch import KernelLaunch, Pointer

GROUP = tl.constexpr(8)  # rows of tiles that are computed at a time, so that their operands stay in the L2 cache
ALIGNED = 16  # bytes: a descriptor needs this alignment of the address and of the stride
MIN_TILES = 120  # a result should have at least this many tiles: an H200 has 132 multiprocessors


class MatmulTile(NamedTuple):
    """The tile of one program, block_m x block_n of d with block_k terms per iteration, and launch parameters.

    c_at: when a program reads its tile of c: "start" (the sum over K starts at c), "early" (before the loop; c is kept
    in registers and added at the end) or "end" (after the loop).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    c_at: str = "early"


# The first one that divides the result into at least MIN_TILES tiles is used, otherwise the last one. These are
# estimates; benchmarks/torch/matmul_search.py measures them.
TILES = [
    MatmulTile(128, 256, 64, 8, 3),
    MatmulTile(128, 128, 64, 8, 3),
    MatmulTile(64, 128, 64, 4, 4),
    MatmulTile(64, 64, 64, 4, 4),
]


# -- kernel ------------------------------------------------------------------------------------------------------------


@triton.jit
def tile_origin(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first row and column of this program's tile."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid_in_group = tl.program_id(0) % (GROUP * tiles_n)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    group_size = tl.minimum(tiles_m - first, GROUP)
    return (first + pid_in_group % group_size) * BLOCK_M, pid_in_group // group_size * BLOCK_N


@triton.jit
def pointers_and_mask(x_ptr, row, col, n_rows, n_cols, row_stride, col_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers to the elements (ROWS, COLS) of a matrix from (row, col) on, and a mask of those that exist."""
    rows, cols = row + tl.arange(0, ROWS), col + tl.arange(0, COLS)
    offs = rows.to(tl.int64)[:, None] * row_stride + cols.to(tl.int64)[None, :] * col_stride
    return x_ptr + offs, (rows < n_rows)[:, None] & (cols < n_cols)[None, :]


@triton.jit
def load_block(
    x, row, col, n_rows, n_cols, row_stride, col_stride, ROWS: tl.constexpr, COLS: tl.constexpr, ACCESS: tl.constexpr
):
    """The block (ROWS, COLS) of a matrix from (row, col) on, zero outside the matrix.

    ACCESS: see StridedMatrix.access(). If all rows are equal ("one row"), the block is (1, COLS).
    """
    if ACCESS == "rows":
        block = x.load([row, col])
    elif ACCESS == "one row":
        cols = col + tl.arange(0, COLS)
        block = tl.load(x + cols.to(tl.int64) * col_stride, mask=cols < n_cols, other=0.0)[None, :]
    elif ACCESS == "columns":
        block = x.load([col, row]).T
    else:
        pointers, mask = pointers_and_mask(x, row, col, n_rows, n_cols, row_stride, col_stride, ROWS, COLS)
        block = tl.load(pointers, mask=mask, other=0.0)
    return block


@triton.jit
def store_block(
    x, block, row, col, n_rows, n_cols, row_stride, col_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, ACCESS: tl.constexpr,
):  # fmt: skip
    if ACCESS == "rows":
        x.store([row, col], block.to(x.dtype))
    else:
        pointers, mask = pointers_and_mask(x, row, col, n_rows, n_cols, row_stride, col_stride, ROWS, COLS)
        tl.store(pointers, block.to(x.dtype.element_ty), mask=mask)


@triton.jit
def matmul_kernel(
    d, h, a, b, c, d_row, d_col, a_row, a_col, b_row, b_col, c_row, c_col, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr, C_AT: tl.constexpr,
    ACCESS_D: tl.constexpr, ACCESS_A: tl.constexpr, ACCESS_B: tl.constexpr, ACCESS_C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of d = activation(a b + c), and of h = a b + c unless h is None. c may be None.

    Each matrix is a descriptor or a pointer, according to ACCESS; h has the strides and the access of d. x_row and
    x_col: the strides of matrix x.
    """
    row, col = tile_origin(M, N, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if c is not None:
        if C_AT == "start":
            acc += load_block(c, row, col, M, N, c_row, c_col, BLOCK_M, BLOCK_N, ACCESS_C).to(tl.float32)
        if C_AT == "early":
            early = load_block(c, row, col, M, N, c_row, c_col, BLOCK_M, BLOCK_N, ACCESS_C)
    for k in tl.range(0, K, BLOCK_K):
        a_block = load_block(a, row, k, M, K, a_row, a_col, BLOCK_M, BLOCK_K, ACCESS_A)
        b_block = load_block(b, k, col, K, N, b_row, b_col, BLOCK_K, BLOCK_N, ACCESS_B)
        acc = tl.dot(a_block, b_block, acc, input_precision=PRECISION)
    if c is not None:
        if C_AT == "early":
            acc += early.to(tl.float32)
        if C_AT == "end":
            acc += load_block(c, row, col, M, N, c_row, c_col, BLOCK_M, BLOCK_N, ACCESS_C).to(tl.float32)
    if h is not None:
        store_block(h, acc, row, col, M, N, d_row, d_col, BLOCK_M, BLOCK_N, ACCESS_D)
    if ACTIVATION == "relu":
        acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)  # by default the maximum of NaN and 0 is 0
    if ACTIVATION == "gelu":
        acc *= sigmoid_of_2u(acc)
    store_block(d, acc, row, col, M, N, d_row, d_col, BLOCK_M, BLOCK_N, ACCESS_D)


# -- launch ------------------------------------------------------------------------------------------------------------


class StridedMatrix(NamedTuple):
    """A matrix of any strides. base: a PyTorch tensor, whose address is that of element [0, 0], or a CuPy array."""

    base: object
    shape: tuple
    strides: tuple

    def access(self, allowed):
        """How a kernel reads or writes it: the first of `allowed` that is possible, otherwise "pointers" to elements.

        "rows": by a descriptor. "columns": by a descriptor of its transpose. "one row": all rows are equal, because the
        row stride is 0; the kernel reads one of them.
        """
        row_stride, col_stride = self.strides
        possible = {
            "one row": row_stride == 0,
            "rows": col_stride == 1 and self.is_aligned(row_stride),
            "columns": row_stride == 1 and self.is_aligned(col_stride),
        }
        return next((name for name in allowed if possible[name]), "pointers")

    def is_aligned(self, stride):
        """Whether a descriptor can have this stride between contiguous rows or columns, and the address."""
        stride_bytes, address = stride * self.base.dtype.itemsize, pointer_of(self.base).data_ptr()
        return min(*self.shape, stride) > 0 and stride_bytes % ALIGNED == 0 and address % ALIGNED == 0

    def argument(self, access, *block_shape):
        """The kernel's argument: a descriptor, in blocks of `block_shape`, or the array itself."""
        if access in ("one row", "pointers"):
            return self.base
        shape, strides, block_shape = list(self.shape), list(self.strides), list(block_shape)
        if access == "columns":  # the transpose
            shape, strides, block_shape = shape[::-1], strides[::-1], block_shape[::-1]
        return TensorDescriptor(pointer_of(self.base), shape, strides, block_shape)


def pointer_of(array):
    """An object with the address and the dtype of a PyTorch tensor or of a contiguous CuPy array."""
    return array if hasattr(array, "data_ptr") else Pointer(array)


# the forms of StridedMatrix.access() that the kernel supports for each matrix, besides "pointers"
ALLOWED = {"d": ["rows"], "a": ["rows", "columns"], "b": ["rows", "columns"], "c": ["one row", "rows", "columns"]}


def matmul_launch(d, a, b, c=None, activation=None, h=None, tile=None, precision="ieee"):
    """The KernelLaunch that computes d = activation(a b + c), and h = a b + c unless h is None.

    d, a, b, c and h: a StridedMatrix each. activation: None, "relu" or "gelu". A bias is a c whose row stride is 0. h
    must have the strides of d. Sums are float32; precision: of the products of float32, as for tl.dot.
    """
    (M, K), N = a.shape, b.shape[1]
    tile = tile or select_tile(M, N)
    m, n, k = tile.block_m, tile.block_n, tile.block_k
    access, arrays, strides = {}, {}, []
    for name, matrix, block_shape in (("d", d, (m, n)), ("a", a, (m, k)), ("b", b, (k, n)), ("c", c, (m, n))):
        access[name] = None if matrix is None else matrix.access(ALLOWED[name])
        arrays[name] = None if matrix is None else matrix.argument(access[name], *block_shape)
        strides += (0, 0) if matrix is None else matrix.strides
    arrays["h"] = None if h is None else h.argument(access["d"], m, n)
    # A load through pointers needs registers for addresses, so its block is not kept in registers during the loop.
    c_at = "end" if access["c"] == "pointers" and tile.c_at == "early" else tile.c_at
    arguments = *(arrays[name] for name in "dhabc"), *strides, M, N, K
    constants = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, ACTIVATION=activation, C_AT=c_at, PRECISION=precision)
    constants |= {f"ACCESS_{name.upper()}": value for name, value in access.items()}
    options = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    return KernelLaunch(matmul_kernel, (triton.cdiv(M, m) * triton.cdiv(N, n),), arguments, constants | options)


def select_tile(M, N):
    """The first of TILES that divides an M x N result into at least MIN_TILES tiles, otherwise the last one."""
    return next((t for t in TILES if triton.cdiv(M, t.block_m) * triton.cdiv(N, t.block_n) >= MIN_TILES), TILES[-1])


def matmul(d, a, b, c=None, activation=None, h=None, tile=None, precision="ieee"):
    """d (M, N) = activation(a (M, K) b (K, N) + c), and h (M, N) = a b + c unless h is None; contiguous CuPy arrays.

    c: (M, N), or a bias (N). The other arguments: see matmul_launch().
    """

    def matrix(array):
        return array if array is None else StridedMatrix(array, array.shape, (array.shape[1], 1))

    added = matrix(c) if c is None or c.ndim == 2 else StridedMatrix(c, d.shape, (0, 1))
    matmul_launch(matrix(d), matrix(a), matrix(b), added, activation, matrix(h), tile, precision).run()
