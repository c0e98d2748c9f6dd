"""What the report measures on this machine: the list of its parts, and one function for each kind of part."""

import os
import re
import statistics
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.report import nvidia_smi
from benchmarks.harness.speedups import OtherPrograms
from benchmarks.ranks.collectives import collective_times
from benchmarks.report.parts import Part, PartFailed, Skipped, python_command, run_command_line
from benchmarks.report.prompt import record_prompt
from benchmarks.report.recording import record_all
from benchmarks.report.runs import RANKS
from benchmarks.report.trace import read_step
from gpt2core.app.output.run_log import read_log
from gpt2core.app.shipped import CORPUS, WEIGHTS
from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.errors import counted
from gpt2core.presets import PRESETS
from gpt2core.text.token_file import first_tokens
from gpt2core.text.tokenizer import Tokenizer
from testing.jobs import run_mpi

STAGES = ("stage0_serial", "stage1_mpi", "stage2_cuda", "stage3_mpi_cuda")
SHORT_STEPS = 4  # of runs that measure only speed; the first step is not counted
TRACE_STEPS = 3  # of traced runs; the report shows the last of them
INTERPRETER_STEPS = 5
WARM_UP_STEPS = 5  # first steps of a training that its median time leaves out
BUCKETS = 8  # about as many messages as the traced run with --dp bucket sends in a step
NEW_TOKENS, PROMPT_TOKENS = 30, 256  # the paper's inference
REPEATS = 3  # of each inference
BATCH_PROMPTS = 4  # prompts of --mode batch
TIMEOUT = 1800  # seconds of one command
MESSAGE_SIZES = 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 43_600_000  # bytes; the last: all gradients of `paper`


