"""Do all stages compute the same? One table of the parity ladder, for every stage that this machine can run.

If a rung fails, a line below the table says at which step, layer, operation and tensor the first difference is. A rung
that this machine cannot run is a grey row with its reason. The exit code is 1 if a rung fails.

    python -m benchmarks.parity                             # all stages
    python -m benchmarks.parity --only kernels-0 kernels-2  # two rungs
    python -m benchmarks.parity --full                      # the paper's 50 steps
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.harness.processes import progress
from benchmarks.harness.report import nvidia_smi
from benchmarks.harness.script import benchmark
from benchmarks.parity.rungs import RUNGS, Outcome
from gpt2core.errors import ConfigError

if not nvidia_smi("name"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

FIRST_ROW = '[\n {\n  "rung": '  # the first characters of a file of --json
GREY, RED, RESET = "\033[90m", "\033[31m", "\033[0m"


def row_of(rung, options):
    """Run a rung; return its row. An exception is a failure."""
    progress(f"{rung.name}: {rung.compared}")
    started, reason = time.perf_counter(), rung.reason()
    try:
        outcome = Outcome(False, reason) if reason else rung.run(options)
    except Exception as error:  # whatever a kernel that is being developed may raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        last = f" ... {lines[-1]}" if len(lines) > 1 else ""
        outcome = Outcome(False, text, f"not found, because the run raised {text}{last}")
    progress("")
    row = {"rung": rung.name, "compared": rung.compared, "tolerance": rung.tolerance}
    row["result"] = "not run" if reason else "passed" if outcome.passed else "FAILED"
    seconds = round(time.perf_counter() - started, 1)
    return row | {"measured": outcome.measured, "found": outcome.found, "seconds": seconds}


def print_row(row):
    """Print one row of the table; grey if it did not run, red if it failed. Colours only on a terminal."""
    cells = [row["rung"].ljust(11), row["result"].ljust(7), f"{row['seconds']:6.1f} s", row["compared"].ljust(62)]
    text = "  ".join([*cells, f"{row['tolerance']}: {row['measured']}"])
    colour = {"not run": GREY, "FAILED": RED}.get(row["result"]) if sys.stdout.isatty() else None
    print(f"{colour}{text}{RESET}" if colour else text, flush=True)


def check_json(path):
    """Raise ConfigError if the rows cannot be written to `path`, or if it is another file."""
    try:
        with open(path, "a+", encoding="utf-8") as file:
            file.seek(0)
            start = file.read(len(FIRST_ROW))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--json {path}: cannot be written ({error}): choose another file") from None
    if start and start != FIRST_ROW:
        raise ConfigError(f"--json {path}: is not a file of this program: choose another file")


NAMES = [rung.name for rung in RUNGS]


@benchmark(
    saves=False,
    measures_time=False,
    full=dict(action="store_true", help="the paper's 50 steps in the rungs of the scripts (default: a small size)"),
    only=dict(nargs="+", choices=NAMES, metavar="RUNG", default=NAMES, help=f"only these rungs: {', '.join(NAMES)}"),
    steps=dict(
        type=int,
        metavar="N",
        help="steps of the small training runs in which the first difference is searched (default 1 to 3; --full: 10)",
    ),
    timeout=dict(type=int, default=900, help="seconds that one run of a script may take (default 900)"),
    json=dict(type=Path, metavar="FILE", help="also write the rows to this file (default: no file)"),
)
def main(options):
    rows = []
    if options.json:
        check_json(options.json)
    for rung in RUNGS:
        if rung.name in options.only:
            rows.append(row_of(rung, options))
            print_row(rows[-1])
    for row in rows:
        if row["found"]:
            print(f"\n{row['rung']}: {row['measured']}\nfirst difference: {row['found']}")
    ran = [row for row in rows if row["result"] != "not run"]
    failed = [row for row in ran if row["result"] == "FAILED"]
    print(f"\n{len(ran) - len(failed)} of {len(ran)} rungs passed, {len(rows) - len(ran)} not run", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0
