"""What do the order of the sequences and compressed gradients change in the validation loss of a training?

Two ranks train preset `tiny` on Moby-Dick with each order and each --compress, from the same initial weights. The last
2 % of the book are for validation.

    python -m benchmarks.ranks.convergence                                       # all runs with two seeds
    python -m benchmarks.ranks.convergence --steps 20 --eval-every 10 --seeds 0  # a quick trial
"""

import statistics

from benchmarks.harness.report import save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.script import benchmark
from benchmarks.harness.training_runs import train as train_gpt2
from gpt2core.app.output.loss_plot import Curve, write_plot
from gpt2core.app.shipped import BOOK, TOKENIZERS

BASE = "--shuffle"  # the run with which the others are compared
ORDERS = {"in order": ("--no-shuffle",), BASE: ("--shuffle",), "--local-shuffle": ("--local-shuffle",)}
CODES = {f"--shuffle --compress {code}": ("--shuffle", "--compress", code) for code in ("fp16", "bf16", "int8")}
RUNS = ORDERS | CODES  # {name: flags}
RECIPE = "--preset tiny --threads 1 --schedule cosine --warmup 20 --clip 1 --val-fraction 0.02"


def train(name, args, seed):
    """The log of one run, a list with one dictionary for each step."""
    flags = dict(data=BOOK, tokenizer=TOKENIZERS["book"], seed=seed, steps=args.steps, eval_every=args.eval_every)
    words = [*RECIPE.split(), *RUNS[name]]
    return train_gpt2(f"{name}, seed {seed}", "stage1_mpi", args.timeout, words, args.ranks, **flags)[0]


def result(name, logs):
    """The row of one run in the results file; logs: one for each seed. "val_losses" are means over the seeds."""
    curves = [[row["val_loss"] for row in log if "val_loss" in row] for log in logs]
    steps = [row["step"] for row in logs[0] if "val_loss" in row]
    means = [statistics.fmean(losses) for losses in zip(*curves, strict=True)]
    return {
        "name": name,
        "val_losses": [list(pair) for pair in zip(steps, means, strict=True)],
        "final_val_losses": [curve[-1] for curve in curves],  # of each seed
        "final_val_loss": means[-1],
    }


def compare(results):
    """Add to each result its mean difference from BASE with the same seed, and the largest one of a seed."""
    base = next(row["final_val_losses"] for row in results if row["name"] == BASE)
    for row in results:
        if row["name"] != BASE:
            differences = [own - other for own, other in zip(row["final_val_losses"], base, strict=True)]
            row["difference"], row["largest_difference"] = statistics.fmean(differences), max(differences, key=abs)


@benchmark(
    common=dict(ranks=2, steps=400, eval_every=100, timeout=600),
    seeds=dict(type=int, nargs="+", default=[0, 1], help="seeds of the weights and orders (default 0 1)"),
)
def main(args):
    results = [result(name, [train(name, args, seed) for seed in args.seeds]) for name in RUNS]
    compare(results)
    TABLES["ranks-convergence"].print(results)
    path = save(results, args)
    curves = [Curve(row["name"], *zip(*row["val_losses"], strict=True), {"marker": "."}) for row in results]
    write_plot(curves, f"validation loss, {args.ranks} ranks, mean of the seeds", path.with_suffix(".png"))
