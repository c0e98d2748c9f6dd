"""Checks of exercise 3.1: the canonical sum of rows, bit for bit, in Triton's interpreter."""

import numpy as np

from exercises.checks.common import random
from exercises.checks.guarded import guarded, loads_only
from exercises.compare import Mismatch, expect
from gpt2core.errors import counted
from gpt2core.tree_sum import tree_sum as canonical_sum
from stage3_mpi_cuda.tree_sum import tree_sum

FP32 = 1e-6  # relative norm: at most 5 terms, each rounding is 6e-8
FP64 = 1e-14  # relative norm: at most 5 terms, each rounding is 1e-16


def mixed(p, n, seed=0):
    """[x of each rank], float32 of mixed magnitude, so that the order of a sum changes its bits."""
    rng = random(seed)
    return [(rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float32) for _ in range(p)]


def summed(rows):
    out = np.full(rows.shape[1], np.nan, rows.dtype)
    try:
        tree_sum(out, np.ascontiguousarray(rows))
    except Exception as error:
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            raise Mismatch(
                f"tree_of_rows calls itself without end for COUNT = {len(rows)}",
                "If COUNT == 1, load the row and do not call tree_of_rows again. Otherwise HALF must be less than "
                "COUNT: triton.next_power_of_2(COUNT) // 2.",
            ) from None
        raise
    return out


def in_turn(rows):
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def subtracted(rows):
    """The first half minus the others, at each addition of the canonical sum."""
    count = len(rows)
    half = (1 << (count - 1).bit_length()) // 2
    return rows[0] if count == 1 else subtracted(rows[:half]) - subtracted(rows[half:])


def without_stride(rows, start=0, count=None):
    """The sum if the other rows begin HALF elements after the first one, not HALF rows."""
    count = len(rows) if count is None else count
    half = (1 << (count - 1).bit_length()) // 2
    if count == 1:
        return rows.ravel()[start : start + rows.shape[1]]
    return without_stride(rows, start, half) + without_stride(rows, start + half, count - half)


def halves(rows):
    """The sum of the first count // 2 rows plus the sum of the others: another tree if count is no power of two."""
    count = len(rows)
    return rows[0] if count == 1 else halves(rows[: count // 2]) + halves(rows[count // 2 :])


ORDER = "tree_of_rows: the first HALF rows, then the others; HALF is the largest power of two below COUNT"


def tree_values():
    for p in range(1, 6):
        rows = random(p).standard_normal((p, 70)).astype(np.float32)
        want = rows.sum(0, dtype=np.float64)
        wrong = [
            (rows[0], "The result is the first row: the other rows are not added."),
            (want - rows[-1], "The last row is missing."),
            (want - rows[0], "The first row is missing."),
            (subtracted(rows), "The sum of the other rows is subtracted: add it."),
            (without_stride(rows), "The pointer moves by HALF elements, not by HALF rows: rows_ptr + HALF * stride."),
            (p * rows[0], "The first row is added in place of each other row: move rows_ptr by HALF * stride."),
        ]
        expect(f"the sum of {counted(p, 'row')}", summed(rows), want, FP32, wrong, ORDER)


def tree_order():
    for p in (3, 4, 5, 6, 7, 8):
        rows = np.stack(mixed(p, 200, seed=p))
        wrong = [
            (halves(rows), "The rows are divided in the middle: HALF is the largest power of two below COUNT."),
            (in_turn(rows), "The rows are added one after another: add the sums of two halves."),
            (in_turn(rows[::-1]), "The rows are added one after another, from the last: add the sums of two halves."),
        ]
        expect_bits(f"the sum of {p} rows", summed(rows), canonical_sum(list(rows)), wrong, ORDER)


def expect_bits(name, got, want, wrong, look):
    """expect() with tolerance 0, where a typical mistake is recognised by its bits too."""
    hint = next((hint for array, hint in wrong if np.array_equal(got, array)), None)
    expect(name, got, want, 0, [(got, hint)] if hint else (), look)


def tree_half():
    rows = (random().standard_normal((5, 200)) * 10).astype(np.float16)
    want = canonical_sum([row.astype(np.float32) for row in rows]).astype(np.float16)
    hint = "The rows are added in float16: convert each row to float32 when it is loaded."
    expect_bits(
        "the sum of 5 rows in float16", summed(rows), want, [(canonical_sum(list(rows)), hint)], "x.to(tl.float32)"
    )


def tree_double():
    rows = random().standard_normal((5, 200))
    hint = "The rows are converted to float32: keep x as it is if x.dtype == tl.float64."
    wrong = [(canonical_sum(list(rows.astype(np.float32))), hint)]
    expect("the sum of 5 rows in float64", summed(rows), rows.sum(0), FP64, wrong, "the dtype in tree_of_rows")


def tree_mask():
    hint = "Give tl.load the mask and the value elsewhere: tl.load(pointers, mask, 0)."
    rows, _ = guarded(random().standard_normal((3, 70)))
    with loads_only("the rows", rows, hint):
        summed(rows)
