"""Start MPI jobs from Python: Job runs a command line, run_mpi() a function on every rank.

At the end both kill every process of the job that still runs.
"""

import faulthandler
import functools
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from gpt2core.errors import UserError
from stage1_mpi.launch import choose

ROOT = Path(__file__).resolve().parents[1]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Limit in seconds for the start of the ranks of run_mpi(), and for each wait of a Job. After it the job is killed.
LIMIT = 180
# Lines that a launcher or an MPI library prints when ranks are killed or abort.
NOISE = re.compile(r"Abort\(\d+\) on node|MPI_A(BORT|bort)|^[-=]{20,}|^=  |^YOUR APPLICATION|^This typ|^Please see")


@functools.cache
def launcher():
    """[path of mpiexec, flags ...] for the MPI library that mpi4py loads; raises ConfigError if there is none."""
    path, implementation = choose()
    return [path, *implementation.flags, *(implementation.root_flags if os.geteuid() == 0 else ())]


def end(process):
    """End all processes of a job. `process` is its launcher.

    The launcher gets SIGTERM, so that it ends its ranks. Then the processes that are left get SIGKILL.
    """
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with suppress(ProcessLookupError, PermissionError):  # raised if all processes have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- a command line ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """A finished job."""

    code: int  # the exit code of mpiexec
    out: str  # standard output
    err: str  # standard error
    seconds: float  # the time that Job.done() waited for the end
    left: tuple  # ids of processes of the job that are still alive

    @property
    def lines(self):
        """The lines on standard error, without those of the launcher and the MPI library."""
        return [line for line in self.err.splitlines() if line.strip() and not NOISE.search(line)]


class Job:
    """A running mpiexec. Use it as a context manager: leaving the block ends the job.

    words: the arguments of mpiexec, such as "-n", 4, script; the word ":" separates groups of ranks. start: a command
    line instead of that of mpiexec. environment: additional environment variables. The attribute `mark` is an
    environment variable, NAME=VALUE, that all processes of the job have, and no other processes. pids() finds the
    processes by this variable, but only on Linux.
    """

    def __init__(self, *words, cwd=ROOT, start=None, **environment):
        self.mark = f"JOB_OF_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        defaults = {"PYTHONPATH": str(ROOT), name: value, **dict.fromkeys(THREAD_VARIABLES, "1")}
        environment = os.environ | defaults | environment
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # standard output, standard error
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*(start or launcher()), *map(str, words)],
            cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=self.files[0], stderr=self.files[1],
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        end(self.process)
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for file in self.files:
            file.close()

    def pids(self, variable=""):
        """The ids of the job's processes, as a list.

        With `variable`, the name of an environment variable, the result is instead a dictionary {value of the variable:
        process id}. It contains only the processes in whose environment the variable is set.
        """
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                settings = path.read_text(errors="replace").split("\0")
                if self.mark in settings:
                    pid = int(path.parent.name)
                    pairs = dict(setting.split("=", 1) for setting in settings if "=" in setting)
                    if not variable:
                        found[pid] = pid
                    elif variable in pairs:
                        found[pairs[variable]] = pid
        return found if variable else list(found)

    def ranks(self):
        """{rank: process id} of the ranks started so far."""
        pids = self.pids("OMPI_COMM_WORLD_RANK") or self.pids("PMI_RANK")
        return {int(rank): pid for rank, pid in pids.items()}

    def kill_rank(self, rng):
        """Kill a random rank by SIGKILL, as soon as there is one; return its number, or None if the job has ended."""
        while self.process.poll() is None:
            if ranks := self.ranks():
                rank = rng.choice(sorted(ranks))
                with suppress(ProcessLookupError):  # the rank has just ended
                    os.kill(ranks[rank], signal.SIGKILL)
                    return rank
        return None

    def out(self):
        """The standard output so far."""
        return os.pread(self.files[0].fileno(), 1 << 24, 0).decode(errors="replace")

    def wait_for(self, text):
        """Wait until standard output contains `text`. Raises AssertionError if the job ends or LIMIT seconds pass."""
        while text not in self.out():
            assert self.process.poll() is None and time.monotonic() - self.began < LIMIT, self.done().err
            time.sleep(0.01)

    def done(self):
        """Wait for the end of the job; return its Done. Raises AssertionError after LIMIT seconds."""
        started = time.monotonic()
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            end(self.process)
            raise AssertionError(f"the job hung for {LIMIT} s; its output: {self.texts()}") from None
        deadline = time.monotonic() + 10  # the launcher has killed the other ranks, which may need time to end
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return Done(self.process.returncode, *self.texts(), time.monotonic() - started, tuple(left))

    def texts(self):
        """[standard output, standard error] so far."""
        return [os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for file in self.files]


