"""Does a GPU training step use the memory that gpt2core/memory/gpu.py predicts, within 10 %?

python -m benchmarks.gpu.memory                 # cases of several models
python -m benchmarks.gpu.memory --preset paper  # those of one model
"""

import sys

import numpy as np

from benchmarks.gpu.step import driver_bytes
from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec, progress
from benchmarks.harness.report import save_each
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import random_batch
from benchmarks.harness.script import benchmark
from gpt2core.memory.gpu import CONTEXT, training_memory
from gpt2core.parallel.config import ParallelConfig
from gpt2core.presets import PRESETS

BENCHMARK = "benchmarks.gpu.memory"
STEPS = 3  # the first step compiles, the second captures the graph, the third replays it
MAX_DIFFERENCE = 0.10  # largest allowed |predicted bytes / measured bytes - 1|
# (preset, sequences per step, precision, micro-batches, --recompute). In some cases activations need most of the
# memory, in others logits or parameters.
CASES = [
    *(("gpt2", *case, 1, "none") for case in ((64, "bf16"), (64, "fp16"), (16, "fp32"))),
    ("gpt2", 64, "bf16", 8, "none"),
    *(("gpt2", sequences, "bf16", 1, "block") for sequences in (64, 256)),
    *((*case, "bf16", 1, "none") for case in (("gpt2", 1), ("gpt2-medium", 32), ("gpt2-xl", 8))),
    ("small", 32, "tf32", 1, "none"),
    *(("paper", *case, 1, "none") for case in ((16, "bf16"), (16, "fp32"), (256, "fp32"))),
]


def prepare(module, preset, batch_size, precision, micro_batches, recompute):
    """Called in each process. Return `run_round(steps)`, which trains on random tokens and returns the bytes in use.

    run_round() may be called only once: the peak of a second call would include the memory of the first.
    """
    config, rng = PRESETS[preset], np.random.default_rng(0)

    def run_round(steps):
        before = driver_bytes()
        step = module.CudaSteps(config, batch_size, config.block_size, precision, micro_batches, recompute=recompute)
        for _ in range(steps):
            step(*random_batch(rng, config.vocab_size, batch_size, config.block_size))
        return {**step.memory(), "driver_bytes": None if before is None else driver_bytes() - before}

    return run_round


def measure(case, timeout):
    """Measure one of CASES; return its result, a dictionary.

    "held_bytes" is the size of CuPy's pools, "model_bytes" its prediction, "driver_bytes" the device memory of the
    process, and "terms" the predicted parts of this memory, {name: bytes}.
    """
    progress(" ".join(map(str, case)))
    preset, batch_size, precision, micro_batches, recompute = case
    options = dict(zip(("preset", "batch_size", "precision", "micro_batches", "recompute"), case, strict=True))
    with BenchmarkProcess(ProcessSpec("ours", "benchmarks.harness.ours", 4, options), BENCHMARK, timeout) as process:
        measured = process.run_round(steps=STEPS)
    progress("")
    config, parallel = PRESETS[preset], ParallelConfig(recompute=recompute)
    terms = training_memory(config, batch_size, config.block_size, precision, micro_batches, parallel=parallel)
    result = {"options": options, "held_bytes": measured["held_bytes"], "driver_bytes": measured["driver_bytes"]}
    model_bytes = sum(terms.values()) - terms["context"]  # the CUDA context is not in CuPy's pools
    difference = model_bytes / measured["held_bytes"] - 1
    return result | {"terms": terms, "model_bytes": model_bytes, "difference": difference}


MODELS = list(dict.fromkeys(preset for preset, *_ in CASES))


@benchmark(
    common=dict(timeout=300),
    preset=dict(choices=MODELS, nargs="+", default=MODELS, help="models (default all)"),
)
def main(args):
    results = save_each(args, ([measure(case, args.timeout)] for case in CASES if case[0] in args.preset))
    TABLES["gpu-memory"].print(results)
    context = f"{CONTEXT / 2**30:.2f} GiB"
    print(f"The columns held and predicted do not include the CUDA context ({context} in the model).")
    wrong = [result for result in results if abs(result["difference"]) > MAX_DIFFERENCE]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(results)} cases differ by more than {MAX_DIFFERENCE:.0%}")
