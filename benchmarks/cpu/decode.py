"""How many milliseconds does a generated token take, with and without a KV cache, compared with PyTorch?

A second table has the new tokens per second of a batch of prompts. Both programs use the same number of threads.

    python -m benchmarks.cpu.decode                                        # with one and with two threads
    python -m benchmarks.cpu.decode --preset tiny --rounds 1 --no-compile  # a quick trial
"""

import statistics
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec, run_rounds
from benchmarks.harness.report import add_peer, paired_ratio, summary
from benchmarks.harness.rounds import SEED
from benchmarks.harness.script import benchmark
from gpt2core.presets import PRESETS

OURS, TORCH, COMPILED = "ours", "torch eager", "torch compiled"
BATCHES = 8, 32  # numbers of prompts


def prepare(module, preset, threads):
    """Called in each process. Return `run_round(prompt, new, use_cache, batch=1)`, which times one greedy generation.

    prompt, new: numbers of random prompt tokens and of new tokens, for each of `batch` prompts. run_round() returns
    seconds ("first": until the first new tokens, "token": the mean of the later steps, "total": for all, "cpu": CPU
    time) and the "ids" generated for the first prompt.
    """
    config = PRESETS[preset]
    generate = module.make_generator(config, threads)

    def run_round(prompt, new, use_cache, batch=1):
        prompts = np.random.default_rng(SEED).integers(0, config.vocab_size, (batch, prompt))
        cpu_started = time.process_time()
        ids, first, total = generate(prompts, new, use_cache)
        return {
            "ids": [int(token) for token in ids[0]],
            "first": first,
            "token": (total - first) / (new - 1),
            "total": total,
            "cpu": time.process_time() - cpu_started,
        }

    return run_round


def cases(block_size, new):
    """Yield (name, arguments of run_round) of each case. The model has `block_size` positions.

    "full window" is the paper's inference: from the second new token on, the window of the last `block_size` tokens
    slides, so the KV cache is invalid, and each token needs a forward pass over the whole window.
    """
    yield "KV cache", {"prompt": block_size - new, "new": new, "use_cache": True}
    yield "recomputing", {"prompt": block_size - new, "new": new, "use_cache": False}
    yield "full window", {"prompt": block_size, "new": new, "use_cache": True}
    for batch in BATCHES:
        lengths = {"prompt": block_size // 8, "new": block_size // 4}
        yield f"batch of {batch}", {**lengths, "use_cache": True, "batch": batch}


def process_specs(args, threads):
    """Yield a ProcessSpec for each program. The compiled program has no case "recomputing".

    This project uses `threads` threads of Python, or of OpenBLAS for a single row; PyTorch uses OpenMP threads.
    """
    sizes = {"preset": args.preset, "threads": threads}
    yield ProcessSpec(OURS, "benchmarks.harness.ours", 1, sizes)
    yield ProcessSpec(TORCH, "benchmarks.peers.torch_gpt2", threads, sizes)
    if not args.no_compile:
        yield ProcessSpec(COMPILED, "benchmarks.peers.torch_decode_cuda", threads, sizes)


def measure(args, threads, specs):
    """Measure every case with one thread count; return one result for each case and program.

    Raises SystemExit if a program generates different tokens with the KV cache than without it.
    """
    results = []
    with ExitStack() as stack:
        processes = [stack.enter_context(BenchmarkProcess(spec, args.benchmark, args.timeout)) for spec in specs]
        for case, request in cases(PRESETS[args.preset].block_size, args.new):
            able = [each for each in processes if request["use_cache"] or each.spec.name != COMPILED]
            for name, answers in run_rounds(able, args.rounds, request, request).items():
                rounds = answers["rounds"]
                results.append(
                    {
                        "name": name,
                        "case": case,
                        "threads": threads,
                        **request,
                        **{key: [each[key] for each in rounds] for key in ("first", "token", "total", "cpu")},
                        "peak_bytes": rounds[-1]["peak_bytes"],
                        "ids": rounds[-1]["ids"],
                    }
                )
    ids = {(result["name"], result["case"]): result["ids"] for result in results}
    for (name, case), tokens in ids.items():
        if case == "KV cache" and tokens != ids.get((name, "recomputing"), tokens):
            raise SystemExit(f"{name}: the tokens with the KV cache differ from those of recomputing")
    return results


def summarise(results):
    """Add cores used, speed ratios and the new tokens per second of batches to the results of one thread count.

    The peer of our program is the program of PyTorch that is the fastest in this case. The rates of a batch, and its
    ratio, include the time of the prompts.
    """
    by_case = {(result["name"], result["case"]): result for result in results}
    for result in results:
        recomputing = by_case.get((result["name"], "recomputing"))
        result["cores_used"] = sum(result["cpu"]) / sum(result["total"])
        if result["name"] == OURS:
            of_case = [each for each in results if each["case"] == result["case"]]
            field = "total" if "batch" in result else "token"
            ratios = {each["name"]: paired_ratio(each[field], result[field]) for each in of_case}
            add_peer(result, of_case, ratios, "token")
        if "batch" in result:
            rates = [result["batch"] * result["new"] / total for total in result["total"]]
            result["tokens_per_second"] = summary(rates)
        elif recomputing:
            medians = [statistics.median(each["token"]) for each in (recomputing, result)]
            result["times_as_fast_as_recomputing"] = medians[0] / medians[1]


@benchmark(
    "cpu-decode",
    common=dict(preset="paper", threads=[1, 2], rounds=7, timeout=300, no_compile=False),
    new=dict(type=int, default=30, help="number of new tokens (default 30)"),
)
def main(args):
    for threads in args.threads:
        results = measure(args, threads, list(process_specs(args, threads)))
        summarise(results)
        yield results
