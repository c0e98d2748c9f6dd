"""Does the loss follow the paper's serial run, and is the curve bit-identical for every number of threads?"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.jobs import ROOT
from benchmarks.harness.processes import run_main
from benchmarks.harness.report import add_save_flags, print_table, save
from benchmarks.paper import LOSSES, paper_curves
from gpt2core.app.loss_plot import Curve, write_plot
from gpt2core.app.run_log import read_log

PAPER = LOSSES["serial"]


def train(threads):
    """The log rows of the default run on `threads` threads."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        command = [sys.executable, "-m", "stage0_serial.train_gpt2", "--threads", str(threads), "--log", str(log)]
        subprocess.run([*command, "--sample", "0"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return read_log(log)


def beside_the_paper(losses):
    """The Curves of the paper's four programs and of our losses."""
    return [*paper_curves(), Curve("stage 0, NumPy", list(range(len(losses))), losses, {"color": "C0"})]


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.curve", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default 1 2)")
    add_save_flags(parser.add_argument)
    args = parser.parse_args()
    logs = {threads: train(threads) for threads in args.threads}
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
    results = {"losses": losses, "deviations": deviations, "hashes": hashes, "equal": same}
    path = save("benchmarks.cpu.curve", results, args)
    write_plot(beside_the_paper(losses), "Preset paper: stage 0 and the paper's programs", path.with_suffix(".png"))
    return 0 if same and abs(deviations[worst]) < 0.25 else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
