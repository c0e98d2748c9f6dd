"""The code that a stage's lesson quotes must exist: the same lines, in the file that the lesson names.

A quotation is a ```python block after a line such as "From [kernels/gelu.py](kernels/gelu.py), `forward_kernel`:".
A line of the block that is only "..." stands for any lines; the indentation of the whole block does not matter.
"""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(ROOT.glob("stage*/README.md"))
BLOCK = re.compile(r"^(?:From \[[^\]\n]*\]\((\S+)\)(?:, ([^\n]*))?:\n\n?)?```python\n(.*?)^```$", re.M | re.S)


def python_blocks(page):
    """(quoted file or None, names of functions and classes that the caption gives, code) of each ```python block."""
    for file, names, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        yield page.parent / file if file else None, re.findall(r"`(\w+)`", names), code


def segments(code):
    """The lines of a quotation, in lists between its gaps."""
    result = [[]]
    for line in textwrap.dedent(code).splitlines():
        if line.strip() == "...":
            result.append([])
        else:
            result[-1].append(line)
    return [segment for segment in result if segment]


def missing_line(code, source):
    """The first line of `code` that `source` lacks in this order, with one indentation; None if it has all of them."""
    lines, furthest = source.splitlines(), ""
    for depth in range(0, 20, 4):
        start = 0
        for segment in segments(code):
            wanted = [" " * depth + line if line else line for line in segment]
            place = find(wanted, lines, start)
            if place is None:
                furthest = furthest or next((line for line in wanted if line not in lines), wanted[0])
                break
            start = place + len(wanted)
        else:
            return None
    return furthest


def find(wanted, lines, start):
    """The index from `start` on at which the lines `wanted` follow each other in `lines`, or None."""
    places = range(start, len(lines) - len(wanted) + 1)
    return next((place for place in places if lines[place : place + len(wanted)] == wanted), None)


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.parent.name)
def test_a_lesson_quotes_code_that_exists(page):
    problems = []
    for file, names, code in python_blocks(page):
        if file is None:
            continue
        source = file.read_text(encoding="utf-8") if file.exists() else ""
        problems += [f"{file.name} has no {name}" for name in names if not re.search(rf"(def|class) {name}\b", source)]
        if line := missing_line(code, source):
            problems.append(f"{file.name} lacks: {line}")
    assert problems == []


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.parent.name)
def test_python_in_a_lesson_is_run_or_names_its_source(page):
    loose = [code for file, _, code in python_blocks(page) if not (file or "\n#> " in code or code.startswith("# "))]
    assert loose == []


def test_a_quotation_may_have_gaps_and_another_indentation():
    source = "class A:\n    def f(self):\n        x = 1\n        y = 2\n        return x\n"
    assert missing_line("def f(self):\n    x = 1\n    ...\n    return x\n", source) is None
    assert missing_line("x = 1\nreturn x\n", source) is not None
    assert missing_line("return x\n...\nx = 1\n", source) is not None
    assert missing_line("x = 1\n  y = 2\n", source) is not None
    assert missing_line("x = 3\n", source) == "x = 3"
