"""The commands of benchmarks/torch that measure one model run on the CPU, once each, and print their tables."""

import contextlib
import gc
import json
import sys

import pytest

torch = pytest.importorskip("torch")

from benchmarks.harness import assignment_tables, figures, report, rows  # noqa: E402
from benchmarks.torch import accumulation, ddp, end_to_end, memory, memory_events, models, passes, profile  # noqa: E402
from gpt2core.errors import ConfigError  # noqa: E402

TRIAL = "--device", "cpu", "--sizes", "toy", "--contexts", "16", "--batch", "2"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(module, *flags): main() of a command in an empty directory; returns its saved rows, {name: row}."""
    for module in (report, rows):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(report, "hardware", lambda: {"cpu": "", "cores": 0, "blas": "", "blas_kernels": ""})

    def call(module, *flags):
        name = module.__name__.split(".")[-1]
        monkeypatch.setattr(sys, "argv", [name, "--commit", "abc1234", *flags])
        module.main()
        path = tmp_path / "out" / "results" / "torch" / f"{name}.json"
        return {row["name"]: row for row in json.loads(path.read_text())["results"]}

    return call


class SameProcess(contextlib.nullcontext):
    """A BenchmarkProcess that is this process, so that the test starts none."""

    started = []  # the names of the processes

    def __init__(self, spec, benchmark, timeout):
        self.started.append(spec.name)
        self.run_round = end_to_end.prepare(passes, **spec.options)
        super().__init__(self)


@pytest.mark.long
def test_end_to_end_times_every_kind_and_the_warm_up(run, monkeypatch, capsys):
    monkeypatch.setattr(end_to_end, "BenchmarkProcess", SameProcess)
    monkeypatch.setattr(SameProcess, "started", [])
    flags = "--precisions", "fp32", "--implementations", "torch naive", "ours", "--warm-up", "1", "--repeats", "2"
    found = run(end_to_end, *TRIAL, *flags)
    assert [name.split(" / ")[-1] for name in found] == ["torch naive", "ours"] * 2 == SameProcess.started
    for name, row in found.items():
        if name.startswith("warm-up"):
            assert [row[f"warm-up {count}"]["n"] for count in (0, 1, 2, 5)] == [10] * 4
        else:
            assert all(row[kind]["n"] == 2 and row[kind]["mean"] > 0 for kind in assignment_tables.KINDS)
    printed = capsys.readouterr().out
    assert "| forward + backward, ms |" in printed and "| warm-up 5, ms |" in printed


def test_a_kind_or_a_model_that_is_too_large_is_said(monkeypatch):
    large, times = {"oom": True}, [1.0, 3.0]
    answers = iter([large, dict(zip(assignment_tables.KINDS, (times, times, large), strict=True))])
    monkeypatch.setattr(end_to_end, "in_new_process", lambda *_, **__: {"peak_bytes": 1} | next(answers))
    args = end_to_end.main.parser.parse_args([])
    assert end_to_end.kinds_row("ours", args=args) == large
    row = end_to_end.kinds_row("ours", args=args)
    assert list(row) == [*assignment_tables.KINDS] and row["step"] == large and row["forward"]["mean"] == 2


def test_the_compared_models_compute_the_same_loss():
    losses = {}
    for name in (passes.EAGER, passes.NAIVE):
        torch.manual_seed(0)
        losses[name] = passes.make_passes(name, "toy", 16, "fp32", "cpu", 2).run("forward")
    assert losses[passes.EAGER] == pytest.approx(losses[passes.NAIVE], rel=1e-5)  # float32, another order of sums


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_with_checkpoints_has_the_same_gradients(count):
    gradients = []
    for checkpoints in (False, True):
        made = passes.make_passes(passes.NAIVE, "toy", 16, "fp32", "cpu", 2)
        if checkpoints:
            models.use_checkpoints(made.model, count)
        made.run("forward + backward")
        gradients.append([parameter.grad for parameter in made.model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)  # the same operations in the same order


def test_profile_finds_the_products_and_the_softmax(run, capsys):
    (row,) = run(profile, *TRIAL, "--precisions", "fp32", "--warm-up", "1", "--repeats", "2").values()
    assert set(row["passes"]) == {"forward only", "forward", "backward", "optimizer"}
    assert 0 < row["passes"]["backward"]["product_share"] < 1 and row["passes"]["optimizer"]["product_share"] == 0
    assert all(part["ms"] > 0 for part in row["attention"].values())
    # products 4 B H T T D and softmax 5 B H T T, with D = 16
    operations = {part: found["operations"] for part, found in row["attention"].items()}
    assert operations["softmax"] / operations["products"] == 5 / (4 * 16)
    assert "nsys profile" in capsys.readouterr().out


def test_profile_runs_only_the_ranges_for_nsys(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["profile", *TRIAL, "--ranges-only", "--only", "toy", "--repeats", "1"])
    profile.main()
    assert not (tmp_path / "out").exists()


def test_accumulation_prints_the_four_sums_and_the_dtypes(run):
    found = run(accumulation, "--device", "cpu")
    errors = {name.split(" / ")[1]: row["error"] for name, row in found.items() if name.startswith("sum")}
    assert errors["float32 + float32"] < errors["float32 + float16"] < errors["float16 + float16"]
    assert errors["float32 + float16"] == errors["float32 + float16 cast to float32"]  # PyTorch casts the same
    dtypes = found["dtypes / bfloat16 / cpu"]
    assert (dtypes["parameters"], dtypes["output of fc1"], dtypes["loss"]) == ("float32", "bfloat16", "float32")
    for name, row in found.items():
        if name.startswith("layernorm"):
            assert row["float32"] < row["own dtype"]


@pytest.mark.long
def test_memory_has_the_peaks_and_draws_the_timeline(run, tmp_path):
    found = run(memory, *TRIAL, "--precisions", "fp32", "--implementations", "torch naive", "--blocks", "1")
    peaks = found["toy / context 16 / fp32 / torch naive"]
    assert peaks["residual"] == 4 * 2 * 16 * 64  # float32, batch 2, 16 tokens, 64 channels
    assert peaks["parameters"] < peaks["forward"]["peak"] < peaks["step"]["peak"]
    assert peaks["parameters"] < found["checkpoint / toy / context 16 / fp32 / 1 blocks"]["step"]["peak"]
    saved = found["saved / toy / context 16 / fp32 / torch naive"]
    assert saved["gradients"] == 4 * (12 * 64**2 + 13 * 64)
    assert 0 < sum(saved["sources"].values()) <= saved["saved"]
    assert all("benchmarks/" in source for source in saved["sources"])
    step = found["timeline / toy / context 16 / fp32 / step / torch naive"]
    assert list(step["marks"]) == ["forward", "backward", "optimizer"]
    assert sorted(step["marks"].values()) == list(step["marks"].values())
    assert step["before"] >= 4 * peaks["parameters"]  # weights, gradients and both moments
    assert (tmp_path / "out" / "results" / "torch" / "memory.png").stat().st_size > 5000


def test_what_a_block_saved_is_freed():
    def tensors():
        gc.collect()
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    made = passes.make_passes(passes.NAIVE, "toy", 16, "fp32", "cpu", 2)
    before = tensors()
    assert sum(memory_events.saved_by_block(made, (2, 16, 64)).values()) > 0
    assert tensors() == before


def test_the_entries_of_a_snapshot_become_events_with_their_source():
    root = str(memory_events.ROOT)
    frames = [
        {"filename": "/lib/torch/x.py", "line": 1, "name": "f"},
        {"filename": f"{root}/a.py", "line": 7, "name": "g"},
    ]
    entries = [
        {"action": "segment_alloc", "size": 999},
        {"action": "alloc", "size": 8, "frames": frames},
        {"action": "free_requested", "size": 8},
        {"action": "free_completed", "size": 8},
        {"action": "alloc", "size": 4},
    ]
    events, marks = memory_events.events_of_trace(entries), {"forward": 0, "backward": 2, "optimizer": 3}
    assert events == [(8, "a.py:7 g"), (-8, ""), (4, memory_events.UNKNOWN)]
    assert memory_events.allocated_after(events) == [0, 8, 0, 4]
    assert memory_events.thinned([0, 8, 0, 4], marks, 2) == ([8, 4], {"forward": 0, "backward": 1, "optimizer": 1})
    largest = memory_events.largest_allocations([(8, "a"), (4, "b"), (8, "a"), (-8, "")], 1)
    assert largest == [{"bytes": 8, "times": 2, "source": "a"}]


def test_without_a_compiler_one_note_says_that_the_model_is_not_compiled(run, monkeypatch, capsys):
    monkeypatch.setattr(end_to_end.shutil, "which", lambda name: None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setattr(sys, "argv", ["end_to_end", *TRIAL, "--dry-run"])
    end_to_end.main()
    assert capsys.readouterr().err.count("note: there is no C++ compiler, so torch.compile runs in eager mode") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", [end_to_end, profile, accumulation, memory])
def test_without_a_gpu_one_line_says_what_to_do(module, run):
    with pytest.raises(ConfigError, match="--device cuda: PyTorch found no GPU: use --device cpu"):
        run(module)


def test_a_timeline_has_the_share_of_communication_during_computation():
    intervals = {"overlap": [["compute", 0.0, 4.0], ["communication", 3.0, 5.0]]}
    (row,) = assignment_tables.TABLES["ddp-timeline"].cells([{"results": {"overlap": ddp.overlaps(intervals)}}])
    assert row == {
        "": "overlap",
        "compute, ms": "4.0",
        "communication, ms": "2.0",
        "communication during computation": "50 %",
    }


def times(**means):
    """The columns of a row with these means."""
    return {kind.replace("_", " + "): {"mean": mean, "std": 0.0, "n": 5} for kind, mean in means.items()}


def test_the_gain_of_bf16_needs_both_precisions():
    found = [
        {"name": "small / context 512 / fp32 / ours", **times(forward=6.0, forward_backward=9.0, step=10.0)},
        {"name": "small / context 512 / bf16 / ours", **times(forward=2.0, forward_backward=6.0, step=4.0)},
        {"name": "xl / context 512 / bf16 / ours", **times(forward=2.0, forward_backward=6.0, step=4.0)},
    ]
    (row,) = assignment_tables.TABLES["end-to-end-bf16"].cells([{"results": found}])
    gains = {"forward": "3.00", "forward + backward": "1.50", "step": "2.50"}
    assert row == {"size": "small", "context": "512", "implementation": "ours"} | gains


def test_the_share_of_the_products_in_a_step_has_the_weights_of_the_passes():
    ms = {"forward only": (1.0, 0.5), "forward": (1.0, 0.5), "backward": (2.0, 0.75), "optimizer": (1.0, 0.0)}
    found = {
        name: {"kernels_ms": kernels, "product_share": share, "wall": {"mean": 2 * kernels}}
        for name, (kernels, share) in ms.items()
    }
    row = {"name": "small / context 512 / fp32 / torch naive", "passes": found, "step": profile.step_shares(found)}
    (cells,) = assignment_tables.TABLES["profile-shares"].cells([{"results": [row]}])
    assert {title: cell for title, cell in cells.items() if "%" in cell} == {
        "products, forward only": "50.0 %",
        "products, training step": "50.0 %",  # (0.5 + 1.5) / 4
        "optimizer, training step": "25.0 %",
        "kernels / wall, forward only": "50.0 %",
        "kernels / wall, training step": "50.0 %",
    }


def test_the_added_time_of_a_schedule_is_its_difference_from_none():
    finish = {"mean": 25.0, "std": 1.0, "n": 5}
    ways = ("none", 75.0, 0), ("naive", 100.0, 7), ("overlap", 80.0, 7)
    found = [
        {"name": f"xl, {way}", "step": {"mean": step, "std": 1.0, "n": 5}, "finish": finish, "buckets": count}
        for way, step, count in ways
    ]
    none, naive, overlap = assignment_tables.TABLES["ddp"].cells([{"results": found}])
    assert (none["added, ms"], naive["added, ms"], overlap["added, ms"]) == ("", "25.0", "5.0")
    assert (naive["share of step"], overlap["share of step"]) == ("25.0 %", "6.2 %")  # 25 / 100, 5 / 80
    after = "synchronisation after backward, ms"
    assert (none[after], naive[after], overlap[after]) == ("", "25 ± 1", "")


def test_every_figure_is_drawn_from_its_results_file(monkeypatch, tmp_path, capsys):
    for name in figures.FIGURES:
        (tmp_path / f"{name}.json").touch()
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures"])
    figures.main()
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in figures.FIGURES)
    monkeypatch.setattr(sys, "argv", ["figures", "--only", "other"])
    with pytest.raises(ConfigError, match="invalid choice: 'other'"):
        figures.main()
