"""Does a job end soon when a rank is killed, and does a resumed run continue the same loss curve?

Each trial starts a run that resumes from a checkpoint, and kills a random rank with SIGKILL at a random moment, which
may be during start-up. Then it resumes the run and compares the losses with those of an uninterrupted run. In stage 3
the other ranks wait for an NCCL kernel that never ends; their GPU memory must be free soon after the end of the job.

    python -m benchmarks.ranks.kill                      # 20 runs on four ranks
    python -m benchmarks.ranks.kill --times 1 --ranks 2  # a quick trial
    python -m benchmarks.ranks.kill --stage 3 --times 10 --steps 1500 --checkpoint-every 100  # on four GPUs
"""

import functools
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.processes import BenchmarkFailed, progress, raise_user_error
from benchmarks.harness.report import nvidia_smi, save
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from gpt2core.app.checkpoints.directory import load_checkpoint
from gpt2core.errors import CheckpointError, ConfigError
from testing.jobs import Job

STAGES = {  # {stage: (its package, flags, group of the results, seconds within which a job must end)}
    1: ("stage1_mpi", ["--threads", 1], "ranks", 10),
    3: ("stage3_mpi_cuda", [], "gpus", 30),
}
FLAGS = dict(stage=1, preset="tiny", ranks=4, times=20, seed=0)  # of a benchmark that kills ranks
FREE_LIMIT = 10  # seconds that the driver may take to free the GPU memory of a process
IGNORED_MIB = 64  # MiB by which the memory in use on a GPU may grow
# What the launcher or the watchdog prints when a rank was killed.
CAUSE = re.compile(r"signal 9|SIGKILL|Killed|^error: |KILLED BY SIGNAL", re.MULTILINE)
TRIALS = """
    killed = rank {rank} | killed after, s = {moment:.2f} | job ended within, s = {seconds:.2f} | exit code = {code}
    processes left = {left} | left on GPUs = {on_gpus or "nothing"} | cause reported = {cause or "NONE"}
    checkpoint = {"unreadable" if step is None else "step %s" % step}
    resumed curve = {"equal" if equal else "DIFFERS"}
"""


@contextmanager
def job_folder():
    """The Path of a new directory for the runs of a benchmark that kills ranks. ConfigError: there is no /proc."""
    if not Path("/proc/self/environ").exists():
        raise ConfigError("this benchmark finds the ranks in /proc, which this system does not have: use Linux")
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def train(args, out, *flags, before=(sys.executable,), start=None):
    """Start a training run with checkpoints in the directory `out` and its log beside it; return its Job.

    before: words of the launcher before the program. start: the launcher, by default mpiexec.
    """
    package, of_stage, *_ = STAGES[args.stage]
    words = "-n", args.ranks, *before, "-m", f"{package}.train_gpt2", "--deterministic", "--sample", 0
    return Job(*words, *of_stage, "--out", out, "--log", f"{out}.jsonl", *flags, start=start)


def finished(job):
    """Wait for a job; return its Done (exit code, output, seconds). Raises UserError or BenchmarkFailed if it fails."""
    with job:
        done = job.done()
    if done.code:
        raise_user_error("a run without a kill", done.code, done.err)
        raise BenchmarkFailed(f"a run without a kill ended with status {done.code}: {done.err.strip()}")
    return done


def curve(log):
    """([(step, loss, gradient norm)], hash of the final parameters) of a log file."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows], rows[-1].get("parameters_sha256")


def used_mib():
    """[MiB in use on each GPU]."""
    return [int(row[0]) for row in nvidia_smi("memory.used")]


def left_on_gpus(before):
    """A text about the memory that is in use in addition to `before`, from used_mib(), after up to FREE_LIMIT s."""
    deadline = time.monotonic() + FREE_LIMIT
    while True:
        growth = [new - old for old, new in zip(before, used_mib(), strict=True)]
        left = [f"{mib} MiB on GPU {gpu}" for gpu, mib in enumerate(growth) if mib > IGNORED_MIB]
        if not left or time.monotonic() > deadline:
            return ", ".join(left)
        time.sleep(0.2)


def checkpoint_of(directory):
    """{"step": of the checkpoint}, or {"step": None, "error": text} if it cannot be read."""
    try:
        return {"step": load_checkpoint(directory, with_optimizer=True).state["step"]}
    except CheckpointError as error:
        return {"step": None, "error": str(error)}


def trial(args, folder, expected, rng, longest):
    """Kill a rank of a run, then resume from its checkpoint; return the result, or None if the run finished before.

    folder: contains "begun", a checkpoint, and its log. expected: curve() of an uninterrupted run. longest: its
    seconds; the rank is killed within this time.
    """
    out, moment, before = folder / "run", rng.uniform(0, longest), used_mib()
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder / "begun", out, symlinks=True)
    shutil.copy(folder / "begun.jsonl", folder / "run.jsonl")
    resume = functools.partial(train, args, out, "--resume", out, "--steps", args.steps)
    with resume() as job:
        time.sleep(moment)
        rank = job.kill_rank(rng)
        done = job.done()
    if rank is None or done.code == 0:
        return None
    result = dict(rank=rank, moment=moment, seconds=done.seconds, code=done.code, left=len(done.left))
    result |= {"on_gpus": left_on_gpus(before), "cause": (CAUSE.search(done.out + done.err) or [""])[0]}
    result |= checkpoint_of(out)
    if result["step"] is not None:
        finished(resume())
    return result | {"equal": result["step"] is not None and curve(folder / "run.jsonl") == expected}


def is_clean(result, limit):
    """Whether the job of a trial ended within `limit` s with an error code, reported the cause and left nothing."""
    ended = result["code"] != 0 and result["seconds"] < limit
    return bool(ended and result["cause"] and not result["left"] and not result["on_gpus"])


def finish(args, columns, rows, summary, sentence, **results):
    """Add the seconds of the rows to the summary; print and save everything."""
    progress("")
    seconds = [row["seconds"] for row in rows]
    summary |= {"median_seconds": statistics.median(seconds), "longest_seconds": max(seconds)}
    Table("", columns).print(rows)
    print(f"{sentence}; seconds: median {summary['median_seconds']:.2f}, longest {summary['longest_seconds']:.2f}")
    save({**vars(args), **results, "summary": summary, "rows": rows}, args, group=STAGES[args.stage][2])


@benchmark(**FLAGS, steps=60, checkpoint_every=2)
def main(args):
    results, rng, limit = [], random.Random(args.seed), STAGES[args.stage][3]
    with job_folder() as folder:
        flags = ("--preset", args.preset, "--checkpoint-every", args.checkpoint_every, "--steps")
        finished(train(args, folder / "begun", *flags, args.checkpoint_every))
        longest = finished(train(args, folder / "whole", *flags, args.steps)).seconds
        expected = curve(folder / "whole.jsonl")
        while len(results) < args.times:
            progress(f"run {len(results) + 1}/{args.times}")
            if result := trial(args, folder, expected, rng, longest):
                results.append(result | {"clean": is_clean(result, limit)})
    summary = {
        "clean_ends": sum(result["clean"] for result in results),
        "readable": sum(result["step"] is not None for result in results),
        "equal": sum(result["equal"] for result in results),
    }
    sentence = (
        f"{summary['clean_ends']} of {args.times} ended within {limit} s, reported the cause and left nothing; "
        f"{summary['readable']} left a readable checkpoint, {summary['equal']} resumed with the same bits"
    )
    finish(args, TRIALS, results, summary, sentence, longest_moment=longest)
