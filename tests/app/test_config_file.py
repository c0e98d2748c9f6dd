"""--config FILE.toml gives settings, flags override them, and a run saves its settings in such a file."""

import json
import re
import tomllib

import pytest

from gpt2core.app import cli
from gpt2core.app.config_file import toml, with_config_file
from gpt2core.app.settings import InferenceSettings, TrainSettings
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
    ("batch_size = '4'", "`batch_size='4'` must be a whole number"),
    ("batch_size = true", "`batch_size=True` must be a whole number"),
    ("batch_size = 0", "`batch_size=0` must be at least 1"),
    ("steps = [1]", "`steps=[1]` must be a whole number"),
    ("precision = 'fp8'", "`precision=fp8` is unknown: choose from fp32, tf32, bf16, fp16"),
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
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not a TOML file"):
        with_config_file(TrainSettings(config=tmp_path / "binary"))


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
