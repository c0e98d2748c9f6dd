"""Sums over the rows of a matrix, the gradients of biases, in two stages of fixed order: the same bits every time.

Stage one: P programs beside each other, each of which adds every P-th tile of rows, write a row of `partials` each.
Stage two adds those P rows. A single stage would keep a few dozen of the GPU's thousands of program slots busy, and
atomic additions would come in another order each time.
"""

# N rows, K columns, P programs that divide the rows

import triton
import triton.language as tl

from stage2_cuda.runtime.triton_launch import launch

# As measured on an H200, with its 132 processors. The number of programs is a function of the shape alone, because the
# order of the sums depends on it.
ROWS, COLUMNS, STAGES = 64, 64, 3  # of one tile, and how many tiles are on their way
FEW, MANY, EACH = 132, 528, 32  # programs of stage one at least, and at most, and rows for each in between
PARTIALS, NARROW = 128, 16  # rows and columns of a tile of stage two: few turns, because each waits for memory


def partials_shape(n, columns):
    """The shape (P, columns) of the float32 scratch that sums over n rows go through."""
    programs = min(MANY, max(FEW, n // EACH))
    return min(triton.cdiv(n, ROWS), max(1, programs // triton.cdiv(columns, COLUMNS))), columns


def column_sums(out, partials, x):
    """out (K) float32 = the sum over the rows of x (N, K); partials: scratch of partials_shape(N, K)."""
    n, columns = x.shape
    grid = (partials.shape[0], triton.cdiv(columns, COLUMNS))
    options = dict(ROWS=ROWS, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=4)
    launch(column_sums_kernel, grid, partials, x, n, columns, **options)
    add_partials(partials, out)


def add_partials(partials, first, second=None, third=None):
    """first (K) = the sum over the rows of partials (P, K or more); second and third those of the columns behind."""
    columns = first.shape[0]
    grid = (triton.cdiv(columns, NARROW), 1 + (second is not None) + (third is not None))
    arguments = first, second, third, partials, *partials.shape, columns
    launch(add_partials_kernel, grid, *arguments, ROWS=PARTIALS, COLUMNS=NARROW, num_warps=8)


@triton.jit
def column_sums_kernel(
    partials, x, n, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n, ROWS), tl.num_programs(0), num_stages=STAGES):
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
