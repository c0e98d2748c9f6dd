"""Formulas in the documents: $...$ in a line, or $$ on lines of their own; GitHub and Jupyter both show them.

GitHub reads a formula as Markdown first, so characters that mean something there are not allowed: a backslash before
punctuation is removed, an underscore after punctuation or an asterisk can begin emphasis, < can begin a tag, and | ends
a cell of a table. There are commands for all of them, such as \\leq, \\top and \\ast.
"""

import re
from pathlib import Path

import pytest
from matplotlib.mathtext import MathTextParser

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "*.md", "docs/**/*.md", "stage*/*.md", "exercises/**/*.md", "data/*.md", "results/*.md", "benchmarks/*.md"
PAGES = sorted(page for pattern in FOLDERS for page in ROOT.glob(pattern))
DISPLAY = re.compile(r"^\$\$\n(.*?)\n\$\$$", re.M | re.S)
INLINE = re.compile(r"(?<![^\s(])\$(?![\s$])([^$\n]*[^$\s])\$(?![^\s.,;:!?)])")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)
UNSAFE = re.compile(r"\\[^\w\s]|(?<!\w)_|[*<>|`~#&]")


def formulas(text):
    """(the formulas of a page, the rest of its text, without code)."""
    text = CODE.sub("", text)
    found = DISPLAY.findall(text)
    text = DISPLAY.sub("", text)
    return found + INLINE.findall(text), INLINE.sub("", text)


def mistakes(text):
    """What is wrong with the formulas of a page, as a list of lines."""
    found, rest = formulas(text)
    wrong = [f"a $ without its other one: {line}" for line in rest.splitlines() if "$" in line]
    wrong += [f"unsafe in Markdown: {formula}" for formula in found if UNSAFE.search(formula) or "\n" in formula]
    for formula in found:
        try:
            MathTextParser("path").parse(f"${formula}$")
        except ValueError as error:
            wrong.append(f"{formula}: {str(error).splitlines()[-1]}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_formulas_of_a_page_can_be_shown(page):
    text = page.read_text(encoding="utf-8")
    assert mistakes(text) == []
    displays = [line for line in CODE.sub("", text).splitlines() if line == "$$"]
    assert len(displays) == 2 * len(DISPLAY.findall(CODE.sub("", text)))


def test_each_lesson_has_formulas():
    lessons = [page.read_text(encoding="utf-8") for page in ROOT.glob("stage*/README.md")]
    assert [len(formulas(text)[0]) >= 5 for text in lessons] == [True] * 4


@pytest.mark.parametrize(
    "text",
    ["$a", "costs 5$ or 6$.", "$ a$", "$a $", "$a$b", "x$a$", "$a * b$", r"$a \, b$", r"$\mathrm{a}_i$", "$a < b$"]
    + ["$a | b$", r"$\frac{a}{b$", r"$\nosuchcommand$", "$$\na\nb\n$$", "$$ a", r"$a\\b$", "$p$-th"],
)
def test_a_formula_that_would_not_be_shown_is_found(text):
    assert mistakes(text)


@pytest.mark.parametrize("text", ["$a$, ($b_i$): $c^2$.", "`$HOME` and $a$", "```sh\n$ make\n```\n$a$", "$$\na_1\n$$"])
def test_a_formula_that_is_shown_is_not_reported(text):
    assert mistakes(text) == []
