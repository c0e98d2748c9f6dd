"""What a run trains with when no flag says otherwise: the checkpoint's flags on a resume, else the preset's recipe."""

from pathlib import Path

from gpt2core.errors import CheckpointError, ConfigError
from gpt2core.model import GPT2Config

DATA = Path(__file__).resolve().parents[2] / "data"
CORPUS, WEIGHTS = DATA / "dummy.txt", DATA / "gpt2-paper"

PRESETS = {
    "nano": GPT2Config(172, 16, 2, 2, 32, tied=False),
    "tiny": GPT2Config(172, 64, 2, 4, 64, tied=False),
    "paper": GPT2Config(172, 256, 6, 6, 384, tied=False),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
    "small": GPT2Config(10000),
    "medium": GPT2Config(10000, n_layer=24, n_head=16, n_embd=1024),
    "large": GPT2Config(10000, n_layer=36, n_head=20, n_embd=1280),
    "xl": GPT2Config(10000, n_layer=48, n_head=25, n_embd=1600),
    "2.7B": GPT2Config(10000, n_layer=32, n_head=32, n_embd=2560),
}

# The paper's Adam, and GPT-2's own recipe for the large presets.
PAPER = dict(
    steps=50, batch_size=16, lr=3e-4, schedule="constant", warmup=0, weight_decay=0.0, clip=0.0, beta1=0.9, beta2=0.999
)
LARGE = dict(
    steps=1000, batch_size=8, lr=6e-4, schedule="cosine", warmup=100, weight_decay=0.1, clip=1.0, beta1=0.9, beta2=0.95
)
RECIPES = {name: LARGE for name in PRESETS} | {
    "paper": PAPER,
    "tiny": PAPER | dict(steps=60, lr=3e-3),
    "nano": PAPER | dict(steps=20, batch_size=4, lr=3e-3),
}
COMMON = dict(preset="paper", seed=0, deterministic=True, precision="fp32", rounding="nearest", eps=1e-8, shuffle=False)
COMMON |= dict(eval_every=0, checkpoint_every=0, keep=2, log_every=1)
# What a resume takes from the checkpoint where no flag says otherwise, and the kind of each.
RESUMED = {name: type(value) for name, value in (PAPER | COMMON).items()} | dict(
    min_lr=float, seq_len=int, micro_batches=int, data=str, val_data=str, val_fraction=float
)
RENAMED = {"micro_shards": "micro_batches"}  # flags under the names that older checkpoints have
# How many ranks share the work: not part of a checkpoint, which any number of them may go on with.
RANK_FLAGS = dict(dp="flat", bucket_mb=None, compress="none", zero=None, zero_gather="end", tp=1)
RANK_FLAGS |= dict(collectives=None, transport=None, verify_every=0, local_shuffle=False)
MODES = ("replicate", "batch", "tensor")  # how ranks share an inference
SHAPE = ("n_layer", "n_head", "n_embd", "block_size")  # flags that change the model itself


def fill_defaults(args, resumed, deterministic=True):
    """Give every flag a value: the command line's, else the resumed checkpoint's, else the preset's recipe.

    deterministic: the stage's default of that flag.

    Returns what to tell of flags that are not the checkpoint's, one sentence each.
    """
    saved = saved_arguments(resumed) if resumed else {}
    if args.checkpoint_every and not args.out:
        raise ConfigError(f"--checkpoint-every {args.checkpoint_every} saves nothing without a directory: give --out")
    if args.eval_every and not (args.val_data or args.val_fraction or saved.keys() & {"val_data", "val_fraction"}):
        raise ConfigError(f"--eval-every {args.eval_every} validates on nothing: give --val-data or --val-fraction")
    if args.lr is not None or args.schedule is not None:
        saved.pop("min_lr", None)  # it was a tenth of another rate, or the floor of another decay
    if args.preset not in (None, saved.get("preset", args.preset)):
        raise ConfigError(f"--preset {args.preset} is not the checkpoint's {saved['preset']}: leave the flag away")
    notes = []
    for name, value in saved.items():
        given = getattr(args, name, None)
        if given is None:
            setattr(args, name, value)
        elif name not in ("steps", "data", "val_data") and given != value:
            notes.append(f"note: --{name.replace('_', '-')} was {value} and is {given} from here on")
    if deterministic and args.deterministic is False and saved.get("deterministic") is False:
        notes.append("note: the checkpoint's run was --no-deterministic, and goes on so")
    preset = args.preset or COMMON["preset"]
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset} is unknown: choose from {', '.join(PRESETS)}")
    for name, value in (COMMON | dict(deterministic=deterministic) | RANK_FLAGS | RECIPES[preset]).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.data = Path(args.data or CORPUS)
    args.val_data = args.val_data and Path(args.val_data)
    if args.min_lr is None:
        args.min_lr = 0.0 if args.schedule == "constant" else args.lr / 10
    for name in ("steps", "eval_every", "checkpoint_every", "verify_every", "keep", "sample", "seed"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must not be negative")
    for name in ("threads", "seq_len", "log_every"):
        positive(f"--{name.replace('_', '-')}", getattr(args, name))
    if args.val_data and args.val_fraction:
        raise ConfigError(f"--val-data {args.val_data} and --val-fraction {args.val_fraction} exclude each other")
    return notes


def saved_arguments(checkpoint):
    """The flags in a checkpoint's state.json, {} without one; raises CheckpointError where one is not of its kind."""
    path, arguments = checkpoint.path / "state.json", (checkpoint.state or {}).get("arguments", {})
    if not isinstance(arguments, dict):
        raise CheckpointError(f"{path}: arguments is {arguments!r}, not an object: it cannot be used")
    arguments = {RENAMED.get(name, name): value for name, value in arguments.items()}
    saved = {name: arguments[name] for name in RESUMED if arguments.get(name) is not None}
    for name, value in saved.items():
        if not isinstance(value, int | float if RESUMED[name] is float else RESUMED[name]):
            raise CheckpointError(f"{path}: {name} is {value!r}, not of type {RESUMED[name].__name__}")
    if saved.get("preset", "paper") not in PRESETS:
        raise CheckpointError(f"{path}: preset is {saved['preset']!r}, not one of {', '.join(PRESETS)}")
    return saved


def positive(flag, value):
    """`value`, which may be None; raises ConfigError below 1."""
    if value is not None and value < 1:
        raise ConfigError(f"{flag} {value} must be at least 1")
    return value
