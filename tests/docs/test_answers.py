"""docs/ANSWERS.md has an answer to each question of the lessons and of the notebooks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def sections(path):
    """{heading: text} of the sections of a Markdown file."""
    parts = re.split(r"^## (.*)$", path.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("stage", range(4))
def test_each_question_has_an_answer(stage):
    (lesson,) = ROOT.glob(f"stage{stage}_*/README.md")
    notebook = (ROOT / "docs" / "notebooks" / f"stage{stage}.md").read_text(encoding="utf-8")
    (answers,) = (
        text for name, text in sections(ROOT / "docs" / "ANSWERS.md").items() if name.startswith(f"Stage {stage}")
    )
    asked = [
        name.split(".")[0] for name, text in sections(lesson).items() for _ in re.findall(r"^\*Question:", text, re.M)
    ]
    assert asked and re.findall(r"^\*\*(\d+)[.,]", answers, re.M) == asked
    assert answers.count("\n**Notebook,") == notebook.count("\n*Question:")
