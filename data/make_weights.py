"""Make the shipped weights: train until the corpus is known by heart, then keep 16 bits of every number.

    python data/make_weights.py --threads 8     trains, writes and counts
    python data/make_weights.py --check         counts how many random prompts the weights know

Training resumes from --out where it was interrupted. A prompt counts as known when its greedy continuation is the
corpus's own, token for token.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs uninstalled

import numpy as np

from gpt2core.app.checkpoint_directory import load_checkpoint, save_checkpoint
from gpt2core.app.cli import parse, train_parser
from gpt2core.app.command import run_command
from gpt2core.app.presets import CORPUS, WEIGHTS
from gpt2core.app.train_command import train_command
from gpt2core.communicator import Solo
from gpt2core.model import GPT2
from gpt2core.parallel.threads import Workers, limit_blas
from gpt2core.tensor import no_grad
from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import Tokenizer
from stage0_serial.numpy_backend import NumpyBackend

PROMPT, NEW = 256, 30  # tokens, the paper's inference
# Windows in order start at multiples of 8 only, and then just half of all prompts are known: the second phase starts
# each epoch elsewhere, so that the place of a word in its window says nothing and the text must. The last thing that is
# learned, at about step 1050, is to copy the year.
PHASES = ((600, "--no-shuffle"), (1300, "--shuffle"))


def known(model, tokens, start):
    """Whether the greedy continuation of tokens[start : start + PROMPT] is the corpus's own for NEW tokens.

    By induction that is so when every next token is the likeliest one after the corpus's own window.
    """
    windows = np.stack([tokens[start + i : start + i + PROMPT] for i in range(NEW)])
    with no_grad():
        likeliest = model.logits(windows, last_only=True).numpy()[:, 0].argmax(-1)
    return bool((likeliest == tokens[start + PROMPT : start + PROMPT + NEW]).all())


def models(checkpoint, threads):
    """One model for each thread, because a backend serves one."""
    for _ in range(threads):
        yield GPT2.of_arrays(checkpoint.config, checkpoint.parameters, NumpyBackend())


def train(args):
    """Train and write the weights; returns the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    for steps, order in PHASES:
        flags = f"--steps {steps} {order} --lr 1e-3 --min-lr 1e-5 --schedule cosine --warmup 50 --clip 1 --sample 0"
        flags = [*flags.split(), "--threads", str(args.threads), "--checkpoint-every", "100", "--keep", "1"]
        flags += ["--out", str(args.out), "--log", str(args.log)]
        if (args.out / "latest").exists():
            flags += ["--resume", str(args.out)]
        if code := train_command(NumpyBackend, Solo(), *parse(train_parser(), Solo(), flags)):
            return code

    trained = load_checkpoint(args.out)
    tokenizer = Tokenizer.load(trained.path)
    with tempfile.TemporaryDirectory() as scratch:
        step = save_checkpoint(
            scratch, 0, config=trained.config, parameters=trained.parameters, tokenizer=tokenizer, dtype=np.float16
        )
        args.weights.mkdir(parents=True, exist_ok=True)
        for file in step.iterdir():
            shutil.copyfile(file, args.weights / file.name)
    return 0


def count(args):
    """Print how many random prompts the shipped weights know."""
    limit_blas(1)
    shipped = load_checkpoint(args.weights)
    tokens = Tokenizer.load(args.weights).encode(read_text(CORPUS))
    starts = np.random.default_rng(1).integers(0, len(tokens) - PROMPT - NEW, args.prompts)
    workers = Workers([None] * args.threads)
    parts = np.array_split(starts, args.threads)
    counts = workers.map(
        lambda model, part: sum(known(model, tokens, start) for start in part),
        list(models(shipped, args.threads)),
        parts,
    )
    workers.close()
    size = sum(file.stat().st_size for file in args.weights.iterdir())
    print(f"{sum(counts)} of {args.prompts} random prompts are continued as the corpus does; {size:,} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="worker threads (default 2)")
    parser.add_argument("--prompts", type=int, default=100, help="random prompts to count (default 100)")
    parser.add_argument("--out", type=Path, default=Path("out/shipped-weights"), help="checkpoints of the training")
    parser.add_argument("--log", type=Path, default=Path("out/shipped_weights.jsonl"), help="training log")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="directory to write (default: the shipped one)")
    parser.add_argument("--check", action="store_true", help="train nothing, only count with the weights there")
    args = parser.parse_args()
    code = 0 if args.check else train(args)
    if not code:
        count(args)
    return code


if __name__ == "__main__":
    run_command(Solo, lambda world: main())
