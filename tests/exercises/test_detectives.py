"""The detectives: a planted copy has a score of 0 %, the mend 100 %, and a mend that hides the symptom is refused."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from exercises import collect, detective, grade
from exercises.cases import CASES, FAULTS, planted, problem
from exercises.catalog import PAGES, ROOT
from exercises.commands import MARKER
from exercises.source import find, parse
from exercises.start import new_folder
from gpt2core.errors import ConfigError

HIDING = tomllib.loads((Path(__file__).parent / "hiding_mends.toml").read_text(encoding="utf-8"))["mend"]
EACH = pytest.mark.parametrize("number", CASES)
SHORT = (4, 5)  # the cases that are graded without --long


def marked(cases, long):
    """One pytest parameter for each case; those for which long(case) is true are long tests."""
    return [pytest.param(each, marks=[pytest.mark.long] * long(each), id=str(name)) for name, each in cases]


def folder_of(case, folder):
    new_folder(folder, lambda copy: detective.fill_folder(case, copy))
    return folder


def replace(folder, file, old, new):
    text = (folder / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} does not contain, exactly once: {old}"
    (folder / file).write_text(text.replace(old, new.removeprefix("\n")), encoding="utf-8")


def graded(case, folder):
    """(score, the report) of a working folder."""
    lines = []
    record = grade.grade_case(case.number, folder, show=lines.append)
    report = "\n".join(lines)
    assert all(line.isprintable() for line in lines) and "hint" not in report
    assert not re.search(r"\b1 (ranks|threads|heads|positions|elements|tokens|micro-batches)\b", report)
    return record["score"], report


# -- the faults --------------------------------------------------------------------------------------------------------


@EACH
def test_the_text_in_which_a_fault_is_planted_exists_exactly_once_and_its_functions_exist(number):
    case = CASES[number]
    for file, old, new in case.changes:
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1 and new != old, file
    for file, name in case.functions:
        assert find(parse(planted(case, file), file), name), name
    tree = parse((ROOT / (case.module.replace(".", "/") + ".py")).read_text(encoding="utf-8"), case.module)
    assert [check for check in case.checks if find(tree, check) is None] == []


@EACH
def test_a_working_folder_has_the_fault_and_no_text_of_the_answer(number, tmp_path):
    case, folder = CASES[number], folder_of(CASES[number], tmp_path / "work")
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in folder.rglob("*") if path.is_file()}
    for file, old, new in case.changes:
        assert new in texts[folder / file]
        answer = [line.strip() for line in old.splitlines() if line.strip() and line not in new.splitlines()]
        assert not [path for path, text in texts.items() if all(line in text for line in answer)]
    assert not [path for path in texts if path.name in (FAULTS.name, "README.md") or "tests" in path.parts]
    assert json.loads(texts[folder / MARKER]) == {"case": number} and case.page in os.listdir(folder)


@EACH
def test_a_page_shows_the_symptom_and_names_neither_the_file_nor_the_function(number):
    case, page = CASES[number], (PAGES / CASES[number].page).read_text(encoding="utf-8")
    assert page.startswith(f"# Detective {number}: {case.title}\n") and f"`make grade CASE={number}`" in page
    assert f"```sh\n{case.symptom.strip()}\n```" in page
    assert all(word in page for word in case.words)
    answers = [name.rpartition(".")[2] for _, name in case.functions] + [Path(file).name for file in case.files]
    assert [word for word in answers if word != "wait" and word in page] == []


@pytest.mark.parametrize("case", marked(CASES.items(), lambda case: True))
def test_the_symptom_of_a_page_is_the_output_of_the_planted_copy(case, tmp_path):
    folder = folder_of(case, tmp_path / "work")
    done = in_folder(case.symptom, folder)
    assert all(word in done.stdout + done.stderr for word in case.words), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error:") == (case.number == 5), done.stderr


def investigations(case, page):
    """The commands in the table of a page, as its reader types them in the working folder."""
    for command in re.findall(r"^\| `(.+?)` \| .* \|$", page, re.M):
        if parity := re.fullmatch(rf'make parity DIR=work/case{case.number} ARGS="(.*)"', command):
            yield f"PYTHONPATH={ROOT} python -m benchmarks.parity {parity[1]}"  # as the Makefile does
        elif command.startswith("... ") and case.number == 5:  # the page says: in place of --no-save
            yield case.symptom.replace("--no-save", command[4:])
        elif command.startswith("... "):  # at the end of the symptom, or in its loop
            yield re.sub(r"\n(  grep|\Z)", rf" {command[4:]}\n\1", case.symptom, count=1)
        elif not command.startswith("pkill "):  # it would end the ranks of other tests too
            yield command.replace("...", case.symptom.strip())


def in_folder(command, folder):
    """The finished shell command, in a working folder; `python` is this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("case", marked(CASES.items(), lambda case: True))
def test_the_commands_of_a_page_run_in_a_new_folder_one_after_another(case, tmp_path):
    folder, page = folder_of(case, tmp_path / "work"), (PAGES / case.page).read_text(encoding="utf-8")
    for text, name in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", page, re.M | re.S):
        (folder / name).write_text(text, encoding="utf-8")
    commands = [case.symptom, case.symptom, *investigations(case, page)]
    assert len(commands) == 2 + page.count("\n| `") - page.count("\n| `pkill ")
    for command in commands:
        done = in_folder(command, folder)
        errors = [line for line in done.stderr.splitlines() if re.search(r"\berror: ", line)]
        assert [line for line in errors if "the loss is nan" not in line] == [], f"{command}\n{done.stderr}"
        assert done.returncode != 2 or errors, f"{command}\n{done.stderr}"
        stops = command.startswith("python ") and ".py" in command.split()[1]  # the file of the page ends at the fault
        assert ("Traceback" in done.stderr) == stops, f"{command}\n{done.stderr}"


