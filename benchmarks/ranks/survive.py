"""Does a run survive 20 random kills of its ranks with the bits of an undisturbed run, and how soon does it go on?

One job is started with --max-restarts, and again and again a random rank is killed with SIGKILL: before the first
checkpoint, while a checkpoint is written, and at random moments, which may be during start-up.

    python -m benchmarks.ranks.survive                                 # 20 kills of one run on four ranks
    python -m benchmarks.ranks.survive --times 2 --ranks 2 --steps 60  # a quick trial
    python -m benchmarks.ranks.survive --stage 3 --times 3 --ranks 2 --steps 3000 --checkpoint-every 100  # on two GPUs
"""

import os
import random
import re
import sys
import time

from benchmarks.harness.processes import BenchmarkFailed, progress, raise_user_error
from benchmarks.harness.script import benchmark
from benchmarks.ranks.kill import FLAGS, curve, finish, finished, job_folder, train
from gpt2core.app.checkpoints.directory import HIDDEN

BEFORE, WRITING, RANDOM = "before the first checkpoint", "while a checkpoint is written", "at a random moment"
LONGEST = 2.0  # seconds from the first step of a start until a kill at a random moment; half of them are before it
STEP = re.compile(r"^step +(\d+) ", re.MULTILINE)
AGAIN = "it is started again"
COLUMNS = """
    kill = {number} | moment = {moment} | killed = rank {rank}
    incomplete checkpoint = {"yes" if incomplete else "no"}
    last step before = {last} | first step after = {after} | steps repeated = {repeated}
    seconds until it = {seconds:.2f}
"""


def start(args, name, folder, restarts):
    """Start the run with checkpoints in folder/name and its log beside them; return its Job."""
    flags = ["--preset", args.preset, "--steps", args.steps, "--checkpoint-every", args.checkpoint_every]
    flags += ["--async-checkpoints"] * args.async_checkpoints
    launcher = [sys.executable, "-m", "stage1_mpi.launch"]
    return train(args, folder / name, *flags, before=("--max-restarts", restarts, "--"), start=launcher)


def moments(times, rng):
    """The moments of the kills: one or more before the first checkpoint, the others in a random order."""
    first, writing = max(1, times // 10), round(times * 0.3)
    later = [WRITING] * writing + [RANDOM] * (times - first - writing)
    return [BEFORE] * first + rng.sample(later, len(later))


def wait_until(job, condition, limit=120):
    """Wait until condition() is true and return it. Raises UserError or BenchmarkFailed if the job ends before, or
    after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while not (result := condition()):
        if job.process.poll() is not None or time.monotonic() > deadline:
            errors = job.texts()[1].strip()
            raise_user_error("the job", job.process.poll(), errors)
            message = "the job ended (then use more --steps), or did nothing, between two kills"
            raise BenchmarkFailed(f"{message}: {errors[-2000:]}")
        time.sleep(0.001)
    return result


def steps_of(text):
    """The numbers of the steps that a job has printed."""
    return [int(number) for number in STEP.findall(text)]


def incomplete_in(out):
    """The names of the checkpoints in the directory `out` that are written now, or that a killed rank has not ended."""
    names = os.listdir(out) if out.is_dir() else []
    return {name for name in names if HIDDEN.fullmatch(name) and name.startswith(".step")}


def one_kill(job, number, moment, out, seen, rng):
    """Kill a random rank at a moment of the present start, and wait for the next step.

    seen: the number of characters that the job had printed before this start. Returns (a row of the result, the number
    of characters before the next start).
    """
    starts, old = job.texts()[1].count(AGAIN), incomplete_in(out)
    if moment != RANDOM or rng.random() < 0.5:
        wait_until(job, lambda: steps_of(job.out()[seen:]))
    wait_until(job, job.ranks)
    if moment == WRITING:
        wait_until(job, lambda: incomplete_in(out) - old)
    elif moment == RANDOM:
        time.sleep(rng.uniform(0, LONGEST))
    rank, killed = job.kill_rank(rng), time.monotonic()
    wait_until(job, lambda: job.texts()[1].count(AGAIN) > starts)
    printed, incomplete = len(job.out()), bool(incomplete_in(out) - old)
    last = (steps_of(job.out()) or [None])[-1]
    after = wait_until(job, lambda: steps_of(job.out()[printed:]))[0]
    seconds, repeated = time.monotonic() - killed, 0 if last is None else max(0, last - after + 1)
    row = dict(number=number, moment=moment, rank=rank, incomplete=incomplete, last=str(last), after=after)
    return row | dict(repeated=repeated, seconds=seconds), printed


def survive(args, folder):
    """Run the job with its kills; return the rows of the result. Raises BenchmarkFailed if the job fails."""
    rng, rows, seen = random.Random(args.seed), [], 0
    with start(args, "killed", folder, args.times) as job:
        for number, moment in enumerate(moments(args.times, rng), 1):
            progress(f"kill {number}/{args.times}")
            row, seen = one_kill(job, number, moment, folder / "killed", seen, rng)
            rows.append(row)
        progress("the steps that are left")
        done = job.done()
    if done.code:
        raise BenchmarkFailed(f"the job ended with status {done.code} after its last kill: {done.err.strip()[-2000:]}")
    return rows


def summary_of(rows, found, wanted):
    """The summary of the rows; found, wanted: the curve() of the run with and without kills."""
    return {
        "kills": len(rows),
        "moments": {moment: sum(row["moment"] == moment for row in rows) for moment in (BEFORE, WRITING, RANDOM)},
        "incomplete": sum(row["incomplete"] for row in rows),
        "equal": found == wanted,
        "most_repeated": max(row["repeated"] for row in rows),
    }


@benchmark(
    common=dict(FLAGS, steps=1500, checkpoint_every=10),
    async_checkpoints=dict(action="store_true", help="another process saves the checkpoints (default: no)"),
)
def main(args):
    with job_folder() as folder:
        rows = survive(args, folder)
        finished(start(args, "whole", folder, 0))  # the same training without a kill
        summary = summary_of(rows, curve(folder / "killed.jsonl"), curve(folder / "whole.jsonl"))
    same = "the losses and parameters of an undisturbed run" if summary["equal"] else "OTHER losses or parameters"
    sentence = f"one run with {len(rows)} kills has {same}; a kill repeated at most {summary['most_repeated']} steps"
    finish(args, COLUMNS, rows, summary, f"{sentence} (a checkpoint every {args.checkpoint_every})")
    return 0 if summary["equal"] and summary["most_repeated"] <= args.checkpoint_every else 1
