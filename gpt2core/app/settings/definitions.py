"""Every setting of the two commands, defined once: its name, type, default, group, help text and what a resume does.

Derived from this file: the parser and --help (cli.py), the tables of docs/USAGE.md (benchmarks/harness/flag_tables.py),
RunConfig (run_config.py), the settings in state.json (resume.py) and the comparison of ranks (rank_agreement.py). To
add a setting, add a line to TrainSettings or InferenceSettings, and read it where it is used.
"""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from gpt2core.app.settings.flag_parser import not_empty, stop_text
from gpt2core.app.settings.setting_fields import AGAIN, SAVED, Settings, defaults_of, flag, setting
from gpt2core.app.shipped import BOOK, CORPUS
from gpt2core.architecture import POSITIONS
from gpt2core.codecs import CODECS
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import BUCKET_MB, PP_SCHEDULES, RECOMPUTE, ZERO, ParallelConfig
from gpt2core.presets import PRESETS

# Groups: (title, description) for --help and docs/USAGE.md
MODEL = ("model", None)
RECIPE = ("recipe", "The defaults below are those of --preset paper.")
DATA = ("data", None)
OUTPUTS = ("checkpoints and logs", None)
EXECUTION = ("execution", None)
RANKS = ("many ranks", "How the ranks of stages 1 and 3 divide the work.")
FILE = ("settings in a file", None)
INPUT = ("input", None)
GENERATION = ("generation", None)

WRITTEN = dict(kept=AGAIN, written=True)  # the options of a file that the run writes

