"""The notebooks of the stages: up to date with lesson and page, run from the first to the last cell, links exist."""

import doctest
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "docs" / "notebooks"
SLOWEST = 180  # seconds that a notebook may take on two cores
SHORTEST = 3  # the stage whose notebook is also run by `make test`
ELLIPSIS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
STAGES = (0, 1, 2, 3)
RUN = [pytest.param(stage, marks=() if stage == SHORTEST else pytest.mark.long) for stage in STAGES]


@pytest.fixture(scope="module")
def tools():
    """(build, run): the two scripts of docs/notebooks as modules."""
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    return load("build"), load("run")


def load(name):
    """A script of docs/notebooks as a module. `run` imports `build` by this name."""
    spec = importlib.util.spec_from_file_location(name, NOTEBOOKS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("stage", STAGES)
def test_the_notebook_is_what_build_writes(tools, stage):
    build, _ = tools
    assert build.is_current(stage), "run python docs/notebooks/build.py"


def test_a_changed_lesson_makes_a_notebook_out_of_date(tools, monkeypatch):
    build, _ = tools
    section = build.section
    monkeypatch.setattr(build, "section", lambda lesson, number: section(lesson, number).replace("tensor", "array"))
    assert not build.is_current(0)


def in_git(stage):
    """The notebook of a stage as it is in the repository, with its outputs."""
    import nbformat

    (path,) = ROOT.glob(f"stage{stage}_*/walkthrough.ipynb")
    return nbformat.read(path, as_version=4)


def wrong_prints(notebook):
    """The cells of an executed notebook that did not print their lines after #>."""
    wrong = []
    for cell in notebook.cells:
        expected = "".join(f"{line}\n" for line in re.findall(r"^#> ?(.*)$", cell.source, re.M))
        printed = "".join(output.text for output in cell.get("outputs", []) if output.output_type == "stream")
        if expected and not doctest.OutputChecker().check_output(expected, printed, ELLIPSIS):
            wrong.append(f"{cell.source}\nprinted:\n{printed}")
    return wrong


@pytest.mark.parametrize("stage", STAGES)
def test_a_notebook_in_git_has_the_outputs_of_a_run_without_errors(tools, stage):
    """The outputs do not say whether they are those of the present code: the test that runs the notebooks does."""
    notebook = in_git(stage)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert wrong_prints(notebook) == []
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_notebook_in_git_is_small_and_each_of_its_pictures_has_an_alternative_text(tools, stage):
    build, run = tools
    notebook = in_git(stage)
    pictures = [png for _, png in run.pictures(notebook)]
    assert len(pictures) >= 5 and max(map(len, pictures)) < 60_000
    assert build.notebook_path(stage).stat().st_size < 300_000
    assert alternative_texts(notebook) == len(pictures)


def alternative_texts(notebook):
    """The number of pictures of an executed notebook that have an alternative text of several words."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("metadata", {}).get("image/png", {}).get("alt", "") for output in outputs]
    return sum(len(text.split()) >= 5 for text in texts)


def test_a_notebook_without_outputs_or_with_those_of_another_order_is_out_of_date(tools, tmp_path, monkeypatch):
    build, _ = tools
    monkeypatch.setattr(build, "notebook_path", lambda stage: tmp_path / "walkthrough.ipynb")
    notebook = in_git(3)
    build.write(tmp_path / "walkthrough.ipynb", notebook)
    assert build.is_current(3)
    *_, last = (cell for cell in notebook.cells if cell.cell_type == "code")
    last.execution_count = 1
    build.write(tmp_path / "walkthrough.ipynb", notebook)
    assert not build.is_current(3)
    build.write(tmp_path / "walkthrough.ipynb", build.build(3))
    assert not build.is_current(3)


@pytest.mark.parametrize("stage", STAGES)
def test_the_links_of_a_notebook_exist(tools, stage):
    build, _ = tools
    folder = build.stage_folder(stage)
    text = "\n".join(cell.source for cell in build.build(stage).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not re.match(r"\w+:", link)]
    assert links and [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("stage", RUN)
def test_a_notebook_runs_and_prints_what_its_cells_say(tools, stage):
    """Each cell runs without an error, and prints its lines after #>; the whole notebook is fast enough."""
    _, run = tools
    if stage >= 2:
        pytest.importorskip("triton")
    notebook, seconds = run.execute(stage)
    assert wrong_prints(notebook) == []
    assert alternative_texts(notebook) == len(list(run.pictures(notebook))) >= 5
    assert seconds < SLOWEST


def test_a_cell_of_a_page_that_fails_is_reported_in_one_place(tools, tmp_path, monkeypatch, capsys):
    build, run = tools
    broken = build.v4.new_notebook(cells=[build.v4.new_code_cell("print(1 / 0)", id="a")])
    (tmp_path / "walkthrough.ipynb").write_text(build.nbformat.writes(broken))
    monkeypatch.setattr(run, "notebook_path", lambda stage: tmp_path / "walkthrough.ipynb")
    monkeypatch.setattr(sys, "argv", ["run.py", "0", "--out", str(tmp_path / "out")])
    assert run.main() == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_outside_the_repository_the_first_cell_says_what_to_do(tools, tmp_path):
    build, _ = tools
    done = subprocess.run(
        [sys.executable, "-c", build.SETUP.format(stage=0)], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1) and "clone" in done.stderr


def test_a_package_that_cannot_be_installed_is_one_line(monkeypatch):
    monkeypatch.syspath_prepend(NOTEBOOKS)
    from walkthrough import setup

    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no matching distribution\n")
    monkeypatch.setattr(setup.subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(SystemExit, match="^no_such_module could not be installed .*no matching distribution.*: run"):
        setup.install("[interpreter]", ["no_such_module"])


@pytest.mark.parametrize("line", ["<!-- lesson: 99 -->", "<!-- code: stage2_cuda/kernels/gelu.py no_such_kernel -->"])
def test_a_line_of_a_page_that_cannot_be_replaced_is_an_error(tools, line, tmp_path, monkeypatch):
    build, _ = tools
    (tmp_path / "stage0.md").write_text(f"# Title\n\n{line}\n")
    monkeypatch.setattr(build, "PAGES", tmp_path)
    with pytest.raises(ValueError, match="has no"):
        build.build(0)


def test_a_figure_with_shipped_results_names_hardware_commit_and_file(monkeypatch, capsys):
    monkeypatch.syspath_prepend(NOTEBOOKS)
    from walkthrough.shipped import shipped

    assert shipped("gpus/timeline").keys() == {"--dp naive, 4 GPUs", "--dp bucket, 4 GPUs"}
    printed = capsys.readouterr().out
    assert printed == "measured on 4 x NVIDIA H200, 2026-11-22, commit 73b73db: results/gpus/timeline.json\n"
    assert shipped("gpus/no_such_file") is None and "no_such_file.json is missing" in capsys.readouterr().out
