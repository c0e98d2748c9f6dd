"""How long does a newcomer wait? Two whole commands as processes: training `tiny`, and the paper's inference."""

import argparse
import statistics
import subprocess
import sys
import time

from benchmarks.harness.contenders import ROOT, print_table, run, save

COMMANDS = {
    "train_gpt2.py --preset tiny": [sys.executable, "train_gpt2.py", "--preset", "tiny"],
    "inference.py (256 + 30 tokens)": [sys.executable, "inference.py"],
}


def seconds(command):
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT / "stage0_serial", check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default 3)")
    args = parser.parse_args()
    results = {name: [] for name in COMMANDS}
    for _ in range(args.rounds):
        for name, command in COMMANDS.items():
            results[name].append(seconds(command))
    print_table([{"command": name, "seconds": f"{statistics.median(each):.2f}"} for name, each in results.items()])
    save("benchmarks.cpu.first_run", results)


if __name__ == "__main__":
    run(main)
