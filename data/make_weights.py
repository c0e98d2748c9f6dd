"""Make the weights in data/: train a preset, store its parameters, test them.

The parameters are stored in fp16. Preset `paper` is trained until the model
reproduces data/dummy.txt. Preset `nano`, which is small enough for Triton's
interpreter, is trained on the same text, preset `book` on data/moby_dick.txt.
A training run that was interrupted resumes from --out. The test of preset
`paper` takes random prompts from the corpus and counts those whose greedy
continuation is equal to the corpus. The test of the others prints a sample.
The tokenizer of `book` is a byte-pair encoding that is trained on its corpus,
unless its tokenizer.json exists.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it also runs without installation

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from gpt2core.app.checkpoints.directory import load_checkpoint, save_checkpoint
from gpt2core.app.cli import inference_parser, parse, train_parser
from gpt2core.app.command import run_command
from gpt2core.app.inference.inference_command import inference_command
from gpt2core.app.settings.flag_parser import Parser, to_path
from gpt2core.app.shipped import DATA, SHIPPED, TOKENIZERS
from gpt2core.app.stage import Stage
from gpt2core.app.training.command import train_command
from gpt2core.communicator import Solo
from gpt2core.errors import require_size
from gpt2core.parallel.tensor.loaded_model import load_inference_model
from gpt2core.presets import PRESETS
from gpt2core.text.token_file import read_text
from gpt2core.text.tokenizer import Tokenizer
from gpt2core.threads import WorkerPool
from stage0_serial.numpy_backend import NumpyBackend

STAGE = Stage(0, NumpyBackend, Solo)
PROMPT, NEW = 256, 30  # tokens of a prompt and of its continuation, as in the paper
SAMPLES = {  # {preset: the flags of the sample that is printed at the end}
    "book": ("--prompt", "Call me", "--max-new-tokens", "100", "--temperature", "0.5", "--top-k", "10"),
    "nano": ("--prompt", "In the spring of", "--max-new-tokens", "40"),
}
COSINE = "--lr 1e-3 --min-lr 1e-5 --schedule cosine --warmup 50 --clip 1"
# {preset: the flags of each training phase}. Without --shuffle all windows start at multiples of 8. A `paper` model
# trained only on these windows continues half of all prompts correctly. With --shuffle each epoch starts at another
# token, so the position in a window does not determine the word there. At about step 1050 the model has also learned to
# repeat the year of the chapter.
PHASES = {
    "paper": (f"--steps 600 --no-shuffle {COSINE}", f"--steps 1300 --shuffle {COSINE}"),
    "book": ("--val-fraction 0.02 --eval-every 100",),
    "nano": ("--steps 6000 --batch-size 64 --shuffle --log-every 100 --lr 3e-3 --min-lr 1e-4 --schedule cosine",),
}


def continues_correctly(model, tokens, start):
    """Return whether the first NEW tokens of the greedy continuation of tokens[start : start + PROMPT] are the corpus.

    This is true exactly if, after each of NEW successive windows of the corpus, the most likely token is the next token
    of the corpus. Therefore one forward pass of a batch of NEW windows is enough.
    """
    windows = np.stack([tokens[start + i : start + i + PROMPT] for i in range(NEW)])
    most_likely = model.logits(windows, last_only=True)[:, 0].argmax(-1)
    return bool((most_likely == tokens[start + PROMPT : start + PROMPT + NEW]).all())


def models_for(threads, checkpoint):
    """Yield one model for each thread, because two threads must not share a backend."""
    for _ in range(threads):
        yield load_inference_model(checkpoint.config, checkpoint.parameters, NumpyBackend())


def byte_pairs(text, vocab_size):
    """Return a byte-level BPE tokenizer of `vocab_size` tokens, trained on `text`. It can encode any text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([text], trainer)
    return Tokenizer(library, "bpe")


