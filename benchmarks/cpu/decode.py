"""How many milliseconds does a token take, with a KV cache and recomputing, against PyTorch at equal threads?"""

import argparse
import statistics
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.harness.contenders import Contender, Running, paired_ratio, play, print_table, run, save
from gpt2core.app.presets import PRESETS

OURS, TORCH = "ours", "torch eager"
SEED = 20260101
BENCHMARK = "benchmarks.cpu.decode"  # how the contenders' processes import this file


def prepare(module, preset, threads):
    """In the contender's process: return `turn(prompt, new, use_cache)`, one greedy continuation of random tokens."""
    config = PRESETS[preset]
    generate = module.make_generator(config, threads)

    def turn(prompt, new, use_cache):
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

    return turn


def cases(block, new):
    """What is decoded. The last is the paper's inference: its window slides, so no cache outlives its first token."""
    yield "KV cache", {"prompt": block - new, "new": new, "use_cache": True}
    yield "recomputing", {"prompt": block - new, "new": new, "use_cache": False}
    yield "full window", {"prompt": block, "new": new, "use_cache": True}


def contenders(args, threads):
    """The table's rows. Ours divides matrix products over threads of its own, PyTorch has as many OpenMP threads."""
    sizes = {"preset": args.preset, "threads": threads}
    yield Contender(OURS, "benchmarks.harness.ours", 1, sizes)
    yield Contender(TORCH, "benchmarks.peers.torch_gpt2", threads, sizes)


def measure(args, threads, rows):
    """Play every case of one thread count. Every contender's cache must give the tokens that it gives recomputing."""
    results = []
    with ExitStack() as stack:
        running = [stack.enter_context(Running(row, BENCHMARK, args.timeout)) for row in rows]
        for case, request in cases(PRESETS[args.preset].block_size, args.new):
            for name, answers in play(running, args.rounds, request, request).items():
                turns = answers["rounds"]
                results.append(
                    {
                        "name": name,
                        "case": case,
                        "threads": threads,
                        **request,
                        **{key: [turn[key] for turn in turns] for key in ("first", "token", "total", "cpu")},
                        "peak_bytes": turns[-1]["peak_bytes"],
                        "ids": turns[-1]["ids"],
                    }
                )
    ids = {(result["name"], result["case"]): result["ids"] for result in results}
    for row in rows:
        if ids[row.name, "KV cache"] != ids[row.name, "recomputing"]:
            raise SystemExit(f"contender '{row.name}': the cache gives other tokens than recomputing")
    return results


def summarise(results):
    """Add medians and ratios to the results of one thread count; return table rows."""
    token = {(result["name"], result["case"]): result["token"] for result in results}
    rows = []
    for result in results:
        case, name = result["case"], result["name"]
        for key in ("first", "token", "total"):
            result[f"median_{key}"] = statistics.median(result[key])
        result["times_as_fast_as_torch"] = paired_ratio(token[TORCH, case], result["token"])
        result["times_as_fast_as_recomputing"] = statistics.median(token[name, "recomputing"]) / result["median_token"]
        rows.append(
            {
                f"{result['threads']} thread(s)": f"{case}, {name}",
                "tokens": f"{result['prompt']} + {result['new']}",
                "first, ms": f"{1e3 * result['median_first']:.1f}",
                "ms/token": f"{1e3 * result['median_token']:.2f}",
                "best": f"{1e3 * min(result['token']):.2f}",
                "x torch": f"{result['times_as_fast_as_torch']:.2f}",
                "x recomputing": f"{result['times_as_fast_as_recomputing']:.1f}",
                "all, s": f"{result['median_total']:.2f}",
                "cores had": f"{sum(result['cpu']) / sum(result['total']):.2f}",
                "peak MiB": f"{result['peak_bytes'] / 2**20:.0f}",
            }
        )
    return rows


def main(contenders=contenders):
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default 1 2)")
    parser.add_argument("--preset", choices=PRESETS, default="paper", help="model (default paper)")
    parser.add_argument("--new", type=int, default=30, help="new tokens (default 30)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (default 7)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that one turn may take (default 300)")
    args = parser.parse_args()

    results = []
    for threads in args.threads:
        of_threads = measure(args, threads, list(contenders(args, threads)))
        print_table(summarise(of_threads))
        print()
        results += of_threads
    save(BENCHMARK, results)


if __name__ == "__main__":
    run(main)
