"""The parts of `make parity`: differences of arrays, and an examination that finds nothing in a correct run."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.harness import training_runs
from benchmarks.parity import rungs
from benchmarks.parity.checks import ORACLES, Difference, difference, place_of
from benchmarks.parity.examine import race
from benchmarks.parity.kernels import first_difference
from benchmarks.parity.rungs import MODEL, examined, trainer_maker
from gpt2core.app.cli import train_parser
from gpt2core.app.output.output_files import FIELDS
from gpt2core.communicator import Solo
from gpt2core.parallel.thread_communicator import ThreadCommunicator
from gpt2core.tracing.hooks import KERNELS, Hooks
from stage0_serial.cpu_runtime import CpuRuntime
from stage0_serial.numpy_backend import NumpyBackend


def test_a_difference_names_the_largest_error_and_its_place():
    got, want = np.ones((2, 3)), np.ones((2, 3))
    assert difference(got, want, 1e-5) is None
    got[1, 2] = 1.5
    found = difference(got, want, 1e-5, step=4, place=place_of("h.3.attn", "attention_backward"), tensor="dqkv")
    assert str(found) == (
        "step 4, layer 3, attn, attention backward, dqkv: relative error 0.2 (tolerance 1e-05), "
        "element (1, 2): 1.5, expected 1"
    )
    assert difference(got, want, 0.3) is None and difference(got, want, 1e-5, least=1e6) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_a_difference(value):
    got = np.zeros(5, np.float32)
    got[3] = value
    assert difference(got, np.zeros(5), 1e9, least=1e9).element == (3,)


def test_a_result_of_another_size_is_a_difference():
    assert "its shape is (3,) instead of (4,)" in str(difference(np.ones(3), np.ones(4), 1.0))


def test_equal_bits_are_needed_if_the_comparison_is_exact():
    want = np.ones(3, np.float32)
    assert difference(want.copy(), want, 0, exact=True) is None
    found = difference(np.nextafter(want, 2, dtype=np.float32), want, 1e-5, exact=True)
    assert isinstance(found, Difference) and found.tolerance == 0


def test_each_kernel_has_an_oracle_and_is_compared_with_it():
    """attention_cached generates text, which other tests compare with the whole window."""
    backend, called, hooks = NumpyBackend(), set(), Hooks()

    def around(name, kernel, arguments, options):
        called.add(name)
        return kernel(*arguments, **options)

    hooks.around_kernels(backend, around)  # first_difference() puts its own hooks around these
    assert first_difference(backend) is None
    assert called == ORACLES.keys() == set(KERNELS) - {"attention_cached"}


@pytest.mark.parametrize(
    "ranks, how",
    [(1, {}), (2, dict(dp="bucket", zero=1)), (2, dict(dp="overlap", zero=1, zero_gather="forward")), (2, dict(tp=2))],
    ids=str,
)
def test_an_examination_finds_nothing_in_a_correct_run(ranks, how):
    assert examined(trainer_maker(NumpyBackend, **how), MODEL, 2, ranks, exact="tp" not in how) is None


def test_an_examination_removes_its_hooks():
    trainers = []

    def make(world):
        trainers.append(trainer_maker(NumpyBackend)(world))
        return trainers[-1]

    assert examined(make, MODEL, 1) is None
    assert "linear_forward" not in vars(trainers[0].backend) and "norm_and_factor" not in vars(trainers[0].optimizer)


def test_a_wrong_collective_is_named_with_the_parameters_that_it_sends(monkeypatch):
    original = ThreadCommunicator.all_reduce_start

    def wrong(self, x, op="sum", out=None):
        handle = original(self, x, op, out)
        handle.wait()
        if op == "sum" and out is not None and out.size > 1000:
            out[7] += 1
        return handle

    monkeypatch.setattr(ThreadCommunicator, "all_reduce_start", wrong)
    found = str(examined(trainer_maker(NumpyBackend, dp="naive"), MODEL, 1, 2))
    assert "step 0, all_reduce of the data-parallel group, call 0, gradients of lm_head.weight" in found
    assert "element (7,)" in found


@pytest.mark.parametrize("rung", [rungs.stage_1_curve, rungs.stage_2_curve, rungs.stage_3_curve])
def test_a_rung_of_scripts_passes_with_equal_logs_and_fails_at_a_loss_that_differs(rung, monkeypatch, tmp_path):
    if rung is not rungs.stage_1_curve:
        pytest.importorskip("triton")
    runs, wrong = [], []

    def run_to_end(name, command, blas_threads, timeout, cwd, environment):
        args = train_parser().parse_args(command[command.index("-m") + 2 :])
        runs.append(args)
        assert Path(cwd) == tmp_path  # a student's folder has the code that is compared
        rows = [dict.fromkeys(FIELDS, 1.0) | {"step": step} for step in range(args.steps)]
        rows[-1]["loss"] += 0.5 * (len(runs) - 1 in wrong)
        Path(args.log).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ""

    monkeypatch.setattr(training_runs, "run_to_end", run_to_end)
    monkeypatch.chdir(tmp_path)
    for finder in ("examined", "gradients_of_stage_2"):
        monkeypatch.setattr(rungs, finder, lambda *_: SimpleNamespace(found=None))
    options = SimpleNamespace(full=False, timeout=60, steps=None)
    assert rung(options).passed and len(runs) > 1 and all(args.steps == runs[0].steps for args in runs)
    wrong.append(2 * len(runs) - 1)  # the last run of the next call
    outcome = rung(options)
    assert not outcome.passed and f"step {runs[0].steps - 1}" in outcome.measured, outcome


def test_a_missing_package_is_the_reason_of_a_rung():
    rung = rungs.Rung("name", "compared", "tolerance", None, ("numpy", "no_such_package"))
    assert rung.reason() == "needs no_such_package: pip install no_such_package"
    assert rungs.missing("numpy") is None


def test_a_fault_that_waiting_for_kernels_hides_is_found_in_the_second_step(monkeypatch):
    state = {"waits": 0, "seen": 0}

    def synchronize(runtime):
        state["waits"] += 1

    def late(backend, *arguments, **options):  # wrong if the host has not waited since the last call
        dx, dw, db = linear_backward(backend, *arguments, **options)

        def late_dw(out):
            array = dw(out)
            if state["waits"] == state["seen"]:
                array *= 2
            state["seen"] = state["waits"]
            return array

        return dx, late_dw, db

    linear_backward = NumpyBackend.linear_backward
    monkeypatch.setattr(CpuRuntime, "synchronize", synchronize, raising=False)
    arguments = trainer_maker(NumpyBackend), rungs.windows_of(MODEL), 1e-3, Solo(), "backward"
    assert race(*arguments) is None
    monkeypatch.setattr(NumpyBackend, "linear_backward", late)
    found = race(*arguments)
    assert "step 1, layer " in str(found) and "an event is missing" in str(found)
