"""Every flag of every stage, with its help text, and train() and infer(), which the scripts of a stage call."""

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
from gpt2core.parallel.data_parallel import BUCKET_MB

SWITCH = argparse.BooleanOptionalAction  # --flag and --no-flag
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PRECISION = "precision of the arithmetic; stages 0 and 1: fp32 only (default fp32)"
TRANSPORT = "how stage 3 sends arrays: nccl, or mpi through host memory (default nccl if each rank has its own GPU)"
BLAS = (
    "library of the matrix products in stages 0 and 1: openblas (the one that NumPy contains), or mkl, after `pip "
    "install mkl` (default auto: mkl on an Intel CPU if it is installed, otherwise openblas)"
)
EDITED = "load a checkpoint although its files were changed after they were saved (default: refuse it)"
THREADS = "stages 0 and 1 only (default: the cores that this process may use, divided by the ranks that share them)"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for a wrong flag, and prints help only on the root."""

    is_root = True

    def error(self, message):
        raise ConfigError(f"{message} (--help lists the options)")

    def exit(self, status=0, message=None):
        raise HelpPrinted

    def _print_message(self, message, file=None):
        if self.is_root:
            super()._print_message(message, file)


def integer(text):
    """An int with absolute value below 2^31, so that a size that is too large gives a MemoryError, not an overflow."""
    value = int(text)
    if abs(value) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return value


def directory(text):
    """A Path; raises an error for an empty name, because Path("") is the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a directory, or omit --out")
    return Path(text)


def group(parser, title, text=None):
    """A function add(flag, help, **options of add_argument) that adds a flag to a new group."""
    flags = parser.add_argument_group(title, text)
    return lambda flag, help, **options: flags.add_argument(flag, help=help, **options)


def train_parser():
    """The parser of train_gpt2.py. The default of a flag is None if it depends on the preset, checkpoint or stage."""
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
    add = group(parser, "recipe", "The defaults below are those of --preset paper.")
    add("--steps", "optimizer steps in total, including those before a --resume (default 50)", type=integer)
    add("--batch-size", "sequences per step, over all ranks together (default 16)", type=integer)
    add("--seq-len", "tokens per sequence (default: the model's block size)", type=integer)
    add("--lr", "peak learning rate (default 3e-4)", type=float)
    add("--min-lr", "learning rate at the end of a linear or cosine schedule (default: a tenth of --lr)", type=float)
    add("--schedule", "learning-rate schedule: constant, linear or cosine (default constant)")
    add("--warmup", "steps of linear warm-up of the learning rate (default 0)", type=integer)
    add("--clip", "maximum gradient norm, over all parameters; 0: no clipping (default 0)", type=float)
    add("--weight-decay", "decoupled weight decay, of weight matrices and embeddings only (default 0)", type=float)
    add("--beta1", "AdamW's decay rate of the first moment (default 0.9)", type=float)
    add("--beta2", "AdamW's decay rate of the second moment (default 0.999)", type=float)
    add("--eps", "AdamW's epsilon (default 1e-8)", type=float)
    add("--seed", "seed of initial weights, shuffling and stochastic rounding (default 0)", type=int)


def add_data(parser):
    add = group(parser, "data")
    add("--data", "corpus: a UTF-8 text file or the output of data/prepare.py (default: the preset's)", type=Path)
    text = (
        "word, byte, or the path of a tokenizer.json (default: the tokenizer of the prepared data, else of the "
        "--resume or --init-from checkpoint, else the preset's: word, or the byte pairs of preset book)"
    )
    add("--tokenizer", text)
    text = "read the training sequences of --seq-len tokens in a seeded random order (default: in corpus order)"
    add("--shuffle", text, action=SWITCH)
    add("--val-data", "text or prepared data to validate on (default: no validation)", type=Path)
    text = "part of the corpus, taken from its end, to validate on; 0 <= F < 1 (default 0)"
    add("--val-fraction", text, type=float, metavar="F")
    add("--eval-every", "steps between validations, 0: only at the end (default 0)", type=integer, metavar="N")


