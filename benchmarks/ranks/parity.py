"""Is the loss curve of every number of ranks, every --dp and every --zero bit-identical to that of one process?

python -m benchmarks.ranks.parity                                       # all numbers of ranks
python -m benchmarks.ranks.parity --presets tiny --ranks 1 2 --steps 5  # a quick trial
"""

from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser, save
from benchmarks.harness.table_format import Table
from benchmarks.harness.training_runs import train
from gpt2core.parallel.data.strategies import STRATEGIES

STEPS = {"tiny": 50, "paper": 6}
BUCKET = {"tiny": {"bucket_mb": 0.1}, "paper": {}}  # one default bucket would contain all gradients of `tiny`
COMPARED = "loss", "grad_norm", "parameters_sha256"  # fields of each step's log line; only the last line has the hash
FEW = "flat", "bucket"  # the runs of `paper` on more or less than two ranks use only these strategies


def cases(ranks, preset):
    """The values (--dp, --zero) of the runs on `ranks` ranks."""
    return [(dp, zero) for dp in (STRATEGIES if preset == "tiny" or ranks == 2 else FEW) for zero in (0, 1)]


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
    """Run one preset in all cases; return the losses and hash of stage 0, and first_difference() of each other run.

    Also a row of the table "parity" of docs/RESULTS.md as "summary".
    """
    common = dict(timeout=args.timeout, preset=preset, steps=args.steps or STEPS[preset], threads=1)
    (serial, _), results = train(f"{preset}, stage 0", "stage0_serial", **common), []
    for ranks in args.ranks:
        for dp, zero in cases(ranks, preset):
            name = f"{ranks} ranks, --dp {dp} --zero {zero}"
            flags = dict(common, dp=dp, zero=zero, **BUCKET[preset])
            log, _ = train(f"{preset}, {name}", "stage1_mpi", ranks=ranks, **flags)
            results.append({"ranks": ranks, "dp": dp, "zero": zero, "difference": first_difference(log, serial)})
    losses, digest = [line["loss"] for line in serial], serial[-1]["parameters_sha256"]
    row = {"title": f"`{preset}`, {len(serial)} steps", "ranks": args.ranks, "runs": len(results), "deviation": 0.0}
    row["equal"] = sum(run["difference"] is None for run in results)
    return {"losses": losses, "hash": digest, "runs": results, "summary": row}


def main():
    parser = benchmark_parser("benchmarks.ranks.parity", __doc__)
    add = parser.add_argument
    add("--presets", choices=STEPS, nargs="+", default=list(STEPS), help="models (default tiny paper)")
    parser.add_flags(ranks=[1, 2, 4, 8], timeout=300)
    add("--steps", type=int, help="steps of each run (default 50 of tiny, 6 of paper)")
    args = parser.parse_args()

    results = {preset: compare(args, preset) for preset in args.presets}
    for preset, of_preset in results.items():
        title = f"{preset}, {len(of_preset['losses'])} steps"
        columns = f"{title} = {{ranks}} ranks, --dp {{dp}} --zero {{zero}}"
        Table("", columns + ' | compared with stage 0 = {row.difference or "equal"}').print(of_preset["runs"])
    runs = [run for of_preset in results.values() for run in of_preset["runs"]]
    different = [run for run in runs if run["difference"]]
    equal = f"{len(runs) - len(different)} of {len(runs)} runs"
    print(f"{equal} have losses, gradient norms and final parameters bit-identical to those of stage 0")
    save({"summary": [of_preset.pop("summary") for of_preset in results.values()], **results}, args)
    return 1 if different else 0


if __name__ == "__main__":
    run_main(main)
