"""The flags of train_gpt2.py and inference.py, with their help texts; train() and infer(), which these scripts call."""

import argparse

import gpt2core
from gpt2core.app.command import run_command
from gpt2core.app.flag_parser import HelpPrinted, Parser, not_empty, stop_text, to_path
from gpt2core.app.inference_command import inference_command
from gpt2core.app.presets import PRESETS, WEIGHTS
from gpt2core.app.rank_agreement import agree_on_start
from gpt2core.parallel.codecs import CODECS
from gpt2core.parallel.data_parallel import BUCKET_MB

SWITCH = argparse.BooleanOptionalAction  # --flag and --no-flag
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PRECISION = (
    "precision of the arithmetic; stages 0 and 1: fp32, or bf16 on a CPU with amx_bf16 and with MKL installed "
    "(default fp32)"
)
TRANSPORT = "how stage 3 sends arrays: nccl, or mpi (through host memory); default: nccl if each rank has its own GPU"
BLAS = (
    "library of the matrix products in stages 0 and 1: openblas (contained in NumPy), mkl (after `pip install mkl`) or "
    "auto (default): mkl with --precision bf16 or, if it is installed, on an Intel CPU, otherwise openblas"
)
EDITED = "load a checkpoint even if its files were changed after they were saved (default: refuse it)"
THREADS = "stages 0 and 1 only (default: the cores that this process may use, divided by the ranks that share them)"

TRAINING = (  # the examples of train_gpt2.py: (flags, comment)
    ("", "the paper's training: 50 steps"),
    ("--preset nano --steps 20 --out out/nano --overwrite", "a small model, saved"),
    ("--resume out/nano --steps 40", "continue that run to step 40"),
)
INFERENCE = (
    ("", "continue the start of the corpus"),
    ('--prompt "In the spring" --max-new-tokens 10', "continue a text"),
    ("--top-k 40 --seed 1 --stream", "sample, and print each token at once"),
)


def integer(text):
    """The int in `text`; an error if its absolute value is 2^31 or more: sizes computed from it could overflow."""
    value = int(text)
    if abs(value) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return value


def add_group(parser, title, description=None):
    """Add a group of flags to the parser; returns add(flag, help, **options of add_argument), which adds one flag."""
    flags = parser.add_argument_group(title, description)
    return lambda flag, help, **options: flags.add_argument(flag, help=help, **options)