def train(args, corpus):
    """Train on the text file `corpus` and write the weights; return the exit code."""
    args.weights.mkdir(parents=True, exist_ok=True)
    path = TOKENIZERS.get(args.preset)
    if path and not path.exists():
        byte_pairs(read_text(corpus), PRESETS[args.preset].vocab_size).save(path)
    for phase in PHASES[args.preset]:
        flags = ["--sample", "0", "--threads", str(args.threads), "--checkpoint-every", "100", "--keep", "1"]
        flags += ["--out", str(args.out), "--log", str(args.log), "--overwrite"]
        flags += ["--preset", args.preset, *phase.split()]
        if (args.out / "latest").exists():
            flags += ["--resume", str(args.out)]
        if code := train_command(STAGE, Solo(), *parse(train_parser(), Solo(), flags)):
            return code

    trained = load_checkpoint(args.out)
    tokenizer = Tokenizer.load(trained.path)
    with tempfile.TemporaryDirectory() as scratch:
        step = save_checkpoint(
            scratch, 0, config=trained.config, parameters=trained.parameters, tokenizer=tokenizer, dtype=np.float16
        )
        for file in step.iterdir():
            shutil.copyfile(file, args.weights / file.name)
    return 0


def shown(items, bar):
    """Yield the items; after each, the progress bar advances by one."""
    for item in items:
        yield item
        bar.update()


def count_correct(args, corpus):
    """Print how many of args.prompts random prompts of the corpus the weights continue correctly; return 0."""
    checkpoint = load_checkpoint(args.weights)
    tokens = Tokenizer.load(args.weights).encode(read_text(corpus))
    starts = np.random.default_rng(1).integers(0, len(tokens) - PROMPT - NEW, args.prompts)
    weights = os.path.relpath(args.weights)
    print(f"{weights}: continuing {args.prompts} random prompts of {corpus.name} by {NEW} tokens", flush=True)
    copies = list(models_for(args.threads, checkpoint))
    with (
        contextlib.closing(WorkerPool([None] * args.threads, blas_threads=1)) as workers,
        tqdm(total=args.prompts, unit="prompt", leave=False, disable=None) as bar,  # on standard error, on a terminal
    ):

        def correct(model, part):
            return sum(continues_correctly(model, tokens, start) for start in shown(part, bar))

        counts = workers.map(correct, copies, np.array_split(starts, args.threads))
    print(f"{sum(counts)} of {args.prompts} random prompts are continued correctly")
    return 0


def sample(args):
    """Print a continuation of the prompt in SAMPLES; return the exit code."""
    flags = ["--weights", str(args.weights), *SAMPLES[args.preset]]
    return inference_command(STAGE, Solo(), *parse(inference_parser(), Solo(), flags))


def main():
    examples = (
        ("--check", "test the existing weights"),
        ("", "write data/gpt2-paper"),
        ("--preset book", "write data/gpt2-book"),
        ("--preset nano", "write data/gpt2-nano"),
    )
    parser = Parser(__doc__, examples)
    parser.add_argument("--preset", choices=PHASES, default="paper", help="the model to train or test (default paper)")
    parser.add_argument("--threads", type=int, default=2, help="number of worker threads (default 2)")
    parser.add_argument("--prompts", type=int, default=100, help="number of prompts of the test (default 100)")
    parser.add_argument("--out", type=to_path, help="directory for checkpoints (default out/shipped-PRESET)")
    parser.add_argument("--log", type=to_path, help="file for the training log (default out/shipped-PRESET.jsonl)")
    parser.add_argument("--weights", type=to_path, help="directory of the weights (default data/gpt2-PRESET)")
    parser.add_argument("--check", action="store_true", help="do not train; only test the existing weights")
    args = parser.parse_args()
    require_size("threads", args.threads)
    require_size("prompts", args.prompts)
    args.out = args.out or Path("out") / f"shipped-{args.preset}"
    args.log = args.log or args.out.with_suffix(".jsonl")
    shipped = DATA / f"gpt2-{args.preset}"
    args.weights, corpus = args.weights or shipped, SHIPPED[shipped]
    if not args.check and (code := train(args, corpus)):
        return code
    return count_correct(args, corpus) if args.preset == "paper" else sample(args)


if __name__ == "__main__":
    run_command(Solo, lambda world: main())
