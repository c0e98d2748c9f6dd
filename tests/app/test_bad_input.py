"""Errors that need a fault, not only a command: damaged files, full disks, divergence. One line, and no file changed.

The misuses that are only a command are in the tables of tests/app/misuse/.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt2core.app.checkpoints import safetensors_file
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.app.checkpoints.safetensors_file import read_safetensors, write_safetensors
from gpt2core.app.output.run_log import RunLog
from gpt2core.engine.fast_trainer import FastStep as Step
from gpt2core.errors import ConfigError
from tests.support.checkpoints import edit_json
from tests.support.misuse_places import fill, snapshot
from tests.support.unsaved import unsaved

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "stage0_serial"
FULL = Path("/dev/full")  # every write fails with "No space left on device"


@pytest.fixture(scope="module")
def home(tmp_path_factory, corpus):
    return fill(tmp_path_factory.mktemp("home"), corpus)


@pytest.fixture
def directory(home, tmp_path):
    """A copy of `home` for one test."""
    return Path(shutil.copytree(home, tmp_path / "home", symlinks=True))


def script(name, *argv, **options):
    argv = unsaved(argv) if name == "train_gpt2.py" else argv
    argv = [sys.executable, name, *map(str, argv)]
    options = dict(cwd=STAGE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120) | options
    return subprocess.run(argv, **options)


def assert_one_clear_line(code, err, *words):
    assert code == 2, err
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err, f"{word!r} is not in: {err}"


# -- damaged checkpoints -----------------------------------------------------------------------------------------------


def state(**changes):
    return lambda path: edit_json(path, **changes)


def argument(**changes):
    def change(path):
        edit_json(path, arguments=json.loads(path.read_text())["arguments"] | changes)

    return change


def config(**changes):
    return state(**changes)


def other_tensors(path):
    """Write the same names with another width."""
    write_safetensors(path, {name: array[..., :-2] for name, array in read_safetensors(path)[0].items()})


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


def noise(path):
    path.write_bytes(np.random.default_rng(0).bytes(500))


CONFIG, MODEL, OPTIMIZER = "config.json", "model.safetensors", "optimizer.safetensors"
STATE, TOKENIZER = "state.json", "tokenizer.json"
BOTH, RESUME, INFER = ("resume", "infer"), ("resume",), ("infer",)
BROKEN = [
    # file, damage, commands that read the file, words of the error line
    (CONFIG, Path.unlink, BOTH, CONFIG),
    (MODEL, Path.unlink, BOTH, MODEL),
    (OPTIMIZER, Path.unlink, RESUME, "no such file, so no run can be resumed"),
    (STATE, Path.unlink, RESUME, STATE),
    (TOKENIZER, Path.unlink, INFER, "has no tokenizer.json"),
    (CONFIG, cut, BOTH, "truncated or corrupted"),
    (MODEL, cut, BOTH, "truncated or corrupted"),
    (OPTIMIZER, cut, RESUME, "truncated or corrupted"),
    (STATE, cut, RESUME, "truncated or corrupted"),
    (TOKENIZER, cut, BOTH, TOKENIZER),
    (CONFIG, noise, BOTH, "truncated or corrupted"),
    (MODEL, noise, BOTH, "truncated or corrupted"),
    (OPTIMIZER, noise, RESUME, "truncated or corrupted"),
    (STATE, noise, RESUME, "truncated or corrupted"),
    (TOKENIZER, noise, BOTH, TOKENIZER),
    (MODEL, other_tensors, BOTH, "wrong shape"),
    (OPTIMIZER, other_tensors, RESUME, "wrong shape"),
    (CONFIG, config(n_embd=64), BOTH, "wrong shape"),
    (CONFIG, config(n_layer=3), BOTH, "missing"),
    (CONFIG, config(n_head=5), BOTH, "n_embd 32 is not divisible by n_head 5"),
    (CONFIG, config(n_embd="wide"), BOTH, "wide"),
    (CONFIG, config(model_type="llama"), BOTH, "llama"),
    (STATE, state(step="four"), RESUME, "'step'"),
    (STATE, state(step=-4), RESUME, "'step'"),
    (STATE, state(position=None), RESUME, "'position'"),
    (STATE, state(position=3), RESUME, "3 training sequences in 4 steps are not possible"),
    (STATE, state(position=4 << 31), RESUME, "8589934592 training sequences in 4 steps are not possible"),
    (STATE, state(step=1 << 31, position=1 << 31), RESUME, "in 2147483648 steps are not possible"),
    (STATE, state(corpus=3), RESUME, "was trained on 3"),
    (STATE, state(arguments=[1]), RESUME, "arguments is [1]"),
    (STATE, argument(batch_size="four"), RESUME, "batch_size is 'four'"),
    (STATE, argument(lr=[3e-4]), RESUME, "lr is [0.0003]"),
    (STATE, argument(preset="gigantic"), RESUME, "preset is 'gigantic'"),
    (STATE, argument(data=7), RESUME, "data is 7"),
]


@pytest.mark.parametrize(
    "file, damage, words, which",
    [(file, damage, words, which) for file, damage, commands, words in BROKEN for which in commands],
)
def test_a_damaged_checkpoint_is_named_and_not_changed(train, infer, directory, file, damage, words, which):
    run = directory / "run"
    damage(run / "step-00000004" / file)
    before = snapshot(run)
    if which == "resume":
        result = train("--resume", run, "--out", run, "--steps", 6)
    else:
        result = infer("--weights", run, "--prompt", "the model", "--max-new-tokens", 2)
    assert_one_clear_line(result.code, result.err, words, str(run))
    assert snapshot(run) == before


def test_weights_whose_corpus_is_missing_need_a_prompt(infer, home, tmp_path):
    shutil.copytree(home / "run" / "latest", tmp_path / "weights")
    argument(data=str(tmp_path / "gone.txt"))(tmp_path / "weights" / "state.json")
    result = infer("--weights", tmp_path / "weights", "--max-new-tokens", "2")
    assert_one_clear_line(result.code, result.err, "dummy.txt cannot be the prompt of these weights")


# -- errors during the run --------------------------------------------------------------------------------------------


def has_finite_parameters_of(run, step):
    loaded = load_checkpoint(run, with_optimizer=True)
    return loaded.state["step"] == step and all(np.isfinite(array).all() for array in loaded.parameters.values())


def test_a_loss_that_becomes_nan_stops_at_its_step(train, directory):
    log = directory / "log.jsonl"
    flags = ("--preset", "nano", "--data", directory / "corpus.txt", "--steps", 5, "--lr", 1e30, "--log", log)
    result = train(*flags)
    assert_one_clear_line(result.code, result.err, "step 1: the loss is nan", "--lr (now 1e+30)")
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0]


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_that_diverges_keeps_its_last_good_checkpoint(train, directory, every):
    run = directory / "run"
    before = snapshot(run)
    flags = ("--resume", run, "--out", run, "--steps", 9, "--lr", 1e30, "--checkpoint-every", every)
    result = train(*flags)
    words = "step 4: the norm of the parameters" if every else "step 5: the loss"
    assert_one_clear_line(result.code, result.err, words)
    assert snapshot(run) == before and has_finite_parameters_of(run, 4)


def test_parameters_that_diverge_in_the_last_step_are_not_saved(train, directory):
    run = directory / "run"
    result = train("--resume", run, "--out", run, "--steps", 5, "--lr", 1e30)
    assert_one_clear_line(result.code, result.err, "step 4: the norm of the parameters")
    assert has_finite_parameters_of(run, 4)


def test_a_validation_loss_that_is_nan_stops_too(train, directory):
    flags = ("--preset", "nano", "--data", directory / "corpus.txt", "--val-fraction", 0.2, "--steps", 1)
    result = train(*flags, "--lr", 1e30)
    assert_one_clear_line(result.code, result.err, "step 0: the validation loss is nan")


def test_warnings_of_a_diverging_run_do_not_reach_standard_error(directory):
    flags = ("--preset", "nano", "--data", directory / "corpus.txt", "--steps", 5, "--lr", 1e30, "--threads", 2)
    done = script("train_gpt2.py", *flags)
    assert_one_clear_line(done.returncode, done.stderr, "step 1: the loss is nan")


def test_a_full_disk_during_a_save_keeps_the_earlier_checkpoints(train, directory, monkeypatch):
    run, original, saved = directory / "run", safetensors_file.write_hashed, []

    def write_hashed(file, digest, data):
        saved.append(file.name)
        if len({*saved}) > 3:  # weights and moments of step 5, then a file of step 6
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, digest, data)

    monkeypatch.setattr(safetensors_file, "write_hashed", write_hashed)
    flags = ("--resume", run, "--out", run, "--steps", 9, "--checkpoint-every", 1)
    result = train(*flags)
    assert_one_clear_line(result.code, result.err, "step-00000006", "No space left on device", "are unchanged")
    assert has_finite_parameters_of(run, 5) and has_finite_parameters_of(run / "step-00000004", 4)
    assert {path.name for path in run.glob("step-*")} == {"step-00000004", "step-00000005"}
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_a_loss_that_is_nan_with_epsilon_0_names_the_flag(train, directory):
    result = train("--preset", "nano", "--data", directory / "corpus.txt", "--steps", 5, "--eps", 0)
    assert_one_clear_line(result.code, result.err, "step 1: the loss is nan", "raise --eps (now 0)")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_the_log_is_one_line(train, directory):
    run = directory / "run"
    result = train("--resume", run, "--steps", 6, "--sample", 0, "--log", FULL)
    assert_one_clear_line(result.code, result.err, "/dev/full: cannot be written", "No space")
    assert has_finite_parameters_of(run, 4)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("flag", ["--plot", "--trace"])
def test_a_full_disk_under_the_plot_or_the_trace_is_a_note_and_the_run_is_complete(train, directory, flag):
    run = directory / "run"
    result = train("--resume", run, "--out", run, "--steps", 14, "--sample", 0, flag, FULL)
    assert (result.code, result.err.count("\n")) == (0, 1)
    assert (
        re.match(f"note: ({flag}|there is no trace:) /dev/full: cannot be written", result.err)
        and "No space" in result.err
    )
    assert "trained 10 steps in " in result.out and has_finite_parameters_of(run, 14)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
def test_a_full_disk_under_the_log_loses_no_step(train, directory):
    run = directory / "run"
    result = train("--resume", run, "--out", run, "--steps", 60, "--sample", 0, "--log", FULL)
    steps = load_checkpoint(run, with_optimizer=True).state["step"]
    assert 4 < steps < 60 and has_finite_parameters_of(run, steps)
    saved = f"the {steps} steps trained so far are saved: continue with --resume {run} --out {run}"
    assert_one_clear_line(result.code, result.err, "/dev/full: cannot be written", f"at step {steps - 2}", saved)


def test_a_log_on_a_full_disk_ends_with_a_complete_line(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", None, 1, 0, 3)
    log(Step(0, 1.5, 1e-3, 2.0, 10.0, 0.1), None, None)
    before = (tmp_path / "log.jsonl").read_text()

    class Full:
        name = tmp_path / "log.jsonl"

        def write(self, text):
            with open(self.name, "a") as file:
                file.write(text[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    log.file = Full()
    with pytest.raises(ConfigError, match="cannot be written .No space left on device. at step 1: free some space"):
        log(Step(1, 1.4, 1e-3, 2.0, 10.0, 0.1), None, None)
    log(Step(2, 1.3, 1e-3, 2.0, 10.0, 0.1), None, None)  # the error is raised only once
    log.close()
    assert (tmp_path / "log.jsonl").read_text() == before


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("name", ["train_gpt2.py", "inference.py"])
def test_a_full_disk_under_the_output_is_one_line(home, name):
    flags = {
        "train_gpt2.py": ["--preset", "nano", "--data", home / "corpus.txt", "--steps", 2],
        "inference.py": ["--weights", home / "run", "--prompt", "the model"],
    }[name]
    with FULL.open("w") as full:
        done = script(name, *flags, stdout=full)
    assert_one_clear_line(done.returncode, done.stderr, "No space left on device")


def test_too_little_memory_is_one_line(train, directory, monkeypatch):
    def no_memory(*args, **options):
        raise np._core._exceptions._ArrayMemoryError((1 << 40,), np.dtype(np.float32))

    monkeypatch.setattr("gpt2core.parallel.parallel_trainer.initial_parameters", no_memory)
    result = train("--preset", "nano", "--data", directory / "corpus.txt")
    assert_one_clear_line(result.code, result.err, "out of memory", "Unable to allocate", "--batch-size")


@pytest.mark.parametrize(
    "name, flags, words",
    [("train_gpt2.py", ["--lr", "nan"], "--lr nan"), ("inference.py", ["--prompt", b"\xff"], "UTF-8: byte 0 (0xFF)")],
)
def test_a_new_interpreter_prints_one_line_too(name, flags, words):
    done = subprocess.run([sys.executable, name, *flags], cwd=STAGE, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    assert_one_clear_line(done.returncode, done.stderr, words)
