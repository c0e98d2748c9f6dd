"""Do the losses of a run of thousands of steps follow PyTorch's, with the same data and the same initial weights?

Both train the same model in bf16 with the same batches in the same order, the same learning rates and the same initial
weights, and validate on the same tokens. data/README.md has the commands that prepare a text of 8.4 million tokens.

    python -m benchmarks.gpu.real_run --data out/english  # 29 million parameters, 49 million tokens, on one GPU
    python -m benchmarks.gpu.real_run --stage 0 --peers eager --steps 20 --n-embd 64 --seq-len 32  # a trial on a CPU
"""

import functools
import os
import statistics
import time
from dataclasses import replace
from itertools import pairwise

from benchmarks.gpu.step import OURS, PEERS
from benchmarks.harness.processes import BenchmarkProcess, ProcessSpec, progress
from benchmarks.harness.report import save
from benchmarks.harness.result_tables import TABLES
from benchmarks.harness.script import benchmark
from benchmarks.harness.training_runs import train
from gpt2core.app.output.loss_plot import Curve, write_plot
from gpt2core.app.shipped import BOOK, TOKENIZERS
from gpt2core.architecture import parameter_count
from gpt2core.data import Windows
from gpt2core.optimizer import Schedule
from gpt2core.presets import PRESETS
from gpt2core.text.token_file import split_validation
from gpt2core.text.token_files import has_tokenizer, load_tokens
from testing.jobs import ROOT

BENCHMARK = "benchmarks.gpu.real_run"
SEED = 0
# {stage: (package, precision, device of PyTorch)}
STAGES = {0: ("stage0_serial", "fp32", "cpu"), 2: ("stage2_cuda", "bf16", "cuda")}
AVERAGED = 10  # training losses of this many steps are one point of the curve
# lr, min_lr: the first and the last rate of the cosine; warmup: steps before it
RECIPE = dict(n_layer=8, n_head=8, lr=1e-3, min_lr=1e-4, warmup=200, val_fraction=0.02)


def prepare(module, recipe, device, **options):
    """Called in the process of PyTorch. Return train(steps), which trains as `recipe` says, on `device`."""

    def train(steps=recipe["steps"]):
        tokens, tokenizer = load_tokens(recipe["data"], None if has_tokenizer(recipe["data"]) else TOKENIZERS["book"])
        training, validation = split_validation(tokens, recipe["val_fraction"])
        T, B = recipe["seq_len"], recipe["batch_size"]
        config = model_config(recipe, tokenizer.vocab_size)
        schedule = Schedule("cosine", recipe["lr"], recipe["min_lr"], recipe["warmup"], steps)
        run = module.RealRun(config, B, T, SEED, device, **options)
        windows = Windows(training, T, "shuffled", SEED)
        curves = run(windows, Windows(validation, T), schedule, steps, recipe["eval_every"])
        return curves | {"parameters": parameter_count(config)}

    return train


def model_config(recipe, vocab_size):
    sizes = {name: recipe[name] for name in ("n_layer", "n_head", "n_embd")}
    return replace(PRESETS["book"], vocab_size=vocab_size, block_size=recipe["seq_len"], **sizes)


def train_ours(recipe, stage, timeout):
    """Run train_gpt2.py of a stage; return its curves, as RealRun does."""
    package, precision, _ = STAGES[stage]
    flags = {"preset": "book", "block_size": recipe["seq_len"], "precision": precision, "seed": SEED}
    flags |= {"schedule": "cosine", "clip": 1.0, "weight_decay": 0.1, "beta2": 0.95, **recipe}
    rows, _ = train(OURS, package, timeout, ["--shuffle"], **flags)
    ends = [row["step"] for row in rows if "val_loss" in row]
    parts = [rows[first + 1 : last + 1] for first, last in pairwise([-1, *ends])]
    return {
        "losses": [row["loss"] for row in rows],
        "val_losses": [[row["step"], row["val_loss"]] for row in rows if "val_loss" in row],
        "seconds": [statistics.fmean(row["seconds"] for row in part) for part in parts],
    }


