"""Every flag of every stage, with its help text; train() and infer() are all that a stage's scripts call."""

import argparse
from pathlib import Path

import gpt2core
from gpt2core.app.command import HelpPrinted, run_command
from gpt2core.app.inference_command import inference_command
from gpt2core.app.presets import PRESETS, WEIGHTS
from gpt2core.app.rank_agreement import agree_on_start
from gpt2core.app.train_command import train_command
from gpt2core.errors import ConfigError
from gpt2core.parallel.codecs import CODECS
from gpt2core.parallel.data_parallel import BUCKET_MB, STRATEGIES

SWITCH = argparse.BooleanOptionalAction  # --flag and --no-flag
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PRECISION = "precision of the arithmetic; CPUs have fp32 only (default fp32)"
TRANSPORT = "how arrays are sent between GPUs: nccl, or mpi through host memory (default nccl if each rank has a GPU)"


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


def group(parser, title, text=None):
    """add(flag, help, **options of add_argument) for a new group of flags."""
    flags = parser.add_argument_group(title, text)
    return lambda flag, help, **options: flags.add_argument(flag, help=help, **options)


def train_parser():
    """The parser of train_gpt2.py. A flag whose default depends on preset, checkpoint or stage is None here."""
    parser = Parser(description="Train a GPT-2. Without flags: the paper's configuration on the shipped corpus.")
    parser.add_argument("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add_recipe(parser)
    add_data(parser)
    add_outputs(parser)
    add_execution(parser)
    add_ranks(parser)
    return parser


def add_recipe(parser):
    add = group(parser, "model")
    add("--preset", f"model size and recipe: {', '.join(PRESETS)} (default paper)")
    add("--n-layer", "number of layers (default: the preset's)", type=integer)
    add("--n-head", "attention heads per layer (default: the preset's)", type=integer)
    add("--n-embd", "channels, a multiple of --n-head (default: the preset's)", type=integer)
    add("--block-size", "longest context of the model, in tokens (default: the preset's)", type=integer)
    add = group(parser, "recipe", "Other presets have other defaults; those given here are of the preset paper.")
    add("--steps", "optimizer steps in all, including those before a --resume (default 50)", type=integer)
    add("--batch-size", "sequences per step over all ranks (default 16)", type=integer)
    add("--seq-len", "tokens per sequence (default: the model's block size)", type=integer)
    add("--lr", "peak learning rate (default 3e-4)", type=float)
    add("--min-lr", "learning rate at the end of linear or cosine decay (default: a tenth of --lr)", type=float)
    add("--schedule", "learning-rate schedule: constant, linear or cosine (default constant)")
    add("--warmup", "steps of linear warm-up of the learning rate (default 0)", type=integer)
    add("--clip", "largest global norm of the gradient, 0: no clipping (default 0)", type=float)
    add("--weight-decay", "decoupled weight decay of the weight matrices (default 0)", type=float)
    add("--beta1", "AdamW's decay rate of the first moment (default 0.9)", type=float)
    add("--beta2", "AdamW's decay rate of the second moment (default 0.999)", type=float)
    add("--eps", "AdamW's epsilon (default 1e-8)", type=float)
    add("--seed", "seed of initial weights, shuffling and stochastic rounding (default 0)", type=int)


def add_data(parser):
    add = group(parser, "data")
    add("--data", "corpus: a UTF-8 text file or the output of data/prepare.py (default data/dummy.txt)", type=Path)
    add("--tokenizer", "word, byte, or the path of a tokenizer.json (default word; prepared data: its own)")
    add("--shuffle", "read the windows of the corpus in a seeded random order (default: in order)", action=SWITCH)
    add("--val-data", "text or prepared data to validate on (default: no validation)", type=Path)
    add("--val-fraction", "part of the corpus, at its end, to validate on, from 0 to 1 (default 0)", type=float)
    add("--eval-every", "steps between validations, 0: only at the end (default 0)", type=integer, metavar="N")


def add_outputs(parser):
    add = group(parser, "checkpoints and logs")
    add("--out", "directory for checkpoints, one at the end (default: nothing is saved)", type=directory, metavar="DIR")
    add("--checkpoint-every", "steps between checkpoints, 0: only at the end (default 0)", type=integer, metavar="N")
    add("--keep", "number of newest checkpoints to keep, 0: all (default 2)", type=integer, metavar="K")
    text = "continue the run whose checkpoint is in DIR, with its flags except those about ranks (default: a new run)"
    add("--resume", text, type=Path, metavar="DIR")
    text = "start from the weights in DIR, a checkpoint or a Hugging Face GPT-2 (default: random weights)"
    add("--init-from", text, type=Path, metavar="DIR")
    add("--log", "log file, one JSON object per line (default: none)", type=Path, metavar="FILE.jsonl")
    add("--log-every", "steps between lines on screen and in the log (default 1)", type=integer, metavar="N")
    add("--plot", "image file for the loss curve (default: none)", type=Path, metavar="FILE.png")
    text = "tokens to generate after training, 0: none (default 30)"
    add("--sample", text, type=integer, default=30, metavar="N")


def add_execution(parser):
    add = group(parser, "execution")
    add("--threads", "worker threads per rank (default: the cores of the host divided by its ranks)", type=integer)
    add("--precision", PRECISION, choices=PRECISIONS)
    text = "rounding of the bf16 copy of the weights with --precision bf16 (default nearest)"
    add("--rounding", text, choices=("nearest", "stochastic"))
    text = (
        "number of micro-batches of a step over all ranks together (Megatron counts them per rank); their gradients "
        "are summed in one fixed tree (default 8; with --no-deterministic 1 per thread, on GPUs 1 per rank)"
    )
    add("--micro-batches", text, type=integer, metavar="M")
    add("--micro-shards", argparse.SUPPRESS, type=integer, dest="micro_batches")  # former name
    text = "compute the same bits for any number of threads and ranks (default: yes on CPUs, no on GPUs)"
    add("--deterministic", text, action=SWITCH)
    add("--graph", "record a step as a CUDA graph and replay it (default: yes on GPUs)", action=SWITCH)
    add("--autotune", "time the GPU's kernels again, ignoring cached choices (default: no)", action="store_true")
    add("--nvtx", "add NVTX ranges for a profiler; requires --no-graph (default: no)", action="store_true")


def add_ranks(parser):
    add = group(parser, "many ranks", "How the ranks of stages 1 and 3 divide the work.")
    add("--dp", f"all-reduce of the gradients: {', '.join(STRATEGIES)} (default flat)", metavar="HOW")
    text = (
        f"minimum bucket of --dp bucket, in 10^6 bytes (default {BUCKET_MB:g}; measured on GPUs, if not deterministic)"
    )
    add("--bucket-mb", text, type=float, metavar="MB")
    text = f"format in which gradients are sent: none, {', '.join(CODECS)} (default none)"
    add("--compress", text, metavar="HOW")
    text = (
        "1: each rank stores only its part of the optimizer state (default 0; "
        "1 for --transport nccl with --dp flat and --compress none)"
    )
    add("--zero", text, type=int, choices=(0, 1))
    text = "when --zero 1 gathers the updated parameters: at the end of the step, or in the next forward (default end)"
    add("--zero-gather", text, metavar="end|forward")
    text = "ranks that divide each layer (tensor parallelism), a divisor of the number of ranks (default 1)"
    add("--tp", text, type=integer, metavar="N")
    text = (
        "algorithm of sums over ranks: nccl, mpi, ring, halving-doubling, tree, canonical (default canonical, whose "
        "bits do not depend on the number of ranks; with --no-deterministic nccl or mpi)"
    )
    add("--collectives", text, metavar="HOW")
    add("--transport", TRANSPORT, metavar="HOW")
    text = "steps between comparisons of all ranks' parameters, 0: only at the end (default 0)"
    add("--verify-every", text, type=int, metavar="N")
    text = "each rank shuffles its own part of the windows (default: one order for all ranks)"
    add("--local-shuffle", text, action=SWITCH)


def inference_parser():
    """The parser of inference.py."""
    parser = Parser(description="Continue a text. Without flags: the shipped weights and the corpus's first tokens.")
    parser.add_argument("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add = group(parser, "input")
    text = "directory of a checkpoint or a Hugging Face GPT-2 (default: the shipped weights)"
    add("--weights", text, type=Path, default=WEIGHTS, metavar="DIR")
    add("--tokenizer", "word, byte, or the path of a tokenizer.json (default: the one in --weights)")
    add("--prompt", "text to continue (default: the first 256 tokens of the corpus)")
    add("--prompt-file", "text file to continue, without its last line break", type=Path, metavar="FILE")
    add("--prompts", "file with one prompt per line, for --mode batch", type=Path, metavar="FILE")
    add = group(parser, "generation")
    add("--max-new-tokens", "tokens to generate (default 30)", type=integer, default=30, metavar="N")
    add("--stop", "stop as soon as the continuation contains TEXT (default: no such text)", metavar="TEXT")
    add("--temperature", "0: the most likely token; above 0: sample (default 0; with --top-k, --top-p 1)", type=float)
    text = "sample among the K most likely tokens, 0: all (default 0)"
    add("--top-k", text, type=integer, default=0, metavar="K")
    text = "sample among the most likely tokens whose probabilities sum to P (default 1: all)"
    add("--top-p", text, type=float, default=1.0, metavar="P")
    add("--seed", "seed of the sampling (default 0)", type=int, default=0)
    add("--stream", "print each token as it is generated (default: all at the end)", action="store_true")
    text = "print token counts, the time to the first token and milliseconds per token (default: no)"
    add("--stats", text, action="store_true")
    add = group(parser, "execution")
    add("--threads", "threads of a matrix product (default: the cores of the host divided by its ranks)", type=integer)
    text = (
        "how ranks divide the work: replicate (each decodes the prompt, logits are averaged), batch (each decodes a "
        "part of --prompts), tensor (they divide each layer) (default replicate)"
    )
    add("--mode", text, default="replicate", metavar="HOW")
    add("--transport", TRANSPORT, metavar="HOW")
    add("--precision", PRECISION, choices=PRECISIONS, default="fp32")
    return parser


def train(backend, world, argv=None):
    """Everything that a stage's train_gpt2.py does: parse, train, exit.

    backend(precision, deterministic) -> Backend; world() -> Communicator.
    """
    run_command(world, lambda ranks: train_command(backend, ranks, *parse(train_parser(), ranks, argv)))


def infer(backend, world, argv=None):
    """Everything that a stage's inference.py does."""
    run_command(world, lambda ranks: inference_command(backend, ranks, *parse(inference_parser(), ranks, argv)))


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
