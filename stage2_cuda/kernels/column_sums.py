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


def column_sums(out, partials, x, **options):
    """out (K) float32 = the column sums of x (N, K), any float dtype; partials: float32 scratch (P, K).

    P is that of partials_shape(N, K) and the tile that of this file, unless `options`, the constants of
    column_sums_kernel and num_warps, name another one. P and the options determine the order of the additions.
    """
    own = dict(BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLS=BLOCK_COLS, STAGES=STAGES, IN_ORDER=False, num_warps=4)
    options = own | options
    grid = (partials.shape[0], triton.cdiv(x.shape[1], options["BLOCK_COLS"]))
    launch(column_sums_kernel, grid, partials, x, *x.shape, **options)
    add_partials(partials, out)


def add_partials(partials, first, second=None, third=None):
    """first (K) float32 = the sum of the P rows of partials (P, K), float32.

    If partials is (2 or 3, P, K), `second` and `third` receive the sums of the rows of the other matrices.
    """
    P, K = partials.shape[-2:]
    grid = (triton.cdiv(K, SUM_COLS), 1 + (second is not None) + (third is not None))
    tile = dict(BLOCK_ROWS=SUM_ROWS, BLOCK_COLS=SUM_COLS)
    launch(add_partials_kernel, grid, first, second, third, partials, P, K, **tile, num_warps=8)


@triton.jit
def column_sums_kernel(
    partials_ptr, x_ptr, n, n_cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Grid (P, K / BLOCK_COLS): program (p, c) writes block c of BLOCK_COLS columns of row p of partials, float32.

    IN_ORDER: whether the sums of the BLOCK_ROWS rows of the tile are added from the first to the last; otherwise the
    compiler chooses an order.
    """
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n)[:, None] & (cols < n_cols)[None, :]
        acc += tl.load(x_ptr + rows.to(tl.int64)[:, None] * n_cols + cols[None, :], mask, 0).to(tl.float32)
    if IN_ORDER:
        total = tl.zeros((BLOCK_COLS,), tl.float32)
        for row in tl.static_range(BLOCK_ROWS):  # a sum of one number and zeros is exact in any order
            total += tl.sum(tl.where((tl.arange(0, BLOCK_ROWS) == row)[:, None], acc, 0), 0)
    else:
        total = tl.sum(acc, 0)
    tl.store(partials_ptr + tl.program_id(0) * n_cols + cols, total, cols < n_cols)


@triton.jit
def add_partials_kernel(
    first_ptr, second_ptr, third_ptr, partials_ptr, n, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):  # fmt: skip
    """Grid (K / BLOCK_COLS, outputs): a program adds the n rows of BLOCK_COLS columns of one of the matrices."""
    output = tl.program_id(1)  # 0: first, 1: second, 2: third
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    partials_ptr += output * n * n_cols
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in tl.range(0, n, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = (rows < n)[:, None] & (cols < n_cols)[None, :]
        acc += tl.load(partials_ptr + rows[:, None] * n_cols + cols[None, :], mask, 0)
    out_ptr = first_ptr
    if second_ptr is not None:
        if output == 1:
            out_ptr = second_ptr
    if third_ptr is not None:
        if output == 2:
            out_ptr = third_ptr
    tl.store(out_ptr + cols, tl.sum(acc, 0), cols < n_cols)
