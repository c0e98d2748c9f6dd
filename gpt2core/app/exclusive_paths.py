"""One run writes to a path: lock a file against a second run, and rename what an earlier run has written.

The files of output/ use these functions for a log, those of checkpoints/ for an output directory.
"""

import contextlib
import fcntl
import itertools
import os
from pathlib import Path

from gpt2core.errors import ConfigError


def lock(file):
    """Lock an open file until it is closed or the process ends; returns whether it is now locked by this process.

    The result is False if another process holds the lock. Raises OSError on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_open_file(path, file):
    """Whether `path` still refers to the open `file`. If not, the file at `path` was removed or replaced."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def of_another_run(name, content, directory, kind):
    """The message that an output, a file or a directory (`kind`), holds the `content` of another run."""
    advice = f"continue it with --resume{directory}, give --overwrite to rename the {kind}, or choose another one"
    return f"{name}: holds {content} of another run: {advice}"


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


def renamed(path):
    """The Paths beside `path` to which rename_with_number() has renamed earlier files, the latest first."""
    with contextlib.suppress(OSError):  # the parent directory cannot be read
        others = [other for other in path.parent.iterdir() if other.stem == path.name]
        numbers = {int(other.suffix[1:]): other for other in others if other.suffix[1:].isdecimal()}
        return [numbers[number] for number in sorted(numbers, reverse=True)]
    return []
