"""What does each way to sum the gradients move, and what does it cost a step?"""

import argparse
import statistics

from benchmarks.harness.contenders import (
    Contender,
    Member,
    Running,
    paired_ratio,
    play,
    print_table,
    run,
    save,
)
from benchmarks.ranks.ranks import timed
from gpt2core.app.presets import PRESETS
from gpt2core.parallel.codecs import CODECS
from gpt2core.parallel.config import plan_micro_batches
from gpt2core.parallel.data_parallel import BUCKET_MB, STRATEGIES
from stage1_mpi.collectives import ALL_REDUCE
from stage1_mpi.launch import choose, launch_line
from stage1_mpi.mpi_communicator import NATIVE

BENCHMARK = "benchmarks.ranks.strategies"  # how the ranks import this file
FLAT = "--dp flat"
SHARDED = "--dp flat --zero 1"
SLOWER = 1.10  # times flat's step, what ZeRO-1 may take at most


def variants(bucket_mb):
    """{flags: options of a Trainer}: every strategy with and without ZeRO-1, every compression, every collective."""
    chosen = {f"--dp {dp}": {"dp": dp, "bucket_mb": bucket_mb} for dp in STRATEGIES}
    chosen |= {f"{flags} --zero 1": dict(options, zero=1) for flags, options in chosen.items()}
    chosen |= {f"{FLAT} --compress {kind}": {"compress": kind} for kind in CODECS}
    names = [name for name in (NATIVE, *ALL_REDUCE) if name != "canonical"]  # that is the default
    return chosen | {f"{FLAT} --collectives {name}": {"collectives": name} for name in names}


# -- on the ranks -----------------------------------------------------------------------------------------------------


def prepare(module, world, preset, batch_size, variants):
    """On every rank: return `turn(name, steps)`; all variants live here, and one of them trains at a time."""
    config = PRESETS[preset]
    made = module.make_variants(config, batch_size, config.block_size, world, variants)

    def turns(trainer, train):
        """`turn(steps)` of one variant, which also tells what it moves and holds, a number for each rank."""
        latest = None

        def step(inputs, targets):
            nonlocal latest
            latest = train(inputs, targets)
            return latest.loss

        turn = timed(world, step, config, batch_size)

        def turn_and_tell(steps):
            answer = turn(steps)
            mine = latest.bytes_sent, trainer.optimizer.nbytes
            bytes_sent, optimizer_bytes = zip(*world.all_gather_object(mine), strict=True)
            pieces = len(trainer.data_parallel.parts)
            return dict(answer, bytes_sent=bytes_sent, optimizer_bytes=optimizer_bytes, pieces=pieces)

        return turn_and_tell

    of_name = {name: turns(trainer, train) for name, (trainer, train) in made.items()}
    return lambda name, steps: of_name[name](steps)


# -- on the one that starts them --------------------------------------------------------------------------------------


def measure(args, ranks, chosen):
    """Play one number of ranks; return one result for each variant, with every step's seconds."""
    options = {"preset": args.preset, "batch_size": args.batch_size, "variants": chosen}
    launcher = tuple(launch_line(*choose(), ranks))
    job = Contender(f"{ranks} ranks", "benchmarks.harness.ours", 1, options, ranks=ranks, launcher=launcher)
    with Running(job, BENCHMARK, args.timeout) as running:
        members = [Member(running, name) for name in chosen]
        played = play(members, args.rounds, {"steps": args.warm_up}, {"steps": args.steps_per_round})
    results = []
    for name, answers in played.items():
        last = answers["rounds"][-1]
        results.append(
            {
                "name": name,
                "ranks": ranks,
                "seconds": [answer["seconds"] for answer in answers["rounds"]],
                "cpu_seconds": sum(answer["cpu_seconds"] for answer in answers["rounds"]),
                "final_loss": last["losses"][-1],
                **{key: last[key] for key in ("pieces", "bytes_sent", "optimizer_bytes")},
            }
        )
    return results


def summarise(results):
    """Add medians, and ratios (taken within rounds) to flat, to one job's results; return table rows."""
    for result in results:
        result["round_medians"] = [statistics.median(seconds) for seconds in result["seconds"]]
    flat = next(result for result in results if result["name"] == FLAT)
    rows = []
    for result in results:
        every = [second for seconds in result["seconds"] for second in seconds]
        result["median"], result["min"] = statistics.median(every), min(every)
        result["times_flat"] = paired_ratio(result["round_medians"], flat["round_medians"])
        rows.append(
            {
                f"{result['ranks']} ranks": result["name"],
                "messages": result["pieces"],
                "MB sent, most by a rank": f"{1e-6 * max(result['bytes_sent']):.3f}",
                "mean": f"{1e-6 * statistics.mean(result['bytes_sent']):.3f}",
                "ms/step": f"{1e3 * result['median']:.4g}",
                "best": f"{1e3 * result['min']:.4g}",
                "x flat's time": f"{result['times_flat']:.3f}",
                "cores had": f"{result['cpu_seconds'] / sum(every):.2f}",
                "optimizer MiB a rank": f"{max(result['optimizer_bytes']) / 2**20:.3f}",
                "last loss": f"{result['final_loss']:.9g}",
            }
        )
    return rows


def verdict(results, ranks):
    """What ZeRO-1 costs and saves, in a sentence."""
    of_name = {result["name"]: result for result in results}
    sharded, whole = of_name[SHARDED], max(of_name[FLAT]["optimizer_bytes"])
    share, slower = max(sharded["optimizer_bytes"]) / whole, sharded["times_flat"]
    met = "reached" if slower <= SLOWER and share * ranks <= 1.01 else "MISSED"
    return (
        f"ZeRO-1 at {ranks} ranks: {slower:.3f} x flat's time (target, at 4: at most {SLOWER:.2f}), "
        f"{share:.4f} of the optimizer's bytes a rank (target 1/{ranks}, and padding): {met}"
    )


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="ranks of each job, one thread each (default 2 4)")
    add("--preset", choices=PRESETS, default="paper", help="model (default paper)")
    add("--batch-size", type=int, default=16, help="sequences per step over all ranks (default 16)")
    add("--bucket-mb", type=float, default=BUCKET_MB, help=f"least size of a bucket, 10^6 bytes ({BUCKET_MB:g})")
    add("--only", nargs="+", metavar="TEXT", help="only the variants whose flags contain one of these, and flat")
    add("--rounds", type=int, default=5, help="turns of each variant (default 5)")
    add("--steps-per-round", type=int, default=1, help="steps in one turn (default 1)")
    add("--warm-up", type=int, default=1, help="steps before the first round (default 1)")
    add("--timeout", type=int, default=900, help="seconds that one turn may take (default 900)")
    add("--no-save", action="store_true", help="leave results/ as it is")
    args = parser.parse_args()
    for ranks in args.ranks:
        plan_micro_batches(args.batch_size, None, 1, ranks, deterministic=True)

    wanted = [FLAT, SHARDED, *(args.only or [""])]
    chosen = {
        name: options
        for name, options in variants(args.bucket_mb).items()
        if name in wanted[:2] or any(text in name for text in wanted[2:])
    }
    results = []
    for ranks in args.ranks:
        of_ranks = measure(args, ranks, chosen)
        print_table(summarise(of_ranks))
        print("\n" + verdict(of_ranks, ranks) + "\n")
        results += of_ranks
    if not args.no_save:
        save(BENCHMARK, results, name="_".join(["strategies", *args.only]) if args.only else None)


if __name__ == "__main__":
    run(main)
