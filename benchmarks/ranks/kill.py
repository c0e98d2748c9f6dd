"""Is a job that loses a rank over at once, and is nothing lost but the steps since its last checkpoint?

A rank is killed with SIGKILL at a random moment, its start included, while a run goes on from an earlier checkpoint.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.contenders import print_table, progress, run, save
from benchmarks.harness.jobs import Job
from gpt2core.app.checkpoint_directory import load_checkpoint
from gpt2core.errors import CheckpointError

BENCHMARK = "benchmarks.ranks.kill"


def train(ranks, *flags):
    """The running job of `ranks` ranks."""
    return Job("-n", ranks, sys.executable, "-m", "stage1_mpi.train_gpt2", "--threads", 1, "--sample", 0, *flags)


def finished(job):
    """The Done of a job that must succeed."""
    with job:
        done = job.done()
    if done.code:
        sys.exit(f"a run that nobody interrupted ended with status {done.code}: {done.err.strip()}")
    return done


def curve(log):
    """(every step's loss and gradient norm, the hash of the last parameters)."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows], rows[-1].get("parameters_sha256")


def kill_one(job, seconds, choice):
    """Kill one of the ranks after so many seconds; returns which, or None where the job was over by then."""
    time.sleep(seconds)
    while job.process.poll() is None:
        if ranks := job.ranks():
            rank = choice.choice(sorted(ranks))
            try:
                os.kill(ranks[rank], signal.SIGKILL)
                return rank
            except ProcessLookupError:  # it has just ended by itself
                pass
    return None


def trial(args, home, straight, choice, longest):
    """Kill a rank of one run, and go on with what it left; returns one row, or None where it was over before."""
    out, log, moment = home / "run", home / "run.jsonl", choice.uniform(0, longest)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(home / "begun", out, symlinks=True)
    shutil.copy(home / "begun.jsonl", log)
    flags = ("--resume", out, "--out", out, "--log", log, "--steps", args.steps)
    with train(args.ranks, *flags) as job:
        rank = kill_one(job, moment, choice)
        done = job.done()
    if rank is None or done.code == 0:
        return None
    row = {"rank": rank, "moment": moment, "seconds": done.seconds, "code": done.code, "left": len(done.left)}
    try:
        row["step"] = load_checkpoint(out, with_optimizer=True).state["step"]
    except CheckpointError as error:
        return row | {"step": None, "error": str(error), "equal": False}
    finished(train(args.ranks, *flags))
    return row | {"equal": curve(log) == straight}


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="ranks to kill, one a run (default 20)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a run (default 4)")
    parser.add_argument("--preset", default="tiny", help="model (default tiny)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default 60)")
    parser.add_argument("--checkpoint-every", type=int, default=2, help="steps between checkpoints (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments (default 0)")
    args = parser.parse_args()
    if not Path("/proc/self/environ").exists():
        sys.exit("this benchmark finds the ranks through /proc, which this system has not")

    rows, choice = [], random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        flags = ("--preset", args.preset, "--checkpoint-every", args.checkpoint_every)
        begun, log = home / "begun", home / "begun.jsonl"
        finished(train(args.ranks, *flags, "--steps", args.checkpoint_every, "--out", begun, "--log", log))
        whole = (*flags, "--steps", args.steps, "--out", home / "straight", "--log", home / "straight.jsonl")
        longest = finished(train(args.ranks, *whole)).seconds
        straight = curve(home / "straight.jsonl")
        while len(rows) < args.times:
            progress(f"run {len(rows) + 1}/{args.times}")
            if row := trial(args, home, straight, choice, longest):
                rows.append(row)
    progress("")
    print_table(
        [
            {
                "killed": f"rank {row['rank']}",
                "after, s": f"{row['moment']:.2f}",
                "all ended in, s": f"{row['seconds']:.2f}",
                "exit code": row["code"],
                "processes left": row["left"],
                "checkpoint": "unreadable" if row["step"] is None else f"step {row['step']}",
                "resumed curve": "equal" if row["equal"] else "DIFFERS",
            }
            for row in rows
        ]
    )
    seconds = [row["seconds"] for row in rows]
    summary = {
        "clean_ends": sum(row["code"] != 0 and not row["left"] and row["seconds"] < 10 for row in rows),
        "readable": sum(row["step"] is not None for row in rows),
        "equal": sum(row["equal"] for row in rows),
        "median_seconds": statistics.median(seconds),
        "longest_seconds": max(seconds),
    }
    print(
        f"\n{summary['clean_ends']} of {args.times} ended within 10 s with nothing left (median "
        f"{summary['median_seconds']:.2f} s, longest {summary['longest_seconds']:.2f} s), {summary['readable']} left a "
        f"readable checkpoint, {summary['equal']} went on to the unbroken curve, bit for bit."
    )
    save(BENCHMARK, {**vars(args), "longest_moment": longest, "summary": summary, "rows": rows})


if __name__ == "__main__":
    run(main)
