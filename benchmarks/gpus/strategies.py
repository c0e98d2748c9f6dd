"""How much time does each gradient-synchronisation strategy add to a step on several GPUs?

In a baseline the same ranks do not communicate: each rank trains its own model. The step time of a strategy minus the
step time of its baseline is the time of the communication that does not overlap with computation. There are two
baselines, because the deterministic mode uses other kernels for matrix products than the fast mode.

    python -m benchmarks.gpus.strategies                                      # on four GPUs
    python -m benchmarks.gpus.strategies --ranks 2 --preset paper --rounds 1  # a quick trial on two GPUs
    python -m benchmarks.gpus.strategies --ranks 2 --buckets-mb 1 10 100      # bucket sizes
"""

from benchmarks.gpus import scaling
from benchmarks.gpus.scaling import flags_of, gpus, our_job, seq_len_of, variant_name
from benchmarks.harness.report import paired_ratio
from benchmarks.harness.rounds import measure_variants
from benchmarks.harness.script import benchmark
from gpt2core.parallel.data.strategies import STRATEGIES

prepare = scaling.prepare  # called on every rank by harness/processes.py


def variants(ranks, batch_size, bucket_mb, sweep_mb=()):
    """The variants to measure: {name: options}, an argument of make_variants() in gpus/ours.py.

    These are the baselines, all strategies, ZeRO-1 with both kinds of --zero-gather, bf16 gradients and the
    deterministic mode. With sweep_mb: a baseline, the strategies without buckets, and "bucket" with these sizes.
    """
    sizes = {"ranks": ranks, "batch_size": batch_size, "bucket_mb": bucket_mb}
    fast = [{"dp": dp} for dp in STRATEGIES]
    if sweep_mb:
        fast = [options for options in fast if options["dp"] != "bucket"]
        fast += [{"dp": "bucket", "bucket_mb": mb} for mb in sweep_mb]
    else:
        for options in ({"zero": 1}, {"zero": 1, "zero_gather": "forward"}, {"compress": "bf16"}):
            fast += [{"dp": dp, **options} for dp in ("flat", "bucket")]
    deterministic = [] if sweep_mb else [{"dp": dp, "deterministic": True} for dp in ("flat", "bucket")]
    chosen = {}
    for baseline, compared in (({}, fast), ({"deterministic": True}, deterministic)):
        if compared:
            chosen[baseline_of(ranks, baseline)] = dict(sizes, communicate=False, **baseline)
            chosen |= {variant_name(ranks, options): sizes | options for options in compared}
    return chosen


def baseline_of(ranks, options):
    """The name of the baseline for a variant with these options."""
    return f"no communication, {gpus(ranks)}" + " --deterministic" * options.get("deterministic", False)


def summarise(results):
    """Add to each result times_baseline, its time / that of its baseline, and communication_share, of the step time."""
    by_name = {result["name"]: result for result in results}
    for result in results:
        baseline = by_name[baseline_of(result["ranks"], result)]
        result["times_baseline"] = paired_ratio(result["seconds"], baseline["seconds"])
        result["communication_share"] = 1 - 1 / result["times_baseline"]["median"]


@benchmark(
    "gpus-strategies",
    flags_of(4),
    buckets_mb=dict(type=float, nargs="+", help="compare only these --bucket-mb with no buckets"),
)
def main(args):
    batch = args.ranks * args.batch_size
    chosen = variants(args.ranks, batch, args.bucket_mb, args.buckets_mb)
    results = measure_variants(args, [our_job(args, args.preset, chosen)])
    summarise(results)
    print(f"\n{args.preset}, {args.precision}, {args.batch_size} x {seq_len_of(args, args.preset)} per GPU")
    return results
