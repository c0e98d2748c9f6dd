"""Is the loss curve of every number of ranks, every --dp and every --zero bit-identical to that of one process?"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.processes import progress, run_main, run_to_end
from benchmarks.harness.report import add_save_flags, print_table, save
from gpt2core.app.run_log import read_log
from gpt2core.parallel.data_parallel import STRATEGIES
from stage1_mpi.launch import choose, launch_line

STEPS = {"tiny": 50, "paper": 6}
BUCKET = {"tiny": ("--bucket-mb", "0.1"), "paper": ()}  # the default bucket would hold all of `tiny`
COMPARED = "loss", "grad_norm", "parameters_sha256"  # in every step; the hash is in the last row only
FEW = "flat", "bucket"  # the strategies that `paper` runs at other than two ranks without --all


def cases(ranks, preset, everything):
    """(dp, zero) of the runs at `ranks` ranks."""
    every = everything or preset == "tiny" or ranks == 2
    return [(dp, zero) for dp in STRATEGIES if every or dp in FEW for zero in (0, 1)]


def train(name, command, preset, steps, timeout):
    """The log rows of one training run; the last has the hash of the parameters."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        flags = ["--preset", preset, "--steps", str(steps), "--sample", "0", "--log", str(log)]
        run_to_end(f"{preset}, {name}", [*command, *flags], blas_threads=1, timeout=timeout)
        return read_log(log)


def first_difference(rows, expected):
    """The first step and field in which two logs differ, as text, or None if they are bit-identical."""
    if len(rows) != len(expected):
        return f"{len(rows)} of {len(expected)} steps"
    for row, wanted in zip(rows, expected, strict=True):
        for field in COMPARED:
            if row.get(field) != wanted.get(field):
                return f"step {wanted['step']}, {field}: {row.get(field)} instead of {wanted.get(field)}"
    return None


def compare(args, preset):
    """Run one preset in all cases; return stage 0's losses and hash and the difference of each run."""
    job = preset, args.steps or STEPS[preset], args.timeout
    single = ("--threads", "1")
    serial = train("stage 0", [sys.executable, "-m", "stage0_serial.train_gpt2", *single], *job)
    mpiexec, results = choose(), []
    for ranks in args.ranks:
        for dp, zero in cases(ranks, preset, args.all):
            name = f"{ranks} ranks, --dp {dp} --zero {zero}"
            progress(f"{preset}: {name}")
            line = [*launch_line(*mpiexec, ranks), sys.executable, "-m", "stage1_mpi.train_gpt2", *single]
            rows = train(name, [*line, "--dp", dp, "--zero", str(zero), *BUCKET[preset]], *job)
            results.append({"ranks": ranks, "dp": dp, "zero": zero, "difference": first_difference(rows, serial)})
    progress("")
    return {"losses": [row["loss"] for row in serial], "hash": serial[-1]["parameters_sha256"], "runs": results}


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks.parity", description=__doc__)
    add = parser.add_argument
    add("--presets", choices=STEPS, nargs="+", default=list(STEPS), help="models (default tiny paper)")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="ranks, one thread each (default 1 2 4 8)")
    add("--steps", type=int, help="steps of each run (default 50 of tiny, 6 of paper)")
    add("--all", action="store_true", help="run every --dp of paper at every number of ranks, not only at two")
    add("--timeout", type=int, default=300, help="seconds that one run may take (default 300)")
    add_save_flags(add)
    args = parser.parse_args()

    results = {preset: compare(args, preset) for preset in args.presets}
    for preset, of_preset in results.items():
        title = f"{preset}, {len(of_preset['losses'])} steps"
        print_table(
            [
                {
                    title: f"{one['ranks']} ranks, --dp {one['dp']} --zero {one['zero']}",
                    "against stage 0": one["difference"] or "equal",
                }
                for one in of_preset["runs"]
            ]
        )
        print()
    runs = [one for of_preset in results.values() for one in of_preset["runs"]]
    different = [one for one in runs if one["difference"]]
    equal = f"{len(runs) - len(different)} of {len(runs)} runs"
    print(f"{equal} have losses, gradient norms and final parameters bit-identical to those of stage 0")
    save("benchmarks.ranks.parity", results, args)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(run_main(main))
