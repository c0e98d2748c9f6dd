"""How many seconds does a user wait for a whole command of stage 2, from the shell to the end?

Each command runs twice in new processes: with empty caches of compiled kernels, and again with the caches that the
first run has filled. The caches are those of Triton, CuPy, NVIDIA's driver and this project; the files of Python and of
the libraries stay in the memory of the operating system. One more run of each kind records where its time goes.

    python -m benchmarks.gpu.start             # every command
    python -m benchmarks.gpu.start --rounds 1  # a quick trial
"""

import json
import os
import shlex
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.processes import BenchmarkFailed, run_main
from benchmarks.harness.report import benchmark_parser, save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.start_trace import START
from benchmarks.harness.table_format import Table
from testing.jobs import ROOT

COMMANDS = {  # {out} is a new directory
    "train": ("train_gpt2", "--preset paper --out {out}"),
    "inference": ("inference", "--weights data/gpt2-paper --stats --prompt 'In the spring of'"),
    "inference-bf16": ("inference", "--weights data/gpt2-paper --stats --precision bf16 --prompt 'In the spring of'"),
}
STATES = "empty", "warm"  # of the caches
LONG = 0.02  # seconds: shorter rows of the breakdown are omitted
BREAKDOWN = """
    what | thread | begins, s = {start:.2f} | seconds = {seconds:.2f} | longest, s = {longest:.2f} | calls"""


def environment(directory):
    """The environment of a command whose caches are in `directory`."""
    caches = {
        "TRITON_CACHE_DIR": directory / "triton",
        "CUPY_CACHE_DIR": directory / "cupy",
        "CUDA_CACHE_PATH": directory / "cuda",
        "HOME": directory,  # the cache of this project is below it
        "PYTHONUSERBASE": site.getuserbase(),  # where packages are, if they were installed for one user
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    return os.environ | {name: str(value) for name, value in caches.items()}


def run_command(command, directory, trace=None):
    """Run a command once; return its seconds. trace: a file for start_trace."""
    script, arguments = COMMANDS[command]
    module, arguments = f"stage2_cuda.{script}", shlex.split(arguments.format(out=directory / f"{time.monotonic_ns()}"))
    program = [sys.executable, str(ROOT / (module.replace(".", "/") + ".py")), *arguments]
    if trace:
        program = [sys.executable, "-m", "benchmarks.harness.start_trace", str(trace), module, *arguments]
    started = time.monotonic()
    result = subprocess.run(
        program, cwd=ROOT, env=environment(directory) | {START: repr(started)}, capture_output=True, text=True
    )
    seconds = time.monotonic() - started
    if result.returncode:
        raise BenchmarkFailed(f"{command} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    return seconds


def measure(command, rounds):
    """{state: {"seconds": [...], "trace": events}} of one command, with new caches in each round."""
    results = {state: {"seconds": []} for state in STATES}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="start-") as temporary:
            directory = Path(temporary)
            for state in STATES:
                trace = directory / f"{state}.json" if number == rounds else None
                seconds = run_command(command, directory, trace)
                if trace:
                    results[state]["trace"] = json.loads(trace.read_text())
                else:
                    results[state]["seconds"].append(seconds)
        print(".", end="", file=sys.stderr, flush=True)
    return results


def breakdown(events):
    """Rows of a table: what runs when, in the main thread and in others. events: see start_trace."""
    rows = {}
    for label, thread, start, seconds in events:
        row = dict(what=label, thread=thread, start=start, seconds=0.0, longest=0.0, calls=0)
        row = rows.setdefault((label, thread), row)
        row["start"], row["longest"] = min(row["start"], start), max(row["longest"], seconds)
        row["seconds"], row["calls"] = row["seconds"] + seconds, row["calls"] + 1
    kept = (row for row in rows.values() if row["seconds"] > LONG or row["what"].endswith(("Python", "program")))
    return sorted(kept, key=lambda row: row["start"])


def main():
    parser = benchmark_parser("benchmarks.gpu.start", __doc__)
    add = parser.add_argument
    add("--commands", choices=COMMANDS, nargs="+", default=list(COMMANDS), help="commands to time (default all)")
    parser.MAY_BE_0 += ("rounds",)  # only the traced run
    add("--rounds", type=int, default=3, help="runs of each command with empty and with warm caches (default 3)")
    args = parser.parse_args()
    results = {}
    for command in args.commands:
        results[command] = measure(command, args.rounds)
        for state, result in results[command].items():
            print(f"\n{command}, {state} caches: a traced run; a row contains the time of rows inside it")
            Table("", BREAKDOWN).print(breakdown(result["trace"]))
    if args.rounds:
        TABLES["start"].print(results)
    save(results, args)


if __name__ == "__main__":
    run_main(main)
