"""Is the loss curve on 1, 2 and 4 GPUs bit-identical to that of stage 2, and how far does the fast mode deviate?

The fast mode is training without --deterministic. Each row of a table shows one run of train_gpt2.py. Its numbers are
read from the log of the run. The run of the last row uses --transport mpi, which gives the same bits at a lower speed.
With --sockets, NCCL also sends through the network stack of the host, as between hosts without a faster network.

    python -m benchmarks.gpus.parity                                               # on 1, 2 and 4 GPUs
    python -m benchmarks.gpus.parity --ranks 1 2 --steps 10                        # a quick trial on two GPUs
    python -m benchmarks.gpus.parity --ranks 2 --sockets --save-as parity_sockets  # without and with sockets
"""

import statistics

from benchmarks.gpus.scaling import gpus
from benchmarks.harness.processes import BenchmarkFailed, run_main
from benchmarks.harness.report import benchmark_parser, save
from benchmarks.harness.table_format import Table
from benchmarks.harness.training_runs import train
from benchmarks.ranks.parity import first_difference

UNTIMED_STEPS = 5  # first steps of a run, left out of its median time: they include compilation and graph capture
# A loss must differ from that of stage 2 by less than this, relatively; the fast mode adds sums in another order.
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2}
STRATEGIES = ("--dp", "bucket"), ("--dp", "flat", "--zero", "1")
THROUGH_HOST = ("--dp", "flat", "--transport", "mpi")
DETERMINISTIC = "--deterministic"
# These variables make NCCL send through sockets between GPUs of one host, and print how it connects the ranks.
SOCKETS = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO",
}  # fmt: skip
RUNS = Table("", """
    = {precision}, {name} | compared with stage 2 = {"differs" if row.difference else "bit-identical"}
    largest loss deviation = {row.largest_deviation or "0":cell .1e} | ms per step = {median * 1e3:.3g}
    last loss = {losses[-1] if abs(losses[-1]) < float("inf") else "not finite":cell .6f}
    difference | parameters_sha256 = {parameters_sha256:.12}""")  # fmt: skip
OVER_SOCKETS = ", NCCL over sockets"  # the end of the name of such a run


def cases(ranks):
    """[(ranks, flags)] of the runs of stage 3: deterministic runs, a fast run, a run that communicates by MPI."""
    deterministic = [
        (count, (*flags, DETERMINISTIC)) for count in ranks for flags in (STRATEGIES if count > 1 else STRATEGIES[:1])
    ]
    most = max(ranks)
    through_host = [(most, (*THROUGH_HOST, DETERMINISTIC))] if most > 1 else []
    return [*deterministic, (most, ("--dp", "bucket")), *through_host]


def runs_of(args):
    """[(ranks, flags, end of the name)] of the runs of stage 3: cases(); with --sockets, the same with and without."""
    if not args.sockets:
        return [(*case, "") for case in cases(args.ranks)]
    bucket = STRATEGIES[0]
    return [(max(args.ranks), flags, end) for flags in ((*bucket, DETERMINISTIC), bucket) for end in ("", OVER_SOCKETS)]


def compare(args, precision):
    """Run all cases in one precision; return one result for each run. The first result is that of stage 2."""
    common = dict(timeout=args.timeout, preset=args.preset, steps=args.steps, precision=precision)
    expected, _ = train(f"{args.preset}, stage 2", "stage2_cuda", words=[DETERMINISTIC], **common)
    results = [result_of("stage 2", 1, precision, expected, expected)]
    for ranks, flags, end in runs_of(args):
        name = " ".join([gpus(ranks), *flags]) + end
        job = dict(words=flags, ranks=ranks, environment=SOCKETS if end else None)
        log, output = train(f"{args.preset}, {name}", "stage3_mpi_cuda", **job, **common)
        if end and "via NET/Socket" not in output:
            raise BenchmarkFailed(f"{name}: NCCL does not report that it uses sockets; its output:\n{output[-4000:]}")
        results.append(result_of(name, ranks, precision, log, expected))
    return results


def result_of(name, ranks, precision, log, expected):
    """The result of one run: its log (one dictionary per step) compared with `expected`, the log of stage 2.

    difference: None if the logs are bit-identical, else a text. largest_deviation: the largest relative deviation of a
    loss. median: the median of the seconds per step.
    """
    losses = [(line["loss"], wanted["loss"]) for line, wanted in zip(log, expected, strict=True)]
    return {
        "name": name,
        "ranks": ranks,
        "precision": precision,
        "difference": first_difference(log, expected),
        "largest_deviation": max(abs(loss / wanted - 1) for loss, wanted in losses),
        "median": statistics.median(line["seconds"] for line in log[UNTIMED_STEPS:] or log),
        "parameters_sha256": log[-1]["parameters_sha256"],
        "losses": [line["loss"] for line in log],
    }


def summary(args, results):
    """Rows of the table "parity" of docs/RESULTS.md: runs of one precision, with and without --deterministic."""
    end = OVER_SOCKETS * args.sockets
    for fast in (False, True):
        runs = [each for each in results[1:] if each["name"].endswith(end) and (DETERMINISTIC in each["name"]) != fast]
        title = f"`{args.preset}`, {args.steps} steps, {results[0]['precision']}{end}"
        if runs:
            yield {
                "title": title + ", without `--deterministic`" * fast,
                "ranks": sorted({run["ranks"] for run in runs}),
                "runs": len(runs),
                "equal": sum(run["difference"] is None for run in runs),
                "deviation": max(run["largest_deviation"] for run in runs),
            }


def verdict(results):
    """(whether all requirements of one precision are met, a sentence that says so)."""
    deterministic = [result for result in results[1:] if DETERMINISTIC in result["name"]]
    equal = sum(result["difference"] is None for result in deterministic)
    largest, bound = max(result["largest_deviation"] for result in results), TOLERANCE[results[0]["precision"]]
    return (
        equal == len(deterministic) and largest < bound,
        f"{equal} of {len(deterministic)} deterministic runs have losses, gradient norms and final parameters "
        f"bit-identical to those of stage 2. The largest relative deviation of a loss in all runs is {largest:.1e} "
        f"(target: less than {bound})",
    )


def parser():
    parser = benchmark_parser("benchmarks.gpus.parity", __doc__)
    parser.add_flags(preset="paper", precision=["fp32", "bf16"], ranks=[1, 2, 4], steps=50, timeout=300)
    text = "only compare NCCL's usual connections with sockets, on the largest number of GPUs (default: no)"
    parser.add_argument("--sockets", action="store_true", help=text)
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    results, rows, all_met = [], [], True
    for precision in args.precision:
        of_precision = compare(args, precision)
        print(f"\n{args.preset}, {args.steps} steps")
        RUNS.print(of_precision)
        rows += summary(args, of_precision)
        met, sentence = verdict(of_precision)
        print(sentence, flush=True)
        all_met, results = all_met and met, results + of_precision
    save({"summary": rows, "runs": results}, args)
    return 0 if all_met else 1


if __name__ == "__main__":
    run_main(main)
