"""Read the tables of misuses, tests/app/misuse/TABLE.toml.

A table has groups of a command, an exit code and rows: words that are added to the command, and the expected line, in
which "..." stands for any text. A name in braces is a path that the test gives.
"""

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

TABLES = Path(__file__).resolve().parents[1] / "app" / "misuse"


@dataclass(frozen=True)
class Misuse:
    """One row of a table, with the command and the code of its group."""

    command: str
    code: int
    line: str
    ranks: int  # 1 if the group has none

    def words(self, **places):
        """The words of the command, with the paths in the place of their names."""
        return [word.format(**places) for word in shlex.split(self.command)]

    def check(self, code, out, err):
        """Assert the exit code, that nothing else was printed, and the line."""
        assert (code, out) == (self.code, ""), (code, out, err)
        assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
        assert re.search(".*".join(map(re.escape, self.line.split(" ... "))), err), f"{self.line}\nis not in\n{err}"


def misuses(*tables):
    """A list with one pytest.param of a Misuse for each row."""
    rows = []
    for table in tables:
        for group in tomllib.loads((TABLES / f"{table}.toml").read_text(encoding="utf-8"))["group"]:
            ranks = group.get("ranks", 1)
            for flags, line in group["misuses"]:
                row = Misuse(f"{group['command']} {flags}".strip(), group["code"], line, ranks)
                rows.append(pytest.param(row, id=f"{table}, {ranks} ranks: {ascii(flags)}".replace(", 1 ranks", "")))
    return rows
