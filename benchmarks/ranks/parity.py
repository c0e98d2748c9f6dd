"""Is the loss curve of every number of ranks bit-identical to that of one process? How far does the fast mode deviate?

Each row is one run of train_gpt2.py; its numbers are those of its log. Stage 1 runs every --dp and --zero on CPUs, and
is compared with stage 0. Stage 3 runs on GPUs and is compared with stage 2. One of its runs is in the fast mode, that
is without --deterministic; one sends through the host, which gives the same bits at a lower speed. With --sockets, NCCL
also sends through the network stack of the host, as between hosts without a faster network.

    python -m benchmarks.ranks.parity                                       # stage 1
    python -m benchmarks.ranks.parity --presets tiny --ranks 1 2 --steps 5  # a quick trial
    python -m benchmarks.ranks.parity --stage 3                             # on 1, 2 and 4 GPUs
    python -m benchmarks.ranks.parity --stage 3 --ranks 2 --sockets         # connections of NCCL
"""

import itertools

import numpy as np

from benchmarks.harness.processes import BenchmarkFailed
from benchmarks.harness.report import save
from benchmarks.harness.script import benchmark
from benchmarks.harness.table_format import Table
from benchmarks.harness.training_runs import PACKAGES, median_step, train
from gpt2core.errors import ConfigError, counted
from gpt2core.parallel.data.strategies import STRATEGIES
from gpt2core.presets import PRESETS

COMPARED = "loss", "grad_norm", "parameters_sha256"  # fields of each step's log line; only the last line has the hash
DEFAULTS = {  # {stage: values of flags}
    1: {"presets": ["tiny", "paper"], "precision": ["fp32"], "ranks": [1, 2, 4, 8]},
    3: {"presets": ["paper"], "precision": ["fp32", "bf16"], "ranks": [1, 2, 4]},
}
STEPS = {(1, "paper"): 6}  # {(stage, preset): steps}; others: 50
# A loss must differ from the expected one by less than this, relatively; the fast mode adds sums in another order.
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2}
DETERMINISTIC, BUCKET = "--deterministic", ("--dp", "bucket")
FEW = "flat", "bucket"  # in stage 1, the strategies of larger models on more or less than two ranks
# These variables make NCCL send through sockets between GPUs of one host, and print how it connects the ranks.
SOCKETS = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO",
}  # fmt: skip
RUNS = Table("", """
    = {precision}, {name} | compared with one process = {"differs" if row.difference else "bit-identical"}
    largest loss deviation = {row.largest_deviation or "0":cell .1e} | ms per step = {median * 1e3:.3g}
    last loss = {losses[-1] if abs(losses[-1]) < float("inf") else "not finite":cell .6f}
    difference | parameters_sha256 = {parameters_sha256:.12}""")  # fmt: skip
OVER_SOCKETS = ", NCCL over sockets"  # the end of the name of such a run


def set_defaults(args):
    """Set the flags that are not given to the DEFAULTS of the stage; returns args."""
    for name, default in DEFAULTS[args.stage].items():
        setattr(args, name, getattr(args, name) or default)
    return args


def cases(args, preset):
    """[(ranks, flags, further environment variables)] of the runs on several ranks."""
    most, flat = max(args.ranks), ("--dp", "flat")
    if args.sockets:
        return [(most, flags, each) for flags in ((*BUCKET, DETERMINISTIC), BUCKET) for each in (None, SOCKETS)]
    if args.stage == 1:
        small = ("--bucket-mb", "0.1") if preset == "tiny" else ()  # one default bucket would contain all gradients
        return [
            (ranks, (*small, "--dp", dp, "--zero", zero, DETERMINISTIC), None)
            for ranks in args.ranks
            for dp in (STRATEGIES if preset == "tiny" or ranks == 2 else FEW)
            for zero in "01"
        ]
    ways = BUCKET, (*flat, "--zero", "1")  # on one GPU the first one
    found = [(ranks, (*way, DETERMINISTIC), None) for ranks in args.ranks for way in ways[:ranks]]
    through_host = most, (*flat, "--transport", "mpi", DETERMINISTIC), None
    return [*found, (most, BUCKET, None), *[through_host] * (most > 1)]


def first_difference(log, expected):
    """The first step and field in which two logs differ, as text, or None if they are bit-identical."""
    if len(log) != len(expected):
        return f"{len(log)} of {len(expected)} steps"
    for line, wanted in zip(log, expected, strict=True):
        for field in COMPARED:
            if line.get(field) != wanted.get(field):
                return f"step {wanted['step']}, {field}: {line.get(field)} instead of {wanted.get(field)}"
    return None


