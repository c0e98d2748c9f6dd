"""Contenders in processes of their own take turns, A B C, B C A, ...; whoever waits is blocked on a pipe, at no cost.

A benchmark script has a function `prepare(module, **options) -> turn`. It is called in each contender's process, with
the contender's module; every request of the parent is then one call `turn(**request)`, whose answer (JSON) goes back.

A contender may be a job of several ranks: all of them call `prepare(module, world=world, **options)` and `turn`, rank 0
alone speaks with the parent, and the others wait for what it hears, asleep.
"""

import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path

from benchmarks.harness.jobs import ROOT, end
from gpt2core.communicator import Solo
from gpt2core.errors import UserError

BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class Contender:
    """One row of the table: a module, the options that `prepare` gets, and the BLAS/OpenMP threads its process has."""

    name: str
    module: str
    blas_threads: int
    options: dict = field(default_factory=dict)
    ranks: int | None = None  # where it is given, module.make_world(ranks) is what `prepare` gets as `world`
    launcher: tuple = ()  # the words before the interpreter's, mpiexec's for instance


class ContenderFailed(Exception):
    """A contender ended or was silent for too long; the message carries what it wrote on standard error."""


class Running:
    """A contender's process. `ask(**request)` is one turn; use it as a context manager, so that no process is left."""

    def __init__(self, contender, benchmark, timeout):
        self.contender, self.timeout = contender, timeout
        self.errors = tempfile.TemporaryFile("w+")
        job = dict(asdict(contender), benchmark=benchmark)
        self.process = subprocess.Popen(
            [*contender.launcher, sys.executable, "-m", "benchmarks.harness.contenders", json.dumps(job)],
            cwd=ROOT,
            env=dict(os.environ, **dict.fromkeys(BLAS_VARIABLES, str(contender.blas_threads))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,  # its helpers (torch.compile has some) end with it
        )

    def __enter__(self):
        try:
            self.baseline = self._answer()["peak_bytes"]
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

    def ask(self, **request):
        """Send one request, return the turn's answer with `peak_bytes` added. Raises ContenderFailed."""
        with suppress(BrokenPipeError):  # it has ended: reading the answer says how
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        watchdog = threading.Timer(self.timeout, end, [self.process])
        watchdog.start()
        started = time.monotonic()
        try:
            while (line := self.process.stdout.readline()) and not line.startswith("{"):
                self.errors.write(line)  # MPICH's mpiexec tells here how a rank has ended
        finally:
            watchdog.cancel()  # also on Ctrl-C: an exit would wait for it
        if line:
            return json.loads(line)
        status = self.process.wait()
        silent = time.monotonic() - started >= self.timeout
        reason = f"gave no answer in {self.timeout} s" if silent else f"ended with status {status}"
        raise failure(f"contender '{self.contender.name}' {reason}", self.errors)


class Member:
    """One of several contenders that live in one job: its turns are requests that name it."""

    def __init__(self, running, name):
        self.running, self.contender = running, Contender(name, "", 1)

    def ask(self, **request):
        return self.running.ask(name=self.contender.name, **request)


def failure(what, errors):
    """The ContenderFailed that tells `what`, and the end of the file that standard error went to."""
    errors.seek(0)
    wrote = "".join(errors.readlines()[-40:]).strip()  # a C++ compiler's complaints can be endless
    return ContenderFailed(f"{what}; the end of what it wrote:\n{wrote}")


def finish(name, command, blas_threads, timeout):
    """Run a command line to its end. Raises ContenderFailed when it fails or takes more than `timeout` seconds."""
    environment = dict(os.environ, **dict.fromkeys(BLAS_VARIABLES, str(blas_threads)))
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout)
            if status:
                raise failure(f"'{name}' ended with status {status}", errors)
        except subprocess.TimeoutExpired:
            end(process)
            raise failure(f"'{name}' was ended after {timeout} s", errors) from None
        finally:
            end(process)


def peak_bytes():
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB, macOS bytes


