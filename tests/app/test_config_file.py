"""--config FILE.toml gives settings, flags override them, and a run saves its settings in such a file."""

import json
import os
import re
import tomllib

import pytest

from gpt2core.app import cli
from gpt2core.app.settings.config_file import toml, with_config_file
from gpt2core.app.settings.definitions import InferenceSettings, TrainSettings
from gpt2core.errors import ConfigError
from tests.support.training import NumpyBackend


def settings_of(tmp_path, text, kind=TrainSettings, **given):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return with_config_file(kind(config=path, **given))


def test_a_file_gives_settings_in_any_tables_and_flags_override_them(tmp_path):
    text = """batch-size = 4\nlr = 1\ndata = "a.txt"\n[recipe]\nsteps = 3\n[execution.cpu]\nshuffle = true\n"""
    got = settings_of(tmp_path, text, steps=5)
    assert (got.batch_size, got.lr, str(got.data), got.steps, got.shuffle) == (4, 1, "a.txt", 5, True)
    assert settings_of(tmp_path, "top_k = 40", InferenceSettings).top_k == 40
    assert TrainSettings() == with_config_file(TrainSettings())


@pytest.mark.parametrize("text, message", [
    ("bath_size = 4", "bath_size is not a setting: did you mean batch_size?"),
    ("zzzz = 4", "zzzz is not a setting (--help lists them)"),
    ("batch_size = '4'", "batch_size: `batch_size='4'` must be a whole number"),
    ("batch-size = true", "batch-size: `batch_size=True` must be a whole number"),
    ("batch_size = 0", "batch_size: `batch_size=0` must be at least 1"),
    ("steps = [1]", "steps: `steps=[1]` must be a whole number"),
    ("precision = 'fp8'", "precision: `precision=fp8` is unknown: choose from fp32, tf32, bf16, fp16"),
    (f"steps = {'9' * 5000}", "it is not a TOML file: Exceeds the limit"),
    (f"lr = {'9' * 400}", "lr: int too large to convert to float"),
    ('data = "a\\u0000b"', "data: 'a\\x00b' has a NUL byte"),
    ('tokenizer = ""', "tokenizer: it is empty: give a path, or omit the flag"),
    (f"steps = {'[' * 3000}", "it is not a TOML file: "),
    ("batch_size = 4\n[recipe]\nbatch-size = 8", "batch-size is there twice: remove one of the lines"),
    ("out = 'here'", "out is for one call of the command: give it as a flag"),
    ("steps 4", "it is not a TOML file: Expected '=' after a key"),
])  # fmt: skip
def test_a_mistake_in_a_file_is_one_error_with_its_name(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(f"--config {tmp_path / 'run.toml'}: {message}")):
        settings_of(tmp_path, text)


def test_a_file_that_cannot_be_read_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"--config {tmp_path}: Is a directory")):
        with_config_file(TrainSettings(config=tmp_path))
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "pipe", "is a named pipe"), ("/dev/zero", "is a device")):
        with pytest.raises(ConfigError, match=re.escape(f"--config {path}: {words}, not a regular file")):
            with_config_file(TrainSettings(config=path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not a TOML file"):
        with_config_file(TrainSettings(config=tmp_path / "binary"))


def test_a_flag_overrides_the_setting_that_it_excludes(tmp_path):
    assert settings_of(tmp_path, "steps = 5", epochs=2).steps is None
    assert settings_of(tmp_path, "epochs = 5", steps=2).epochs is None
    assert settings_of(tmp_path, "\ufeffsteps = 5").steps == 5  # after a byte order mark


@pytest.mark.parametrize("value", [1e-8, 3e-4, 1e16, float("inf"), 7, True, False, 'a "b"\\ \u00e9 \n\t'])
def test_a_value_is_read_as_it_was_written(value):
    assert tomllib.loads(f"x = {toml(value)}") == {"x": value}


def test_a_run_repeats_with_its_own_file(command, corpus, tmp_path):
    def train(name, *flags):
        flags = (*flags, "--sample", 0, "--log", tmp_path / f"{name}.jsonl", "--out", tmp_path / name)
        done = command(cli.train, *flags, backend=NumpyBackend)
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        return [(row["loss"], row["grad_norm"]) for row in rows], (tmp_path / name / "settings.toml").read_text()

    flags = (
        "--preset",
        "nano",
        "--data",
        corpus,
        "--epochs",
        1,
        "--batch-size",
        64,
        "--lr",
        1e-2,
        "--clip",
        0.5,
        "--shuffle",
        "--seed",
        3,
    )
    want, text = train("first", *flags)
    got, again = train("second", "--config", tmp_path / "first" / "settings.toml")
    assert got == want and again == text and "epochs" not in text
    rows, changed = train("third", "--config", tmp_path / "first" / "settings.toml", "--seed", 4)
    assert rows != want and changed == text.replace("seed = 3", "seed = 4")


def test_the_file_of_a_resumed_run_keeps_what_no_checkpoint_has(command, corpus, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    flags = ("--preset", "nano", "--data", corpus, "--sample", 0, "--threads", 1)
    first = ("--steps", 1, "--n-layer", 3, "--positions", "rotary", "--tokenizer", "byte", "--out", run)
    assert command(cli.train, *flags, *first, backend=NumpyBackend).code == 0
    done = command(cli.train, "--resume", run, "--out", run, "--steps", 2, "--sample", 0, backend=NumpyBackend)
    assert done.code == 0, done.err
    values = tomllib.loads((run / "settings.toml").read_text())
    wanted = dict(n_layer=3, positions="rotary", tokenizer="byte", steps=2, preset="nano", sample=0, threads=1)
    assert wanted.items() <= values.items()
    other.mkdir()
    (other / "settings.toml").write_text("steps = 1\n")
    done = command(cli.train, *flags, "--steps", 1, "--out", other, backend=NumpyBackend)
    assert done.code == 0 and "settings.toml is not of a run, and is not replaced" in done.err
    assert (other / "settings.toml").read_text() == "steps = 1\n"