# Help texts that both commands have
EDITED = "load a checkpoint even if its files were changed after they were saved (default: refuse it)"
BLAS = (
    "library of the matrix products in stages 0 and 1: openblas (contained in NumPy), mkl (after `pip install mkl`) or "
    "auto (default): mkl with --precision bf16 or, if it is installed, on an Intel CPU, otherwise openblas"
)
CONFIG = "TOML file with settings, one per line, such as {}; flags on the command line override them"
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PRECISION = "precision of the arithmetic; stages 0 and 1: fp32, or bf16 on a CPU with amx_bf16 and with MKL installed"
THREADS = "stages 0 and 1 only (default: the cores that this process may use, divided by the ranks that share them)"
TRANSPORT = "how stage 3 sends arrays: nccl, or mpi (through host memory); default: nccl if each rank has its own GPU"


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """The settings of train_gpt2.py, equal on all ranks; None: not given."""

    summary: ClassVar = "Train a GPT-2. Without flags: the paper's configuration on the shipped corpus."
    memory_advice: ClassVar = "lower --batch-size, raise --micro-batches or use a smaller --preset"
    examples: ClassVar = (  # (flags, comment)
        ("", "the paper's training: 50 steps"),
        ("--preset nano --steps 20 --out out/nano --overwrite", "a small model in a directory of your choice"),
        ("--resume out/nano --out out/nano --steps 40", "continue that run to step 40"),
    )

    config: Path = setting(
        FILE,
        CONFIG.format("batch_size = 16")
        + ". A run saves its settings as settings.toml beside its checkpoints (default: no file)",
        metavar="FILE.toml",
        compared=True,
        one_call=True,
    )

    preset: str = setting(MODEL, f"model size and recipe: {', '.join(PRESETS)}", "paper", SAVED, choices=tuple(PRESETS))
    n_layer: int = setting(MODEL, "number of layers (default: the preset's)", at_least=1)
    n_head: int = setting(MODEL, "attention heads per layer (default: the preset's)", at_least=1)
    n_embd: int = setting(
        MODEL, "channels: the width of the model, a multiple of --n-head (default: the preset's)", at_least=1
    )
    block_size: int = setting(MODEL, "longest context of the model, in tokens (default: the preset's)", at_least=1)
    positions: str = setting(
        MODEL,
        "learned: a vector for each position, as in GPT-2. rotary: queries and keys are rotated by their position, and "
        "the checkpoint is a GPT-NeoX of Hugging Face (default: learned, or the checkpoint's)",
        choices=POSITIONS,
        metavar="|".join(POSITIONS),
    )

    steps: int = setting(
        RECIPE, "total number of optimizer steps, including the steps before a --resume", 50, SAVED, at_least=0
    )
    epochs: int = setting(
        RECIPE,
        "instead of --steps: the total number of passes over the training tokens, rounded up to whole steps; the paper "
        "calls one batch an epoch, and so its 50 epochs are --steps 50 (default: --steps is used)",
        metavar="E",
        instead_of="steps",
        at_least=1,
    )
    batch_size: int = setting(RECIPE, "training sequences per step, over all ranks together", 16, SAVED, at_least=1)
    seq_len: int = setting(
        RECIPE, "tokens per training sequence (default: the model's block size)", None, SAVED, at_least=1
    )
    lr: float = setting(RECIPE, "peak learning rate", 3e-4, SAVED)
    min_lr: float = setting(
        RECIPE,
        "learning rate at the end of a linear or cosine schedule (default: a tenth of --lr)",
        None,
        SAVED,
    )
    schedule: str = setting(RECIPE, "learning-rate schedule: constant, linear or cosine", "constant", SAVED)
    warmup: int = setting(RECIPE, "steps of linear warm-up of the learning rate", 0, SAVED, at_least=0)
    clip: float = setting(RECIPE, "maximum gradient norm, over all parameters; 0: no clipping", 0.0, SAVED)
    dropout: float = setting(
        RECIPE,
        "the share of the numbers of the embedding and of each branch that a training step sets to zero, 0 <= P < 1; "
        "none are in validation and in generated texts. The loss of a step is that with these zeros",
        0.0,
        SAVED,
        metavar="P",
    )
    weight_decay: float = setting(RECIPE, "decoupled weight decay, only of weight matrices and embeddings", 0.0, SAVED)
    beta1: float = setting(RECIPE, "AdamW's decay rate of the first moment", 0.9, SAVED)
    beta2: float = setting(RECIPE, "AdamW's decay rate of the second moment", 0.999, SAVED)
    eps: float = setting(RECIPE, "AdamW's epsilon", 1e-8, SAVED)
    seed: int = setting(
        RECIPE,
        "seed of initial weights, shuffling, dropout and stochastic rounding",
        0,
        SAVED,
        at_least=0,
        at_most=math.inf,
    )

    data: Path = setting(
        DATA,
        "corpus: a UTF-8 text file, the output of data/prepare.py, or files of tokens as llm.c or nanoGPT write them; "
        "'DIR/*.bin', in quotes, joins all files of a pattern in the order of their names (default: the preset's)",
        CORPUS,
        SAVED,
        compared=True,
    )
    tokenizer: str = setting(
        DATA,
        "word (each word of the corpus is a token), byte (each byte is a token), or the path of a tokenizer.json. The "
        "default is the first of these that exists: the tokenizer in the output of data/prepare.py; the tokenizer of "
        "the checkpoint of --resume or --init-from; for preset book, the tokenizer of data/gpt2-book; otherwise word",
        parse=not_empty,
    )
    shuffle: bool = setting(
        DATA,
        "read the training sequences in a random order, given by --seed (default: in the order of the corpus)",
        False,
        SAVED,
        switch=True,
    )
    val_data: Path = setting(
        DATA,
        "validation data, of the same kinds as --data (default: no validation)",
        None,
        SAVED,
        compared=True,
    )
    val_fraction: float = setting(
        DATA,
        "use the last part of the corpus, the fraction F of its tokens, for validation; 0 <= F < 1 (default 0)",
        None,
        SAVED,
        metavar="F",
    )
    eval_every: int = setting(DATA, "steps between validations; 0: only at the end", 0, SAVED, metavar="N", at_least=0)

    out: Path = setting(
        OUTPUTS,
        "directory for checkpoints; a checkpoint is always saved at the end (default: a new directory "
        "out/STAGE-PRESET of the repository, for example out/stage1-tiny; with -2, -3, ... after it if an older run "
        "has this name. If the repository cannot be written or the package is installed without it: out/ of the "
        "current directory)",
        metavar="DIR",
        one_call=True,
    )
    save: bool = setting(OUTPUTS, "--no-save: save no checkpoint (default: yes)", True, switch=True)
    overwrite: bool = setting(
        OUTPUTS,
        "if the --out directory or the --log file belongs to an older run, rename it to DIR.1 or FILE.1 (or .2, ...) "
        "and start a new run; nothing is renamed if --resume continues this older run (default: refuse to start)",
        False,
        one_call=True,
    )
    checkpoint_every: int = setting(
        OUTPUTS, "steps between checkpoints; 0: only at the end", 0, SAVED, metavar="N", at_least=0
    )
    checkpoint_seconds: float = setting(
        OUTPUTS,
        "also save a checkpoint after the first step that ends S seconds or more after the last checkpoint, or after "
        "the start (default: only --checkpoint-every counts)",
        None,
        SAVED,
        metavar="S",
        above=0,
    )
    async_checkpoints: bool = setting(
        OUTPUTS,
        "save checkpoints, except the last one, in another process while training continues; rank 0 then needs 12 more "
        "bytes of memory for each parameter, on a GPU also of its memory, and an error of a save does not end the run "
        "(default: training waits)",
        False,
        AGAIN,
    )
    keep: int = setting(
        OUTPUTS, "how many of the newest checkpoints to keep; 0: all", 2, SAVED, metavar="K", at_least=0
    )
    resume: Path = setting(
        OUTPUTS,
        "continue the run whose checkpoint is in DIR. An omitted flag has the value that it had in that run, except "
        "these flags, which must be given again: --out, {AGAIN} (default: start a new run)",
        metavar="DIR",
        one_call=True,
    )
    init_from: Path = setting(
        OUTPUTS,
        "start a new run with the weights of a checkpoint, or of a GPT-2 in Hugging Face's format (default: random)",
        metavar="DIR",
    )
    accept_edited: bool = setting(OUTPUTS, EDITED, False)
    log: Path = setting(
        OUTPUTS, "log file, with one JSON object per line (default: no log)", metavar="FILE.jsonl", **WRITTEN
    )
    log_every: int = setting(OUTPUTS, "print and log one line for every N steps", 1, SAVED, metavar="N", at_least=1)
    plot: Path = setting(
        OUTPUTS, "image file for a plot of the loss curve (default: no plot)", metavar="FILE.png", **WRITTEN
    )
    trace: Path = setting(
        OUTPUTS,
        "file for a trace of the first steps, in Chrome's format, which ui.perfetto.dev opens: when each kernel and "
        "each collective ran, on every rank; the steps take longer, the losses are the same (default: no trace)",
        metavar="FILE.json",
        **WRITTEN,
    )
    trace_steps: int = setting(OUTPUTS, "number of steps in the --trace", 5, AGAIN, metavar="N", at_least=1)
    sample: int = setting(
        OUTPUTS,
        "tokens of the sample text that is generated after training; 0: no sample",
        30,
        AGAIN,
        metavar="N",
        at_least=0,
    )
    sample_every: int = setting(
        OUTPUTS, "steps between sample texts; 0: only after training", 0, AGAIN, metavar="N", at_least=0
    )

    threads: int = setting(EXECUTION, f"worker threads per rank; {THREADS}", None, AGAIN, at_least=1)
    recompute: str = setting(
        EXECUTION,
        "block: keep only the input of each block in the forward pass, and compute the block again in the backward "
        "pass: less memory, more time, the same results. none: keep all activations",
        ParallelConfig.recompute,
        AGAIN,
        choices=RECOMPUTE,
        metavar="none|block",
    )
    precision: str = setting(EXECUTION, PRECISION, "fp32", SAVED, choices=PRECISIONS, metavar="|".join(PRECISIONS))
    rounding: str = setting(
        EXECUTION,
        "GPUs: how --precision bf16 rounds the fp32 weights to their bf16 copy",
        "nearest",
        SAVED,
        choices=("nearest", "stochastic"),
        metavar="nearest|stochastic",
    )
    micro_batches: int = setting(
        EXECUTION,
        "the number of micro-batches into which the --batch-size sequences of a step are divided, over all "
        "data-parallel replicas together: with 2 replicas and M = 8, each replica computes 4 (Megatron counts the "
        "micro-batches of one replica). Default: the largest power of two up to 8 that divides --batch-size. Default "
        "with --no-deterministic: one per worker thread; on GPUs, one per replica",
        None,
        SAVED,
        metavar="M",
        former="micro_shards",
    )
    deterministic: bool = setting(
        EXECUTION,
        "--deterministic: the results are bitwise identical for any number of threads and of data-parallel ranks. "
        "--no-deterministic: other numbers of threads or ranks change the results by rounding errors. With equal "
        "numbers, a repeated run can differ only in two cases: on GPUs, if it uses other kernel choices (see "
        "--autotune); on several ranks, if MPI or NCCL adds in another order (default: yes on CPUs, no on GPUs)",
        None,
        SAVED,
        switch=True,
    )
    blas: str = setting(EXECUTION, BLAS, None, AGAIN, metavar="LIB")
    graph: bool = setting(
        EXECUTION,
        "capture a step as a CUDA graph and replay it in later steps (default: yes on GPUs, but not with "
        "--sparse-embedding)",
        None,
        AGAIN,
        switch=True,
    )
    autotune: bool = setting(
        EXECUTION,
        "time the candidates of each GPU kernel again instead of using the choices cached on disk",
        False,
        AGAIN,
    )
    dry_run: bool = setting(
        EXECUTION,
        "train nothing and write nothing: check the flags, and print the parameters, the operations and the memory of "
        "a step, and what a rank sends in it; needs no GPU",
        False,
        one_call=True,
    )
    nvtx: bool = setting(EXECUTION, "mark NVTX ranges for a profiler; requires --no-graph", False, AGAIN)

    dp: str = setting(
        RANKS,
        "data parallelism: how gradients are summed over ranks. naive: after backward, one message per parameter. "
        "flat: after backward, one message for all parameters. overlap: during backward, one message per parameter. "
        "bucket: during backward, one message for several parameters",
        ParallelConfig.dp,
        AGAIN,
        metavar="HOW",
    )
    bucket_mb: float = setting(
        RANKS,
        "minimum size of a message of --dp bucket, in 10^6 bytes. Default: with --transport nccl and "
        f"--no-deterministic, a size computed from the measured time of all-reduces; otherwise {BUCKET_MB:g}",
        None,
        AGAIN,
        metavar="MB",
    )
    sparse_embedding: bool = setting(
        RANKS,
        "of the gradient of the token embedding, send only the rows of the tokens in the batch, with the same results "
        "bit for bit. Only for a model whose embedding is not tied, with --compress none, --zero 0 or 1 (1 not with "
        "--dp flat), and --canonical-tp equal to --tp. On GPUs, steps are not captured",
        False,
        AGAIN,
        switch=True,
    )
    compress: str = setting(
        RANKS,
        f"format in which gradients are sent to other ranks: none (fp32), {', '.join(CODECS)}",
        ParallelConfig.compress,
        AGAIN,
        metavar="HOW",
    )
    zero: int = setting(
        RANKS,
        "what each data-parallel rank stores only its part of. 0: nothing. 1: the optimizer state (ZeRO-1). 2: also "
        "the gradients. 3: also the parameters. 2 and 3 need --dp flat, --compress none and --zero-gather end; without "
        "--threads a rank has one thread. Default: 1 with --transport nccl, --dp flat, --compress none and without "
        "--sparse-embedding; otherwise 0",
        None,
        AGAIN,
        choices=ZERO,
        metavar="0|1|2|3",
    )
    zero_gather: str = setting(
        RANKS,
        "the time at which --zero 1 all-gathers the updated parameters: end (at the end of the step), or forward "
        "(during the next forward pass)",
        ParallelConfig.zero_gather,
        AGAIN,
        metavar="end|forward",
    )
    tp: int = setting(
        RANKS,
        "tensor-parallel size: the number of ranks that share the work of each layer; the number of all ranks must be "
        "a multiple of it",
        ParallelConfig.tp,
        AGAIN,
        metavar="N",
    )
    canonical_tp: int = setting(
        RANKS,
        "S, a multiple of --tp: each layer is computed in S slices, which are added in a fixed order. The results are "
        "those of --tp S for every --tp, bit for bit, with --collectives canonical or tree; on GPUs with "
        "--deterministic (default: --tp)",
        None,
        AGAIN,
        metavar="S",
    )
    pp: int = setting(
        RANKS,
        "pipeline-parallel size: the number of ranks that divide the layers; the number of all ranks must be "
        "a multiple of it. Without --threads a rank has one thread. Only with --compress none and --zero-gather end",
        ParallelConfig.pp,
        AGAIN,
        metavar="N",
    )
    pp_schedule: str = setting(
        RANKS,
        "the order in which a rank of --pp computes its micro-batches; interleaved: several chunks of layers on each "
        "rank; zero-bubble: gradients of weights are computed where a rank would wait",
        ParallelConfig.pp_schedule,
        AGAIN,
        choices=tuple(PP_SCHEDULES),
        metavar="HOW",
    )
    chunks: int = setting(
        RANKS,
        "chunks of consecutive layers on each rank of --pp (default: 2 with --pp-schedule interleaved, otherwise 1)",
        None,
        AGAIN,
        metavar="V",
        at_least=1,
    )
    schedule_picture: bool = setting(
        RANKS,
        "after the last step, print when each rank of --pp computed, beside a simulation; all ranks on one host",
        False,
        AGAIN,
    )
    collectives: str = setting(
        RANKS,
        "algorithm of sums over ranks: canonical, ring, halving-doubling, tree, root or mpi; with --transport nccl "
        "only canonical or nccl. mpi and nccl are the libraries' own algorithms. The sums of canonical do not depend "
        "on the number of ranks. Default: canonical; with --no-deterministic, nccl for --transport nccl, otherwise mpi",
        None,
        AGAIN,
        metavar="HOW",
    )
    transport: str = setting(RANKS, TRANSPORT, None, AGAIN, metavar="HOW", stage=3)
    verify_every: int = setting(
        RANKS,
        "steps between checks that all replicas have equal parameters; 0: only at the end",
        0,
        AGAIN,
        metavar="N",
        at_least=0,
    )
    local_shuffle: bool = setting(
        RANKS,
        "each rank reads only its own part of the corpus, in a random order of its own, whether --shuffle is given or "
        "not; the loss then depends on the number of ranks (default: no; all ranks share one order of the sequences)",
        False,
        AGAIN,
        switch=True,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.resume and self.init_from:
            raise ConfigError("`resume` and `init_from` exclude each other: continue a run, or start a new one")
        if self.out and self.save is False:
            raise ConfigError(f"`out={self.out}` and `save=False` exclude each other: give one of them")
        if self.val_data and self.val_fraction:
            given = f"`val_data={self.val_data}` and `val_fraction={self.val_fraction}`"
            raise ConfigError(f"{given} exclude each other: give one of them")


# {preset: {setting: its default}} for the settings whose default is not that of TrainSettings, which is that of preset
# paper: "Distributed GPT-2", the paper that this project follows. GPT3_RECIPE has the optimizer settings and
# peak learning rate of GPT-3 125M (Brown et al. 2020), because the paper on GPT-2 does not publish them; its numbers of
# steps, sequences and warm-up steps are small values chosen for this project.
GPT3_RECIPE = dict(
    steps=1000, batch_size=8, lr=6e-4, schedule="cosine", warmup=100, weight_decay=0.1, clip=1.0, beta1=0.9, beta2=0.95
)
RECIPES = {name: GPT3_RECIPE for name in PRESETS} | {
    "paper": {},
    "tiny": dict(steps=60, lr=3e-3),
    "nano": dict(steps=20, batch_size=4, lr=3e-3),
    "book": GPT3_RECIPE | dict(steps=1200, batch_size=16, lr=3e-3, min_lr=1e-4, data=BOOK, shuffle=True),
}


def recipe(preset):
    """{setting: default} of a new run with this preset; None for a default that depends on other settings or files."""
    return defaults_of(TrainSettings) | RECIPES[preset]


@dataclass(frozen=True, kw_only=True)
class InferenceSettings(Settings):
    """The settings of inference.py, equal on all ranks; None: not given."""

    summary: ClassVar = (
        "Continue a prompt. Without flags: the newest run of this stage, or else the shipped weights, continue the "
        "first tokens of the corpus that they were trained on."
    )
    memory_advice: ClassVar = "use a smaller model, or fewer or shorter prompts"
    examples: ClassVar = (
        ("", "continue the start of the corpus"),
        ('--prompt "In the spring" --max-new-tokens 10', "continue a text"),
        ("--top-k 40 --seed 1 --stream", "sample, and print each token at once"),
    )

    config: Path = setting(
        FILE, CONFIG.format("top_k = 40") + " (default: no file)", metavar="FILE.toml", compared=True, one_call=True
    )

    weights: Path = setting(
        INPUT,
        "directory of a checkpoint, or of a GPT-2 in Hugging Face's format. Default: the newest checkpoint that "
        "training in this stage without --out has saved; if there is none, the shipped data/gpt2-paper",
        metavar="DIR",
    )
    preset: str = setting(
        INPUT,
        "without --weights: only runs of this preset, and the shipped weights of this preset (default: any preset)",
        choices=tuple(PRESETS),
        metavar="NAME",
    )
    accept_edited: bool = setting(INPUT, EDITED, False)
    tokenizer: str = setting(
        INPUT,
        "word (the words of the shipped corpus), byte, or the path of a tokenizer.json (default: that of --weights)",
        parse=not_empty,
    )
    prompt: str = setting(
        INPUT, "text to continue (default: the first 256 tokens of the corpus that the weights were trained on)"
    )
    prompt_file: Path = setting(
        INPUT, "file with the text to continue, without the line break at its end", metavar="FILE", compared=True
    )
    prompts: Path = setting(
        INPUT, "file with one prompt per line; only with --mode batch", metavar="FILE", compared=True
    )
    data: Path = setting(
        INPUT,
        "with --mode evaluate: a text, or files of tokens, as --data of train_gpt2.py; or a file FILE.jsonl with one "
        'question per line, {"ctx": TEXT, "endings": [TEXT, ...], "label": INDEX}, as HellaSwag has them',
        metavar="FILE",
        compared=True,
    )
    interactive: bool = setting(
        INPUT,
        "read prompts from standard input, one per line, and continue each line before the next is read; the model is "
        "loaded only once; Ctrl-D or an empty line ends the program",
        False,
    )

    max_new_tokens: int = setting(GENERATION, "tokens to generate", 30, metavar="N", at_least=0)
    stop: str = setting(
        GENERATION,
        "stop when the continuation contains TEXT (default: do not stop early)",
        parse=stop_text,
        metavar="TEXT",
    )
    temperature: float = setting(
        GENERATION, "sampling temperature; 0: greedy (default 0, or 1 if --top-k or --top-p is given)"
    )
    top_k: int = setting(GENERATION, "sample among the K most likely tokens; 0: among all tokens", 0, metavar="K")
    top_p: float = setting(
        GENERATION,
        "nucleus sampling: sample among the smallest set of most likely tokens whose probabilities sum to P or more "
        "(default 1: all tokens)",
        1.0,
        metavar="P",
    )
    seed: int = setting(GENERATION, "seed of the sampling", 0, at_least=0, at_most=math.inf)
    stream: bool = setting(
        GENERATION,
        "print each token as soon as it is generated (default: only on a terminal, otherwise all at the end)",
        False,
    )
    stats: bool = setting(
        GENERATION, "print token counts, the time to the first token and milliseconds per token", False
    )

    threads: int = setting(
        EXECUTION,
        f"number of threads among which prompts and matrix products are divided; {THREADS}",
        at_least=1,
    )
    blas: str = setting(EXECUTION, BLAS, metavar="LIB")
    mode: str = setting(
        EXECUTION,
        "how the ranks divide the work. replicate, the method of the paper: nothing is divided. Each rank computes all "
        "logits, which are equal on the ranks up to rounding. Rank 0 chooses each token from their mean over ranks; "
        "all ranks continue with this token. batch: each rank continues a part of the --prompts. tensor: the ranks "
        "divide each layer. evaluate: generate nothing, but print the loss of the model on --data, of which each rank "
        "computes a part",
        "replicate",
        choices=("replicate", "batch", "tensor", "evaluate"),
        metavar="HOW",
    )
    transport: str = setting(EXECUTION, TRANSPORT, metavar="HOW")
    precision: str = setting(EXECUTION, PRECISION, "fp32", choices=PRECISIONS, metavar="|".join(PRECISIONS))

    def __post_init__(self):
        super().__post_init__()
        if self.weights and self.preset:
            given = f"`weights={self.weights}` and `preset={self.preset}`"
            raise ConfigError(f"{given} exclude each other: give one of them")
        if (self.mode == "evaluate") != (self.data is not None):
            raise ConfigError("`data`, a text or questions, and `mode=evaluate` must be given together")


NAMES = {each.name for settings in (TrainSettings, InferenceSettings) for each in fields(settings)}


def with_flags(text):
    """A message with flags instead of names: --top-k 40 for `top_k=40`, --no-stream for `stream=False`.

    Text between backquotes that is not in NAMES remains as it is.
    """

    def replaced(match):
        name, value = match.groups()
        if name not in NAMES:
            return match[0]
        if value in ("True", "False"):
            return flag(name if value == "True" else f"no_{name}")
        return flag(name) if value is None else f"{flag(name)} {value}"

    return re.sub(r"`(\w+)(?:=([^`]+))?`", replaced, text)
