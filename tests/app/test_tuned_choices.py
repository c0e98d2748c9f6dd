"""Choices made by timing: equal on all ranks, saved in state.json, and used again by a resumed run."""

import json

import numpy as np
import pytest

from gpt2core.app import cli
from gpt2core.architecture import GPT2Config
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.training_loop import read_batch
from stage0_serial.cpu_runtime import CpuRuntime
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.checkpoints import edit_json

CONFIG = GPT2Config(vocab_size=36, block_size=8, n_layer=1, n_head=2, n_embd=8)
NANO = ("--preset", "nano", "--steps", 2, "--sample", 0, "--threads", 1)
HERE, THERE = "Fake GPU, cublasLt 1, Triton 3.6.0", "Old GPU, cublasLt 1, Triton 3.6.0"


class ChoosingRuntime(CpuRuntime):
    """A runtime that starts with the choices `known`; the backend makes the missing ones in its first attention."""

    tuned_for, known, tuned = HERE, {}, None

    def __init__(self):
        super().__init__()
        self.tuned, self.loaded, self.retuned = dict(self.known), [], False

    def load_tuned(self, tuned, final=False):
        self.loaded.append((dict(tuned), final))
        self.tuned = self.tuned | tuned if final else dict(tuned)

    def retune(self):
        self.tuned, self.retuned = {}, True


class Choosing(NumpyBackend):
    """A NumPy backend with a ChoosingRuntime; `made` lists the runtimes of all its instances."""

    made = []

    def __init__(self, precision="fp32", deterministic=False, mark=0):
        super().__init__(precision)
        self.mark, self.runtime = mark, ChoosingRuntime()
        self.made.append(self.runtime)

    def attention_forward(self, qkv, n_head):
        for what in ("forward", "backward"):
            self.runtime.tuned.setdefault(what, f"tile {self.mark}")
        return super().attention_forward(qkv, n_head)


@pytest.fixture
def choosing(monkeypatch):
    monkeypatch.setattr(Choosing, "made", [])
    monkeypatch.setattr(ChoosingRuntime, "known", {})
    return Choosing


def steps(comm, known):
    """(the calls of load_tuned() in three steps, the choices afterwards, those that the trainer kept) of one rank."""
    backend = Choosing(mark=comm.rank)
    backend.runtime.tuned = dict(known[comm.rank])
    trainer = Trainer(CONFIG, [backend], batch_size=4, seq_len=8, micro_batches=4, world=comm)
    windows = Windows(np.random.default_rng(0).integers(0, 36, 200), 8)
    for _ in range(3):
        trainer.step(read_batch(trainer, windows), 1e-3)
    return backend.runtime.loaded, backend.runtime.tuned, trainer.tuned


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_choose_as_the_root_does_from_the_start_and_after_the_first_step(ranks):
    # the root has one choice of an earlier run, the other ranks another in their caches; each rank times the rest
    known = [{"forward": "tile of the root"}, *({"backward": f"cached {rank}"} for rank in range(1, ranks))]
    for adopted, choices, recorded in run_ranks(ranks, steps, known):
        shared = {"forward": "tile of the root", "backward": "tile 0"}
        assert adopted == [({"forward": "tile of the root"}, False), (shared, True)]
        assert choices == recorded == shared


def state_of(path):
    return json.loads((path / "latest" / "state.json").read_text())


def test_a_checkpoint_keeps_the_choices_and_their_device(command, choosing, corpus, tmp_path):
    flags = (*NANO, "--data", corpus, "--out", tmp_path / "run")
    assert command(cli.train, *flags, backend=choosing).code == 0
    state = state_of(tmp_path / "run")
    assert (state["choices"], state["chosen_for"]) == ({"forward": "tile 0", "backward": "tile 0"}, HERE)

    # a resumed run uses these choices, whatever this machine's own cache has
    resumed = ("--resume", tmp_path / "run", "--steps", 3, "--sample", 0, "--threads", 1)
    ChoosingRuntime.known = {"forward": "of the cache"}  # the fixture resets it
    result = command(cli.train, *resumed, backend=choosing)
    assert result.code == 0 and "chosen by timing" not in result.out
    assert (state["choices"], False) in choosing.made[-1].loaded and not choosing.made[-1].retuned
    assert choosing.made[-1].tuned == state["choices"]

    result = command(cli.train, *resumed, "--autotune", backend=choosing)
    assert result.code == 0 and choosing.made[-1].retuned and (state["choices"], False) not in choosing.made[-1].loaded


def test_choices_of_another_device_are_timed_again_with_a_note(command, choosing, corpus, tmp_path, monkeypatch):
    command(cli.train, *NANO, "--data", corpus, "--out", tmp_path / "run", backend=choosing)
    monkeypatch.setattr(ChoosingRuntime, "tuned_for", THERE)
    resumed = ("--resume", tmp_path / "run", "--steps", 3, "--sample", 0, "--threads", 1)
    result = command(cli.train, *resumed, backend=choosing)
    note = f"note: the checkpoint's kernels were chosen by timing on {HERE}: on {THERE} they are timed again"
    assert result.code == 0 and result.words.count(note) == 1 and result.out.count("note: ") == 1
    assert choosing.made[-1].loaded[0] == ({}, False)
    for backend in (NumpyBackend, choosing):  # without timing in one of the two runs there is no note
        monkeypatch.setattr(ChoosingRuntime, "tuned_for", None)
        assert "timing" not in command(cli.train, *resumed, backend=backend).out


@pytest.mark.parametrize("choices", [[], "text", {"forward": 3}, {"forward": None}])
def test_a_checkpoint_with_invalid_choices_is_refused(command, choosing, corpus, tmp_path, choices):
    command(cli.train, *NANO, "--data", corpus, "--out", tmp_path / "run", backend=choosing)
    edit_json(tmp_path / "run" / "latest" / "state.json", choices=choices)
    result = command(cli.train, "--resume", tmp_path / "run", "--steps", 3, "--threads", 1, backend=choosing)
    assert result.code == 2 and result.err.startswith("error: ") and result.err.count("\n") == 1
    assert "state.json: choices is" in result.err and "cannot be resumed" in result.err


def test_a_stage_that_times_nothing_refuses_the_flag(train, corpus):
    result = train(*NANO, "--data", corpus, "--autotune")
    assert (result.code, result.out) == (2, "")
    assert result.err == "error: --autotune: numpy tunes nothing; omit the flag\n"
