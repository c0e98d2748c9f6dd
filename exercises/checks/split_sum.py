"""Checks of exercise 2.1: the partial column sums, in Triton's interpreter."""

# N rows, K columns, P programs

import contextlib

import numpy as np
import triton

from exercises.checks.common import random
from exercises.checks.guarded import GUARD, guarded, loads_only
from exercises.compare import Mismatch, expect
from stage2_cuda.kernels import column_sums
from stage2_cuda.runtime.triton_launch import launch

FP32 = 1e-5  # relative norm: a few roundings of 6e-8, more in a sum
ROWS, COLS = 4, 8  # the tile
UNWRITTEN = 12345  # the elements of partials before the kernel runs
STORE = "tl.store(partials_ptr + p * n_cols + cols, ...), where p = tl.program_id(0) and cols begins at c * BLOCK_COLS"


def split_sums(n, columns, programs, context=contextlib.nullcontext):
    """(the student's partials (P, K), their flat memory, x (N, K) in float64).

    context: a function of the kernel's x that returns the context manager in which the kernel runs.
    """
    x = random().standard_normal((n, columns)).astype(np.float32)
    partials, memory = guarded(np.full((programs, columns), UNWRITTEN))
    grid = programs, triton.cdiv(columns, COLS)
    kernel = column_sums.column_sums_kernel
    x_guarded, _ = guarded(x)
    with context(x_guarded):
        tile = dict(BLOCK_ROWS=ROWS, BLOCK_COLS=COLS, STAGES=1, IN_ORDER=False)
        launch(kernel, grid, partials, x_guarded, n, columns, **tile)
    expect_written(partials)
    return partials, memory, x.astype(np.float64)


def expect_written(partials):
    """Raise Mismatch if an element of partials was not written."""
    missing = partials == UNWRITTEN
    if missing.all():
        raise Mismatch("the kernel writes no element of partials", f"Store the sum at the end: {STORE}.")
    if missing[1:].any() and missing[1:].all() and not missing[0].all():
        raise Mismatch(
            f"the kernel writes only to row 0 of partials {partials.shape}",
            f"Program (p, c) writes to row p: {STORE}, and c = tl.program_id(1).",
        )
    if missing.any():
        row, column = np.argwhere(missing)[0]
        raise Mismatch(
            f"partials[{row}, {column}] is never written ({missing.sum()} of {missing.size} elements)",
            f"Look at the pointer and the mask of the store: {STORE}.",
        )


def tile_sums(x):
    """The column sums of each tile of rows: (tiles, K)."""
    return np.array([x[start : start + ROWS].sum(0) for start in range(0, len(x), ROWS)])


def expect_split_sum(name, n, columns, programs):
    partials, _, x = split_sums(n, columns, programs)
    tiles = tile_sums(x)
    want = np.array([tiles[p::programs].sum(0) for p in range(programs)])
    all_tiles = np.broadcast_to(tiles.sum(0), want.shape)
    neighbours = np.array([part.sum(0) for part in np.array_split(tiles, programs)])
    late = np.array([tiles[p + programs :: programs].sum(0) for p in range(programs)])
    last = np.array([tiles[p::programs][-1] for p in range(programs)])
    following = np.array([tiles[p:].sum(0) for p in range(programs)])
    full = np.array([tiles[: n // ROWS][p::programs].sum(0) for p in range(programs)])
    single = np.array([sum(x[t : t + ROWS].sum(0) for t in range(p, len(tiles), programs)) for p in range(programs)])
    offsets = np.arange(n)[:, None] * COLS + np.arange(columns)
    narrow = tile_sums(x.ravel()[offsets])
    unmasked = want.copy()
    unmasked[(len(tiles) - 1) % programs] = np.nan  # beyond x there is NaN
    wrong = [
        (unmasked, "Rows outside x are added: mask the loads with rows < n and cols < n_cols."),
        (np.full(want.shape, np.nan), "Elements outside x are added: mask the loads with rows < n and cols < n_cols."),
        (
            tiles[:programs],
            "Only the first tile of each program is added: program p adds the tiles p, p + P, p + 2P, ...",
        ),
        (all_tiles, "Every program adds all tiles: program p begins with tile p and adds every P-th tile."),
        (last, "Only the last tile of each program is added: write acc += in the loop, not acc =."),
        (following, "Program p adds tile p and all tiles after it: the step of the loop is P = tl.num_programs(0)."),
        (neighbours, "Program p adds neighbouring tiles: it adds the tiles p, p + P, p + 2P, ..."),
        (late, "The first tile of each program is missing: the loop begins with tile p."),
        (single, "Tile t does not begin at row t: its rows are t * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)."),
        (
            np.array([narrow[p::programs].sum(0) for p in range(programs)]),
            "A row of x is taken to have BLOCK_COLS elements: it has n_cols. The pointer is x_ptr + i * n_cols + j.",
        ),
        (full, "The last tile is missing: the number of tiles is n / BLOCK_ROWS, rounded up."),
    ]
    look = "column_sums_kernel: the rows of each tile, the mask, and the sum over the rows at the end"
    expect(name, partials, want, FP32, wrong, look)


def split_sum_one_tile():
    expect_split_sum("the column sums of x (4, 8)", 4, 8, 1)


def split_sum_tiles():
    expect_split_sum("the partial sums of x (24, 8) in 2 programs", 24, 8, 2)
    expect_split_sum("the partial sums of x (27, 13) in 3 programs", 27, 13, 3)


def split_sum_guards():
    hint = "Mask the load in column_sums_kernel with (rows < n)[:, None] & (cols < n_cols)[None, :]."
    partials, memory, _ = split_sums(27, 13, 3, lambda x: loads_only("x", x, hint))
    if not np.isnan(np.concatenate([memory[:GUARD], memory[-GUARD:]])).all():
        raise Mismatch(
            "the kernel writes to memory before or after partials",
            "Look at tl.store in column_sums_kernel: its mask is cols < n_cols.",
        )
    if not np.isfinite(partials).all():
        raise Mismatch(
            f"{int((~np.isfinite(partials)).sum())} elements of partials are NaN or infinite",
            "Look at acc in column_sums_kernel: it begins with 0, and only elements of x are added.",
        )
