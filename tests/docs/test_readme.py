"""The documents are tested: Python blocks, commands and their output, flags, paths and line counts.

A ```console block shows commands after "$ " and, until the next one, their output, where "..." stands for anything.
`make train` and `make generate` run with this interpreter. Commands that install something or need several machines are
not run, nor those of mpirun where there is no MPICH and those of Triton's interpreter where it does not work; a ```sh
block is not run at all. A ```python block is pasted into Python's prompt, line by line, and must print its lines that
start with "#>". One that starts with a name, as in "# first.py", is a file of that name beside the page; one without
"#>" is a quotation (test_quotes.py).
"""

import code
import contextlib
import doctest
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from exercises.start import copy_packages, new_folder
from gpt2core.app import cli
from tests.support.interpreter import interpreter_works

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "data" / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("stage*/*.md")),
    *sorted(ROOT.glob("exercises/**/*.md")),
]
ELLIPSIS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MPIRUN = Path(sys.executable).with_name("mpirun")  # of the wheel beside this interpreter
MPICH = MPIRUN.exists() and "HYDRA" in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
NEEDS_INTERPRETER = "|TRITON_INTERPRET=1" * (not interpreter_works())
NEEDS_MPI = r"|(TRITON_INTERPRET=1 )?mpirun\b|make .*STAGE=[13]" * (not MPICH)
NOT_RUN = re.compile(
    r"(make (?!train|generate)|(git|pip|python3? -m (pip|venv)|ssh)\b|cd \S+$" + NEEDS_MPI + NEEDS_INTERPRETER + ")"
)
LONG_COMMANDS = re.compile(  # run only with --long: other numbers of ranks, ways to divide the work, and precisions
    r"mpirun -n 3 |mpirun .*(--zero \d|--tp \d|--mode (replicate|tensor))|.*--precision|mpirun .*--max-new-tokens 1$"
)
PACKAGES = "gpt2core", "stage*", "staged_gpt2", "torch_bridge", "exercises"
CODE = [path for folder in PACKAGES for path in ROOT.glob(f"{folder}/**/*.py")]
SCRIPTS = [path for folder in ("benchmarks", "data", "tests", "docs") for path in (ROOT / folder).rglob("*.py")]


def prose(page):
    """The text of a page without its generated tables, which name commands of the commit that was measured."""
    return re.sub(r"<!-- table: .*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.S)


def blocks(page, language):
    """(line number, text) of each fenced block of a page in `language`."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if match[1] == language:
            yield text.count("\n", 0, match.start()) + 1, match[2]


def files(page):
    """(name, text) of the files that a page asks its reader to write."""
    for _, block in blocks(page, "python"):
        if match := re.match(r"# (\w+\.py)\n", block):
            yield match[1], block


def write_files(page, directory):
    if page.name.startswith(("2.", "3.")) or page.parent.name.startswith(("stage2", "stage3")):
        pytest.importorskip("triton")
    for name, text in files(page):
        (directory / name).write_text(text, encoding="utf-8")


def name_of(page):
    return str(page.relative_to(ROOT))


def commands(page):
    """(command, the output that the page shows) in the order of the page."""
    for _, block in blocks(page, "console"):
        for piece in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, shown = piece.partition("\n")
            yield command, shown


def differences(shown, got):
    """None when `got` matches the output that the page shows, else both, line by line."""
    if doctest.OutputChecker().check_output(shown, got, ELLIPSIS):
        return None
    return doctest.OutputChecker().output_difference(doctest.Example("", shown), got, doctest.REPORT_NDIFF)


# -- Python and commands ----------------------------------------------------------------------------------------------


def pasted(console, block):
    """What Python's prompt prints when `block` is pasted into it, errors included."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        for line in block.splitlines():  # no empty line after it: the reader may paste the next block at once
            console.push(line)
    return output.getvalue()


def expected(block):
    """The output that a block shows, "" if none: its lines that start with #>."""
    return "".join(f"{line}\n" for line in re.findall(r"^#> ?(.*)$", block, re.M))


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "python"))], ids=name_of)
def test_the_python_of_a_page_can_be_pasted_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    if page.name.startswith(("2.", "3.")) and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the examples of these exercises need Triton's interpreter")
    write_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    console, report = code.InteractiveConsole({"__name__": "__console__"}), []  # one namespace for the page
    for line, block in blocks(page, "python"):
        if shown := expected(block):  # the other blocks are files or quotations
            if wrong := differences(shown, pasted(console, block)):
                report.append(f"{name_of(page)}:{line}\n{wrong}")
    assert not report, "\n".join(report)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_of_a_page_has_prompts_of_python(page):
    assert re.findall(r"^(?:>>>|\.\.\. ).*", page.read_text(encoding="utf-8"), re.M) == []


