"""benchmarks.harness.rows: a table that several runs measure."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks.harness import report, rows  # noqa: E402
from benchmarks.harness.tables import TABLES  # noqa: E402
from benchmarks.torch import matmul_search  # noqa: E402

NAME = "benchmarks.torch.example"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(cases, *flags): run_rows() in an empty directory; returns the rows and the names that it measured."""
    for module in (report, rows):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(report, "hardware", dict)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def call(cases, *flags):
        parser, measured = report.benchmark_parser(NAME, "A question.", **rows.ROW_FLAGS), []

        def recorded(name, function):
            return lambda: measured.append(name) or function()

        args = parser.parse_args(["--commit", "abc1234", *flags])
        found = rows.run_rows(args, {name: recorded(name, function) for name, function in cases.items()})
        return found, measured

    return call


CASES = {"small / 1": lambda: {"ms": 1.5}, "small / 2": lambda: {"ms": 2.5}, "large / 1": lambda: {"ms": 9.0}}


def test_a_second_run_measures_only_the_missing_rows(run):
    assert run(CASES, "--only", "small")[1] == ["small / 1", "small / 2"]
    found, measured = run(CASES)
    assert measured == ["large / 1"] and [row["ms"] for row in found] == [1.5, 2.5, 9.0]
    assert run(CASES)[1] == [] and run(CASES, "--fresh", "--only", "small", "2")[1] == ["small / 2"]
    assert len(run(CASES)[0]) == 3


def test_rows_of_other_cases_stay_in_the_file(run):
    run(CASES)
    run({"other": dict})
    assert run(CASES)[1] == []


def test_no_row_is_started_after_the_time_is_over(run, capsys):
    assert run(CASES, "--minutes", "1e-9")[1] == ["small / 1"]
    assert "2 rows are missing; run the command again" in capsys.readouterr().out
    assert run(CASES, "--minutes", "1e-9")[1] == ["small / 2"]
    assert "1 rows are missing" in capsys.readouterr().out
    assert run(CASES, "--minutes", "1e-9")[1] == ["large / 1"] and "missing" not in capsys.readouterr().out


def test_out_of_memory_is_a_row_and_other_errors_are_raised(run):
    def fail(error):
        raise error

    assert run({"row": lambda: fail(torch.OutOfMemoryError("CUDA out of memory"))})[0][0]["oom"]
    with pytest.raises(RuntimeError, match="misaligned"):
        run({"other row": lambda: fail(RuntimeError("misaligned address"))})


def test_a_dry_run_prints_the_names_and_measures_nothing(run, capsys):
    assert run(CASES, "--dry-run", "--only", "small") == ([], [])
    assert capsys.readouterr().out.splitlines() == ["small / 1", "small / 2", "2 rows"]


def test_the_tables_of_attention_have_the_means_and_the_rows_without_memory():
    time = rows.mean_and_deviation([1.0, 2.0, 3.0])
    assert time == {"mean": 2.0, "std": 1.0, "n": 3}
    sizes = {"bytes_before_backward": 3 << 30, "bytes_of_weights": 1 << 30}
    found = [
        {"name": "leaderboard / ours", "both": time},
        {"name": "memory / D 16 / T 256", "forward": time, "backward": time, **sizes},
        {"name": "memory / D 16 / T 65536", "oom": True},
        {"name": "grid / float32 / D 16 / T 128 / naive", "oom": True},
        {"name": "grid / float32 / D 16 / T 128 / ours", "forward": time, "backward": time, "both": time},
    ]
    (leaderboard,), (row,), memory = (
        TABLES[name].cells([{"results": found}]) for name in ("torch-kernels", "grid-backward", "naive-memory")
    )
    assert leaderboard == {"us": "attention, forward and backward", "ours": "2000"}
    assert row[""] == "float32, D 16, T 128" and row["naive"] == "out of memory" and row["ours"] == "2 ± 1"
    assert memory[0]["GiB before backward"] == "3.00" and memory[1]["forward ms"] == "out of memory"


def test_every_tile_of_the_search_fits_shared_memory_and_registers():
    tiles = list(matmul_search.tiles())
    assert len(set(map(matmul_search.text, tiles))) == len(tiles) > 200
    assert matmul_search.resident(237, 147480, 8) == 1 and matmul_search.resident(90, 98328, 8) == 2


def test_the_search_explains_its_result(capsys):
    best = {"resident": 1, "shared": 147480, "registers": 237, "spills": 0, "tiles": 128, "waves": 128 / 132}
    matmul_search.explain(2048, best, {matmul_search.EAGER: [0.05], matmul_search.OURS: [0.04]})
    printed = capsys.readouterr().out
    assert "It saves 33.6 MB; the measured gain is 10.0 us." in printed
    assert "128 tiles in 0.97 waves; in the last wave 3% of the GPU is idle." in printed
