"""Do two MPI ranks train twice as fast as one process, and faster than PyTorch's DistributedDataParallel with gloo?

python -m benchmarks.ranks.ranks                                    # preset paper on two ranks
python -m benchmarks.ranks.ranks --with-threads --dp flat bucket    # more rows
python -m benchmarks.ranks.ranks --preset tiny --rounds 1 --no-ddp  # a quick trial
"""

from benchmarks.harness.processes import ProcessSpec
from benchmarks.harness.report import add_peer, add_step_fields, paired_ratio
from benchmarks.harness.rounds import measure_variants, timed_steps
from benchmarks.harness.script import benchmark
from benchmarks.harness.speedups import marked
from gpt2core.parallel.config import STRATEGIES
from gpt2core.parallel.micro_batches.count import plan_micro_batches
from gpt2core.presets import PRESETS

SERIAL, DDP = "stage 0: 1 process, 1 thread", "torch DDP, gloo"  # names of the two programs to compare with


def prepare(module, world, preset, batch_size, threads, variants, **options):
    """Called on every rank by harness/processes.py: build a trainer and return `run_round(name, steps)`.

    module: benchmarks.harness.ours or benchmarks.peers.torch_ddp. variants: one name. options: further arguments of its
    make_trainer().
    """
    config = PRESETS[preset]
    step = module.make_trainer(config, batch_size, config.block_size, threads, world=world, **options)
    timed = timed_steps(world, step, config, batch_size)
    return lambda name, steps: timed(steps)


def process_specs(args):
    """The ProcessSpec of each row of the table: stage 0 in one process, then stage 1 and PyTorch DDP on many ranks.

    Stage 1 and PyTorch DDP use the same number of ranks, args.ranks, with one thread each.
    """
    sizes = {"preset": args.preset, "batch_size": args.batch_size, "threads": 1}
    ours, many = sizes | {"deterministic": True}, {"ranks": args.ranks, "mpi": True}
    programs = {SERIAL: ("harness.ours", ours, {"ranks": 1})}
    if args.with_threads:
        options = ours | {"threads": args.ranks}
        programs[f"stage 0: 1 process, {args.ranks} threads"] = "harness.ours", options, {"ranks": 1}
    for dp in args.dp:
        programs[f"stage 1: {args.ranks} ranks, --dp {dp}"] = "harness.ours", ours | {"dp": dp}, many
    if not args.no_ddp:
        programs[DDP] = "peers.torch_ddp", sizes, many
    return [
        ProcessSpec(name, f"benchmarks.{module}", 1, options | {"variants": {name: {}}}, **job)
        for name, (module, options, job) in programs.items()
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
    ours = [result for result in results if result["name"].startswith("stage")]  # PyTorch's kernels have no known ideal
    checked = marked(
        {each["name"]: (each["times_as_fast"][SERIAL]["median"], each["ranks"] * each["threads"]) for each in ours}
    )
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
    results = measure_variants(args, process_specs(args))
    summarise(results)
    return results
