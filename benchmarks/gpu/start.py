"""How many seconds does a user wait for a whole command of stage 2, from the shell to the end?

Each command runs twice in new processes: with empty caches of compiled kernels, and again with the caches that the
first run has filled. The caches are those of Triton, CuPy, NVIDIA's driver and this project; the files of Python and of
the libraries stay in the memory of the operating system. `python -X importtime` and cProfile show where the time goes.

    python -m benchmarks.gpu.start             # every command
    python -m benchmarks.gpu.start --rounds 1  # a quick trial
"""

import os
import shlex
import site
import sys
import tempfile
from pathlib import Path

from benchmarks.cpu.classroom import measure as run
from benchmarks.harness.processes import progress
from benchmarks.harness.script import benchmark
from testing.jobs import ROOT

COMMANDS = {  # {out} is a new directory
    "train": ("train_gpt2", "--preset paper --out {out}"),
    "inference": ("inference", "--weights data/gpt2-paper --stats --prompt 'In the spring of'"),
    "inference-bf16": ("inference", "--weights data/gpt2-paper --stats --precision bf16 --prompt 'In the spring of'"),
}
STATES = "empty", "warm"  # of the caches


def seconds_of(command, directory, state):
    """Run a command once, with its caches in `directory`; return its seconds."""
    script, arguments = COMMANDS[command]
    program = [sys.executable, str(ROOT / "stage2_cuda" / f"{script}.py")]
    caches = {
        "TRITON_CACHE_DIR": directory / "triton",
        "CUPY_CACHE_DIR": directory / "cupy",
        "CUDA_CACHE_PATH": directory / "cuda",
        "HOME": directory,  # the cache of this project is below it
        "PYTHONUSERBASE": site.getuserbase(),  # where packages are, if they were installed for one user
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    words = shlex.split(arguments.format(out=directory / state))
    return run(program + words, **{name: str(value) for name, value in caches.items()})["seconds"]


def measure(command, rounds):
    """{state: {"seconds": [...]}} of one command, with new caches in each round."""
    results = {state: {"seconds": []} for state in STATES}
    for number in range(rounds):
        progress(f"{command}, round {number + 1}/{rounds}")
        with tempfile.TemporaryDirectory(prefix="start-") as directory:
            for state in STATES:
                results[state]["seconds"].append(seconds_of(command, Path(directory), state))
    progress("")
    return results


@benchmark(
    "start",
    common=dict(rounds=3),
    commands=dict(choices=COMMANDS, nargs="+", default=list(COMMANDS), help="commands to time (default all)"),
)
def main(args):
    results = {command: measure(command, args.rounds) for command in args.commands}
    return results