def train_torch(recipe, peer, stage, timeout):
    """Train PyTorch's program `peer` in a process of its own; return its curves, and "parameters"."""
    (_, precision, device), (title, options) = STAGES[stage], PEERS[peer]
    options = {"recipe": recipe, "device": device, "precision": precision, **options}
    spec = ProcessSpec(title, "benchmarks.peers.torch_real_run", 4, options)
    with BenchmarkProcess(spec, BENCHMARK, timeout) as process:
        return process.run_round(steps=recipe["steps"])


def result(name, recipe, train):
    """The row of one program in the results file; train(): returns its curves."""
    progress(name)
    started = time.perf_counter()
    curves = train()
    wall_seconds = time.perf_counter() - started
    progress("")
    losses, every = curves["losses"], recipe["eval_every"]
    points = [losses[first : first + AVERAGED] for first in range(0, len(losses), AVERAGED)]
    return {
        "name": name,
        "recipe": recipe,
        "parameters": curves.get("parameters"),
        "tokens": recipe["steps"] * recipe["batch_size"] * recipe["seq_len"],
        "seconds": [curves["seconds"]],  # per step, of the steps between two validations
        "wall_seconds": wall_seconds,  # of the whole program, with its start, compilation and validation
        "first_loss": losses[0],
        "losses": [round(statistics.fmean(point), 5) for point in points],
        "final_loss": statistics.fmean(losses[-every:]),
        "val_losses": curves["val_losses"],
        "final_val_loss": curves["val_losses"][-1][1],
    }


def compare(results):
    """Add to each result of PyTorch how far the losses of this project are from its losses."""
    ours, *peers = results
    for peer in peers:
        ours["parameters"] = peer["parameters"]
        pairs = list(zip(ours["val_losses"], peer["val_losses"], strict=True))
        peer["val_difference"] = ours["final_val_loss"] - peer["final_val_loss"]
        peer["largest_val_difference"] = max(abs(mine - theirs) for (_, mine), (_, theirs) in pairs)
        peer["difference"] = ours["final_loss"] - peer["final_loss"]


def curves_of(results):
    """The Curves of the picture: training and validation of each result."""
    curves = []
    for number, row in enumerate(results):
        style = {"color": f"C{number}", "linestyle": "-" if row["name"] == OURS else "--"}
        steps = [AVERAGED * point + AVERAGED / 2 for point in range(len(row["losses"]))]
        curves.append(Curve(f"{row['name']}, training", steps, row["losses"], style | {"linewidth": 0.6}))
        steps, losses = zip(*row["val_losses"], strict=True)
        curves.append(Curve(f"{row['name']}, validation", steps, losses, style | {"marker": "."}))
    return curves


CHOICES = [peer for peer, (_, options) in PEERS.items() if options.get("graph") != "trees"]


@benchmark(
    common=dict(batch_size=64, seq_len=256, steps=3000, eval_every=100, timeout=300),
    data=dict(
        default=os.path.relpath(BOOK, ROOT), help="output of data/prepare.py, or a text file (default: the book)"
    ),
    stage=dict(type=int, choices=STAGES, default=2, help="2: bf16 on a GPU (default). 0: fp32 on the CPU, for a trial"),
    peers=dict(
        choices=CHOICES, nargs="+", default=["compiled", "graph"], help="see gpu/step.py (default compiled graph)"
    ),
    n_embd=dict(type=int, default=512, help="channels (default 512)"),
)
def main(args):
    names = "data", "n_embd", "seq_len", "batch_size", "steps", "eval_every"
    recipe = RECIPE | {name: getattr(args, name) for name in names}

    results = [result(OURS, recipe, functools.partial(train_ours, recipe, args.stage, args.timeout))]
    for peer in args.peers:
        train = functools.partial(train_torch, recipe, peer, args.stage, args.timeout)
        results.append(result(PEERS[peer][0], recipe, train))
        compare(results)
        path = save(results, args)  # after each program: an interrupted run keeps its results
    TABLES["gpu-real-run"].print(results)
    title = f"{results[0]['parameters'] / 1e6:.1f} M parameters, {results[0]['tokens'] / 1e6:.1f} M tokens"
    write_plot(curves_of(results), title, path.with_suffix(".png"))