def parts_of(preset, steps, full):
    """The Parts for this machine. full: also train stage 1 on 1, 4 and 8 ranks."""
    gpus = len(nvidia_smi("name"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    sizes = [size for size in MESSAGE_SIZES if preset == "paper" or size <= 1_000_000]

    def part(measure, title, stage, ranks=None, name="", end="", **options):
        where = f"stage {stage}" + (f" on {counted(ranks, 'rank')}" if ranks else "")
        options = {"stage": stage, "ranks": ranks} | options
        return Part(f"{measure.__name__}{stage}{name}", f"{title}, {where}{end}", measure, options)

    def training(*place):
        return part(train, f"training, {steps} steps", *place, preset=preset, steps=steps)

    def inference(stage, ranks=None, mode=None, name=""):
        return part(infer, "inference", stage, ranks, name, f", --mode {mode}" * bool(mode), mode=mode)

    def traced(stage, ranks=None, name="", *flags):
        end = "".join(f" {flag}" for flag in flags)
        return part(trace, "trace of a step", stage, ranks, name, end, preset=preset, flags=list(flags))

    found = [
        Part("recordings", "slices in ring, reduce-scatter, ZeRO-1, ZeRO-3", lambda _: record_all(), times=False),
        Part("prompt", "a prompt through the shipped model of the book", lambda _: record_prompt(), times=False),
        training(0),
        *(training(1, ranks, f"-{ranks}") for ranks in (RANKS if full else (2,))),
        inference(0),
        *(inference(1, 2, mode, f"-{mode}") for mode in ("replicate", "batch", "tensor")),
        Part("scaling", "training speed of 1, 2, ... threads and ranks", scaling, {"preset": preset, "cores": cores}),
        traced(0),
        traced(1, 2, "-flat", "--dp", "flat"),
        traced(1, 2, "-bucket", "--dp", "bucket", "--bucket-mb", bucket_mb(preset)),
        Part("collectives", "all-reduce algorithms on 2 ranks", all_reduces, {"ranks": 2, "sizes": sizes}),
    ]
    if not gpus:
        return [*found, Part("interpreter", "stages 2 and 3 in Triton's interpreter", interpreter)]
    ranks = 1 << (gpus.bit_length() - 1)  # a power of two
    found += [training(2), inference(2), traced(2)]
    return [*found, training(3, ranks), inference(3, ranks, "replicate"), traced(3, ranks)]


def bucket_mb(preset):
    """The value of --bucket-mb (10^6 bytes), as text, for about BUCKETS messages with the gradients of this preset."""
    megabytes = 4 * Arena(parameter_shapes(PRESETS[preset])).size / 1e6  # fp32
    return f"{float(f'{megabytes / BUCKETS:.1g}'):g}"  # one digit


# -- training and inference --------------------------------------------------------------------------------------------


def run_training(show, stage, ranks, preset, steps, flags=(), **environment):
    """Run a training; return (rows of its log, standard output). show: shows the last step that has ended."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        words = f"{STAGES[stage]}.train_gpt2", "--preset", preset, "--steps", str(steps), "--log", str(log), "--no-save"
        command = python_command(ranks, *words, *flags)

        def tick():
            done = log.read_bytes().count(b"\n") if log.exists() else 0
            show(f"step {done} of {steps}")

        out = run_command_line(command, TIMEOUT, tick, **environment)
        return read_log(log), out


def train(show, stage, ranks, preset, steps):
    """A training with its default flags, in fp32, and its sample text."""
    precision = ["--precision", "fp32"] if stage >= 2 else []
    rows, out = run_training(show, stage, ranks, preset, steps, [*precision, "--sample", str(NEW_TOKENS)])
    seconds = [row["seconds"] for row in rows]
    return {
        "losses": [row["loss"] for row in rows],
        "seconds": sum(seconds),
        "first_step": seconds[0],
        "median_step": statistics.median(seconds[WARM_UP_STEPS:]) if len(seconds) >= 2 * WARM_UP_STEPS else None,
        "sample": continuation(out),
    }


def continuation(out):
    """The text after "Continuation:" in the output of a command, in one line, without the line of --stats."""
    text = out.rpartition("Continuation:\n")[2].split("\nprompt tokens")[0].split("\nprompts ")[0]
    return " ".join(text.split())


def infer(show, stage, ranks, mode):
    """The paper's inference with the shipped weights: greedy, 256 tokens and 30 new ones.

    With mode "batch", BATCH_PROMPTS prompts of 256 tokens. `seconds` is the time for all new tokens, without the start
    of the program: the median of REPEATS runs.
    """
    words = ["--weights", str(WEIGHTS), "--max-new-tokens", str(NEW_TOKENS), "--stats"]
    words += ["--mode", mode] if mode else []
    prompts, samples = BATCH_PROMPTS if mode == "batch" else 1, []
    with tempfile.TemporaryDirectory() as folder:
        if mode == "batch":
            file = Path(folder, "prompts.txt")
            file.write_text("\n".join(corpus_prompts(prompts)) + "\n", encoding="utf-8")
            words += ["--prompts", str(file)]
        for number in range(REPEATS):
            show(f"run {number + 1} of {REPEATS}")
            out = run_command_line(python_command(ranks, f"{STAGES[stage]}.inference", *words), TIMEOUT)
            found = re.search(r"total ([\d.]+) s", out)
            if not found:
                raise PartFailed("the output of inference.py has no line of --stats")
            samples.append(float(found[1]))
    median = statistics.median(samples)
    return {"seconds": median, "samples": samples, "prompts": prompts, "sample": continuation(out)}


def corpus_prompts(count):
    """`count` texts of 256 tokens each, from the start of the corpus."""
    tokenizer = Tokenizer.load(WEIGHTS / "tokenizer.json")
    tokens = first_tokens(CORPUS, tokenizer, count * PROMPT_TOKENS)
    return [tokenizer.decode(tokens[i * PROMPT_TOKENS : (i + 1) * PROMPT_TOKENS].tolist()) for i in range(count)]


def scaling(show, preset, cores):
    """The median step time of stage 0 on 1, 2, 4, ... threads and of stage 1 on as many ranks of one thread."""
    counts, rows = [1 << k for k in range(min(cores, 8).bit_length())], []
    runs = [("threads", count, 0, None, count) for count in counts]
    runs += [("ranks", count, 1, count, 1) for count in counts[1:]]
    for kind, count, stage, ranks, threads in sorted(runs, key=lambda run: run[1]):
        show(f"{count} {kind}")
        flags, others = ["--threads", str(threads), "--sample", "0"], OtherPrograms()
        with suppress(Skipped):
            log, _ = run_training(lambda text: None, stage, ranks, preset, SHORT_STEPS, flags)
            seconds = [row["seconds"] for row in log[1:]]
            row = {"kind": kind, "count": count, "step_seconds": statistics.median(seconds), "steps": len(seconds)}
            rows.append(row | {"other_cores": others.cores()})
    return {"rows": rows}


# -- traces, collectives, the interpreter ------------------------------------------------------------------------------


def trace(show, stage, ranks, preset, flags):
    """The last of TRACE_STEPS steps of a training with --trace."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        words = ["--trace", str(file), "--trace-steps", str(TRACE_STEPS), "--sample", "0", *flags]
        run_training(show, stage, ranks, preset, TRACE_STEPS, words)
        return read_step(file)


def all_reduces(show, ranks, sizes):
    """The time of an all-reduce by each algorithm of stage 1 and by the MPI library, for arrays of `sizes` bytes."""
    python_command(ranks, "")  # raises Skipped if there is no MPI
    with tempfile.TemporaryDirectory() as folder:
        arguments = "all_reduce", sizes, 5, 1.0, str(Path(folder, "store")), False
        try:
            results, *_ = run_mpi(ranks, collective_times, *arguments)
        except AssertionError as error:
            raise PartFailed(str(error).splitlines()[-1]) from None
    for result in results:
        result |= {"median": statistics.median(result.pop("seconds")), "bytes_sent": result["bytes_sent"][0]}
    return {"ranks": ranks, "rows": results}


def interpreter(show):
    """A few steps of preset `nano`: stage 0, and in the interpreter stage 2 and stage 3 on 2 ranks."""
    if not find_spec("triton"):
        raise Skipped("Triton is not installed; pip install triton")
    losses = {}
    for stage, ranks in ((0, None), (2, None), (3, 2)):
        show(f"stage {stage}")
        flags = ["--sample", "0", "--threads", "1"] if stage == 0 else ["--sample", "0"]
        rows, _ = run_training(lambda text: None, stage, ranks, "nano", INTERPRETER_STEPS, flags, TRITON_INTERPRET="1")
        losses[f"stage {stage}"] = [row["loss"] for row in rows]
    return {"preset": "nano", "losses": losses}
