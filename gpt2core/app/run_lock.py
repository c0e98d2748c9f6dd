"""One run at a time writes to an --out directory. The kernel releases the lock when the process ends, also by kill -9.

The lock is on the file DIR/.lock, which contains the process id and the host name. Reading a checkpoint needs no lock.
In a run of many ranks, only the root locks the directory.
"""

import contextlib
import os
import platform
from pathlib import Path

from gpt2core.app.checkpoint_directory import describe_step, newest_step, writable_directory
from gpt2core.app.output_files import lock, rename_with_number
from gpt2core.errors import CheckpointError

LOCK = ".lock"


class RunLock(contextlib.AbstractContextManager):
    """Exclusive use of an --out directory, which is created if needed; `notes` are lines to print.

    On exit the lock file is removed, and also the directory if this object created it and it is empty. On a file system
    without locks (some network file systems), `notes` has a warning and a second run is not detected. Raises
    CheckpointError if another run uses the directory (with its process and host), or if the directory is not writable.
    """

    def __init__(self, directory):
        self.directory, self.notes = Path(directory), []
        self.created = not os.path.lexists(directory)
        self.file = self.acquire()

    def acquire(self):
        """The open and locked file."""
        path = writable_directory(self.directory) / LOCK
        while True:
            try:
                file = open(path, "a+", encoding="utf-8")
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror}: choose another directory") from None
            self.lock(file)
            if is_open_file(path, file):
                break
            file.close()  # a run that ended in the meantime has removed this file
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {platform.node()}")
        file.flush()
        return file

    def lock(self, file):
        """Lock the open file; close it and raise CheckpointError if another run holds the lock."""
        try:
            free = lock(file)
        except OSError as error:
            self.notes = [
                f"note: --out {self.directory}: this file system has no locks ({error.strerror}): do not start a "
                f"second run with this directory"
            ]
            return
        if not free:
            file.seek(0)
            with file:
                raise CheckpointError(
                    f"--out {self.directory}: {file.read() or 'another process'} is writing checkpoints there: wait "
                    f"until it ends, or choose another directory"
                )

    def rename_directory(self):
        """Rename the directory to the first unused of DIR.1, DIR.2, ..., and lock a new one; returns its new Path."""
        older = rename_with_number(self.directory)
        self.release(older)
        self.file = self.acquire()
        return older

    def release(self, directory):
        """Remove the lock file, which is in `directory`, and release the lock."""
        with contextlib.suppress(OSError):
            os.unlink(directory / LOCK)
        self.file.close()

    def __exit__(self, *error):
        self.release(self.directory)
        if self.created:
            with contextlib.suppress(OSError):  # the directory is not empty
                os.rmdir(self.directory)


def is_open_file(path, file):
    """Whether `path` still refers to the open `file`: it may have been removed or replaced."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def older_run(settings):
    """The Path of the newest checkpoint in --out, or None if there is none or if --resume continues its run.

    settings: the parsed flags or the RunConfig.
    """
    out, resume = settings.out and settings.out.resolve(), settings.resume and Path(settings.resume).resolve()
    continued = resume and out in (resume, resume.parent)  # DIR, DIR/latest or DIR/step-XXXXXXXX
    return newest_step(out) if out and not continued else None


def check_unused(args):
    """Raise CheckpointError if --out has another run's checkpoints, unless the parsed flags have --overwrite."""
    if not args.overwrite and (older := older_run(args)):
        raise CheckpointError(
            f"--out {args.out}: holds {describe_step(older)} of another run: continue it with --resume {args.out}, "
            f"give --overwrite to rename the directory, or choose another one"
        )
