"""Checks of exercise 3.1: the canonical sum of rows, bit for bit, in Triton's interpreter."""

import numpy as np

from exercises.checks.common import random
from exercises.compare import expect
from gpt2core.parallel.tree_sum import tree_sum as canonical_sum
from stage3_mpi_cuda.tree_sum import tree_sum

FP32 = 1e-6  # relative norm: at most 5 terms, each rounding is 6e-8


def mixed(p, n, seed=0):
    """[x of each rank], float32 of mixed magnitude, so that the order of a sum changes its bits."""
    rng = random(seed)
    return [(rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float32) for _ in range(p)]


def summed(rows):
    out = np.full(rows.shape[1], np.nan, rows.dtype)
    tree_sum(out, np.ascontiguousarray(rows))
    return out


def in_turn(rows):
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


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
            (p * rows[0], "The first row is added in place of each other row: move rows_ptr by HALF * stride."),
        ]
        expect(f"the sum of {p} rows", summed(rows), want, FP32, wrong, ORDER)


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
    if hint and not np.array_equal(got, want):
        wrong = [(got, hint)]
    else:
        wrong = ()
    expect(name, got, want, 0, wrong, look)


def tree_half():
    rows = (random().standard_normal((5, 200)) * 10).astype(np.float16)
    want = canonical_sum([row.astype(np.float32) for row in rows]).astype(np.float16)
    hint = "The rows are added in float16: convert each row to float32 when it is loaded."
    expect_bits(
        "the sum of 5 rows in float16", summed(rows), want, [(canonical_sum(list(rows)), hint)], "x.to(tl.float32)"
    )
