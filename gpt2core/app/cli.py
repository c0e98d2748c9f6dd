"""Every flag of every stage, and how a command ends: a user's mistake is one line on standard error, exit code 2."""

import argparse
import contextlib
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np

import gpt2core
from gpt2core.app.inference_command import inference_command
from gpt2core.app.presets import PRESETS, WEIGHTS
from gpt2core.app.rank_agreement import agree_on_start
from gpt2core.app.train_command import train_command
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, DeviceMemoryError, UserError
from gpt2core.parallel.codecs import CODECS
from gpt2core.parallel.data_parallel import BUCKET_MB, STRATEGIES

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PRECISION = f"arithmetic: {', '.join(PRECISIONS)}; CPUs have fp32 only (default fp32)"
TRANSPORT = "how arrays are sent between GPUs: nccl, or mpi through host memory (default nccl if each rank has a GPU)"
GRACE = 0.4  # seconds that a failing rank waits for each lower rank to report the same error first


class HelpPrinted(Exception):
    """--help or --version was printed, and the command has nothing else to do."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are a ConfigError of one line, and whose help only the root prints."""

    is_root = True

    def error(self, message):
        raise ConfigError(f"{message} (--help lists the options)")

    def exit(self, status=0, message=None):
        raise HelpPrinted

    def _print_message(self, message, file=None):
        if self.is_root:
            super()._print_message(message, file)


def integer(text):
    """An int below 2^31: products of such sizes do not overflow, so a model that is too large is a MemoryError."""
    value = int(text)
    if abs(value) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return value


