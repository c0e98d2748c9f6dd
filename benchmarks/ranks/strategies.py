"""How many bytes does each gradient-synchronisation strategy send, and how long does a step take with it?

python -m benchmarks.ranks.strategies                                     # on two and four ranks
python -m benchmarks.ranks.strategies --ranks 2 --preset tiny --rounds 1  # a quick trial
python -m benchmarks.ranks.strategies --ranks 2 --only zero               # only some variants
"""

from benchmarks.harness.processes import run_main
from benchmarks.harness.report import add_step_fields, benchmark_parser, paired_ratio, save_each
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import measure_job, timed_steps
from gpt2core.codecs import CODECS
from gpt2core.parallel.config import BUCKET_MB, STRATEGIES
from gpt2core.parallel.micro_batches.count import plan_micro_batches
from gpt2core.presets import PRESETS
from stage1_mpi.mpi_communicator import CHOICES

FLAT = "--dp flat"
ZERO_1 = "--dp flat --zero 1"
MAX_ZERO_COST = 1.10  # upper bound for the step time with ZeRO-1 divided by the step time without


def variants(bucket_mb):
    """{flags of train_gpt2.py: options of build_trainer() of harness/ours.py that mean the same}.

    The variants are all strategies with and without ZeRO-1, then --dp flat with each codec and with each collective.
    """
    chosen = {f"--dp {dp}": {"dp": dp, "bucket_mb": bucket_mb} for dp in STRATEGIES}
    chosen |= {f"{flags} --zero 1": dict(options, zero=1) for flags, options in chosen.items()}
    chosen |= {f"{FLAT} --compress {kind}": {"compress": kind} for kind in CODECS}
    names = [name for name in CHOICES if name != "canonical"]  # canonical is the default
    return chosen | {f"{FLAT} --collectives {name}": {"collectives": name} for name in names}


# -- on the ranks -----------------------------------------------------------------------------------------------------


def prepare(module, world, preset, batch_size, variants):
    """Called on every rank by harness/processes.py: build all variants, and return `run_round(name, steps)`.

    All variants stay in memory; run_round() trains the variant `name`. module: benchmarks.harness.ours.
    """
    config = PRESETS[preset]
    trainers = module.make_variants(config, batch_size, config.block_size, world, variants)
    timed = {name: timed_steps(world, trainer, config, batch_size) for name, trainer in trainers.items()}

    def run_round(name, steps):
        """The result of timed_steps(), with the bytes that each rank sent and stores, and the number of messages."""
        trainer, result = trainers[name], timed[name](steps)
        sizes = world.all_gather_object((trainer.bytes_sent, trainer.optimizer_bytes))
        bytes_sent, optimizer_bytes = zip(*sizes, strict=True)
        sizes = dict(bytes_sent=bytes_sent, optimizer_bytes=optimizer_bytes, messages=trainer.messages)
        return result | sizes | {"final_loss": result["losses"][-1]}

    return run_round


# -- in the parent process --------------------------------------------------------------------------------------------


def measure(args, ranks, chosen):
    """Run all rounds on `ranks` ranks; return one result for each variant, with the seconds of every step.

    chosen: {name: options} of the variants to measure.
    """
    options = {"preset": args.preset, "batch_size": args.batch_size, "variants": chosen}
    fields = "final_loss", "messages", "bytes_sent", "optimizer_bytes"
    return measure_job(args, ranks, options, chosen, fields)


def summarise(results):
    """Add min, cores_used, and times_flat, the step time divided by that of FLAT, to the results of one job."""
    medians = add_step_fields(results)
    for result in results:
        result["times_flat"] = paired_ratio(medians[result["name"]], medians[FLAT])


def print_verdict(results):
    """Print how much time ZeRO-1 costs and how much memory it saves."""
    by_name, ranks = {result["name"]: result for result in results}, results[0]["ranks"]
    zero, whole_bytes = by_name[ZERO_1], max(by_name[FLAT]["optimizer_bytes"])
    share, relative_time = max(zero["optimizer_bytes"]) / whole_bytes, zero["times_flat"]["median"]
    met = "reached" if relative_time <= MAX_ZERO_COST and share * ranks <= 1.01 else "MISSED"
    print(
        f"ZeRO-1 on {ranks} ranks: a step takes {relative_time:.3f} times as long as without (target on 4 ranks: at "
        f"most {MAX_ZERO_COST:.2f}), and a rank holds {share:.4f} of the optimizer state (target: 1/{ranks} plus "
        f"padding): {met}"
    )


def main():
    parser = benchmark_parser("benchmarks.ranks.strategies", __doc__)
    parser.add_flags(preset="paper", ranks=[2, 4], batch_size=16, bucket_mb=BUCKET_MB)
    parser.add_flags(rounds=5, steps_per_round=1, warm_up=1, timeout=900)
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help=f"measure {FLAT}, {ZERO_1} and variants whose flags contain a TEXT"
    )
    args = parser.parse_args()
    for ranks in args.ranks:
        plan_micro_batches(args.batch_size, None, 1, ranks, deterministic=True)

    texts = args.only or [""]  # "" is in every name
    chosen = {
        name: options
        for name, options in variants(args.bucket_mb).items()
        if name in (FLAT, ZERO_1) or any(text in name for text in texts)
    }
    args.save_as = "_".join(["strategies", *args.only]) if args.only else args.save_as
    tables = (measure(args, ranks, chosen) for ranks in args.ranks)
    save_each(args, tables, summarise, TABLES["ranks-strategies"].print, print_verdict)


if __name__ == "__main__":
    run_main(main)
