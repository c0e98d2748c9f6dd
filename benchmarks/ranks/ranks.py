"""Do two MPI ranks train twice as fast as one process, and faster than PyTorch's DistributedDataParallel with gloo?

python -m benchmarks.ranks.ranks                                    # preset paper on two ranks
python -m benchmarks.ranks.ranks --with-threads --dp flat bucket    # more rows
python -m benchmarks.ranks.ranks --preset tiny --rounds 1 --no-ddp  # a quick trial
"""

from benchmarks.harness.processes import ProcessSpec
from benchmarks.harness.report import add_peer, add_step_fields, paired_ratio
from benchmarks.harness.rounds import measure_specs, step_results, timed_steps
from benchmarks.harness.script import benchmark
from benchmarks.harness.speedups import rank_speedups
from gpt2core.parallel.config import STRATEGIES
from gpt2core.parallel.micro_batches.count import plan_micro_batches
from gpt2core.presets import PRESETS

SERIAL, DDP = "stage 0: 1 process, 1 thread", "torch DDP, gloo"  # names of the two programs to compare with


def prepare(module, world, preset, batch_size, threads, **options):
    """Called on every rank by harness/processes.py: build a trainer and return `run_round(steps)`; see timed_steps().

    module: benchmarks.harness.ours or benchmarks.peers.torch_ddp. options: further arguments of its make_trainer().
    """
    config = PRESETS[preset]
    step = module.make_trainer(config, batch_size, config.block_size, threads, world=world, **options)
    return timed_steps(world, step, config, batch_size)


def process_specs(args):
    """Yield one ProcessSpec per row of the table: stage 0 in one process, then stage 1 and PyTorch DDP on many ranks.

    Stage 1 and PyTorch DDP use the same number of ranks, args.ranks, with one thread each.
    """
    sizes = {"preset": args.preset, "batch_size": args.batch_size, "threads": 1}
    ours = dict(sizes, deterministic=True)
    yield ProcessSpec(SERIAL, "benchmarks.harness.ours", 1, ours, ranks=1)
    if args.with_threads:
        options = ours | {"threads": args.ranks}
        yield ProcessSpec(f"stage 0: 1 process, {args.ranks} threads", "benchmarks.harness.ours", 1, options, ranks=1)
    for dp in args.dp:
        name = f"stage 1: {args.ranks} ranks, --dp {dp}"
        yield ProcessSpec(name, "benchmarks.harness.ours", 1, ours | {"dp": dp}, ranks=args.ranks, mpi=True)
    if not args.no_ddp:
        yield ProcessSpec(DDP, "benchmarks.peers.torch_ddp", 1, sizes, ranks=args.ranks, mpi=True)


def measure(args, specs):
    """Run all rounds; return one result for each spec. Its "seconds" has a list per round, with a number per step."""
    measured = measure_specs(specs, args, {"steps": args.warm_up}, {"steps": args.steps_per_round})
    times = step_results(measured)
    return [
        {
            "name": spec.name,
            "ranks": spec.ranks,
            "options": spec.options,
            **times[spec.name],
            "losses": [loss for each in measured[spec.name]["rounds"] for loss in each["losses"]],
            "peak_bytes": max(each["peak_bytes"] for each in measured[spec.name]["rounds"]),
        }
        for spec in specs
    ]


def summarise(results):
    """Add min, cores_used, times_as_fast and one_process to each result, and a peer to ours with several ranks.

    times_as_fast: {SERIAL, DDP: its time / time of this result}. one_process: the text of times_as_fast[SERIAL]; it
    says if other programs have disturbed the measurement.
    """
    medians = add_step_fields(results)
    for result in results:
        peers = [peer for peer in (SERIAL, DDP) if peer in medians]
        result["times_as_fast"] = {peer: paired_ratio(medians[peer], medians[result["name"]]) for peer in peers}
        if result["name"].startswith("stage 1"):
            add_peer(result, results, result["times_as_fast"])
    checked = rank_speedups(results, SERIAL)
    for result in results:
        text = f"{result['times_as_fast'][SERIAL]['median']:.2f}"
        result["one_process"] = checked[result["name"]].cell(text) if result["name"] in checked else text


@benchmark(
    "ranks-step",
    dict(preset="paper", ranks=2, batch_size=16, rounds=7, steps_per_round=2, warm_up=2, timeout=900, no_ddp=False),
    dp=dict(choices=STRATEGIES, nargs="+", default=["flat"], help="strategies, one table row each (default flat)"),
    with_threads=dict(action="store_true", help="add a row: stage 0 with as many threads as ranks"),
)
def main(args):
    plan_micro_batches(args.batch_size, None, 1, args.ranks, deterministic=True)  # raises ConfigError
    results = measure(args, list(process_specs(args)))
    summarise(results)
    return results
