"""One check of one exercise, in a process of its own: python -m exercises.child FILE DESCRIPTOR.

FILE describes the check (see runner.py). The result is one JSON object, written to the file descriptor. What the
student's code prints goes to standard output, which the runner keeps apart.
"""

import contextlib
import errno
import importlib
import json
import os
import re
import resource
import signal
import sys
import traceback
from pathlib import Path

# Calls that a check refuses, because a mistake in a student's file must not change the machine. Python reports each of
# these calls to audit hooks. This protects against accidents; it is no protection against a malicious program.
REFUSED = {
    "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.kill",
    "os.killpg", "socket.connect", "socket.bind", "os.chown", "os.chmod",
}  # fmt: skip
CHANGES_PATHS = {
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.utime",
    "shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.copytree",
}  # fmt: skip
WRAPPERS = "InterpreterError", "CommunicatorError"  # Triton's interpreter and run_ranks wrap exceptions
WAITING = (
    "A rank waits for a message that no rank sends, or sends a message that no rank receives. "
    "Each send needs one receive; start the receive before you wait for the send."
)
NO_KEEPDIMS = "The two shapes do not broadcast: does a sum or a maximum over an axis lack keepdims=True?"
PLAIN_ARRAY = "A function for a Tensor gets an array: use the method or the NumPy function, such as a.sum(...)."
TILES = "Two tiles have different shapes: [:, None] makes a column, [None, :] a row; tl.sum(x, 0) adds the rows of x."
INNER_SIZES = "The inner sizes of a matrix product differ: is a transpose missing or superfluous?"
TOO_FEW = "Does the function return all values that its page names, in one `return`, with commas between them?"
OTHER_CALLS = "Two ranks make different calls: compare the operation and the number of elements that each rank names."
OVERWRITTEN = "An array is changed while it is sent: wait for the handle of its send before you write to it."
ERRORS = {  # a pattern in the message of an exception: what usually causes it
    r"could not be broadcast together": NO_KEEPDIMS,
    r"'numpy.ndarray' object has no attribute 'backend'": PLAIN_ARRAY,
    r"make_shape_compatible": TILES,
    r"mismatch in its core dimension": INNER_SIZES,
    r"object is not iterable|values to unpack": TOO_FEW,
    r"all ranks of a group must make the same calls": OTHER_CALLS,
    r"overwrote x before wait": OVERWRITTEN,
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main():
    request = json.loads(Path(sys.argv[1]).read_text())
    descriptor = os.dup(int(sys.argv[2]))
    limit(request)
    here = os.getcwd()
    try:
        result = run(request, here)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt of the student's code
        result = failure(error, request)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    answer = json.dumps(result).encode()
    while answer:
        answer = answer[os.write(descriptor, answer) :]
    os._exit(0)  # threads and exit handlers of the student's code do not matter


def limit(request):
    """Limit the time and memory of this process, and the size of a file that it writes."""
    signal.alarm(request["seconds"] + 5)  # the runner ends the process earlier, unless the runner itself was ended
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["output"], request["output"]))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(request, here):
    """Run the check; returns the result."""
    for package in request["packages"]:  # the student's files are found before those of the repository
        importlib.import_module(package).__path__.insert(0, str(Path(request["overlay"], *package.split("."))))
    sys.addaudithook(guard(here))
    check = getattr(importlib.import_module(request["module"]), request["check"])
    check()
    return {"state": "passed"}


def guard(here):
    """The audit hook: it refuses calls that change anything outside the directory `here`."""

    def inside(path):
        if isinstance(path, int) or path is None:
            return True
        full = os.path.realpath(os.fsdecode(path))
        return full == os.devnull or full.startswith(here + os.sep) or "__pycache__" in full

    def hook(event, arguments):
        if event == "open":
            path, mode, flags = arguments
            if (flags & WRITES if isinstance(flags, int) else set(mode or "r") & set("wax+")) and not inside(path):
                raise PermissionError(f"the grader does not let your code write to {os.fsdecode(path)}")
        elif event in CHANGES_PATHS:
            for path in arguments:
                if isinstance(path, str | bytes | os.PathLike) and not inside(path):
                    raise PermissionError(f"the grader does not let your code change {os.fsdecode(path)}")
        elif event in REFUSED:
            raise PermissionError(f"the grader does not let your code call {event}()")

    return hook


def failure(error, request):
    """The result for an exception: {"state", "text", "hint"}. The traceback of an unexpected exception is printed."""
    from exercises.compare import Mismatch

    cause = error
    while type(cause).__name__ in WRAPPERS and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, NotImplementedError) and f"exercise {request['number']}:" in str(cause):
        return {"state": "not started", "text": "not written yet", "hint": f"Read {request['page']}."}
    if isinstance(cause, Mismatch):
        return failed(str(cause), cause.hint)
    with contextlib.suppress(BaseException):
        traceback.print_exception(error)
    if isinstance(cause, MemoryError):
        limit = f"{request['memory'] / 2**30:g} GB"
        return failed(
            f"your code needs more memory than the limit of {limit}", "Does a list or an array grow in a loop?"
        )
    if isinstance(cause, SystemExit | KeyboardInterrupt):
        return failed(f"your code ended the program ({type(cause).__name__})", "Remove exit() and sys.exit().")
    if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
        return failed("your code printed too much text", "Is there a print() in a loop?")
    message = message_of(cause)
    if type(cause).__name__ == "CommunicatorError":
        return failed(plain_waits(message), f"{error_hint(message) or WAITING} {request['hint']}")
    hint = f"{error_hint(message)} {request['hint']}".strip()
    return failed(f"{place_of(cause, request)}{type(cause).__name__}: {message}", hint)


WAIT = re.compile(
    r"rank (\d+) waits in message from rank (\d+) to (\d+), tag \d+, of \w+ \([^)]*\) for ranks \[[^]]*\]"
)


def plain_waits(message):
    """`message` of a CommunicatorError, in which each wait for a message is written in plain words."""

    def words(found):
        rank, source, to = found.groups()
        sends = f"rank {rank} waits until rank {to} receives its message"
        return sends if rank == source else f"rank {rank} waits for a message from rank {source}"

    return WAIT.sub(words, message)


def error_hint(message):
    """The usual cause of an exception with this message, or ""."""
    return next((hint for pattern, hint in ERRORS.items() if re.search(pattern, message)), "")


def failed(text, hint):
    return {"state": "failed", "text": text, "hint": hint}


def message_of(error):
    """The message of an exception and its notes, as one line of moderate length."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a student's exception may raise in __str__
        text = "(without a message)"
    notes = "; ".join(str(note) for note in getattr(error, "__notes__", ())[:2])
    text = text if len(text) <= 300 else f"{text[:300]}..."
    return f"{text} ({notes})" if notes else text


def place_of(error, request):
    """ "file, line 12: " of the last line of the student's code that the traceback contains, or ""."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        for file, numbers in request["lines"].items():
            if Path(frame.filename) == Path(request["overlay"], file) and 0 < frame.lineno <= len(numbers):
                number = numbers[frame.lineno - 1]
                place = f"{file}, line {number}: " if number else place
    return place


if __name__ == "__main__":
    main()
