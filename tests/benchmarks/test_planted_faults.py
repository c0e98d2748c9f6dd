"""A fault that is planted in a copy of the program is found by `make parity`, which names step, layer and operation.

The faults and the expected words are in planted_faults.toml.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("gpt2core", "stage0_serial", "stage1_mpi", "stage2_cuda", "stage3_mpi_cuda", "benchmarks", "testing")
FAULTS = tomllib.loads((ROOT / "tests/benchmarks/planted_faults.toml").read_text(encoding="utf-8"))["fault"]


def parameters():
    """One pytest parameter for each fault, with the marks of its field `when`."""
    marks = {"always": [], "long": [pytest.mark.long], "gpu": [pytest.mark.gpu]}
    return [pytest.param(fault, marks=marks[fault["when"]], id=fault["name"]) for fault in FAULTS]


def parity(root, *flags):
    """Run benchmarks.parity in a copy of the program."""
    command = [sys.executable, "-m", "benchmarks.parity", *flags]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=540)


@pytest.fixture
def copied(tmp_path):
    """A copy of the packages, and of the default corpus."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "data" / "dummy.txt", tmp_path / "data")
    return tmp_path


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_the_text_in_which_a_fault_is_planted_exists_exactly_once(fault):
    for file, old, new in fault["changes"]:
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1 and new != old, file


@pytest.mark.parametrize("fault", parameters())
def test_a_planted_fault_is_found_and_named(copied, fault):
    if fault["rung"].endswith(("-2", "-3")) or fault["rung"] == "nccl":
        pytest.importorskip("triton")
    if fault.get("gpus", 0) > 1:
        cupy = pytest.importorskip("cupy")
        if cupy.cuda.runtime.getDeviceCount() < fault["gpus"]:
            pytest.skip(f"needs {fault['gpus']} GPUs")
    for file, old, new in fault["changes"]:
        path = copied / file
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    done = parity(copied, "--only", fault["rung"])
    lines = [line for line in done.stdout.splitlines() if line.startswith("first difference: ")]
    assert done.returncode == 1 and len(lines) == 1, done.stdout + done.stderr
    for word in fault["words"]:
        assert word in lines[0], lines[0]


def test_without_a_fault_the_short_rungs_pass_and_write_their_rows(tmp_path):
    file = tmp_path / "rows.json"
    done = parity(ROOT, "--only", "kernels-0", "gradients-0", "collectives", "--json", str(file))
    assert done.returncode == 0 and "3 of 3 rungs passed, 0 not run" in done.stdout, done.stdout + done.stderr
    assert "first difference" not in done.stdout
    assert [row["result"] for row in json.loads(file.read_text())] == ["passed"] * 3
    other = tmp_path / "other.json"
    other.write_text("{}")
    for path, words in ((other, "is not a file of this program"), (tmp_path, "cannot be written")):
        done = parity(ROOT, "--only", "collectives", "--json", str(path))
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert other.read_text() == "{}" and parity(ROOT, "--only", "collectives", "--json", str(file)).returncode == 0


def test_a_rung_that_cannot_run_is_a_row_with_its_reason():
    hidden = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "benchmarks.parity", "--only", "gradients-3"]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "gradients-3  not run" in done.stdout and "needs " in done.stdout
