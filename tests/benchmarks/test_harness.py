"""The harness: summaries of samples, results files, and the --help of every benchmark script."""

import json
from importlib import import_module

import pytest

from benchmarks.harness import report
from benchmarks.harness.jobs import ROOT

LIBRARIES = ("harness", "peers")
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if path.parent.name not in LIBRARIES and "__main__" in path.read_text()
]


def test_a_summary_has_the_quartiles_of_all_samples():
    rounds = [[4.0, 1.0], [3.0, 2.0], [5.0]]
    assert report.summary(rounds) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}
    assert report.summary([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0, "n": 1}
    assert report.summary([]) is None


def test_a_paired_ratio_is_computed_within_rounds():
    slowed = [1.0, 10.0, 2.0]  # a disturbance that slows both sides of a round equally
    ratio = report.paired_ratio([3 * each for each in slowed], slowed)
    assert ratio == {"median": 3.0, "q1": 3.0, "q3": 3.0, "n": 3}


def test_results_hold_summaries_of_samples_and_whole_curves():
    rows = [
        {"seconds": [[1.0, 2.0], [3.0]], "unread_seconds": [None], "losses": [5.0, 4.0], "ms": {"both": [1.0, 3.0]}}
    ]
    (row,) = report.summarised(rows)
    assert row["seconds"] == {"median": 2.0, "q1": 1.5, "q3": 2.5, "n": 3} and row["unread_seconds"] is None
    assert row["losses"] == [5.0, 4.0] and row["ms"]["both"]["median"] == 2.0
    assert report.summarised({"rows": [{"seconds": 0.5}]}) == {"rows": [{"seconds": 0.5}]}


def test_a_saved_file_names_its_date_commit_command_and_hardware(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    report.save("benchmarks.cpu.decode", {"seconds": [1.0, 3.0]}, "abc1234")
    saved = json.loads((tmp_path / "results" / "cpu" / "decode.json").read_text())
    assert list(saved) == ["date", "commit", "command", "hardware", "results"] and saved["commit"] == "abc1234"
    assert saved["command"].startswith("python -m benchmarks.cpu.decode") and saved["hardware"]["cores"]
    assert saved["results"]["seconds"]["median"] == 2.0 and "cpu/decode.json" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_its_flags(script, monkeypatch, capsys):
    if script.startswith(("benchmarks.gpu.", "benchmarks.gpus.")):
        pytest.importorskip("triton")
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(script).main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"python -m {script}" in shown and "?" in shown and "--no-save" in shown
