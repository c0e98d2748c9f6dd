"""The final value of every setting of a training run, and the notes to print about the settings.

The value of a setting is the first of these that exists: the flag on the command line, the value in the checkpoint of a
resumed run, the default of the preset (see recipe() in definitions.py).
"""

import contextlib
import math
from dataclasses import replace

from gpt2core.app.settings.definitions import MODEL, TrainSettings, recipe
from gpt2core.app.settings.setting_fields import defaults_of, flag, names_of
from gpt2core.app.shipped import TOKENIZERS
from gpt2core.errors import ConfigError, counted
from gpt2core.optimizer import Schedule
from gpt2core.parallel.config import BUCKET_MB
from gpt2core.presets import PRESETS

DEFAULTS = defaults_of(TrainSettings)
MODEL_FIELDS = [name for name in names_of(TrainSettings, group=MODEL) if name != "preset"]  # of GPT2Config
SIZES = [name for name in MODEL_FIELDS if name != "positions"]
INPUTS = names_of(TrainSettings, compared=True)  # files
SCHEDULE = ("schedule", "lr", "min_lr", "warmup", "steps")  # the fields of Schedule, in its order


def resolve_flags(args, saved, deterministic):
    """(TrainSettings with all values, notes to print) from the TrainSettings `args` and the `saved` ones.

    saved: saved_arguments() of resume.py, {} for a new run. deterministic: the stage's default of --deterministic. In
    the result, settings of the group RANKS can be None: resolve_rank_flags() sets them. Raises ConfigError for a wrong
    value.
    """
    if args.trace_steps is not None and not args.trace:
        raise ConfigError(f"--trace-steps {args.trace_steps} traces nothing without a file: give --trace FILE.json")
    if args.epochs is not None and args.steps is not None:
        raise ConfigError(f"--epochs {args.epochs} and --steps {args.steps} exclude each other: give one of them")
    saved = dict(saved)
    if args.lr is not None or args.schedule is not None:
        saved.pop("min_lr", None)  # the saved value was chosen for another --lr or --schedule
    if args.preset not in (None, saved.get("preset", args.preset)):
        right = saved["preset"]
        raise ConfigError(
            f"--preset {args.preset} is not the checkpoint's {right}; omit the flag (with make: PRESET={right})"
        )
    given = {name: value for name, value in vars(args).items() if value is not None}
    preset = (DEFAULTS | saved | given)["preset"]
    settings = TrainSettings(**recipe(preset) | dict(deterministic=deterministic) | saved | given)
    if settings.min_lr is None:
        settings = replace(settings, min_lr=0.0 if settings.schedule == "constant" else settings.lr / 10)
    return settings, resume_notes(given, saved, deterministic)


def resume_notes(given, saved, deterministic):
    """Notes to print: one for each flag that a resumed run changes, one if only the checkpoint is --no-deterministic.

    schedule_notes() makes the note about the learning rate.
    saved, deterministic: arguments of resolve_flags(). given: {name: value} of the flags on the command line.
    """
    notes = [
        f"note: {flag(name)} was {value} and is {given[name]} from here on"
        for name, value in saved.items()
        if name in given and name not in (*SCHEDULE, *INPUTS) and given[name] != value
    ]
    if deterministic and saved.get("deterministic") is False and not given.get("deterministic", False):
        notes.append("note: the checkpoint's run was --no-deterministic, and so is this one")
    return notes


def schedule_notes(config, saved, progress):
    """A list with one note if a flag of the learning rate's Schedule changes in a resumed run; otherwise [].

    config: the RunConfig. saved: saved_arguments() of the checkpoint. progress: its Progress, or None for a new run.
    """
    now = {name: getattr(config, name) for name in SCHEDULE}
    before = now | {name: saved[name] for name in SCHEDULE if name in saved}
    if before["schedule"] == now["schedule"] == "constant":  # its rates do not depend on --steps
        before["steps"] = now["steps"]
    if not progress or before == now or progress.step >= config.steps:
        return []
    changed = [f"{flag(name)} was {before[name]} and is {now[name]}" for name in now if before[name] != now[name]]
    rates = [f"{Schedule(*flags.values())(progress.step):.3e}" for flags in (before, now)]
    effect = f": the learning rate of step {progress.step} is {rates[1]} instead of {rates[0]}"
    return [f"note: {', '.join(changed)} from here on{effect * (rates[0] != rates[1])}"]


