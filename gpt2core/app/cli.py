"""Every flag of every stage: what a stage's objects cannot do is refused with one sentence and exit code 2."""

import argparse
import contextlib
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np

import gpt2core
from gpt2core.app.presets import PRESETS, WEIGHTS
from gpt2core.app.rank_agreement import compare
from gpt2core.app.train_command import inference_command, train_command
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, DeviceMemoryError, UserError
from gpt2core.parallel.all_or_raise import all_or_raise, shared_error
from gpt2core.parallel.codecs import CODECS
from gpt2core.parallel.data_parallel import BUCKET_MB, STRATEGIES

TRANSPORT = "how arrays travel between GPUs: nccl, or mpi through the host (default nccl where each rank has its own)"
GRACE = 0.4  # seconds that a failing rank leaves to the one before it


class Answered(Exception):
    """The command line asked for --help or --version, and has its answer."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line, as every other mistake's is, and whose help only the root prints."""

    is_root = True

    def error(self, message):
        raise ConfigError(f"{message} (--help lists the options)")

    def exit(self, status=0, message=None):
        raise Answered

    def _print_message(self, message, file=None):
        if self.is_root:
            super()._print_message(message, file)


def integer(text):
    """An int of 31 bits: no size made of it overflows, so that too large a model is a matter of memory."""
    value = int(text)
    if abs(value) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return value


def directory(text):
    """The Path of a directory that has a name: an empty one would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a directory, or leave --out away")
    return Path(text)


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
    add("--seed", type=int, help="of the initial parameters, shuffling and stochastic rounding (default 0)")
    add("--threads", type=integer, help="worker threads a rank (default: the cores over the ranks on this host)")
    add("--precision", choices=("fp32", "tf32", "bf16", "fp16"), help="of arithmetic; others on GPUs (default fp32)")
    add("--rounding", choices=("nearest", "stochastic"), help="of what --precision bf16 copies (default nearest)")
    add("--data", type=Path, help="corpus: a UTF-8 text, or a token file of data/prepare.py (default: data/dummy.txt)")
    add("--tokenizer", help="word, byte, or a tokenizer.json (default word; of a token file: its own)")
    add("--shuffle", action=argparse.BooleanOptionalAction, help="windows in a seeded random order (default: in order)")
    add("--val-data", type=Path, help="text or token file to validate on")
    add("--val-fraction", type=float, help="share of the corpus, at its end, kept for validation (default 0)")
    add("--eval-every", type=integer, metavar="N", help="steps between validations (default: at the end)")
    add("--out", type=directory, help="directory for checkpoints; always ends with one (default: nothing is saved)")
    add("--checkpoint-every", type=integer, metavar="N", help="steps between checkpoints (default: the end)")
    add("--keep", type=integer, metavar="K", help="checkpoints to keep, 0 for all (default 2)")
    add("--resume", type=Path, metavar="DIR", help="go on from a checkpoint, with its flags (not those of ranks)")
    add("--init-from", type=Path, metavar="DIR", help="start from a Hugging Face GPT-2 directory, optimizer fresh")
    add("--log", type=Path, metavar="FILE.jsonl", help="one JSON object a step")
    add("--log-every", type=integer, metavar="N", help="steps between lines of screen and log (default 1)")
    add("--plot", type=Path, metavar="FILE.png", help="write the loss curve")
    parts = "parts of the batch over all ranks together, summed in one fixed tree (default 8; GPUs: 1 a rank)"
    add("--micro-batches", type=integer, metavar="M", help=parts)
    add("--micro-shards", type=integer, dest="micro_batches", help=argparse.SUPPRESS)  # the flag's earlier name
    flag = argparse.BooleanOptionalAction
    add("--deterministic", action=flag, help="the same bits for any number of threads and ranks (default on CPUs)")
    add("--nvtx", action="store_true", help="name ops and phases for a profiler; needs --no-graph (default: no)")
    add("--graph", action=flag, help="record a step once and replay it, where the device can (default there)")
    add("--autotune", action="store_true", help="on GPUs: time again which kernels are the fastest here (default: no)")
    ranks = parser.add_argument_group("many ranks", "How the ranks of stages 1 and 3 share the work.")
    add = ranks.add_argument
    add("--dp", metavar="HOW", help=f"how gradients travel: {', '.join(STRATEGIES)} (default flat)")
    size = f"least size for --dp bucket, 10^6 bytes (default {BUCKET_MB:g}; on GPUs measured, if not --deterministic)"
    add("--bucket-mb", type=float, metavar="MB", help=size)
    add("--compress", metavar="HOW", help=f"gradients on the wire: none, {', '.join(CODECS)} (default none)")
    shared = "default 0; where many GPUs talk by NCCL, --dp is flat and --compress none, 1"
    add("--zero", type=int, choices=(0, 1), help=f"1: each rank keeps its part of the optimizer state ({shared})")
    gather = "when --zero 1 gathers what was updated: end, of the step; forward, beside the next one's (default end)"
    add("--zero-gather", metavar="WHEN", help=gather)
    add("--tp", type=integer, metavar="N", help="ranks that share each layer, tensor parallel (default 1)")
    sums = "nccl, mpi, ring, halving-doubling, tree, canonical (default canonical, the first with --no-deterministic)"
    add("--collectives", metavar="HOW", help=f"how ranks are summed: {sums}")
    add("--transport", metavar="HOW", help=TRANSPORT)
    add("--verify-every", type=int, metavar="N", help="steps between comparing all ranks' parameters (default: end)")
    add("--local-shuffle", action=flag, help="each rank shuffles its own part of the windows (default: no)")
    add = parser.add_argument
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
    add("--threads", type=integer, help="threads of a matrix product (default: the cores over the ranks on this host)")
    modes = "replicate (all decode, logits averaged), batch (each its share of --prompts), tensor (each its shard)"
    add("--mode", default="replicate", metavar="HOW", help=f"how ranks share it: {modes} (default replicate)")
    add("--prompts", type=Path, metavar="FILE", help="texts to continue, one a line (mode batch)")
    add("--transport", metavar="HOW", help=TRANSPORT)
    precisions = ("fp32", "tf32", "bf16", "fp16")
    add("--precision", choices=precisions, default="fp32", help="of the arithmetic (default fp32)")
    return parser


def train(backend, world, argv=None):
    """The whole of a stage's train_gpt2.py. backend(precision) -> Backend; world() -> Communicator."""
    command(world, lambda ranks: train_command(backend, ranks, parsed(train_parser(), ranks, argv)))