def test_a_block_that_cannot_be_pasted_is_found():
    console = code.InteractiveConsole()
    assert pasted(console, "def f():\n    return 3\n\nprint(f())\n#> 3\n") == "3\n"
    assert "SyntaxError" in pasted(console, "def f():\n    return 3\nprint(f())\n#> 3\n")  # no empty line after f
    assert "IndentationError" in pasted(console, "def f():\n    x = 3\n\n    return x\n\nprint(f())\n")
    assert "NameError" in pasted(console, "print(unknown)\n")
    assert expected("print(2)  # two\n#> 2\n#>\n#> ...\n") == "2\n\n...\n"


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
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS")
    }
    environment |= {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(copy), os.environ.get("PYTHONPATH")])),
    }

    def run(command, folder):
        command = re.sub(r"^make ", f"make --no-print-directory PYTHON='{sys.executable}' ", command)
        options = dict(cwd=copy / folder, env=environment, capture_output=True, text=True, timeout=300)
        return subprocess.run(["bash", "-c", command], **options)

    run.copy = copy
    return run


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name_of)
def test_the_commands_of_a_page_print_what_the_page_shows(page, shell, request):
    long = request.config.getoption("--long")
    failures, folder = [], page.parent.relative_to(ROOT)
    write_files(page, shell.copy / folder)
    for command, shown in commands(page):
        if NOT_RUN.match(command) or not long and LONG_COMMANDS.match(command):
            continue
        done = shell(command, folder)
        wrong = differences(shown, done.stdout)
        if done.returncode or done.stderr or wrong:
            failures.append(f"$ {command}\nexit code {done.returncode}\n{done.stderr}{wrong or ''}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2, 3))])
def test_a_lesson_works_in_a_finished_working_folder_of_its_exercises(stage, tmp_path):
    (page,) = ROOT.glob(f"stage{stage}_*/README.md")
    new_folder(tmp_path / "work", lambda copy: copy_packages(stage, copy))  # with all functions
    folder = tmp_path / "work" / page.parent.name
    write_files(page, tmp_path / "work")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "TRITON_INTERPRET": "1"}

    def run(*words, **options):
        options |= dict(env=environment, capture_output=True, text=True, timeout=300)
        return subprocess.run(words, **options)

    shown = [block for _, block in blocks(page, "python") if expected(block)]
    done = run(sys.executable, "-i", "-q", input="\n".join(shown), cwd=tmp_path / "work")
    wrong = differences("".join(map(expected, shown)), done.stdout)
    assert not wrong and "Error" not in done.stderr, f"{wrong}\n{done.stderr}"
    for command, output in commands(page):
        if not NOT_RUN.match(command) and not re.match(r"make |\./|python -m benchmarks|.*hostfile", command):
            done = run("bash", "-c", command, cwd=folder)
            wrong = differences(output, done.stdout)
            assert (done.returncode, done.stderr, wrong) == (0, "", None), f"$ {command}\n{wrong}"


TWO_COMMANDS = {
    "stage0_serial": "python train_gpt2.py --preset tiny --steps 2",
    "stage1_mpi": "mpirun -n 2 python train_gpt2.py --preset tiny --steps 2",
    "stage2_cuda": "TRITON_INTERPRET=1 python train_gpt2.py --preset nano --n-layer 1 --steps 1 --batch-size 1",
    "stage3_mpi_cuda": "mpirun -n 2 python train_gpt2.py --preset nano --n-layer 1 --steps 1 --batch-size 2",
}
LONG = "stage2_cuda", "stage3_mpi_cuda"  # the interpreter is slow, and the scripts are those of stages 0 and 1


