"""Compare the flags, the program and the input files of all ranks.

A difference between ranks would give wrong results, or ranks that wait for each other forever.
"""

import platform
from dataclasses import dataclass

import numpy as np

import gpt2core
from gpt2core.app.fingerprints import code_fingerprint, file_fingerprints
from gpt2core.app.settings.definitions import Settings
from gpt2core.app.settings.setting_fields import flag, names_of
from gpt2core.errors import ConfigError
from gpt2core.parallel.all_or_raise import gather_or_raise, shared_error
from gpt2core.threads import cores_of_process


@dataclass(frozen=True)
class StartReport:
    """The object that each rank sends in the first all-gather of a command."""

    args: Settings | None  # the parsed flags; None: --help or --version was printed
    program: dict[str, str]  # flags, versions and fingerprint of the code, which must be equal on all ranks
    files: dict[str, str]  # {path: fingerprint} of the input files that exist on this rank
    cores: tuple[str, list[int]]  # (host name, the cores that this process may run on)


def agree_on_start(world, parse):
    """Compare all ranks with rank 0 by one all-gather; returns (the parsed flags, number of cores for this rank).

    parse() returns the Settings, or None after --help or --version. Raises ConfigError on every rank, with the
    rank and both values, if a flag, the program or an input file of a rank differs from that of rank 0. An input file
    is not compared with a rank on which it does not exist. If parse() raises an error on one rank, all ranks raise it.
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
        program |= {"version": gpt2core.__version__, "code": code_fingerprint(), "NumPy": np.__version__}
        inputs = [getattr(args, name) for name in names_of(args, compared=True)]
        files = file_fingerprints(path for path in inputs if path)
    return StartReport(args, program, files, (platform.node(), cores_of_process()))


def compare_programs(programs):
    """Raise ConfigError if a rank's program differs from that of rank 0. programs: StartReport.program of all ranks."""
    for rank, program in enumerate(programs):
        for name, value in programs[0].items():
            if program.get(name) != value:
                difference = f"rank {rank} has {name} {program.get(name)}, but rank 0 has {value}"
                raise shared_error(
                    ConfigError(f"{difference}: start all ranks with the same command and program version")
                )


def compare_files(ranks):
    """Raise ConfigError if a file of rank 0 is another one on a rank. ranks: the file_fingerprints() of each rank."""
    for rank, own in enumerate(ranks):
        for path, fingerprint in ranks[0].items():
            if own.get(path, fingerprint) != fingerprint:
                hashes = f"size:hash {own[path]} and {fingerprint}"
                raise shared_error(
                    ConfigError(f"rank {rank} has another {path} than rank 0 ({hashes}): copy the file of rank 0")
                )
