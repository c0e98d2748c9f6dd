"""Predict numbers of a lesson, then measure them: `make predict STAGE=0`, or python -m exercises.predict --stage 0.

The command asks for all predictions before it shows a formula or a measurement.
"""

import importlib
import math
import os
import re
import sys
import textwrap
import tomllib

from exercises.commands import KINDS, main_of
from gpt2core.app.settings.flag_parser import Parser, to_path
from gpt2core.errors import ConfigError

PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
UNITS = {  # kind of a question: (the units that an answer may have, lower case, each with its factor; an example)
    "count": (PREFIXES, "126000, 126k or 1.26e5"),
    "bytes": (
        {f"{prefix}{unit}": factor for prefix, factor in PREFIXES.items() for unit in ("b", "")},
        "1.5 MB or 1.5e6",
    ),
    "percent": ({"": 1, "%": 1, "percent": 1}, "25 %"),
    "rate": (PREFIXES | {f"{prefix}/s": factor for prefix, factor in PREFIXES.items()}, "20000, 20k or 2e4"),
}
NUMBER = re.compile(r"\s*([0-9][0-9,_ ]*\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z%/]*)\s*", re.I)
LARGEST = 1e30
WIDTH = 80  # of a line, as of a usual terminal


def parsed(text, kind):
    """The number in `text`, such as "1.5 MB"; raises ConfigError, with an example, for anything else."""
    units, example = UNITS[kind]
    found = NUMBER.fullmatch(text)
    if not found or found[2].lower() not in units:
        raise ConfigError(f"{text.strip()!r:.60} is not a number of this kind: write for example {example}")
    value = float(re.sub("[,_ ]", "", found[1])) * units[found[2].lower()]
    if not math.isfinite(value) or value > LARGEST:
        raise ConfigError(f"{text.strip()!r:.60} is too large: write for example {example}")
    return value


def shown(value, kind):
    """`value` as text with its unit."""
    if kind == "percent":
        return f"{value:.3g} %"
    unit = {"bytes": " bytes", "rate": " per second"}.get(kind, "")
    return f"{value:,.0f}{unit}"


def error_of(value, other, name):
    """The difference of `value` to the `other` number, of this name, in percent, as text."""
    percent = round(100 * (value - other) / other, 1) + 0.0  # -0.0 + 0.0 is 0.0
    return f"{percent:+.1f} % to the {name}"


def lines_of(text):
    """`text` in lines of WIDTH; the lines after the first one are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent="   ", break_on_hyphens=False)


def asked(question, number, read=None):
    """The answer that the user types; a text that is no number is refused in one line, and the question asked again."""
    print(lines_of(f"{number}. {question.text}"))
    while True:
        try:
            text = (read or input)("   your prediction: ")
        except EOFError:
            print()
            raise ConfigError(f"{question.key} has no prediction: type a number, or use --answers FILE") from None
        try:
            return parsed(text, question.unit)
        except ConfigError as error:
            print(f"   {error}")


def from_file(path, questions):
    """The answers in a TOML file, such as: parameters = "126k"; raises ConfigError unless it has all of them."""
    try:
        with open(path, "rb") as file:
            answers = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--answers {path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--answers {path}: {' '.join(str(error).split())}: write lines such as key = 1.5e6"
        ) from None
    keys = [question.key for question in questions]
    if missing := [key for key in keys if key not in answers]:
        raise ConfigError(f"--answers {path}: {missing[0]} is missing: the file needs {', '.join(keys)}")
    if unknown := [key for key in answers if key not in keys]:
        raise ConfigError(f"--answers {path}: {unknown[0]} is no question of this stage: use {', '.join(keys)}")
    try:
        return [parsed(str(answers[question.key]), question.unit) for question in questions]
    except ConfigError as error:
        raise ConfigError(f"--answers {path}: {error}") from None


def report(question, number, answer):
    """Yield the lines of one question: prediction, formula and measurement, with the errors of the first two."""
    text, value = question.formula()
    measured = question.measure()
    yield lines_of(f"{number}. {question.text}")
    rows = [
        ("predicted", answer, [f"{error_of(answer, measured, 'measurement')}, {error_of(answer, value, 'formula')}"]),
        ("formula", value, [text, error_of(value, measured, "measurement")]),
        ("measured", measured, []),
    ]
    for name, each, words in rows:
        yield f"   {name:10} {shown(each, question.unit):>24}"
        yield from (lines_of(f"     {line}") for line in words)
    if question.note:
        yield lines_of(f"   {question.note}.")


def command(arguments):
    """Ask, measure and print, as the command line says; returns the exit code."""
    examples = (
        ("--stage 0", "two or three numbers of stage 0, asked on the terminal"),
        ("--stage 1 --answers answers.toml", "the predictions of a file, without a terminal"),
    )
    text = "Predict numbers of a lesson, then compare them with a formula and a measurement on this machine."
    parser = Parser(text, examples, "python -m exercises.predict", "%(prog)s --stage N [flags]")
    add = parser.add_argument
    add("--stage", type=int, choices=KINDS["stage"], required=True, help="the stage of the lesson: 0, 1, 2 or 3")
    add(
        "--answers", type=to_path, metavar="FILE", help="a TOML file with the predictions, such as: parameters = '126k'"
    )
    options = parser.parse_args(arguments)
    questions = questions_of(options.stage)
    if options.answers:
        answers = from_file(options.answers, questions)
    elif sys.stdin is not None and sys.stdin.isatty():
        answers = [asked(question, number) for number, question in enumerate(questions, 1)]
    else:
        for question in questions:
            print(f"{question.key}: {question.text}")
        keys = ", ".join(question.key for question in questions)
        raise ConfigError(f"standard input is not a terminal: give the predictions with --answers FILE, keys: {keys}")
    print()
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True), 1):
        for line in report(question, number, answer):
            print(line, flush=True)
    return 0


def questions_of(stage):
    """The Questions of a stage; raises ConfigError if a package is missing that measures them."""
    if stage == 2:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported; the questions need no GPU
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("stage 2 needs Triton, whose interpreter runs the kernels: pip install triton")
    return importlib.import_module("exercises.checks.predictions").QUESTIONS[stage]


if __name__ == "__main__":
    sys.exit(main_of(command))
