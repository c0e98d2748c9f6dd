"""Make the shipped weights: train until the model reproduces the corpus, then store the parameters in 16 bits.

    python data/make_weights.py --threads 8     trains, writes and counts
    python data/make_weights.py --check         counts the random prompts that the weights continue correctly

An interrupted training resumes from --out. A prompt is continued correctly if all tokens of its greedy continuation are
those of the corpus.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it also runs without installation

import numpy as np

from gpt2core.app.checkpoint_directory import load_checkpoint, save_checkpoint
from gpt2core.app.cli import parse, train_parser
from gpt2core.app.command import run_command
from gpt2core.app.presets import CORPUS, WEIGHTS
from gpt2core.app.train_command import train_command
from gpt2core.communicator import Solo
from gpt2core.parallel.tensor_parallel import load_model
from gpt2core.parallel.threads import WorkerPool, limit_blas
from gpt2core.tensor import no_grad
from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import Tokenizer
from stage0_serial.numpy_backend import NumpyBackend

PROMPT, NEW = 256, 30  # tokens, the paper's inference
# Windows in order start at multiples of 8 only, and such a model continues half of all prompts correctly. The second
# phase starts each epoch at another token, so that the position of a word in its window does not determine it. Copying
# the year is learned last, at about step 1050.
PHASES = ((600, "--no-shuffle"), (1300, "--shuffle"))


def continues_correctly(model, tokens, start):
    """Return whether the greedy continuation of tokens[start : start + PROMPT] equals the corpus for NEW tokens.

    By induction this holds if after each of the corpus's windows the most likely token is the corpus's next one.
    """
    windows = np.stack([tokens[start + i : start + i + PROMPT] for i in range(NEW)])
    with no_grad():
        most_likely = model.logits(windows, last_only=True).numpy()[:, 0].argmax(-1)
    return bool((most_likely == tokens[start + PROMPT : start + PROMPT + NEW]).all())


def models(checkpoint, threads):
    """Yield one model for each thread, because two threads must not share a backend."""
    for _ in range(threads):
        yield load_model(checkpoint.config, checkpoint.parameters, NumpyBackend())


def train(args):
    """Train and write the weights; returns the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    for steps, order in PHASES:
        flags = f"--steps {steps} {order} --lr 1e-3 --min-lr 1e-5 --schedule cosine --warmup 50 --clip 1 --sample 0"
        flags = [*flags.split(), "--threads", str(args.threads), "--checkpoint-every", "100", "--keep", "1"]
        flags += ["--out", str(args.out), "--log", str(args.log), "--overwrite"]
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
    """Print how many random prompts the shipped weights continue correctly."""
    limit_blas(1)
    shipped = load_checkpoint(args.weights)
    tokens = Tokenizer.load(args.weights).encode(read_text(CORPUS))
    starts = np.random.default_rng(1).integers(0, len(tokens) - PROMPT - NEW, args.prompts)
    workers = WorkerPool([None] * args.threads)
    parts = np.array_split(starts, args.threads)
    counts = workers.map(
        lambda model, part: sum(continues_correctly(model, tokens, start) for start in part),
        list(models(shipped, args.threads)),
        parts,
    )
    workers.close()
    size = sum(file.stat().st_size for file in args.weights.iterdir())
    print(f"{sum(counts)} of {args.prompts} random prompts are continued correctly; {size:,} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="worker threads (default 2)")
    parser.add_argument("--prompts", type=int, default=100, help="random prompts to count (default 100)")
    parser.add_argument("--out", type=Path, default=Path("out/shipped-weights"), help="checkpoints of the training")
    parser.add_argument("--log", type=Path, default=Path("out/shipped_weights.jsonl"), help="training log")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="directory to write (default: the shipped one)")
    parser.add_argument("--check", action="store_true", help="do not train; only count with the existing weights")
    args = parser.parse_args()
    code = 0 if args.check else train(args)
    if not code:
        count(args)
    return code


if __name__ == "__main__":
    run_command(Solo, lambda world: main())
