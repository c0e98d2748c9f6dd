"""Typical wrong solutions of the exercises: each fails its check, with a hint that names the right place."""

import shutil
import tomllib
from pathlib import Path

import pytest

from exercises.catalog import EXERCISES, ROOT
from exercises.grade import grade_exercise
from exercises.source import find, lines_in, lines_of, parse

WRONG = tomllib.loads((Path(__file__).parent / "wrong_solutions.toml").read_text(encoding="utf-8"))["wrong"]
NUMBERED = {exercise.number: exercise for exercise in EXERCISES}


def changed(text, file, wrong):
    """`text`, the source of `file`, with the mistake in its function."""
    node = find(parse(text, file), wrong["function"])
    first, last = lines_of(node)
    lines = lines_in(text)
    body = "".join(lines[first - 1 : last])
    assert body.count(wrong["old"]) == 1, f"{wrong['function']} no longer contains, exactly once: {wrong['old']}"
    return "".join([*lines[: first - 1], body.replace(wrong["old"], wrong["new"]), *lines[last:]])


def cases():
    """All wrong solutions; those that are not marked long are the first of each check of stage 0."""
    checked = set()
    for wrong in WRONG:
        short = wrong["exercise"].startswith("0.") and wrong["check"] not in checked
        checked.add(wrong["check"])
        yield pytest.param(wrong, marks=[] if short else [pytest.mark.long], id=wrong["name"])


@pytest.mark.parametrize("wrong", list(cases()))
def test_a_wrong_solution_fails_its_check_with_a_hint_that_names_the_place(tmp_path, wrong):
    exercise = NUMBERED[wrong["exercise"]]
    if exercise.stage >= 2:
        pytest.importorskip("triton")
    for file in exercise.files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (file,) = {file for file, name in exercise.functions if name == wrong["function"]}
    (tmp_path / file).write_text(changed((tmp_path / file).read_text(encoding="utf-8"), file, wrong), encoding="utf-8")
    result = grade_exercise(exercise, tmp_path, [wrong["check"]])[wrong["check"]]
    assert result.state == "failed", result
    assert wrong["hint"] in result.hint, f"{result.text}\n{result.hint}"


def test_there_are_wrong_solutions_of_every_exercise():
    assert len(WRONG) >= 30
    assert {wrong["exercise"] for wrong in WRONG} == set(NUMBERED)
    assert {wrong["check"] for wrong in WRONG} <= {check for exercise in EXERCISES for check in exercise.checks}
