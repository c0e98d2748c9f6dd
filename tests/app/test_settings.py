"""Each setting is defined once, in app/settings/definitions.py, and its values are checked without a parser too."""

import ast
import functools
import re
from dataclasses import fields
from pathlib import Path

import pytest

import gpt2core
from gpt2core.app import cli
from gpt2core.app.settings.definitions import NAMES, InferenceSettings, TrainSettings, recipe, with_flags
from gpt2core.app.settings.final_values import resolve_flags
from gpt2core.app.settings.setting_fields import SAVED, defaults_of, flag, names_of
from gpt2core.errors import ConfigError
from gpt2core.presets import PRESETS

CORE = Path(gpt2core.__file__).parent
# Strings in gpt2core/app that are equal to the name of a setting, but are another name.
OTHER_NAMES = {
    ("data", "app/shipped.py"),  # a directory of the repository
    ("blas", "app/doctor.py"),  # a value of threadpoolctl
    ("lr", "app/output/output_files.py"),  # a key of the log
    ("save", "app/training/loop.py"),  # a pause between two steps
    ("sample", "app/training/loop.py"),  # another one
}
# It computes with the options of ParallelConfig, and its command has flags of its own with the same names.
PLANNER = ("app/plan.py", "app/planning/")


@functools.cache
def parsed(path):
    """(text, its strings without docstrings, the strings and the keys of calls dict(key=...)) of a Python file."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "dict"]
    messages = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    return text, "\n".join(messages), strings | {keyword.arg for call in calls for keyword in call.keywords}


def files_that_name(name):
    """The files of gpt2core in which a setting is named.

    A file names `zero_gather` if its text, comments and docstrings included, has --zero-gather or --no-zero-gather, or
    if it defines the setting. A file of gpt2core/app, where settings are read, also names it if a string of it is
    "zero_gather", if a call dict(zero_gather=...) is in it, or if a message has `zero_gather` between backquotes. Not
    counted: an attribute, such as config.zero_gather, because Python raises an error for a wrong one; and outside of
    app, which imports no settings, a parameter of this name, which a message shows between backquotes.
    """
    as_flag = re.compile(rf"(?<![\w-])--(no-)?{name.replace('_', '-')}(?![\w-])")
    quoted, definition = re.compile(rf"`{name}[=`]"), re.compile(rf"^    {name}: .*= setting\(", re.MULTILINE)
    for path in sorted(CORE.rglob("*.py")):
        file = path.relative_to(CORE).as_posix()
        if file.startswith(PLANNER):
            continue
        text, messages, strings = parsed(path)
        in_app = file.startswith("app/") and (name in strings - others_of(file) or quoted.search(messages))
        if in_app or as_flag.search(text) or definition.search(text):
            yield file


def others_of(file):
    return {name for name, other in OTHER_NAMES if other == file}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_setting_is_named_in_at_most_three_files(name):
    files = list(files_that_name(name))
    assert "app/settings/definitions.py" in files and len(files) <= 3


def test_the_other_names_are_still_there():
    assert [pair for pair in OTHER_NAMES if pair[0] not in parsed(CORE / pair[1])[2]] == []


@pytest.mark.parametrize(
    "settings, parser", [(TrainSettings, cli.train_parser), (InferenceSettings, cli.inference_parser)]
)
def test_every_setting_has_a_flag_and_an_omitted_one_is_none(settings, parser):
    flags = {option for action in parser()._actions for option in action.option_strings}
    assert {flag(each.name) for each in fields(settings)} | {"--help", "-h", "--version"} == {
        option for option in flags if not option.startswith("--no-") and option != "--micro-shards"
    }
    assert parser().parse_args([]) == settings() and set(vars(settings()).values()) == {None}


def test_settings_given_by_keyword_equal_those_of_a_command_line():
    words = "--preset tiny --steps 7 --lr 1 --no-graph --shuffle --out run --tp 2 --zero 1 --sample 0".split()
    given = dict(preset="tiny", steps=7, lr=1.0, graph=False, shuffle=True, out="run", tp=2, zero=1, sample=0)
    assert cli.train_parser().parse_args(words) == TrainSettings(**given)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(steps=-1), "`steps=-1` must not be negative"),
        (dict(threads=0), "`threads=0` must be at least 1"),
        (dict(steps=1 << 31), "`steps=2147483648` is too large: the largest value is 2147483647"),
        (dict(batch_size=0), "`batch_size=0` must be at least 1"),
        (dict(steps="7"), "`steps='7'` must be a whole number"),
        (dict(steps=True), "`steps=True` must be a whole number"),
        (dict(lr="high"), "`lr='high'` must be a number"),
        (dict(shuffle=1), "`shuffle=1` must be true or false"),
        (dict(preset="huge"), f"`preset=huge` is unknown: choose from {', '.join(PRESETS)}"),
        (dict(precision="fp8"), "`precision=fp8` is unknown: choose from fp32, tf32, bf16, fp16"),
        (dict(zero=4), "`zero=4` is unknown: choose from 0, 1, 2, 3"),
        (
            dict(resume="a", init_from="b"),
            "`resume` and `init_from` exclude each other: continue a run, or",
        ),
        (dict(val_data="a", val_fraction=0.5), "`val_data=a` and `val_fraction=0.5` exclude each other: give one"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_without_a_command_line(given, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        TrainSettings(**given)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("`batch_size=15` is odd: use `batch_size=14`", "--batch-size 15 is odd: use --batch-size 14"),
        ("raise `eps`, or `deterministic=False`", "raise --eps, or --no-deterministic"),
        ("`shuffle=True` in `out=a b`", "--shuffle in --out a b"),
        ("run `make train` in `data/`, `loss=3`", "run `make train` in `data/`, `loss=3`"),
    ],
)  # fmt: skip
def test_a_command_shows_the_names_in_a_message_as_flags(text, shown):
    assert with_flags(text) == shown


def test_a_checkpoint_has_the_settings_that_every_earlier_version_has_saved():
    names = (
        "steps batch_size lr schedule warmup weight_decay clip beta1 beta2 preset seed deterministic precision rounding"
    )
    names += " eps shuffle eval_every checkpoint_every keep log_every min_lr seq_len micro_batches data val_data"
    assert set(names_of(TrainSettings, kept=SAVED)) == {*names.split(), "val_fraction", "checkpoint_seconds", "dropout"}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_values_of_a_run_are_the_given_then_the_saved_then_those_of_the_preset(preset):
    settings, _ = resolve_flags(TrainSettings(preset=preset, keep=9), {"warmup": 3, "keep": 5}, deterministic=False)
    expected = recipe(preset) | dict(preset=preset, keep=9, warmup=3, deterministic=False, min_lr=settings.min_lr)
    assert vars(settings) == expected and settings.min_lr is not None


def test_no_default_is_out_of_range():
    for settings in (TrainSettings, InferenceSettings):
        assert settings(**defaults_of(settings))
