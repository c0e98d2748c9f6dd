"""The rows of one table of benchmarks/torch, written one by one, so that a run that is cut short can be continued.

GPU time comes in short pieces. A command measures the cases that its file does not have yet, begins no case after
--minutes, and writes each row at once. A case that needs too much memory is a row, too.
"""

import argparse
import contextlib
import io
import json
import re
import statistics
import time

from benchmarks.harness.jobs import ROOT
from benchmarks.harness.report import add_save_flags, print_table, save

TOO_LARGE = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory", re.I)


def add_flags(add, name, warm_up, repeats):
    """The flags of every command of benchmarks/torch; `name`: the default file name."""
    add("--warm-up", type=int, default=warm_up, help=f"runs before the measurement (default {warm_up})")
    add("--repeats", type=int, default=repeats, help=f"measured runs of each case (default {repeats})")
    add("--only", default="", help="measure only the cases whose name contains this text")
    add("--fresh", action="store_true", help="measure everything again (default: only what the file does not have)")
    add("--minutes", type=float, default=8, help="begin no case after this time, in minutes (default 8)")
    add_save_flags(add, name)


def parser_of(module, doc):
    return argparse.ArgumentParser(prog=f"python -m {module}", description=doc.splitlines()[0])


class Rows:
    """The rows {"case": name, ...} of a table: those of the file, then those that are added."""

    def __init__(self, benchmark, args):
        self.benchmark, self.args, self.began = benchmark, args, time.monotonic()
        self.path = path_of(benchmark, args.save_as, args.save)
        self.rows = [] if args.fresh else read_rows(self.path)

    def missing(self, names):
        """Yield the names of --only that have no row, until --minutes have passed."""
        done = {row["case"] for row in self.rows}
        for name in names:
            if self.args.only in name and name not in done:
                if time.monotonic() - self.began > 60 * self.args.minutes:
                    print(f"{self.args.minutes:g} minutes have passed: run the same command again for {name} and on")
                    return
                yield name

    def add(self, name, **values):
        """Append a row and write the file."""
        self.rows.append({"case": name, **values})
        with contextlib.redirect_stdout(io.StringIO()):
            self.save()
        print(f"{name}: {', '.join(f'{key} {text_of(value)}' for key, value in values.items())}", flush=True)

    def save(self):
        return save(self.benchmark, {"rows": self.rows}, self.args, self.args.save_as)

    def print(self):
        """Print the table; columns that a row lacks are empty."""
        if not self.rows:
            raise SystemExit("no case was measured: see --only")
        columns = dict.fromkeys(key for row in self.rows for key in row)
        print()
        print_table([{key: text_of(row.get(key, "")) for key in columns} for row in self.rows])


def path_of(benchmark, name, saved):
    """The file that save() writes."""
    folder = ROOT / "results" if saved else ROOT / "out" / "results"
    return folder / benchmark.split(".")[-2] / f"{name}.json"


def read_rows(path):
    """The rows of a file, or none."""
    return json.loads(path.read_text())["results"]["rows"] if path.exists() else []


def text_of(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def mean_and_deviation(samples, scale=1.0):
    """(mean, standard deviation) of samples, both multiplied by `scale`."""
    return scale * statistics.mean(samples), scale * (statistics.stdev(samples) if len(samples) > 1 else 0.0)


def attempt(rows, name, measure):
    """Add the row of measure() -> its values; a row that says so if there is too little memory; return the values."""
    try:
        values = measure()
    except Exception as error:
        if not TOO_LARGE.search(str(error)):
            raise
        values = {"note": "out of memory"}
    rows.add(name, **values)
    return values