def train_parser():
    """The parser of train_gpt2.py. An omitted flag is parsed as None if its default depends on other flags or files."""
    parser = Parser("Train a GPT-2. Without flags: the paper's configuration on the shipped corpus.", TRAINING)
    parser.add_argument("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add_recipe(parser)
    add_data(parser)
    add_outputs(parser)
    add_execution(parser)
    add_ranks(parser)
    return parser


def add_recipe(parser):
    add = add_group(parser, "model")
    add("--preset", f"model size and recipe: {', '.join(PRESETS)} (default paper)")
    add("--n-layer", "number of layers (default: the preset's)", type=integer)
    add("--n-head", "attention heads per layer (default: the preset's)", type=integer)
    add("--n-embd", "channels: the width of the model, a multiple of --n-head (default: the preset's)", type=integer)
    add("--block-size", "longest context of the model, in tokens (default: the preset's)", type=integer)
    add = add_group(parser, "recipe", "The defaults below are those of --preset paper.")
    add("--steps", "total number of optimizer steps, including the steps before a --resume (default 50)", type=integer)
    add("--batch-size", "training sequences per step, over all ranks together (default 16)", type=integer)
    add("--seq-len", "tokens per training sequence (default: the model's block size)", type=integer)
    add("--lr", "peak learning rate (default 3e-4)", type=float)
    add("--min-lr", "learning rate at the end of a linear or cosine schedule (default: a tenth of --lr)", type=float)
    add("--schedule", "learning-rate schedule: constant, linear or cosine (default constant)")
    add("--warmup", "steps of linear warm-up of the learning rate (default 0)", type=integer)
    add("--clip", "maximum gradient norm, over all parameters; 0: no clipping (default 0)", type=float)
    add("--weight-decay", "decoupled weight decay, only of weight matrices and embeddings (default 0)", type=float)
    add("--beta1", "AdamW's decay rate of the first moment (default 0.9)", type=float)
    add("--beta2", "AdamW's decay rate of the second moment (default 0.999)", type=float)
    add("--eps", "AdamW's epsilon (default 1e-8)", type=float)
    add("--seed", "seed of initial weights, shuffling and stochastic rounding (default 0)", type=int)


def add_data(parser):
    add = add_group(parser, "data")
    add("--data", "corpus: a UTF-8 text file or the output of data/prepare.py (default: the preset's)", type=to_path)
    text = (
        "word (each word of the corpus is a token), byte (each byte is a token), or the path of a tokenizer.json. The "
        "default is the first of these that exists: the tokenizer in the output of data/prepare.py; the tokenizer of "
        "the checkpoint of --resume or --init-from; for preset book, the tokenizer of data/gpt2-book; otherwise word"
    )
    add("--tokenizer", text, type=not_empty)
    text = "read the training sequences in a random order, given by --seed (default: in the order of the corpus)"
    add("--shuffle", text, action=SWITCH)
    add("--val-data", "validation data: a text or the output of data/prepare.py (default: no validation)", type=to_path)
    text = "use the last part of the corpus, the fraction F of its tokens, for validation; 0 <= F < 1 (default 0)"
    add("--val-fraction", text, type=float, metavar="F")
    add("--eval-every", "steps between validations; 0: only at the end (default 0)", type=integer, metavar="N")


def add_outputs(parser):
    add = add_group(parser, "checkpoints and logs")
    text = "directory for checkpoints; a checkpoint is always saved at the end (default: nothing is saved)"
    add("--out", text, type=to_path, metavar="DIR")
    text = (
        "if the --out directory or the --log file belongs to an older run, rename it to DIR.1 or FILE.1 (or .2, ...) "
        "and start a new run; nothing is renamed if --resume continues this older run (default: refuse to start)"
    )
    add("--overwrite", text, action="store_true")
    add("--checkpoint-every", "steps between checkpoints; 0: only at the end (default 0)", type=integer, metavar="N")
    add("--keep", "how many of the newest checkpoints to keep; 0: all (default 2)", type=integer, metavar="K")
    text = (
        "continue the run whose checkpoint is in DIR. An omitted flag has the value that it had in that run, except "
        "these flags, which must be given again: --out, --log, --plot, --trace, --sample, --threads, --blas, --graph, "
        "--autotune, --nvtx and all flags of the group 'many ranks' (default: start a new run)"
    )
    add("--resume", text, type=to_path, metavar="DIR")
    text = "start a new run with the weights of a checkpoint, or of a GPT-2 in Hugging Face's format (default: random)"
    add("--init-from", text, type=to_path, metavar="DIR")
    add("--accept-edited", EDITED, action="store_true")
    add("--log", "log file, with one JSON object per line (default: no log)", type=to_path, metavar="FILE.jsonl")
    add("--log-every", "print and log one line for every N steps (default 1)", type=integer, metavar="N")
    add("--plot", "image file for a plot of the loss curve (default: no plot)", type=to_path, metavar="FILE.png")
    text = (
        "file for a trace of the first steps, in Chrome's format, which ui.perfetto.dev opens: when each kernel and "
        "each collective ran, on every rank; the steps take longer, the losses are the same (default: no trace)"
    )
    add("--trace", text, type=to_path, metavar="FILE.json")
    add("--trace-steps", "number of steps in the --trace (default 5)", type=integer, metavar="N")
    text = "tokens of the sample text that is generated after training; 0: no sample (default 30)"
    add("--sample", text, type=integer, default=30, metavar="N")


def add_execution(parser):
    add = add_group(parser, "execution")
    add("--threads", f"worker threads per rank; {THREADS}", type=integer)
    add("--precision", PRECISION, choices=PRECISIONS)
    text = "GPUs: how --precision bf16 rounds the fp32 weights to their bf16 copy (default nearest)"
    add("--rounding", text, choices=("nearest", "stochastic"))
    text = (
        "the number of micro-batches into which the --batch-size sequences of a step are divided, over all "
        "data-parallel replicas together: with 2 replicas and M = 8, each replica computes 4 (Megatron counts the "
        "micro-batches of one replica). Default: the largest power of two up to 8 that divides --batch-size. Default "
        "with --no-deterministic: one per worker thread; on GPUs, one per replica"
    )
    add("--micro-batches", text, type=integer, metavar="M")
    add("--micro-shards", argparse.SUPPRESS, type=integer, dest="micro_batches")  # former name of --micro-batches
    text = (
        "--deterministic: the results are bitwise identical for any number of threads and of data-parallel ranks. "
        "--no-deterministic: other numbers of threads or ranks change the results by rounding errors. With equal "
        "numbers, a repeated run can differ only in two cases: on GPUs, if it uses other kernel choices (see "
        "--autotune); on several ranks, if MPI or NCCL adds in another order (default: yes on CPUs, no on GPUs)"
    )
    add("--deterministic", text, action=SWITCH)
    add("--blas", BLAS, metavar="LIB")
    add("--graph", "capture a step as a CUDA graph and replay it in later steps (default: yes on GPUs)", action=SWITCH)
    text = "time the candidates of each GPU kernel again instead of using the choices cached on disk (default: no)"
    add("--autotune", text, action="store_true")
    add("--nvtx", "mark NVTX ranges for a profiler; requires --no-graph (default: no)", action="store_true")


def add_ranks(parser):
    add = add_group(parser, "many ranks", "How the ranks of stages 1 and 3 divide the work.")
    text = (
        "data parallelism: how gradients are summed over ranks. naive: after backward, one message per parameter. "
        "flat: after backward, one message for all parameters. overlap: during backward, one message per parameter. "
        "bucket: during backward, one message for several parameters (default flat)"
    )
    add("--dp", text, metavar="HOW")
    text = (
        "minimum size of a message of --dp bucket, in 10^6 bytes. Default: with --transport nccl and "
        f"--no-deterministic, a size computed from the measured time of all-reduces; otherwise {BUCKET_MB:g}"
    )
    add("--bucket-mb", text, type=float, metavar="MB")
    text = f"format in which gradients are sent to other ranks: none (fp32), {', '.join(CODECS)} (default none)"
    add("--compress", text, metavar="HOW")
    text = (
        "1: each data-parallel rank stores only its part of the optimizer state (ZeRO-1). 0: each stores all of it. "
        "Default: 1 with --transport nccl, --dp flat and --compress none; otherwise 0"
    )
    add("--zero", text, type=int, choices=(0, 1))
    text = (
        "the time at which --zero 1 all-gathers the updated parameters: end (at the end of the step), or forward "
        "(during the next forward pass) (default end)"
    )
    add("--zero-gather", text, metavar="end|forward")
    text = (
        "tensor-parallel size: the number of ranks that share the work of each layer; the number of all ranks must be "
        "a multiple of it (default 1)"
    )
    add("--tp", text, type=integer, metavar="N")
    text = (
        "algorithm of sums over ranks: canonical, ring, halving-doubling, tree, root or mpi; with --transport nccl "
        "only canonical or nccl. mpi and nccl are the libraries' own algorithms. The sums of canonical do not depend "
        "on the number of ranks. Default: canonical; with --no-deterministic, nccl for --transport nccl, otherwise mpi"
    )
    add("--collectives", text, metavar="HOW")
    add("--transport", TRANSPORT, metavar="HOW")
    text = "steps between checks that all replicas have equal parameters; 0: only at the end (default 0)"
    add("--verify-every", text, type=int, metavar="N")
    text = (
        "each rank reads only its own part of the corpus, in a random order of its own, whether --shuffle is given or "
        "not; the loss then depends on the number of ranks (default: no; all ranks share one order of the sequences)"
    )
    add("--local-shuffle", text, action=SWITCH)


def inference_parser():
    """The parser of inference.py."""
    text = "Continue a prompt. Without flags: the shipped weights continue the first tokens of the shipped corpus."
    parser = Parser(text, INFERENCE)
    parser.add_argument("--version", action="version", version=f"staged-gpt2 {gpt2core.__version__}")
    add = add_group(parser, "input")
    text = "directory of a checkpoint, or of a GPT-2 in Hugging Face's format (default: the shipped data/gpt2-paper)"
    add("--weights", text, type=to_path, default=WEIGHTS, metavar="DIR")
    add("--accept-edited", EDITED, action="store_true")
    text = "word (the words of the shipped corpus), byte, or the path of a tokenizer.json (default: that of --weights)"
    add("--tokenizer", text, type=not_empty)
    text = "text to continue (default: the first 256 tokens of the corpus that the weights were trained on)"
    add("--prompt", text)
    text = "file with the text to continue, without the line break at its end"
    add("--prompt-file", text, type=to_path, metavar="FILE")
    add("--prompts", "file with one prompt per line; only with --mode batch", type=to_path, metavar="FILE")
    text = (
        "read prompts from standard input, one per line, and continue each line before the next is read; the model is "
        "loaded only once; Ctrl-D or an empty line ends the program (default: no)"
    )
    add("--interactive", text, action="store_true")
    add = add_group(parser, "generation")
    add("--max-new-tokens", "tokens to generate (default 30)", type=integer, default=30, metavar="N")
    text = "stop when the continuation contains TEXT (default: do not stop early)"
    add("--stop", text, type=stop_text, metavar="TEXT")
    text = "sampling temperature; 0: greedy (default 0, or 1 if --top-k or --top-p is given)"
    add("--temperature", text, type=float)
    text = "sample among the K most likely tokens; 0: among all tokens (default 0)"
    add("--top-k", text, type=integer, default=0, metavar="K")
    text = (
        "nucleus sampling: sample among the smallest set of most likely tokens whose probabilities sum to P or more "
        "(default 1: all tokens)"
    )
    add("--top-p", text, type=float, default=1.0, metavar="P")
    add("--seed", "seed of the sampling (default 0)", type=int, default=0)
    text = "print each token as soon as it is generated (default: only on a terminal, otherwise all at the end)"
    add("--stream", text, action="store_true")
    text = "print token counts, the time to the first token and milliseconds per token (default: no)"
    add("--stats", text, action="store_true")
    add = add_group(parser, "execution")
    add("--threads", f"number of threads among which BLAS divides each matrix product; {THREADS}", type=integer)
    add("--blas", BLAS, metavar="LIB")
    text = (
        "how the ranks divide the work. replicate, the method of the paper: nothing is divided. Each rank computes all "
        "logits, which are equal on the ranks up to rounding. Rank 0 chooses each token from their mean over ranks; "
        "all ranks continue with this token. batch: each rank continues a part of the --prompts. tensor: the ranks "
        "divide each layer (default replicate)"
    )
    add("--mode", text, default="replicate", metavar="HOW")
    add("--transport", TRANSPORT, metavar="HOW")
    add("--precision", PRECISION, choices=PRECISIONS, default="fp32")
    return parser


def train(backend, world, argv=None):
    """The command of a stage's train_gpt2.py: parse the flags, train, exit.

    backend: a class, called as backend(precision, deterministic), which gives a Backend. world: a class, called as
    world(), which gives the Communicator of all ranks. argv: a list of command-line arguments; None: sys.argv[1:].
    """
    from gpt2core.app.train_command import train_command  # here, because inference.py starts faster without it

    run_command(world, lambda ranks: train_command(backend, ranks, *parse(train_parser(), ranks, argv)))


def infer(backend, world, argv=None):
    """The command of a stage's inference.py: parse the flags, generate, exit. The arguments are those of train()."""
    run_command(world, lambda ranks: inference_command(backend, ranks, *parse(inference_parser(), ranks, argv)))


def parse(parser, world, argv):
    """(parsed flags, number of cores for this rank); raises HelpPrinted after --help.

    All ranks must call it. Raises ConfigError unless the flags are equal on all ranks.
    """
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
