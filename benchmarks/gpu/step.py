"""Is a training step on the GPU faster than torch.compile's, and what memory does it take?"""

import argparse
import functools
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from benchmarks.harness.contenders import (
    Contender,
    Running,
    add_saving,
    nvidia_smi,
    paired_ratio,
    play,
    print_table,
    run,
    save,
)
from gpt2core.app.presets import PRESETS
from gpt2core.training_loop import flops_per_token
from stage2_cuda.runtime.peak_flops import peak_flops

SEED = 20260101
BENCHMARK = "benchmarks.gpu.step"  # how the contenders' processes import this file
OURS = "ours"
LEAD_IN = 3  # untimed steps that begin a turn: the GPU was another process's, or idle
PRECISIONS = "bf16", "tf32", "fp32"
PEERS = {
    "compiled": {"compiled": True},
    "eager": {"compiled": False},
    "overhead": {"compiled": True, "graph": "trees"},
    "graph": {"compiled": True, "graph": "step"},
}
TITLES = {
    "compiled": "torch compiled",
    "eager": "torch eager",
    "overhead": "torch compiled, reduce-overhead",
    "graph": "torch compiled + whole-step graph",
}
# preset: (sequences a step, steps in a turn, peers, the strongest first); that of gpt2 for all others
DEFAULTS = {"gpt2": (64, 10, ["compiled"]), "paper": (16, 200, ["graph", "compiled", "eager"])}


# -- in the contender's process ---------------------------------------------------------------------------------------


def prepare(module, preset, vocab_size, batch_size, seq_len, unread, **options):
    """Return `turn(steps)`, which trains on fresh random tokens and times every step; the first turn builds the model.

    unread: after these steps come as many whose losses are read at the end, all at once.
    """
    build = functools.cache(lambda: module.CudaSteps(config_of(preset, seq_len), batch_size, seq_len, **options))
    rng = np.random.default_rng(SEED)  # the same tokens for every contender

    def batches(count):
        for _ in range(count):
            tokens = rng.integers(0, vocab_size, (batch_size, seq_len + 1))
            yield tokens[:, :-1].copy(), tokens[:, 1:].copy()

    def turn(steps):
        step, seconds, losses = build(), [], []
        fresh = list(batches(LEAD_IN + 2 * steps))
        own = fresh if unread else fresh[: LEAD_IN + steps]  # ours would begin what is announced beyond
        getattr(step, "announce", list)(own)  # as a data loader would: PyTorch's copies overlap by themselves
        for batch in fresh[:LEAD_IN]:
            step(*batch)
        for batch in fresh[LEAD_IN : LEAD_IN + steps]:
            started = time.perf_counter()
            losses.append(step(*batch))
            seconds.append(time.perf_counter() - started)
        answer = {"seconds": seconds, "losses": losses, "unread_seconds": None, **step.memory()}
        if unread:
            started = time.perf_counter()
            last = [step(*batch, wait=False) for batch in fresh[LEAD_IN + steps :]]
            answer["losses"] += [float(loss) for loss in last]
            answer["unread_seconds"] = (time.perf_counter() - started) / steps
        return answer

    def counted(steps):
        """The first turn tells also what the driver has given out in it, to nobody else: the context included."""
        if build.cache_info().currsize:
            return turn(steps)
        before = driver_bytes()
        answer = turn(steps)
        return dict(answer, driver_bytes=None if before is None else driver_bytes() - before)

    return counted


def config_of(preset, seq_len):
    """The preset, with positions for longer sequences than it has where these are asked for."""
    config = PRESETS[preset]
    return replace(config, block_size=max(config.block_size, seq_len))


def driver_bytes():
    """Device memory that is taken, by whomever; None where nvidia-smi does not tell."""
    used = nvidia_smi("memory.used")
    return sum(int(row[0]) for row in used) << 20 if used and all(row[0].isdigit() for row in used) else None


# -- on the one that starts them --------------------------------------------------------------------------------------


def contenders(args, preset, precision):
    """The table's rows: ours, then the peers, the strongest first."""
    sizes = {
        "preset": preset,
        "vocab_size": PRESETS[preset].vocab_size,
        "batch_size": args.batch_size or DEFAULTS.get(preset, DEFAULTS["gpt2"])[0],
        "seq_len": args.seq_len or PRESETS[preset].block_size,
        "precision": precision,
    }
    yield Contender(OURS, "benchmarks.harness.ours", args.threads, dict(sizes, unread=False))
    for peer in args.peers or DEFAULTS.get(preset, DEFAULTS["gpt2"])[2]:
        if not (args.no_compile and PEERS[peer]["compiled"]):
            options = dict(sizes, unread=True, **PEERS[peer])
            yield Contender(TITLES[peer], "benchmarks.peers.torch_gpt2_cuda", args.threads, options)


