"""Is the loss curve of every number of ranks, every --dp and every --zero bit-identical to that of one process?

python -m benchmarks.ranks.parity                                       # all numbers of ranks
python -m benchmarks.ranks.parity --presets tiny --ranks 1 2 --steps 5  # a quick trial
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.harness.processes import progress, run_main, run_to_end
from benchmarks.harness.report import benchmark_parser, print_table, save
from gpt2core.app.output.run_log import read_log
from gpt2core.parallel.data_parallel import STRATEGIES
from stage1_mpi.launch import choose, launch_line

STEPS = {"tiny": 50, "paper": 6}
BUCKET = {"tiny": ("--bucket-mb", "0.1"), "paper": ()}  # one default bucket would contain all gradients of `tiny`
COMPARED = "loss", "grad_norm", "parameters_sha256"  # fields of each step's log line; only the last line has the hash
FEW = "flat", "bucket"  # without --all, the runs of `paper` on more or less than two ranks use only these strategies


def cases(ranks, preset, everything):
    """The values (--dp, --zero) of the runs on `ranks` ranks. everything: the flag --all."""
    all_strategies = everything or preset == "tiny" or ranks == 2
    return [(dp, zero) for dp in STRATEGIES if all_strategies or dp in FEW for zero in (0, 1)]


def train(name, command, preset, steps, timeout):
    """Run one training; return its log, a list with one dictionary per step. The last one has the parameters' hash."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        flags = ["--preset", preset, "--steps", str(steps), "--sample", "0", "--log", str(log), "--no-save"]
        run_to_end(f"{preset}, {name}", [*command, *flags], blas_threads=1, timeout=timeout)
        return read_log(log)


def first_difference(log, expected):
    """The first step and field in which two logs differ, as text, or None if they are bit-identical."""
    if len(log) != len(expected):
        return f"{len(log)} of {len(expected)} steps"
    for line, wanted in zip(log, expected, strict=True):
        for field in COMPARED:
            if line.get(field) != wanted.get(field):
                return f"step {wanted['step']}, {field}: {line.get(field)} instead of {wanted.get(field)}"
    return None


def compare(args, preset):
    """Run one preset in all cases; return the losses and hash of stage 0, and first_difference() of each other run."""
    common = preset, args.steps or STEPS[preset], args.timeout
    one_thread = ("--threads", "1")
    serial = train("stage 0", [sys.executable, "-m", "stage0_serial.train_gpt2", *one_thread], *common)
    mpiexec, results = choose(), []
    for ranks in args.ranks:
        for dp, zero in cases(ranks, preset, args.all):
            name = f"{ranks} ranks, --dp {dp} --zero {zero}"
            progress(f"{preset}: {name}")
            line = [*launch_line(*mpiexec, ranks), sys.executable, "-m", "stage1_mpi.train_gpt2", *one_thread]
            log = train(name, [*line, "--dp", dp, "--zero", str(zero), *BUCKET[preset]], *common)
            results.append({"ranks": ranks, "dp": dp, "zero": zero, "difference": first_difference(log, serial)})
    progress("")
    return {"losses": [line["loss"] for line in serial], "hash": serial[-1]["parameters_sha256"], "runs": results}


def main():
    parser = benchmark_parser("benchmarks.ranks.parity", __doc__)
    add = parser.add_argument
    add("--presets", choices=STEPS, nargs="+", default=list(STEPS), help="models (default tiny paper)")
    parser.add_flags(ranks=[1, 2, 4, 8], timeout=300)
    add("--steps", type=int, help="steps of each run (default 50 of tiny, 6 of paper)")
    add("--all", action="store_true", help="run every --dp of paper on every number of ranks, not only on two")
    args = parser.parse_args()

    results = {preset: compare(args, preset) for preset in args.presets}
    for preset, of_preset in results.items():
        title = f"{preset}, {len(of_preset['losses'])} steps"
        print_table(
            [
                {
                    title: f"{run['ranks']} ranks, --dp {run['dp']} --zero {run['zero']}",
                    "compared with stage 0": run["difference"] or "equal",
                }
                for run in of_preset["runs"]
            ]
        )
        print()
    runs = [run for of_preset in results.values() for run in of_preset["runs"]]
    different = [run for run in runs if run["difference"]]
    equal = f"{len(runs) - len(different)} of {len(runs)} runs"
    print(f"{equal} have losses, gradient norms and final parameters bit-identical to those of stage 0")
    save("benchmarks.ranks.parity", results, args)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
