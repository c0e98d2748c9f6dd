"""Protect existing files: a run continues only its own log, and replaces only plots and traces of this program.

A file is a log if every complete line is a JSON object, a row, with at least the keys FIELDS. A resumed run accepts a
log as its own if the log has the row that was the last one when the checkpoint was saved. A file is a plot of this
program if it is a PNG with the text SOFTWARE. Empty files and devices such as /dev/null are accepted as both.
"""

import contextlib
import errno
import importlib.util
import itertools
import json
import os
from pathlib import Path

from gpt2core.app.exclusive_paths import lock
from gpt2core.errors import ConfigError
from gpt2core.tracing.trace_file import check_trace_file

FIELDS = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}  # keys of each row of a log
LONGEST = 1 << 20  # bytes; a row is shorter
START = b'{"step": '  # the first bytes of each line of a log
PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of a PNG file
SINKS = "/dev/null", "/dev/full"  # devices that a user names on purpose; each write to /dev/full fails
SOFTWARE = {"Software": "staged-gpt2"}  # a text field in the metadata of a plot


def log_rows(path):
    """Yield (row, its line as bytes) for each row of a log; raises ConfigError if the file is not a log.

    An incomplete last line, which a crash can leave, is omitted. A path that is not a file has no rows.
    """
    if not Path(path).is_file():  # it does not exist, or is a device such as /dev/full: a read would not end
        return
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
            if row := row_of(line):
                yield row, line
            elif line.endswith(b"\n") or not line.startswith(START[: len(line)]):  # not even an incomplete row
                raise ConfigError(f"{path}: line {number} is not a line of a training log: choose another file")


