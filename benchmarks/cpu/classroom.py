"""How long do the commands of docs/TEACHING.md take, and how much memory: training, notebooks, grading, parity?

The times are of whole commands and include the start of Python. The memory is that of the largest process of a command.
Without a GPU, Triton's interpreter runs the kernels of stages 2 and 3.

    python -m benchmarks.cpu.classroom             # every command once
    python -m benchmarks.cpu.classroom --rounds 3  # the median of three runs
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.cpu_tables import TABLES
from benchmarks.harness.processes import progress, run_main
from benchmarks.harness.report import benchmark_parser, save
from gpt2core.errors import ConfigError
from testing.jobs import ROOT

STAGES = (0, 1, 2, 3)
BENCHMARK = "benchmarks.cpu.classroom"


def make(target, *variables):
    """The command that runs a target of the Makefile with this Python."""
    return ["make", "--silent", target, f"PYTHON={sys.executable}", *variables]


def commands(folder):
    """{title: command}; `folder` is an empty directory for the files that the commands write."""
    train = {
        "make train PRESET=tiny": ("PRESET=tiny",),
        "make train STAGE=1 N=2 PRESET=tiny": ("STAGE=1", "N=2", "PRESET=tiny"),
        "make train STAGE=2 PRESET=nano": ("STAGE=2", "PRESET=nano"),
        "make train STAGE=3 N=2 PRESET=nano": ("STAGE=3", "N=2", "PRESET=nano"),
    }
    found = {title: make("train", *variables, f"OUT={folder / title[-20:]}") for title, variables in train.items()}
    for stage in STAGES:
        run = [sys.executable, "docs/notebooks/run.py", str(stage), "--out", str(folder)]
        found[f"the notebook of stage {stage}"] = run
    for stage in STAGES:
        found[f"make grade STAGE={stage}"] = make("grade", f"STAGE={stage}", f"DIR={solved(stage, folder)}")
    return found | {"make parity": make("parity")}


def solved(stage, folder):
    """The working folder of a stage with all exercises solved: its files are replaced by those of the repository."""
    work = folder / f"work{stage}"
    subprocess.run(make("exercise", f"STAGE={stage}", f"DIR={work}"), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for file in work.rglob("*.py"):
        shutil.copyfile(ROOT / file.relative_to(work), file)
    return work


def measure(command, directory=ROOT):
    """(seconds, bytes of the largest process) of a command in a directory; raises ConfigError if it fails."""
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            last = (output.read().strip().splitlines() or ["no output"])[-1]
            raise ConfigError(f"{' '.join(command)} failed with exit code {process.returncode}: {last}")
        return time.perf_counter() - began, usage.ru_maxrss * 1024


def main():
    parser = benchmark_parser(BENCHMARK, __doc__)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each command (default 1)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = commands(Path(folder))
        results = {title: {"name": title, "seconds": [], "peak_bytes": 0} for title in found}
        for _ in range(args.rounds):
            for title, command in found.items():
                progress(title)
                seconds, peak = measure(command)
                results[title]["seconds"].append(seconds)
                results[title]["peak_bytes"] = max(peak, results[title]["peak_bytes"])
    progress("")
    TABLES["classroom"].print(list(results.values()))
    save(BENCHMARK, list(results.values()), args)


if __name__ == "__main__":
    run_main(main)
