"""Make a working folder: `make exercise STAGE=0`, or python -m exercises.start --stage 0 --dir DIR.

The folder contains copies of the packages of the stage. The functions of the exercises have no body. The folder is
never overwritten.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from exercises.catalog import PACKAGES, PAGES, ROOT, graded_files, of_stage, removed_functions
from exercises.commands import DIR, HERE, MARKER, base_parser, main_of, work_of
from exercises.source import read_source, stripped
from gpt2core.app.shipped import CORPUS, INSTALLED, WEIGHTS
from gpt2core.errors import ConfigError

# The READMEs and Makefiles of the stages are for commands in the repository, not in a copy.
NOT_COPIED = shutil.ignore_patterns(
    "README.md", "Makefile", "__pycache__", "*.png", "tuned", "ranks", "out", "run", "*.ipynb", INSTALLED.name
)


def make_folder(stage, folder):
    """Make the working folder of a stage; raises ConfigError if `folder` exists and is not empty."""
    new_folder(folder, lambda copy: fill_folder(stage, copy))


def new_folder(folder, fill):
    """Make a working folder, which fill(folder) writes; raises ConfigError if `folder` exists and is not empty."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: choose another folder with {DIR}")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} exists and is not overwritten: choose another folder with {DIR}, or delete this one"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exercise-", dir=folder.parent) as directory:
        copy = Path(directory, "copy")
        fill(copy)
        copy.rename(folder)  # an interrupted command leaves no folder, or a complete one


def fill_folder(stage, folder):
    """Write the packages, the data, the pages and the marker of a stage to a new folder."""
    copy_packages(stage, folder)
    messages = {file: messages_of(stage, file) for file in graded_files(stage)}
    for file, texts in (messages | removed_functions(of_stage(stage))).items():
        (folder / file).write_text(stripped(read_source(ROOT / file, file), texts), encoding="utf-8")
    for exercise in of_stage(stage):
        shutil.copy(PAGES / exercise.page, folder / exercise.page)
    (folder / MARKER).write_text(json.dumps({"stage": stage}) + "\n")


def copy_packages(stage, folder):
    """Copy the packages of a stage and the corpus to a new folder, and link the weights that the lessons read."""
    for package in PACKAGES[stage]:
        shutil.copytree(ROOT / package, folder / package, ignore=NOT_COPIED)
    (folder / "data").mkdir()
    shutil.copy(CORPUS, folder / "data")
    (folder / "data" / WEIGHTS.name).symlink_to(WEIGHTS)


def messages_of(stage, file):
    """{qualified name: text of the NotImplementedError} of the functions of this file that the student writes."""
    return {
        name: f"exercise {exercise.number}: {exercise.title}: see {exercise.page}"
        for exercise in of_stage(stage)
        for each, name in exercise.functions
        if each == file
    }


def command(arguments):
    """Make the folder as the command line says, and print its exercises; returns the exit code."""
    examples = (
        ("--stage 0", "the exercises of stage 0, in work/stage0"),
        ("--stage 1 --dir work/mpi", "those of stage 1, in another folder"),
    )
    text = "Copy a stage to a working folder, without the functions that you will write."
    parser = base_parser("start", text, examples)
    options = parser.parse_args(arguments)
    work = work_of(options)
    folder = work.folder(options.dir)
    make_folder(options.stage, folder)
    print(f"{folder} has the exercises of stage {options.stage}:")
    for exercise in of_stage(options.stage):
        print(f"  {exercise.page:<32} {exercise.title}")
    print(f"Read the first page, write its functions, then run `{work.called('grade', options.dir)}` {HERE}.")
    return 0


if __name__ == "__main__":
    sys.exit(main_of(command))
