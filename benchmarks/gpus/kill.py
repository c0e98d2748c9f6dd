"""Does a job on GPUs end soon when a rank is killed, report the cause, free all GPUs and keep a readable checkpoint?

Each trial starts a run that resumes from a checkpoint, and kills a random rank with SIGKILL at a random moment, which
may be during start-up. The other ranks then wait for an NCCL kernel that never ends.

    python -m benchmarks.gpus.kill                      # ten runs
    python -m benchmarks.gpus.kill --times 1 --ranks 2  # a quick trial on two GPUs
"""

import random
import re
import subprocess
import sys
import time

from benchmarks.harness.processes import progress, run_main, run_to_end
from benchmarks.harness.report import benchmark_parser, nvidia_smi
from benchmarks.ranks.kill import checkpoint_of, finished, job_folder, killed_run, report
from testing.jobs import ROOT, Job, launcher

END_LIMIT = 30  # allowed seconds from the kill to the end of the job
FREE_LIMIT = 10  # seconds that the driver may take to free the GPU memory of a process
COMPILE_LIMIT = 240  # allowed seconds of the first run, which compiles all kernels
IGNORED_MIB = 64  # MiB by which the memory in use on a GPU may grow without being reported
# What the launcher or the watchdog prints when a rank was killed.
CAUSE = re.compile(r"signal 9|SIGKILL|Killed|^error: |KILLED BY SIGNAL", re.MULTILINE)


def compile_all(ranks, *flags):
    """Run a whole training run, which compiles all kernels. Raises BenchmarkFailed after COMPILE_LIMIT seconds."""
    words = (*launcher(), "-n", ranks, sys.executable, "-m", "stage3_mpi_cuda.train_gpt2", "--sample", 0, *flags)
    run_to_end("the first run", list(map(str, words)), 1, COMPILE_LIMIT)


def train(ranks, *flags):
    """Start a training run on `ranks` ranks; return its Job."""
    words = ("-n", ranks, sys.executable, "train_gpt2.py", "--sample", 0, *flags)
    return Job(*words, cwd=ROOT / "stage3_mpi_cuda")


def gpu_state():
    """({ids of the processes on the GPUs}, [MiB in use on each GPU]). In a container the driver may report no ids."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    return set(re.findall(r"\d+", answer)), [int(row[0]) for row in nvidia_smi("memory.used")]


def left_on_gpus(before):
    """Compare the GPUs with `before`, an earlier gpu_state(). Return a text that lists new processes and new memory.

    Waits up to FREE_LIMIT seconds until both are gone; then the text is "".
    """
    deadline = time.monotonic() + FREE_LIMIT
    while True:
        (pids, used), (old_pids, old_used) = gpu_state(), before
        growth = [new - old for old, new in zip(old_used, used, strict=True)]
        memory = [f"{mib} MiB on GPU {gpu}" for gpu, mib in enumerate(growth) if mib > IGNORED_MIB]
        left = [f"process {pid}" for pid in sorted(pids - old_pids)] + memory
        if not left or time.monotonic() > deadline:
            return ", ".join(left)
        time.sleep(0.2)


def trial(args, folder, rng, longest, before):
    """Start a run and kill one of its ranks; return the result, or None if the run ended before the kill.

    folder, longest: see killed_run(). before: gpu_state() when no run was active.
    """
    out = folder / "run"
    flags = "--resume", out, "--out", out, "--dp", args.dp, "--steps", args.steps
    if (killed := killed_run(folder, lambda: train(args.ranks, *flags), rng, longest)) is None:
        return None
    done, result = killed
    text = done.out + done.err
    result |= {"on_gpus": left_on_gpus(before), "cause": (CAUSE.search(text) or [""])[0]}
    return result | {"steps_seen": text.count("| loss"), **checkpoint_of(out)}


def is_clean(result):
    """Whether the job of a trial ended soon, with an error code, reported the cause and left nothing."""
    ended = result["code"] != 0 and result["seconds"] < END_LIMIT
    return bool(ended and result["cause"] and not result["left"] and not result["on_gpus"])


def parser():
    parser = benchmark_parser("benchmarks.gpus.kill", __doc__)
    add = parser.add_argument
    parser.add_flags(preset="tiny", times=10, steps=4000, checkpoint_every=100, seed=0)
    add("--ranks", type=int, help="ranks of each run (default: one per GPU, at most 4)")
    add("--dp", default="bucket", help="strategy of gradient synchronisation (default bucket)")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    args.ranks = args.ranks or min(4, len(nvidia_smi("name")))
    if not args.ranks:
        sys.exit("this benchmark needs GPUs that nvidia-smi reports")
    results, rng, before = [], random.Random(args.seed), gpu_state()
    with job_folder() as folder:
        flags = ("--preset", args.preset, "--checkpoint-every", args.checkpoint_every, "--dp", args.dp)
        compile_all(args.ranks, *flags, "--steps", args.checkpoint_every, "--out", folder / "begun")
        whole_run = ("--resume", folder / "begun", "--out", folder / "whole", "--dp", args.dp, "--steps", args.steps)
        longest = finished(train(args.ranks, *whole_run)).seconds
        for _ in range(3 * args.times):  # some runs end before their rank is killed
            progress(f"run {len(results) + 1}/{args.times}")
            if len(results) < args.times and (result := trial(args, folder, rng, longest, before)):
                results.append(result)
    progress("")
    results = [result | {"clean": is_clean(result)} for result in results]
    report(
        args, results, is_clean, longest,
        'steps printed = {steps_seen} | cause reported = {cause or "NONE"} | left on GPUs = {on_gpus or "nothing"}',
        f"{{clean_ends}} of {{times}} ended within {END_LIMIT} s, reported the cause and left nothing (median "
        "{median_seconds:.2f} s, longest {longest_seconds:.2f} s), {readable} left a readable checkpoint.",
    )  # fmt: skip


if __name__ == "__main__":
    run_main(main)
