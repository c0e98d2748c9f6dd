"""Do two ranks train twice as fast as one process, and faster than PyTorch's DistributedDataParallel on gloo?"""

import argparse
import statistics
import time
from contextlib import ExitStack

import numpy as np

from benchmarks.harness.contenders import (
    Contender,
    Running,
    paired_ratio,
    peak_bytes,
    play,
    print_table,
    run,
    save,
)
from gpt2core.app.presets import PRESETS
from gpt2core.parallel.codecs import CODECS
from gpt2core.parallel.config import plan_micro_batches
from gpt2core.parallel.data_parallel import BUCKET_MB, STRATEGIES
from stage1_mpi.collectives import ALL_REDUCE
from stage1_mpi.launch import choose, launch_line
from stage1_mpi.mpi_communicator import NATIVE

SEED = 20260101
BENCHMARK = "benchmarks.ranks.ranks"  # how the contenders' processes import this file
ONE, DDP = "stage 0: 1 process, 1 thread", "torch DDP, gloo"
TARGETS = {ONE: 1.90, DDP: 1.05}  # how many times as fast two ranks have to be


# -- on the ranks -----------------------------------------------------------------------------------------------------


def prepare(module, world, preset, batch_size, threads, **options):
    """On every rank: return `turn(steps)`, which trains on fresh random tokens and times every step."""
    config = PRESETS[preset]
    step = module.make_trainer(config, batch_size, config.block_size, threads, world=world, **options)
    return timed(world, step, config, batch_size)


def timed(world, step, config, batch_size):
    """`turn(steps)`: each step takes from when the first rank leaves a barrier to when the last rank has done it."""
    rng = np.random.default_rng(SEED)  # the same tokens for every contender and every rank

    def turn(steps):
        begun, ended, losses, cpu_seconds = [], [], [], 0.0
        for _ in range(steps):
            tokens = rng.integers(0, config.vocab_size, (batch_size, config.block_size + 1))
            inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
            world.barrier()
            cpu_started = time.process_time()
            begun.append(time.perf_counter())  # one clock for all processes of a host
            losses.append(step(inputs, targets))
            ended.append(time.perf_counter())
            cpu_seconds += time.process_time() - cpu_started
        begun, ended, losses, cpu_seconds, peaks = zip(
            *world.all_gather_object((begun, ended, losses, cpu_seconds, peak_bytes())), strict=True
        )
        seconds = np.max(ended, axis=0) - np.min(begun, axis=0)
        return {
            "seconds": seconds.tolist(),
            "losses": np.mean(losses, axis=0).tolist(),  # PyTorch's ranks know the loss of their rows alone
            "cpu_seconds": sum(cpu_seconds),
            "peak_bytes": max(peaks),
        }

    return turn


# -- on the one that starts them --------------------------------------------------------------------------------------


def contenders(args):
    """The table's rows. `ranks` processes with a thread each, against one process and PyTorch's as many processes."""
    sizes = {"preset": args.preset, "batch_size": args.batch_size, "threads": 1}
    yield Contender(ONE, "benchmarks.harness.ours", 1, dict(sizes, deterministic=not args.no_deterministic), ranks=1)
    if args.with_threads:
        options = dict(sizes, deterministic=not args.no_deterministic, threads=args.ranks)
        yield Contender(f"stage 0: 1 process, {args.ranks} threads", "benchmarks.harness.ours", 1, options, ranks=1)
    mpiexec = tuple(launch_line(*choose(), args.ranks))
    for dp in args.dp:
        how = {"dp": dp, "zero": args.zero, "compress": args.compress, "bucket_mb": args.bucket_mb}
        options = dict(sizes, deterministic=not args.no_deterministic, collectives=args.collectives, **how)
        name = f"stage 1: {args.ranks} ranks, --dp {dp}" + f" --zero {args.zero}" * bool(args.zero)
        yield Contender(name, "benchmarks.harness.ours", 1, options, ranks=args.ranks, launcher=mpiexec)
    if not args.no_ddp:
        yield Contender(DDP, "benchmarks.peers.torch_ddp", 1, sizes, ranks=args.ranks)


