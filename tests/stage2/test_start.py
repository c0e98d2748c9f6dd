"""The commands start fast: they import no package that they do not need, PyTorch above all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.support.interpreter import interpreter_works

ROOT = Path(__file__).resolve().parents[2]
NOT_NEEDED = "torch", "cupyx", "transformers", "matplotlib", "scipy", "pandas", "hypothesis", "pytest"
CODE = """
import sys
from {stage}.{script} import main
sys.argv[1:] = {arguments!r}
try:
    main()
finally:
    print("imported:", *sorted({names!r} & sys.modules.keys()))
"""
TINY = "--preset nano --n-layer 1 --n-head 1 --n-embd 16 --batch-size 1 --seq-len 4 --steps 1 --sample 2"


def imported(stage, script, arguments, **environment):
    """The packages of NOT_NEEDED that a command has imported when it ends; it runs in a new process."""
    names = {*NOT_NEEDED, "gpt2core.app.training.command", "tqdm"}
    code = CODE.format(stage=stage, script=script, arguments=arguments.split(), names=names)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | environment
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:])


WITH_INTERPRETER = pytest.param(
    "stage2_cuda",
    {"TRITON_INTERPRET": "1"},
    marks=pytest.mark.skipif(not interpreter_works(), reason="the interpreter fails with this NumPy"),
)


@pytest.mark.parametrize(
    "stage, environment",
    [("stage0_serial", {}), pytest.param(*WITH_INTERPRETER.values, marks=[pytest.mark.long, *WITH_INTERPRETER.marks])],
)
def test_training_and_generation_import_no_package_that_they_do_not_need(tmp_path, stage, environment):
    found = imported(stage, "train_gpt2", f"{TINY} --out {tmp_path}", **environment)
    assert found == {"gpt2core.app.training.command", "tqdm"}
    assert not imported(stage, "inference", f"--weights {tmp_path} --prompt the --max-new-tokens 2", **environment)


@pytest.mark.gpu
def test_the_commands_do_not_import_pytorch_on_a_gpu(tmp_path):
    assert "torch" not in imported("stage2_cuda", "train_gpt2", f"--preset nano --steps 3 --out {tmp_path}")
    assert "torch" not in imported("stage2_cuda", "inference", "--prompt the --max-new-tokens 5")
