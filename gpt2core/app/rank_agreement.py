"""Compare the flags and input files of all ranks, reject flags of other stages, and send the root's input to all ranks.

A difference between ranks would give wrong results, or ranks that wait for each other forever.
"""

import hashlib
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import gpt2core
from gpt2core.app.setting_fields import flag, names_of
from gpt2core.app.settings import RANKS, Settings, TrainSettings
from gpt2core.architecture import parameter_shapes
from gpt2core.errors import ConfigError, DataError
from gpt2core.parallel.all_or_raise import all_or_raise, gather_or_raise, shared_error
from gpt2core.parallel.launcher_env import read_launcher_env
from gpt2core.text.token_file import TOKEN_FILE, is_tokenized, load_tokens

EDGE = 1 << 22  # bytes of a file, or tokens, that are hashed at each end


@dataclass(frozen=True)
class StartReport:
    """The object that each rank sends in the first all-gather of a command."""

    args: Settings | None  # the parsed flags; None: --help or --version was printed
    program: dict[str, str]  # flags, version, code hash and NumPy version, which must be equal on all ranks
    files: dict[str, str]  # {path: digest} of the input files that exist on this rank
    cores: tuple[str, list[int]]  # (host name, the cores that this process may run on)


def agree_on_start(world, parse):
    """Compare all ranks with rank 0 by one all-gather; returns (the parsed flags, number of cores for this rank).

    parse() returns the Settings, or None after --help or --version. Raises ConfigError on every
    rank, with the rank and both values, if a flag, the program or an input file of a rank differs from that of rank 0.
    An input file is not compared with a rank on which it does not exist. If parse() raises an error on one rank, every
    rank raises it.
    """
    reports = gather_or_raise(world, lambda: start_report(parse()))
    help_printed = [report.args is None for report in reports]
    if any(help_printed) and not all(help_printed):
        rank = help_printed.index(True)
        raise shared_error(
            ConfigError(f"rank {rank} has --help or --version, other ranks do not: start all ranks with one command")
        )
    compare_programs([report.program for report in reports])
    compare_files([report.files for report in reports])
    own = reports[world.rank]
    # Ranks with the same host and list of cores share these cores. A launcher (Slurm) may give each rank other cores.
    ranks_on_these_cores = [report.cores for report in reports].count(own.cores)
    return own.args, max(1, len(own.cores[1]) // ranks_on_these_cores)


def start_report(args):
    """The StartReport of this rank; raises DataError if an input file exists but cannot be read."""
    program, files = {}, {}
    if args is not None:
        program = {flag(name): str(value) for name, value in vars(args).items()}
        program |= {"version": gpt2core.__version__, "code": code_digest(), "NumPy": np.__version__}
        inputs = [getattr(args, name) for name in names_of(args, compared=True)]
        files = file_digests(path for path in inputs if path)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return StartReport(args, program, files, (platform.node(), sorted(cores)))


def compare_programs(programs):
    """Raise ConfigError if a rank's program differs from that of rank 0. programs: StartReport.program of all ranks."""
    for rank, program in enumerate(programs):
        for name, value in programs[0].items():
            if program.get(name) != value:
                difference = f"rank {rank} has {name} {program.get(name)}, but rank 0 has {value}"
                raise shared_error(
                    ConfigError(f"{difference}: start all ranks with the same command and program version")
                )


def compare_files(digests):
    """Raise ConfigError if a file of rank 0 has another digest on a rank. digests: {path: digest} of each rank."""
    for rank, own_digests in enumerate(digests):
        for path, digest in digests[0].items():
            if own_digests.get(path, digest) != digest:
                hashes = f"size:hash {own_digests[path]} and {digest}"
                raise shared_error(
                    ConfigError(f"rank {rank} has another {path} than rank 0 ({hashes}): copy the file of rank 0")
                )


def code_digest():
    """A hash of the source code of all loaded modules of this project: different code could give different results."""
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "gpt2core" or name.startswith("stage"):
            digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:16]


def file_digests(paths):
    """{path: digest} of those paths that are files."""
    return {str(path): file_digest(path) for path in paths if path.is_file()}


def file_digest(path):
    """The text SIZE:HASH for a file: its number of bytes, and a hash of its content or, if it is large, of both ends.

    Raises DataError if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:

            def read(start, count):
                file.seek(start)
                return file.read(count)

            size = os.fstat(file.fileno()).st_size
            return f"{size}:{hash_of_ends(size, read)}"
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def hash_of_ends(size, read):
    """A hash of `size` items, 16 hexadecimal digits; of more than 2 EDGE items only both ends are hashed.

    read(start, count): the bytes of the items from `start` on, at most `count` items.
    """
    digest = hashlib.sha256()
    for start in (0, max(EDGE, size - EDGE)):
        digest.update(read(start, EDGE))
    return digest.hexdigest()[:16]


# -- flags of another stage -------------------------------------------------------------------------------------------
# `stage` is the name of the stage that a message advises to use: the one with many ranks and the same kind of device.


def check_one_process(world, stage):
    """Raise ConfigError if a launcher started several processes of a stage that is one process.

    These processes cannot communicate, so each raises the error.
    """
    variable, count, process_number = read_launcher_env()
    if world.one_process and count > 1:
        raise ConfigError(
            f"rank {process_number}: {count} processes were started ({variable}), but this stage is one process, "
            f"so each would do all of the work: use {stage}, or start it without a launcher. If each process is a run "
            f"of its own, remove {variable} from its environment"
        )


def check_rank_flags(world, args, stage):
    """Raise ConfigError if this stage is one process and a setting of the group RANKS is given."""
    for name in names_of(TrainSettings, group=RANKS, stage=None):  # with `stage`, another function checks it
        if getattr(args, name) is not None:
            check_many_ranks(world, name, getattr(args, name), stage)


def check_many_ranks(world, name, value, stage):
    """Raise ConfigError if this stage is one process: the flag `name`, given with `value`, is only for many ranks."""
    if world.one_process:
        given = f"{flag(name)} {value}"
        if isinstance(value, bool):
            given = flag(name) if value else flag(f"no_{name}")
        raise shared_error(ConfigError(f"{given} is for many ranks, and this stage is one process: use {stage}"))


# -- input that the root has read for all ranks -----------------------------------------------------------------------


def share_tokens(world, path, tokens, tokenizer):
    """The token ids of the file at `path`, on every rank; `tokens`: the ids that the root has read, None elsewhere.

    A token file (of data/prepare.py) can be larger than memory. If it exists on every rank, each rank memory-maps its
    own copy, and ConfigError is raised if a copy differs from that of rank 0. Otherwise the root broadcasts the tokens.
    """
    if all(gather_or_raise(world, lambda: is_tokenized(path))):
        file = path / TOKEN_FILE if path.is_dir() else path
        compare_files(gather_or_raise(world, lambda: file_digests([file])))
        return all_or_raise(world, lambda: load_tokens(path, tokenizer)[0] if tokens is None else tokens)
    shape, dtype = world.broadcast_object(tokens is not None and (tokens.shape, tokens.dtype))
    return world.broadcast(np.empty(shape, dtype) if tokens is None else tokens)


def share_arrays(world, config, parameters):
    """{name: array} of all parameters of a GPT2Config, on every rank. parameters: this dict on the root, else None."""

    def share(name, shape):
        return world.broadcast(parameters[name] if world.is_root else np.empty(shape, np.float32))

    return {name: share(name, shape) for name, shape in parameter_shapes(config)}


def print_nothing(*text, **options):
    """A function that does nothing, used in place of print() on the ranks that are not the root."""
