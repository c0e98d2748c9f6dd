"""Column sums of a matrix, such as the gradient of a bias, in a fixed order: every run gives the same bits.

The sum has two steps. In the first, P programs divide the rows of each block of columns: program p adds the row tiles
p, p + P, p + 2P, ... and writes row p of `partials` (P, K). The second step adds the P rows of `partials`. A single
step would need only a few dozen programs, too few for a GPU; atomic additions would have no fixed order.
"""

# N rows, K columns, P programs per block of columns

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

# Measured on an H200, which has 132 multiprocessors. The number of programs determines the order of the sums, so it
# must depend only on the shape of the matrix.
BLOCK_ROWS, BLOCK_COLS, STAGES = 64, 64, 3  # the tile of the first step, and its num_stages (software pipelining)
MIN_PROGRAMS, MAX_PROGRAMS = 132, 528  # of the first step, for all columns together
ROWS_PER_PROGRAM = 32  # there are n // 32 programs, if this number is between MIN_PROGRAMS and MAX_PROGRAMS
SUM_ROWS, SUM_COLS = 128, 16  # the tile of the second step: tall, because each iteration of its loop waits for memory


def partials_shape(n, columns):
    """The shape (P, columns) of the float32 scratch of column_sums() for n rows."""
    programs = min(MAX_PROGRAMS, max(MIN_PROGRAMS, n // ROWS_PER_PROGRAM))
    return min(triton.cdiv(n, BLOCK_ROWS), max(1, programs // triton.cdiv(columns, BLOCK_COLS))), columns


def column_sums(out, partials, x):
    """out (K) float32 = the column sums of x (N, K), any float dtype; partials: scratch of partials_shape(N, K)."""
    n, columns = x.shape
    grid = (partials.shape[0], triton.cdiv(columns, BLOCK_COLS))
    tile = dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, STAGES=STAGES)
    launch(column_sums_kernel, grid, partials, x, n, columns, **tile, num_warps=4)
    add_partials(partials, out)


def add_partials(partials, first, second=None, third=None):
    """Add the P rows of partials, float32, and store the sum in one, two or three outputs (K) float32.

    first = the sums of columns [0, K), second = those of [K, 2K), third = those of [2K, 3K). The number of columns of
    partials is K times the number of outputs.
    """
    columns = first.shape[0]
    grid = (triton.cdiv(columns, SUM_COLS), 1 + (second is not None) + (third is not None))
    arguments = first, second, third, partials, *partials.shape, columns
    launch(add_partials_kernel, grid, *arguments, BLOCK_ROWS=SUM_ROWS, BLOCK_COLS=SUM_COLS, num_warps=8)


@triton.jit
def column_sums_kernel(
    partials_ptr, x_ptr, n, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Grid (P, K / BLOCK_COLS): program (p, c) writes block c of BLOCK_COLS columns of row p of partials, float32."""
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n)[:, None] & (cols < n_cols)[None, :]
        acc += tl.load(x_ptr + rows.to(tl.int64)[:, None] * n_cols + cols[None, :], mask, 0).to(tl.float32)
    tl.store(partials_ptr + tl.program_id(0) * n_cols + cols, tl.sum(acc, 0), cols < n_cols)


@triton.jit
def add_partials_kernel(
    first_ptr, second_ptr, third_ptr, partials_ptr, n, row_stride, n_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Grid (K / BLOCK_COLS, outputs): a program adds the n rows of BLOCK_COLS columns, for one of the outputs.

    row_stride: the columns of partials; n_cols: the K columns of an output.
    """
    output = tl.program_id(1)  # 0: first, 1: second, 2: third
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in tl.range(0, n, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n)[:, None] & (cols < n_cols)[None, :]
        acc += tl.load(partials_ptr + rows[:, None] * row_stride + output * n_cols + cols[None, :], mask, 0)
    out_ptr = first_ptr
    if second_ptr is not None:
        if output == 1:
            out_ptr = second_ptr
    if third_ptr is not None:
        if output == 2:
            out_ptr = third_ptr
    tl.store(out_ptr + cols, tl.sum(acc, 0), cols < n_cols)
