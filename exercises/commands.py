"""What the commands share: flags, the working folder and its marker, and errors of one line."""

import argparse
import json
import os
from pathlib import Path
from typing import NamedTuple

from exercises.cases import CASES
from exercises.catalog import PACKAGES, ROOT
from exercises.source import SourceError, read_source
from gpt2core.app.command import run_command
from gpt2core.app.settings.flag_parser import Parser
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError

MAKE = (ROOT / "Makefile").is_file()  # false after a plain `pip install .`: then only python -m exercises.NAME works
HERE = "in the root of the repository" if MAKE else "in this directory"  # where the commands are called
DIR = "DIR=" if MAKE else "--dir"
MARKER = "exercise.json"  # a file of the working folder that says what it is for


KINDS = {"stage": sorted(PACKAGES), "case": list(CASES)}  # what a working folder may be for: {kind: its numbers}
HELP = {"stage": "the stage of the exercises: 0, 1, 2 or 3", "case": f"the detective: 1 to {len(CASES)}"}
TARGETS = {"exercise": "start", "detective": "detective", "grade": "grade"}  # {target of make: module}


class Work(NamedTuple):
    """What a working folder is for: the exercises of a stage, or the detective of a case."""

    kind: str  # a key of KINDS
    number: int

    def __str__(self):
        return f"{self.kind} {self.number}"

    @property
    def variable(self):
        """The variable of `make`."""
        return f"{self.kind.upper()}={self.number}"

    def folder(self, folder):
        """The Path of the working folder: `folder`, or its default."""
        return Path(folder if folder is not None else f"work/{self.kind}{self.number}")

    def called(self, target, folder):
        """The command line of a key of TARGETS for this work and, unless it is None, a folder."""
        if MAKE:
            return f"make {target} {self.variable}" + (f" DIR={folder}" if folder is not None else "")
        line = f"python -m exercises.{TARGETS[target]} --{self.kind} {self.number}"
        return line + (f" --dir {folder}" if folder is not None else "")

    def started(self, folder):
        """The command line that makes the folder."""
        return self.called({"stage": "exercise", "case": "detective"}[self.kind], folder)


def base_parser(name, description, examples, kinds=("stage",)):
    """The parser of a command, with --dir and one flag for each of `kinds`, of which a command line has one."""
    usage = " | ".join(f"--{kind} N" for kind in kinds)
    usage = usage if len(kinds) == 1 else f"({usage})"
    parser = Parser(description, examples, f"python -m exercises.{name}", f"%(prog)s {usage} [flags]")
    group = parser.add_mutually_exclusive_group(required=True)
    for kind in kinds:
        group.add_argument(f"--{kind}", type=int, choices=KINDS[kind], help=HELP[kind])
    default = " or ".join(f"work/{kind}N" for kind in kinds)
    parser.add_argument("--dir", type=folder_name, help=f"the working folder (default: {default})")
    return parser


def work_of(options):
    """The Work that the parsed flags of base_parser() name."""
    return next(Work(kind, value) for kind in KINDS if (value := getattr(options, kind, None)) is not None)


def folder_name(text):
    """The Path in `text`; an error for an empty text, because Path("") is the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a folder, or omit DIR (default work/stageN)")
    return Path(text)


def main_of(command):
    """Run command(arguments) and exit; a user's mistake is one line on standard error and exit code 2."""
    run_command(Solo, lambda world: command(None))


def check_folder(work, folder):
    """The Path of the working folder; raises ConfigError unless `make exercise` or `make detective` has made it."""
    path = work.folder(folder)
    make = work.started(folder)
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist: run `{make}` first")
    if not os.path.lexists(path / MARKER):
        raise ConfigError(f"{path} has no {MARKER}, so it is not a working folder: run `{make}` in an unused folder")
    marked = marked_work(path)
    if marked is None:
        content = json.dumps({work.kind: work.number})
        problem = f"does not give a {work.kind}" if (path / MARKER).is_file() else "is not a regular file"
        raise ConfigError(f"{path / MARKER} {problem}: if this folder is of {work}, write {content}")
    if marked != work:
        raise ConfigError(f"{path} is a working folder of {marked}, not of {work}: use {marked.variable}")
    return path


def marked_work(folder):
    """The Work of a working folder, from its marker, or None."""
    try:
        ((kind, number),) = json.loads(read_source(folder / MARKER, MARKER)).items()
    except (SourceError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return Work(kind, number) if type(number) is int and number in KINDS.get(kind, ()) else None


def write_file(path, text):
    """Replace the file at `path` atomically; raises ConfigError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({error.strerror}): make its folder writable") from None