def directory(text):
    """A Path; an empty name is refused, because Path("") is the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a directory, or omit --out")
    return Path(text)


def train_parser():
    """The parser of train_gpt2.py. A flag whose default depends on preset, checkpoint or stage is None here."""
    parser = Parser(description="Train a GPT-2. Without flags: the paper's configuration on the shipped corpus.")
    parser.add_argument("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("model").add_argument
    add("--preset", help=f"model size and recipe: {', '.join(PRESETS)} (default paper)")
    add("--n-layer", type=integer, help="number of layers (default: the preset's)")
    add("--n-head", type=integer, help="attention heads per layer (default: the preset's)")
    add("--n-embd", type=integer, help="channels, a multiple of --n-head (default: the preset's)")
    add("--block-size", type=integer, help="longest context of the model, in tokens (default: the preset's)")

    add = parser.add_argument_group("recipe").add_argument
    add(
        "--steps",
        type=integer,
        help="optimizer steps in all, including those before a --resume (default 50 with --preset paper)",
    )
    add("--batch-size", type=integer, help="sequences per step over all ranks (default 16 with --preset paper)")
    add("--seq-len", type=integer, help="tokens per sequence (default: the model's block size)")
    add("--lr", type=float, help="peak learning rate (default 3e-4 with --preset paper)")
    add("--min-lr", type=float, help="learning rate at the end of linear or cosine decay (default: a tenth of --lr)")
    add("--schedule", help="learning-rate schedule: constant, linear or cosine (default constant with --preset paper)")
    add("--warmup", type=integer, help="steps of linear warm-up of the learning rate (default 0 with --preset paper)")
    add(
        "--clip", type=float, help="largest global norm of the gradient, 0: no clipping (default 0 with --preset paper)"
    )
    add(
        "--weight-decay",
        type=float,
        help="decoupled weight decay of the weight matrices (default 0 with --preset paper)",
    )
    add("--beta1", type=float, help="AdamW's decay rate of the first moment (default 0.9)")
    add("--beta2", type=float, help="AdamW's decay rate of the second moment (default 0.999 with --preset paper)")
    add("--eps", type=float, help="AdamW's epsilon (default 1e-8)")
    add("--seed", type=int, help="seed of the initial weights, --shuffle and stochastic rounding (default 0)")

    add = parser.add_argument_group("data").add_argument
    add(
        "--data", type=Path, help="corpus: a UTF-8 text file, or the output of data/prepare.py (default data/dummy.txt)"
    )
    add("--tokenizer", help="word, byte, or the path of a tokenizer.json (default word; prepared data: its own)")
    add("--shuffle", action=switch, help="read the windows of the corpus in a seeded random order (default: in order)")
    add("--val-data", type=Path, help="text or prepared data to validate on (default: no validation)")
    add("--val-fraction", type=float, help="part of the corpus, at its end, for validation, 0 to 1 (default 0)")
    add("--eval-every", type=integer, metavar="N", help="steps between validations, 0: only at the end (default 0)")

    add = parser.add_argument_group("checkpoints and logs").add_argument
    add("--out", type=directory, metavar="DIR", help="directory for checkpoints, one at the end (default: none saved)")
    every = "steps between checkpoints, 0: only at the end (default 0)"
    add("--checkpoint-every", type=integer, metavar="N", help=every)
    add("--keep", type=integer, metavar="K", help="number of newest checkpoints to keep, 0: all (default 2)")
    resume = "continue the run whose checkpoint is in DIR, with its flags except those about ranks"
    add("--resume", type=Path, metavar="DIR", help=resume)
    init = "start from the weights in DIR, a checkpoint or a Hugging Face GPT-2, with a new optimizer"
    add("--init-from", type=Path, metavar="DIR", help=init)
    add("--log", type=Path, metavar="FILE.jsonl", help="log file, one JSON object per line (default: none)")
    add("--log-every", type=integer, metavar="N", help="steps between lines on screen and in the log (default 1)")
    add("--plot", type=Path, metavar="FILE.png", help="image file for the loss curve (default: none)")
    add("--sample", type=integer, default=30, metavar="N", help="tokens to generate after training (default 30)")

    add = parser.add_argument_group("execution").add_argument
    add("--threads", type=integer, help="worker threads per rank (default: the cores divided by the ranks of the host)")
    add("--precision", choices=PRECISIONS, help=PRECISION)
    rounding = "rounding of the bf16 copy of the weights with --precision bf16 (default nearest)"
    add("--rounding", choices=("nearest", "stochastic"), help=rounding)
    parts = "number of micro-batches of the global batch, over all ranks together (unlike Megatron's, per rank); "
    parts += "their gradients are summed in one fixed tree (default 8; on GPUs 1 per rank)"
    add("--micro-batches", type=integer, metavar="M", help=parts)
    add("--micro-shards", type=integer, dest="micro_batches", help=argparse.SUPPRESS)  # former name
    bits = "compute the same bits for any number of threads and ranks (default on CPUs)"
    add("--deterministic", action=switch, help=bits)
    add("--graph", action=switch, help="record a step as a CUDA graph and replay it (default on GPUs)")
    add("--autotune", action="store_true", help="time the GPU's kernels again instead of using cached choices")
    add("--nvtx", action="store_true", help="add NVTX ranges for a profiler; requires --no-graph (default: none)")

    text = "How the ranks of stages 1 and 3 divide the work."
    add = parser.add_argument_group("many ranks", text).add_argument
    add("--dp", metavar="HOW", help=f"all-reduce of the gradients: {', '.join(STRATEGIES)} (default flat)")
    bucket = f"minimum bucket of --dp bucket in 10^6 bytes (default {BUCKET_MB:g}; measured on GPUs with "
    add("--bucket-mb", type=float, metavar="MB", help=f"{bucket}--no-deterministic)")
    compress = f"format in which gradients are sent: none, {', '.join(CODECS)} (default none)"
    add("--compress", metavar="HOW", help=compress)
    zero = "1: each rank stores only its part of the optimizer state (default 0; with --transport nccl, --dp flat and "
    add("--zero", type=int, choices=(0, 1), help=f"{zero}--compress none: 1)")
    gather = "when --zero 1 gathers the updated parameters: at the end of the step, or during the next forward pass"
    add("--zero-gather", metavar="WHEN", help=f"{gather}: end, forward (default end)")
    tensor = "ranks that divide each layer (tensor parallelism), a divisor of all ranks (default 1)"
    add("--tp", type=integer, metavar="N", help=tensor)
    sums = "algorithm of the sums over ranks: nccl, mpi, ring, halving-doubling, tree, canonical (default canonical, "
    add(
        "--collectives",
        metavar="HOW",
        help=f"{sums}whose bits do not depend on the ranks; --no-deterministic: nccl/mpi)",
    )
    add("--transport", metavar="HOW", help=TRANSPORT)
    verify = "steps between comparisons of all ranks' parameters, 0: only at the end (default 0)"
    add("--verify-every", type=int, metavar="N", help=verify)
    local = "each rank shuffles its own part of the windows (default: one order for all ranks)"
    add("--local-shuffle", action=switch, help=local)
    return parser


def inference_parser():
    """The parser of inference.py."""
    parser = Parser(description="Continue a text. Without flags: the shipped weights and the corpus's first tokens.")
    add = parser.add_argument
    add("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    weights = "directory of a checkpoint or a Hugging Face GPT-2 (default: the shipped weights)"
    add("--weights", type=Path, default=WEIGHTS, metavar="DIR", help=weights)
    add("--tokenizer", help="word, byte, or the path of a tokenizer.json (default: the one in --weights)")
    add("--prompt", help="text to continue (default: the first 256 tokens of the corpus)")
    add("--prompt-file", type=Path, metavar="FILE", help="text file to continue, without its last line break")
    add("--max-new-tokens", type=integer, default=30, metavar="N", help="tokens to generate (default 30)")
    add("--stop", metavar="TEXT", help="end as soon as the continuation contains TEXT (default: no such text)")
    temperature = "0: the most likely token; above 0: sample (default 0; with --top-k or --top-p 1)"
    add("--temperature", type=float, help=temperature)
    top_k = "sample among the K most likely tokens, 0: all (default 0)"
    add("--top-k", type=integer, default=0, metavar="K", help=top_k)
    top_p = "sample among the most likely tokens whose probabilities sum to P (default 1: all)"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    add("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    add("--stream", action="store_true", help="print each token as it is generated (default: all at the end)")
    stats = "print the numbers of tokens, the time to the first one and milliseconds per token (default: none)"
    add("--stats", action="store_true", help=stats)
    add("--threads", type=integer, help="threads of a matrix product (default: the cores over the ranks of the host)")
    modes = "replicate (each rank decodes the prompt, logits are averaged), batch (each rank decodes its share of "
    modes += "--prompts), tensor (ranks divide each layer)"
    add("--mode", default="replicate", metavar="HOW", help=f"how ranks divide the work: {modes} (default replicate)")
    add("--prompts", type=Path, metavar="FILE", help="file with one prompt per line, for --mode batch (default: none)")
    add("--transport", metavar="HOW", help=TRANSPORT)
    add("--precision", choices=PRECISIONS, default="fp32", help=PRECISION)
    return parser


def train(backend, world, argv=None):
    """Everything that a stage's train_gpt2.py does: parse, train, exit.

    backend(precision, deterministic) -> Backend; world() -> Communicator.
    """
    command(world, lambda ranks: train_command(backend, ranks, *parse(train_parser(), ranks, argv)))


def infer(backend, world, argv=None):
    """Everything that a stage's inference.py does."""
    command(world, lambda ranks: inference_command(backend, ranks, *parse(inference_parser(), ranks, argv)))