# -- mends -------------------------------------------------------------------------------------------------------------


@EACH
def test_a_planted_copy_is_not_solved(number, tmp_path):
    case = CASES[number]
    score, report = graded(case, folder_of(case, tmp_path / "work"))
    assert score == 0 and report.endswith("no function differs from the copy")


@pytest.mark.parametrize("case", marked(CASES.items(), lambda case: case.number not in SHORT))
def test_the_fault_fails_a_check_and_the_mend_has_100_percent(case, tmp_path):
    folder = folder_of(case, tmp_path / "work")
    file, name = next(each for each in case.functions if each[0] == case.files[0])
    assert problem(case, folder)  # unchanged
    text = (folder / file).read_text(encoding="utf-8")
    line = find(parse(text, file), name).body[-1]
    lines = text.split("\n")
    end = line.lineno - 1 if isinstance(line, ast.Return) else line.end_lineno
    lines.insert(end, " " * line.col_offset + "pass")
    (folder / file).write_text("\n".join(lines), encoding="utf-8")  # a change that mends nothing
    score, report = graded(case, folder)
    assert score == 0 and "failed  " in report, report
    for file in case.files:
        shutil.copy(ROOT / file, folder / file)
    score, report = graded(case, folder)
    assert score == 100 and report.count("passed  ") == len(case.checks), report


REFUSED_AT_ONCE = "differs from the copy", "hides the symptom"


@pytest.mark.parametrize(
    "mend",
    marked(((each["name"], each) for each in HIDING), lambda mend: not mend["words"].endswith(REFUSED_AT_ONCE)),
)
def test_a_mend_that_hides_the_symptom_is_refused(mend, tmp_path):
    case = CASES[mend["case"]]
    folder = folder_of(case, tmp_path / "work")
    for file, old, new in mend["changes"]:
        replace(folder, file, old, new)
    score, report = graded(case, folder)
    assert score == 0 and mend["words"] in report, report


def test_there_are_hiding_mends_of_every_case():
    assert {mend["case"] for mend in HIDING} == set(CASES)


def test_comments_imports_and_helpers_beside_the_mend_are_accepted_and_other_changes_are_not(tmp_path):
    case, (file, *_) = CASES[5], CASES[5].files
    folder = folder_of(case, tmp_path / "work")
    text = (ROOT / file).read_text(encoding="utf-8")
    helper = "\n\ndef helper(x):\n    return x\n"
    (folder / file).write_text(f"import os  # mine\n{text}{helper}".replace('"""The kernels', '"""My kernels'))
    assert problem(case, folder) is None
    other = folder / "gpt2core" / "optimizer.py"
    copy = other.read_text(encoding="utf-8")
    other.write_text(copy.replace("# steps", "# number of steps"), encoding="utf-8")
    assert problem(case, folder) is None
    other.write_text(copy.replace("return self.rule", "print(1); return self.rule"), encoding="utf-8")
    assert "Optimizer.coefficients differs from the copy, but the fault is not there" in problem(case, folder)
    other.write_text(copy + helper, encoding="utf-8")
    assert "helper was added, but the fault is not in this file" in problem(case, folder)
    other.write_text(copy.replace("def coefficients", "def factors"), encoding="utf-8")
    assert "coefficients is missing" in problem(case, folder)


# -- the commands ------------------------------------------------------------------------------------------------------


def test_a_detective_is_made_graded_and_collected(tmp_path, capsys):
    folder = tmp_path / "class" / "alice" / "nan"
    words = ["--case", "5", "--dir", str(folder)]
    assert detective.command(words) == 0
    assert "make grade CASE=5 DIR=" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        detective.command(words)
    assert grade.command(words) == 0
    assert "score: 0 %" in capsys.readouterr().out
    assert json.loads((folder / grade.RECORD).read_text())["checks"].popitem()[1] == "not run"
    assert collect.command([str(tmp_path / "class"), "--csv", str(tmp_path / "class.csv")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["alice", "case", "5", "0", "case", "5:", "0"]
    titles, row = (tmp_path / "class.csv").read_text().splitlines()
    assert titles.endswith(",case 7,remark") and row.startswith("alice,case 5,0,")
    (folder / "gpt2core" / "tensor.py").unlink()
    assert grade.command(words) == 0
    assert "gpt2core/tensor.py is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--case", "9"], "argument --case: invalid choice: 9"),
        (["--stage", "0"], "is a working folder of case 5, not of stage 0: use CASE=5"),
        (["--case", "4"], "is a working folder of case 5, not of case 4: use CASE=5"),
        (["--case", "5", "--stage", "0"], "not allowed with argument"),
        (["--case", "5", "--only", "0.1"], "--only 0.1: case 5 is graded as a whole: omit --only"),
        ([], "one of the arguments --stage --case is required"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words, message, tmp_path):
    (tmp_path / MARKER).write_text('{"case": 5}')
    with pytest.raises(ConfigError) as caught:
        grade.command([*words, "--dir", str(tmp_path)])
    assert message in str(caught.value) and "\n" not in str(caught.value)
