"""Protect existing files: a run continues only its own log, and replaces only plots that this program wrote.

A file is a log if every complete line is a JSON object with the fields of FIELDS. It is the log of a resumed run if it
has the row that the checkpoint recorded. A file is a plot if it is a PNG with the text field SOFTWARE. Empty files and
devices are accepted too.
"""

import contextlib
import fcntl
import itertools
import json
import os
from pathlib import Path

from gpt2core.errors import ConfigError

FIELDS = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}  # in each line of a log
START = b'{"step": '  # of each line
PNG = b"\x89PNG\r\n\x1a\n"
SOFTWARE = {"Software": "staged-gpt2"}  # a text field of the plots


def log_rows(path):
    """Yield (row, its line as bytes) for each complete row of a log; raises ConfigError if the file is not a log."""
    if not Path(path).is_file():  # a read of a device such as /dev/full would not end
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if row := row_of(line):
                yield row, line
            elif line.endswith(b"\n") or not line.startswith(START[: len(line)]):
                raise ConfigError(f"{path}: line {number} is not a line of a training log: choose another file")


def row_of(line):
    """The row in a line of a log, or None."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        if isinstance(row, dict) and row.keys() >= FIELDS and type(row["step"]) is int:
            return row
    return None


def lock(file):
    """Lock an open file until it is closed or the process ends; returns False if another process has locked it.

    Raises OSError on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_locked(path):
    """The log opened for appending, and locked until it is closed; a file that does not exist is created.

    A device, or a file on a file system without locks, is not locked. Raises ConfigError if the file cannot be written
    or if another run writes to it.
    """
    file, free = open_for_appending(path), True
    if Path(path).is_file():
        with contextlib.suppress(OSError):
            free = lock(file)
    if not free:
        file.close()
        raise ConfigError(f"--log {path}: another run is writing to it: wait until it ends, or choose another file")
    return file


def open_for_appending(path):
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): choose another file") from None


def continue_log(path, first, recorded=None):
    """(the log opened for appending and locked, its rows before step `first`).

    The first row of step `first` or later is deleted from the file, with everything after it. The earlier rows are not
    written again, so that no crash can lose them. recorded: what the checkpoint of a resumed run has in last_log_row
    (see RunLog). Raises ConfigError, and changes nothing, if the file is not a log, or not the log of that run.
    """
    file = open_locked(path)
    try:
        rows, end, newline = rows_before(path, first)
        if os.path.getsize(path):
            check_log_of_run(path, rows, recorded)
    except BaseException:
        file.close()
        raise
    if Path(path).is_file():
        file.truncate(end)
    if not newline:
        file.write("\n")
        file.flush()
    return file, rows


def rows_before(path, first):
    """(the rows of a log before step `first`, the number of their bytes, whether the last one ends in a newline)."""
    rows, end, stale, newline = [], 0, False, True
    for row, line in log_rows(path):  # no early exit: the whole file is checked before it is changed
        stale = stale or row["step"] >= first
        if not stale:
            rows.append(row)
            end, newline = end + len(line), line.endswith(b"\n")
    return rows, end, newline


def check_log_of_run(path, rows, recorded):
    """Raise ConfigError unless `rows` contain the row `recorded`: {"step", "loss"}, {} if that run had no log.

    None: it is not known, because an earlier version saved the checkpoint; any log is then accepted.
    """
    if recorded is None or any(recorded.items() <= row.items() for row in reversed(rows) if recorded):
        return
    wanted = f"step {recorded['step']} with loss {recorded['loss']}" if recorded else "a log at all"
    raise ConfigError(
        f"--log {path}: is the log of another run: the resumed run had {wanted}, which is not in the file; "
        f"choose another file"
    )


def check_output_files(log, plot):
    """Raise ConfigError for a log or a plot (Path or None) that this run may not write.

    That is a file that cannot be written, a log to which another run writes, and a plot that is another program's file.
    """
    for path, open_file in ((log, open_locked), (plot, open_for_appending)):
        if path:
            open_file(path).close()
    if log and plot and log.is_file() and os.path.samefile(log, plot):
        raise ConfigError(f"--log {log} and --plot {plot} are one file: choose another file for one of them")
    if plot and not is_plot(plot):
        raise ConfigError(f"{plot}: is not a plot of this program: choose another file")


def is_plot(path):
    """Whether `path` holds a plot of this program, or nothing to lose (an empty file, a device such as /dev/full)."""
    if not path.is_file():
        return True
    ((name, value),) = SOFTWARE.items()
    with open(path, "rb") as file:
        head = file.read(4096)
    return not head or (head.startswith(PNG) and f"tEXt{name}\0{value}".encode() in head)


def rename_with_number(path):
    """Rename a file or directory to the first unused name of PATH.1, PATH.2, ...; returns its new Path."""
    for number in itertools.count(1):
        if not os.path.lexists(target := f"{path}.{number}"):
            break
    try:
        os.rename(path, target)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be renamed to {target} ({error.strerror}): choose another name for the new run"
        ) from None
    return Path(target)
