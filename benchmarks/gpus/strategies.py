"""How much time does each gradient-synchronisation strategy add to a step on several GPUs?

In a baseline the same ranks do not communicate: each rank trains its own model. The step time of a strategy minus the
step time of its baseline is the time of the communication that does not overlap with computation. There are two
baselines, because the deterministic mode uses other kernels for matrix products than the fast mode.

    python -m benchmarks.gpus.strategies                                      # on four GPUs
    python -m benchmarks.gpus.strategies --ranks 2 --preset paper --rounds 1  # a quick trial on two GPUs
    python -m benchmarks.gpus.strategies --ranks 2 --buckets-mb 1 10 100      # bucket sizes
"""

from benchmarks.gpus.scaling import add_rounds, add_sizes, gpus, jobs, measure, parser_of, reached, variant_name
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import paired_ratio, save
from benchmarks.harness.result_tables import TABLES
from gpt2core.parallel.data.strategies import STRATEGIES
from gpt2core.presets import PRESETS

MAX_COST = 1.04  # upper bound for the deterministic mode's step time divided by the fast mode's
MIN_SPEED = 0.97  # lower bound for the speed with ZeRO-1 divided by the speed without


def variants(ranks, batch_size, bucket_mb):
    """The variants to measure: {name: options}, an argument of make_variants() in gpus/ours.py.

    These are the baselines, all strategies, ZeRO-1 with both kinds of --zero-gather, bf16 gradients and the
    deterministic mode.
    """
    fast = [{"dp": dp} for dp in STRATEGIES]
    for options in ({"zero": 1}, {"zero": 1, "zero_gather": "forward"}, {"compress": "bf16"}):
        fast += [{"dp": dp, **options} for dp in ("flat", "bucket")]
    deterministic = [{"dp": dp, "deterministic": True} for dp in ("flat", "bucket")]
    sizes = {"ranks": ranks, "batch_size": batch_size, "bucket_mb": bucket_mb}
    chosen = {}
    for baseline, compared in (({}, fast), ({"deterministic": True}, deterministic)):
        chosen[baseline_of(ranks, baseline)] = dict(sizes, communicate=False, **baseline)
        chosen |= {variant_name(ranks, options): dict(sizes, **options) for options in compared}
    return chosen


def bucket_sweep(ranks, batch_size, sizes_mb):
    """{name: options}: the baseline, the strategies without buckets, and "bucket" with each minimum size."""
    sizes = {"ranks": ranks, "batch_size": batch_size}
    chosen = {baseline_of(ranks, {}): dict(sizes, communicate=False)}
    chosen |= {variant_name(ranks, {"dp": dp}): dict(sizes, dp=dp) for dp in STRATEGIES if dp != "bucket"}
    name = variant_name(ranks, {"dp": "bucket"})
    return chosen | {f"{name} --bucket-mb {mb:g}": dict(sizes, dp="bucket", bucket_mb=mb) for mb in sizes_mb}


def baseline_of(ranks, options):
    """The name of the baseline for a variant with these options."""
    return f"no communication, {gpus(ranks)}" + " --deterministic" * options.get("deterministic", False)


def summarise(results):
    """Add fields to each result: min, times_baseline, communication_share and times_plain.

    times_baseline: its time / time of its baseline. communication_share: of the step time. times_plain: its time / time
    of the same --dp without other options.
    """
    by_name = {result["name"]: result for result in results}
    for result in results:
        baseline = by_name[baseline_of(result["ranks"], result)]
        result["times_baseline"] = paired_ratio(result["seconds"], baseline["seconds"])
        result["communication_share"] = 1 - 1 / result["times_baseline"]["median"]
        if plain := by_name.get(variant_name(result["ranks"], {"dp": result.get("dp")})):
            result["times_plain"] = paired_ratio(result["seconds"], plain["seconds"])
        result["min"] = min(result["seconds"])


def verdicts(results, ranks):
    """Yield a text for --dp flat and one for bucket: how the deterministic mode, ZeRO-1 and bf16 change the time."""
    by_name = {result["name"]: result for result in results}
    for dp in ("flat", "bucket"):
        fast = by_name[variant_name(ranks, {"dp": dp})]
        deterministic = by_name[variant_name(ranks, {"dp": dp, "deterministic": True})]
        zero = by_name[variant_name(ranks, {"dp": dp, "zero": 1})]
        forward = by_name[variant_name(ranks, {"dp": dp, "zero": 1, "zero_gather": "forward"})]
        compressed = by_name[variant_name(ranks, {"dp": dp, "compress": "bf16"})]
        cost, speed = time_ratio(deterministic, fast), time_ratio(fast, zero)
        share = zero["optimizer_bytes"] / fast["optimizer_bytes"]
        yield (
            f"--dp {dp}: the deterministic mode takes {cost:.3f} times the time of the fast mode (target: at most "
            f"{MAX_COST}: {reached(cost <= MAX_COST)}). With ZeRO-1 a rank holds {share:.3f} of the optimizer state. "
            f"Speed relative to --dp {dp} without options: with ZeRO-1 {speed:.3f} (target: at least {MIN_SPEED}: "
            f"{reached(speed >= MIN_SPEED)}), with ZeRO-1 and --zero-gather forward {time_ratio(fast, forward):.3f}, "
            f"with --compress bf16 {time_ratio(fast, compressed):.3f}"
        )


def time_ratio(numerator, denominator):
    """The step time of one result divided by that of another: the median over rounds."""
    return paired_ratio(numerator["seconds"], denominator["seconds"])["median"]


def parser():
    parser = parser_of("benchmarks.gpus.strategies", __doc__, 300)
    add_sizes(parser)
    add_rounds(parser)
    parser.add_argument("--buckets-mb", type=float, nargs="+", help="compare only these --bucket-mb with no buckets")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    seq_len = args.seq_len or PRESETS[args.preset].block_size
    batch = args.ranks * args.batch_size
    chosen = variants(args.ranks, batch, args.bucket_mb)
    if args.buckets_mb:
        chosen = bucket_sweep(args.ranks, batch, args.buckets_mb)
    results = measure(args, list(jobs(args, args.preset, chosen, {})), args.steps_per_round)
    summarise(results)
    print(f"\n{args.preset}, {args.precision}, {args.batch_size} x {seq_len} per GPU")
    TABLES["gpus-strategies"].print(results)
    if not args.buckets_mb:
        print("\n".join(verdicts(results, args.ranks)))
    save(results, args)


if __name__ == "__main__":
    run_main(main)
