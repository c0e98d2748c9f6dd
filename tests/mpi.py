"""Run a test's function on every rank of a real MPI job: the mpiexec twin of thread_communicator.run_ranks.

The function is named to the ranks as module:qualname; it, its arguments and its results travel through files.
"""

import faulthandler
import functools
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@functools.cache
def mpiexec():
    """The launcher and the flags it needs here; skips the test, with the reason, where there is no MPI to test."""
    beside = Path(sys.executable).with_name("mpiexec")  # of the wheel that is installed with this interpreter
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        pytest.skip("there is no mpiexec: pip install mpich, or install your system's MPI")
    probe = subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip("mpi4py cannot be used here: " + (probe.stderr.strip().splitlines() or ["it ended silently"])[-1])
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    open_mpi = "Open MPI" in version or "OpenRTE" in version
    # more ranks than cores, none of them pinned, also in a container
    return [path, *(["--oversubscribe", "--bind-to", "none", "--allow-run-as-root"] if open_mpi else [])]


def run_mpi(size, function, *args, timeout=60):
    """[function(communicator, *args) of each rank], every rank a process of one MPI job.

    `function` is a top-level function of a module; `args` and the results are pickled. Raises AssertionError with what
    the ranks wrote on standard error when the job fails or takes more than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((f"{function.__module__}:{function.__qualname__}", args)))
        command = [*mpiexec(), "-n", str(size), sys.executable, "-m", "tests.mpi", str(job), str(timeout)]
        environment = dict(os.environ, PYTHONPATH=str(ROOT), **dict.fromkeys(THREADS, "1"))
        with open(Path(folder) / "out", "w+") as out, open(Path(folder) / "err", "w+") as err:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = f"ended with status {process.wait(timeout)}"
            except subprocess.TimeoutExpired:
                status = f"was ended after {timeout} s"
            finally:
                end(process)
            results = [job.with_name(f"result{rank}") for rank in range(size)]
            if process.returncode or not all(result.exists() for result in results):
                out.seek(0)
                err.seek(0)
                wrote = f"{out.read()[-4000:]}\n{err.read()[-12000:]}".strip()
                raise AssertionError(f"{function.__name__} on {size} ranks {status}; the ranks wrote:\n{wrote}")
        return [pickle.loads(result.read_bytes()) for result in results]


def end(process):
    """No process of the job is left: the launcher is asked first, since it knows its ranks, then all are killed."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(job, timeout):
    """One rank: run the function of the job, leave its result; an exception ends the job."""
    faulthandler.dump_traceback_later(timeout / 2)  # a rank that hangs says where
    from stage1_mpi.mpi_communicator import MpiCommunicator

    sys.path.append(str(ROOT / "tests"))  # pytest calls a test's module by its bare name
    communicator = MpiCommunicator()
    try:
        target, args = pickle.loads(Path(job).read_bytes())
        module, _, name = target.partition(":")
        result = attrgetter(name)(importlib.import_module(module))(communicator, *args)
        faulthandler.cancel_dump_traceback_later()
        Path(job).with_name(f"result{communicator.rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        print(f"rank {communicator.rank}:\n{traceback.format_exc()}", file=sys.stderr)
        communicator.abort(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
