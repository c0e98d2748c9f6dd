"""What the commands share: flags, the working folder and its marker, and errors of one line."""

import argparse
import json
import os
from pathlib import Path

from exercises.catalog import PACKAGES, ROOT
from exercises.source import SourceError, read_source
from gpt2core.app.command import run_command
from gpt2core.app.settings.flag_parser import Parser
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError

MAKE = (ROOT / "Makefile").is_file()  # false after a plain `pip install .`: then only python -m exercises.NAME works
HERE = "in the root of the repository" if MAKE else "in this directory"  # where the commands are called
DIR = "DIR=" if MAKE else "--dir"
MARKER = "exercise.json"  # a file of the working folder that says for which stage it is


def base_parser(name, description, examples):
    """The parser of a command, with --stage and --dir."""
    parser = Parser(description, examples, f"python -m exercises.{name}", "%(prog)s --stage N [flags]")
    add = parser.add_argument
    add("--stage", type=int, choices=sorted(PACKAGES), required=True, help="the stage of the exercises: 0, 1, 2 or 3")
    add("--dir", type=folder_name, help="the working folder (default: work/stageN)")
    return parser


def folder_name(text):
    """The Path in `text`; an error for an empty text, because Path("") is the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a folder, or omit DIR (default work/stageN)")
    return Path(text)


def main_of(command):
    """Run command(arguments) and exit; a user's mistake is one line on standard error and exit code 2."""
    run_command(Solo, lambda world: command(None))


def folder_of(stage, folder):
    """The Path of the working folder: `folder`, or its default."""
    return Path(folder if folder is not None else f"work/stage{stage}")


def called(target, stage, folder):
    """The command line of `make exercise` or `make grade` for a stage and, unless it is None, a folder."""
    if MAKE:
        return f"make {target} STAGE={stage}" + (f" DIR={folder}" if folder is not None else "")
    module = {"exercise": "start", "grade": "grade"}[target]
    return f"python -m exercises.{module} --stage {stage}" + (f" --dir {folder}" if folder is not None else "")


def check_folder(stage, folder):
    """The Path of the working folder; raises ConfigError unless `make exercise` has made it for this stage."""
    path = folder_of(stage, folder)
    make = called("exercise", stage, folder)
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist: run `{make}` first")
    if not os.path.lexists(path / MARKER):
        raise ConfigError(f"{path} has no {MARKER}, so it is not a working folder: run `{make}` in an unused folder")
    marked = stage_of(path)
    if marked is None:
        content = json.dumps({"stage": stage})
        problem = "does not give a stage" if (path / MARKER).is_file() else "is not a regular file"
        raise ConfigError(f"{path / MARKER} {problem}: if this folder is of stage {stage}, write {content}")
    if marked != stage:
        raise ConfigError(f"{path} is a working folder of stage {marked}, not of stage {stage}: use STAGE={marked}")
    return path


def stage_of(folder):
    """The stage of a working folder, from its marker, or None."""
    try:
        stage = json.loads(read_source(folder / MARKER, MARKER))["stage"]
    except (SourceError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return stage if type(stage) is int and stage in PACKAGES else None


def write_file(path, text):
    """Replace the file at `path` atomically; raises ConfigError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({error.strerror}): make its folder writable") from None
