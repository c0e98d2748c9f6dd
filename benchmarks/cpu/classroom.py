"""How long do the commands of docs/TEACHING.md take, and how much memory: training, notebooks, grading, parity?

The times are of whole commands and include the start of Python. The memory is that of the largest process of a command.
Without a GPU, Triton's interpreter runs the kernels of stages 2 and 3.

    python -m benchmarks.cpu.classroom             # every command once
    python -m benchmarks.cpu.classroom --rounds 3  # the median of three runs
    python -m benchmarks.cpu.classroom --first --rounds 3  # the first commands of a new user
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.processes import peak_bytes
from benchmarks.harness.report import save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import interleaved
from benchmarks.harness.script import benchmark
from gpt2core.app.shipped import WEIGHTS
from gpt2core.errors import ConfigError
from testing.jobs import ROOT

FIRST = {  # of a new user, in the directory stage0_serial
    "train_gpt2.py --preset tiny": [sys.executable, "train_gpt2.py", "--preset", "tiny", "--no-save"],
    "inference.py (256 + 30 tokens)": [sys.executable, "inference.py", "--weights", str(WEIGHTS)],
}


def make(target, *variables):
    """The command that runs a target of the Makefile with this Python."""
    return ["make", "--silent", target, f"PYTHON={sys.executable}", *variables]


def commands(folder):
    """{title: command}; `folder` is an empty directory for the files that the commands write."""
    found = {}
    for variables in ("PRESET=tiny", "STAGE=1 N=2 PRESET=tiny", "STAGE=2 PRESET=nano", "STAGE=3 N=2 PRESET=nano"):
        found[f"make train {variables}"] = make("train", *variables.split(), f"OUT={folder / variables[:7]}")
    for stage in range(4):
        run = [sys.executable, "docs/notebooks/run.py", str(stage), "--out", str(folder)]
        found[f"the notebook of stage {stage}"] = run
    for stage in range(4):
        found[f"make grade STAGE={stage}"] = make("grade", f"STAGE={stage}", f"DIR={solved(stage, folder)}")
    return found | {"make parity": make("parity")}


def solved(stage, folder):
    """The working folder of a stage with all exercises solved: its files are replaced by those of the repository."""
    work = folder / f"work{stage}"
    subprocess.run(make("exercise", f"STAGE={stage}", f"DIR={work}"), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for file in work.rglob("*.py"):
        shutil.copyfile(ROOT / file.relative_to(work), file)
    return work


def measure(command, directory=ROOT, **environment):
    """{"seconds", "peak_bytes": of the largest process, "output"} of a command; raises ConfigError if it fails."""
    with tempfile.TemporaryFile("w+") as file:
        began = time.perf_counter()
        environment = os.environ | environment
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=file, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        output = file.read()
    if process.returncode:
        last = (output.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{' '.join(command)} failed with exit code {process.returncode}: {last}")
    return {"seconds": seconds, "peak_bytes": peak_bytes(usage), "output": output}


def measure_all(commands, rounds, directory=ROOT):
    """[{"name", "seconds": of each round, "peak_bytes": the largest}] of {name: command}."""
    functions = {name: functools.partial(measure, command, directory) for name, command in commands.items()}
    results = []
    for name, of_rounds in interleaved(functions, rounds).items():
        seconds, peaks = ([each[field] for each in of_rounds] for field in ("seconds", "peak_bytes"))
        results.append({"name": name, "seconds": seconds, "peak_bytes": max(peaks)})
    return results


@benchmark(
    common=dict(rounds=1),
    first=dict(
        action="store_true",
        help="only the first two commands of a new user: training `tiny`, and the paper's inference",
        save_as="first_run",
    ),
)
def main(args):
    if args.first:
        results = measure_all(FIRST, args.rounds, ROOT / "stage0_serial")
        results = {"seconds": {result["name"]: result["seconds"] for result in results}}
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = measure_all(commands(Path(folder)), args.rounds)
    TABLES["first-run" if args.first else "classroom"].print(results)
    save(results, args)
