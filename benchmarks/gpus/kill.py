"""Does a job on GPUs end soon when a rank is killed, report the cause, free all GPUs and keep a readable checkpoint?

A random rank gets SIGKILL at a random moment, which may be during start-up, of a run that resumed from a checkpoint.
The other ranks then wait for an NCCL kernel that never ends.
"""

import argparse
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.jobs import ROOT, Job, launcher
from benchmarks.harness.processes import progress, run_main, run_to_end
from benchmarks.harness.report import add_save_flags, nvidia_smi, print_table, save
from benchmarks.ranks.kill import finished, kill_one
from gpt2core.app.checkpoint_directory import load_checkpoint
from gpt2core.errors import CheckpointError

BENCHMARK = "benchmarks.gpus.kill"
SOON = 30  # allowed seconds from the kill to the end of the job
SETTLED = 10  # seconds that the driver may take to free a process's memory
COMPILED = 240  # allowed seconds of the first run, which compiles
SPARE = 64  # MiB of growth on a GPU that are ignored
CAUSE = re.compile(r"signal 9|SIGKILL|Killed|^error: |KILLED BY SIGNAL", re.MULTILINE)


def compile_all(ranks, *flags):
    """Train to the end; this compiles all kernels and takes at most COMPILED seconds."""
    words = (*launcher(), "-n", ranks, sys.executable, "-m", "stage3_mpi_cuda.train_gpt2", "--sample", 0, *flags)
    run_to_end("the first run", list(map(str, words)), 1, COMPILED)


def train(ranks, *flags):
    """Start a training run on `ranks` ranks; return its Job."""
    words = ("-n", ranks, sys.executable, "train_gpt2.py", "--sample", 0, *flags)
    return Job(*words, cwd=ROOT / "stage3_mpi_cuda")


def on_gpus():
    """({process ids reported by the driver}, [MiB used on each GPU]); in a container the driver may report no ids."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    return set(re.findall(r"\d+", answer)), [int(row[0]) for row in nvidia_smi("memory.used")]


def left_on_gpus(before):
    """New processes and memory on the GPUs, as text, after waiting up to SETTLED s for none; "" if there are none."""
    until = time.monotonic() + SETTLED
    while True:
        (pids, used), (old_pids, old_used) = on_gpus(), before
        grown = enumerate(now - once for once, now in zip(old_used, used, strict=True))
        grown = [f"{more} MiB on GPU {gpu}" for gpu, more in grown if more > SPARE]
        left = [f"process {pid}" for pid in sorted(pids - old_pids)] + grown
        if not left or time.monotonic() > until:
            return ", ".join(left)
        time.sleep(0.2)


def trial(args, home, choice, longest, before):
    """Kill a rank of one run; return one row, or None if the run ended before."""
    out, moment = home / "run", choice.uniform(0, longest)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(home / "begun", out, symlinks=True)
    with train(args.ranks, "--resume", out, "--out", out, "--dp", args.dp, "--steps", args.steps) as job:
        rank = kill_one(job, moment, choice)
        done = job.done()
    if rank is None or done.code == 0:
        return None
    text = done.out + done.err
    row = {
        "rank": rank, "moment": moment, "seconds": done.seconds, "code": done.code, "left": len(done.left),
        "on_gpus": left_on_gpus(before), "cause": (CAUSE.search(text) or [""])[0], "steps_seen": text.count("| loss"),
    }  # fmt: skip
    try:
        return row | {"step": load_checkpoint(out, with_optimizer=True).state["step"]}
    except CheckpointError as error:
        return row | {"step": None, "error": str(error)}


def summarise(rows):
    """Add the field "clean" to each row; return the table's rows."""
    for row in rows:
        ended = row["code"] != 0 and row["seconds"] < SOON
        row["clean"] = bool(ended and row["cause"] and not row["left"] and not row["on_gpus"])
    return [
        {
            "killed": f"rank {row['rank']}",
            "after, s": f"{row['moment']:.2f}",
            "steps seen": row["steps_seen"],
            "job ended within, s": f"{row['seconds']:.2f}",
            "exit code": row["code"],
            "cause reported": row["cause"] or "NONE",
            "processes left": row["left"],
            "left on GPUs": row["on_gpus"] or "nothing",
            "checkpoint": "unreadable" if row["step"] is None else f"step {row['step']}",
        }
        for row in rows
    ]


def parser():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--times", type=int, default=10, help="number of runs; one rank of each run is killed (default 10)")
    add("--ranks", type=int, help="ranks of each run (default: one per GPU, at most 4)")
    add("--preset", default="tiny", help="model (default tiny)")
    add("--dp", default="bucket", help="gradient synchronisation (default bucket)")
    add("--steps", type=int, default=4000, help="steps of each run (default 4000)")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints (default 100)")
    add("--seed", type=int, default=0, help="seed of the choice of ranks and of times (default 0)")
    add_save_flags(add, "kill")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    args.ranks = args.ranks or min(4, len(nvidia_smi("name")))
    if not args.ranks or not Path("/proc/self/environ").exists():
        sys.exit("this benchmark needs GPUs that nvidia-smi reports, and /proc to find processes")
    rows, choice, before = [], random.Random(args.seed), on_gpus()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        flags = ("--preset", args.preset, "--checkpoint-every", args.checkpoint_every, "--dp", args.dp)
        compile_all(args.ranks, *flags, "--steps", args.checkpoint_every, "--out", home / "begun")
        whole = ("--resume", home / "begun", "--out", home / "straight", "--dp", args.dp, "--steps", args.steps)
        longest = finished(train(args.ranks, *whole)).seconds
        for _ in range(3 * args.times):  # some runs end before their rank is killed
            progress(f"run {len(rows) + 1}/{args.times}")
            if len(rows) < args.times and (row := trial(args, home, choice, longest, before)):
                rows.append(row)
    progress("")
    print_table(summarise(rows))
    seconds = [row["seconds"] for row in rows]
    summary = {
        "clean_ends": sum(row["clean"] for row in rows),
        "readable": sum(row["step"] is not None for row in rows),
        "median_seconds": statistics.median(seconds),
        "longest_seconds": max(seconds),
    }
    print(
        f"\n{summary['clean_ends']} of {args.times} ended within {SOON} s, reported the cause and left nothing "
        f"(median {summary['median_seconds']:.2f} s, longest {summary['longest_seconds']:.2f} s), "
        f"{summary['readable']} left a readable checkpoint."
    )
    options = vars(args) | {"longest_moment": longest}
    save(BENCHMARK, {**options, "summary": summary, "rows": rows}, args, args.save_as)


if __name__ == "__main__":
    run_main(main)
