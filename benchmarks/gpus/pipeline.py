"""Are the bubbles of the pipeline schedules those that the simulator computes from the times of the actions?

Each row is one run of train_gpt2.py with --pp and --schedule-picture, which records when each action of the last step
ran, and simulates the schedule with the mean times of these actions and of a message. A bubble is the fraction of the
time of all ranks in which they wait. The model has the whole vocabulary of the preset. The measured bubbles should have
the order of the simulated ones. Two schedules whose simulated bubbles differ by less than 1 point count as equal, in
any order: gpipe and 1f1b, for example, have the same bubble in theory.

    python -m benchmarks.gpus.pipeline                                                          # gpt2 on two GPUs
    python -m benchmarks.gpus.pipeline --stage 1 --preset tiny --batch-size 8 --schedules 1f1b  # on CPUs
"""

import re
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.harness.processes import BenchmarkFailed
from benchmarks.harness.report import save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.script import benchmark
from benchmarks.harness.training_runs import PACKAGES, median_step, train
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.presets import PRESETS

PICTURE = r"pipeline (measured|simulated), .*?: [\d.]+ ms, bubble ([\d.]+)%"
MOST = 5.0  # points by which a measured bubble may differ from the simulated one
EQUAL = 1.0  # points: two schedules whose simulated bubbles differ by less have no predicted order


def measure(args, schedule):
    """The result of one schedule: bubbles in percent, and the median of the seconds per step."""
    flags = {name: getattr(args, name) for name in ("preset", "batch_size", "micro_batches", "steps")}
    flags |= {"pp": args.ranks, "pp_schedule": schedule}
    with tempfile.TemporaryDirectory() as folder:
        flags |= corpus(Path(folder), PRESETS[args.preset])
        words = ["--schedule-picture", *args.flags.split()]
        log, text = train(schedule, PACKAGES[args.stage], args.timeout, words, args.ranks, **flags)
    text = " ".join(text.split())
    bubbles = {kind: float(percent) for kind, percent in re.findall(PICTURE, text)}
    if bubbles.keys() != {"measured", "simulated"}:
        raise BenchmarkFailed(f"{schedule}: the output has no measured and simulated bubble: {text[-500:]}")
    return {"schedule": schedule, "median": median_step(log), **bubbles}


def corpus(folder, config):
    """Flags for random tokens, and a tokenizer with the whole vocabulary of a preset; none if a text has it."""
    if config.vocab_size < 256:  # the words of the text that is the default
        return {}
    tokens, tokenizer = folder / "tokens.bin", folder / "tokenizer.json"
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 8 * config.block_size * 64)
    ids.astype(np.uint16).tofile(tokens)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols += [f"token {number}" for number in range(len(symbols), config.vocab_size)]
    made = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(tokenizer))
    return {"data": tokens, "tokenizer": tokenizer}


def verdict(results):
    """(whether the bubbles are as predicted, a sentence that says so)."""
    largest = max(abs(result["measured"] - result["simulated"]) for result in results)
    # pairs with a predicted order; rounded, because the bubbles have one decimal
    pairs = [(a, b) for a in results for b in results if round(b["simulated"] - a["simulated"], 1) >= EQUAL]
    ordered = all(a["measured"] < b["measured"] for a, b in pairs)
    return (
        ordered and largest <= MOST,
        f"The measured bubbles differ from the simulated ones by up to {largest:.1f} points (target: {MOST:g}); the "
        f"order of the schedules is {'' if ordered else 'not '}as predicted (schedules whose simulated bubbles differ "
        f"by less than {EQUAL:g} point count as equal).",
    )


@benchmark(
    common=dict(stage=3, preset="gpt2", ranks=2, batch_size=32, micro_batches=8, steps=12, timeout=200),
    schedules=dict(choices=SCHEDULES, nargs="+", default=list(SCHEDULES), help="schedules (default: all)"),
    flags=dict(metavar="FLAGS", help="more flags of train_gpt2.py, in quotes (in stage 3 bf16 and --deterministic)"),
)
def main(args):
    if args.flags is None:
        args.flags = "--precision bf16 --deterministic" if args.stage == 3 else ""
    results = [measure(args, schedule) for schedule in args.schedules]
    TABLES["gpus-pipeline"].print(results)
    met, sentence = verdict(results)
    print(sentence, flush=True)
    save(results, args)
    return 0 if met else 1
