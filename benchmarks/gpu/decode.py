"""How many microseconds does a token take on the GPU, for one text and for many, against PyTorch's best?"""

import argparse
import functools
import statistics
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.harness import ours
from benchmarks.harness.contenders import (
    Contender,
    Running,
    add_saving,
    paired_ratio,
    play,
    print_table,
    run,
    save,
)
from gpt2core.app.presets import PRESETS
from gpt2core.sampler import Greedy

SEED = 20260101
BENCHMARK = "benchmarks.gpu.decode"  # how the contenders' processes import this file
OURS = "ours"
PEERS = {
    "graph": "torch compiled + each step a graph",
    "overhead": "torch compiled, reduce-overhead",
    "compiled": "torch compiled",
    "eager": "torch eager",
}
# name: (preset, texts, tokens of a prompt, new tokens, precisions). The last is the paper's inference, whose window
# slides from its first token on.
CASES = {
    "one": ("gpt2", 1, 256, 256, ["bf16"]),
    "eight": ("gpt2", 8, 256, 256, ["bf16"]),
    "many": ("gpt2", 32, 256, 256, ["bf16"]),
    "paper": ("paper", 1, 256, 30, ["fp32", "bf16"]),
}
# what --variants tries, one constant after the other, keeping the fastest
CANDIDATES = {
    "pdl": [False, True],
    "split_k": [2, 3, 4, 6],
    "split_block_n": [32, 64, 128],
    "block_keys": [32, 64],
    "block_n": [8, 16, 32, 64],
    "block_vocab": [4, 8, 16, 32],
    "elements_per_thread": [64, 128, 256],
}
CANDIDATES_OF_MANY = {
    "pdl": [False, True],
    "block_n": [16, 32, 64],
    "block_k": [64, 128, 256],
    "split_k": [2, 4, 6, 8, 12],
    "split_block_n": [32, 64, 128],
    "block_keys": [64, 128, 256],
    "block_vocab": [64, 128, 256],
}


# -- in the contender's process ---------------------------------------------------------------------------------------


def prepare(module, preset, batch, precision, **options):
    """Return `turn(prompt, new)`, one greedy continuation of random tokens; the first turn is told what it took."""
    config = PRESETS[preset]
    build = functools.cache(lambda: module.CudaTexts(config, batch, precision, **options))
    warm = set()

    def turn(prompt, new):
        texts = build()
        prompts = np.random.default_rng(SEED).integers(0, config.vocab_size, (batch, prompt))
        ids, first, total = texts(prompts, new)
        if prompt not in warm:
            warm.add(prompt)
            texts(prompts, new)  # what is recorded at its second call is no part of any round
        return {"ids": ids.tolist(), "first": first, "total": total, "token": (total - first) / (new - 1)}

    return turn


# -- on the one that starts them --------------------------------------------------------------------------------------


def contenders(args, preset, batch, precision):
    """The table's rows: ours, then the peers, the strongest first."""
    sizes = dict(preset=preset, batch=batch, precision=precision)
    yield Contender(OURS, "benchmarks.harness.ours", args.threads, sizes)
    for kind in args.peers:
        yield Contender(PEERS[kind], "benchmarks.peers.torch_decode_cuda", args.threads, dict(sizes, kind=kind))


def measure(args, case, precision):
    """Play one case in one precision: one result for each contender, with the seconds of every round."""
    preset, batch, prompt, new, _ = CASES[case]
    request, rows = {"prompt": prompt, "new": new}, list(contenders(args, preset, batch, precision))
    with ExitStack() as stack:
        running = [stack.enter_context(Running(row, BENCHMARK, args.timeout)) for row in rows]
        played = play(running, args.rounds, request, request)
    results = []
    for row in rows:
        rounds = played[row.name]["rounds"]
        if differing := sum(answer["ids"] != rounds[0]["ids"] for answer in rounds):
            told = f"{row.name} continued the same prompts differently in {differing} of {len(rounds)} rounds"
            if row.name == OURS:
                raise SystemExit(told)
            print(told)  # PyTorch promises nothing of the kind; its time counts all the same
        results.append(
            {
                "name": row.name,
                "case": case,
                **row.options,
                **request,
                **{key: [answer[key] for answer in rounds] for key in ("first", "token", "total")},
                "cold": played[row.name]["warm_up"]["total"],
            }
        )
    return results