# -- a function on every rank -----------------------------------------------------------------------------------------


def run_mpi(size, function, *args, timeout=LIMIT):
    """Call function(communicator, *args) on `size` ranks of a new MPI job; return the list of the results.

    `function` is a top-level function of a module; `args` and the results are pickled. Raises the UserError that a rank
    raises, and AssertionError with the output of the ranks if the job fails otherwise, or if it takes more than
    `timeout` seconds after all ranks have started.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder) / "job"  # the ranks write their results beside this file; see main()
        job_file.write_bytes(pickle.dumps((f"{function.__module__}:{function.__qualname__}", args)))
        program = [sys.executable, "-m", "testing.jobs", str(job_file), str(timeout)]
        command = [*launcher(), "-n", str(size), *program]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), **dict.fromkeys(THREAD_VARIABLES, "1"))
        with open(Path(folder) / "out", "w+") as out, open(Path(folder) / "err", "w+") as err:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
            ready, deadline = [job_file.with_name(f"ready{rank}") for rank in range(size)], time.monotonic() + LIMIT
            try:
                while process.poll() is None and time.monotonic() < deadline and not all(map(Path.exists, ready)):
                    time.sleep(0.01)
                status = f"ended with status {process.wait(timeout)}"
            except subprocess.TimeoutExpired:
                status = f"was ended after {timeout} s"
            finally:
                end(process)
            if (mistake := job_file.with_name("mistake")).exists():
                raise UserError(mistake.read_text())
            results = [job_file.with_name(f"result{rank}") for rank in range(size)]
            if process.returncode or not all(result.exists() for result in results):
                out.seek(0)
                err.seek(0)
                output = f"{out.read()[-4000:]}\n{err.read()[-12000:]}".strip()
                raise AssertionError(f"{function.__name__} on {size} ranks {status}; output of the ranks:\n{output}")
        return [pickle.loads(result.read_bytes()) for result in results]


def main(job_file, timeout):
    """The program of one rank of run_mpi(): call the function and write the result to a file.

    job_file: the path of the file with the function's name and arguments. An exception ends the whole job.
    """
    faulthandler.dump_traceback_later(LIMIT / 2)  # print the stack of a rank that hangs during start-up
    from stage1_mpi.mpi_communicator import MpiCommunicator

    sys.path.append(str(ROOT / "tests"))  # so that modules in tests/ are found by their bare names
    communicator = MpiCommunicator()
    try:
        target, args = pickle.loads(Path(job_file).read_bytes())
        module, _, name = target.partition(":")
        function = attrgetter(name)(importlib.import_module(module))
        faulthandler.dump_traceback_later(timeout / 2)
        Path(job_file).with_name(f"ready{communicator.rank}").touch()
        result = function(communicator, *args)
        faulthandler.cancel_dump_traceback_later()
        Path(job_file).with_name(f"result{communicator.rank}").write_bytes(pickle.dumps(result))
    except BaseException as error:
        if isinstance(error, UserError):
            with suppress(FileExistsError), open(Path(job_file).with_name("mistake"), "x") as file:
                file.write(str(error))  # of the first rank that raises it
        print(f"rank {communicator.rank}:\n{traceback.format_exc()}", file=sys.stderr)
        communicator.abort(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
