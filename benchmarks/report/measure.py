"""What the report measures on this machine: the list of its parts, and one function for each kind of part."""

import os
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path

from benchmarks.harness.report import nvidia_smi
from benchmarks.harness.training_runs import PACKAGES, inference_seconds, python_command
from benchmarks.harness.training_runs import train as run_training
from benchmarks.report.parts import Part
from benchmarks.report.prompt import record_prompt
from benchmarks.report.recording import record_all
from benchmarks.report.runs import RANKS
from benchmarks.report.trace import read_step
from gpt2core.app.shipped import WEIGHTS
from gpt2core.errors import ConfigError

SHORT_STEPS = 4  # of runs that measure only speed; the first step is not counted
TRACE_STEPS = 3  # of traced runs; the report shows the last of them
BUCKET = "--bucket-mb", "5"  # about 8 messages with the gradients of `paper`
NEW_TOKENS = 30  # of the paper's inference
REPEATS = 3  # of each inference
TIMEOUT = 1800  # seconds of one command


def parts_of(preset, steps, full):
    """The Parts for this machine. full: also train stage 1 on 1, 4 and 8 ranks."""
    gpus = len(nvidia_smi("name"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [  # (name, title, function, its arguments)
        ("train0", f"training, {steps} steps, stage 0", train, 0, None, preset, steps),
        *(
            (f"train1-{ranks}", f"training, {steps} steps, stage 1, {ranks} ranks", train, 1, ranks, preset, steps)
            for ranks in (RANKS if full else (2,))
        ),
        ("infer0", "inference, stage 0", infer, 0, None, None),
        *(
            (f"infer1-{mode}", f"inference, stage 1, 2 ranks, --mode {mode}", infer, 1, 2, mode)
            for mode in ("replicate", "tensor")
        ),
        ("scaling", "training speed of 1, 2, ... threads and ranks", scaling, preset, cores),
        ("trace0", "trace of a step, stage 0", trace, 0, None, preset),
        ("trace1-flat", "trace, stage 1, 2 ranks, --dp flat", trace, 1, 2, preset, "--dp", "flat"),
        ("trace1-bucket", "trace, stage 1, 2 ranks, --dp bucket", trace, 1, 2, preset, "--dp", "bucket", *BUCKET),
    ]
    if gpus:
        several = 1 << (gpus.bit_length() - 1)  # a power of two
        for stage, ranks, mode in ((2, None, None), (3, several, "replicate")):
            found += [
                (f"train{stage}", f"training, {steps} steps, stage {stage}", train, stage, ranks, preset, steps),
                (f"infer{stage}", f"inference, stage {stage}", infer, stage, ranks, mode),
                (f"trace{stage}", f"trace of a step, stage {stage}", trace, stage, ranks, preset),
            ]
    return [
        Part("recordings", "slices in ring, reduce-scatter, ZeRO-1, ZeRO-3", record_all, times=False),
        Part("prompt", "a prompt through the shipped model of the book", record_prompt, times=False),
        *(Part(name, title, function, arguments) for name, title, function, *arguments in found),
    ]


def train(stage, ranks, preset, steps):
    """A training with its default flags, in fp32, and its sample text."""
    flags = {"preset": preset, "steps": steps, "sample": NEW_TOKENS} | ({"precision": "fp32"} if stage >= 2 else {})
    rows, out = run_training("training", PACKAGES[stage], TIMEOUT, ranks=ranks, **flags)
    losses, seconds = ([row[field] for row in rows] for field in ("loss", "seconds"))
    return {"ranks": ranks, "losses": losses, "seconds": sum(seconds), "sample": continuation(out)}


def continuation(out):
    """The text after "Continuation:" in the output of a command, in one line, without the line of --stats."""
    text = out.rpartition("Continuation:\n")[2].split("\nprompt tokens")[0]
    return " ".join(text.split())


def infer(stage, ranks, mode):
    """The paper's inference with the shipped weights: greedy, 256 tokens and 30 new ones.

    `seconds` is the time for all new tokens, without the start of the program: the median of REPEATS runs.
    """
    words = ["--weights", str(WEIGHTS), "--max-new-tokens", str(NEW_TOKENS), "--stats"]
    command = python_command(ranks, f"{PACKAGES[stage]}.inference", *words, *(("--mode", mode) if mode else ()))
    samples, outputs = zip(*(inference_seconds("inference", command, TIMEOUT) for _ in range(REPEATS)), strict=True)
    return {"ranks": ranks, "seconds": statistics.median(samples), "sample": continuation(outputs[-1])}


def scaling(preset, cores):
    """The median step time of stage 0 on 1, 2, 4, ... threads and of stage 1 on as many ranks of one thread."""
    counts, rows = [1 << k for k in range(min(cores, 8).bit_length())], []
    runs = [("threads", count, 0, None, count) for count in counts]
    runs += [("ranks", count, 1, count, 1) for count in counts[1:]]
    for kind, count, stage, ranks, threads in sorted(runs, key=lambda run: run[1]):
        with suppress(ConfigError, ImportError):  # without MPI
            flags = {"preset": preset, "steps": SHORT_STEPS, "threads": threads}
            log, _ = run_training("scaling", PACKAGES[stage], TIMEOUT, ranks=ranks, **flags)
            time = statistics.median(row["seconds"] for row in log[1:])
            rows.append({"kind": kind, "count": count, "step_seconds": time})
    return {"preset": preset, "rows": rows}


def trace(stage, ranks, preset, *flags):
    """The last of TRACE_STEPS steps of a training with --trace."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"trace": Path(folder, "trace.json"), "trace_steps": TRACE_STEPS, "steps": TRACE_STEPS}
        run_training("trace", PACKAGES[stage], TIMEOUT, flags, ranks, preset=preset, **options)
        return read_step(options["trace"])
