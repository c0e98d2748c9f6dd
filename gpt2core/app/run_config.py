"""RunConfig: every setting of a training run, computed once on the root and not changed afterwards.

The value of a setting is the first of these that exists: the flag on the command line, the value in the checkpoint of a
resumed run, the default of the preset (see RECIPES in presets.py).
"""

import math
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2core.app.presets import COMMON, CORPUS, PRESETS, RANK_FLAGS, RECIPES, SCHEDULE_FLAGS, SIZE_FLAGS
from gpt2core.errors import ConfigError, counted
from gpt2core.model import GPT2Config
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.data_parallel import BUCKET_MB

# {flag: default} of the flags that a checkpoint does not contain, so that a resumed run must be given them again.
NOT_SAVED = dict(log=None, plot=None, sample=30, threads=None, blas=None, graph=None, autotune=False, nvtx=False)
NOT_SAVED |= dict.fromkeys(("trace", "trace_steps", *RANK_FLAGS))


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run, equal on all ranks. The fields, except `model`, are the flags of cli.py."""

    model: GPT2Config  # the sizes that are used
    # model and recipe
    preset: str
    n_layer: int | None  # this flag and the next three are None if they are not given
    n_head: int | None
    n_embd: int | None
    block_size: int | None
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    min_lr: float
    schedule: str
    warmup: int
    clip: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    seed: int
    precision: str
    rounding: str
    # input
    data: Path
    tokenizer: str | None
    shuffle: bool
    local_shuffle: bool
    val_data: Path | None
    val_fraction: float | None
    resume: Path | None
    init_from: Path | None
    accept_edited: bool
    # output
    out: Path | None
    overwrite: bool
    checkpoint_every: int
    keep: int
    log: Path | None
    log_every: int
    plot: Path | None
    trace: Path | None
    trace_steps: int | None
    eval_every: int
    verify_every: int
    sample: int
    # execution
    threads: int | None  # None: the available cores, which may differ between ranks
    micro_batches: int | None
    deterministic: bool
    blas: str | None
    graph: bool | None
    nvtx: bool
    autotune: bool
    # ranks
    tp: int
    dp: str
    bucket_mb: float | None  # None: measured when the Trainer is built
    compress: str
    zero: int
    zero_gather: str
    collectives: str
    transport: str | None

    @property
    def parallel(self):
        """The ParallelConfig with these settings."""
        return ParallelConfig(self.tp, self.dp, self.bucket_mb, self.compress, self.zero, self.zero_gather)

    @property
    def optimizer(self):
        """The keyword arguments of AdamW."""
        names = ("beta1", "beta2", "eps", "weight_decay", "clip", "rounding", "seed")
        return {name: getattr(self, name) for name in names}


def flag(name):
    """The command-line flag of a setting: "--batch-size" for "batch_size"."""
    return f"--{name.replace('_', '-')}"


def resume_command(args, processes=None):
    """The command line that continues this run from its --out directory, as text.

    args: the parsed flags of this run. processes: the number for `mpirun -n`; None: the command has no mpirun.
    """
    module = sys.modules["__main__"].__spec__
    words = [sys.orig_argv[0].removeprefix(f"{os.getcwd()}/"), *(["-m", module.name] if module else sys.argv[:1])]
    words += ["--resume", args.out, "--out", args.out]
    for name, default in NOT_SAVED.items():
        value = getattr(args, name)
        if value is False and value != default:
            words.append(flag(f"no_{name}"))
        elif value != default:
            words += [flag(name)] if value is True else [flag(name), value]
    if processes:
        mpirun = Path(words[0]).with_name("mpirun")
        words = [mpirun if mpirun.exists() else "mpirun", "-n", processes, *words]
    return shlex.join(map(str, words))


def resolve_flags(args, saved, deterministic):
    """({name: value} of all flags, notes to print) from the parsed `args` and the `saved` flags of a checkpoint.

    saved: saved_arguments() of resume.py, {} for a new run. deterministic: the stage's default of --deterministic. In
    the result, flags of RANK_FLAGS can be None: resolve_rank_flags() sets them. Raises ConfigError for a wrong value.
    """
    saved = dict(saved)
    check_needed_flags(args, saved)
    if args.lr is not None or args.schedule is not None:
        saved.pop("min_lr", None)  # the saved value was chosen for another --lr or --schedule
    if args.preset not in (None, saved.get("preset", args.preset)):
        right = saved["preset"]
        raise ConfigError(
            f"--preset {args.preset} is not the checkpoint's {right}; omit the flag (with make: PRESET={right})"
        )
    given = {name: value for name, value in vars(args).items() if value is not None}
    preset = given.get("preset", saved.get("preset", COMMON["preset"]))
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset} is unknown: choose from {', '.join(PRESETS)}")
    defaults = COMMON | dict(deterministic=deterministic) | RANK_FLAGS | RECIPES[preset]
    values = dict.fromkeys(vars(args)) | defaults | saved | given
    values["data"] = Path(values["data"] or CORPUS)
    values["val_data"] = values["val_data"] and Path(values["val_data"])
    if values["min_lr"] is None:
        values["min_lr"] = 0.0 if values["schedule"] == "constant" else values["lr"] / 10
    check_values(values)
    return values, resume_notes(given, saved, deterministic)


def check_needed_flags(args, saved):
    """Raise ConfigError for a flag without another flag that it needs, for example --checkpoint-every without --out."""
    if args.trace_steps is not None and not args.trace:
        raise ConfigError(f"--trace-steps {args.trace_steps} traces nothing without a file: give --trace FILE.json")
    if args.checkpoint_every and not args.out:
        raise ConfigError(f"--checkpoint-every {args.checkpoint_every} saves nothing without a directory: give --out")
    if args.eval_every and not (args.val_data or args.val_fraction or saved.keys() & {"val_data", "val_fraction"}):
        raise ConfigError(
            f"--eval-every {args.eval_every} needs validation data: give --val-data FILE or --val-fraction F"
        )


def check_values(values):
    """Raise ConfigError if a number is outside its range, or if both kinds of validation data are given."""
    for name in ("steps", "eval_every", "checkpoint_every", "verify_every", "keep", "sample", "seed"):
        if values[name] < 0:
            raise ConfigError(f"{flag(name)} {values[name]} must not be negative")
    for name in ("threads", "seq_len", "log_every", "trace_steps"):
        check_positive(flag(name), values[name])
    if values["val_data"] and values["val_fraction"]:
        raise ConfigError(
            f"--val-data {values['val_data']} and --val-fraction {values['val_fraction']} exclude each other: "
            f"give one of them"
        )


def check_positive(name, value):
    """Raise ConfigError unless `value` is None or at least 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} {value} must be at least 1")


