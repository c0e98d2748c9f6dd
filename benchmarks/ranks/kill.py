"""Does a job end at once when a rank is killed, and does a resumed run continue the same curve?

A random rank gets SIGKILL at a random moment, which may be during start-up, of a run that resumed from a checkpoint.
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

from benchmarks.harness.jobs import Job
from benchmarks.harness.processes import progress, run_main
from benchmarks.harness.report import add_save_flags, print_table, save
from gpt2core.app.checkpoint_directory import load_checkpoint
from gpt2core.errors import CheckpointError

BENCHMARK = "benchmarks.ranks.kill"


def train(ranks, *flags):
    """Start a training run on `ranks` ranks; return its Job."""
    return Job("-n", ranks, sys.executable, "-m", "stage1_mpi.train_gpt2", "--threads", 1, "--sample", 0, *flags)


def finished(job):
    """The Done of a job; exits if the job fails."""
    with job:
        done = job.done()
    if done.code:
        sys.exit(f"a run ended with status {done.code} although no rank was killed: {done.err.strip()}")
    return done


def curve(log):
    """([(step, loss, gradient norm)], hash of the final parameters) of a log."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows], rows[-1].get("parameters_sha256")


def kill_one(job, seconds, choice):
    """Kill a random rank after `seconds`; return its number, or None if the job ended before."""
    time.sleep(seconds)
    while job.process.poll() is None:
        if ranks := job.ranks():
            rank = choice.choice(sorted(ranks))
            try:
                os.kill(ranks[rank], signal.SIGKILL)
                return rank
            except ProcessLookupError:  # it has just ended
                pass
    return None


def trial(args, home, straight, choice, longest):
    """Kill a rank of one run, then resume from its checkpoint; return one row, or None if the run ended before."""
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
    parser.add_argument(
        "--times", type=int, default=20, help="number of runs; one rank of each run is killed (default 20)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each run (default 4)")
    parser.add_argument("--preset", default="tiny", help="model (default tiny)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (default 60)")
    parser.add_argument("--checkpoint-every", type=int, default=2, help="steps between checkpoints (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of ranks and of times (default 0)")
    add_save_flags(parser.add_argument)
    args = parser.parse_args()
    if not Path("/proc/self/environ").exists():
        sys.exit("this benchmark finds the ranks in /proc, which this system does not have")

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
                "job ended within, s": f"{row['seconds']:.2f}",
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
        f"\n{summary['clean_ends']} of {args.times} ended within 10 s with no process left (median "
        f"{summary['median_seconds']:.2f} s, longest {summary['longest_seconds']:.2f} s), {summary['readable']} left a "
        f"readable checkpoint, {summary['equal']} continued the uninterrupted curve bit for bit."
    )
    options = vars(args) | {"longest_moment": longest}
    save(BENCHMARK, {**options, "summary": summary, "rows": rows}, args)


if __name__ == "__main__":
    run_main(main)
