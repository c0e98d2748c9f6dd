"""Does a job end soon when a rank is killed, and does a resumed run continue the same loss curve?

Each trial starts a run that resumes from a checkpoint, and kills a random rank with SIGKILL at a random moment, which
may be during start-up. Then it resumes the run and compares the losses with those of an uninterrupted run.

    python -m benchmarks.ranks.kill                      # 20 runs on four ranks
    python -m benchmarks.ranks.kill --times 1 --ranks 2  # a quick trial
"""

import functools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.processes import progress, run_main
from benchmarks.harness.report import benchmark_parser, save
from benchmarks.harness.table_format import Table
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.errors import CheckpointError
from testing.jobs import Job

TRIALS = """
    killed = rank {rank} | killed after, s = {moment:.2f} | job ended within, s = {seconds:.2f} | exit code = {code}
    processes left = {left} | checkpoint
"""  # columns of the table of trials


@contextmanager
def job_folder():
    """The Path of a new directory for the runs of a benchmark that kills ranks. Exits on a system without /proc."""
    if not Path("/proc/self/environ").exists():
        sys.exit("this benchmark finds the ranks in /proc, which this system does not have")
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def train(ranks, *flags):
    """Start a training run on `ranks` ranks; return its Job."""
    return Job("-n", ranks, sys.executable, "-m", "stage1_mpi.train_gpt2", "--threads", 1, "--sample", 0, *flags)


def finished(job):
    """Wait for a job; return its Done (exit code, output, seconds). Exits if the job fails."""
    with job:
        done = job.done()
    if done.code:
        sys.exit(f"a run ended with status {done.code} although no rank was killed: {done.err.strip()}")
    return done


def curve(log):
    """([(step, loss, gradient norm)], hash of the final parameters) of a log file."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows], rows[-1].get("parameters_sha256")


def killed_run(folder, start, rng, longest):
    """Kill a rank of a run; return (its Done, the first fields of the result), or None if the run finished.

    folder: contains "begun", a checkpoint, whose copy "run" is continued by the Job start(). longest: the seconds of an
    uninterrupted run; the rank is killed within this time.
    """
    out, moment = folder / "run", rng.uniform(0, longest)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / "begun", out, symlinks=True)
    with start() as job:
        time.sleep(moment)
        rank = job.kill_rank(rng)
        done = job.done()
    if rank is None or done.code == 0:
        return None
    return done, dict(rank=rank, moment=moment, seconds=done.seconds, code=done.code, left=len(done.left))


def checkpoint_of(directory):
    """{"step": of the checkpoint}, or {"step": None, "error": text} if it cannot be read."""
    try:
        return {"step": load_checkpoint(directory, with_optimizer=True).state["step"]}
    except CheckpointError as error:
        return {"step": None, "error": str(error)}


def trial(args, folder, expected, rng, longest):
    """Kill a rank of one run, then resume from its checkpoint; return the result, or None if the run finished.

    folder: see killed_run(); it also contains the log of "begun". expected: curve() of an uninterrupted run.
    """
    out, log = folder / "run", folder / "run.jsonl"
    shutil.copy(folder / "begun.jsonl", log)
    resume = functools.partial(train, args.ranks, "--resume", out, "--out", out, "--log", log, "--steps", args.steps)
    if (killed := killed_run(folder, resume, rng, longest)) is None:
        return None
    result = killed[1] | checkpoint_of(out)
    if result["step"] is None:
        return result | {"equal": False}
    finished(resume())
    return result | {"equal": curve(log) == expected}


def ended_cleanly(result):
    """Whether the job of a trial ended with an error code, within 10 seconds and with no process left."""
    return result["code"] != 0 and not result["left"] and result["seconds"] < 10


def report(args, results, is_clean, longest, columns, sentence):
    """Print a row for each trial and a sentence, and save both.

    is_clean(result): whether a job ended as it should. longest: the seconds of a whole run. columns: a description of
    the columns that only one kind of jobs has. sentence: a template of the flags and of the summary.
    """
    checkpoints = ("unreadable" if result["step"] is None else f"step {result['step']}" for result in results)
    rows = [result | {"checkpoint": text} for result, text in zip(results, checkpoints, strict=True)]
    Table("", TRIALS + columns).print(rows)
    seconds = [result["seconds"] for result in results]
    summary = {
        "clean_ends": sum(map(is_clean, results)),
        "readable": sum(result["step"] is not None for result in results),
        **({"equal": sum(result["equal"] for result in results)} if "equal" in results[0] else {}),
        "median_seconds": statistics.median(seconds),
        "longest_seconds": max(seconds),
    }
    print(sentence.format(**vars(args), **summary))
    save({**vars(args), "longest_moment": longest, "summary": summary, "rows": results}, args)


def main():
    parser = benchmark_parser("benchmarks.ranks.kill", __doc__)
    parser.add_flags(preset="tiny", ranks=4, times=20, steps=60, checkpoint_every=2, seed=0)
    args = parser.parse_args()
    results, rng = [], random.Random(args.seed)
    with job_folder() as folder:
        flags = ("--preset", args.preset, "--checkpoint-every", args.checkpoint_every)
        begun, log = folder / "begun", folder / "begun.jsonl"
        finished(train(args.ranks, *flags, "--steps", args.checkpoint_every, "--out", begun, "--log", log))
        whole = (*flags, "--steps", args.steps, "--out", folder / "whole", "--log", folder / "whole.jsonl")
        longest = finished(train(args.ranks, *whole)).seconds
        expected = curve(folder / "whole.jsonl")
        while len(results) < args.times:
            progress(f"run {len(results) + 1}/{args.times}")
            if result := trial(args, folder, expected, rng, longest):
                results.append(result)
    progress("")
    report(
        args, results, ended_cleanly, longest, 'resumed curve = {"equal" if equal else "DIFFERS"}',
        "{clean_ends} of {times} ended within 10 s with no process left (median {median_seconds:.2f} s, longest "
        "{longest_seconds:.2f} s), {readable} left a readable checkpoint, {equal} resumed with the curve of the "
        "uninterrupted run, bit for bit.",
    )  # fmt: skip


if __name__ == "__main__":
    run_main(main)