def add_outputs(parser):
    add = group(parser, "checkpoints and logs")
    text = "directory for checkpoints; one is always saved at the end (default: nothing is saved)"
    add("--out", text, type=directory, metavar="DIR")
    text = (
        "if --out or --log has an older run, rename it to DIR.1 or FILE.1 (or .2, ...) and start a new one; a run that "
        "--resume continues is not renamed (default: refuse to start)"
    )
    add("--overwrite", text, action="store_true")
    add("--checkpoint-every", "steps between checkpoints, 0: only at the end (default 0)", type=integer, metavar="N")
    add("--keep", "number of newest checkpoints to keep, 0: all (default 2)", type=integer, metavar="K")
    text = (
        "continue the run whose checkpoint is in DIR. Omitted flags have the values of that run, except --out, --log, "
        "--plot, --sample, --threads, --blas, --graph, --autotune, --nvtx and the flags of 'many ranks' (default: a "
        "new run)"
    )
    add("--resume", text, type=Path, metavar="DIR")
    text = "start a new run from the weights in DIR, a checkpoint or a Hugging Face GPT-2 (default: random weights)"
    add("--init-from", text, type=Path, metavar="DIR")
    add("--accept-edited", EDITED, action="store_true")
    add("--log", "log file, one JSON object per line (default: none)", type=Path, metavar="FILE.jsonl")
    add("--log-every", "steps between two lines on the screen and in the log (default 1)", type=integer, metavar="N")
    add("--plot", "image file for the loss curve (default: none)", type=Path, metavar="FILE.png")
    text = "tokens to generate after training, 0: none (default 30)"
    add("--sample", text, type=integer, default=30, metavar="N")


def add_execution(parser):
    add = group(parser, "execution")
    add("--threads", f"worker threads per rank; {THREADS}", type=integer)
    add("--precision", PRECISION, choices=PRECISIONS)
    text = "how --precision bf16 rounds its bf16 copy of the fp32 weights (default nearest)"
    add("--rounding", text, choices=("nearest", "stochastic"))
    text = (
        "micro-batches per step, counted over all data-parallel replicas, unlike Megatron's (default: the largest "
        "power of two up to 8 that divides --batch-size; with --no-deterministic: one per worker thread, or on GPUs "
        "one per replica)"
    )
    add("--micro-batches", text, type=integer, metavar="M")
    add("--micro-shards", argparse.SUPPRESS, type=integer, dest="micro_batches")  # former name
    text = (
        "make the results bitwise identical for any number of threads and data-parallel ranks, not only from run to "
        "run (default: yes on CPUs, no on GPUs)"
    )
    add("--deterministic", text, action=SWITCH)
    add("--blas", BLAS, metavar="LIB")
    add("--graph", "capture a training step as a CUDA graph and replay it (default: yes on GPUs)", action=SWITCH)
    text = "time the candidate GPU kernels again instead of using the cached choices (default: no)"
    add("--autotune", text, action="store_true")
    add("--nvtx", "add NVTX ranges for a profiler; requires --no-graph (default: no)", action="store_true")


def add_ranks(parser):
    add = group(parser, "many ranks", "How the ranks of stages 1 and 3 divide the work.")
    text = (
        "how gradients are summed over ranks: naive (one message per parameter, after backward), flat (one message, "
        "after backward), overlap (one message per parameter, during backward), bucket (several parameters per "
        "message, during backward) (default flat)"
    )
    add("--dp", text, metavar="HOW")
    text = (
        f"minimum size of a message of --dp bucket, in 10^6 bytes (default {BUCKET_MB:g}; with --transport nccl and "
        "--no-deterministic computed from the measured time of all-reduces)"
    )
    add("--bucket-mb", text, type=float, metavar="MB")
    text = f"format in which gradients are sent: none, {', '.join(CODECS)} (default none)"
    add("--compress", text, metavar="HOW")
    text = (
        "1: each data-parallel rank stores only its part of the optimizer state, ZeRO-1 (default 0; "
        "1 for --transport nccl with --dp flat and --compress none)"
    )
    add("--zero", text, type=int, choices=(0, 1))
    text = (
        "time at which --zero 1 all-gathers the updated parameters: end (of the step) or forward (during the next "
        "forward pass) (default end)"
    )
    add("--zero-gather", text, metavar="end|forward")
    text = "tensor-parallel size: number of ranks that divide each layer, a divisor of the number of ranks (default 1)"
    add("--tp", text, type=integer, metavar="N")
    text = (
        "algorithm of sums over ranks: canonical, ring, halving-doubling, tree or mpi; with --transport nccl: "
        "canonical or nccl (default canonical, whose sums do not depend on the number of ranks; with "
        "--no-deterministic the library's own algorithm, mpi or nccl)"
    )
    add("--collectives", text, metavar="HOW")
    add("--transport", TRANSPORT, metavar="HOW")
    text = "steps between comparisons of the parameters of all replicas, 0: only at the end (default 0)"
    add("--verify-every", text, type=int, metavar="N")
    text = (
        "each rank reads its own part of the training sequences in its own random order, with or without --shuffle "
        "(default: one order for all ranks)"
    )
    add("--local-shuffle", text, action=SWITCH)


