"""What does each way to sum the gradients over GPUs cost a step, and how much of it does the computation hide?

The same ranks also train each by itself, without a word to the others: what a step takes longer than that is the price
of communication, and the deterministic mode, which computes with other products, has such a floor of its own.
"""

import statistics

from benchmarks.gpus.scaling import add_rounds, add_sizes, gpus, measure, named, parser_of, percent
from benchmarks.harness.contenders import Contender, paired_ratio, print_table, run, save
from gpt2core.app.presets import PRESETS
from gpt2core.parallel.data_parallel import STRATEGIES
from stage1_mpi.launch import choose, launch_line

BENCHMARK = "benchmarks.gpus.strategies"
SLOWER = 1.04  # times the fast mode's step, what the deterministic one may take at most
KEPT = 0.97  # of the speed without it, what ZeRO-1 has to keep


def variants(ranks, batch_size, bucket_mb):
    """{name: options}: the floors, every strategy, ZeRO-1 both ways, gradients in bf16, and the deterministic mode."""
    fast = [{"dp": dp} for dp in STRATEGIES]
    for more in ({"zero": 1}, {"zero": 1, "zero_gather": "forward"}, {"compress": "bf16"}):
        fast += [{"dp": dp, **more} for dp in ("flat", "bucket")]
    exact = [{"dp": dp, "deterministic": True} for dp in ("flat", "bucket")]
    sizes = {"ranks": ranks, "batch_size": batch_size, "bucket_mb": bucket_mb}
    chosen = {}
    for floor, ways in (({}, fast), ({"deterministic": True}, exact)):
        chosen[floor_of(ranks, floor)] = dict(sizes, talks=False, **floor)
        chosen |= {named(ranks, way): dict(sizes, **way) for way in ways}
    return chosen


def floor_of(ranks, options):
    """The row without communication that one with these options is compared with."""
    return f"each alone, {gpus(ranks)}" + " --deterministic" * options.get("deterministic", False)


def summarise(results, title):
    """Add what communication costs (within rounds) to the results; return table rows."""
    by_name = {result["name"]: result for result in results}
    rows = []
    for result in results:
        floor = by_name[floor_of(result["ranks"], result)]
        result["communication_share"] = 1 - 1 / times(result, floor)
        result["median"], result["min"] = statistics.median(result["seconds"]), min(result["seconds"])
        rows.append(
            {
                title: result["name"],
                "ms/step": f"{1e3 * result['median']:.4g}",
                "best": f"{1e3 * result['min']:.4g}",
                "communication adds, ms": "" if result is floor else f"{1e3 * added(result):.3f}",
                "of the step": "" if result is floor else percent(result["communication_share"]),
                "messages": result["messages"],
                "MB sent a rank": f"{1e-6 * result['bytes_sent']:,.1f}",
                "optimizer MB a rank": f"{1e-6 * result['optimizer_bytes']:,.1f}",
                "last loss": f"{result['last_loss']:.4f}",
            }
        )
    return rows


def added(result):
    """Seconds of a step that are there because of the others."""
    return result["communication_share"] * result["median"]


def verdicts(results, ranks):
    """What the deterministic mode and ZeRO-1 cost, against their targets, and what bf16 does."""
    by_name = {result["name"]: result for result in results}
    for dp in ("flat", "bucket"):
        fast = by_name[named(ranks, {"dp": dp})]
        exact = by_name[named(ranks, {"dp": dp, "deterministic": True})]
        sharded = by_name[named(ranks, {"dp": dp, "zero": 1})]
        beside = by_name[named(ranks, {"dp": dp, "zero": 1, "zero_gather": "forward"})]
        packed = by_name[named(ranks, {"dp": dp, "compress": "bf16"})]
        slower, kept = times(exact, fast), times(fast, sharded)
        share = sharded["optimizer_bytes"] / fast["optimizer_bytes"]
        yield (
            f"--dp {dp}: deterministic takes {slower:.3f} x the fast mode's time (target: at most {SLOWER}: "
            f"{'reached' if slower <= SLOWER else 'MISSED'}); ZeRO-1 has {kept:.3f} x the speed without it (target: at "
            f"least {KEPT}: {'reached' if kept >= KEPT else 'MISSED'}) and {share:.3f} of the optimizer's bytes, and "
            f"{times(fast, beside):.3f} x the speed with --zero-gather forward; --compress bf16 has "
            f"{times(fast, packed):.3f} x the speed"
        )


def times(one, other):
    """How many times as long a step of `one` takes."""
    return paired_ratio(one["seconds"], other["seconds"])


def parser():
    parser = parser_of(BENCHMARK, __doc__, 300, "one turn")
    add_sizes(parser.add_argument)
    add_rounds(parser.add_argument, "default 1")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    seq_len = args.seq_len or PRESETS[args.preset].block_size
    chosen = variants(args.ranks, args.ranks * args.batch_size, args.bucket_mb)
    options = {"preset": args.preset, "seq_len": seq_len, "precision": args.precision, "variants": chosen}
    launcher = tuple(launch_line(*choose(), args.ranks))
    job = Contender("ours", "benchmarks.gpus.ours", args.threads, options, ranks=args.ranks, launcher=launcher)
    results = measure(args, [job], args.steps_per_round)
    print_table(summarise(results, f"{args.preset}, {args.precision}, {args.batch_size} x {seq_len} a GPU"))
    print("\n" + "\n".join(verdicts(results, args.ranks)))
    if not args.no_save:
        save(BENCHMARK, results, args.commit, args.save_as)


if __name__ == "__main__":
    run(main)
