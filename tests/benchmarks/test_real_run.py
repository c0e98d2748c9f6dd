"""The real run beside PyTorch: on the CPU, in fp32, both programs have the same losses; the table of a run."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.gpu import real_run
from benchmarks.harness.report import summarised
from benchmarks.harness.result_tables import TABLES
from benchmarks.peers import torch_real_run
from gpt2core.data import Windows
from gpt2core.errors import UserError
from testing.jobs import ROOT

RECIPE = {
    "data": str(ROOT / "data" / "dummy.txt"), "n_layer": 1, "n_head": 2, "n_embd": 32, "seq_len": 16, "batch_size": 4,
    "steps": 12, "lr": 1e-2, "min_lr": 1e-3, "warmup": 3, "val_fraction": 0.005, "eval_every": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def results():
    train = real_run.prepare(torch_real_run, RECIPE, "cpu", precision="fp32", compiled=False)
    found = [
        real_run.result("ours", RECIPE, lambda: real_run.train_ours(RECIPE, 0, timeout=60)),
        real_run.result("torch eager", RECIPE, train),
    ]
    real_run.compare(found)
    return found


def test_both_programs_train_and_validate_on_the_same_data_from_the_same_weights(results):
    ours, torch = results
    assert [step for step, _ in ours["val_losses"]] == [step for step, _ in torch["val_losses"]] == [4, 9, 11]
    assert ours["first_loss"] == pytest.approx(torch["first_loss"], rel=1e-6)
    # fp32: other batches, weights or rates would change the third digit; rounding changes the sixth
    assert ours["losses"] == pytest.approx(torch["losses"], rel=2e-5)
    for (_, mine), (_, theirs) in zip(ours["val_losses"], torch["val_losses"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    assert ours["final_loss"] < ours["first_loss"] - 0.5 and torch["largest_val_difference"] < 2e-4


def test_a_graph_is_captured_without_changing_the_run():
    """capture() runs steps: start_again() must undo them. A CPU has no graphs, so update() stands for capture()."""
    config = real_run.model_config(RECIPE, 50)
    run = torch_real_run.RealRun(config, 2, 16, seed=0, device="cpu", precision="fp32", compiled=False)
    batch = [run.steps.upload(*torch_real_run.int64(ids)) for ids in Windows(range(50), 16).batch(0, 2)]
    first = [float(run.steps.update(*batch)) for _ in range(3)]
    run.start_again()
    assert [float(run.steps.update(*batch)) for _ in range(3)] == first and first[0] != first[1]


def test_the_table_of_a_run_shows_the_differences(results):
    made_up = json.loads(json.dumps(results))
    made_up[1] |= {"difference": -0.00123, "val_difference": 0.0021, "largest_val_difference": 0.01}
    record = {"results": summarised(made_up), "hardware": {"gpu": "NVIDIA H200"}, "commit": ""}
    ours, torch = TABLES["gpu-real-run"].cells([record])
    assert ours[""].startswith("ours, 0.1 M parameters") and torch["training loss, last 5 steps"]
    assert (ours["ours minus PyTorch"], torch["ours minus PyTorch"]) == ("", "-0.0012")
    assert (torch["ours minus PyTorch, validation"], torch["largest distance of a validation"]) == ("+0.0021", "0.0100")
    assert float(ours["ms per step"]) > 0


def test_the_curves_of_a_run_are_training_and_validation_of_each_program(results):
    curves = real_run.curves_of(results)
    assert [curve.label for curve in curves] == [
        "ours, training", "ours, validation", "torch eager, training", "torch eager, validation",
    ]  # fmt: skip
    assert [curve.steps for curve in curves[:2]] == [[5.0, 15.0], (4, 9, 11)]


def test_a_run_asks_for_programs_that_it_can_reset(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["real_run", "--peers", "overhead"])
    with pytest.raises(UserError, match="--peers"):
        real_run.main()