@pytest.mark.parametrize(
    "folder", [pytest.param(folder, marks=[pytest.mark.long] * (folder in LONG)) for folder in TWO_COMMANDS]
)
def test_a_model_that_was_trained_in_a_stage_folder_continues_a_text_there(folder, shell):
    if NOT_RUN.match(TWO_COMMANDS[folder]):
        pytest.skip("needs MPI, or an interpreter of Triton that works here")
    trained = shell(f"{TWO_COMMANDS[folder]} --sample 0", folder)
    saved = re.search(r"saved in (\.\./out/\S+)", trained.stdout)
    assert saved and not trained.stderr, trained.stderr
    done = shell("PYTHON=python TRITON_INTERPRET=1 ./run_inference.sh --prompt Grace --max-new-tokens 1", folder)
    assert done.stderr.startswith(f"weights: {saved[1]}/step-") and done.stderr.count("\n") == 1
    assert done.returncode == 0 and "Continuation:" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_shows_only_digits_of_a_loss_that_are_those_of_every_cpu(page):
    """The library and the CPU of the matrix products decide the digits after these: three decimals, then "..."."""
    shown = re.findall(r"^step +\d+ .*?\| loss (\S+)|\| norm (\S+)", page.read_text(encoding="utf-8"), re.M)
    numbers = [number for pair in shown for number in pair if number]
    assert [number for number in numbers if not re.fullmatch(r"(\d+(\.\d{1,3})?)?\.\.\.", number)] == []


def test_a_command_whose_output_differs_is_found():
    assert differences("step 0 | loss 5.1...\n", "step 0 | loss 4.1\n") and not differences("a ... c\n", "a b c\n")


# -- flags, paths, modules --------------------------------------------------------------------------------------------


def flags_of(*parsers):
    return {flag for parser in parsers for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_flags_that_a_page_names_exist(page):
    known = flags_of(cli.train_parser(), cli.inference_parser())
    for script in CODE + SCRIPTS:
        text = script.read_text(encoding="utf-8")
        known |= set(re.findall(r'"(--[a-z][a-z0-9-]*)', text))
        if "@benchmark(" in text:  # its arguments are flags
            known |= {f"--{name.replace('_', '-')}" for name in re.findall(r"^    ([a-z_]+)=dict\(", text, re.M)}
    known |= {"--extra-index-url", "--index-url", "--upgrade", "--hostfile", "--mca"}  # of pip and mpirun
    known |= {"--shm-size", "--local-dir", "--no-browser"}  # of Docker, hf and JupyterLab
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", prose(page)))
    assert named - known == set()


def test_usage_names_every_flag():
    named = set(re.findall(r"--[a-z][a-z0-9-]*", (ROOT / "docs" / "USAGE.md").read_text(encoding="utf-8")))
    parsers = cli.train_parser(), cli.inference_parser()
    hidden = {"--micro-shards"}  # an alias for older command lines
    assert {flag for flag in flags_of(*parsers) if flag.startswith("--")} - named - hidden - {"--version"} == set()


# Names of files that a reader has or that a run writes.
OF_THE_READER = set("my.toml config.json tokenizer.json model.safetensors optimizer.safetensors state.json".split())
OF_THE_READER |= set("grade.json grade.log class.csv my.txt prompts.txt run.jsonl run.png one.jsonl two.jsonl".split())


def paths_in(page):
    """(path, whether it is a link) for everything in `page` that reads like a path of this repository."""
    text = prose(page)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"\w+:", target):
            yield target, True
    for quoted in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text) + [command for command, _ in commands(page)]:
        for word in quoted.split():
            if re.fullmatch(r"[\w./-]+\.(py|md|sh|jsonl?|txt|png|toml)|[\w./-]+/", word):
                yield word, False


