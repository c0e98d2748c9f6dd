"""Does the loss follow the paper's serial run, and is the curve bit-identical for every number of threads?"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.jobs import ROOT
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import add_save_flags, print_table, save
from gpt2core.app.run_log import read_log

# Table 2, column "Serial Loss", of "Distributed GPT-2" (Sahdev, Mathews, Guerrero): 50 steps of preset `paper`.
PAPER = """
5.168034 4.835179 4.635695 4.498031 4.307395 4.116387 3.955092 3.768782 3.616539 3.425641
3.287244 3.151229 2.972546 2.845131 2.692842 2.594075 2.459776 2.358055 2.234961 2.140623
2.057503 1.959350 1.889150 1.808680 1.731022 1.663653 1.595727 1.549898 1.486133 1.449035
1.384689 1.346302 1.317822 1.268267 1.242517 1.204523 1.169466 1.147755 1.106339 1.098106
1.058793 1.052256 1.019223 0.994312 0.997309 0.956744 0.957396 0.929843 0.910516 0.908195
"""
PAPER = [float(loss) for loss in PAPER.split()]


def train(threads, plot):
    """The log rows of the default run on `threads` threads; the curve is drawn to the file `plot`."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        command = [sys.executable, "-m", "stage0_serial.train_gpt2", "--threads", str(threads), "--log", str(log)]
        command += ["--plot", str(plot), "--sample", "0"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return read_log(log)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.curve", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts to compare (default 1 2)")
    add_save_flags(parser.add_argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plot = Path(scratch, "curve.png") if args.no_save else ROOT / "results" / "cpu" / "curve.png"
        logs = {threads: train(threads, plot) for threads in args.threads}
    losses = [row["loss"] for row in next(iter(logs.values()))]
    deviations = [ours / theirs - 1 for ours, theirs in zip(losses, PAPER, strict=True)]
    print_table(
        [
            {"step": step, "paper": f"{PAPER[step]:.3f}", "ours": f"{losses[step]:.3f}", "": f"{deviations[step]:+.1%}"}
            for step in (*range(0, 50, 5), 49)
        ]
    )
    worst = max(range(50), key=lambda step: abs(deviations[step]))
    print(f"\nlargest deviation from the paper: step {worst}: {deviations[worst]:+.1%}")
    hashes = {threads: rows[-1]["parameters_sha256"] for threads, rows in logs.items()}
    same = len({(*(row["loss"] for row in rows), hashes[threads]) for threads, rows in logs.items()}) == 1
    print(f"losses and parameters at {args.threads} threads: {'bit-identical' if same else 'DIFFERENT'}")
    if not args.no_save:
        results = {"losses": losses, "deviations": deviations, "hashes": hashes, "equal": same}
        save("benchmarks.cpu.curve", results, args.commit)
    return 0 if same and abs(deviations[worst]) < 0.25 else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
