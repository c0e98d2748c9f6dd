"""A mistake of the user, or a missing GPU, ends a script with exit code 2 and one line."""

import os
import subprocess
import sys

import pytest

from testing.jobs import LIMIT, ROOT

NO_GPU = "no GPU was found"
MISTAKES = {  # {command: what its line says}
    # the script itself finds the mistake
    "-m benchmarks.torch.attention": "this benchmark needs 1 GPU, 0 found",
    "-m benchmarks.gpu.decode": "this benchmark needs 1 GPU, 0 found",
    "-m benchmarks.gpu.decode --options cut=0 --peers eager": "--options needs a compiled program of PyTorch",
    "-m benchmarks.gpu.decode --options cut=0 --cases one paper": "--options cut=0: this case has {'attention': ",
    "-m benchmarks.torch.ddp_model --ddp MISSING": "there is no MISSING.json in results/torch",
    "-m benchmarks.torch.accumulation --device cpu --only nope": "--only nope: in none of the rows",
    "-m benchmarks.ranks.ranks --ranks 1024": "argument --ranks: 1024 must be positive and below 1024",
    # a program that it runs reports the mistake
    "-m benchmarks.gpu.checkpoints": NO_GPU,
    "-m benchmarks.gpu.real_run --stage 0 --data MISSING": "cannot read MISSING",
    "-m benchmarks.ranks.kill --stage 3 --ranks 2": NO_GPU,
    "-m benchmarks.ranks.survive --stage 3 --ranks 2": NO_GPU,
    "-m benchmarks.ranks.parity --ranks 3 --presets nano --steps 1": "--batch-size 4 is not divisible by 3 ranks",
    # a rank of a function that it runs on many ranks raises it
    "-m benchmarks.gpus.layouts --stage 1 --preset nano --ranks 2 --layouts 1": "--seq-len 256 exceeds the model's",
    # scripts of other directories
    "data/make_corpus.py --out MISSING/x.txt": "MISSING/x.txt: No such file or directory",
    "data/make_weights.py --check --prompts 0": "--prompts 0 must be a positive whole number",
    "docs/figures/loss_curves.py --out MISSING/x.png": "MISSING/x.png: No such file or directory",
    "docs/notebooks/run.py 0 --out README.md/x": "README.md/x: Not a directory",
    "docs/notebooks/build.py --chek": "unrecognized arguments: --chek (did you mean --check?",
    "tests/tools/compare_checkouts.py MISSING": "other MISSING: has no directory gpt2core",
    "tests/tools/kill_at_start.py --times 0": "argument --times: 0 must be positive",
    "tests/tools/run_long.py --nope": "unrecognized arguments: --nope",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_of_the_user_is_one_line_and_exit_code_2(command):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.startswith("load average")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ") and MISTAKES[command] in lines[0]