def parse(parser, world, argv):
    """(flags, cores for this rank), after comparing all ranks; raises HelpPrinted after --help or --version."""
    parser.is_root = world.is_root

    def parse_args():
        try:
            return parser.parse_args(argv)
        except HelpPrinted:
            return None

    args, cores = agree_on_start(world, parse_args)
    if args is None:
        raise HelpPrinted
    return args, cores


def command(make_world, body):
    """Run body(world) and exit with the code that it returns.

    A user's mistake is one line on standard error and exit code 2. An error of a single rank ends the whole job, and
    its cause is printed once.
    """
    with contextlib.suppress(AttributeError):  # print "?" for characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="replace")
    world = Solo()
    try:
        with np.errstate(all="ignore"):  # overflow is reported once, by the check of the loss, not by NumPy's warnings
            world = make_world()
            code = body(world)
        sys.stdout.flush()
        world.barrier()  # wait for the root's output here, because MPI would spin in its own finalization
    except HelpPrinted:
        code = 0
    except UserError as error:
        code = fail(world, error, error.shared)
    except DeviceMemoryError as error:
        code = fail(world, error)
    except MemoryError as error:
        advice = "lower --batch-size, raise --micro-batches or use a smaller --preset"
        code = fail(world, f"out of memory ({error}): {advice}")
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)  # immediately: a normal exit would wait for the worker threads to finish their step
    except BrokenPipeError:  # the reader of standard output has exited
        code = world.abort(1)
    except OSError as error:
        text = f"{error.filename or 'the output'}: {error.strerror or error}"
        code = fail(world, text, getattr(error, "shared", False))
    except (Exception, SystemExit) as error:  # a rank that only exited would leave the others waiting
        code = crash(world, error)
    try:
        sys.stdout.flush()
    except OSError:  # or the interpreter would report at exit what it cannot write
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def fail(world, message, shared=False):
    """Print a user's mistake; returns the exit code 2, or aborts the job unless all ranks have the same error."""
    text = " ".join(str(message).splitlines())
    if world.one_process or (shared and world.is_root):
        print("error:", text, file=sys.stderr)
    elif not shared:
        wait_for_lower_ranks(world)
        print(f"error: rank {world.rank}: {text}", file=sys.stderr)
        world.abort(2)
    return 2


def crash(world, error):
    """Print the traceback of an unexpected error and abort the job."""
    if world.one_process:
        raise error
    wait_for_lower_ranks(world)
    print(f"rank {world.rank} of {world.size} failed:", file=sys.stderr)
    traceback.print_exception(error)
    world.abort(1)


def wait_for_lower_ranks(world):
    """Give lower ranks time to print the same cause and to end the job, so that it is printed once."""
    time.sleep(min(world.rank, 8) * GRACE)