def measure(args, rows):
    """Play them all; return one result for each row, with every step's seconds."""
    with ExitStack() as stack:
        running = [stack.enter_context(Running(row, BENCHMARK, args.timeout)) for row in rows]
        played = play(running, args.rounds, {"steps": args.warm_up}, {"steps": args.steps_per_round})
    return [
        {
            "name": row.name,
            "ranks": row.ranks,
            "options": row.options,
            "seconds": [answer["seconds"] for answer in played[row.name]["rounds"]],
            "cpu_seconds": sum(answer["cpu_seconds"] for answer in played[row.name]["rounds"]),
            "losses": [loss for answer in played[row.name]["rounds"] for loss in answer["losses"]],
            "peak_bytes": max(answer["peak_bytes"] for answer in played[row.name]["rounds"]),
        }
        for row in rows
    ]


def summarise(results, tokens):
    """Add medians and ratios (taken within rounds) to the results; return table rows."""
    for result in results:
        result["round_medians"] = [statistics.median(seconds) for seconds in result["seconds"]]
    by_name = {result["name"]: result["round_medians"] for result in results}
    rows = []
    for result in results:
        every = [second for seconds in result["seconds"] for second in seconds]
        result["median"], result["min"] = statistics.median(every), min(every)
        result["times_as_fast"] = {
            peer: paired_ratio(by_name[peer], result["round_medians"]) for peer in TARGETS if peer in by_name
        }
        rows.append(
            {
                "": result["name"],
                "ms/step": f"{1e3 * result['median']:.4g}",
                "best": f"{1e3 * result['min']:.4g}",
                "tokens/s": f"{tokens / result['median']:.0f}",
                "x 1 process": f"{result['times_as_fast'][ONE]:.3f}",
                **({"x DDP": f"{result['times_as_fast'][DDP]:.3f}"} if DDP in by_name else {}),
                "cores had": f"{result['cpu_seconds'] / sum(every):.2f}",
                "peak MiB a rank": f"{result['peak_bytes'] / 2**20:.0f}",
                "last loss": f"{result['losses'][-1]:.9g}",
            }
        )
    return rows


def verdicts(results):
    """One sentence for each target and each row of stage 1."""
    for result in results:
        if result["name"].startswith("stage 1"):
            for peer, reached in result["times_as_fast"].items():
                verdict = f"target (paper, 2 ranks) {TARGETS[peer]:.2f}: " + (
                    "reached" if reached >= TARGETS[peer] else "MISSED"
                )
                yield f"{result['name']}: {reached:.3f} x {peer}, {verdict}"


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="ranks of stage 1 and processes of PyTorch (default 2)")
    add("--preset", choices=PRESETS, default="paper", help="model (default paper)")
    add("--batch-size", type=int, default=16, help="sequences per step over all ranks (default 16)")
    add("--dp", choices=STRATEGIES, nargs="+", default=["flat"], help="a row for each (default flat)")
    add("--bucket-mb", type=float, default=BUCKET_MB, help=f"least size of a bucket, 10^6 bytes ({BUCKET_MB:g})")
    add("--zero", type=int, choices=(0, 1), default=0, help="1: optimizer state sharded (default 0)")
    add("--compress", choices=("none", *CODECS), default="none", help="gradients on the wire (default none)")
    add("--collectives", choices=(NATIVE, *ALL_REDUCE), help="default canonical, or mpi with --no-deterministic")
    add("--no-deterministic", action="store_true", help="one micro-batch a rank, sums in any order")
    add("--with-threads", action="store_true", help="a row for stage 0 with as many threads as there are ranks")
    add("--no-ddp", action="store_true", help="leave PyTorch out")
    add("--rounds", type=int, default=7, help="turns of each contender (default 7)")
    add("--steps-per-round", type=int, default=2, help="steps in one turn (default 2)")
    add("--warm-up", type=int, default=2, help="steps before the first round (default 2)")
    add("--timeout", type=int, default=900, help="seconds that one turn may take (default 900)")
    add("--no-save", action="store_true", help="leave results/ as it is")
    args = parser.parse_args()
    plan_micro_batches(args.batch_size, None, 1, args.ranks, not args.no_deterministic)

    results = measure(args, list(contenders(args)))
    print_table(summarise(results, args.batch_size * PRESETS[args.preset].block_size))
    print()
    print("\n".join(verdicts(results)))
    if not args.no_save:
        save(BENCHMARK, results)


if __name__ == "__main__":
    run(main)