def row_of(line):
    """The row in a line of a log, a dict; None if the line has no row."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and row.keys() >= FIELDS and type(row["step"]) is int:
            return row
    return None


def open_locked(path):
    """The log opened for appending, and locked until it is closed; a file that does not exist is created.

    A device, or a file on a file system without locks, is not locked. Raises ConfigError if the file cannot be written
    or if another run has locked it.
    """
    file, available = open_for_appending(path), True
    if Path(path).is_file():
        with contextlib.suppress(OSError):
            available = lock(file)
    if not available:
        file.close()
        raise ConfigError(f"--log {path}: another run is writing to it: wait until it ends, or choose another file")
    return file


def open_for_appending(path):
    """The file opened for appending; it and its folder are created if needed. Raises ConfigError if that fails."""
    try:
        with contextlib.suppress(FileExistsError):  # a file with the name of the folder: open() says so
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Without O_NONBLOCK, open() of a named pipe would wait until another program reads it.
        file = open(path, "a", encoding="utf-8", opener=lambda *name: os.open(name[0], name[1] | os.O_NONBLOCK, 0o666))
        os.set_blocking(file.fileno(), True)
        return file
    except OSError as error:
        problem = "no program reads this pipe" if error.errno == errno.ENXIO else error.strerror
        raise ConfigError(f"{path}: cannot be written ({problem}): choose another file") from None


def continue_log(path, next_step, recorded=None):
    """Open a log for appending and lock it; return (the open file, its rows of steps before `next_step`).

    These rows stay in the file and are not written again, so that no crash can lose them. The file is truncated after
    them. recorded: see check_log_of_run(). Raises ConfigError, and changes nothing, if the file is not a log, or is not
    the log of the resumed run.
    """
    file = open_locked(path)
    try:
        rows, end, ends_in_newline = rows_before(path, next_step)
        if os.path.getsize(path):
            check_log_of_run(path, rows, recorded)
    except BaseException:
        file.close()
        raise
    if Path(path).is_file():
        file.truncate(end)
    if not ends_in_newline:
        file.write("\n")
        file.flush()
    return file, rows


def rows_before(path, next_step):
    """(rows, their number of bytes in the file, whether the last of them ends in a newline) of the log at `path`.

    The rows end before the first row whose step is `next_step` or larger.
    """
    rows, end, found_next_step, ends_in_newline = [], 0, False, True
    for row, line in log_rows(path):  # without `break`: the whole file is checked before it is changed
        found_next_step = found_next_step or row["step"] >= next_step
        if not found_next_step:
            rows.append(row)
            end, ends_in_newline = end + len(line), line.endswith(b"\n")
    return rows, end, ends_in_newline


def check_log_of_run(path, rows, recorded):
    """Raise ConfigError if `rows`, those of a log, show that it is not the log of the resumed run.

    recorded: {"step": ..., "loss": ...}, the last row of the run's log when its checkpoint was saved (`last_log_row` in
    the checkpoint); `rows` must contain this row. {}: the run had no log, so no log is accepted. None: nothing is
    recorded, because the run is new or an earlier version saved the checkpoint; any log is accepted.
    """
    if recorded is None or any(recorded.items() <= row.items() for row in reversed(rows) if recorded):
        return
    if not recorded:
        problem = "lacks steps of the resumed run, because its checkpoint was saved without --log"
    else:
        row = f"step {recorded['step']} of the resumed run had loss {recorded['loss']}"
        problem = f"is the log of another run: {row}, which is not in the file"
    raise ConfigError(f"--log {path}: {problem}; choose another file")


def check_output_files(log, plot, trace=None):
    """Raise ConfigError if this run may not write `log`, `plot` or `trace`; each is a Path or None.

    Files and folders that do not exist are created. After an error they are removed again.

    A run may not write a file without permission, a log that another run has locked, or an image or a trace of another
    program. Log, plot and trace must be different files.
    """
    if plot and plot.suffix.lower() in (".pdf", ".svg", ".eps", ".ps", ".jpg", ".jpeg", ".tif", ".tiff", ".webp"):
        raise ConfigError(f"--plot {plot}: a plot is a PNG image: use the name {plot.with_suffix('.png')}")
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {plot}: matplotlib is not installed: install it, or omit the flag")
    given = {flag: path for flag, path in (("--log", log), ("--plot", plot), ("--trace", trace)) if path}
    with removed_after_error(given.values()):
        for flag, path in given.items():
            check_writable(flag, path)
        for (flag, path), (other_flag, other) in itertools.combinations(given.items(), 2):
            if path.is_file() and os.path.samefile(path, other):
                files = f"{flag} {path} and {other_flag} {other}"
                raise ConfigError(f"{files} are one file: choose another file for one of them")
        if plot and not is_plot(plot):
            raise ConfigError(f"{plot}: is not a plot of this program: choose another file")
        if trace:
            check_trace_file(trace)


@contextlib.contextmanager
def removed_after_error(paths):
    """A context in which files at `paths`, with their folders, may be created; a ConfigError removes the new ones."""
    created = [path for path in paths if not os.path.lexists(path)]
    folders = {folder for path in created for folder in path.parents if not os.path.lexists(folder)}
    try:
        yield
    except ConfigError:
        for path in created:
            with contextlib.suppress(OSError):  # it was not created
                path.unlink()
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            with contextlib.suppress(OSError):  # it was not created
                folder.rmdir()
        raise


def check_writable(flag, path):
    """Open a file of this run for appending, which creates it, and close it; raises ConfigError if that fails.

    A device must be a terminal or one of SINKS: what is written to another one, such as /dev/zero, is lost.
    """
    if path.is_char_device() and os.path.realpath(path) not in SINKS and not is_terminal(path):
        raise ConfigError(f"{flag} {path}: is a device, not a file: choose another file, or /dev/null for none")
    if not path.is_fifo():
        (open_locked if flag == "--log" else open_for_appending)(path).close()
    elif flag != "--log":  # the log is opened only once: its reader would take the first end for that of the log
        raise ConfigError(f"{flag} {path}: is a named pipe, not a file: choose another file")


def is_terminal(path):
    """Whether `path` is a terminal, for example /dev/tty or /dev/stdout."""
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        return file.isatty()
    return False


def is_plot(path):
    """Whether `path` is a plot of this program, an empty file, or no regular file (for example a device)."""
    if not path.is_file():
        return True
    ((name, value),) = SOFTWARE.items()
    with open(path, "rb") as file:
        first_bytes = file.read(4096)
    return not first_bytes or (first_bytes.startswith(PNG) and f"tEXt{name}\0{value}".encode() in first_bytes)
