"""Make the working folder of a detective: `make detective CASE=1`, or python -m exercises.detective --case 1.

The folder has copies of the packages of a stage, in which one function has a fault, and a page that shows the symptom.
The student mends the function; `make grade CASE=1` grades the folder.
"""

import json
import shutil
import sys

from exercises.cases import CASES, planted
from exercises.catalog import PAGES
from exercises.commands import HERE, MARKER, base_parser, main_of, work_of
from exercises.start import copy_packages, new_folder


def fill_folder(case, folder):
    """Write the packages with the fault, the data, the page and the marker of a case to a new folder."""
    copy_packages(case.stage, folder)
    for file in case.files:
        (folder / file).write_text(planted(case, file), encoding="utf-8")
    shutil.copy(PAGES / case.page, folder / case.page)
    (folder / MARKER).write_text(json.dumps({"case": case.number}) + "\n")


def command(arguments):
    """Make the folder as the command line says, and print its page; returns the exit code."""
    examples = (
        ("--case 1", "the first detective, in work/case1"),
        ("--case 3 --dir work/hang", "the third one, in another folder"),
    )
    text = "Copy a stage with one fault to a working folder: find it from its symptom, and mend it."
    options = base_parser("detective", text, examples, ["case"]).parse_args(arguments)
    work, case = work_of(options), CASES[options.case]
    folder = work.folder(options.dir)
    new_folder(folder, lambda copy: fill_folder(case, copy))
    print(f"{folder} has {work}: {case.title}")
    print(f"Read {folder / case.page}, mend the function, then run `{work.called('grade', options.dir)}` {HERE}.")
    return 0


if __name__ == "__main__":
    sys.exit(main_of(command))
