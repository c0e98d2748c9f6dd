"""Every flag of every stage: what a stage's objects cannot do is refused with one sentence and exit code 2."""

import argparse
import contextlib
import os
import sys
from pathlib import Path

import numpy as np

import gpt2core
from gpt2core.commands import inference_command, train_command
from gpt2core.errors import UserError
from gpt2core.model import PRESETS
from gpt2core.recipes import WEIGHTS


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line, as every other mistake's is."""

    def error(self, message):
        self.exit(2, f"error: {message} (--help lists the options)\n")


def integer(text):
    """An int of 31 bits: no size made of it overflows, so that too large a model is a matter of memory."""
    value = int(text)
    if abs(value) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return value


def train_parser():
    parser = Parser(description="Train a GPT-2. Without flags: the paper's configuration on the shipped corpus.")
    add = parser.add_argument
    add("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add("--preset", help=f"model and recipe: {', '.join(PRESETS)} (default paper)")
    add("--n-layer", type=integer, help="layers of the model (default: the preset's)")
    add("--n-head", type=integer, help="heads of each layer (default: the preset's)")
    add("--n-embd", type=integer, help="width of the model, a multiple of its heads (default: the preset's)")
    add("--block-size", type=integer, help="positions that the model can see, in tokens (default: the preset's)")
    add("--steps", type=integer, help="updates in all, also after a resume (default: the preset's; paper 50)")
    add("--batch-size", type=integer, help="sequences per step over all ranks (default: the preset's; paper 16)")
    add("--seq-len", type=integer, help="tokens per sequence (default: the model's block size)")
    add("--lr", type=float, help="peak learning rate (default: the preset's; paper 3e-4)")
    add("--min-lr", type=float, help="where linear and cosine decay end (default: a tenth of --lr)")
    add("--schedule", help="constant, linear or cosine (default: the preset's; paper constant)")
    add("--warmup", type=integer, help="steps of linear warm-up (default: the preset's; paper 0)")
    add("--clip", type=float, help="bound of the gradient's global norm, 0 for none (default: the preset's; paper 0)")
    add("--weight-decay", type=float, help="decoupled decay of the matrices (default: the preset's; paper 0)")
    add("--beta1", type=float, help="decay of Adam's first moment (default 0.9)")
    add("--beta2", type=float, help="decay of Adam's second moment (default: the preset's; paper 0.999)")
    add("--eps", type=float, help="Adam's epsilon (default 1e-8)")
    add("--seed", type=int, help="of the initial parameters and of shuffling (default 0)")
    add("--threads", type=integer, help="worker threads a rank (default: the cores)")
    add("--precision", choices=("fp32", "tf32", "bf16", "fp16"), help="of the arithmetic (default fp32)")
    add("--data", type=Path, help="corpus: a UTF-8 text, or a token file of data/prepare.py (default: data/dummy.txt)")
    add("--tokenizer", help="word, byte, or a tokenizer.json (default word; of a token file: its own)")
    add("--shuffle", action=argparse.BooleanOptionalAction, help="windows in a seeded random order (default: in order)")
    add("--val-data", type=Path, help="text or token file to validate on")
    add("--val-fraction", type=float, help="share of the corpus, at its end, kept for validation (default 0)")
    add("--eval-every", type=integer, metavar="N", help="steps between validations (default: at the end)")
    add("--out", type=Path, help="directory for checkpoints; always ends with one (default: nothing is saved)")
    add("--checkpoint-every", type=integer, metavar="N", help="steps between checkpoints (default: the end)")
    add("--keep", type=integer, metavar="K", help="checkpoints to keep, 0 for all (default 2)")
    add("--resume", type=Path, metavar="DIR", help="go on from a checkpoint, with its flags where none is given")
    add("--init-from", type=Path, metavar="DIR", help="start from a Hugging Face GPT-2 directory, optimizer fresh")
    add("--log", type=Path, metavar="FILE.jsonl", help="one JSON object a step")
    add("--log-every", type=integer, metavar="N", help="steps between lines of screen and log (default 1)")
    add("--plot", type=Path, metavar="FILE.png", help="write the loss curve")
    add("--micro-shards", type=integer, help="parts of the batch that are summed in one fixed tree (default 8)")
    flag = argparse.BooleanOptionalAction
    add("--deterministic", action=flag, help="the same bits for any number of threads and ranks (default)")
    add("--sample", type=integer, default=30, metavar="N", help="tokens to write after training, 0: none (default 30)")
    return parser


def inference_parser():
    parser = Parser(description="Continue a text. Without flags: the shipped weights and the corpus's first tokens.")
    add = parser.add_argument
    add("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add("--weights", type=Path, default=WEIGHTS, help="checkpoint or Hugging Face directory (default: the shipped one)")
    add("--tokenizer", help="word, byte or a tokenizer.json (default: the one beside the weights)")
    add("--prompt", help="text to continue (default: the first 256 tokens of the corpus)")
    add("--prompt-file", type=Path, help="file with the text to continue; its last line break is not part of it")
    add("--max-new-tokens", type=integer, default=30, metavar="N", help="tokens to write (default 30)")
    add("--stop", metavar="TEXT", help="end as soon as the continuation contains this text")
    add("--temperature", type=float, help="0: the likeliest token, above: draw (default 0; 1 with --top-k, --top-p)")
    add("--top-k", type=integer, default=0, metavar="K", help="draw among the K likeliest tokens (default 0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest that sum to P (default 1: all)")
    add("--seed", type=int, default=0, help="of the draws (default 0)")
    add("--stream", action="store_true", help="print each token as it comes")
    add("--stats", action="store_true", help="print prompt tokens, new tokens, time to first token, ms a token")
    add("--threads", type=integer, help="threads of a matrix product (default: the cores)")
    precisions = ("fp32", "tf32", "bf16", "fp16")
    add("--precision", choices=precisions, default="fp32", help="of the arithmetic (default fp32)")
    return parser


def train(backend, world, argv=None):
    """The whole of a stage's train_gpt2.py. backend(precision) -> Backend; world() -> Communicator."""
    command(lambda: train_command(backend, world(), train_parser().parse_args(argv)))


def infer(backend, world, argv=None):
    """The whole of a stage's inference.py."""
    command(lambda: inference_command(backend, world(), inference_parser().parse_args(argv)))


def command(body):
    """Run `body` and exit with the code it returns; a user's mistake is one line on standard error and exit code 2."""
    with contextlib.suppress(AttributeError):  # a character that the terminal lacks is no reason to stop
        sys.stdout.reconfigure(errors="replace")
    try:
        with np.errstate(all="ignore"):  # numbers that overflow end in one sentence, not in a dozen warnings
            code = body()
        sys.stdout.flush()
    except UserError as error:
        code = fail(error)
    except MemoryError as error:
        code = fail(f"out of memory ({error}): lower --batch-size, raise --micro-shards or take a smaller --preset")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # at once: any other exit waits for the worker threads to end their step
    except BrokenPipeError:  # the reader of our output has left: there is nobody to tell
        code = 1
    except OSError as error:
        code = fail(f"{error.filename or 'the output'}: {error.strerror or error}")
    try:
        sys.stdout.flush()
    except OSError:  # what cannot be written now would be complained about at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def fail(message):
    print("error:", " ".join(str(message).splitlines()), file=sys.stderr)
    return 2
