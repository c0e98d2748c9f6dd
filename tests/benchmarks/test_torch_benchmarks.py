"""The arithmetic of benchmarks/torch: the bucket-size model, the fit, and rows that a second run continues."""

import argparse
import math

import pytest

pytest.importorskip("torch")

from benchmarks.harness import report  # noqa: E402
from benchmarks.torch import ddp_model, rows  # noqa: E402

S, W, CALL = 6e9, 5e10, 2e-5  # bytes, bytes per second, seconds
SIZES = (10**6, 10**7, 10**8, 10**9)


def test_the_best_bucket_size_is_where_the_overhead_is_smallest():
    best = ddp_model.best_size(S, W, CALL)
    assert best == pytest.approx(math.sqrt(S * W * CALL))
    for other in (0.9 * best, 1.1 * best):
        assert ddp_model.overhead(S, W, CALL, S / best) < ddp_model.overhead(S, W, CALL, S / other)


@pytest.mark.parametrize("n", [1, 7, 300])
def test_if_backward_takes_as_long_as_the_messages_only_the_last_one_is_exposed(n):
    message = CALL + S / (n * W)
    assert ddp_model.pipelined(S, W, CALL, n, n * message) == pytest.approx(message)
    assert ddp_model.pipelined(S, W, CALL, n, 100 * n * message) == pytest.approx(message)  # a fast network
    assert ddp_model.pipelined(S, W, CALL, n, 0.0) == pytest.approx(n * message)  # nothing hides the messages


def all_reduce_rows(backend="nccl"):
    names = ((size, f"{backend}, 2 ranks, {size / 1e6:g} MB") for size in SIZES)
    return [{"case": name, "bytes": size, "ms": 1e3 * (CALL + size / W)} for size, name in names]


def test_the_fit_finds_bandwidth_and_overhead_of_one_backend():
    slow = [row | {"ms": 9e9} for row in all_reduce_rows("nccl-sockets")]
    assert ddp_model.fit(all_reduce_rows() + slow, "nccl", 2) == pytest.approx((W, CALL), rel=1e-6)
    with pytest.raises(SystemExit, match="0 rows of gloo on 4 ranks, and a fit needs two sizes: run python -m"):
        ddp_model.fit(all_reduce_rows(), "gloo", 4)


def test_the_measured_overhead_is_the_difference_from_a_step_without_synchronisation():
    measured = [{"case": "xl, none", "way": "none", "step ms": 400.0, "backward ms": 1e3 * S / W}]
    for mb, n in ((1000, 6), (10, 600)):
        extra = 1e3 * ddp_model.overhead(S, W, CALL, n)
        values = {"way": f"bucketed {mb} MB", "step ms": 400.0 + extra, "MB": S / 1e6, "buckets": n}
        measured.append({"case": f"xl, bucketed {mb} MB", **values})
    found, _, s = ddp_model.compare(measured, "xl", W, CALL)
    assert [each["bucket MB"] for each in found] == [10, 1000] and s == S
    assert all(each["closed form / measured"] == pytest.approx(1) for each in found)
    with pytest.raises(SystemExit, match="no row small, none"):
        ddp_model.compare(measured, "small", W, CALL)


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    parser = argparse.ArgumentParser()
    rows.add_flags(parser.add_argument, "table", warm_up=1, repeats=2)
    return lambda *argv: parser.parse_args(["--commit", "abc1234", *argv])


def test_a_second_run_measures_only_what_is_missing(options, capsys):
    names = ["a 1", "a 2", "b 1"]

    def measured(*argv):
        table = rows.Rows("benchmarks.torch.ddp", options(*argv))
        found = list(table.missing(names))
        for name in found:
            table.add(name, ms=1.0)
        return found

    assert measured("--only", "b") == ["b 1"]
    assert measured("--minutes", "-1") == []
    assert "run the same command again for a 1" in capsys.readouterr().out
    assert measured() == ["a 1", "a 2"] and measured() == []
    assert measured("--fresh") == names


def test_too_little_memory_is_a_row_and_another_error_is_not(options):
    table = rows.Rows("benchmarks.torch.ddp", options())

    def fail(message):
        raise RuntimeError(message)

    assert rows.attempt(table, "xl", lambda: fail("CUDA out of memory. Tried to allocate"))["note"] == "out of memory"
    assert table.rows == [{"case": "xl", "note": "out of memory"}]
    with pytest.raises(RuntimeError, match="other"):
        rows.attempt(table, "xl 2", lambda: fail("other"))


def test_mean_and_standard_deviation_have_a_scale():
    assert rows.mean_and_deviation([1.0, 3.0], 1e3) == pytest.approx((2000.0, 1e3 * math.sqrt(2)))
    assert rows.mean_and_deviation([2.0]) == (2.0, 0.0)
