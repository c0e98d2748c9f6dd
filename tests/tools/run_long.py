"""Run the test suite, its random tests with other seeds, and a test with 10,000 changed input files; save the result.

    python tests/tools/run_long.py --rounds 20

Writes results/cpu/test_long.json with date and commit. The exit code is 1 if a test failed; the file then has the names
of the failed tests and the arguments of pytest, which include the seed.
"""

import json
import re
import secrets
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout that contains this file, installed or not

from benchmarks.harness.processes import run_main  # noqa: E402
from benchmarks.harness.report import commit, hardware  # noqa: E402
from gpt2core.app.settings.flag_parser import Parser  # noqa: E402

RECORD = ROOT / "results" / "cpu" / "test_long.json"
RANDOM_TESTS = ("core", "parallel", "text", "stage2")  # folders of tests/ whose tests use new random data in every run
MUTATION_TEST = "tests/app/misuse/test_mutations.py"  # runs commands with randomly changed input files
XDIST_FLAGS = ("-n", "3", "--dist", "loadgroup") if find_spec("xdist") else ()
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)")  # in the last line that pytest prints


def run_round(name, *arguments):
    """Run pytest once with these arguments, and print its output. Returns the result as a dictionary."""
    print(f"== {name}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *XDIST_FLAGS, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return {
        "round": name,
        "arguments": list(arguments),
        "exit_code": process.wait(),
        "seconds": round(time.monotonic() - began, 1),
        "counts": {kind: int(number) for number, kind in COUNT.findall(lines[-1] if lines else "")},
        "failed": [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))],
    }


def main():
    parser = Parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=10, help="runs of the random tests after the whole suite (default 10)")
    add("--mutations", type=int, default=10_000, help="changed input files (default 10,000)")
    add("--no-save", action="store_true", help="do not write results/cpu/test_long.json")
    args = parser.parse_args()
    # The commit is read before the tests run, because it could change while they run.
    record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "hardware": hardware()}
    folders = [f"tests/{folder}" for folder in RANDOM_TESTS]
    rounds = [run_round("the whole suite", "--long")]
    for seed in range(1, args.rounds + 1):
        rounds.append(run_round(f"random tests, seed {seed}", "--hypothesis-seed", str(seed), *folders))
    options = ("--mutations", str(args.mutations), "--mutation-seed", str(secrets.randbits(32)))
    rounds.append(run_round(f"{args.mutations:,} changed input files", *options, MUTATION_TEST))
    if not args.no_save:
        record["command"] = " ".join(["python", "tests/tools/run_long.py", *sys.argv[1:]])
        RECORD.write_text(json.dumps(record | {"results": rounds}, indent=1) + "\n")
        print(f"Written to {RECORD.relative_to(ROOT)}, commit {record['commit']}.")
    return int(any(result["exit_code"] for result in rounds))


if __name__ == "__main__":
    run_main(main, measures_time=False)
