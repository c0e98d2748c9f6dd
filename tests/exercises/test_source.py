"""The functions of the exercises are found by their names, removed, and put back."""

import ast
import difflib

import pytest

from exercises.catalog import EXERCISES, PAGES, ROOT, graded_files, of_stage
from exercises.source import SourceError, find, lines_in, lines_of, merged, parse, stripped
from exercises.start import messages_of

pytestmark = pytest.mark.fast

SOURCE = '''\
"""A file."""


def first(x):
    # the solution
    return x + 1


class Box:
    def second(self, x):
        """Double x.

        It has two lines.
        """

        # a secret
        y = 2 * x
        return y

    def third(self):
        return 3
'''


def test_a_stripped_function_keeps_its_signature_and_docstring_but_no_line_of_its_body():
    text = stripped(SOURCE, {"first": "exercise 9.1", "Box.second": "exercise 9.2"})
    assert "solution" not in text and "secret" not in text and "2 * x" not in text and "return 3" in text
    space = {}
    exec(text, space)
    for call, message in (
        (lambda: space["first"](1), "exercise 9.1"),
        (lambda: space["Box"]().second(1), "exercise 9.2"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
    assert space["Box"].second.__doc__.startswith("Double x.")


def test_a_merged_file_has_the_students_function_and_the_real_other_one():
    student = SOURCE.replace("x + 1", "x + 5\n\n\nhelper = 7").replace("return y", "raise NotImplementedError")
    lines, numbers = merged(student, "file.py", ["first"], ["Box.second"], SOURCE)
    space = {}
    exec("".join(lines), space)
    assert space["first"](1) == 6 and space["helper"] == 7 and space["Box"]().second(2) == 4
    number = next(number for line, number in zip(lines, numbers, strict=True) if "return 3" in line)
    assert "return 3" in student.splitlines()[number - 1]


def test_of_two_functions_with_one_name_the_last_one_counts_and_decorators_belong_to_a_function():
    old = "def first(x):\n    return 0\n\n\n"
    student = old + SOURCE.replace("x + 1", "x + 5").replace("    def second", "    @staticmethod\n    def second")
    lines, _ = merged(student, "file.py", ["first"], ["Box.second"], SOURCE)
    space = {}
    exec("".join(lines), space)
    assert space["first"](1) == 6 and space["Box"]().second(2) == 4 and "staticmethod" not in "".join(lines)
    lines, _ = merged(student, "file.py", ["Box.second"], ["first"], SOURCE)
    exec("".join(lines), space)
    assert space["first"](1) == 2


@pytest.mark.parametrize(
    "text, words",
    [
        ("def f(:\n", "file.py, line 1: Python cannot read this file: "),
        ("x = '\0'\n", "file.py"),
        ("x = 1\n", "file.py has no function first: add it again"),
    ],
)
def test_a_file_that_cannot_be_merged_is_one_line(text, words):
    with pytest.raises(SourceError) as caught:
        merged(text, "file.py", ["first"], [], SOURCE)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)
def test_every_function_of_an_exercise_exists_and_its_page_names_it(exercise):
    page = (PAGES / exercise.page).read_text(encoding="utf-8")
    assert page.startswith(f"# {exercise.number} ")
    for file, name in exercise.functions:
        assert find(parse((ROOT / file).read_text(encoding="utf-8"), file), name), f"{file} has no {name}"
        assert f"`{file}`" in page and f"`{name.rpartition('.')[2]}" in page


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)
def test_every_check_of_an_exercise_exists(exercise):
    tree = ast.parse((ROOT / f"{exercise.module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    assert [check for check in exercise.checks if find(tree, check) is None] == []


def test_a_stage_has_four_to_eight_exercises_in_order():
    for stage in range(4):
        numbers = [exercise.number for exercise in of_stage(stage)]
        assert numbers == [f"{stage}.{i}" for i in range(1, len(numbers) + 1)] and 4 <= len(numbers) <= 8
        assert graded_files(stage)


@pytest.mark.parametrize("stage", range(4))
def test_solving_an_exercise_changes_only_lines_of_its_functions(stage):
    """From the working folder to the real code, each function loses one line, `raise`, and gains the lines of its body.

    All other lines are equal, with signatures and docstrings.
    """
    for file in graded_files(stage):
        text = (ROOT / file).read_text(encoding="utf-8")
        messages, tree = messages_of(stage, file), parse(text, file)
        given, solved = lines_in(stripped(text, messages)), lines_in(text)
        inside = {
            n for name in messages for n in range(lines_of(find(tree, name))[0], lines_of(find(tree, name))[1] + 1)
        }
        removed, added = [], []
        for kind, i, j, k, m in difflib.SequenceMatcher(None, given, solved, autojunk=False).get_opcodes():
            if kind != "equal":
                removed += given[i:j]
                added += range(k + 1, m + 1)
        assert len(removed) == len(messages) and all("raise NotImplementedError(" in line for line in removed), file
        assert set(added) <= inside and added, file
