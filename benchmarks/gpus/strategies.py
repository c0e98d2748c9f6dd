"""How much time does each gradient-synchronisation strategy add to a step on several GPUs?

Two baselines run on the same ranks without communication: each rank trains alone. The time above the baseline is the
cost of communication that computation does not hide. The deterministic mode has its own baseline, because it uses other
matrix products.
"""

import statistics

from benchmarks.gpus.scaling import add_rounds, add_sizes, gpus, measure, named, parser_of, reached
from benchmarks.harness.processes import ProcessSpec, run_main
from benchmarks.harness.report import paired_ratio, print_table, save
from gpt2core.app.presets import PRESETS
from gpt2core.parallel.data_parallel import STRATEGIES
from stage1_mpi.launch import choose, launch_line

BENCHMARK = "benchmarks.gpus.strategies"
MAX_COST = 1.04  # upper bound for the deterministic mode's step time divided by the fast mode's
MIN_SPEED = 0.97  # lower bound for the speed with ZeRO-1 divided by the speed without


def variants(ranks, batch_size, bucket_mb):
    """{name: options}: baselines, all strategies, ZeRO-1 with both gathers, bf16 gradients, the deterministic mode."""
    fast = [{"dp": dp} for dp in STRATEGIES]
    for more in ({"zero": 1}, {"zero": 1, "zero_gather": "forward"}, {"compress": "bf16"}):
        fast += [{"dp": dp, **more} for dp in ("flat", "bucket")]
    exact = [{"dp": dp, "deterministic": True} for dp in ("flat", "bucket")]
    sizes = {"ranks": ranks, "batch_size": batch_size, "bucket_mb": bucket_mb}
    chosen = {}
    for baseline, ways in (({}, fast), ({"deterministic": True}, exact)):
        chosen[baseline_of(ranks, baseline)] = dict(sizes, communicate=False, **baseline)
        chosen |= {named(ranks, way): dict(sizes, **way) for way in ways}
    return chosen


def bucket_sweep(ranks, batch_size, sizes_mb):
    """{name: options}: the baseline, the strategies without buckets, and "bucket" with each minimum size."""
    sizes = {"ranks": ranks, "batch_size": batch_size}
    chosen = {baseline_of(ranks, {}): dict(sizes, communicate=False)}
    chosen |= {named(ranks, {"dp": dp}): dict(sizes, dp=dp) for dp in STRATEGIES if dp != "bucket"}
    name = named(ranks, {"dp": "bucket"})
    return chosen | {f"{name} --bucket-mb {mb:g}": dict(sizes, dp="bucket", bucket_mb=mb) for mb in sizes_mb}


def baseline_of(ranks, options):
    """The name of the row without communication that a row with these options is compared with."""
    return f"no communication, {gpus(ranks)}" + " --deterministic" * options.get("deterministic", False)


def summarise(results, title):
    """Add the cost of communication, from the ratios of each round, to the results; return the table's rows."""
    by_name = {result["name"]: result for result in results}
    rows = []
    for result in results:
        baseline = by_name[baseline_of(result["ranks"], result)]
        result["times_baseline"] = paired_ratio(result["seconds"], baseline["seconds"])
        result["communication_share"] = 1 - 1 / result["times_baseline"]["median"]
        if plain := by_name.get(named(result["ranks"], {"dp": result.get("dp")})):
            result["times_plain"] = paired_ratio(result["seconds"], plain["seconds"])  # the same --dp without options
        median, result["min"] = statistics.median(result["seconds"]), min(result["seconds"])
        share = "" if result is baseline else result["communication_share"]
        rows.append(
            {
                title: result["name"],
                "ms/step": f"{1e3 * median:.4g}",
                "best": f"{1e3 * result['min']:.4g}",
                "added by communication, ms": share and f"{1e3 * share * median:.3f}",
                "share of step": share and f"{100 * share:.1f} %",
                "messages": result["messages"],
                "MB sent per rank": f"{1e-6 * result['bytes_sent']:,.1f}",
                "optimizer MB per rank": f"{1e-6 * result['optimizer_bytes']:,.1f}",
                "last loss": f"{result['last_loss']:.4f}",
            }
        )
    return rows


def verdicts(results, ranks):
    """Yield one sentence for flat and bucket: the cost of the deterministic mode, of ZeRO-1 and of bf16 gradients."""
    by_name = {result["name"]: result for result in results}
    for dp in ("flat", "bucket"):
        fast = by_name[named(ranks, {"dp": dp})]
        exact = by_name[named(ranks, {"dp": dp, "deterministic": True})]
        sharded = by_name[named(ranks, {"dp": dp, "zero": 1})]
        forward = by_name[named(ranks, {"dp": dp, "zero": 1, "zero_gather": "forward"})]
        compressed = by_name[named(ranks, {"dp": dp, "compress": "bf16"})]
        slower, kept = times(exact, fast), times(fast, sharded)
        share = sharded["optimizer_bytes"] / fast["optimizer_bytes"]
        cost, speed = reached(slower <= MAX_COST), reached(kept >= MIN_SPEED)
        yield (
            f"--dp {dp}: the deterministic mode takes {slower:.3f} x the fast mode's time (target: at most {MAX_COST}: "
            f"{cost}); ZeRO-1 reaches {kept:.3f} x the speed without it (target: at least {MIN_SPEED}: {speed}) with "
            f"{share:.3f} of the optimizer state, and "
            f"{times(fast, forward):.3f} x the speed with --zero-gather forward; --compress bf16 reaches "
            f"{times(fast, compressed):.3f} x the speed"
        )


def times(one, other):
    """The step time of `one` divided by that of `other`, median over rounds."""
    return paired_ratio(one["seconds"], other["seconds"])["median"]


def parser():
    parser = parser_of(BENCHMARK, __doc__, 300, "one round of a variant")
    add_sizes(parser.add_argument)
    add_rounds(parser.add_argument, "default 1")
    parser.add_argument("--buckets-mb", type=float, nargs="+", help="compare only these --bucket-mb with no buckets")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    seq_len = args.seq_len or PRESETS[args.preset].block_size
    batch = args.ranks * args.batch_size
    chosen = variants(args.ranks, batch, args.bucket_mb)
    if args.buckets_mb:
        chosen = bucket_sweep(args.ranks, batch, args.buckets_mb)
    options = {"preset": args.preset, "seq_len": seq_len, "precision": args.precision, "variants": chosen}
    launcher = tuple(launch_line(*choose(), args.ranks))
    job = ProcessSpec("ours", "benchmarks.gpus.ours", args.threads, options, ranks=args.ranks, launcher=launcher)
    results = measure(args, [job], args.steps_per_round)
    print_table(summarise(results, f"{args.preset}, {args.precision}, {args.batch_size} x {seq_len} per GPU"))
    if not args.buckets_mb:
        print("\n" + "\n".join(verdicts(results, args.ranks)))
    save(BENCHMARK, results, args, args.save_as)


if __name__ == "__main__":
    run_main(main)
