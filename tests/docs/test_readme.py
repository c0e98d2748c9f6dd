"""The pages are run: Python blocks by doctest, commands by a shell in a copy of the repository, their output compared.

A ```console block shows commands after "$ " and, until the next one, what they print, where "..." stands for anything.
Commands that set up (make, git, pip) or need several machines are not run, nor those of mpirun where there is no MPICH;
a ```sh block is not run at all. A ```python block that begins with a name, as in "# first.py", is a file of that name
beside the page.
"""

import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("stage*/README.md"))) if page.exists()]
LESSONS = [page for page in PAGES if page.parent != ROOT]
ELLIPSIS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MPIRUN = Path(sys.executable).with_name("mpirun")  # of the wheel beside this interpreter
MPICH = MPIRUN.exists() and "HYDRA" in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
NOT_RUN = re.compile(r"(make|git|pip|python3? -m (pip|venv)|ssh" + "|mpirun" * (not MPICH) + r")\b|cd \S+$")


def blocks(page, language):
    """(line number, text) of each fenced block of a page in `language`."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if match[1] == language:
            yield text.count("\n", 0, match.start()) + 1, match[2]


def files(page):
    """(name, text) of the files that a page has its reader write."""
    for _, block in blocks(page, "python"):
        if match := re.match(r"# (\w+\.py)\n", block):
            yield match[1], block


def write_files(page, directory):
    if page.parent.name.startswith(("stage2", "stage3")):
        pytest.importorskip("triton")
    for name, text in files(page):
        (directory / name).write_text(text, encoding="utf-8")


def name_of(page):
    return str(page.relative_to(ROOT))


def commands(page):
    """(command, what the page shows of its output) in the order of the page."""
    for _, block in blocks(page, "console"):
        for piece in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, shown = piece.partition("\n")
            yield command, shown


def differences(shown, got):
    """None when `got` is what the page shows, else both, line by line."""
    if doctest.OutputChecker().check_output(shown, got, ELLIPSIS):
        return None
    return doctest.OutputChecker().output_difference(doctest.Example("", shown), got, doctest.REPORT_NDIFF)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_of_a_page_gives_what_it_shows(page, tmp_path, monkeypatch):
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    parser, names, said = doctest.DocTestParser(), {}, []
    for line, block in blocks(page, "python"):
        test = parser.get_doctest(block, names, f"{name_of(page)}:{line}", str(page), line)
        runner = doctest.DocTestRunner(optionflags=ELLIPSIS, verbose=False)
        runner.run(test, out=said.append, clear_globs=False)
        names = test.globs  # one namespace for the page
    assert not said, "".join(said)


@pytest.fixture
def shell(tmp_path):
    """shell(command, folder): run a command in a folder of a copy of the repository, the same one throughout a test.

    The copy is at shell.copy.
    """
    (tmp_path / "bin").mkdir()
    for name, program in (("python", sys.executable), ("mpirun", MPIRUN)):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    copy = tmp_path / "repository"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "results", "tests", "__pycache__"))
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")])),
    }

    def run(command, folder):
        options = dict(cwd=copy / folder, env=environment, capture_output=True, text=True, timeout=300)
        return subprocess.run(["bash", "-c", command], **options)

    run.copy = copy
    return run


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_print_what_it_shows(page, shell):
    failures, folder = [], page.parent.relative_to(ROOT)
    write_files(page, shell.copy / folder)
    for command, shown in commands(page):
        if NOT_RUN.match(command):
            continue
        done = shell(command, folder)
        wrong = differences(shown, done.stdout)
        if done.returncode or done.stderr or wrong:
            failures.append(f"$ {command}\nexit code {done.returncode}\n{done.stderr}{wrong or ''}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("page", LESSONS, ids=name_of)
def test_the_code_that_a_page_quotes_stands_in_the_core_or_the_stage_word_for_word(page):
    sources = [file for place in (ROOT / "gpt2core", page.parent) for file in place.rglob("*.py")]
    code = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    quoted = [block for _, block in blocks(page, "") if block.startswith(("def ", "class ", "@"))]
    assert [block for block in quoted if block not in code] == []


def test_the_first_lesson_quotes_gelu():
    assert any(block.startswith("def gelu(x):") for _, block in blocks(ROOT / "stage0_serial" / "README.md", ""))


def test_a_command_whose_output_differs_would_be_found():
    assert differences("step 0 | loss 5.1...\n", "step 0 | loss 4.1\n") and not differences("a ... c\n", "a b c\n")
