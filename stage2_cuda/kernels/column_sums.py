"""Sums over the rows of a matrix, the gradients of biases, in two stages of fixed order: the same bits every time.

Stage one: P programs beside each other, each of which adds every P-th tile of rows, write a row of `partials` each.
Stage two adds those P rows. A single stage would keep a few dozen of the GPU's thousands of program slots busy, and
atomic additions would come in another order each time.
"""

# N rows, K columns, P programs that divide the rows

import triton
import triton.language as tl

from stage2_cuda.triton_driver import launch

ROWS, COLUMNS = 16, 128  # of one tile
PROGRAMS = 1056  # 8 for each of an H200's 132 processors; a constant, so that the order depends on the shape alone
PARTIALS, NARROW = 256, 16  # rows and columns of a tile of stage two: few turns, because each waits for memory


def partials_shape(n, columns):
    """The shape (P, columns) of the float32 scratch that sums over n rows go through."""
    return min(triton.cdiv(n, ROWS), max(1, PROGRAMS // triton.cdiv(columns, COLUMNS))), columns


def column_sums(out, partials, x):
    """out (K) float32 = the sum over the rows of x (N, K); partials: scratch of partials_shape(N, K)."""
    n, columns = x.shape
    grid = (partials.shape[0], triton.cdiv(columns, COLUMNS))
    launch(column_sums_kernel, grid, partials, x, n, columns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    add_partials(partials, out)


def add_partials(partials, first, second=None, third=None):
    """first (K) = the sum over the rows of partials (P, K or more); second and third those of the columns behind."""
    columns = first.shape[0]
    grid = (triton.cdiv(columns, NARROW), 1 + (second is not None) + (third is not None))
    arguments = first, second, third, partials, *partials.shape, columns
    launch(add_partials_kernel, grid, *arguments, ROWS=PARTIALS, COLUMNS=NARROW, num_warps=8)


@triton.jit
def column_sums_kernel(partials, x, n, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask, 0).to(tl.float32)
    tl.store(partials + tl.program_id(0) * columns + column, tl.sum(total, 0), column < columns)


@triton.jit
def add_partials_kernel(first, second, third, partials, n, width, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    which = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & (column < columns)[None, :]
        total += tl.load(partials + row[:, None] * width + which * columns + column[None, :], mask, 0)
    out = first
    if second is not None:
        if which == 1:
            out = second
    if third is not None:
        if which == 2:
            out = third
    tl.store(out + column, tl.sum(total, 0), column < columns)
