"""Do two MPI ranks train twice as fast as one process, and faster than PyTorch's DistributedDataParallel with gloo?

python -m benchmarks.ranks.ranks                                    # preset paper on two ranks
python -m benchmarks.ranks.ranks --with-threads --dp flat bucket    # more rows
python -m benchmarks.ranks.ranks --preset tiny --rounds 1 --no-ddp  # a quick trial
"""

from benchmarks.harness.processes import ProcessSpec, run_main
from benchmarks.harness.report import add_peer, add_step_fields, benchmark_parser, paired_ratio, save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.rounds import measure_specs, step_results, timed_steps
from benchmarks.harness.speedups import rank_speedups
from gpt2core.codecs import CODECS
from gpt2core.parallel.config import BUCKET_MB, STRATEGIES
from gpt2core.parallel.micro_batches.count import plan_micro_batches
from gpt2core.presets import PRESETS
from stage1_mpi.mpi_communicator import CHOICES

SERIAL, DDP = "stage 0: 1 process, 1 thread", "torch DDP, gloo"  # names of the two programs to compare with
TARGETS = {SERIAL: 1.90, DDP: 1.05}  # {program: required speed-up of two ranks of stage 1 over this program}


# -- on the ranks -----------------------------------------------------------------------------------------------------


def prepare(module, world, preset, batch_size, threads, **options):
    """Called on every rank by harness/processes.py: build a trainer and return `run_round(steps)`; see timed_steps().

    module: the implementation to measure, benchmarks.harness.ours or benchmarks.peers.torch_ddp; both have
    make_trainer(). options: further arguments of make_trainer().
    """
    config = PRESETS[preset]
    step = module.make_trainer(config, batch_size, config.block_size, threads, world=world, **options)
    return timed_steps(world, step, config, batch_size)


# -- in the parent process --------------------------------------------------------------------------------------------


def process_specs(args):
    """Yield one ProcessSpec per row of the table: stage 0 in one process, then stage 1 and PyTorch DDP on many ranks.

    Stage 1 and PyTorch DDP use the same number of ranks, args.ranks, with one thread each.
    """
    sizes = {"preset": args.preset, "batch_size": args.batch_size, "threads": 1}
    options = dict(sizes, deterministic=not args.no_deterministic)
    yield ProcessSpec(SERIAL, "benchmarks.harness.ours", 1, options, ranks=1)
    if args.with_threads:
        options = dict(sizes, deterministic=not args.no_deterministic, threads=args.ranks)
        yield ProcessSpec(f"stage 0: 1 process, {args.ranks} threads", "benchmarks.harness.ours", 1, options, ranks=1)
    for dp in args.dp:
        parallel = {"dp": dp, "zero": args.zero, "compress": args.compress, "bucket_mb": args.bucket_mb}
        options = dict(sizes, deterministic=not args.no_deterministic, collectives=args.collectives, **parallel)
        name = f"stage 1: {args.ranks} ranks, --dp {dp}" + f" --zero {args.zero}" * bool(args.zero)
        yield ProcessSpec(name, "benchmarks.harness.ours", 1, options, ranks=args.ranks, mpi=True)
    if not args.no_ddp:
        yield ProcessSpec(DDP, "benchmarks.peers.torch_ddp", 1, sizes, ranks=args.ranks)


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

    times_as_fast: {peer: time of the peer / time of this result}; the peers are those in TARGETS. one_process: the text
    of the one of them; it says if other programs have disturbed the measurement.
    """
    medians = add_step_fields(results)
    for result in results:
        peers = [peer for peer in TARGETS if peer in medians]
        result["times_as_fast"] = {peer: paired_ratio(medians[peer], medians[result["name"]]) for peer in peers}
        if result["name"].startswith("stage 1"):
            add_peer(result, results, result["times_as_fast"])
    checked = rank_speedups(results, SERIAL)
    for result in results:
        text = f"{result['times_as_fast'][SERIAL]['median']:.2f}"
        result["one_process"] = checked[result["name"]].cell(text) if result["name"] in checked else text


def verdicts(results):
    """Yield one sentence for each result of stage 1 and each target: whether its speed-up reaches the target."""
    bounded = rank_speedups(results, SERIAL)
    for result in results:
        if result["name"].startswith("stage 1"):
            for peer, ratio in result["times_as_fast"].items():
                if peer == SERIAL and bounded[result["name"]].disturbed:
                    yield f"{result['name']}, {peer}: {bounded[result['name']]}; run it again on an idle machine"
                    continue
                verdict = "reached" if ratio["median"] >= TARGETS[peer] else "MISSED"
                target = f"target (preset paper, 2 ranks) {TARGETS[peer]:.2f}: {verdict}"
                yield f"{result['name']}: {ratio['median']:.3f} times as fast as {peer}; {target}"


def main():
    parser = benchmark_parser("benchmarks.ranks.ranks", __doc__)
    add = parser.add_argument
    parser.add_flags(preset="paper", ranks=2, batch_size=16, bucket_mb=BUCKET_MB)
    parser.add_flags(rounds=7, steps_per_round=2, warm_up=2, timeout=900, no_ddp=False)
    add("--dp", choices=STRATEGIES, nargs="+", default=["flat"], help="strategies, one table row each (default flat)")
    add("--zero", type=int, choices=(0, 1), default=0, help="1: divide the optimizer state over ranks (default 0)")
    add("--compress", choices=("none", *CODECS), default="none", help="format of the gradients sent (default none)")
    add("--collectives", choices=CHOICES, help="all-reduce (default canonical; mpi with --no-deterministic)")
    add("--no-deterministic", action="store_true", help="one micro-batch per rank; MPI's own order of sums")
    add("--with-threads", action="store_true", help="add a row: stage 0 with as many threads as ranks")
    args = parser.parse_args()
    plan_micro_batches(args.batch_size, None, 1, args.ranks, not args.no_deterministic)

    results = measure(args, list(process_specs(args)))
    summarise(results)
    TABLES["ranks-step"].print(results)
    print("\n".join(verdicts(results)))
    save(results, args)


if __name__ == "__main__":
    run_main(main)
