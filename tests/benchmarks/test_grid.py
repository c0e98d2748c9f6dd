"""The benchmark that compares the planner with measurements: its layouts, and the errors that it prints."""

from dataclasses import replace

import pytest

from benchmarks.ranks.grid import LAYOUTS, compare, errors, layouts, name_of
from benchmarks.ranks.grid_ranks import train_all
from gpt2core.app.planning.machine import h100
from gpt2core.parallel.config import ParallelConfig
from gpt2core.presets import PRESETS
from tests.support.mpi import run_mpi

TINY = replace(PRESETS["tiny"], n_layer=8)


def test_every_grid_of_2_and_4_ranks_is_in_the_list():
    for ranks, sizes in ((2, {(1, 1), (1, 2), (2, 1)}), (4, {(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)})):
        found, refused = layouts(ranks, TINY)
        assert {(each.tp, each.pp) for each in found} == sizes and len(found) == len(set(found)) and not refused
    assert name_of(4, ParallelConfig(pp=2, zero=1)) == "dp 2 tp 1 pp 2 zero 1 none 1f1b"


def test_layouts_for_which_the_model_is_too_small_are_omitted():
    every, (found, refused) = layouts(4, TINY)[0], layouts(4, replace(TINY, n_layer=4))
    omitted = [each for each in every if (each.pp, each.pp_schedule) == (4, "interleaved")]
    assert len(omitted) == len(refused) == 2 and set(found) == set(every) - set(omitted)
    assert "`n_layer=4` is less than 8, the number of chunks on `pp=4` ranks" in refused[0]


def test_the_errors_are_relative_except_that_of_the_bubble():
    values = dict(memory=2e6, calls=2, bytes=10, bubble=0.2, cpu_ms=4.0, ms=5.0)
    result = dict(name="x", measured=values, predicted=values | dict(memory=1e6, bubble=0.1, ms=None))
    assert errors([result], "memory") == (0.5, 0.5) and errors([result], "bytes") == (0.0, 0.0)
    assert errors([result], "bubble") == pytest.approx((0.1, 0.1)) and errors([result], "ms") is None
    (cells,) = LAYOUTS.cells([{"results": [result]}])
    assert (cells["memory, MB"], cells["bubble"], cells["ms"]) == ("2.00 / 1.00", "20.0 % / 10.0 %", "5.0 / -")


def test_ranks_train_each_layout_and_send_what_is_predicted():
    configs = [ParallelConfig(zero=1), ParallelConfig(pp=2, pp_schedule="zero-bubble")]
    of_ranks = run_mpi(2, train_all, configs, PRESETS["nano"], 16, 2)
    found = [compare(2, *each, h100("fp32")) for each in zip(configs, zip(*of_ranks, strict=True), strict=True)]
    assert [result["exact"] for result in found] == [True, True]
    assert found[0]["measured"]["bubble"] == 0 < found[1]["measured"]["bubble"] < 1
