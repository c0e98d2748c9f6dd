"""Start the ranks with the MPI that is here: MPICH and Open MPI want different flags, and their launchers do not mix.

python -m stage1_mpi.launch -n 4 [--hostfile FILE] train_gpt2.py --preset tiny
"""

import argparse
import contextlib
import ctypes
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from gpt2core.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """What tells one MPI from another, and how its mpiexec is spoken to."""

    name: str
    wheel: str  # brings this MPI and its mpiexec: pip install WHEEL
    says: str  # pattern of what its `mpiexec --version` prints
    hostfile_flag: str
    foreign_host: str  # pattern of a host file's line that is in the other MPI's form
    own_host: str  # the right form
    flags: tuple = ()
    root_flags: tuple = ()


MPICH = Family("MPICH", "mpich", "HYDRA|MPICH|Intel", "-f", r"(?P<host>\S+)\s+.*?slots\s*=\s*(?P<n>\d+)", "{host}:{n}")
OPEN_MPI = Family(
    "Open MPI",
    "openmpi",
    "Open ?MPI|OpenRTE",
    "--hostfile",
    r"(?P<host>[^\s:]+):(?P<n>\d+)(\s|$)",
    "{host} slots={n}",
    # By default it counts cores, refuses more ranks than those, and pins a rank, with all its threads, to one core.
    flags=("--oversubscribe", "--bind-to", "none"),
    root_flags=("--allow-run-as-root",),  # in a container
)
FAMILIES = (OPEN_MPI, MPICH)

# Asked in a process of its own, and without MPI_Init: this one is no rank.
VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


def library():
    """The Family of the MPI that mpi4py loads; every vendor but Open MPI descends from MPICH."""
    probe = subprocess.run([sys.executable, "-c", VENDOR], capture_output=True, text=True)
    if probe.returncode:
        why = (probe.stderr.strip().splitlines() or ["it ended silently"])[-1]
        if "No module named 'mpi4py'" in why:
            raise ConfigError(f"mpi4py is not installed for {sys.executable}: pip install mpi4py mpich")
        raise ConfigError(f"mpi4py finds no MPI that works ({why}): pip install mpich")
    return OPEN_MPI if re.search(OPEN_MPI.says, probe.stdout) else MPICH


def launchers():
    """Paths of every mpiexec that may be meant, the one beside this interpreter first."""
    names = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
    beside = str(Path(sys.executable).parent)
    found = [shutil.which(name, path=path) for path in (beside, None) for name in names]
    return list(dict.fromkeys(filter(None, found)))


def family_of(mpiexec):
    """The Family of a launcher, or None."""
    try:
        said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((family for family in FAMILIES if re.search(family.says, said.stdout + said.stderr)), None)


def choose():
    """(path, Family) of the first launcher that belongs to mpi4py's library.

    Raises ConfigError: another MPI's launcher would start every rank as a world of its own, each of size one.
    """
    wanted, others = library(), []
    for path in launchers():
        family = family_of(path)
        if family is wanted:
            return path, family
        others.append(f"{path} is {family.name if family else 'of an unknown kind'}")
    if not others:
        raise ConfigError(f"there is no mpiexec beside {sys.executable} nor on the PATH: pip install {wanted.wheel}")
    raise ConfigError(
        f"mpi4py loads {wanted.name}, but {', '.join(others)}: every rank would be alone in a world of one. "
        f"pip install {wanted.wheel} brings the right mpiexec"
    )


def check_hosts(path, family):
    """Raise ConfigError, naming the line, where a host file names no host or is written for the other MPI."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the host file {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    hosts = [(i, line.split("#")[0].strip()) for i, line in enumerate(lines, 1)]
    hosts = [(i, line) for i, line in hosts if line]
    if not hosts:
        raise ConfigError(f"the host file {path} names no host: write one a line, such as localhost")
    for i, line in hosts:
        host, _, count = line.split()[0].rpartition(":")
        if host and family is MPICH and ":" not in host and not count.isdigit():
            raise ConfigError(f"{path}, line {i}: {line!r} names no number of ranks after the colon: write {host}:4")
        foreign = re.match(family.foreign_host, line)
        if foreign:
            raise ConfigError(
                f"{path}, line {i}: {line!r} is not how {family.name} writes it: "
                f"{family.own_host.format(**foreign.groupdict())!r}"
            )


def launch_line(mpiexec, family, count, hostfile=None, extra=()):
    """The words of the launcher, before the program's."""
    hosts = [family.hostfile_flag, str(hostfile)] if hostfile else []
    root = family.root_flags if os.geteuid() == 0 else ()
    return [mpiexec, "-n", str(count), *hosts, *family.flags, *root, *extra]


