"""How many bytes does each gradient-synchronisation strategy send, and how long does a step take with it?

python -m benchmarks.ranks.strategies                                     # on two and four ranks
python -m benchmarks.ranks.strategies --ranks 2 --preset tiny --rounds 1  # a quick trial
python -m benchmarks.ranks.strategies --ranks 2 --only zero               # only some variants
"""

from benchmarks.harness.report import add_ratios
from benchmarks.harness.rounds import measure_jobs, timed_steps
from benchmarks.harness.script import benchmark
from gpt2core.codecs import CODECS
from gpt2core.parallel.config import STRATEGIES
from gpt2core.presets import PRESETS
from stage1_mpi.mpi_communicator import CHOICES

FLAT = "--dp flat"
ZERO_1 = "--dp flat --zero 1"


def all_variants():
    """{flags of train_gpt2.py: options of build_trainer() of harness/ours.py that mean the same}.

    The variants are all strategies with and without ZeRO-1, then --dp flat with each codec and with each collective.
    """
    chosen = {f"--dp {dp}": {"dp": dp} for dp in STRATEGIES}
    chosen |= {f"{flags} --zero 1": dict(options, zero=1) for flags, options in chosen.items()}
    chosen |= {f"{FLAT} --compress {kind}": {"compress": kind} for kind in CODECS}
    names = [name for name in CHOICES if name != "canonical"]  # canonical is the default
    return chosen | {f"{FLAT} --collectives {name}": {"collectives": name} for name in names}


def prepare(module, world, preset, batch_size, variants):
    """Called on every rank by harness/processes.py: build all variants, and return `run_round(name, steps)`."""
    config = PRESETS[preset]
    trainers = module.make_variants(config, batch_size, config.block_size, world, variants)
    timed = {name: timed_steps(world, trainer, config, batch_size) for name, trainer in trainers.items()}

    def run_round(name, steps):
        """The result of timed_steps(), with the bytes that each rank sent and stores, and the number of messages."""
        trainer, result = trainers[name], timed[name](steps)
        sizes = world.all_gather_object((trainer.bytes_sent, trainer.optimizer_bytes))
        bytes_sent, optimizer_bytes = zip(*sizes, strict=True)
        return result | dict(bytes_sent=bytes_sent, optimizer_bytes=optimizer_bytes, messages=trainer.messages)

    return run_round


@benchmark(
    "ranks-strategies",
    common=dict(preset="paper", ranks=[2, 4], batch_size=16, rounds=5, steps_per_round=1, warm_up=1, timeout=900),
    only=dict(nargs="+", metavar="TEXT", help=f"measure {FLAT}, {ZERO_1} and variants whose flags contain a TEXT"),
)
def main(args):
    texts = args.only or [""]  # "" is in every name
    chosen = {
        name: options
        for name, options in all_variants().items()
        if name in (FLAT, ZERO_1) or any(text in name for text in texts)
    }
    args.save_as = "_".join(["strategies", *args.only]) if args.only else args.save_as
    for results in measure_jobs(args, [(ranks, chosen, {"preset": args.preset}) for ranks in args.ranks]):
        add_ratios(results, "times_flat", lambda name: FLAT)
        yield results