def summarise(results):
    """Add medians and ratios (taken within rounds) to the results of one table; return its rows."""
    mine, rows = results[0], []
    title = (
        f"{mine['case']}: {mine['preset']}, {mine['precision']}, {mine['batch']} x ({mine['prompt']} + {mine['new']})"
    )
    for result in results:
        for key in ("first", "token", "total"):
            result[f"median_{key}"] = statistics.median(result[key])
        result["times_as_fast"] = {peer["name"]: paired_ratio(peer["total"], result["total"]) for peer in results}
        rows.append(
            {
                title: result["name"],
                "us/token": f"{1e6 * result['median_token']:.1f}",
                "best": f"{1e6 * min(result['token']):.1f}",
                "tokens/s": f"{result['batch'] / result['median_token']:,.0f}",
                "first, ms": f"{1e3 * result['median_first']:.2f}",
                "all, ms": f"{1e3 * result['median_total']:.2f}",
                "cold, ms": f"{1e3 * result['cold']:.0f}",
                "ours x as fast": f"{paired_ratio(result['total'], mine['total']):.2f}",
            }
        )
    return rows


# -- constants --------------------------------------------------------------------------------------------------------


def seconds_a_step(engine, prompts, steps):
    """Of the recorded step, without anybody who reads its tokens."""
    engine.start(prompts, [Greedy()] * len(prompts))
    for _ in range(4):  # prefill, one that compiles, one that is recorded, one that is replayed
        engine.step()
        engine.read_tokens()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    for _ in range(steps):
        engine.read_tokens()
    return (time.perf_counter() - started) / steps


def variants(args, case):
    """Time one constant's candidates after the other, in turns, and keep the fastest; return one result for each."""
    preset, batch, prompt, _, precisions = CASES[case]
    config, results = PRESETS[preset], []
    prompt = min(prompt, config.block_size // 2)  # so that the cached step is what is timed
    steps = min(args.steps, config.block_size - prompt - 8)
    texts = ours.CudaTexts(config, batch, precisions[-1])
    prompts = np.random.default_rng(SEED).integers(0, config.vocab_size, (batch, prompt)).tolist()
    best = {}
    for constant, candidates in (CANDIDATES if batch == 1 else CANDIDATES_OF_MANY).items():
        engines = {}
        for value in candidates:
            try:
                engines[value] = texts.engine(batch, **best, **{constant: value})
                seconds_a_step(engines[value], prompts, 1)
            except Exception as error:  # too large a tile for the GPU's registers or shared memory
                engines.pop(value, None)
                print(f"{constant} {value}: {(str(error).splitlines() or [type(error).__name__])[0]}")
        seconds = {value: [] for value in engines}
        for _ in range(args.rounds):
            for value, engine in engines.items():
                seconds[value].append(seconds_a_step(engine, prompts, steps))
        median = {value: statistics.median(times) for value, times in seconds.items()}
        best[constant] = min(median, key=median.get)
        results.append({"case": case, "constant": constant, "seconds": {str(v): t for v, t in seconds.items()}})
        print(f"{case}: {constant:15}", *(f"{v}: {1e6 * t:.1f}" for v, t in median.items()), "us/token", flush=True)
    print(f"{case}: the fastest are {best}\n")
    return results


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--cases", choices=CASES, nargs="+", default=list(CASES), help="a table for each (default: all)")
    add(
        "--peers",
        choices=PEERS,
        nargs="*",
        default=["graph", "overhead", "eager"],
        help="PyTorch's rows (default graph overhead eager)",
    )
    add("--rounds", type=int, default=7, help="turns of each contender (default 7)")
    add("--threads", type=int, default=4, help="threads of each process on the host (default 4)")
    add("--timeout", type=int, default=500, help="seconds that one turn may take, compiling included (default 500)")
    add("--variants", action="store_true", help="time the kernels' constants instead, ours alone")
    add("--steps", type=int, default=200, help="steps of one timing of --variants (default 200)")
    add_saving(add, "decode")
    args = parser.parse_args()

    results = []
    for case in args.cases:
        for precision in CASES[case][-1][-1:] if args.variants else CASES[case][-1]:
            if args.variants:
                results += variants(args, case)
            else:
                of_table = measure(args, case, precision)
                print_table(summarise(of_table))
                print(flush=True)
                results += of_table
            if not args.no_save:  # after each table: what cuts a long run off must not take all of it along
                save(BENCHMARK, results, args.commit, args.save_as)


if __name__ == "__main__":
    run(main)
