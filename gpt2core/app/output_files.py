"""Protect existing files: a run continues only a log, and replaces only a plot, that this program wrote.

A file is accepted as a log if every complete line is a JSON object with the fields of FIELDS, and as a plot if it is a
PNG with the text field SOFTWARE. Empty files and devices are accepted too.
"""

import contextlib
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


def continue_log(path, first):
    """(the log opened for appending, its rows before step `first`).

    The first row of step `first` or later is deleted from the file, with everything after it.

    A file that does not exist is created. The earlier rows are not written again, so that no crash can lose them.
    Raises ConfigError, and changes nothing, if the file is not a log.
    """
    rows, end, stale, newline = [], 0, False, True
    for row, line in log_rows(path):  # no early exit: the whole file is checked before it is changed
        stale = stale or row["step"] >= first
        if not stale:
            rows.append(row)
            end, newline = end + len(line), line.endswith(b"\n")
    file = open(path, "a", encoding="utf-8")
    if Path(path).is_file():
        file.truncate(end)
    if not newline:
        file.write("\n")
        file.flush()
    return file, rows


def check_outputs(log, plot):
    """Raise ConfigError if the log or the plot (Path or None) cannot be written, or `plot` is another program's."""
    for path in filter(None, (log, plot)):
        try:
            open(path, "a").close()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}): choose another file") from None
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


def move_aside(path):
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
