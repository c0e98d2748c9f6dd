"""A program that only generates text imports neither autograd nor the code of training."""

import os
import re
import subprocess
import sys

import pytest

from testing.jobs import ROOT

# Modules that compute gradients, update parameters or divide a training step. Of `parallel` a generation needs only the
# settings, the agreement of ranks, and the parts of a layer.
OF_TRAINING = r"gpt2core\.(tensor|ops|model|stream|primitives|optimizer|trainer|training_loop|engine|parallel)\b.*"
ALLOWED = r"gpt2core\.parallel(\.(all_or_raise|config|launcher_env|tensor(\.(loaded_model|shards))?))?"
COMMAND = "import {0} as script, sys; sys.argv[1:] = {1!r}; script.main()"
API = "import staged_gpt2 as sg; print(sg.GPT2.from_pretrained({0!r}, stage=0).generate('In the spring of', 3))"
WEIGHTS = str(ROOT / "data" / "gpt2-nano")
PROGRAMS = {
    "stage 0": (COMMAND.format("stage0_serial.inference", ["--weights", WEIGHTS, "--prompt", "In the spring of"]), {}),
    "stage 2": (
        COMMAND.format("stage2_cuda.inference", ["--weights", WEIGHTS, "--prompt", "In the", "--max-new-tokens", "2"]),
        {"TRITON_INTERPRET": "1"},
    ),
    "staged_gpt2": (API.format(WEIGHTS), {}),
}
NAMES = "import atexit, sys; atexit.register(lambda: print('imported:', *sorted(sys.modules), file=sys.stderr)); "


def imported(program):
    """The names of the modules that a program has imported at its end."""
    code, variables = PROGRAMS[program]
    done = subprocess.run(
        [sys.executable, "-c", NAMES + code], cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    return done.stderr.rpartition("imported:")[2].split()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_generation_imports_no_code_of_training(program):
    if program == "stage 2":
        pytest.importorskip("triton")
    found = imported(program)
    assert "gpt2core.inference_model" in found
    assert [name for name in found if re.fullmatch(OF_TRAINING, name) and not re.fullmatch(ALLOWED, name)] == []


def test_the_api_imports_training_when_it_is_used():
    import staged_gpt2 as sg

    assert {name: getattr(sg, name) for name in sg.__all__}["ops"].__name__ == "gpt2core.ops"
    assert sg.train.__module__ == "staged_gpt2.training" and set(sg.__all__) == set(dir(sg))
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        getattr(sg, "optimise")  # noqa: B009
