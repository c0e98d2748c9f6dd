"""What a plain `pip install .` installs is enough: commands find their data and modules from any directory.

A fixture copies the files that pyproject.toml lists, as setuptools does, so that nothing is built or downloaded.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from exercises.catalog import graded_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """installed(*arguments): run Python in an empty directory with a copy of the installed packages."""
    site, here = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("here")
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in options["packages"]:
        folder = ROOT / options["package-dir"].get(package, package.replace(".", "/"))
        for pattern in ["*.py", *options["package-data"].get(package, [])]:
            for file in folder.glob(pattern):
                copy = site / package.replace(".", "/") / file.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": str(site), "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", *map(str, arguments)]
        return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)

    run.site, run.here = site, here
    return run


def test_every_source_file_of_an_installed_package_is_installed(installed):
    """Python and CUDA C, and the pages of the exercises; pyproject.toml lists packages and data files by folder."""
    folders = {path.relative_to(installed.site).parts[0] for path in installed.site.rglob("*.py")}
    files = [file for folder in folders for kind in ("py", "cu", "cuh") for file in (ROOT / folder).rglob(f"*.{kind}")]
    files += (ROOT / "exercises" / "pages").glob("*.md")
    assert [str(file) for file in files if not (installed.site / file.relative_to(ROOT)).is_file()] == []
    assert {"gpt2core", "stage2_cuda", "testing"} <= folders and any(file.suffix == ".cuh" for file in files)


@pytest.mark.parametrize("preset, corpus", [("tiny", "dummy.txt"), ("book", "moby_dick.txt")])
def test_training_finds_the_corpus_and_the_tokenizer_of_a_preset(installed, preset, corpus):
    sizes = ["--steps", 1, "--batch-size", 1, "--seq-len", 8, "--sample", 1]
    done = installed("stage0_serial.train_gpt2", "--preset", preset, *sizes)
    assert (done.returncode, done.stderr) == (0, "") and f"tokens of {corpus}" in done.stdout
    assert f"saved in out/stage0-{preset}\n" in done.stdout  # of the current directory: there is no repository


@pytest.mark.parametrize("weights", [[], ["gpt2core/shipped/gpt2-book"]])
def test_inference_finds_the_shipped_weights(installed, weights):
    flags = ["--weights", installed.site / weights[0]] if weights else ["--preset", "paper"]
    done = installed("stage0_serial.inference", "--prompt", "the notebook", "--max-new-tokens", 1, *flags)
    assert done.returncode == 0 and "Continuation:" in done.stdout
    assert re.fullmatch("" if weights else r"weights: .*/gpt2-paper\n", done.stderr)


def test_the_python_api_works_from_any_directory(installed):
    """The five lines of docs/PYTHON.md, with the weights that are installed."""
    (installed.here / "my.txt").write_text("one two three four " * 50, encoding="utf-8")
    program = f"""
import staged_gpt2 as sg
model = sg.GPT2.from_pretrained({str(installed.site / "gpt2core/shipped/gpt2-book")!r})
print(model.generate("Call me", 4, top_k=10, seed=1))
run = sg.train("my.txt", preset="nano", steps=2, on_step=lambda step: print(step.step))
print(run.losses)
run.model.save_pretrained("out/mine")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=installed.here, env=os.environ | {"PYTHONPATH": str(installed.site)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-3:-1] == ["0", "1"] and (installed.here / "out" / "mine" / "config.json").exists()
    assert (installed.site / "staged_gpt2" / "py.typed").exists()


def test_exercises_are_started_and_graded_and_name_commands_that_exist(installed):
    pytest.importorskip("triton")
    missing = installed("exercises.grade", "--stage", 3)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == "error: work/stage3 does not exist: run `python -m exercises.start --stage 3` first\n"
    started = installed("exercises.start", "--stage", 3)
    command = "run `python -m exercises.grade --stage 3` in this directory.\n"
    assert started.returncode == 0 and started.stdout.endswith(command)
    work = installed.here / "work" / "stage3"
    assert (work / "data" / "dummy.txt").is_file() and not (work / "gpt2core" / "shipped").exists()
    for file in graded_files(3):
        shutil.copy(ROOT / file, work / file)
    graded = installed("exercises.grade", "--stage", 3, "--only", "3.2")  # its checks use a fake GPU
    assert "4 of 4 checks passed" in graded.stdout, graded.stdout + graded.stderr


def test_a_detective_is_made_and_graded_without_a_makefile(installed):
    missing = installed("exercises.grade", "--case", 5)
    want = "error: work/case5 does not exist: run `python -m exercises.detective --case 5` first\n"
    assert (missing.returncode, missing.stderr) == (2, want)
    made = installed("exercises.detective", "--case", 5)
    assert made.returncode == 0 and "run `python -m exercises.grade --case 5` in this directory" in made.stdout
    file = "stage0_serial/numpy_backend.py"
    shutil.copy(ROOT / file, installed.here / "work" / "case5" / file)
    graded = installed("exercises.grade", "--case", 5)
    assert "score: 100 %" in graded.stdout, graded.stdout + graded.stderr


def test_the_doctor_names_commands_of_pip_where_there_is_no_makefile(installed):
    code = "from gpt2core.app.doctor import installer; print(*[installer(n, i) for n in range(4) for i in (1, 0)])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed.here, env=os.environ | {"PYTHONPATH": str(installed.site)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "make" not in done.stdout
    for extras in ("", "[mpi]", "[interpreter]", "[mpi,interpreter]", "[cuda13]", "[mpi,cuda13,nccl13]"):
        assert f"`pip install '.{extras}'`" in done.stdout
