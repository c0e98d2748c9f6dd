"""Contenders in processes of their own take turns, A B C, B C A, ...; whoever waits is blocked on a pipe, at no cost.

A benchmark script has a function `prepare(module, **options) -> turn`. It is called in each contender's process, with
the contender's module; every request of the parent is then one call `turn(**request)`, whose answer (JSON) goes back.
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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class Contender:
    """One row of the table: a module, the options that `prepare` gets, and the BLAS/OpenMP threads its process has."""

    name: str
    module: str
    blas_threads: int
    options: dict = field(default_factory=dict)


class ContenderFailed(Exception):
    """A contender ended or was silent for too long; the message carries what it wrote on standard error."""


class Running:
    """A contender's process. `ask(**request)` is one turn; use it as a context manager, so that no process is left."""

    def __init__(self, contender, benchmark, timeout):
        self.contender, self.timeout = contender, timeout
        self.errors = tempfile.TemporaryFile("w+")
        job = dict(asdict(contender), benchmark=benchmark)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness", json.dumps(job)],
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
        with suppress(ProcessLookupError, PermissionError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.errors.close()

    def ask(self, **request):
        """Send one request, return the turn's answer with `peak_bytes` added. Raises ContenderFailed."""
        with suppress(BrokenPipeError):  # it has ended: reading the answer says how
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        watchdog = threading.Timer(self.timeout, self.process.kill)
        watchdog.start()
        started = time.monotonic()
        line = self.process.stdout.readline()
        watchdog.cancel()
        if line:
            return json.loads(line)
        status = self.process.wait()
        silent = time.monotonic() - started >= self.timeout
        reason = f"gave no answer in {self.timeout} s" if silent else f"ended with status {status}"
        self.errors.seek(0)
        wrote = "".join(self.errors.readlines()[-40:]).strip()  # a C++ compiler's complaints can be endless
        raise ContenderFailed(f"contender '{self.contender.name}' {reason}; the end of what it wrote:\n{wrote}")


def peak_bytes():
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB, macOS bytes


def serve(job):
    """The contender's side: answer one line for each line of standard input, until it closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not look like an answer

    def answer(content):
        answers.write(json.dumps(dict(content, peak_bytes=peak_bytes()), default=float) + "\n")
        answers.flush()

    benchmark, module = import_module(job["benchmark"]), import_module(job["module"])
    answer({})  # everything is imported: the baseline of its memory
    turn = benchmark.prepare(module, **job["options"])
    for line in sys.stdin:
        answer(turn(**json.loads(line)))


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
    }


def installed_version(package):
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit():
    """The commit that was measured, `-dirty` when the tree differs from it."""
    git = ["git", "-C", str(ROOT)]
    described = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!results"], check=False).returncode
    return described.stdout.strip() + "-dirty" * bool(changed) or "unknown"


def save(benchmark, results):
    """Write results/<name>.json: the results, and when, what and on which hardware they were measured."""
    path = ROOT / "results" / f"{benchmark.rpartition('.')[2]}.json"
    path.parent.mkdir(exist_ok=True)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
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
    """Return what a benchmark's main() returns; a contender that fails ends it with one message and status 1."""
    load = os.getloadavg()[0]
    if load > 0.3:
        print(f"Load average {load:.2f}: other programs may take unequal shares of the contenders.", file=sys.stderr)
    try:
        return main()
    except ContenderFailed as failure:
        progress("")
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
