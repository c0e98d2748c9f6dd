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
    add(
        "--shuffle",
        action=switch,
        help="read the corpus in a seeded random order of its windows (default: no, in order)",
    )
    add("--val-data", type=Path, help="text or prepared data to validate on (default: no validation)")
    add("--val-fraction", type=float, help="part of the corpus, at its end, for validation, 0 to 1 (default 0)")
    add("--eval-every", type=integer, metavar="N", help="steps between validations, 0: only at the end (default 0)")

    add = parser.add_argument_group("checkpoints and logs").add_argument
    add(
        "--out",
        type=directory,
        metavar="DIR",
        help="directory for checkpoints; the last one is saved at the end (default: none)",
    )
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
    add(
        "--sample",
        type=integer,
        default=30,
        metavar="N",
        help="tokens to generate after training, 0: none (default 30)",
    )

    add = parser.add_argument_group("execution").add_argument
    add("--threads", type=integer, help="worker threads per rank (default: the cores of the host divided by its ranks)")
    add("--precision", choices=PRECISIONS, help=PRECISION)
    rounding = "rounding of the bf16 copy of the weights with --precision bf16 (default nearest)"
    add("--rounding", choices=("nearest", "stochastic"), help=rounding)
    parts = "number of micro-batches that all ranks together divide the batch into (Megatron counts them per rank); "
    parts += (
        "their gradients are summed in one fixed tree (default 8; with --no-deterministic 1 per thread, and on GPUs "
    )
    parts += "1 per rank)"
    add("--micro-batches", type=integer, metavar="M", help=parts)
    add("--micro-shards", type=integer, dest="micro_batches", help=argparse.SUPPRESS)  # former name
    bits = "compute the same bits for any number of threads and ranks (default: yes on CPUs, no on GPUs)"
    add("--deterministic", action=switch, help=bits)
    add(
        "--graph",
        action=switch,
        help="record a step as a CUDA graph and replay it (default: yes where CUDA graphs exist)",
    )
    add(
        "--autotune",
        action="store_true",
        help="time the GPU's kernels again instead of using cached choices (default: no)",
    )
    add("--nvtx", action="store_true", help="add NVTX ranges for a profiler; requires --no-graph (default: no)")

    text = "How the ranks of stages 1 and 3 divide the work."
    add = parser.add_argument_group("many ranks", text).add_argument
    add("--dp", metavar="HOW", help=f"all-reduce of the gradients: {', '.join(STRATEGIES)} (default flat)")
    bucket = f"minimum bucket of --dp bucket in 10^6 bytes (default {BUCKET_MB:g}; measured on GPUs with "
    add("--bucket-mb", type=float, metavar="MB", help=f"{bucket}--no-deterministic)")
    compress = f"format in which gradients are sent: none, {', '.join(CODECS)} (default none)"
    add("--compress", metavar="HOW", help=compress)
    zero = "1: each rank stores only its part of the optimizer state (default 0; with --transport nccl, --dp flat and "
    add("--zero", type=int, choices=(0, 1), help=f"{zero}--compress none: 1)")
    gather = "when --zero 1 gathers the updated parameters: end of the step, or during the next forward pass"
    add("--zero-gather", metavar="end|forward", help=f"{gather} (default end)")
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
    local = "each rank shuffles its own part of the windows (default: no, one order for all ranks)"
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
    add(
        "--stop", metavar="TEXT", help="end as soon as the continuation contains TEXT (default: after --max-new-tokens)"
    )
    temperature = "0: the most likely token; above 0: sample (default 0; with --top-k or --top-p 1)"
    add("--temperature", type=float, help=temperature)
    top_k = "sample among the K most likely tokens, 0: all (default 0)"
    add("--top-k", type=integer, default=0, metavar="K", help=top_k)
    top_p = "sample among the most likely tokens whose probabilities sum to P (default 1: all)"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    add("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    add("--stream", action="store_true", help="print each token as it is generated (default: no, all at the end)")
    stats = "print the numbers of tokens, the time to the first one and milliseconds per token (default: no)"
    add("--stats", action="store_true", help=stats)
    add(
        "--threads",
        type=integer,
        help="threads of a matrix product (default: the cores of the host divided by its ranks)",
    )
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
