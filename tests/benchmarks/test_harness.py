"""The harness: summaries of samples, results files, and the --help of every benchmark script."""

import json
import math
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cpu import choices, curve, decode
from benchmarks.harness import report, result_tables, speedups
from benchmarks.harness.processes import run_main
from benchmarks.ranks import ranks
from gpt2core.errors import ConfigError
from testing.jobs import ROOT
from tests.support.help_text import arguments_of, assert_parsed, examples_of

LIBRARIES = ("harness", "peers")
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").glob("*/*.py"))
    # A folder with __main__.py is one command with flags of its own, and its other files are no scripts.
    if path.parent.name not in LIBRARIES
    and not path.with_name("__main__.py").exists()
    and re.search("__main__|^@benchmark", path.read_text(), re.MULTILINE)
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


def test_ranks_that_are_faster_than_ideal_are_disturbed():
    def result(name, count, threads, seconds):
        common = {"cpu_seconds": 1.0, "losses": [5.0], "peak_bytes": 2**20, "threads": threads}
        return {"name": name, "ranks": count, "seconds": [[seconds]] * 3, **common}

    def measured(serial):
        sides = (ranks.SERIAL, 1, 1, serial), ("stage 1: 2 ranks, --dp flat", 2, 1, 1.0), (ranks.DDP, 2, 1, 1.1)
        return [result(*side) for side in (*sides, ("stage 0: 1 process, 2 threads", 1, 2, 2.0))]

    for serial, marked in ((3.96, True), (1.9, False)):
        results = measured(serial)
        ranks.summarise(results)
        saved = report.summarised(results)
        table = result_tables.TABLES["ranks-step"].cells([{"results": saved}])
        cells = [row["times as fast as one process"] for row in table]
        # all ratios to the disturbed run are marked; PyTorch's kernels have no known ideal
        assert [cell.startswith("disturbed (") for cell in cells] == [marked, marked, False, marked]


@pytest.mark.parametrize("times, above", [(2.0, False), (2.1, False), (2.11, True), (math.inf, True), (math.nan, True)])
def test_a_speedup_that_is_no_number_or_above_its_ideal_by_more_than_noise_is_disturbed(times, above):
    found = speedups.marked({"one": (times, 2), "other": (1.5, 2)})
    assert [found["one"].above, found["one"].disturbed, found["other"].disturbed] == [above] * 3
    assert not found["other"].above and found["other"].cell("x").startswith("disturbed (x;") == above


def save_arguments(*argv, group="cpu"):
    parser = report.benchmark_parser(f"benchmarks.{group}.decode", "A question.")
    return parser.parse_args(["--commit", "abc1234", *argv])


def test_a_saved_file_names_its_date_commit_command_and_hardware(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "processor", lambda: "AMD EPYC")
    monkeypatch.setattr(report, "cpu_field", lambda name: "")
    path = report.save({"seconds": [1.0, 3.0]}, save_arguments("--save"))
    assert path == tmp_path / "results" / "cpu" / "decode.json"
    saved = json.loads(path.read_text())
    assert list(saved) == ["date", "commit", "command", "hardware", "results"] and saved["commit"] == "abc1234"
    assert saved["command"].startswith("python -m benchmarks.cpu.decode") and saved["hardware"]["cores"]
    assert saved["results"]["seconds"]["median"] == 2.0 and "cpu/decode.json" in capsys.readouterr().out


ZEN3, ZEN4, ZEN5 = ("25", "fpu avx2"), ("25", "fpu avx2 avx512f"), ("26", "fpu avx2 avx512f")  # family, flags


@pytest.mark.parametrize(
    "name, fields, suffix",
    [
        ("Intel(R) Xeon(R) Processor", ("6", ""), "_intel"),
        ("AMD EPYC", ZEN3, "_zen3"),
        ("AMD EPYC", ZEN4, ""),
        ("AMD EPYC", ZEN5, "_zen5"),
        ("M2", ("", ""), ""),
    ],
)
def test_results_of_another_kind_of_cpu_have_a_file_of_their_own(tmp_path, monkeypatch, name, fields, suffix):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "processor", lambda: name)
    monkeypatch.setattr(report, "cpu_field", dict(zip(("cpu family", "flags"), fields, strict=True)).get)
    for group, end in (("cpu", suffix), ("ranks", suffix), ("gpu", "")):
        path = report.save({"seconds": [1.0]}, save_arguments("--save", group=group))
        assert path == tmp_path / "results" / group / f"decode{end}.json"
    assert json.loads(path.read_text())["hardware"]["cpu"] == name


def test_the_family_of_the_cpu_is_that_of_linux():
    listed = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "cpu family" in line]
    assert report.cpu_field("cpu family") == (listed[0].strip() if listed else "")


def test_without_save_a_benchmark_writes_to_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "processor", lambda: "AMD EPYC")
    monkeypatch.setattr(report, "cpu_field", lambda name: "")
    path = report.save({"losses": [1.0]}, save_arguments(), name="short")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    assert path == tmp_path / "out" / "results" / "cpu" / "short.json"
    assert "out/results/cpu/short.json, commit abc1234; --save writes results/cpu/short.json" in capsys.readouterr().out


def test_the_picture_of_the_curves_is_beside_their_file_and_has_the_paper_s_curves(tmp_path, monkeypatch, rng):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "processor", lambda: "AMD EPYC")
    monkeypatch.setattr(report, "cpu_field", lambda name: "")
    losses = (np.array(curve.PAPER_LOSSES) * rng.uniform(0.9, 1.1, 50)).tolist()
    rows = [{"step": step, "loss": loss, "parameters_sha256": "0"} for step, loss in enumerate(losses)]
    monkeypatch.setattr(curve, "train_on", lambda threads: rows)
    monkeypatch.setattr("sys.argv", ["curve", "--commit", "abc1234"])
    assert curve.main() == 0
    assert (tmp_path / "out" / "results" / "cpu" / "curve.png").read_bytes().startswith(b"\x89PNG")
    *paper, ours = curve.curves_with_the_paper(losses)
    assert [each.label for each in paper] == [f"paper, {name}" for name in ("serial", "MPI", "CUDA", "MPI and CUDA")]
    assert [each.losses[-1] for each in paper] == [0.908195, 1.072370, 0.937564, 1.081243]  # the last row of its table
    assert all(len(each.losses) == len(each.steps) == 50 for each in paper) and ours.losses == losses


def test_only_the_harness_chooses_between_results_and_out():
    texts = {script: (ROOT / (script.replace(".", "/") + ".py")).read_text() for script in SCRIPTS}
    assert [script for script, text in texts.items() if '"results" /' in text or "no_save" in text] == []


def test_make_bench_saves_to_results():
    lines = re.findall(r"^\t.* -m (benchmarks\.\w+\..*)$", (ROOT / "Makefile").read_text(), re.M)
    assert len(lines) > 20 and [line for line in lines if line.split()[1] != "--save"] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_its_flags(script, monkeypatch, capsys):
    if script.startswith(("benchmarks.gpu.", "benchmarks.gpus.")):
        pytest.importorskip("triton")
    main = import_module(script).main
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        run_main(main)
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "?" in shown and "--save " in shown
    assert (examples := examples_of(shown))
    for example in examples:
        assert_parsed(monkeypatch, main, arguments_of(example, f"python -m {script}"))
    monkeypatch.setattr("sys.argv", [script, "--sav"])
    with pytest.raises(SystemExit) as ended:
        run_main(main, measures_time=False)
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.startswith("error: unrecognized arguments: --sav (did you mean --save")
    assert line.count("\n") == 1


def test_a_message_of_the_library_is_one_line_with_flags(capsys):
    def main():
        raise ConfigError("`batch_size=15` is not divisible by\n`micro_batches=4`: use `batch_size=16`")

    with pytest.raises(SystemExit) as ended:
        run_main(main, measures_time=False)
    assert ended.value.code == 2
    line = "error: --batch-size 15 is not divisible by --micro-batches 4: use --batch-size 16\n"
    assert capsys.readouterr().err.endswith(line)


def test_a_batch_of_the_decode_benchmark_has_tokens_per_second_and_one_row_beside_single_prompts():
    def result(name, case, seconds, **more):
        times = {key: [seconds] for key in ("first", "token", "total", "cpu")}
        return dict(name=name, case=case, threads=1, prompt=2, new=4, peak_bytes=2**20, ids=[], **times, **more)

    results = [result(decode.OURS, "KV cache", 1.0), result(decode.TORCH, "KV cache", 2.0)]
    results += [result(decode.OURS, "batch of 8", 2.0, batch=8), result(decode.TORCH, "batch of 8", 8.0, batch=8)]
    decode.summarise(results)
    saved = report.summarised(results)
    single, batch = result_tables.TABLES["cpu-decode"].cells([{"results": saved}])
    assert [row["tokens_per_second"]["median"] for row in saved[2:]] == [16, 4] and "tokens_per_second" not in saved[0]
    assert (single["1: times as fast"], batch["1: times as fast"]) == ("2.00", "4.00")
    assert single["1: recomputing / cache"] == ""  # not measured, with --only


def test_the_row_of_a_kernel_says_that_it_is_the_time_of_all_calls_in_a_step(monkeypatch):
    monkeypatch.setattr(choices, "kernel_timer", lambda backend: lambda: {"mlp": 2.0, "clip": 2.0, "zeros": 1.0})
    sides = dict.fromkeys(("naive_seconds", "our_seconds"), [2.0])
    names = [f"{each}, all calls in a step: formula -> " for each in ("mlp", "clip")]
    found = list(choices.kernel_choices(1))
    assert found == [(names[0] + "override", sides), (names[1] + "sums in the canonical order", sides)]


@pytest.mark.parametrize(
    "words", ["--rounds 0", "--ranks 2 -1", "--seconds nan", "--seconds inf", "--rounds 9999999999"]
)
def test_a_number_of_a_benchmark_that_is_not_positive_or_is_too_large_is_one_line(words):
    parser = report.benchmark_parser("benchmarks.x", "A question.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--warm-up", type=int)
    assert parser.parse_args(["--warm-up", "0"]).rounds == 3
    with pytest.raises(
        ConfigError, match=f"argument {words.split()[0]}: {words.split()[-1]} must be positive and below"
    ):
        parser.parse_args(words.split())


@pytest.mark.parametrize(
    "program, says",
    [("import sys; sys.argv.append('--preset=nano'); from benchmarks.gpu.step import main", "no GPU was found"),
     ("main = BenchmarkProcess(ProcessSpec('ours', 'no_such_package.module', 1), 'benchmarks.cpu.train_step', 60)"
      ".__enter__", "the package no_such_package is not installed")],
)  # fmt: skip
def test_an_error_that_a_compared_program_explains_is_one_line(program, says):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    harness = "from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec, run_main"
    done = subprocess.run(
        [sys.executable, "-c", f"{harness}\n{program}\nrun_main(main)"],
        cwd=ROOT, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    *load, line = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ours: ") and says in line and len(load) <= 1
