"""Does a training step on the GPU take the memory that stage2_cuda/memory_model.py predicts, within a tenth?"""

import argparse
import sys

import numpy as np

from benchmarks.gpu.step import driver_bytes, gib
from benchmarks.harness.contenders import Contender, Running, add_saving, print_table, progress, run, save
from gpt2core.app.presets import PRESETS
from stage2_cuda.memory_model import BYTES, CONTEXT, training_memory

BENCHMARK = "benchmarks.gpu.memory"
STEPS = 3  # one that compiles, one that is recorded, one that is replayed
BOUND = 0.10  # of the measured bytes
# (preset, sequences a step, precision, micro-batches): where activations are most of it, logits, or the parameters
CASES = [
    ("gpt2", 64, "bf16", 1),
    ("gpt2", 64, "fp16", 1),
    ("gpt2", 16, "fp32", 1),
    ("gpt2", 64, "bf16", 8),
    ("gpt2", 1, "bf16", 1),
    ("gpt2-medium", 32, "bf16", 1),
    ("gpt2-xl", 8, "bf16", 1),
    ("small", 32, "tf32", 1),
    ("paper", 16, "bf16", 1),
    ("paper", 16, "fp32", 1),
    ("paper", 256, "fp32", 1),
]


def prepare(module, preset, batch_size, precision, micro_batches):
    """Return `turn()`, which trains on random tokens; it may be asked once: a process's second peak tells nothing."""
    config, rng = PRESETS[preset], np.random.default_rng(0)

    def turn():
        before = driver_bytes()
        step = module.CudaSteps(config, batch_size, config.block_size, precision, micro_batches)
        for _ in range(STEPS):
            tokens = rng.integers(0, config.vocab_size, (batch_size, config.block_size + 1))
            step(tokens[:, :-1].copy(), tokens[:, 1:].copy())
        return {**step.memory(), "driver_bytes": None if before is None else driver_bytes() - before}

    return turn


def measure(case, timeout):
    """One result: what the pools held, what the driver gave out, and the model's terms, in bytes."""
    options = dict(zip(("preset", "batch_size", "precision", "micro_batches"), case, strict=True))
    with Running(Contender("ours", "benchmarks.harness.ours", 4, options), BENCHMARK, timeout) as running:
        answer = running.ask()
    config, batch, (precision, shards) = PRESETS[case[0]], case[1], case[2:]
    terms = training_memory(config, batch, config.block_size, precision, shards)
    result = {"options": options, "held_bytes": answer["held_bytes"], "driver_bytes": answer["driver_bytes"]}
    model = sum(terms.values()) - terms["context"]
    return result | {"terms": terms, "model_bytes": model, "difference": model / answer["held_bytes"] - 1}


def row_of(result):
    options, context = result["options"], None
    if result["driver_bytes"] is not None:
        context = result["driver_bytes"] - result["held_bytes"]
    largest = sorted(result["terms"].items(), key=lambda term: -term[1])[:3]
    return {
        "configuration": f"{options['preset']}, {options['precision']}, {options['batch_size']} sequences"
        + f" in {options['micro_batches']} micro-batches" * (options["micro_batches"] > 1),
        "held GiB": gib(result["held_bytes"]),
        "model GiB": gib(result["model_bytes"]),
        "difference": f"{100 * result['difference']:+.1f} %",
        "context GiB": gib(context),
        "most of it": ", ".join(f"{name} {gib(count)}" for name, count in largest),
    }


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, nargs="+", help="models (default: a list of cases)")
    add("--batch-size", type=int, nargs="+", default=[8, 64], help="sequences a step, with --preset (default 8 64)")
    add("--precision", choices=BYTES, nargs="+", default=["bf16"], help="with --preset (default bf16)")
    add("--micro-batches", type=int, nargs="+", default=[1], help="with --preset (default 1)")
    add("--timeout", type=int, default=300, help="seconds that one case may take, compiling included (default 300)")
    add_saving(add)
    args = parser.parse_args()
    given = [
        (preset, batch, precision, shards)
        for preset in args.preset or ()
        for batch in args.batch_size
        for precision in args.precision
        for shards in args.micro_batches
    ]
    results = []
    for case in given or CASES:
        progress(" ".join(map(str, case)))
        results.append(measure(case, args.timeout))
        if not args.no_save:  # after each case: what cuts a long run off must not take all of it along
            save(BENCHMARK, results, args.commit)
    progress("")
    print_table([row_of(result) for result in results])
    print(f"\nThe model takes {gib(CONTEXT)} GiB for CUDA's context, which is in neither of the first two columns.")
    beyond = [result for result in results if abs(result["difference"]) > BOUND]
    if beyond:
        sys.exit(f"{len(beyond)} of {len(results)} differ by more than {BOUND:.0%}")


if __name__ == "__main__":
    run(main)
