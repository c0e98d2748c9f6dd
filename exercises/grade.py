"""Grade a working folder: `make grade STAGE=0`, or python -m exercises.grade --stage 0 --dir DIR.

Each exercise is graded by itself: the files that contain its functions come from the working folder, with the functions
of other exercises replaced by those of the repository; all other files come from the repository, without functions that
contain the answer. So an exercise that is not written yet does not change the result of another one.
"""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from exercises.cases import CASES, problem
from exercises.catalog import EXERCISES, ROOT, graded_files, of_stage, removed_functions
from exercises.commands import base_parser, check_folder, main_of, work_of, write_file
from exercises.runner import Result, run_check
from exercises.source import SourceError, hash_of, lines_in, merged, read_source, stripped
from gpt2core.errors import ConfigError

RECORD, LOG = "grade.json", "grade.log"
WORKERS = 2  # exercises that are graded at the same time


def write_overlay(exercise, folder, overlay):
    """Write the files of an exercise to the directory `overlay`; returns {file: the number of each line}.

    Raises SourceError for a file that cannot be graded.
    """
    numbers = {}
    for file in exercise.files:
        keep = [name for each, name in exercise.functions if each == file]
        others = [each for each in EXERCISES if each.stage == exercise.stage and each is not exercise]
        replace = [name for other in others for each, name in other.functions if each == file]
        text, real_text = read_source(folder / file, file), read_source(ROOT / file, file)
        lines, numbers[file] = merged(text, file, keep, replace, real_text)
        write(overlay / file, "".join(lines))
    for file, messages in removed_functions([exercise]).items():
        text = stripped(read_source(ROOT / file, file), messages)
        write(overlay / file, text)
        numbers[file] = [0] * len(text.splitlines())  # no line is the student's
    return numbers


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def prepare(exercise, folder, overlay):
    """A function(names of checks) -> {name: its Result}, in order. The student's files are read here.

    overlay: an empty directory that must exist until the function has returned.
    """
    try:
        numbers = write_overlay(exercise, folder, overlay)
    except SourceError as error:
        result = Result("failed", str(error), "Correct this file, or start again in a new folder.")
        return lambda names: dict.fromkeys(names, result)

    def run_checks(names):
        results = {}
        for name in names:
            results[name] = run_check(exercise, name, overlay, numbers)
            if results[name].ends_exercise:
                return dict.fromkeys(names, results[name]) | results
        return results

    return run_checks


def grade_exercise(exercise, folder, names=None):
    """{name of a check: its Result}, in order. names: the checks to run (default: all of the exercise)."""
    with tempfile.TemporaryDirectory(prefix="exercise-") as directory:
        return prepare(exercise, folder, Path(directory).resolve())(names or list(exercise.checks))


def grade(stage, folder, only=(), show=print, waiting=lambda number: None):
    """Grade a working folder, print the report with `show`, and return the record that is written to grade.json.

    waiting(number of an exercise) is called before the result of this exercise is awaited.
    """
    chosen = [exercise for exercise in of_stage(stage) if not only or exercise.number in only]
    show(f"stage {stage}, {folder}")
    graded, before = {}, hash_of(folder, graded_files(stage))
    pool = ThreadPoolExecutor(WORKERS)
    with tempfile.TemporaryDirectory(prefix="exercises-") as directory:
        pending = []
        try:
            for exercise in chosen:  # prepare in this thread: ast.parse() in two threads can fail in Python 3.11
                (overlay := Path(directory, exercise.number).resolve()).mkdir()
                run_checks = prepare(exercise, folder, overlay)
                pending.append(pool.submit(run_checks, list(exercise.checks)))
            for exercise, future in zip(chosen, pending, strict=True):
                waiting(exercise.number)
                graded[exercise] = future.result()
                for line in report_of(exercise, graded[exercise]):
                    show(line)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, do not wait for the checks that still run
    scores = {exercise: score_of(results) for exercise, results in graded.items()}
    record = {
        "stage": stage,
        "score": int(sum(scores.values()) / len(scores)),  # rounded down: 100 only if every check has passed
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "exercises": {
            exercise.number: {
                "title": exercise.title, "score": int(scores[exercise]),
                "checks": {name: result.state for name, result in results.items()},
            } for exercise, results in graded.items()
        },
        "files": before,
    }  # fmt: skip
    checks = [(exercise, name, result) for exercise, each in graded.items() for name, result in each.items()]
    titled = [(f"{exercise.number}, {exercise.checks[name]}", result) for exercise, name, result in checks]
    write_log(folder / LOG, titled)
    return record


def grade_work(work, folder, **options):
    """The record of a working folder, of exercises or of a detective; options: of grade() or grade_case()."""
    return (grade if work.kind == "stage" else grade_case)(work.number, folder, **options)


