"""Predictions: units are read, nonsense is refused in one line, and each formula is near its measurement."""

import subprocess
import sys

import pytest

from exercises import predict
from exercises.catalog import ROOT
from exercises.checks import predictions
from gpt2core.app.planning.memory import host_terms
from gpt2core.errors import ConfigError
from gpt2core.parallel.mesh import Grid

ALL = [(stage, question) for stage, each in predictions.QUESTIONS.items() for question in each]
NUMBERS = 'parameters = "126k"\nmemory = "2 MiB"\ntokens = 2e4\n'


@pytest.mark.parametrize(
    "text, kind, value",
    [
        ("1.5 MB", "bytes", 1.5e6),
        ("1.5e6", "bytes", 1.5e6),
        ("1,500,000 bytes".removesuffix(" bytes"), "bytes", 1.5e6),
        ("2 mib", "bytes", 2 << 20),
        ("3K", "count", 3000),
        (" 126_208 ", "count", 126208),
        ("27.3%", "percent", 27.3),
        (".5 percent", "percent", 0.5),
        ("20k/s", "rate", 2e4),
    ],
)
def test_a_number_with_a_unit_is_read(text, kind, value):
    assert predict.parsed(text, kind) == value


@pytest.mark.parametrize("kind", predict.UNITS)
@pytest.mark.parametrize(
    "text", ["", "many", "-3", "nan", "inf", "1e999", "3 apples", "1..2", "0x10", "\x1b[31m5", "1 MB MB"]
)
def test_anything_else_is_refused_in_one_line_with_an_example(text, kind):
    with pytest.raises(ConfigError) as caught:
        predict.parsed(text, kind)
    assert "write for example" in str(caught.value) and str(caught.value).isprintable()


def test_a_unit_of_another_kind_is_refused():
    for text, kind in (("3 MB", "count"), ("3 %", "bytes"), ("3 k", "percent")):
        with pytest.raises(ConfigError):
            predict.parsed(text, kind)


def test_after_nonsense_the_question_is_asked_again(capsys):
    answers = iter(["many", "-1", "1.5 MB"])
    question = predictions.QUESTIONS[0][1]
    assert predict.asked(question, 2, lambda prompt: next(answers)) == 1.5e6
    assert capsys.readouterr().out.count("is not a number of this kind: write for example 1.5 MB") == 2


def test_the_end_of_the_input_is_one_error(capsys):
    def end(prompt):
        raise EOFError

    with pytest.raises(ConfigError, match="^memory has no prediction: type a number, or use --answers FILE$"):
        predict.asked(predictions.QUESTIONS[0][1], 2, end)


def test_the_questions_are_asked_before_anything_is_measured(monkeypatch, capsys):
    words = iter(["27 %", "27 %"])
    shards = predictions.Question("a", "first", "percent", lambda: ("1 + 1", 2.0), lambda: 4.0)
    monkeypatch.setattr(predict, "questions_of", lambda stage: (shards, shards))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(words))
    assert predict.command(["--stage", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["1. first", "2. first", ""]
    assert lines[3:10] == [
        "1. first", f"   predicted  {'27 %':>24}", "     +575.0 % to the measurement, +1250.0 % to the formula",
        f"   formula    {'2 %':>24}", "     1 + 1", "     -50.0 % to the measurement", f"   measured   {'4 %':>24}",
    ]  # fmt: skip


@pytest.mark.parametrize("stage, question", ALL, ids=lambda each: each.key if hasattr(each, "key") else None)
def test_a_formula_is_that_of_the_measurement(stage, question):
    if stage == 2:
        pytest.importorskip("triton")
    if question.key == "flash":
        pytest.skip("run by test_the_command_of_stage_2: it needs Triton's interpreter from the start")
    text, value = question.formula()
    measured = question.measure()
    assert "=" in text and 0 < value and 0 < measured
    if question.unit != "rate":
        assert value == pytest.approx(measured, rel=1e-12)
    assert (" N " in text) == ("padding" in question.text) == question.note.startswith("N = ")


def test_the_memory_of_a_rank_is_that_of_the_planner():
    for zero in (0, 1):
        layout = predictions.layout(predictions.RANKS if zero else 1, zero=zero)
        terms = host_terms(layout, Grid())
        planned = sum(terms[name] for name in ("parameters", "gradients", "moments"))
        assert predictions.measured_arrays(zero)() == planned


def run(*words, stdin=subprocess.DEVNULL):
    command = [sys.executable, "-m", "exercises.predict", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, stdin=stdin, capture_output=True, text=True, timeout=60)


def test_the_command_of_stage_2(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "answers.toml").write_text("attention = 60000\nflash = '1 KiB'\n")
    done = run("--stage", 2, "--answers", tmp_path / "answers.toml")
    assert (done.returncode, done.stderr) == (0, "") and "4*4*64^2" in done.stdout
    lines = [line.strip() for line in done.stdout.splitlines()]
    rows = [line for each, line in zip(lines, lines[1:], strict=False) if each.startswith("predicted")]
    assert rows == [f"{error} % to the measurement, {error} % to the formula" for error in ("-8.4", "+0.0")]


@pytest.mark.parametrize("value, text", [(999_999, "+0.0 %"), (1e6, "+0.0 %"), (990_000, "-1.0 %"), (0, "-100.0 %")])
def test_an_error_that_rounds_to_zero_has_no_minus(value, text):
    assert predict.error_of(value, 1e6, "formula") == f"{text} to the formula"


def test_without_a_terminal_the_questions_are_printed_and_the_error_names_the_flag():
    done = run("--stage", 0)
    want = "give the predictions with --answers FILE, keys: parameters, memory, tokens\n"
    assert done.stdout == "".join(f"{each.key}: {each.text}\n" for each in predictions.QUESTIONS[0])
    assert done.returncode == 2 and done.stderr.endswith(want) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text, message",
    [
        (NUMBERS.replace("126k", "many"), "'many' is not a number of this kind: write for example 126000"),
        (NUMBERS.replace("tokens", "token"), "tokens is missing: the file needs parameters, memory, tokens"),
        (NUMBERS + "speed = 1\n", "speed is no question of this stage: use parameters, memory, tokens"),
        (NUMBERS.replace("2e4", "[1]"), "'[1]' is not a number of this kind"),
        (NUMBERS.replace("2e4", "true"), "'True' is not a number of this kind"),
        ("parameters", "write lines such as key = 1.5e6"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_wrong_file_of_answers_is_one_line(tmp_path, text, message):
    path = tmp_path / "answers.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        predict.from_file(path, predictions.QUESTIONS[0])
    assert str(caught.value).startswith(f"--answers {path}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)