def compare(args, preset, precision):
    """Run all cases of a model in one precision; return one result for each run, first that of one process."""
    steps = args.steps or STEPS.get((args.stage, preset), 50)
    common = dict(timeout=args.timeout, preset=preset, steps=steps, precision=precision)
    common |= {"threads": 1} if args.stage == 1 else {}
    one_process, several = PACKAGES[args.stage - 1 : args.stage + 1]
    expected, _ = train(f"{preset}, {one_process}", one_process, words=[DETERMINISTIC], **common)
    results = [result_of("one process", 1, precision, expected, expected)]
    for ranks, flags, environment in cases(args, preset):
        name = " ".join([counted(ranks, "rank"), *flags]) + OVER_SOCKETS * bool(environment)
        log, output = train(f"{preset}, {name}", several, words=flags, ranks=ranks, environment=environment, **common)
        if environment and "via NET/Socket" not in output:
            raise BenchmarkFailed(f"{name}: NCCL does not report that it uses sockets; its output:\n{output[-4000:]}")
        results.append(result_of(name, ranks, precision, log, expected))
    return results


def result_of(name, ranks, precision, log, expected):
    """The result of one run: its log (one dictionary per step) compared with `expected`, the log of one process.

    difference: None if the logs are bit-identical, else a text. largest_deviation: the largest relative deviation of a
    loss. median: the median of the seconds per step.
    """
    losses = [line["loss"] for line in log]
    return {
        "name": name,
        "ranks": ranks,
        "precision": precision,
        "difference": first_difference(log, expected),
        "largest_deviation": float(np.max(np.abs(np.divide(losses, [line["loss"] for line in expected]) - 1))),
        "median": median_step(log),
        "parameters_sha256": log[-1]["parameters_sha256"],
        "losses": losses,
    }


def summary(title, results):
    """Rows of the table "parity" of docs/RESULTS.md: runs of one precision, with and without --deterministic."""
    title += OVER_SOCKETS * any(OVER_SOCKETS in each["name"] for each in results)
    end = OVER_SOCKETS if OVER_SOCKETS in title else ""
    for fast in (False, True):
        runs = [each for each in results[1:] if each["name"].endswith(end) and (DETERMINISTIC in each["name"]) != fast]
        if runs:
            yield {
                "title": title + ", without `--deterministic`" * fast,
                "ranks": sorted({run["ranks"] for run in runs}),
                "runs": len(runs),
                "equal": sum(run["difference"] is None for run in runs),
                "deviation": float(np.max([run["largest_deviation"] for run in runs])),
            }


def verdict(results):
    """(whether all requirements of one precision are met, a sentence that says so)."""
    deterministic = [result for result in results[1:] if DETERMINISTIC in result["name"]]
    equal = sum(result["difference"] is None for result in deterministic)
    largest, bound = float(np.max([each["largest_deviation"] for each in results])), TOLERANCE[results[0]["precision"]]
    return (
        equal == len(deterministic) and largest < bound,
        f"{equal} of {len(deterministic)} deterministic runs have losses, gradient norms and final parameters "
        f"bit-identical to those of one process. The largest relative deviation of a loss in all runs is {largest:.1e} "
        f"(target: less than {bound})",
    )


@benchmark(
    common=dict(stage=1, timeout=300),
    presets=dict(choices=PRESETS, nargs="+", help="models (default tiny paper; in stage 3 paper)"),
    precision=dict(choices=TOLERANCE, nargs="+", help="precisions (default fp32; in stage 3 fp32 bf16)"),
    ranks=dict(type=int, nargs="+", help="numbers of ranks (default 1 2 4 8; in stage 3 1 2 4)"),
    steps=dict(type=int, help="steps of each run (default 50; of `paper` in stage 1 6)"),
    sockets=dict(
        action="store_true",
        save_as="parity_sockets",
        help="stage 3, the largest number of GPUs: NCCL without and with sockets",
    ),
)
def main(args):
    set_defaults(args)
    if args.sockets and args.stage != 3:
        raise ConfigError("--sockets: stage 1 does not use NCCL: add --stage 3")
    results, rows, all_met = [], [], True
    for preset, precision in itertools.product(args.presets, args.precision):
        found = compare(args, preset, precision)
        title = f"`{preset}`, {len(found[0]['losses'])} steps" + f", {precision}" * (args.stage == 3)
        print(f"\n{title}")
        RUNS.print(found)
        rows += summary(title, found)
        met, sentence = verdict(found)
        print(sentence, flush=True)
        all_met, results = all_met and met, results + [result | {"preset": preset} for result in found]
    save({"summary": rows, "runs": results}, args, group="gpus" if args.stage == 3 else None)
    return 0 if all_met else 1
