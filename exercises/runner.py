"""Run one check in a child process with limits on time, memory and output, and return its Result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from exercises.catalog import ROOT

SECONDS = 10  # time limit of one check; on an idle machine the real code takes less than a second
INTERPRETER_SECONDS = 15  # on stage 2, whose kernels run slowly in Triton's interpreter
MEMORY = 3 << 29  # bytes of address space, 1.5 GB; the real code needs less than 1 GB
OUTPUT = 1 << 20  # bytes that a check may print or write to one file
KEPT = 10_000  # characters of this output that are kept


@dataclass(frozen=True)
class Result:
    """The result of a check. state: "passed", "failed", "not started" or "timed out"; printed: the code's output."""

    state: str
    text: str = ""
    hint: str = ""
    printed: str = ""

    @property
    def ends_exercise(self):
        """Whether the other checks of the exercise would only repeat this result."""
        return self.state in ("not started", "timed out")


def run_check(exercise, check, overlay, lines):
    """The Result of one check of an Exercise or a Case.

    overlay: the directory with the exercise's files of the student. lines: {file: the number of each line in the
    student's file}, for error messages.
    """
    seconds = INTERPRETER_SECONDS if exercise.stage == 2 else SECONDS
    request = {
        "module": exercise.module, "check": check, "number": exercise.number, "page": exercise.page, "lines": lines,
        "overlay": str(overlay), "packages": sorted({str(Path(file).parent).replace("/", ".") for file in lines}),
        "seconds": seconds, "memory": MEMORY, "output": OUTPUT, "hint": exercise.hint,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="grade-") as directory:
        work = Path(directory, "work")
        work.mkdir()
        Path(directory, "request.json").write_text(json.dumps(request))
        with open(Path(directory, "output"), "wb") as output:
            answer, code = run_process([str(Path(directory, "request.json"))], work, output, seconds)
        printed = Path(directory, "output").read_bytes()[: 4 * KEPT].decode("utf-8", errors="backslashreplace")[:KEPT]
    if code is None:
        return Result(
            "timed out", f"no result after {seconds} seconds", f"Does a loop never end? {request['hint']}", printed
        )
    try:
        return Result(**json.loads(answer), printed=printed)
    except (ValueError, TypeError):  # no answer, or not the answer of exercises.child
        return Result("failed", without_answer(code), request["hint"], printed)


def run_process(arguments, work, output, seconds):
    """(what the child wrote to its descriptor, exit code or None after the time limit)."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "exercises.child", *arguments, str(write_end)]
    process = subprocess.Popen(
        command, cwd=work, env=environment(work), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        pass_fds=[write_end], start_new_session=True,
    )  # fmt: skip
    os.close(write_end)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the child is the leader of its own session
        process.wait()
    os.set_blocking(read_end, False)
    with open(read_end, "rb") as pipe, contextlib.suppress(BlockingIOError):
        return pipe.read(1 << 16) or b"", code
    return b"", code


def environment(work):
    """The environment of a child: one thread for BLAS, Triton's interpreter, and no file outside `work`."""
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(work))
    return os.environ | single | places | {
        "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
    }  # fmt: skip


def without_answer(code):
    """A sentence for a child that ended without a result."""
    if code < 0:
        known = {each.value: each.name for each in signal.Signals}
        return f"your code ended the process with the signal {known.get(-code, -code)}"
    return f"your code ended the process with exit code {code} before the check was complete"