def resume_notes(given, saved, deterministic):
    """Notes to print: one for each flag that a resumed run changes, one if only the checkpoint is --no-deterministic.

    resume.schedule_notes() makes the note about the learning rate.
    saved, deterministic: arguments of resolve_flags(). given: {name: value} of the flags on the command line.
    """
    notes = [
        f"note: {flag(name)} was {value} and is {given[name]} from here on"
        for name, value in saved.items()
        if name in given and name not in (*SCHEDULE_FLAGS, "data", "val_data") and given[name] != value
    ]
    if deterministic and saved.get("deterministic") is False and not given.get("deterministic", False):
        notes.append("note: the checkpoint's run was --no-deterministic, and so is this one")
    return notes


def resolve_rank_flags(values, world):
    """(a copy of `values` in which the flags of RANK_FLAGS have their final values, notes to print).

    values: {name: value} of all flags. In the result, bucket_mb is None if the Trainer must measure it. Call
    world.use_transport() before, because some defaults depend on the transport. Raises ConfigError for a wrong --tp.
    """
    several_replicas = data_parallel_ranks(world, values["tp"]) > 1
    final = dict(values)
    if values["collectives"] is None:
        final["collectives"] = "canonical" if values["deterministic"] else world.native_algorithm
    is_measured = world.measures_buckets and values["dp"] == "bucket" and not values["deterministic"]
    if values["bucket_mb"] is None and not (is_measured and several_replicas):
        final["bucket_mb"] = BUCKET_MB
    if values["zero"] is None:
        is_possible = several_replicas and values["dp"] == "flat" and values["compress"] == "none"
        final["zero"] = int(world.prefers_zero and is_possible)
        if not several_replicas:
            final["zero_gather"] = "end"  # a note says that --zero-gather forward has no effect
    return final, notes_about_rank_flags(values, several_replicas)