def nothing_left(config, steps):
    """The line that a resumed run prints if its checkpoint, after `steps` steps, has the total of a RunConfig."""
    done = f"nothing was left to train after {counted(steps, 'step')}"
    return f"{done}: --steps is {config.steps} in total; give a larger --steps"


def resolve_rank_flags(settings, world):
    """(TrainSettings in which also the group RANKS has its final values, notes to print).

    settings: of resolve_flags(). In the result, bucket_mb is None if the Trainer must measure it. Call
    world.use_transport() before, because some defaults depend on the transport. Raises ConfigError for a wrong --tp or
    --pp.
    """
    # Messages of NCCL do not slow down the computation, as the formula in parallel/data/bucket_size.py assumes. With
    # them, ZeRO-1 makes a step shorter: it sends no more bytes than an all-reduce, and each of the p ranks updates only
    # 1/p of the parameters.
    overlaps = settings.transport == "nccl"
    several_replicas = data_parallel_ranks(world, settings.tp, settings.pp) > 1
    final = {}
    if settings.collectives is None:
        final["collectives"] = "canonical" if settings.deterministic else world.native_algorithm
    is_measured = overlaps and settings.dp == "bucket" and not settings.deterministic
    if settings.bucket_mb is None and not (is_measured and several_replicas):
        final["bucket_mb"] = BUCKET_MB
    if settings.zero is None:
        sums_whole_slices = settings.compress == "none" and not settings.sparse_embedding
        is_possible = several_replicas and settings.dp == "flat" and sums_whole_slices
        final["zero"] = int(overlaps and is_possible)
        if not several_replicas:
            final["zero_gather"] = "end"  # a note says that --zero-gather forward has no effect
    return replace(settings, **final), rank_flag_notes(settings, several_replicas)


def rank_flags(config):
    """The flags of a RunConfig that say how ranks exchange gradients and parameters, as text."""
    return (
        f"--dp {config.dp}, --collectives {config.collectives}, --compress {config.compress}, --zero {config.zero}"
        + f", --zero-gather {config.zero_gather}" * (config.zero_gather != "end")
        + ", --sparse-embedding" * bool(config.sparse_embedding)
        + f", --transport {config.transport}" * bool(config.transport)
        + f", --canonical-tp {config.canonical_tp}" * bool(config.canonical_tp)
        + f", --pp-schedule {config.pp_schedule}, --chunks {config.parallel.chunks}" * (config.pp > 1)
    )


def rank_flag_notes(given, several_replicas):
    """Notes about flags, as given, that have no effect or with which the result depends on the number of ranks."""
    notes, compress, name = [], given.compress, given.collectives
    if given.bucket_mb is not None and given.dp != "bucket" and given.zero_gather == "end":  # forward uses it too
        text = f"is for --dp bucket, but --dp is {given.dp}: it has no effect"
        notes.append(f"note: --bucket-mb {given.bucket_mb:g} {text}")
    # --collectives tree, a binomial tree, adds in the canonical order too
    if given.deterministic and name not in (None, "canonical", "tree"):
        notes.append(f"note: --collectives {name} adds in its own order: the result depends on the number of ranks")
    if given.local_shuffle:
        text = "the order of training sequences, and so the loss, depends on the number of ranks"
        notes.append(f"note: --local-shuffle: {text}")
    if compress != "none" and not several_replicas:
        text = f"one data-parallel rank sends nothing, but its gradients are rounded to {compress} as on several ranks"
        notes.append(f"note: --compress {compress}: {text}")
    # --zero 0 needs no note: with one data-parallel rank nothing is divided in any case
    values = {name: getattr(given, name) for name in ("dp", "zero", "zero_gather")}
    without_effect = [f"{flag(name)} {values[name]}" for name in values if values[name] not in (DEFAULTS[name], 0)]
    without_effect += [flag("sparse_embedding")] * bool(given.sparse_embedding)
    if without_effect and not several_replicas:
        flags = " and ".join(without_effect)
        notes.append(f"note: {flags}: no effect, because there is only one data-parallel rank")
    return notes + pipeline_notes(given)


