"""docs/ARCHITECTURE.md: its tree is the tree on disk."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"[\w.]+(/|\.py)")


def tree():
    """{directory: the names of its entries} of the drawing; a directory without entries is described as a whole."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"^## The tree$.*?^```text\n(.*?)^```$", text, re.M | re.S)
    entries, above = {".": []}, {-1: "."}  # above: {depth: the directory whose entries have depth + 1}
    for line in drawing.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for word in line.split():
            if not ENTRY.fullmatch(word):
                break
            directory = above[depth - 1]
            entries.setdefault(directory, []).append(word)
            above[depth] = f"{directory}/{word.rstrip('/')}".removeprefix("./")
    return entries


def on_disk(directory):
    """The entries of a directory in git: Python files and folders, without __init__.py."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a git repository")
    paths = [Path(line).relative_to(directory) for line in listed.stdout.splitlines() if inside(line, directory)]
    names = {f"{path.parts[0]}/" if len(path.parts) > 1 else path.name for path in paths}
    return {name for name in names if re.fullmatch(r"\w+/|\w+\.py", name)} - {"__init__.py"}


def inside(line, directory):
    return (ROOT / line).exists() and (directory == "." or line.startswith(f"{directory}/"))


def test_the_tree_of_the_architecture_is_the_tree_on_disk():
    drawn = tree()
    wrong = {
        directory: (sorted(on_disk(directory) - set(names)), sorted(set(names) - on_disk(directory)))
        for directory, names in drawn.items()
        if set(names) != on_disk(directory)
    }
    assert wrong == {}, "{directory: (not drawn, drawn but not on disk)}"
    assert {"gpt2core", "gpt2core/parallel", "stage0_serial"} <= drawn.keys()
    assert all(len(set(names)) == len(names) for names in drawn.values())
