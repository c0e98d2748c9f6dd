"""Run the compared programs A, B, C as separate processes, and measure them in interleaved rounds: A B C, B C A, ...

A benchmark script has a function `prepare(module, **options)`, which returns a function `run_round`. `module` is one of
the implementations that the benchmark compares: a Python module such as benchmarks.harness.ours or
benchmarks.peers.torch_gpt2. Each process calls prepare() with one module. Then it receives requests from its parent
process, the benchmark script. For each request it calls `run_round(**request)` and sends the result back as JSON. A
process that waits for a request is blocked on a pipe and uses no CPU time.

A "process" may also be a job of several ranks. Then all ranks call `prepare(module, world=world, **options)` and
`run_round`. Rank 0 reads the requests from the pipe, broadcasts them to the other ranks, and sends the results.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module

from gpt2core.app.command import error_text, run_command
from gpt2core.app.output.failed_output import output_error
from gpt2core.app.settings.flag_parser import HelpPrinted
from gpt2core.communicator import Solo
from gpt2core.errors import UserError
from stage1_mpi.launch import choose, launch_line
from testing.jobs import ROOT, end

BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
USER_ERROR = 2  # the exit status of a process whose error is explained in one line


@dataclass(frozen=True)
class ProcessSpec:
    """Describes one process to measure."""

    name: str  # the title of its row in the table
    module: str  # the implementation to measure, passed to prepare()
    blas_threads: int  # threads of BLAS and OpenMP
    options: dict = field(default_factory=dict)  # further arguments of prepare()
    ranks: int | None = None  # if given, prepare() also gets world=module.make_world(ranks)
    mpi: bool = False  # whether mpiexec starts the ranks


class BenchmarkFailed(Exception):
    """A process has ended or did not answer in time. The message includes the last lines of its standard error."""


class BenchmarkProcess:
    """A running process that a ProcessSpec describes. Use it as a context manager: leaving the block ends the process.

    benchmark: the module that has prepare(). timeout: seconds within which the process must answer each request. Raises
    BenchmarkFailed, and UserError if prepare() or run_round() does so.
    """

    def __init__(self, spec, benchmark, timeout):
        self.spec, self.timeout = spec, timeout
        self.errors = tempfile.TemporaryFile("w+")
        job, launcher = dict(asdict(spec), benchmark=benchmark), launch_line(*choose(), spec.ranks) if spec.mpi else ()
        self.process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "benchmarks.harness.processes", json.dumps(job)],
            cwd=ROOT,
            env=dict(os.environ, **dict.fromkeys(BLAS_VARIABLES, str(spec.blas_threads))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,  # so that end() also ends its child processes; torch.compile starts some
        )

    def __enter__(self):
        try:
            self.baseline = self._answer()["peak_bytes"]  # memory after the imports
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        end(self.process)
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.errors.close()

    def run_round(self, **request):
        """Send one request; return the result of run_round() with the field peak_bytes. Raises BenchmarkFailed.

        Without a request, wait until all ranks have called prepare().
        """
        time.sleep(0.1)  # after a parallel region, OpenMP threads of another process still use the cores
        with suppress(BrokenPipeError):  # the process has ended; _answer() raises BenchmarkFailed with the reason
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        """The next answer, a dictionary. Raises BenchmarkFailed if the process has ended or does not answer in time."""
        watchdog = threading.Timer(self.timeout, end, [self.process])
        watchdog.start()
        started = time.monotonic()
        try:
            while (line := self.process.stdout.readline()) and not line.startswith("{"):
                self.errors.write(line)  # MPICH's mpiexec reports on stdout how a rank ended
        finally:
            watchdog.cancel()  # also after Ctrl-C, because the interpreter waits for the timer at exit
        if line:
            return json.loads(line)
        status = self.process.wait()
        self.errors.seek(0)
        raise_user_error(self.spec.name, USER_ERROR, self.errors.read())  # it may have ended itself by a signal
        timed_out = time.monotonic() - started >= self.timeout
        reason = f"did not answer within {self.timeout} s" if timed_out else f"ended with status {status}"
        raise failure(f"benchmark process '{self.spec.name}' {reason}", self.errors)


def raise_user_error(name, status, output):
    """Raise UserError if the program `name` reports one: exit code and a line "error: ...": for example, no GPU."""
    if status != USER_ERROR:
        return
    lines = output.splitlines()
    reports = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if reports and not any(line.startswith("Traceback") for line in lines):
        raise UserError(f"{name}: {reports[0]}")


def failure(message, errors):
    """A BenchmarkFailed with `message` and the last 40 lines of the open file `errors`."""
    errors.seek(0)
    tail = "".join(errors.readlines()[-40:]).strip()
    return BenchmarkFailed(f"{message}; the end of its standard error:\n{tail}")


def run_to_end(name, command, blas_threads, timeout, cwd=ROOT, environment=None):
    """Run a command, wait for its end, return its output. Raises BenchmarkFailed if it fails or exceeds `timeout` s.

    Raises UserError if the command reports one. environment: a dictionary of further environment variables.
    """
    environment = os.environ | dict.fromkeys(BLAS_VARIABLES, str(blas_threads)) | (environment or {})
    with tempfile.TemporaryFile("w+") as output:
        files = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        process = subprocess.Popen(command, cwd=cwd, env=environment, start_new_session=True, **files)
        try:
            status = process.wait(timeout)
            problem = status and f"ended with status {status}"
        except subprocess.TimeoutExpired:
            status, problem = None, f"was stopped after {timeout} s"
        finally:
            end(process)
        output.seek(0)
        text = output.read()
        raise_user_error(name, status, text)
        if problem:
            raise failure(f"'{name}' {problem}", output)
        return text


def interleaved(functions, rounds):
    """{name: [the result of each round]} of functions {name: function}; each round starts with another function."""
    results, names = {name: [] for name in functions}, list(functions)
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            progress(f"round {number + 1}/{rounds}: {name}")
            results[name].append(functions[name]())
    progress("")
    return results


def run_rounds(processes, rounds, warm_up, request):
    """Send each process the request `warm_up` once, then in interleaved rounds the request `request`.

    processes: BenchmarkProcesses, or {name: run_round() of a process}. Returns {name: {"warm_up": result, "rounds":
    [result of each round]}}.
    """
    runs = processes if isinstance(processes, dict) else {each.spec.name: each.run_round for each in processes}
    warmed_up = {}
    for name, run in runs.items():
        progress(f"warming up {name}")
        warmed_up[name] = run(**warm_up)
    measured = interleaved({name: partial(run, **request) for name, run in runs.items()}, rounds)
    return {name: {"warm_up": warmed_up[name], "rounds": measured[name]} for name in runs}


def peak_bytes(usage=None):
    """The largest resident set size of this process so far, or in this usage of resources, in bytes."""
    peak = (usage or resource.getrusage(resource.RUSAGE_SELF)).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB, macOS bytes


def progress(text):
    """Show `text` on the terminal in a line that the next call overwrites. Does nothing if stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def serve(job):
    """The program of a BenchmarkProcess: answer each request until standard input is closed.

    A request is one line of JSON on standard input, an answer one line of JSON on standard output. job: the fields of
    the ProcessSpec as a dictionary, and "benchmark", the module that has prepare().
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to standard error, so that the parent does not read it as an answer

    def answer(content):
        answers.write(json.dumps({"peak_bytes": peak_bytes(), **content}, default=float) + "\n")
        answers.flush()

    try:
        benchmark, module = import_module(job["benchmark"]), import_module(job["module"])
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and not (ROOT / error.name.split(".")[0]).exists():
            advice = "`make bench` installs it, on a machine with GPUs `make bench-gpu`"
            print(f"error: the package {error.name} is not installed: {advice}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)  # MPICH does not detect a rank that exits before MPI_Init

    def body(world):
        report = answer if world.is_root else lambda content: None
        report({})  # all imports are done: the parent reads the memory baseline from this answer
        options = job["options"] | ({"world": world} if job["ranks"] else {})
        run_round = benchmark.prepare(module, **options)
        while line := world.broadcast_object(sys.stdin.readline() if world.is_root else None):
            request = json.loads(line)
            report(run_round(**request) if request else world.barrier() or {})

    run_command(lambda: module.make_world(job["ranks"]) if job["ranks"] else Solo(), body)


def run_main(main, measures_time=True):
    """Call main() and end the script with its result as exit code. measures_time: warn if other programs run.

    A BenchmarkFailed ends the script with its message and exit code 1, a UserError with its message and exit code 2,
    --help with exit code 0.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that context managers end every process
    load, only_prints = os.getloadavg()[0], {"-h", "--help", "--dry-run"} & set(sys.argv)
    if measures_time and not only_prints and load > 0.3:
        print(f"load average {load:.2f}: other programs may slow the compared processes unequally", file=sys.stderr)
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except HelpPrinted:
        sys.exit(0)
    except (BenchmarkFailed, UserError) as error:
        progress("")
        print(f"error: {error_text(error)}" if isinstance(error, UserError) else error, file=sys.stderr)
        sys.exit(USER_ERROR if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(output_error(error))


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