def inference_parser():
    """The parser of inference.py."""
    text = "Continue a prompt. Without flags: the shipped weights continue the first tokens of the shipped corpus."
    parser = Parser(description=text)
    parser.add_argument("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add = group(parser, "input")
    text = "directory of a checkpoint or a Hugging Face GPT-2 (default: the shipped weights)"
    add("--weights", text, type=Path, default=WEIGHTS, metavar="DIR")
    add("--accept-edited", EDITED, action="store_true")
    add("--tokenizer", "word, byte, or the path of a tokenizer.json (default: tokenizer.json in --weights)")
    text = "text to continue (default: the first 256 tokens of the corpus that the weights were trained on)"
    add("--prompt", text)
    text = "file with the text to continue; a line break at its end is ignored"
    add("--prompt-file", text, type=Path, metavar="FILE")
    add("--prompts", "file with one prompt per line; only with --mode batch", type=Path, metavar="FILE")
    text = (
        "read prompts from standard input, one per line, and continue each as it is read; the model is loaded once; "
        "Ctrl-D or an empty line ends (default: no)"
    )
    add("--interactive", text, action="store_true")
    add = group(parser, "generation")
    add("--max-new-tokens", "tokens to generate (default 30)", type=integer, default=30, metavar="N")
    add("--stop", "stop when the continuation contains TEXT (default: do not stop early)", metavar="TEXT")
    text = "sampling temperature; 0: greedy (default 0, or 1 if --top-k or --top-p is given)"
    add("--temperature", text, type=float)
    text = "sample among the K most likely tokens, 0: all (default 0)"
    add("--top-k", text, type=integer, default=0, metavar="K")
    text = (
        "nucleus sampling: sample among the smallest set of most likely tokens whose probabilities sum to P or more "
        "(default 1: all tokens)"
    )
    add("--top-p", text, type=float, default=1.0, metavar="P")
    add("--seed", "seed of the sampling (default 0)", type=int, default=0)
    add("--stream", "print each token as it is generated (default: all at the end)", action="store_true")
    text = "print token counts, the time to the first token and milliseconds per token (default: no)"
    add("--stats", text, action="store_true")
    add = group(parser, "execution")
    add("--threads", f"threads per rank that divide the rows of a kernel; {THREADS}", type=integer)
    add("--blas", BLAS, metavar="LIB")
    text = (
        "how ranks divide the work: replicate (each rank decodes the prompt, logits are averaged), batch (each rank "
        "decodes a part of --prompts), tensor (the ranks divide each layer) (default replicate)"
    )
    add("--mode", text, default="replicate", metavar="HOW")
    add("--transport", TRANSPORT, metavar="HOW")
    add("--precision", PRECISION, choices=PRECISIONS, default="fp32")
    return parser


def train(backend, world, argv=None):
    """The command of a stage's train_gpt2.py: parse the flags, train, exit.

    backend(precision, deterministic) -> Backend; world() -> Communicator.
    """
    run_command(world, lambda ranks: train_command(backend, ranks, *parse(train_parser(), ranks, argv)))


def infer(backend, world, argv=None):
    """The command of a stage's inference.py: parse the flags, generate, exit."""
    run_command(world, lambda ranks: inference_command(backend, ranks, *parse(inference_parser(), ranks, argv)))


def parse(parser, world, argv):
    """(parsed flags, number of cores for this rank), equal flags on all ranks; raises HelpPrinted after --help."""
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