def exists(page, path):
    """Whether a path that `page` names exists: from the page, the root, the core; a name without a folder anywhere."""
    if any((place / path).exists() for place in (page.parent, ROOT, ROOT / "gpt2core", *ROOT.glob("stage*"))):
        return True
    return "/" not in path and any(ROOT.glob(f"*/**/{path}"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_paths_that_a_page_names_exist(page):
    of_files = {name for name, _ in files(page)} | OF_THE_READER
    missing = set()
    for path, is_link in paths_in(page):
        first = path.split("/")[0]
        ours = is_link or path.endswith(".py") or "/" not in path or (ROOT / first).exists()
        if is_link and not (page.parent / path).exists():
            missing.add(path)
        elif ours and first not in ("out", "run", "work", "class") and path not in of_files and not exists(page, path):
            missing.add(path)
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_picture_of_a_page_has_an_alternative_text(page):
    text = page.read_text(encoding="utf-8")
    pictures = re.findall(r"!\[([^\]]*)\]", text)
    assert [alt for alt in pictures if len(alt.split()) < 4] == [] and "<img" not in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_sections_that_a_page_links_exist(page):
    missing = []
    for target, section in re.findall(r"\]\(([^)#\s]*\.md)?#([\w-]+)\)", page.read_text(encoding="utf-8")):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = [re.sub(r"[^\w -]", "", heading).lower() for heading in re.findall(r"^#+ (.*)$", text, re.M)]
        if section not in [heading.replace(" ", "-") for heading in headings]:
            missing.append(f"{target}#{section}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_modules_that_a_page_runs_exist(page):
    names = re.findall(r"python3? -m ((?:benchmarks|exercises|stage\d_\w+|gpt2core|tests)[\w.]*\w)", prose(page))
    paths = {name: ROOT / name.replace(".", "/") for name in names}  # a module, or a package with __main__.py
    modules = {name: (path.with_suffix(".py"), path / "__main__.py") for name, path in paths.items()}
    assert [name for name, files in modules.items() if not any(file.exists() for file in files)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_make_targets_that_a_page_names_exist(page):
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = re.findall(r"(?:`|^\$ |^)make ([a-z][a-z-]*)", prose(page), re.M)
    assert set(named) - targets == set()


# -- quoted code: see also test_quotes.py -----------------------------------------------------------------------------


def test_the_first_lesson_quotes_gelu():
    lesson = ROOT / "stage0_serial" / "README.md"
    assert any(block.startswith("def gelu(x):") for _, block in blocks(lesson, "python"))


def test_the_architecture_quotes_the_script_of_stage_1():
    page, script = ROOT / "docs" / "ARCHITECTURE.md", ROOT / "stage1_mpi" / "train_gpt2.py"
    (quoted,) = [block for _, block in blocks(page, "") if block.startswith("from ")]
    assert script.read_text(encoding="utf-8").endswith(quoted)


# -- the README -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, works", [(60, False), (1_000, True), pytest.param(1_000_000, True, marks=pytest.mark.long)]
)
def test_the_commands_for_the_readers_own_text_work_for_any_text_that_is_long_enough(size, works, shell):
    (block,) = [text for _, text in blocks(ROOT / "README.md", "sh") if "my.txt" in text]
    train, generate = (line.replace("100'", "1 --sample 0'") for line in block.splitlines())
    # characters of one to four bytes, most of which the model's own corpus does not have
    letters = np.random.default_rng().choice(list("etaoin shrdlu\n\täß—日本語שלום🙂\r\0"), size)
    (shell.copy / "my.txt").write_text("".join(letters), encoding="utf-8", newline="")
    done = shell(train, ".")
    if works:
        assert "trained 1 step " in done.stdout and not done.stderr
        done = shell(generate, ".")
        assert "weights: out/mine\n" in done.stdout and "Once upon a time" in done.stdout and not done.stderr
    else:
        line, of_make = done.stderr.splitlines()
        assert re.fullmatch(r"error: --data my.txt: the text has \d+ tokens, but .* 257 .*: give more text or .*", line)
        assert (done.returncode, of_make.startswith("make: ***")) == (2, True)


def test_the_reading_list_has_the_right_number_of_lines_and_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| \[`([\w/.]+)`\].* \| (\d+) \| (\d+) \|$", text, re.M)
    assert len(rows) == 11
    wrong, total = [], 0
    for path, lines, minutes in rows:
        actual = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        total += actual
        off = abs(int(lines) - actual) > max(3, 0.1 * actual) or abs(int(minutes) - actual / 15) > max(1, actual / 150)
        wrong += [f"{path}: {actual} lines, {round(actual / 15)} minutes"] * off  # 15 lines of new code a minute
    assert wrong == []
    (said,) = re.findall(r"read these eleven files, about ([\d,]+) lines", text)
    assert abs(int(said.replace(",", "")) - total) <= 0.1 * total, total


def test_the_figure_of_the_loss_curves_is_drawn_from_results(tmp_path):
    script = ROOT / "docs" / "figures" / "loss_curves.py"
    subprocess.run([sys.executable, script, "--out", tmp_path / "curves.png"], check=True, timeout=120)
    assert (tmp_path / "curves.png").stat().st_size > 10_000
