"""Lock the directory DIR of `--out DIR`, so that only one run at a time writes checkpoints to it.

A run locks the file DIR/.lock, in which it writes its process id and host name. The operating system releases the lock
when the process ends, also if it is killed with `kill -9`. A program that only reads a checkpoint needs no lock. In a
run of many ranks, only the root locks the directory.
"""

import contextlib
import os
import platform
from pathlib import Path

from gpt2core.app.checkpoint_directory import HIDDEN, LATEST, STEP, describe_step, newest_step, writable_directory
from gpt2core.app.checkpoint_files import FILES
from gpt2core.app.output_files import lock, rename_with_number
from gpt2core.errors import CheckpointError, ConfigError

LOCK = ".lock"


class RunLock(contextlib.AbstractContextManager):
    """A context manager that holds the lock of an --out directory. The constructor creates the directory if needed.

    At the end of the context the lock file is removed. The directory is removed too if this object created it and it is
    empty. On a file system without locks (some network file systems) a second run is not detected, and `notes`, a list
    of lines to print, has a warning. The constructor raises CheckpointError if the directory is not writable, or if
    another run has locked it; the message then has the process and host of that run.
    """

    def __init__(self, directory):
        self.directory, self.notes = Path(directory), []
        self.created = not os.path.lexists(directory)
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
                f"note: --out {self.directory}: this file system has no locks ({error.strerror}): do not start a "
                f"second run with this directory"
            ]
            return
        if not locked:
            file.seek(0)
            with file:
                raise CheckpointError(
                    f"--out {self.directory}: {file.read() or 'another process'} is writing checkpoints there: wait "
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


def is_open_file(path, file):
    """Whether `path` still refers to the open `file`. If not, the file at `path` was removed or replaced."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def check_names(args):
    """Raise ConfigError if --log, --plot or --trace has a name that a checkpoint's files have; args: the parsed flags.

    This is checked in the directories of --out, --resume and --init-from, also if a link leads there.
    """
    for flag, path in (("--log", args.log), ("--plot", args.plot), ("--trace", args.trace)):
        for directory in (args.out, args.resume, args.init_from):
            for name in names_inside(path, directory) if path and directory else ():
                if name in (*FILES, LATEST, LOCK) or STEP.fullmatch(name) or HIDDEN.fullmatch(name):
                    raise ConfigError(
                        f"{flag} {path}: {name} in {directory} is a name of the checkpoint's own files: choose another "
                        "name"
                    )


def names_inside(path, directory):
    """The first components, after `directory`, of the path and of the file that it links to; [] outside of it."""
    real, parent = os.path.realpath(directory), os.path.realpath(path.parent)
    paths = [os.path.join(parent, path.name), os.path.realpath(path)]
    return [Path(each).relative_to(real).parts[0] for each in paths if each.startswith(os.path.join(real, ""))]


def checkpoint_of_older_run(settings):
    """The Path of the newest checkpoint in --out if it is of another run than the one that --resume continues.

    Otherwise, or if --out has no checkpoint, the result is None. settings: the parsed flags or the RunConfig.
    """
    out, resume = settings.out and settings.out.resolve(), settings.resume and Path(settings.resume).resolve()
    is_resumed_run = resume and out in (resume, resume.parent)  # --resume DIR, DIR/latest or DIR/step-XXXXXXXX
    return newest_step(out) if out and not is_resumed_run else None


def check_out_directory(args):
    """Raise CheckpointError if --out has the checkpoints of another run and --overwrite is not given."""
    if not args.overwrite and (older := checkpoint_of_older_run(args)):
        raise CheckpointError(
            f"--out {args.out}: holds {describe_step(older)} of another run: continue it with --resume {args.out}, "
            f"give --overwrite to rename the directory, or choose another one"
        )
