"""What the report measures on this machine: the list of its parts, and one function for each kind of part."""

import os
import re
import statistics
import tempfile
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
    in_interpreter = Part("interpreter", "stages 2 and 3 in Triton's interpreter", interpreter)
    speeds, messages = {"preset": preset, "cores": cores}, {"ranks": 2, "sizes": sizes}
    return [
        Part("recordings", "slices in ring, reduce-scatter, ZeRO-1, ZeRO-3", lambda _: record_all(), times=False),
        Part("prompt", "a prompt through the shipped model of the book", lambda _: record_prompt(), times=False),
        train_part("train0", 0, None, preset, steps),
        *(train_part(f"train1-{ranks}", 1, ranks, preset, steps) for ranks in (RANKS if full else (2,))),
        infer_part("infer0", 0, None, None),
        *(infer_part(f"infer1-{mode}", 1, 2, mode) for mode in ("replicate", "batch", "tensor")),
        Part("scaling", "training speed of 1, 2, ... threads and ranks", scaling, speeds),
        trace_part("trace0", 0, None, preset),
        trace_part("trace1-flat", 1, 2, preset, "--dp", "flat"),
        trace_part("trace1-bucket", 1, 2, preset, "--dp", "bucket", "--bucket-mb", bucket_mb(preset)),
        Part("collectives", "all-reduce algorithms on 2 ranks", all_reduces, messages),
    ] + (gpu_parts(gpus, preset, steps) if gpus else [in_interpreter])


def bucket_mb(preset):
    """The value of --bucket-mb (10^6 bytes), as text, for about BUCKETS messages with the gradients of this preset."""
    megabytes = 4 * Arena(parameter_shapes(PRESETS[preset])).size / 1e6  # fp32
    return f"{float(f'{megabytes / BUCKETS:.1g}'):g}"  # one digit


def gpu_parts(gpus, preset, steps):
    """The Parts of stages 2 and 3 on `gpus` GPUs; stage 3 uses a power of two of them."""
    stages = (2, None, None), (3, 1 << (gpus.bit_length() - 1), "replicate")
    return [
        part for stage, ranks, mode in stages for part in (
            train_part(f"train{stage}", stage, ranks, preset, steps),
            infer_part(f"infer{stage}", stage, ranks, mode),
            trace_part(f"trace{stage}", stage, ranks, preset),
        )
    ]  # fmt: skip


def train_part(name, stage, ranks, preset, steps):
    options = {"stage": stage, "ranks": ranks, "preset": preset, "steps": steps}
    return Part(name, f"training, {steps} steps, {place(stage, ranks)}", train, options)


def infer_part(name, stage, ranks, mode):
    title = f"inference, {place(stage, ranks)}" + (f", --mode {mode}" if mode else "")
    return Part(name, title, infer, {"stage": stage, "ranks": ranks, "mode": mode})


def trace_part(name, stage, ranks, preset, *flags):
    options = {"stage": stage, "ranks": ranks, "preset": preset, "flags": list(flags)}
    return Part(name, f"trace of a step, {' '.join([place(stage, ranks), *flags])}", trace, options)


def place(stage, ranks):
    return f"stage {stage}" + (f" on {counted(ranks, 'rank')}" if ranks else "")


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
        "bytes_sent": rows[-1].get("bytes_sent", 0),
        "parameters_sha256": rows[-1].get("parameters_sha256"),
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
    with tempfile.TemporaryDirectory() as folder:
        if mode == "batch":
            prompt_file = Path(folder, "prompts.txt")
            prompt_file.write_text("\n".join(corpus_prompts(BATCH_PROMPTS)) + "\n", encoding="utf-8")
            words += ["--prompts", str(prompt_file)]
        command, samples = python_command(ranks, f"{STAGES[stage]}.inference", *words), []
        for number in range(REPEATS):
            show(f"run {number + 1} of {REPEATS}")
            out = run_command_line(command, TIMEOUT)
            found = re.search(r"total ([\d.]+) s", out)
            if not found:
                raise PartFailed("the output of inference.py has no line of --stats")
            samples.append(float(found[1]))
    prompts = BATCH_PROMPTS if mode == "batch" else 1
    median = statistics.median(samples)
    return {"seconds": median, "samples": samples, "prompts": prompts, "sample": continuation(out)}


def corpus_prompts(count):
    """`count` texts of 256 tokens each, from the start of the corpus."""
    tokenizer = Tokenizer.load(WEIGHTS / "tokenizer.json")
    tokens = first_tokens(CORPUS, tokenizer, count * PROMPT_TOKENS)
    return [tokenizer.decode(tokens[i * PROMPT_TOKENS : (i + 1) * PROMPT_TOKENS].tolist()) for i in range(count)]


def scaling(show, preset, cores):
    """The median step time of stage 0 on 1, 2, 4, ... threads and of stage 1 on as many ranks of one thread."""
    rows = []
    for count in (1 << k for k in range(min(cores, 8).bit_length())):
        for kind, stage, ranks, threads in (("threads", 0, None, count), ("ranks", 1, count, 1)):
            if kind == "ranks" and count == 1:
                continue
            show(f"{count} {kind}")
            flags, others = ["--threads", str(threads), "--sample", "0"], OtherPrograms()
            try:
                log, _ = run_training(lambda text: None, stage, ranks, preset, SHORT_STEPS, flags)
            except Skipped:
                continue
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
