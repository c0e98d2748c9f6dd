"""Is the NumPy training step faster than PyTorch's at equal threads, and how close is it to the BLAS floor?"""

import argparse
import statistics
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.harness.contenders import Contender, Running, paired_ratio, play, print_table, run, save
from gpt2core.app.presets import PRESETS

EAGER, FLOOR = "torch eager", "sgemm floor"
SEED = 20260101
BENCHMARK = "benchmarks.cpu.train_step"  # how the contenders' processes import this file


def prepare(module, preset, batch_size, threads, **options):
    """In the contender's process: return `turn(steps)`, which trains on fresh random tokens and times every step."""
    config = PRESETS[preset]
    step = module.make_trainer(config, batch_size, config.block_size, threads, **options)
    rng = np.random.default_rng(SEED)  # the same tokens for every contender

    def turn(steps):
        seconds, losses, cpu_started = [], [], time.process_time()
        for _ in range(steps):
            tokens = rng.integers(0, config.vocab_size, (batch_size, config.block_size + 1))
            inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
            started = time.perf_counter()
            losses.append(step(inputs, targets))
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds, "losses": losses, "cpu_seconds": time.process_time() - cpu_started}

    return turn


def contenders(args, threads):
    """The table's rows. Ours runs one BLAS thread in each of its threads; PyTorch gets as many OpenMP threads."""
    sizes = {"preset": args.preset, "batch_size": args.batch_size, "threads": threads}
    yield Contender("ours", "benchmarks.harness.ours", 1, dict(sizes, deterministic=True))
    yield Contender("ours --no-deterministic", "benchmarks.harness.ours", 1, dict(sizes, deterministic=False))
    yield Contender(EAGER, "benchmarks.peers.torch_gpt2", threads, sizes)
    if not args.no_compile:
        yield Contender("torch compiled", "benchmarks.peers.torch_gpt2", threads, dict(sizes, compiled=True))
    yield Contender(FLOOR, "benchmarks.cpu.sgemm_floor", 1, sizes)


def measure(args, threads, rows):
    """Play one thread count; return one result for each row, with every step's seconds."""
    with ExitStack() as stack:
        running = [stack.enter_context(Running(row, BENCHMARK, args.timeout)) for row in rows]
        played = play(running, args.rounds, {"steps": args.warm_up}, {"steps": args.steps_per_round})
        baseline = {one.contender.name: one.baseline for one in running}
    return [
        {
            "name": name,
            "threads": threads,
            "seconds": [answer["seconds"] for answer in answers["rounds"]],
            "cpu_seconds": sum(answer["cpu_seconds"] for answer in answers["rounds"]),
            "warm_up_seconds": answers["warm_up"]["seconds"],
            "final_loss": answers["rounds"][-1]["losses"][-1],
            "peak_bytes": answers["rounds"][-1]["peak_bytes"],
            "import_bytes": baseline[name],
        }
        for name, answers in played.items()
    ]


def summarise(results, tokens):
    """Add medians and ratios (taken within rounds) to the results of one thread count; return table rows."""
    for result in results:
        result["round_medians"] = [statistics.median(seconds) for seconds in result["seconds"]]
    by_name = {result["name"]: result["round_medians"] for result in results}
    rows = []
    for result in results:
        every = [second for seconds in result["seconds"] for second in seconds]
        result["median"], result["min"] = statistics.median(every), min(every)
        result["times_as_fast_as_eager"] = paired_ratio(by_name[EAGER], result["round_medians"])
        result["share_of_floor"] = paired_ratio(by_name[FLOOR], result["round_medians"])
        rows.append(
            {
                f"{result['threads']} thread(s)": result["name"],
                "ms/step": f"{1e3 * result['median']:.4g}",
                "best": f"{1e3 * result['min']:.4g}",
                "tokens/s": f"{tokens / result['median']:.0f}",
                "x torch eager": f"{result['times_as_fast_as_eager']:.3f}",
                "share of floor": f"{100 * result['share_of_floor']:.0f} %",
                "cores had": f"{result['cpu_seconds'] / sum(every):.2f}",
                "peak MiB": f"{result['peak_bytes'] / 2**20:.0f}",
                "of it imports": f"{result['import_bytes'] / 2**20:.0f}",
            }
        )
    return rows


def main(contenders=contenders):
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default 1 2)")
    parser.add_argument("--preset", choices=PRESETS, default="paper", help="model (default paper)")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default 5)")
    parser.add_argument("--steps-per-round", type=int, default=2, help="steps in one turn (default 2)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first round (default 2)")
    parser.add_argument("--timeout", type=int, default=900, help="seconds that one turn may take (default 900)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    args = parser.parse_args()

    tokens = args.batch_size * PRESETS[args.preset].block_size
    results = []
    for threads in args.threads:
        of_threads = measure(args, threads, list(contenders(args, threads)))
        print_table(summarise(of_threads, tokens))
        print()
        results += of_threads
    save(BENCHMARK, results)


if __name__ == "__main__":
    run(main)
