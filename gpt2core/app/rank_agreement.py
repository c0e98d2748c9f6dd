"""What many ranks must do as one: start alike, read through one of them, and end together when any of them fails."""

import hashlib
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import gpt2core
from gpt2core.app import checkpoint_directory as checkpoints
from gpt2core.app.presets import RANK_FLAGS
from gpt2core.errors import ConfigError, DataError, counted
from gpt2core.model import parameter_shapes
from gpt2core.parallel.all_or_raise import all_or_raise, on_root, shared_error
from gpt2core.parallel.data_parallel import BUCKET_MB
from gpt2core.parallel.launcher_env import read_launcher_env
from gpt2core.text.token_file import TOKEN_FILE, brings_tokenizer

TEXTS = "data", "val_data", "prompts", "prompt_file"  # flags that name what the run reads
EDGE = 1 << 22  # bytes or tokens: of what is larger, only both ends are hashed


def compare(world, args):
    """Raise ConfigError, naming rank and field, unless all ranks run the same program with the same flags and texts."""
    fields = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(args).items()}
    fields |= {"version": gpt2core.__version__, "code": code_digest(), "NumPy": np.__version__}
    everyones = world.all_gather_object(fields)
    for rank, found in enumerate(everyones):
        for name, value in everyones[0].items():
            if found.get(name) != value:
                difference = f"rank {rank} has {name} {found.get(name)}, but rank 0 has {value}"
                raise shared_error(
                    ConfigError(f"{difference}: start all ranks with one command, of one program version")
                )
    compare_files(world, [path for name in TEXTS if (path := getattr(args, name, None))])


def compare_files(world, paths):
    """Raise ConfigError, naming rank and file, where a rank has one of the root's files with another content."""
    mine = all_or_raise(world, lambda: {str(path): file_digest(path) for path in paths if path.is_file()})
    everyones = world.all_gather_object(mine)
    for rank, found in enumerate(everyones):
        for path, digest in everyones[0].items():
            if found.get(path, digest) != digest:
                hashes = f"size:hash {found[path]} and {digest}"
                raise shared_error(ConfigError(f"rank {rank} has another {path} than rank 0 ({hashes}): copy rank 0's"))


def code_digest():
    """A hash of our own modules' sources: two versions of them could compute different bits."""
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "gpt2core" or name.startswith("stage"):
            digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:16]


def file_digest(path):
    """A hash of a file's size and of both its ends."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for start in (0, max(EDGE, size - EDGE)):
                file.seek(start)
                digest.update(file.read(EDGE))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return f"{size}:{digest.hexdigest()[:16]}"


def available_cores(world):
    """Cores for this rank's threads: those it may run on, divided by the ranks of its host that may too.

    A launcher that gives each rank its own cores, as Slurm does, has divided them already. All ranks must call it.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    place = platform.node(), sorted(cores)
    return max(1, len(cores) // world.all_gather_object(place).count(place))


def check_started(world, stage):
    """Raise ConfigError, naming the `stage` to use, where a launcher started many processes of a stage that is one.

    They know nothing of each other; the first tells it for all, and the others just end.
    """
    variable, count, number = read_launcher_env()
    if world.one_process and count > 1:
        if number:
            sys.exit(2)
        raise ConfigError(
            f"{count} processes were started ({variable}), but this stage is one process, and each of them would do "
            f"all of the work: use {stage}, or leave the launcher out"
        )


def check_ranks(world, args, stage):
    """Raise ConfigError, naming the `stage` to use, for a flag about many ranks in a stage that is one process."""
    for name in RANK_FLAGS.keys() - {"transport"}:  # which stage 1 would not take either: see use_transport
        if world.one_process and getattr(args, name, None) is not None:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise shared_error(ConfigError(f"{flag} is for many ranks, and this stage is one process: use {stage}"))


def choose_collectives(world, args):
    """Move and sum over ranks as --transport and --collectives ask; returns what depends on the ranks, a note each.

    What no flag says is chosen here, but for a --bucket-mb that is to be measured, which stays None.
    """
    args.transport = world.use_transport(args.transport)
    canonical = args.collectives in (None, "canonical", "tree")  # a binomial tree adds in that order too
    args.collectives = args.collectives or ("canonical" if args.deterministic else world.native_collectives)
    world.use_collectives(args.collectives)
    times = world.measures_buckets and args.dp == "bucket" and not args.deterministic
    notes = []
    if args.bucket_mb is not None and args.dp != "bucket" and args.zero_gather == "end":
        notes.append(f"note: --bucket-mb {args.bucket_mb:g} is for --dp bucket, and --dp is {args.dp}")
    if args.bucket_mb is None and not (times and data_parallel_ranks(world, args.tp) > 1):
        args.bucket_mb = BUCKET_MB
    if args.deterministic and not canonical:
        notes.append(f"note: --collectives {args.collectives} adds in its own order: the bits depend on the ranks")
    if args.local_shuffle:
        notes.append("note: --local-shuffle: the order of the windows, and so the curve, depends on the ranks")
    named = "dp", "compress", "zero", "zero_gather"
    idle = [name for name in named if getattr(args, name) not in (RANK_FLAGS[name], 0)]  # --zero 0 is no way to share
    if idle and data_parallel_ranks(world, args.tp) == 1:
        flags = " and ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in idle)
        notes.append(f"note: one data-parallel rank has nobody to share gradients with: {flags} can be left out")
    if args.zero is None:
        several, flat = data_parallel_ranks(world, args.tp) > 1, args.dp == "flat" and args.compress == "none"
        args.zero = int(world.prefers_zero and several and flat)
        if args.zero_gather == "forward" and not several:
            args.zero_gather = "end"  # it is said above that there is nothing to gather
    return notes


def data_parallel_ranks(world, tp):
    """How many replicas `tp` ranks a replica make; raises ConfigError unless they come out even."""
    if tp < 1 or world.size % tp:
        works = [n for n in range(1, world.size + 1) if world.size % n == 0]
        ranks = counted(world.size, "rank")
        raise ConfigError(f"--tp {tp} does not divide {ranks}: use one of {', '.join(map(str, works))}")
    return world.size // tp


def shared_checkpoint(world, path, with_optimizer=False):
    """The Checkpoint at `path` (None: None), read by the root; the others get all of it but the arrays."""
    if path is None:
        return None
    found = on_root(world, lambda: checkpoints.load_checkpoint(path, with_optimizer=with_optimizer))
    outline = world.broadcast_object(found and replace(found, parameters=None, moments=None))
    return found or outline


def shared_tokens(world, read, path):
    """(tokens, tokenizer) of read(), done by the root, which broadcasts both.

    A token file may be larger than memory: where every rank sees it, each maps it for itself.
    """
    if all(world.all_gather_object(brings_tokenizer(path))):
        compare_files(world, [path / TOKEN_FILE if path.is_dir() else path])
        return all_or_raise(world, read)
    tokens, tokenizer = on_root(world, read) or (None, None)
    tokenizer, shape, dtype = world.broadcast_object(tokens is not None and (tokenizer, tokens.shape, tokens.dtype))
    return world.broadcast(tokens if world.is_root else np.empty(shape, dtype)), tokenizer


def shared_arrays(world, weights):
    """{name: array} of a shared checkpoint, on every rank."""

    def share(name, shape):
        return world.broadcast(weights.parameters[name] if world.is_root else np.empty(shape, np.float32))

    return {name: share(name, shape) for name, shape in parameter_shapes(weights.config)}


def silent(*text, **options):
    """What print is to a rank that is not the root."""
