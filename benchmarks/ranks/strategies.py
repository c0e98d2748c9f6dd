"""How many bytes does each gradient-synchronisation strategy send, and what does it cost per step?"""

import argparse
import statistics

from benchmarks.harness.processes import BenchmarkProcess, JobVariant, ProcessSpec, run_main, run_rounds
from benchmarks.harness.report import add_save_flags, paired_ratio, print_table, round_medians, save
from benchmarks.ranks.ranks import timed_steps
from gpt2core.app.presets import PRESETS
from gpt2core.parallel.codecs import CODECS
from gpt2core.parallel.config import plan_micro_batches
from gpt2core.parallel.data_parallel import BUCKET_MB, STRATEGIES
from stage1_mpi.collectives import ALL_REDUCE
from stage1_mpi.launch import choose, launch_line
from stage1_mpi.mpi_communicator import NATIVE

BENCHMARK = "benchmarks.ranks.strategies"  # the name under which the ranks import this file
FLAT = "--dp flat"
SHARDED = "--dp flat --zero 1"
MAX_ZERO_COST = 1.10  # upper bound for ZeRO-1's step time divided by that of flat


def variants(bucket_mb):
    """{flags: options of build_trainer}: all strategies with and without ZeRO-1, all codecs, all collectives."""
    chosen = {f"--dp {dp}": {"dp": dp, "bucket_mb": bucket_mb} for dp in STRATEGIES}
    chosen |= {f"{flags} --zero 1": dict(options, zero=1) for flags, options in chosen.items()}
    chosen |= {f"{FLAT} --compress {kind}": {"compress": kind} for kind in CODECS}
    names = [name for name in (NATIVE, *ALL_REDUCE) if name != "canonical"]  # the default
    return chosen | {f"{FLAT} --collectives {name}": {"collectives": name} for name in names}


# -- on the ranks -----------------------------------------------------------------------------------------------------


def prepare(module, world, preset, batch_size, variants):
    """On every rank: return `run_round(name, steps)`; all variants exist at once, and one of them trains at a time."""
    config = PRESETS[preset]
    made = module.make_variants(config, batch_size, config.block_size, world, variants)

    def measured(variant):
        """`run_round(steps)` of one variant; adds the bytes sent and held by each rank and the number of messages."""
        timed = timed_steps(world, variant, config, batch_size)

        def run_round(steps):
            result = timed(steps)
            sizes = world.all_gather_object((variant.bytes_sent, variant.optimizer_bytes))
            bytes_sent, optimizer_bytes = zip(*sizes, strict=True)
            return dict(result, bytes_sent=bytes_sent, optimizer_bytes=optimizer_bytes, messages=variant.messages)

        return run_round

    rounds = {name: measured(variant) for name, variant in made.items()}
    return lambda name, steps: rounds[name](steps)


# -- in the parent process --------------------------------------------------------------------------------------------


def measure(args, ranks, chosen):
    """Run the rounds of one number of ranks; return one result for each variant, with the seconds of every step."""
    options = {"preset": args.preset, "batch_size": args.batch_size, "variants": chosen}
    launcher = tuple(launch_line(*choose(), ranks))
    job = ProcessSpec(f"{ranks} ranks", "benchmarks.harness.ours", 1, options, ranks=ranks, launcher=launcher)
    with BenchmarkProcess(job, BENCHMARK, args.timeout) as process:
        members = [JobVariant(process, name) for name in chosen]
        measured = run_rounds(members, args.rounds, {"steps": args.warm_up}, {"steps": args.steps_per_round})
    results = []
    for name, one in measured.items():
        last = one["rounds"][-1]
        results.append(
            {
                "name": name,
                "ranks": ranks,
                "seconds": [each["seconds"] for each in one["rounds"]],
                "cpu_seconds": sum(each["cpu_seconds"] for each in one["rounds"]),
                "final_loss": last["losses"][-1],
                **{key: last[key] for key in ("messages", "bytes_sent", "optimizer_bytes")},
            }
        )
    return results


def summarise(results):
    """Add the minimum and the time relative to flat in each round to one job's results; return the table's rows."""
    medians = {result["name"]: round_medians(result["seconds"]) for result in results}
    rows = []
    for result in results:
        steps = sum(result["seconds"], [])
        median, result["min"] = statistics.median(steps), min(steps)
        result["cores_used"] = result["cpu_seconds"] / sum(steps)
        result["times_flat"] = paired_ratio(medians[result["name"]], medians[FLAT])
        rows.append(
            {
                f"{result['ranks']} ranks": result["name"],
                "messages": result["messages"],
                "MB sent per rank, maximum": f"{1e-6 * max(result['bytes_sent']):.3f}",
                "mean": f"{1e-6 * statistics.mean(result['bytes_sent']):.3f}",
                "ms/step": f"{1e3 * median:.4g}",
                "best": f"{1e3 * result['min']:.4g}",
                "x flat's time": f"{result['times_flat']['median']:.3f}",
                "cores used": f"{result['cores_used']:.2f}",
                "optimizer MiB per rank": f"{max(result['optimizer_bytes']) / 2**20:.3f}",
                "last loss": f"{result['final_loss']:.9g}",
            }
        )
    return rows


def verdict(results, ranks):
    """One sentence: the cost and the saving of ZeRO-1."""
    by_name = {result["name"]: result for result in results}
    sharded, whole = by_name[SHARDED], max(by_name[FLAT]["optimizer_bytes"])
    share, slower = max(sharded["optimizer_bytes"]) / whole, sharded["times_flat"]["median"]
    met = "reached" if slower <= MAX_ZERO_COST and share * ranks <= 1.01 else "MISSED"
    return (
        f"ZeRO-1 at {ranks} ranks: {slower:.3f} x flat's time (target at 4 ranks: at most {MAX_ZERO_COST:.2f}), "
        f"{share:.4f} of the optimizer state per rank (target 1/{ranks} plus padding): {met}"
    )


def main():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="ranks of each job, one thread each (default 2 4)")
    add("--preset", choices=PRESETS, default="paper", help="model (default paper)")
    add("--batch-size", type=int, default=16, help="sequences per step over all ranks (default 16)")
    add("--bucket-mb", type=float, default=BUCKET_MB, help=f"minimum bucket size in 10^6 bytes (default {BUCKET_MB:g})")
    add("--only", nargs="+", metavar="TEXT", help="measure only --dp flat and variants whose flags contain one TEXT")
    add("--rounds", type=int, default=5, help="number of rounds; each round times every program (default 5)")
    add("--steps-per-round", type=int, default=1, help="timed steps of each variant in a round (default 1)")
    add("--warm-up", type=int, default=1, help="steps before the first round (default 1)")
    add("--timeout", type=int, default=900, help="seconds that one round of a variant may take (default 900)")
    add_save_flags(add)
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
    save(BENCHMARK, results, args, name="_".join(["strategies", *args.only]) if args.only else None)


if __name__ == "__main__":
    run_main(main)