def pipeline_notes(given):
    """Notes about flags of the pipeline that have no effect because there is none."""
    values = {name: getattr(given, name) for name in ("pp_schedule", "chunks") if given.pp == 1}
    unused = [f"{flag(name)} {values[name]}" for name in values if values[name] != DEFAULTS[name]]
    if given.schedule_picture and given.pp == 1:
        unused.append("--schedule-picture")
    return [f"note: {each}: no effect, because --pp is 1" for each in unused]


def data_parallel_ranks(world, tp, pp):
    """The number of data-parallel replicas, each on tp * pp ranks; raises ConfigError if this is not a whole number."""
    ranks = counted(world.size, "rank")
    for name, parts in (("--tp", tp), ("--pp", pp)):
        if parts < 1 or world.size % parts:
            divisors = [n for n in range(1, world.size + 1) if world.size % n == 0]
            raise ConfigError(f"{name} {parts} does not divide {ranks}: use one of {', '.join(map(str, divisors))}")
    if world.size % (tp * pp):
        raise ConfigError(f"--tp {tp} times --pp {pp} does not divide {ranks}: use --tp 1 or --pp 1")
    return world.size // (tp * pp)


def preset_notes(args, model):
    """A list with one note if a given preset has other sizes than the loaded checkpoint; model: its GPT2Config."""
    sizes = [f"{name} {getattr(model, name)}" for name in SIZES]
    preset = PRESETS[args.preset] if args.init_from and args.preset else model
    if all(getattr(preset, name) == getattr(model, name) for name in SIZES):
        return []
    recipe = f"note: --preset {args.preset} only selects the recipe"
    return [f"{recipe}: the model has the sizes of the checkpoint ({', '.join(sizes)})"]


def default_tokenizer(settings):
    """The tokenizer of a new run if none is given, an argument of Tokenizer; None: word."""
    return TOKENIZERS.get(settings.preset)


def model_config(settings, checkpoint_config, vocab_size):
    """The GPT2Config of a run: that of the checkpoint or, for random weights, that of the preset and the size settings.

    settings: TrainSettings. checkpoint_config: None for random weights. vocab_size: the number of tokens of the
    tokenizer, and of the model with random weights. Raises ConfigError if a setting differs from the checkpoint, or if
    the sizes are not possible.
    """
    given = {name: value for name in MODEL_FIELDS if (value := getattr(settings, name)) is not None}
    if checkpoint_config is None:
        preset = PRESETS[settings.preset]
        sizes = {name: getattr(preset, name) for name in MODEL_FIELDS} | given | dict(vocab_size=vocab_size)
        try:
            return replace(preset, **sizes)
        except ConfigError as error:
            advice = " or ".join(possible_changes(preset, sizes))
            raise ConfigError(f"{error}; use {advice}" if advice else str(error)) from None
    for name, value in given.items():
        saved = getattr(checkpoint_config, name)
        if saved != value:
            raise ConfigError(f"{flag(name)} {value} is not the checkpoint's {saved}; omit the flag")
    return checkpoint_config


def possible_changes(preset, sizes):
    """Yield flags, as text, each of which would make the model possible if its heads have no possible width.

    preset: a GPT2Config. sizes: {name: value} of its fields that are replaced.
    """
    heads, width = sizes["n_head"], sizes["n_embd"]
    multiple = heads * (1 + (sizes["positions"] == "rotary"))  # rotary positions need an even width of a head
    divisors = [d for n in range(1, math.isqrt(width) + 1) if width % n == 0 for d in (n, width // n)]
    changes = {
        "n_embd": max(multiple, round(width / multiple) * multiple),
        "n_head": max(n for n in divisors if n <= heads),
        "positions": "learned",
    }
    for name, value in changes.items():
        with contextlib.suppress(ConfigError):
            replace(preset, **sizes | {name: value})
            yield f"{flag(name)} {value}"