def grade_case(number, folder, show=print):
    """Grade the working folder of a detective, print the report with `show`, and return the record of grade.json.

    It is solved, with a score of 100, if the changes are inside the functions that a mend may change and every check
    passes; otherwise the score is 0. The checks end at the first one that fails, and no report has a hint.
    """
    case = CASES[number]
    show(f"case {number}, {folder}")
    results, before = {}, hash_of(folder, case.files)
    try:
        found = problem(case, folder)
        texts = {file: read_source(folder / file, file) for file in case.files}
    except SourceError as error:
        found = str(error)
    with tempfile.TemporaryDirectory(prefix="case-") as directory:
        overlay = Path(directory).resolve()
        if found is None:
            for file, text in texts.items():
                write(overlay / file, text)
            lines = {file: list(range(1, len(lines_in(text)) + 1)) for file, text in texts.items()}
            for name in case.checks:
                results[name] = run_check(case, name, overlay, lines)
                if results[name].state != "passed":
                    break
    for name, result in results.items():
        passed = result.state == "passed"
        show(f"  {'passed' if passed else 'failed'}  {case.checks[name]}" + ("" if passed else ":"))
        if not passed:
            show(f"            {printable(result.text)}")
    if found is not None:
        show(f"  {printable(found)}")
    solved = found is None and all(result.state == "passed" for result in results.values())
    states = dict.fromkeys(case.checks, "not run") | {name: result.state for name, result in results.items()}
    record = {
        "case": number, "score": 100 * solved, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checks": states, "files": before,
    }  # fmt: skip
    write_log(folder / LOG, [(f"case {number}, {case.checks[name]}", result) for name, result in results.items()])
    return record


def score_of(results):
    """The percentage of passed checks."""
    return 100 * sum(result.state == "passed" for result in results.values()) / len(results)


def report_of(exercise, results):
    """Yield the lines of the report for one exercise: its score, and its first check that has not passed."""
    passed = sum(result.state == "passed" for result in results.values())
    failed = next(((name, result) for name, result in results.items() if result.state != "passed"), None)
    written = not failed or failed[1].state != "not started"
    state = f"{passed} of {len(results)} checks passed" if written else "not written yet"
    yield f"  {exercise.number}  {exercise.title:<52} {state}"
    if not written:
        yield f"       see {exercise.page}"
    elif failed:
        name, result = failed
        yield f"       {exercise.checks[name]}:"
        yield f"         {printable(result.text)}"
        yield f"         hint: {printable(result.hint)}"


def printable(text):
    """`text` as one line without control characters."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(str(text).split()))


def write_log(path, results):
    """Write what the student's code printed during the checks, with its tracebacks, to the file grade.log.

    results: pairs (title of a check, its Result).
    """
    parts = [
        f"== {title}\n{result.printed.rstrip()}\n"
        for title, result in results
        if result.printed.strip() and result.state != "not started"
    ]
    write_file(path, "\n".join(parts))


def print_waiting(number):
    """On a terminal, print which exercise is checked; the next line of the report, which is longer, replaces it."""
    if sys.stdout.isatty():
        print(f"checking {number} ...", end="\r", flush=True)


def command(arguments):
    """Grade as the command line says; returns the exit code."""
    examples = (
        ("--stage 0", "all exercises of stage 0, in work/stage0"),
        ("--stage 0 --only 0.1 0.2", "two of them"),
        ("--stage 1 --dir work/mpi", "those of stage 1, in another folder"),
        ("--case 1", "the first detective, in work/case1"),
    )
    text = "Grade the exercises of one stage, or a detective, and write grade.json to the working folder."
    parser = base_parser("grade", text, examples, ["stage", "case"])
    parser.add_argument(
        "--only", metavar="N.M", nargs="+", action="extend", default=[], help="the exercises to grade (default: all)"
    )
    options = parser.parse_args(arguments)
    work = work_of(options)
    folder = check_folder(work, options.dir)
    check_only(work, options.only)
    chosen = {} if work.kind == "case" else {"only": options.only, "waiting": print_waiting}
    record = grade_work(work, folder, show=lambda line: print(line, flush=True), **chosen)
    if options.only:
        print(f"score of the graded exercises: {record['score']} %; {RECORD} is written only when all are graded")
    else:
        write_file(folder / RECORD, json.dumps(record, indent=1) + "\n")
        print(f"score: {record['score']} %, written to {folder / RECORD}")
    if (folder / LOG).stat().st_size:
        print(f"printed text and tracebacks of your code: {folder / LOG}")
    return 0


def check_only(work, only):
    """Raise ConfigError if the exercises `only` do not exist, or if Triton is missing for them."""
    if work.kind == "case":
        if only:
            raise ConfigError(f"--only {only[0]}: {work} is graded as a whole: omit --only")
        return
    numbers = [exercise.number for exercise in of_stage(work.number)]
    if work.number >= 2 and find_spec("triton") is None:
        raise ConfigError(f"{work} needs Triton, whose interpreter runs the kernels: pip install triton")
    for number in only:
        if number not in numbers:
            raise ConfigError(f"--only {number}: {work} has the exercises {', '.join(numbers)}")


if __name__ == "__main__":
    sys.exit(main_of(command))