def serve(job):
    """The contender's side: answer one line for each line of standard input, until it closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not look like an answer

    def answer(content):
        answers.write(json.dumps({"peak_bytes": peak_bytes(), **content}, default=float) + "\n")
        answers.flush()

    try:
        benchmark, module = import_module(job["benchmark"]), import_module(job["module"])
    except Exception:
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)  # MPICH does not notice a rank that exits before it has met the others
    options, world = job["options"], Solo()
    if job["ranks"]:
        world = options["world"] = module.make_world(job["ranks"])
    report = answer if world.is_root else lambda content: None
    report({})  # everything is imported: the baseline of its memory
    try:
        turn = benchmark.prepare(module, **options)
        while line := world.broadcast_object(sys.stdin.readline() if world.is_root else None):
            report(turn(**json.loads(line)))
    except Exception:
        time.sleep(0.4 * min(world.rank, 8))  # what all ranks meet, the first of them tells, and ends the others
        traceback.print_exc()
        world.abort(1)


def play(running, rounds, warm_up, request):
    """Warm every contender up, then play `rounds` rounds. Returns {name: {"warm_up": answer, "rounds": [answers]}}."""
    played = {}
    for one in running:
        progress(f"warming up {one.contender.name}")
        played[one.contender.name] = {"warm_up": one.ask(**warm_up), "rounds": []}
    for index in range(rounds):
        first = index % len(running)  # who goes first rotates, or one contender would always follow the same other
        for one in running[first:] + running[:first]:
            progress(f"round {index + 1}/{rounds}: {one.contender.name}")
            time.sleep(0.1)  # idle OpenMP threads spin for some milliseconds after their last region
            played[one.contender.name]["rounds"].append(one.ask(**request))
    progress("")
    return played


def timed_turn(graphs, milliseconds):
    """{kind: ms of one of its calls, "norms": of what they compute}, of the Graphs of either side."""
    repeats = {kind: graphs.record(kind, milliseconds) for kind in graphs.calls}
    answer = {kind: graphs.replay(kind) / count for kind, count in repeats.items()}
    return dict(answer, norms=graphs.norms())


def progress(text):
    """One line on the terminal that the next one overwrites; nothing where standard error is a file."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def paired_ratio(peer, own):
    """How many times as fast: the median over rounds of peer's seconds / own seconds, both of the same round."""
    return statistics.median(a / b for a, b in zip(peer, own, strict=True))


def hardware():
    """What the figures were measured on."""
    import numpy

    cpu = platform.processor() or platform.machine()
    if sys.platform == "darwin":
        cpu = subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "blas": f"{blas['name']} {blas['version']}",
        "torch": installed_version("torch"),
        "mpi4py": installed_version("mpi4py"),
        "mpich": installed_version("mpich"),
        **gpu_hardware(),
    }


def gpu_hardware():
    """The GPU, its driver, and what drives it from Python; {} where there is none."""
    found = nvidia_smi("name", "driver_version", "power.limit")
    if not found:
        return {}
    cupy = {name: installed_version(name) for name in ("cupy", "cupy-cuda13x", "cupy-cuda12x")}
    return {
        "gpu": found[0][0],
        "gpus": len(found),
        "driver": found[0][1],
        "power_limit": found[0][2],
        "cupy": next((f"{name} {version}" for name, version in cupy.items() if version), None),
        "triton": installed_version("triton"),
    }


def nvidia_smi(*fields):
    """The fields (nvidia-smi --help-query-gpu) of each GPU that CUDA sees, as text; [] where there is none."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen == "":
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if chosen is not None:
        command.append(f"--id={chosen}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]


def installed_version(package):
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit():
    """The commit that was measured, `-dirty` when the tree differs from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        described = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!results"], check=False).returncode
    return described.stdout.strip() + "-dirty" * bool(changed)


def add_saving(add, name=None):
    """The flags that say what save() writes; `name`: the file's in results/, up to its dot, where it can be another."""
    add("--commit", help="what is measured, for the record, where this is a copy without its repository")
    if name:
        add("--save-as", default=name, help=f"the file's name in results/, up to its dot (default {name})")
    add("--no-save", action="store_true", help="leave results/ as it is")


def save(benchmark, results, of_commit=None, name=None):
    """Write results/<group>/<name>.json: the results, and when, what and on which hardware they were measured.

    of_commit: what was measured, where it was measured from a copy without its repository. name: else the benchmark's.
    """
    *_, group, module = benchmark.split(".")
    path = ROOT / "results" / group / f"{name or module}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": of_commit or commit(),
        "command": " ".join(["python", "-m", benchmark, *sys.argv[1:]]),
        "hardware": hardware(),
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nWritten to {path.relative_to(ROOT)}, commit {record['commit']}.")


def print_table(rows):
    """Print a list of dictionaries with the same keys as a Markdown table."""
    header = list(rows[0])
    cells = [header, ["---"] + ["---:"] * (len(header) - 1), *([str(row[key]) for key in header] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    for line in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def run(main):
    """Return what main() returns; what fails ends it with one message, a contender with status 1, its user with 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # on the way out, every job is ended
    load = os.getloadavg()[0]
    if load > 0.3:
        print(f"Load average {load:.2f}: other programs may take unequal shares of the contenders.", file=sys.stderr)
    try:
        return main()
    except (ContenderFailed, UserError) as error:
        progress("")
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
