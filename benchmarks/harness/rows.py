"""Measure the rows of a table in several runs: each run adds rows to the JSON file, and skips those that it contains.

A GPU is often available for a few minutes only. A script gives a name to each row; run_rows() measures the rows that
are missing until the time is over, and saves the file several times a minute.
"""

import json
import statistics
import time
from datetime import UTC, datetime

from benchmarks.harness.report import commit, save
from gpt2core.errors import ConfigError
from stage2_cuda.memory_advice import is_out_of_memory
from testing.jobs import ROOT

SAVE_EVERY = 20  # seconds; saving reads the versions of the hardware, which takes a second


ROW_FLAGS = {  # arguments of add_argument() for each flag of run_rows()
    "only": dict(nargs="+", default=[], metavar="TEXT", help="only rows whose name contains all these texts"),
    "minutes": dict(type=float, default=8, help="start no row after this time; run again for the rest (default 8)"),
    "fresh": dict(action="store_true", help="measure all rows again (default: skip the rows in the file)"),
    "dry_run": dict(action="store_true", help="print the names of the rows that would be measured"),
}


def rows_path(args, suffix=".json"):
    """The path of the file that save() would write, with another suffix for a figure of its rows."""
    group = args.benchmark.split(".")[-2]
    return ROOT / ("" if args.save else "out") / "results" / group / f"{args.save_as}{suffix}"


def saved_rows(args):
    """The rows of the file that save() would write; [] if there is none."""
    path = rows_path(args)
    return json.loads(path.read_text())["results"] if path.exists() else []


def run_rows(args, cases):
    """Measure the cases {name: function} that are missing; returns all rows of the file, in the order of `cases`.

    A function returns a dictionary of results. If the GPU's memory is too small, the row has oom=True instead.
    """
    end, rows = time.monotonic() + 60 * args.minutes, {row["name"]: row for row in saved_rows(args)}
    wanted = [name for name in cases if all(text in name for text in args.only) and (args.fresh or name not in rows)]
    if args.only and not any(all(text in name for text in args.only) for name in cases):
        raise ConfigError(f"--only {' '.join(args.only)}: in none of the rows, whose names --dry-run prints")
    if args.dry_run:
        print(*wanted, f"{len(wanted)} rows", sep="\n")
        wanted = []
    saved_at, unsaved, order = time.monotonic(), False, list(dict.fromkeys([*cases, *rows]))

    def save_rows():
        save([rows[each] for each in order if each in rows], args)

    try:
        for number, name in enumerate(wanted, 1):
            result = measured(cases[name])
            rows[name], unsaved = {"name": name, **result, **stamp(args)}, True
            print(f"{name}: {result}", flush=True)
            if time.monotonic() > end and number < len(wanted):
                missing = len(wanted) - number
                print(f"{args.minutes:g} minutes are over: {missing} rows are missing; run the command again")
                break
            if time.monotonic() > saved_at + SAVE_EVERY:
                save_rows()
                saved_at, unsaved = time.monotonic(), False
    finally:  # also after an error
        if unsaved:
            save_rows()
    return [rows[name] for name in cases if name in rows]


def measured(function):
    """function(), or {"oom": True} if the memory of the GPU is too small."""
    import torch

    try:
        return function()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError, an error of CUDA, or CuPy's error
        if not is_out_of_memory(error):
            raise
        return {"oom": True}
    finally:
        torch.cuda.empty_cache()


def stamp(args):
    return {"commit": args.commit or commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def mean_and_deviation(samples):
    """{"mean", "std", "n"} of a list of numbers; std: the standard deviation of the sample."""
    deviation = statistics.stdev(samples) if len(samples) > 1 else 0.0
    return {"mean": statistics.fmean(samples), "std": deviation, "n": len(samples)}
