"""Do the losses of stage 0 follow the paper's serial run, and are they bitwise identical for every number of threads?

Runs the default training (preset `paper`, 50 steps) once for each number of threads. The exit code is 1 if a loss
deviates by 25 % or more from the paper's, or if two runs differ in a bit.

    python -m benchmarks.cpu.curve              # with one and with two threads
    python -m benchmarks.cpu.curve --threads 1  # with one thread
"""

from benchmarks.harness.report import save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.script import benchmark
from benchmarks.harness.training_runs import train
from benchmarks.paper import LOSSES, paper_curves
from gpt2core.app.output.loss_plot import Curve, write_plot

PAPER_LOSSES = LOSSES["serial"]
TIMEOUT = 3600  # seconds of one run
MAX_DEVIATION = 0.25  # the relative difference of a loss from the paper's must be smaller


def train_on(threads):
    """Run the default training on `threads` threads; return its log, a list with one dictionary for each step."""
    flags = dict(preset="paper", steps=len(PAPER_LOSSES), threads=threads)
    return train(f"paper, {threads} threads", "stage0_serial", TIMEOUT, **flags)[0]


def curves_with_the_paper(losses):
    """The Curves of the paper's four programs, then that of `losses`."""
    return [*paper_curves(), Curve("stage 0, NumPy", list(range(len(losses))), losses, {"color": "C0"})]


@benchmark(threads=[1, 2])
def main(args):
    logs = {threads: train_on(threads) for threads in args.threads}
    losses = [line["loss"] for line in next(iter(logs.values()))]  # of the first run
    deviations = [ours / theirs - 1 for ours, theirs in zip(losses, PAPER_LOSSES, strict=True)]
    TABLES["cpu-curve"].print({"losses": losses, "deviations": deviations})
    worst_step = max(range(50), key=lambda step: abs(deviations[step]))
    print(f"largest deviation from the paper: step {worst_step}: {deviations[worst_step]:+.1%}")
    hashes = {threads: log[-1]["parameters_sha256"] for threads, log in logs.items()}
    distinct_runs = {(*(line["loss"] for line in log), hashes[threads]) for threads, log in logs.items()}
    bitwise_equal = len(distinct_runs) == 1
    counts = ", ".join(map(str, args.threads))
    print(f"losses and parameters with {counts} threads: {'bitwise identical' if bitwise_equal else 'DIFFERENT'}")
    results = {"losses": losses, "deviations": deviations, "hashes": hashes, "equal": bitwise_equal}
    path = save(results, args)
    title = "Preset paper: stage 0 and the paper's programs"
    write_plot(curves_with_the_paper(losses), title, path.with_suffix(".png"))
    return 0 if bitwise_equal and abs(deviations[worst_step]) < MAX_DEVIATION else 1