def measure(args, rows, steps):
    """Play one preset in one precision; return one result for each row, with every step's seconds."""
    with ExitStack() as stack:
        running = [stack.enter_context(Running(row, BENCHMARK, args.timeout)) for row in rows]
        played = play(running, args.rounds, {"steps": args.warm_up}, {"steps": steps})
    results = []
    for row in rows:
        warm_up, rounds = played[row.name]["warm_up"], played[row.name]["rounds"]
        results.append(
            {
                "name": row.name,
                "options": row.options,
                "seconds": [answer["seconds"] for answer in rounds],
                "unread_seconds": [answer["unread_seconds"] for answer in rounds],  # a step, losses read at the end
                "warm_up_seconds": warm_up["seconds"],
                "last_loss": rounds[-1]["losses"][-1],
                "allocated_bytes": rounds[-1].get("allocated_bytes"),
                "held_bytes": rounds[-1]["held_bytes"],
                "driver_bytes": warm_up["driver_bytes"],
            }
        )
    return results


def summarise(results):
    """Add medians, tokens/s, MFU and ratios (taken within rounds) to the results of one table; return its rows."""
    options = results[0]["options"]
    title = f"{options['preset']}, {options['precision']}, {options['batch_size']} x {options['seq_len']}"
    tokens = options["batch_size"] * options["seq_len"]
    flops = tokens * flops_per_token(config_of(options["preset"], options["seq_len"]), options["seq_len"])
    name = (nvidia_smi("name") or [[""]])[0][0]
    peak = peak_flops(name, options["precision"])
    for result in results:
        result["round_medians"] = [statistics.median(seconds) for seconds in result["seconds"]]
    peers, rows = results[1:], []
    for result in results:
        every = [second for seconds in result["seconds"] for second in seconds]
        result["median"], result["min"] = statistics.median(every), min(every)
        result["tokens_per_second"] = tokens / result["median"]
        result["mfu"] = peak and flops / result["median"] / peak
        own = result["round_medians"]
        result["times_as_fast"] = {peer["name"]: paired_ratio(peer["round_medians"], own) for peer in peers}
        unread = [seconds for seconds in result["unread_seconds"] if seconds]
        result["unread_median"] = statistics.median(unread) if unread else None
        if not unread:  # ours reads its loss each step, whatever the peers do
            result["times_as_fast_as_unread"] = {
                peer["name"]: paired_ratio(peer["unread_seconds"], own) for peer in peers
            }
        rows.append(
            {
                title: result["name"],
                "ms/step": f"{1e3 * result['median']:.4g}",
                "best": f"{1e3 * result['min']:.4g}",
                "losses unread": f"{1e3 * result['unread_median']:.4g}" if unread else "",
                "tokens/s": f"{result['tokens_per_second']:,.0f}",
                **{f"x {peer['name']}": f"{result['times_as_fast'][peer['name']]:.3f}" for peer in peers[:1]},
                "MFU": f"{100 * result['mfu']:.1f} %" if peak else "",
                "tensors GiB": gib(result["allocated_bytes"]),
                "held GiB": gib(result["held_bytes"]),
                "of the driver GiB": gib(result["driver_bytes"]),
                "last loss": f"{result['last_loss']:.4f}",
            }
        )
    return rows


def gib(count):
    return "" if count is None else f"{count / 2**30:.2f}"


def verdicts(results):
    """One sentence for each peer."""
    ours = results[0]
    for name, ratio in ours["times_as_fast"].items():
        yield (
            f"ours is {ratio:.3f} times as fast as {name}, "
            f"{ours['times_as_fast_as_unread'][name]:.3f} times where that reads its losses at the end of a turn"
        )


def main(contenders=contenders):
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, nargs="+", default=["gpt2"], help="models, a table for each (default gpt2)")
    add("--precision", choices=PRECISIONS, nargs="+", default=["bf16"], help="a table for each (default bf16)")
    add("--batch-size", type=int, help="sequences per step (default 64; paper 16)")
    add("--seq-len", type=int, help="tokens per sequence, also beyond the block (default: the block)")
    add("--peers", choices=PEERS, nargs="+", help="PyTorch's rows (default compiled; paper: graph compiled eager)")
    add("--no-compile", action="store_true", help="leave all out that torch.compile has a part in")
    add("--rounds", type=int, default=7, help="turns of each contender (default 7)")
    add("--steps-per-round", type=int, help="timed steps in one turn (default 10; paper 200)")
    add("--warm-up", type=int, default=3, help="steps before the first round (default 3)")
    add("--threads", type=int, default=4, help="threads of each process on the host (default 4)")
    add("--timeout", type=int, default=500, help="seconds that one turn may take, compiling included (default 500)")
    add_saving(add, "step")
    args = parser.parse_args()

    results = []
    for preset in args.preset:
        steps = args.steps_per_round or DEFAULTS.get(preset, DEFAULTS["gpt2"])[1]
        for precision in args.precision:
            of_table = measure(args, list(contenders(args, preset, precision)), steps)
            print_table(summarise(of_table))
            print("\n" + "\n".join(verdicts(of_table)) + "\n", flush=True)
            results += of_table
            if not args.no_save:  # after each table: what cuts a long run off must not take all of it along
                save(BENCHMARK, results, args.commit, args.save_as)


if __name__ == "__main__":
    run(main)
