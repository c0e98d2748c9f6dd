"""How many milliseconds does a generated token take, with and without a KV cache, compared with PyTorch?

Both programs use the same number of threads.
"""

import argparse
import statistics
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec, run_main, run_rounds
from benchmarks.harness.report import add_save_flags, paired_ratio, print_table, save
from gpt2core.app.presets import PRESETS

OURS, TORCH = "ours", "torch eager"
SEED = 20260101
BENCHMARK = "benchmarks.cpu.decode"  # the name under which the benchmark processes import this file


def prepare(module, preset, threads):
    """Called in each process. Return `run_round(prompt, new, use_cache)`, which times one greedy continuation.

    module: the imported Python module that is measured; its make_generator() builds the generator. prompt, new: numbers
    of random prompt tokens and of new tokens. run_round() returns a dictionary of seconds ("first": until the first new
    token, "token": the mean of the later tokens, "total": for all, "cpu": CPU time) and the generated "ids".
    """
    config = PRESETS[preset]
    generate = module.make_generator(config, threads)

    def run_round(prompt, new, use_cache):
        prompt_ids = np.random.default_rng(SEED).integers(0, config.vocab_size, prompt)
        cpu_started = time.process_time()
        ids, first, total = generate(prompt_ids, new, use_cache)
        return {
            "ids": [int(token) for token in ids],
            "first": first,
            "token": (total - first) / (new - 1),
            "total": total,
            "cpu": time.process_time() - cpu_started,
        }

    return run_round


def cases(block_size, new):
    """Yield (name, arguments of run_round) of each case. The model has `block_size` positions.

    "full window" is the paper's inference: the prompt has `block_size` tokens. From the second new token on, the window
    of the last `block_size` tokens slides. Then the position of every token changes, so the KV cache is invalid, and
    each new token needs a forward pass over the whole window.
    """
    yield "KV cache", {"prompt": block_size - new, "new": new, "use_cache": True}
    yield "recomputing", {"prompt": block_size - new, "new": new, "use_cache": False}
    yield "full window", {"prompt": block_size, "new": new, "use_cache": True}


def process_specs(args, threads):
    """Yield a ProcessSpec for each program.

    This project divides matrix products over `threads` Python threads; PyTorch uses `threads` OpenMP threads.
    """
    sizes = {"preset": args.preset, "threads": threads}
    yield ProcessSpec(OURS, "benchmarks.harness.ours", 1, sizes)
    yield ProcessSpec(TORCH, "benchmarks.peers.torch_gpt2", threads, sizes)


def measure(args, threads, specs):
    """Measure every case with one thread count; return one result for each case and program.

    Raises SystemExit if a program generates different tokens with the KV cache than without it.
    """
    results = []
    with ExitStack() as stack:
        processes = [stack.enter_context(BenchmarkProcess(spec, BENCHMARK, args.timeout)) for spec in specs]
        for case, request in cases(PRESETS[args.preset].block_size, args.new):
            for name, answers in run_rounds(processes, args.rounds, request, request).items():
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
    for spec in specs:
        if ids[spec.name, "KV cache"] != ids[spec.name, "recomputing"]:
            raise SystemExit(f"{spec.name}: the tokens with the KV cache differ from those of recomputing")
    return results


def summarise(results):
    """Add cores used and speed ratios to the results of one thread count; return the rows of its table."""
    token_seconds = {(result["name"], result["case"]): result["token"] for result in results}
    rows = []
    for result in results:
        case, name = result["case"], result["name"]
        median = statistics.median(result["token"])
        result["cores_used"] = sum(result["cpu"]) / sum(result["total"])
        result["times_as_fast_as_torch"] = paired_ratio(token_seconds[TORCH, case], result["token"])
        result["times_as_fast_as_recomputing"] = statistics.median(token_seconds[name, "recomputing"]) / median
        rows.append(
            {
                f"{result['threads']} thread(s)": f"{case}, {name}",
                "tokens": f"{result['prompt']} + {result['new']}",
                "first token, ms": f"{1e3 * statistics.median(result['first']):.1f}",
                "ms/token": f"{1e3 * median:.2f}",
                "fastest round, ms/token": f"{1e3 * min(result['token']):.2f}",
                "times as fast as torch": f"{result['times_as_fast_as_torch']['median']:.2f}",
                "times as fast as recomputing": f"{result['times_as_fast_as_recomputing']:.1f}",
                "all tokens, s": f"{statistics.median(result['total']):.2f}",
                "cores used": f"{result['cores_used']:.2f}",
                "peak MiB": f"{result['peak_bytes'] / 2**20:.0f}",
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads, a table for each (default 1 2)")
    add("--preset", choices=PRESETS, default="paper", help="model (default paper)")
    add("--new", type=int, default=30, help="number of new tokens (default 30)")
    add("--rounds", type=int, default=7, help="number of rounds; each round times every program (default 7)")
    add("--timeout", type=int, default=300, help="seconds that one round of a process may take (default 300)")
    add_save_flags(add)
    args = parser.parse_args()

    results = []
    for threads in args.threads:
        thread_results = measure(args, threads, list(process_specs(args, threads)))
        print_table(summarise(thread_results))
        print()
        results += thread_results
    save(BENCHMARK, results, args)


if __name__ == "__main__":
    run_main(main)