def infer(backend, world, argv=None):
    """The whole of a stage's inference.py."""
    command(world, lambda ranks: inference_command(backend, ranks, parsed(inference_parser(), ranks, argv)))


def parsed(parser, world, argv):
    """The flags, which must be the same on every rank; raises Answered where --help or --version left nothing to do."""
    parser.is_root = world.is_root

    def parse():
        try:
            return parser.parse_args(argv)
        except Answered:
            return None

    args = all_or_raise(world, parse)
    answered = world.all_gather_object(args is None)
    if all(answered):
        raise Answered
    if any(answered):
        raise shared_error(ConfigError(f"rank {answered.index(True)} asks for --help or --version, others do not"))
    compare(world, args)
    return args


def command(make_world, body):
    """Run body(world) and exit with the code it returns; a user's mistake is one line on standard error and code 2.

    What one rank meets alone ends the whole job, with the cause told once.
    """
    with contextlib.suppress(AttributeError):  # a character that the terminal lacks is no reason to stop
        sys.stdout.reconfigure(errors="replace")
    world = Solo()
    try:
        with np.errstate(all="ignore"):  # numbers that overflow end in one sentence, not in a dozen warnings
            world = make_world()
            code = body(world)
        sys.stdout.flush()
        world.barrier()  # the root may still be writing: nobody waits for it in MPI's own busy way
    except Answered:
        code = 0
    except UserError as error:
        code = fail(world, error, error.shared)
    except DeviceMemoryError as error:
        code = fail(world, error)
    except MemoryError as error:
        advice = "lower --batch-size, raise --micro-batches or take a smaller --preset"
        code = fail(world, f"out of memory ({error}): {advice}")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # at once: any other exit waits for the worker threads to end their step
    except BrokenPipeError:  # the reader of our output has left: there is nobody to tell
        code = world.abort(1)
    except OSError as error:
        text = f"{error.filename or 'the output'}: {error.strerror or error}"
        code = fail(world, text, getattr(error, "shared", False))
    except (Exception, SystemExit) as error:  # one rank that just left would keep the others waiting
        code = crash(world, error)
    try:
        sys.stdout.flush()
    except OSError:  # what cannot be written now would be complained about at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def fail(world, message, shared=False):
    """Tell a mistake; returns the exit code 2, or ends the job where not all ranks have met it."""
    text = " ".join(str(message).splitlines())
    if world.one_process or (shared and world.is_root):
        print("error:", text, file=sys.stderr)
    elif not shared:
        speak_after_the_root(world)
        print(f"error: rank {world.rank}: {text}", file=sys.stderr)
        world.abort(2)
    return 2


def crash(world, error):
    """Raise what is no user's mistake, with its traceback, and end the job."""
    if world.one_process:
        raise error
    speak_after_the_root(world)
    print(f"rank {world.rank} of {world.size} failed:", file=sys.stderr)
    traceback.print_exception(error)
    world.abort(1)


def speak_after_the_root(world):
    """Give lower ranks the time to tell the same cause and to end the job: then it is told once."""
    time.sleep(min(world.rank, 8) * GRACE)
