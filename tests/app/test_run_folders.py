"""Training without --out saves in a new directory, and inference without --weights continues with the newest one."""

import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpt2core.app.checkpoints import run_folders
from gpt2core.app.checkpoints.run_folders import ROOT, lock_new_run, runs_folder
from gpt2core.errors import CheckpointError
from tests.support.misuse_places import snapshot

PROMPT = ("--prompt", "the model", "--max-new-tokens", 5)


@pytest.fixture
def nano(train, corpus):
    """nano(*flags) -> Result of a run that saves by default."""
    return lambda *flags: train("--preset", "nano", "--data", corpus, "--steps", 2, "--sample", 0, "--save", *flags)


def test_each_run_has_a_directory_of_its_own_and_inference_takes_the_newest(nano, infer, runs):
    one = nano()
    assert one.words.endswith(f"saved in {runs / 'stage0-nano'}"), one.err
    before = snapshot(runs / "stage0-nano")
    assert nano("--seed", 1).words.endswith(f"saved in {runs / 'stage0-nano-2'}")
    assert snapshot(runs / "stage0-nano") == before
    result = infer(*PROMPT)
    assert result.err == f"weights: {runs / 'stage0-nano-2' / 'step-00000002'}\n"
    assert result.out == infer("--weights", runs / "stage0-nano-2", *PROMPT).out
    os.utime(runs / "stage0-nano" / "step-00000002")
    assert infer(*PROMPT).err == f"weights: {runs / 'stage0-nano' / 'step-00000002'}\n"


def test_a_run_can_be_resumed_from_its_default_directory(nano, train, runs):
    assert nano().code == 0
    result = train("--resume", runs / "stage0-nano", "--out", runs / "stage0-nano", "--steps", 3, "--sample", 0)
    assert result.code == 0 and (runs / "stage0-nano" / "step-00000003").is_dir()
    assert train("--resume", runs / "stage0-nano", "--steps", 4, "--sample", 0, "--save").code == 0
    assert (runs / "stage0-nano-2" / "step-00000004").is_dir()  # an older run is never changed without --out


def test_inference_takes_a_run_of_the_given_preset_or_shipped_weights(nano, train, infer, corpus, runs):
    assert nano().code == 0
    flags = ("--preset", "tiny", "--data", corpus, "--steps", 1, "--sample", 0, "--save")
    assert train(*flags).code == 0
    assert "stage0-tiny" in infer(*PROMPT).err
    assert "stage0-nano" in infer("--preset", "nano", *PROMPT).err
    assert infer("--preset", "book", *PROMPT).err.endswith("data/gpt2-book\n")
    result = infer("--preset", "gpt2", *PROMPT)
    assert (result.code, result.out) == (2, "") and "stage0 has no run of preset gpt2" in result.err


def test_without_a_run_inference_uses_the_shipped_weights(infer, runs):
    (runs / "stage0-nano").mkdir(parents=True)  # a run that has saved nothing yet
    (runs / "stage0-nano-2").write_text("a file")
    (runs / "stage1-nano").mkdir()
    result = infer(*PROMPT)
    assert (result.code, result.err.endswith("data/gpt2-paper\n"), result.err.count("\n")) == (0, True, 1)


def test_no_directory_remains_of_a_run_that_saves_nothing(nano, train, corpus, runs):
    assert train("--preset", "nano", "--data", corpus, "--steps", 1, "--no-save").code == 0
    assert train("--preset", "nano", "--data", corpus, "--dry-run").code == 0
    assert nano("--lr", 1e30).code == 2  # it diverges
    assert nano("--lr", "nan").code == 2
    assert not runs.exists() or not list(runs.iterdir())


def test_runs_that_start_together_get_different_directories(runs):
    with ThreadPoolExecutor(8) as pool:
        locks = list(pool.map(lambda _: lock_new_run("stage0", "nano"), range(8)))
    names = {lock.directory.name for lock in locks}
    assert names == {"stage0-nano", *(f"stage0-nano-{number}" for number in range(2, 9))}
    for lock in locks:
        with lock:
            pass
    assert not list(runs.iterdir())


def test_epochs_count_passes_over_the_training_tokens(train, corpus, tmp_path):
    words = ("--preset", "nano", "--data", corpus, "--batch-size", 8, "--sample", 0)
    result = train(*words, "--epochs", 2, "--out", tmp_path / "run")
    tokens = int(re.search(r"([\d,]+) tokens of", result.out)[1].replace(",", ""))
    steps = math.ceil(2 * math.ceil(tokens / 16) / 8)
    assert result.out.count("\nstep ") == steps and f"trained {steps} steps" in result.out
    again = train("--resume", tmp_path / "run", "--out", tmp_path / "run", "--epochs", 3, "--sample", 0)
    total = math.ceil(3 * math.ceil(tokens / 16) / 8)
    assert f"trained {total - steps} steps" in again.out and f"{total} in total" in again.out


def test_the_directory_is_that_of_the_repository_unless_it_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT / "stage1_mpi")
    assert runs_folder() == Path("../out")
    monkeypatch.chdir(tmp_path)
    assert runs_folder() == ROOT / "out"
    monkeypatch.setattr(run_folders, "INSTALLED", tmp_path)  # `pip install .` copies the data there
    assert runs_folder() == Path("out")
    monkeypatch.undo()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert runs_folder() == Path("out")


def test_a_directory_that_cannot_be_created_is_one_line(nano, runs):
    runs.write_text("a file")
    result = nano()
    assert result.code == 2 and result.err.count("\n") == 1
    assert "the directory of this run cannot be created (File exists): give another one with --out" in result.err
    with pytest.raises(CheckpointError, match="cannot be created"):
        lock_new_run("stage0", "nano")
