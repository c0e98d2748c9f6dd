"""Each stage folder has the files that the paper's stages have, and its commands work from inside the folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path for path in ROOT.glob("stage[0-9]_*") if path.is_dir())
NAME = {"ids": lambda folder: folder.name}
PROMPT = ["--prompt", "In the spring of", "--max-new-tokens", "4"]


def run(*command, cwd, **variables):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    }
    environment |= {"PYTHON": sys.executable, **variables}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("folder", FOLDERS, **NAME)
def test_a_stage_folder_has_the_files_of_the_papers_stages(folder):
    files = "Makefile README.md run_inference.sh train_gpt2.py inference.py walkthrough.ipynb".split()
    assert [name for name in files if not (folder / name).is_file()] == []
    assert os.access(folder / "run_inference.sh", os.X_OK)
    assert len((folder / "Makefile").read_text().splitlines()) == 3


@pytest.mark.parametrize("folder", FOLDERS, **NAME)
def test_make_in_a_stage_folder_is_make_of_this_stage(folder):
    """--dry-run prints the commands of the root's Makefile; stages 2 and 3 need PRESET=nano without a GPU."""
    done = run("make", "--dry-run", "train", f"PYTHON={sys.executable}", "PRESET=nano", "ARGS=--steps 2", cwd=folder)
    assert done.returncode == 0, done.stderr
    stage = folder.name[5]
    assert f"-m {folder.name}.train_gpt2 --preset nano" in done.stdout and "--steps 2" in done.stdout
    assert f"out/stage{stage}-nano" in done.stdout


def test_make_train_and_generate_work_inside_the_folder_of_stage_0(tmp_path):
    folder, out = ROOT / "stage0_serial", f"OUT={tmp_path / 'out'}"
    python = f"PYTHON={sys.executable}"
    trained = run("make", "train", python, out, "PRESET=nano", "ARGS=--steps 1 --sample 0", cwd=folder)
    assert "trained 1 step" in trained.stdout, trained.stderr
    generated = run("make", "generate", python, out, "ARGS=--prompt Grace --max-new-tokens 2", cwd=folder)
    assert "Continuation:" in generated.stdout, generated.stderr


# Without --weights, inference continues the newest run in out/, which another program may have saved.
WEIGHTS = "--weights", ROOT / "data" / "gpt2-paper"


def test_run_inference_continues_a_text_from_any_directory(tmp_path):
    done = run(ROOT / "stage0_serial" / "run_inference.sh", *WEIGHTS, *PROMPT, cwd=tmp_path)
    assert (done.returncode, "the second year," in done.stdout) == (0, True), done.stderr


@pytest.mark.long
def test_run_inference_of_stage_1_starts_n_ranks(tmp_path):
    pytest.importorskip("mpi4py")
    done = run(ROOT / "stage1_mpi" / "run_inference.sh", "--mode", "tensor", *WEIGHTS, *PROMPT, cwd=tmp_path, N="2")
    assert (done.returncode, "the second year," in done.stdout) == (0, True), done.stderr


LONG = {"stage1_mpi", "stage2_cuda"}  # stage 3 has the same script as stage 1, and stage 2 that of stage 0
SCRIPTS = [pytest.param(folder, marks=[pytest.mark.long] * (folder.name in LONG), id=folder.name) for folder in FOLDERS]


@pytest.mark.parametrize("folder", SCRIPTS)
def test_run_inference_passes_its_arguments(folder, tmp_path):
    """A wrong flag is the one line of inference.py, with exit code 2."""
    pytest.importorskip("mpi4py")
    done = run(folder / "run_inference.sh", "--no-such-flag", cwd=tmp_path, TRITON_INTERPRET="1")
    assert (done.returncode, "--no-such-flag" in done.stderr) == (2, True), done.stderr