def notes_about_rank_flags(values, several_replicas):
    """Notes about flags, as given, that have no effect or with which the result depends on the number of ranks."""
    notes, dp, compress, name = [], values["dp"], values["compress"], values["collectives"]
    if values["bucket_mb"] is not None and dp != "bucket" and values["zero_gather"] == "end":  # forward uses it too
        bucket_mb = f"{values['bucket_mb']:g}"
        notes.append(f"note: --bucket-mb {bucket_mb} is for --dp bucket, but --dp is {dp}: it has no effect")
    # --collectives tree, a binomial tree, adds in the canonical order too
    if values["deterministic"] and name not in (None, "canonical", "tree"):
        notes.append(f"note: --collectives {name} adds in its own order: the result depends on the number of ranks")
    if values["local_shuffle"]:
        text = "the order of training sequences, and so the loss, depends on the number of ranks"
        notes.append(f"note: --local-shuffle: {text}")
    if compress != "none" and not several_replicas:
        text = f"one data-parallel rank sends nothing, but its gradients are rounded to {compress} as on several ranks"
        notes.append(f"note: --compress {compress}: {text}")
    # --zero 0 needs no note: with one data-parallel rank nothing is divided in any case
    without_effect = [name for name in ("dp", "zero", "zero_gather") if values[name] not in (RANK_FLAGS[name], 0)]
    if without_effect and not several_replicas:
        flags = " and ".join(f"{flag(name)} {values[name]}" for name in without_effect)
        notes.append(f"note: {flags}: no effect, because there is only one data-parallel rank")
    return notes


def data_parallel_ranks(world, tp):
    """The number of data-parallel replicas, each on `tp` ranks; raises ConfigError if tp does not divide world.size."""
    if tp < 1 or world.size % tp:
        divisors = [n for n in range(1, world.size + 1) if world.size % n == 0]
        ranks = counted(world.size, "rank")
        raise ConfigError(f"--tp {tp} does not divide {ranks}: use one of {', '.join(map(str, divisors))}")
    return world.size // tp


def check_sizes(sizes):
    """Raise ConfigError unless all sizes are positive and n_head divides n_embd; sizes: {name: value} of SIZE_FLAGS."""
    for name, value in sizes.items():
        check_positive(flag(name), value)
    heads, width = sizes["n_head"], sizes["n_embd"]
    if width % heads:
        near = max(heads, round(width / heads) * heads)
        divisors = [d for n in range(1, math.isqrt(width) + 1) if width % n == 0 for d in (n, width // n)]
        raise ConfigError(
            f"--n-head {heads} does not divide --n-embd {width}, and every head needs the same width: use --n-embd "
            f"{near}, or --n-head {max(n for n in divisors if n <= heads)}"
        )


def preset_notes(args, model):
    """A list with one note if --preset is given with --init-from and has other sizes than `model`, a GPT2Config."""
    sizes = [f"{name} {getattr(model, name)}" for name in SIZE_FLAGS]
    preset = PRESETS[args.preset] if args.init_from and args.preset else model
    if all(getattr(preset, name) == getattr(model, name) for name in SIZE_FLAGS):
        return []
    recipe = f"note: --preset {args.preset} only selects the recipe"
    return [f"{recipe}: the model has the sizes of --init-from ({', '.join(sizes)})"]


def model_config(values, checkpoint_config, vocab_size):
    """The GPT2Config of a run: that of the checkpoint or, for random weights, that of the preset and the size flags.

    values: {name: value} of all flags. checkpoint_config: None for random weights. vocab_size: the number of tokens of
    the tokenizer, and of the model with random weights. Raises ConfigError if a size flag differs from the checkpoint,
    or if the tokenizer has more tokens than the checkpoint's vocabulary.
    """
    given = {name: values[name] for name in SIZE_FLAGS if values[name] is not None}
    if checkpoint_config is None:
        preset = PRESETS[values["preset"]]
        check_sizes({name: getattr(preset, name) for name in SIZE_FLAGS} | given)
        return replace(preset, vocab_size=vocab_size, **given)
    for name, value in given.items():
        saved = getattr(checkpoint_config, name)
        if saved != value:
            raise ConfigError(f"{flag(name)} {value} is not the checkpoint's {saved}; omit the flag")
    if vocab_size > checkpoint_config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens but the checkpoint's vocabulary is {checkpoint_config.vocab_size}: "
            f"give the --tokenizer it was trained with"
        )
    return checkpoint_config