# -- signals ----------------------------------------------------------------------------------------------------------
# MPICH's mpiexec hands SIGINT and SIGTERM on to the ranks and waits for them. Open MPI's gives the ranks a SIGTERM and
# kills them a moment later, too soon for a checkpoint, but hands SIGUSR1 and SIGUSR2 on: so these carry the message.

CARRIERS = {signal.SIGINT: signal.SIGUSR1, signal.SIGTERM: signal.SIGUSR2, signal.SIGHUP: signal.SIGUSR2}


def supervise(line):
    """Run an Open MPI job; returns its exit code. A first signal is handed on by its carrier, a second ends the job."""
    received = []

    def hand_on(number, frame):
        with contextlib.suppress(ProcessLookupError):
            job.send_signal(signal.SIGTERM if received else CARRIERS[number])
        received.append(number)

    # A session of its own: a terminal's Ctrl-C must not reach mpiexec itself.
    job = subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent)
    for number in CARRIERS:
        signal.signal(number, hand_on)
    code = job.wait()
    if received and code == 128 + CARRIERS[received[0]]:  # it arrived before the rank listened
        code = 128 + received[0]
    return 128 - code if code < 0 else code


def end_with_parent():
    """Linux: mpiexec gets a SIGTERM when this process is killed."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def listen(command):
    """On a rank: run `command` as Python would, with a carrier taken for the signal that it stands for.

    A rank that fails before MPI has begun (a package is missing on its host) would leave the others waiting for it in
    MPI_Init, which is told of deaths alone: so it dies.
    """
    for meant in (signal.SIGINT, signal.SIGTERM):
        signal.signal(CARRIERS[meant], lambda number, frame, meant=meant: signal.raise_signal(meant))
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")
    except Exception:
        if "mpi4py.MPI" in sys.modules:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        time.sleep(0.2)  # the launcher passes on what was written
        os.kill(os.getpid(), signal.SIGKILL)


# -- the command ------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line, as every other mistake's is."""

    def error(self, message):
        self.exit(2, f"error: {message} (--help lists the options)\n")


def parser():
    parser = Parser(prog="launch", description="Run a Python program on N ranks.", allow_abbrev=False)
    add = parser.add_argument
    add("-n", type=int, default=1, metavar="N", help="ranks (default 1)")
    add("--hostfile", type=Path, metavar="FILE", help="hosts that run them, one a line (default: this one)")
    add("--flags", default="", metavar="TEXT", help="more flags for mpiexec, as one word")
    add("--listen", action="store_true", help=argparse.SUPPRESS)  # this process is a rank
    add("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a program and its flags, or -- -m MODULE ...")
    return parser


def launch(args):
    """Check everything, then become mpiexec (MPICH) or watch over it (Open MPI); returns an exit code or not at all."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.listen:
        return listen(command)
    if args.n < 1:
        raise ConfigError(f"-n {args.n} must be at least 1")
    if not command or command == ["-m"]:
        raise ConfigError("which program? For example: -n 4 train_gpt2.py --preset tiny")
    if not command[0].startswith("-") and not Path(command[0]).is_file():
        raise ConfigError(f"there is no program {command[0]} in {Path.cwd()}")
    mpiexec, family = choose()
    if args.hostfile:
        check_hosts(args.hostfile, family)
    line = launch_line(mpiexec, family, args.n, args.hostfile, shlex.split(args.flags))
    line += [sys.executable, "-m", "stage1_mpi.launch", "--listen", "--", *command]
    if family is OPEN_MPI:
        return supervise(line)
    sys.stdout.flush()
    os.execv(mpiexec, line)  # its signals and its exit code are the job's


if __name__ == "__main__":
    try:
        sys.exit(launch(parser().parse_args()))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
