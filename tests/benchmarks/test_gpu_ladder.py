"""Every rung of benchmarks/gpu/ladder.py computes the same numbers, also for rows that do not fill a tile."""

import numpy as np
import pytest

pytest.importorskip("triton")
from benchmarks.gpu import ladder
from stage2_cuda.runtime.triton_launch import array_module

RUNGS = [
    pytest.param(rung, marks=[pytest.mark.gpu] * (rung is ladder.cuda_c), id=rung.__name__)
    for rung, _ in ladder.RUNGS.values()
]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("columns", [7, 300])
def test_a_rung_computes_s_and_y(rung, columns):
    xp = array_module()
    error = ladder.relative_error(xp, rung, ladder.arguments(xp, rows=5, columns=columns))
    assert error < 1e-6  # fp32: a few roundings of 6e-8 each


def test_a_wrong_rung_is_found():
    def wrong(xp, s, y, *arguments):
        ladder.operations(xp, s, y, *arguments)
        y[0, 0] += 0.1

    assert ladder.relative_error(np, wrong, ladder.arguments(np, rows=5, columns=7)) > 1e-3


def test_the_computed_time_of_a_rung_is_that_of_its_passes_through_memory():
    slow, *_, fast = ladder.computed(ladder.RUNGS, bandwidth=1e9, rows=10, columns=25)
    assert (slow["bytes"], slow["seconds"]) == (21_000, [21e-6]) and fast["bytes"] == 4_000
