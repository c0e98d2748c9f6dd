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
from gpt2core.parallel.config import STRATEGIES
from gpt2core.parallel.micro_batches.count import plan_micro_batches
from gpt2core.presets import PRESETS
from stage1_mpi.mpi_communicator import CHOICES

FLAT = "--dp flat"
ZERO_1 = "--dp flat --zero 1"


def variants():
    """{flags of train_gpt2.py: options of build_trainer() of harness/ours.py that mean the same}.

    The variants are all strategies with and without ZeRO-1, then --dp flat with each codec and with each collective.
    """
    chosen = {f"--dp {dp}": {"dp": dp} for dp in STRATEGIES}
    chosen |= {f"{flags} --zero 1": dict(options, zero=1) for flags, options in chosen.items()}
    chosen |= {f"{FLAT} --compress {kind}": {"compress": kind} for kind in CODECS}
    names = [name for name in CHOICES if name != "canonical"]  # canonical is the default
    return chosen | {f"{FLAT} --collectives {name}": {"collectives": name} for name in names}


def prepare(module, world, preset, batch_size, names):
    """Called on every rank by harness/processes.py: build all variants, and return `run_round(name, steps)`."""
    config = PRESETS[preset]
    chosen = {name: options for name, options in variants().items() if name in names}
    trainers = module.make_variants(config, batch_size, config.block_size, world, chosen)
    timed = {name: timed_steps(world, trainer, config, batch_size) for name, trainer in trainers.items()}

    def run_round(name, steps):
        """The result of timed_steps(), with the bytes that each rank sent and stores, and the number of messages."""
        trainer, result = trainers[name], timed[name](steps)
        sizes = world.all_gather_object((trainer.bytes_sent, trainer.optimizer_bytes))
        bytes_sent, optimizer_bytes = zip(*sizes, strict=True)
        sizes = dict(bytes_sent=bytes_sent, optimizer_bytes=optimizer_bytes, messages=trainer.messages)
        return result | sizes | {"final_loss": result["losses"][-1]}

    return run_round


def summarise(results):
    """Add min, cores_used, and times_flat, the step time divided by that of FLAT, to the results of one job."""
    medians = add_step_fields(results)
    for result in results:
        result["times_flat"] = paired_ratio(medians[result["name"]], medians[FLAT])


def main():
    parser = benchmark_parser("benchmarks.ranks.strategies", __doc__)
    parser.add_flags(preset="paper", ranks=[2, 4], batch_size=16)
    parser.add_flags(rounds=5, steps_per_round=1, warm_up=1, timeout=900)
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help=f"measure {FLAT}, {ZERO_1} and variants whose flags contain a TEXT"
    )
    args = parser.parse_args()
    for ranks in args.ranks:
        plan_micro_batches(args.batch_size, None, 1, ranks, deterministic=True)

    texts = args.only or [""]  # "" is in every name
    names = [name for name in variants() if name in (FLAT, ZERO_1) or any(text in name for text in texts)]
    args.save_as = "_".join(["strategies", *args.only]) if args.only else args.save_as
    fields = "final_loss", "messages", "bytes_sent", "optimizer_bytes"
    options = {"preset": args.preset, "batch_size": args.batch_size, "names": names}
    tables = (measure_job(args, ranks, options, names, fields) for ranks in args.ranks)
    save_each(args, tables, summarise, TABLES["ranks-strategies"].print)


if __name__ == "__main__":
    run_main(main)
