"""Runs of train_gpt2.py as a user starts them, and their logs."""

import re
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.processes import BenchmarkFailed, progress, run_to_end
from gpt2core.app.output.run_log import read_log
from stage1_mpi.launch import choose, launch_line
from testing.jobs import ROOT

PACKAGES = "stage0_serial", "stage1_mpi", "stage2_cuda", "stage3_mpi_cuda"
UNTIMED_STEPS = 5


def train(name, package, timeout, words=(), ranks=None, cwd=ROOT, environment=None, **flags):
    """Run train_gpt2.py of a package without a checkpoint; return (its log, its output).

    The log is a list with one dictionary for each step. timeout: seconds. words: flags, as words of the command
    line. ranks: of an MPI job; None: one process. cwd: the directory from which Python imports the package first.
    environment: a dictionary of further environment variables.
    flags: values of further flags, as batch_size for --batch-size. Raises BenchmarkFailed.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {"sample": 0, **flags, "log": Path(folder) / "log.jsonl"}
        command = python_command(ranks, f"{package}.train_gpt2", "--no-save", *words)
        for flag, value in flags.items():
            command += [f"--{flag.replace('_', '-')}", str(value)]
        progress(name)
        output = run_to_end(name, command, blas_threads=1, timeout=timeout, cwd=cwd, environment=environment)
        progress("")
        return read_log(flags["log"]), output


def median_step(log):
    """The median of the seconds of a step, without the first steps, in which kernels are compiled and captured."""
    seconds = [row["seconds"] for row in log]
    return statistics.median(seconds[UNTIMED_STEPS:] or seconds)


def inference_seconds(name, command, timeout):
    """Run an inference.py with --stats; return (seconds of all new tokens, its output). Raises BenchmarkFailed."""
    output = run_to_end(name, command, blas_threads=1, timeout=timeout)
    found = re.search(r"total ([\d.]+) s", output)
    if not found:
        raise BenchmarkFailed(f"'{name}': the output of inference.py has no line of --stats")
    return float(found[1]), output


def python_command(ranks, *words):
    """The command line of `python -m WORDS`, on this number of MPI ranks unless it is None."""
    launcher = () if ranks is None else launch_line(*choose(), ranks)
    return [*launcher, sys.executable, "-m", *words]
