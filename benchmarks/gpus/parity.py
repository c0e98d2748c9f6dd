"""Is the loss curve on 1, 2 and 4 GPUs bit-identical to stage 2's, and how far does the fast mode deviate?

Each row is a run of train_gpt2.py and its log. The last row of a table uses --transport mpi, which gives the same bits
at a lower speed.
"""

import argparse
import statistics
import sys

from benchmarks.gpus.scaling import gpus
from benchmarks.harness.processes import progress, run_main
from benchmarks.harness.report import add_save_flags, print_table, save
from benchmarks.ranks.parity import first_difference, train
from gpt2core.app.presets import PRESETS
from stage1_mpi.launch import choose, launch_line

BENCHMARK = "benchmarks.gpus.parity"
SETTLED = 5  # steps excluded from the timing: the first compiles, the second is captured
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2}  # of the fast mode's losses, which sum in another order
WAYS = ("--dp", "bucket"), ("--dp", "flat", "--zero", "1")
HOST = ("--dp", "flat", "--transport", "mpi")
EXACT = "--deterministic"


def cases(ranks):
    """[(ranks, flags)] of stage 3's runs."""
    exact = [(count, (*way, EXACT)) for count in ranks for way in (WAYS if count > 1 else WAYS[:1])]
    most = max(ranks)
    return [*exact, (most, ("--dp", "bucket")), *[(most, (*HOST, EXACT))] * (most > 1)]


def compare(args, precision):
    """One result for each run in one precision; the first is stage 2's."""
    job = args.preset, args.steps, args.timeout
    script = [sys.executable, "-m", "stage2_cuda.train_gpt2", "--precision", precision, EXACT]
    progress(f"{precision}: stage 2")
    want = train("stage 2", script, *job)
    results = [result_of("stage 2", 1, precision, want, want)]
    script[2] = "stage3_mpi_cuda.train_gpt2"
    for ranks, flags in cases(args.ranks):
        name = " ".join([gpus(ranks), *flags])
        progress(f"{precision}: {name}")
        rows = train(name, [*launch_line(*choose(), ranks), *script[:-1], *flags], *job)
        results.append(result_of(name, ranks, precision, rows, want))
    progress("")
    return results


def result_of(name, ranks, precision, rows, want):
    """The figures of one run's log, compared with the log of stage 2."""
    return {
        "name": name,
        "ranks": ranks,
        "precision": precision,
        "difference": first_difference(rows, want),
        "largest_deviation": max(abs(row["loss"] / one["loss"] - 1) for row, one in zip(rows, want, strict=True)),
        "median": statistics.median(row["seconds"] for row in rows[SETTLED:] or rows),
        "parameters_sha256": rows[-1]["parameters_sha256"],
        "losses": [row["loss"] for row in rows],
    }


def summarise(results, title):
    """The rows of one table."""
    return [
        {
            title: result["name"],
            "against stage 2": result["difference"] or "equal",
            "largest loss deviation": f"{result['largest_deviation']:.1e}",
            "ms/step": f"{1e3 * result['median']:.3f}",
            "last loss": f"{result['losses'][-1]:.6f}",
            "parameters_sha256": result["parameters_sha256"][:12],
        }
        for result in results
    ]


def verdict(results):
    """(whether all requirements hold, a sentence)."""
    exact = [result for result in results[1:] if EXACT in result["name"]]
    equal = sum(result["difference"] is None for result in exact)
    furthest, bound = max(result["largest_deviation"] for result in results), TOLERANCE[results[0]["precision"]]
    words = f"{equal} of {len(exact)} runs have losses, gradient norms and final parameters bit-identical to stage 2's"
    return (
        equal == len(exact) and furthest < bound,
        f"{words}; the largest deviation of a loss in any run is {furthest:.1e} (target {bound})",
    )


def parser():
    parser = argparse.ArgumentParser(prog=f"python -m {BENCHMARK}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="paper", help="model (default paper)")
    add("--precision", choices=("fp32", "tf32", "bf16"), nargs="+", default=["fp32", "bf16"], help="one table each")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of GPUs, one rank each (default 1 2 4)")
    add("--steps", type=int, default=50, help="steps of each run (default 50)")
    add("--timeout", type=int, default=300, help="seconds that one run may take (default 300)")
    add_save_flags(add, "parity")
    return parser


def main(argv=None):
    args = parser().parse_args(argv)
    results, good = [], True
    for precision in args.precision:
        of_precision = compare(args, precision)
        print_table(summarise(of_precision, f"{args.preset}, {precision}, {args.steps} steps"))
        kept, sentence = verdict(of_precision)
        print(f"\n{sentence}\n", flush=True)
        good, results = good and kept, results + of_precision
    save(BENCHMARK, results, args, args.save_as)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
