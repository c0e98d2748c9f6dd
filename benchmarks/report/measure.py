"""What the report measures on this machine: the list of its parts, and one function for each kind of part."""

import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import training_runs
from benchmarks.harness.report import nvidia_smi
from benchmarks.harness.training_runs import PACKAGES, inference_seconds, python_command
from benchmarks.report.parts import Part
from benchmarks.report.prompt import record_prompt
from benchmarks.report.recording import record_all
from benchmarks.report.views import read_step
from gpt2core.app.shipped import WEIGHTS

SHORT_STEPS = 4  # of runs that measure only speed; the first step is not counted
TRACE_STEPS = 3  # of traced runs; the report shows the last of them
NEW_TOKENS = 30  # of the paper's inference
REPEATS = 3  # of each inference
TIMEOUT = 1800  # seconds of one command


def parts_of(preset, steps):
    """The Parts for this machine."""
    gpus = len(nvidia_smi("name"))
    several = 1 << max(0, gpus.bit_length() - 1)  # a power of two
    found = [
        Part("recordings", "slices in ring, reduce-scatter, ZeRO-1, ZeRO-3", record_all, times=False),
        Part("prompt", "a prompt through the shipped model of the book", record_prompt, times=False),
    ]
    for stage, ranks in ((0, None), (1, 2), (2, None), (3, several))[: 4 if gpus else 2]:
        of = f"stage {stage}, {ranks} ranks" if ranks else f"stage {stage}"
        found += [
            Part(f"train{stage}", f"training, {steps} steps, {of}", train, [stage, ranks, preset, steps]),
            Part(f"infer{stage}", f"inference, {of}", infer, [stage, ranks]),
            Part(f"trace{stage}", f"trace of a step, {of}", trace, [stage, ranks, preset]),
        ]
    bucket = ["--dp", "bucket", "--bucket-mb", "5"]  # about 8 messages with the gradients of `paper`
    return [
        *found,
        Part("trace1-bucket", "trace of a step, stage 1, 2 ranks, --dp bucket", trace, [1, 2, preset, *bucket]),
        Part("ranks", "training speed of two ranks of one thread", two_ranks, [preset]),
    ]


def train(stage, ranks, preset, steps):
    """A training with its default flags, in fp32, and its sample text."""
    flags = {"preset": preset, "steps": steps, "sample": NEW_TOKENS} | ({"precision": "fp32"} if stage >= 2 else {})
    rows, out = training_runs.train("training", PACKAGES[stage], TIMEOUT, ranks=ranks, **flags)
    losses, seconds = ([row[field] for row in rows] for field in ("loss", "seconds"))
    return {"ranks": ranks, "losses": losses, "seconds": sum(seconds), "sample": continuation(out)}


def continuation(out):
    """The text after "Continuation:" in the output of a command, in one line, without the line of --stats."""
    text = out.rpartition("Continuation:\n")[2].split("\nprompt tokens")[0]
    return " ".join(text.split())


def infer(stage, ranks):
    """The paper's inference with the shipped weights: greedy, 256 tokens and 30 new ones.

    On several ranks, each computes all logits, as in the paper. `seconds` is the time for all new tokens, without the
    start of the program: the median of REPEATS runs.
    """
    words = ["--weights", str(WEIGHTS), "--max-new-tokens", str(NEW_TOKENS), "--stats"]
    words += ["--mode", "replicate"] if ranks else []
    command = python_command(ranks, f"{PACKAGES[stage]}.inference", *words)
    samples, outputs = zip(*(inference_seconds("inference", command, TIMEOUT) for _ in range(REPEATS)), strict=True)
    return {"ranks": ranks, "seconds": statistics.median(samples), "sample": continuation(outputs[-1])}


def two_ranks(preset):
    """The median step times of stage 0 with one thread, and of stage 1 on two ranks of one thread."""
    times, flags = [], {"preset": preset, "steps": SHORT_STEPS, "threads": 1}
    for stage, ranks in ((0, None), (1, 2)):
        log, _ = training_runs.train("speed of two ranks", PACKAGES[stage], TIMEOUT, ranks=ranks, **flags)
        times.append(statistics.median(row["seconds"] for row in log[1:]))
    return times


def trace(stage, ranks, preset, *flags):
    """The last of TRACE_STEPS steps of a training with --trace."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"trace": Path(folder, "trace.json"), "trace_steps": TRACE_STEPS, "steps": TRACE_STEPS}
        training_runs.train("trace", PACKAGES[stage], TIMEOUT, flags, ranks, preset=preset, **options)
        return read_step(options["trace"])
