"""The grader: the real code gets 100 %, removed functions 0 %, and any file of a student gives a clear line."""

import ast
import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
import pytest

from exercises import child, collect, grade, runner, start
from exercises.catalog import EXERCISES, ROOT, graded_files, of_stage
from exercises.commands import MARKER
from exercises.source import find, lines_in, lines_of, parse
from gpt2core.communicator import CommunicatorError
from gpt2core.errors import ConfigError
from gpt2core.parallel.thread_communicator import run_ranks

SOFTMAX, FILE = EXERCISES[0], "gpt2core/primitives.py"
STAGES = range(4)


def copy_of(stage, folder):
    """A working folder with the graded files of a stage as they are in the repository."""
    for file in graded_files(stage):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    (folder / MARKER).write_text(json.dumps({"stage": stage}))
    return folder


def needs(stage):
    if stage >= 2:
        pytest.importorskip("triton")


# -- scores ------------------------------------------------------------------------------------------------------------


INTEL = """
import pathlib
read_text = pathlib.Path.read_text
def read(path, *arguments, **options):
    found = str(path) == "/proc/cpuinfo"
    return "model name : Intel(R) Xeon(R)" if found else read_text(path, *arguments, **options)
pathlib.Path.read_text = read
"""


@pytest.mark.parametrize("stage", [0, 1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_the_real_code_gets_100_percent_also_on_an_intel_cpu(tmp_path, stage, monkeypatch):
    """On an Intel CPU the backend looks for MKL; a check must not run a program or write a file for it."""
    needs(stage)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(INTEL)
    environment, path = runner.environment, f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    monkeypatch.setattr(runner, "environment", lambda work: environment(work) | {"PYTHONPATH": path})
    shown = []
    record = grade.grade(stage, copy_of(stage, tmp_path / "folder"), show=shown.append)
    assert record["score"] == 100, "\n".join(shown)
    assert all(state == "passed" for each in record["exercises"].values() for state in each["checks"].values())


@pytest.mark.parametrize("stage", range(4))
def test_a_score_is_rounded_down_so_that_100_needs_every_check(tmp_path, stage, monkeypatch):
    exercises = of_stage(stage)

    def score(failed):
        """The score of a folder in which only the checks `failed`, pairs (number of the exercise, check), fail."""

        def prepare(exercise, folder, overlay):
            return lambda names: {
                name: runner.Result("failed" if (exercise.number, name) in failed else "passed") for name in names
            }

        monkeypatch.setattr(grade, "prepare", prepare)
        return grade.grade(stage, tmp_path, show=lambda line: None)["score"]

    checks = [(exercise.number, name) for exercise in exercises for name in exercise.checks]
    lengths = {exercise.number: len(exercise.checks) for exercise in exercises}
    assert score(()) == 100
    for count in range(1, len(checks) + 1):
        lost = sum(Fraction(100, lengths[number] * len(exercises)) for number, _ in checks[:count])
        assert score(checks[:count]) == math.floor(100 - lost)


@pytest.mark.parametrize(
    "stage", [stage if stage % 2 == 0 else pytest.param(stage, marks=pytest.mark.long) for stage in STAGES]
)
def test_removed_functions_get_0_percent(tmp_path, stage):
    needs(stage)
    start.make_folder(stage, tmp_path / "new")
    shown = []
    record = grade.grade(stage, tmp_path / "new", show=shown.append)
    states = {state for each in record["exercises"].values() for state in each["checks"].values()}
    assert record["score"] == 0 and states == {"not started"}, "\n".join(shown)
    assert sum("not written yet" in line for line in shown) == len(of_stage(stage))
    assert all(f"       see {exercise.page}" in shown for exercise in of_stage(stage))
    assert max(map(len, shown[1:])) <= 80  # the width of a usual terminal


@pytest.mark.parametrize("number", [exercise.number for exercise in EXERCISES if exercise.removed])
def test_a_submission_without_the_function_gets_0_percent(tmp_path, number):
    """The method of the base class, or of plain_backend.py, does not take its place."""
    exercise = next(each for each in EXERCISES if each.number == number)
    folder = copy_of(exercise.stage, tmp_path / "folder")
    for file, name in exercise.functions:
        lines = lines_in((folder / file).read_text(encoding="utf-8"))
        first, last = lines_of(find(parse("".join(lines), file), name))
        (folder / file).write_text("".join([*lines[: first - 1], *lines[last:]]), encoding="utf-8")
    results = grade.grade_exercise(exercise, folder)
    assert {result.state for result in results.values()} == {"failed"}, results


PLAIN = "super().{name}", "PlainBackend('fp64').{name}", "plain_backend.{name}"


@pytest.mark.parametrize("number, call", [
    pytest.param(exercise.number, call, marks=[] if (i + j) % len(PLAIN) == 0 else pytest.mark.long)
    for i, exercise in enumerate(each for each in EXERCISES if each.removed) for j, call in enumerate(PLAIN)
])  # fmt: skip
def test_a_submission_that_calls_the_plain_form_gets_0_percent(tmp_path, number, call):
    exercise = next(each for each in EXERCISES if each.number == number)
    folder = copy_of(exercise.stage, tmp_path / "folder")
    for file, name in exercise.functions:
        text = (folder / file).read_text(encoding="utf-8")
        lines, node = lines_in(text), find(parse(text, file), name)
        names = [each.arg for each in node.args.args if each.arg != "self"]
        plain = call.format(name=node.name) + f"({', '.join(names)})"
        imports = "from gpt2core import plain_backend; from gpt2core.plain_backend import PlainBackend"
        indent = " " * node.body[0].col_offset
        body = [f"{indent}{imports}\n", f"{indent}return {plain}\n"]
        (folder / file).write_text("".join([*lines[: node.body[0].lineno - 1], *body, *lines[node.end_lineno :]]))
    results = grade.grade_exercise(exercise, folder)
    assert {result.state for result in results.values()} == {"failed"}, results


def test_a_working_folder_has_no_plain_form_of_an_answer(tmp_path):
    for stage in range(4):
        removed = {pair for exercise in of_stage(stage) for pair in exercise.removed}
        assert not {file for file, _ in removed} & set(graded_files(stage))  # students do not write in these files
        if removed:
            start.make_folder(stage, tmp_path / str(stage))
        for file, name in removed:
            node = find(parse((tmp_path / str(stage) / file).read_text(encoding="utf-8"), file), name)
            (statement,) = node.body
            assert "was removed, because it has the answer of exercise" in ast.unparse(statement)


# -- any file of a student ---------------------------------------------------------------------------------------------

BAD_FUNCTIONS = {  # body of softmax: (words of the result, words of the hint)
    "return None": ("is not a Tensor", "from_op"),
    "return x": ("has no gradient|elements differ", ""),
    "return Tensor.from_op(x.data[:1], (x,), lambda dy: (dy,))": ("shape", ""),
    "return Tensor.from_op('text', (x,), lambda dy: (dy,))": ("'str' object has no attribute", "softmax"),
    "y = z": ("primitives.py, line 68: NameError: name 'z' is not defined", "softmax"),
    "raise ValueError('two\\nlines' * 500)": ("ValueError: two lines", "softmax"),
    "class E(Exception):\n        __str__ = None\n    raise E": ("line 70: E: (without a message)", "softmax"),
    "import sys; sys.exit(0)": ("your code ended the program", "sys.exit"),
    "raise KeyboardInterrupt": ("your code ended the program", ""),
    "import os; os._exit(0)": ("ended the process with exit code 0", "softmax"),
    "import os; os.abort()": ("ended the process with the signal SIGABRT", "softmax"),
    "import os; os.closerange(3, 99); return 1": ("ended the process with exit code", "softmax"),
    "return softmax(x, axis)": ("RecursionError", "softmax"),
    "a = []\n    while True: a.append(bytearray(10**8))": ("needs more memory", "grow"),
    "while True: print('\\x1b[31m garbage' * 999)": ("printed too much", "print()"),
    "import time; time.sleep(99)": ("no result after 3 seconds", "loop"),
    "while True: pass": ("no result after 3 seconds", "loop"),
    "import os; os.fork()": ("os.fork()", "softmax"),
    "import subprocess; subprocess.run(['true'])": ("subprocess.Popen()|os.posix_spawn()", "softmax"),
}


def grade_softmax(tmp_path, text):
    """(Result of the first check of exercise 0.1, lines of the report) for this text of the student's file."""
    folder = copy_of(0, tmp_path)
    (folder / FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    results = grade.grade_exercise(SOFTMAX, folder, ["softmax_rows"])
    return results["softmax_rows"], list(grade.report_of(SOFTMAX, results))


def with_body(body):
    """The real file, with this body of softmax."""
    text = (ROOT / FILE).read_text(encoding="utf-8")
    function = re.search(r'(def softmax\(.*?""".*?"""\n).*?(?=\n\n\ndef )', text, re.S)
    return text.replace(function[0], f"{function[1]}    {body}")


def assert_one_clear_line(lines):
    assert len(lines) in (1, 4) and all(line.isprintable() and len(line) < 1000 for line in lines), lines
    assert "Traceback" not in "".join(lines)


SHORT = ("y = z", "import os; os._exit(0)", "import sys; sys.exit(0)", "while True: pass")  # the others are long tests


@pytest.mark.parametrize(
    "body", [body if body in SHORT else pytest.param(body, marks=pytest.mark.long) for body in BAD_FUNCTIONS]
)
def test_whatever_a_function_does_the_report_is_clear(tmp_path, monkeypatch, body):
    words, hint = BAD_FUNCTIONS[body]
    monkeypatch.setattr(runner, "MEMORY", 1 << 29)  # half a GB is allocated faster than the limit
    if "no result" in words:
        monkeypatch.setattr(runner, "SECONDS", 3)
    result, lines = grade_softmax(tmp_path, with_body(body))
    pattern = words.replace("(", r"\(").replace(")", r"\)")
    assert result.state in ("failed", "timed out") and re.search(pattern, result.text), result
    assert hint in result.hint and len(lines) == 4
    assert_one_clear_line(lines)


@pytest.mark.parametrize(
    "text, words",
    [
        ("def softmax(:\n", f"{FILE}, line 1: Python cannot read this file"),
        (b"\xff\xfe\x00", f"{FILE} is not a text file in UTF-8"),
        (b"#" * (2 << 20), f"{FILE} has more than 1 MB"),
        (b"# coding: none\n", f"{FILE} is not a text file in UTF-8, or in the encoding that a comment"),
        (b"# coding: hex\n", f"{FILE} is not a text file in UTF-8, or in the encoding that a comment"),
        (b"\xef\xbb\xbf# coding: latin-1\n", f"{FILE} is not a text file in UTF-8, or in the encoding that a comment"),
        (b"\xef\xbb\xbf\xef\xbb\xbf\n", f"{FILE}, line 1: Python cannot read this file"),
        ("", f"{FILE} has no function softmax: add it again"),
        ("def softmax(x, axis=-1):\n    return x\n\nimport nothing_of_this_name\n", "No module named"),
        ("def softmax(x, axis=-1):\n    return x\n\nraise SystemExit\n", "your code ended the program"),
    ],
    ids=lambda each: None if isinstance(each, bytes) or "\n" in each else each,
)
def test_whatever_a_file_contains_the_report_is_clear(tmp_path, text, words):
    result, lines = grade_softmax(tmp_path, text)
    assert words in result.text
    assert_one_clear_line(lines)


@pytest.mark.parametrize(
    "first, encoding",
    [
        ("", "utf-8-sig"),
        ("# -*- coding: latin-1 -*-\n", "latin-1"),
        ("#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n", "cp1252"),
        ("# coding: cp1252\n# coding: latin-1\n", "cp1252"),
        ("# coding: utf-8\r\n", "utf-8-sig"),
    ],
)
def test_a_file_in_any_encoding_that_python_reads_is_graded(tmp_path, first, encoding):
    """The character after this comment has another byte in each encoding; a wrong one would change the text."""
    check = f"assert [ord(each) for each in '\xe4\xdf'] == {[0xE4, 0xDF]}; "
    text = with_body(f"{check}y = z").replace('"""', f'{first}"""', 1)
    result, lines = grade_softmax(tmp_path, text.encode(encoding))
    compile((tmp_path / FILE).read_bytes(), FILE, "exec")  # Python reads the file
    line = 68 + first.count("\n")
    assert result.text.startswith(f"{FILE}, line {line}: NameError"), result  # the student's own line number
    assert_one_clear_line(lines)


def other_lengths(comm):
    comm.all_gather(np.zeros(2 + comm.rank))


def overwritten(comm):
    x = np.zeros(2)
    send, receive = comm.send_start(x, 1 - comm.rank), comm.recv_start(np.empty(2), 1 - comm.rank)
    x += 1
    receive.wait()
    send.wait()


def never_received(comm):
    comm.send(np.zeros(2), 1 - comm.rank)


@pytest.mark.parametrize(
    "mistake, hint",
    [
        (other_lengths, "Two ranks make different calls"),
        (overwritten, "An array is changed while it is sent"),
        (never_received, "sends a message that no rank receives"),
    ],
)
def test_each_kind_of_mistake_between_ranks_has_its_own_hint(mistake, hint, capsys):
    with pytest.raises(CommunicatorError) as caught:
        run_ranks(2, mistake, timeout=2)
    result = child.failure(caught.value, {"number": "1.1", "hint": "Look at f."})
    assert result["state"] == "failed" and hint in result["hint"], result


def test_a_missing_file_is_named(tmp_path):
    folder = copy_of(0, tmp_path)
    (folder / FILE).unlink()
    assert f"{FILE} is missing" in grade.grade_exercise(SOFTMAX, folder)["softmax_rows"].text


@pytest.mark.parametrize(
    "make, problem",
    [
        (os.mkfifo, "is a named pipe, not a regular file"),  # a read would not end
        (os.mkdir, "Is a directory"),
        (lambda path: os.symlink("/dev/zero", path), "is a device, not a regular file"),
    ],
)
def test_a_file_of_another_kind_is_not_called_missing(tmp_path, make, problem):
    folder = copy_of(0, tmp_path)
    (folder / FILE).unlink()
    make(folder / FILE)
    assert grade.grade_exercise(SOFTMAX, folder)["softmax_rows"].text == f"{FILE} cannot be read: {problem}"


def test_a_nul_byte_is_named_with_its_line(tmp_path):
    result, lines = grade_softmax(tmp_path, with_body("return '\0'"))
    line = with_body("return '\0'").partition("\0")[0].count("\n") + 1
    assert result.text == f"{FILE}, line {line}: Python cannot read this file: it contains a NUL byte"
    assert_one_clear_line(lines)


def test_no_check_can_delete_or_write_files(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    calls = [
        f"shutil.rmtree({str(victim)!r})",
        f"os.remove({str(victim / 'file')!r})",
        f"open({str(victim / 'file')!r}, 'w')",
        f"os.open({str(victim / 'file')!r}, os.O_WRONLY | os.O_TRUNC)",
        f"os.rename({str(victim)!r}, 'moved')",
        f"pathlib.Path({str(victim / 'new')!r}).mkdir()",
    ]
    lines = ["import os, pathlib, shutil", "refused = 0"]
    for call in calls:
        lines += ["try:", f"    {call}", "except PermissionError:", "    refused += 1"]
    result, _ = grade_softmax(tmp_path / "folder", with_body("\n    ".join([*lines, "raise ValueError(refused)"])))
    assert f"ValueError: {len(calls)}" in result.text, result
    assert (victim / "file").read_text() == "precious" and not (victim / "new").exists()


def test_what_the_code_prints_is_in_the_log_and_not_in_the_report(tmp_path):
    folder = copy_of(0, tmp_path)
    (folder / FILE).write_text(with_body("print('shape', x.shape); return None"))
    graded = {SOFTMAX: grade.grade_exercise(SOFTMAX, folder)}
    grade.write_log(folder / grade.LOG, [("softmax", each) for each in graded[SOFTMAX].values()])
    assert "shape (3, 5)" in (folder / grade.LOG).read_text()
    assert not any("shape (3, 5)" in line for line in grade.report_of(SOFTMAX, graded[SOFTMAX]))


def test_another_exercise_of_the_file_may_be_unfinished(tmp_path):
    """Each exercise is graded with the repository's functions in place of those of other exercises."""
    start.make_folder(0, tmp_path / "new")
    exercise = next(each for each in EXERCISES if each.number == "0.4")
    real, file = copy_of(0, tmp_path / "real"), "stage0_serial/numpy_backend.py"
    shutil.copy(real / "gpt2core/optimizer.py", tmp_path / "new/gpt2core/optimizer.py")
    stripped, text = ((tmp_path / name / file).read_text(encoding="utf-8") for name in ("new", "real"))
    body = text[text.index("        if math.isnan(factor):\n            return\n        # p -= lr") :]
    body = body[: body.index("\n\n\ndef decay_slices")]
    line = re.search(r'        raise NotImplementedError\("exercise 0.4:.*', stripped)[0]
    (tmp_path / "new" / file).write_text(stripped.replace(line, body), encoding="utf-8")
    result = grade.grade_exercise(exercise, tmp_path / "new", ["adamw_model"])["adamw_model"]
    assert result.state == "passed", result


# -- the commands ------------------------------------------------------------------------------------------------------


def run(command, *words):
    """(exit code, standard output, standard error) of python -m exercises.COMMAND."""
    done = subprocess.run(
        [sys.executable, "-m", f"exercises.{command}", *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_a_working_folder_is_complete_and_never_overwritten(tmp_path, capsys):
    folder = tmp_path / "work" / "stage0"
    assert start.command(["--stage", "0", "--dir", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "0.1-softmax.md" in shown
    assert shown.endswith(f"run `make grade STAGE=0 DIR={folder}` in the root of the repository.\n")
    (folder / FILE).write_text("my work")
    assert run("start", "--stage", 0, "--dir", folder) == (
        2, "", f"error: {folder} exists and is not overwritten: choose another folder with DIR=, or delete this one\n",
    )  # fmt: skip
    assert (folder / FILE).read_text() == "my work" and [path.name for path in folder.parent.iterdir()] == ["stage0"]
    assert (folder / "data" / "dummy.txt").is_file() and (folder / "0.5-kv-cache.md").is_file()


@pytest.mark.long
def test_an_interrupt_ends_the_grader_at_once(tmp_path):
    (copy_of(0, tmp_path) / FILE).write_text(with_body("while True: pass"), encoding="utf-8")
    command = [sys.executable, "-u", "-m", "exercises.grade", "--stage", "0", "--dir", str(tmp_path), "--only", "0.1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=5)
    assert (process.returncode, errors) == (130, b"")


def test_a_working_folder_in_the_repository_is_ignored_by_git():
    done = subprocess.run(["git", "check-ignore", "-q", "work/stage0/grade.json"], cwd=ROOT)
    assert done.returncode in (0, 128)  # 128: not a git checkout


def test_only_may_be_repeated(tmp_path, capsys):
    start.make_folder(0, tmp_path / "new")
    assert grade.command(["--stage", "0", "--dir", str(tmp_path / "new"), "--only", "0.1", "--only", "0.2"]) == 0
    lines = capsys.readouterr().out
    assert "  0.1  " in lines and "  0.2  " in lines and "  0.3  " not in lines and "checking" not in lines
    assert not list((tmp_path / "new").rglob("README.md"))


def test_on_a_terminal_the_exercise_that_is_checked_is_shown_until_its_result_replaces_it(
    tmp_path, capsys, monkeypatch
):
    start.make_folder(0, tmp_path / "new")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert grade.command(["--stage", "0", "--dir", str(tmp_path / "new"), "--only", "0.1", "0.4"]) == 0
    text = capsys.readouterr().out
    for number in ("0.1", "0.4"):
        (line,) = re.findall(rf"^checking {number} \.\.\.\r(.*)$", text, re.M)
        assert line.startswith(f"  {number}  ") and len(line) > len(f"checking {number} ...")


@pytest.mark.parametrize(
    "stage, words, line",
    [
        (0, ["--stage", 0], "{folder} has no exercise.json, so it is not a working folder: run `make exercise STAGE=0"),
        (0, ["--stage", 5], "argument --stage: invalid choice: 5"),
        (1, ["--stage", 0], "{folder} is a working folder of stage 1, not of stage 0: use STAGE=1"),
        (0, ["--stage", 0, "--only", "1.1"], "--only 1.1: stage 0 has the exercises 0.1, 0.2, 0.3, 0.4, 0.5"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(tmp_path, stage, words, line):
    if "no exercise.json" not in line:
        (tmp_path / MARKER).write_text(json.dumps({"stage": stage}))
    with pytest.raises(ConfigError) as caught:
        grade.command([*map(str, words), "--dir", str(tmp_path)])
    assert str(caught.value).startswith(line.format(folder=tmp_path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"stage": 7}', '{"stage": true}', '{"stage": [0]}', "[" * 100_000, None]
)
def test_a_broken_marker_is_one_line_that_says_what_to_write(tmp_path, text):
    if text is None:
        os.mkfifo(tmp_path / MARKER)  # a read would not end
    else:
        (tmp_path / MARKER).write_text(text)
    problem = "is not a regular file" if text is None else "does not give a stage"
    want = f'{tmp_path / MARKER} {problem}: if this folder is of stage 0, write {{"stage": 0}}'
    with pytest.raises(ConfigError, match=f"^{re.escape(want)}$"):
        grade.command(["--stage", "0", "--dir", str(tmp_path)])


def test_without_triton_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(grade, "find_spec", lambda name: None)
    (tmp_path / MARKER).write_text(json.dumps({"stage": 3}))
    with pytest.raises(ConfigError, match="^stage 3 needs Triton, whose interpreter .*: pip install triton$"):
        grade.command(["--stage", "3", "--dir", str(tmp_path)])


def test_grading_a_folder_that_does_not_exist_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError) as caught:
        grade.command(["--stage", "2", "--dir", str(tmp_path / "x")])
    assert str(caught.value) == f"{tmp_path}/x does not exist: run `make exercise STAGE=2 DIR={tmp_path}/x` first"


def recorded(folder, stage=0, score=80):
    """A working folder with a grade.json, as make grade writes it."""
    copy_of(stage, folder)
    record = {
        "stage": stage, "score": score, "files": grade.hash_of(folder, graded_files(stage)),
        "exercises": {exercise.number: {"score": score} for exercise in of_stage(stage)},
    }  # fmt: skip
    (folder / grade.RECORD).write_text(json.dumps(record))
    return folder


def test_a_class_is_collected_with_wrong_hashes_and_missing_results(tmp_path, capsys):
    for name in ("alice", "bob", "carol", "dave", "erin"):
        (tmp_path / name).mkdir()
    (recorded(tmp_path / "alice" / "stage0") / FILE).write_text("# changed after grading\n")
    recorded(tmp_path / "bob" / "work" / "stage1", stage=1)
    (tmp_path / "carol" / grade.RECORD).write_text("{}")
    (tmp_path / "frank").mkdir()
    os.mkfifo(tmp_path / "frank" / grade.RECORD)  # a read would not end
    copy_of(2, tmp_path / "dave")
    (recorded(tmp_path / "alice" / "zero") / FILE).unlink()
    assert collect.command([str(tmp_path), "--csv", str(tmp_path / "class.csv")]) == 0

    def scores(stage):
        return " ".join(f"{exercise.number}: 80" for exercise in of_stage(stage))

    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["student", "stage", "score", "exercises", "remark"]
    for row, (words, remark) in zip(
        rows,
        [
            (f"alice 0 80 {scores(0)}", f"wrong hash, changed after make grade: {FILE}"),
            (f"alice 0 80 {scores(0)}", f"missing: {FILE}"),
            (f"bob 1 80 {scores(1)}", "identical to the repository's files"),
            ("carol - - -", "grade.json is not one that this version of make grade writes"),
            ("dave 2 - -", "no grade.json: run make grade"),
            ("erin - - -", "no working folder and no grade.json"),
            ("frank - - -", "grade.json is not one that this version of make grade writes"),
        ],
        strict=True,
    ):
        assert row.split() == [*words.split(), *remark.split()]
    titles, *lines = csv.reader((tmp_path / "class.csv").read_text().splitlines())
    assert titles[:5] == ["student", "stage", "score", "0.1", "0.2"] and titles[-2:] == ["case 7", "remark"]
    by_title = [dict(zip(titles, line, strict=True)) for line in lines]
    assert [row["0.1"] for row in by_title] == ["80", "80", "", "", "", "", ""] and by_title[2]["1.5"] == "80"


def test_collecting_without_students_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match="has no sub-folders: give the folder"):
        collect.command([str(tmp_path)])
    with pytest.raises(ConfigError, match="is not a folder: give the folder"):
        collect.command([str(tmp_path / "none")])
