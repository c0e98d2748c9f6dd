"""Lock the output directory DIR of a run, so that only one run at a time writes checkpoints to it.

A run locks the file DIR/.lock, in which it writes its process id and host name. The operating system releases the lock
when the process ends, also if it is killed with `kill -9`. A program that only reads a checkpoint needs no lock. In a
run of many ranks, only the root locks the directory.

The library filelock is not used: its lock file does not name the process that holds the lock, and is not removed.
"""

import contextlib
import os
import platform
from pathlib import Path

from gpt2core.app.checkpoints.directory import writable_directory
from gpt2core.app.exclusive_paths import is_open_file, lock, rename_with_number
from gpt2core.errors import CheckpointError

LOCK = ".lock"


class RunLock(contextlib.AbstractContextManager):
    """A context manager that holds the lock of an output directory. The constructor creates the directory if needed.

    At the end of the context the lock file is removed. The directory is removed too if it is empty and was created for
    this run, by this object or by its caller (is_new). On a file system without locks (some network file systems) a
    second run is not detected, and `notes`, a list of lines to print, has a warning. The constructor raises
    CheckpointError if the directory is not writable, or if another run has locked it; the message then has the process
    and host of that run.
    """

    def __init__(self, directory, is_new=False):
        self.directory, self.notes = Path(directory), []
        self.created = is_new or not os.path.lexists(directory)
        self.file = self.open_lock_file()

    def open_lock_file(self):
        """Open and lock DIR/.lock, write the process id and host name to it, and return the open file."""
        path = writable_directory(self.directory) / LOCK
        while True:
            try:
                file = open(path, "a+", encoding="utf-8")
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}: choose another directory") from None
            self.lock_or_raise(file)
            if is_open_file(path, file):
                break
            file.close()  # another run ended between open() and lock() and removed this file: open a new one
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {platform.node()}")
        file.flush()
        return file

    def lock_or_raise(self, file):
        """Lock the open file; close it and raise CheckpointError if another run holds the lock."""
        try:
            locked = lock(file)
        except OSError as error:
            self.notes = [
                f"note: {self.directory}: this file system has no locks ({error.strerror}): do not start a "
                f"second run with this directory"
            ]
            return
        if not locked:
            file.seek(0)
            with file:
                raise CheckpointError(
                    f"{self.directory}: {file.read() or 'another process'} is writing checkpoints there: wait "
                    f"until it ends, or choose another directory"
                )

    def rename_directory(self):
        """Rename the directory DIR to the first unused name of DIR.1, DIR.2, ..., and create and lock a new DIR.

        Returns the Path of the renamed directory.
        """
        renamed = rename_with_number(self.directory)
        self.release(renamed)
        self.file = self.open_lock_file()
        return renamed

    def release(self, directory):
        """Remove the lock file and release the lock. directory: the present Path of the locked directory."""
        with contextlib.suppress(OSError):
            os.unlink(directory / LOCK)
        self.file.close()

    def __exit__(self, *error):
        self.release(self.directory)
        if self.created:
            with contextlib.suppress(OSError):  # the directory is not empty
                os.rmdir(self.directory)
