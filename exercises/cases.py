"""The detectives: stages with one planted fault, and what a mend may change. The faults are in detectives.toml.

A mend is compared with the planted copy by syntax trees, so comments, docstrings and line breaks do not count.
"""

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from exercises.catalog import PACKAGES, ROOT
from exercises.source import parse, read_source
from gpt2core.app.shipped import INSTALLED

FAULTS = Path(__file__).with_name("detectives.toml")
# A mend that waits for some time, or that hides a wrong number or an error, does not remove the fault.
HIDES = {"sleep", "barrier", "Barrier", "monotonic", "perf_counter", "process_time", "nan_to_num"}
UNCHANGED = "no function differs from the copy"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Case:
    """One detective. effort: see Exercise. changes: tuples (file, old text, new text).

    functions: pairs (file, qualified name) that a mend may change. checks: {name of a function in `module`: what it
    checks}. symptom: shell commands that show it; words: what they print.
    """

    number: int
    slug: str
    title: str
    effort: list
    stage: int
    symptom: str
    words: list
    functions: list
    changes: list
    checks: dict

    hint = ""  # the name of a function would be the answer

    @property
    def page(self):
        """The name of the page in exercises/pages/ and in the working folder."""
        return f"case-{self.number}-{self.slug}.md"

    @property
    def module(self):
        return f"exercises.checks.case_{self.slug.replace('-', '_')}"

    @property
    def files(self):
        """The files that have the fault."""
        return list(dict.fromkeys(file for file, _, _ in self.changes))


CASES = {each["number"]: Case(**each) for each in tomllib.loads(FAULTS.read_text(encoding="utf-8"))["case"]}


def planted(case, file):
    """The text of a file of the repository, with the fault of the case if it is there."""
    text = read_source(ROOT / file, file)
    for name, old, new in case.changes:
        if name == file:
            text = text.replace(old, new)
    return text


def files_of(case):
    """The Python files of the working folder, relative to it."""
    paths = (path for package in PACKAGES[case.stage] for path in (ROOT / package).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths if INSTALLED not in path.parents)


def problem(case, folder):
    """Why the changes of a working folder are no mend, as one line; UNCHANGED if there are none, None for a mend.

    A mend changes only the functions of the case; it may add functions and imports to their file. Raises SourceError
    for a file that cannot be read.
    """
    changed = False
    for file in files_of(case):
        text, copy = read_source(folder / file, file), planted(case, file)
        if text == copy:
            continue
        allowed = {name for each, name in case.functions if each == file}
        before, after = parts_of(parse(copy, file)), parts_of(parse(text, file))
        for name in [name for name in before if before[name] != after.get(name)]:
            if name not in after:
                return f"{file}: {name} is missing: the mend needs no other function removed or renamed"
            if name not in allowed:
                return f"{file}: {name} differs from the copy, but the fault is not there: undo this change"
            changed = True
        added = [name for name in after if name not in before]
        if added and not allowed:
            return f"{file}: {added[0]} was added, but the fault is not in this file: undo this change"
        for name in (*allowed, *added):
            if word := hidden(after[name], before.get(name)):
                return f"{file}: {word} in {name.rpartition('.')[2]} hides the symptom: find its cause"
    return None if changed else UNCHANGED


def parts_of(tree):
    """{qualified name: the syntax tree of the function, or of what a module or class has besides functions}.

    Imports may be added, so they are not compared. Of two functions with one name the last one counts.
    """
    parts = {}

    def add(node, prefix):
        rest = []
        for child in node.body:
            if isinstance(child, FUNCTIONS):
                parts[prefix + child.name] = without_docstring(child)
            elif isinstance(child, ast.ClassDef):
                add(child, f"{prefix}{child.name}.")
                rest += [*child.bases, *child.decorator_list]
            elif not isinstance(child, ast.Import | ast.ImportFrom):
                rest.append(child)
        what = f"the body of the class {prefix[:-1]}" if prefix else "what is outside of functions"
        parts[what] = [each for each in rest if not is_text(each)]

    add(tree, "")
    return {name: Part(part) for name, part in parts.items()}


class Part:
    """Some nodes of a syntax tree; two are equal if their code is."""

    def __init__(self, nodes):
        self.nodes = nodes if isinstance(nodes, list) else [nodes]
        self.code = [ast.dump(node) for node in self.nodes]

    def __eq__(self, other):
        return isinstance(other, Part) and self.code == other.code

    def walk(self):
        return (each for node in self.nodes for each in ast.walk(node))


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def without_docstring(function):
    if is_text(function.body[0]) and len(function.body) > 1:
        function.body = function.body[1:]
    return function


def hidden(part, before):
    """The word in `part` that only hides a symptom and that `before` (a Part or None) does not have, or None."""
    found, known = (set(map(word_of, each.walk() if each else ())) for each in (part, before))
    return min(found - known - {None}, default=None)


def word_of(node):
    """The word of HIDES, or "try", that a node of a syntax tree is, or None."""
    if isinstance(node, ast.Try | ast.TryStar):
        return "try" if node.handlers else None
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
    return name if name in HIDES else None
