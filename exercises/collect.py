"""Make a table of a class's results: python -m exercises.collect DIR.

Each sub-folder of DIR has the name of a student. A working folder, to which `make grade` has written grade.json, is
this sub-folder itself, or up to two levels below it. For a student named Alice: `alice`, `alice/stage0` or
`alice/solutions/stage0`.
"""

import csv
import json
import sys
from dataclasses import dataclass, field

from exercises.cases import CASES
from exercises.catalog import PACKAGES, ROOT, graded_files, of_stage
from exercises.commands import MARKER, Work, main_of, marked_work, write_file
from exercises.grade import RECORD, grade_work, printable
from exercises.source import SourceError, hash_of, read_source
from gpt2core.app.settings.flag_parser import Parser, to_path
from gpt2core.errors import ConfigError

NO_RECORD = f"no {RECORD}: run make grade"


@dataclass(frozen=True)
class Row:
    """One line of the table. exercises: {number of an exercise: its score}; remark: "" if all is right."""

    student: str
    stage: str
    score: str
    remark: str
    exercises: dict = field(default_factory=dict)

    def for_screen(self):
        """The cells of the printed table; all exercises are in one cell: "0.1: 100  0.2: 50"."""
        scores = "  ".join(f"{number}: {score:>3}" for number, score in self.exercises.items()) or "-"
        return [self.student, self.stage, self.score, scores, self.remark]

    def for_csv(self, numbers):
        """The cells of the file: one for each exercise of `numbers`, empty if the row has no score of it."""
        return [self.student, self.stage, self.score, *(self.exercises.get(each, "") for each in numbers), self.remark]


def rows_of(student):
    """Yield the Rows of the folder of one student."""
    places = [student, *sorted(student.glob("*")), *sorted(student.glob("*/*"))]
    folders = [place for place in places if (place / RECORD).exists() or (place / MARKER).exists()]
    name = printable(student.name)
    if not folders:
        yield Row(name, "-", "-", f"no working folder and no {RECORD}")
    for folder in folders:
        yield row_of(name, folder)


def row_of(student, folder):
    """The Row of one working folder."""
    if not (folder / RECORD).exists():
        return Row(student, shown(marked_work(folder)), "-", NO_RECORD)
    try:
        record = json.loads(read_source(folder / RECORD, RECORD))
        score, files = int(record["score"]), record["files"]
        if "case" in record:
            work, scores = Work("case", record["case"]), {f"case {record['case']}": score}
        else:
            work = Work("stage", record["stage"])
            scores = {each.number: int(record["exercises"][each.number]["score"]) for each in of_stage(work.number)}
        if set(files) != set(files_of(work)):
            raise ValueError
        return Row(student, shown(work), str(score), remark_of(folder, work, files), scores)
    except (SourceError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return Row(student, "-", "-", f"{RECORD} is not one that this version of make grade writes")


def shown(work):
    """The cell of a Work in the column "stage": "0" or "case 1"."""
    return str(work).removeprefix("stage ")


def files_of(work):
    """The files of a working folder whose hashes grade.json has."""
    return CASES[work.number].files if work.kind == "case" else graded_files(work.number)


def remark_of(folder, work, files):
    """What a teacher must know about the graded files: whether they changed, are missing, or are the repository's."""
    there = hash_of(folder, files)
    missing = [file for file in files if there[file] is None]
    changed = [file for file in files if there[file] is not None and there[file] != files[file]]
    remarks = [f"missing: {', '.join(missing)}"] if missing else []
    remarks += [f"wrong hash, changed after make grade: {', '.join(changed)}"] if changed else []
    if there == hash_of(ROOT, files_of(work)):
        remarks.append("identical to the repository's files")
    return "; ".join(remarks)


def grade_again(student):
    """Grade every working folder of a student again, and write its grade.json."""
    for folder in [student, *student.glob("*"), *student.glob("*/*")]:
        work = marked_work(folder)
        if work is not None:
            record = grade_work(work, folder, show=lambda line: None)
            write_file(folder / RECORD, json.dumps(record, indent=1) + "\n")


def command(arguments):
    """Print the table as the command line says; returns the exit code."""
    examples = ("work", "one row for each folder in work"), ("work --grade --csv class.csv", "grade all of them first")
    parser = Parser(
        "Make a table of a class's results.", examples, "python -m exercises.collect", "%(prog)s DIR [flags]"
    )
    add = parser.add_argument
    add("folder", type=to_path, metavar="DIR", help="a folder with one sub-folder for each student")
    add("--grade", action="store_true", help="grade all working folders again first (up to a minute each)")
    add(
        "--csv",
        type=to_path,
        metavar="FILE",
        help="also write it as comma-separated values, with a column for each exercise",
    )
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder: give the folder that has one sub-folder for each student")
    students = sorted(path for path in options.folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not students:
        raise ConfigError(f"{options.folder} has no sub-folders: give the folder that has one for each student")
    if options.grade:
        for student in students:
            print(f"grading {student.name}", file=sys.stderr)
            grade_again(student)
    rows = [row for student in students for row in rows_of(student)]
    print_table([["student", "stage", "score", "exercises", "remark"], *(row.for_screen() for row in rows)])
    if options.csv:
        numbers = [exercise.number for stage in PACKAGES for exercise in of_stage(stage)]
        numbers += [f"case {number}" for number in CASES]
        try:
            with open(options.csv, "w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(["student", "stage", "score", *numbers, "remark"])
                csv.writer(file).writerows(row.for_csv(numbers) for row in rows)
        except OSError as error:
            raise ConfigError(
                f"--csv {options.csv}: cannot be written ({error.strerror}): choose another file"
            ) from None
    return 0


def print_table(table):
    """Print rows of cells with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for row in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


if __name__ == "__main__":
    sys.exit(main_of(command))
