"""How long do the first two commands of a new user take: training `tiny`, and the paper's inference?

The times are of whole processes and include the start of Python.

    python -m benchmarks.cpu.first_run             # the median of three runs
    python -m benchmarks.cpu.first_run --rounds 1  # a quick trial
"""

import sys

from benchmarks.cpu.classroom import measure_all
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import benchmark_parser, save
from benchmarks.harness.result_tables import TABLES
from gpt2core.app.shipped import WEIGHTS
from testing.jobs import ROOT

COMMANDS = {
    "train_gpt2.py --preset tiny": [sys.executable, "train_gpt2.py", "--preset", "tiny", "--no-save"],
    "inference.py (256 + 30 tokens)": [sys.executable, "inference.py", "--weights", str(WEIGHTS)],
}


def main():
    args = benchmark_parser("benchmarks.cpu.first_run", __doc__, rounds=3).parse_args()
    results = measure_all(COMMANDS, args.rounds, ROOT / "stage0_serial")
    seconds = {"seconds": {result["name"]: result["seconds"] for result in results}}
    TABLES["first-run"].print(seconds)
    save(seconds, args)


if __name__ == "__main__":
    run_main(main)
