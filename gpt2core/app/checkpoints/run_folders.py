"""The directories of runs without --out, OUT/stage1-tiny, OUT/stage1-tiny-2, ...: create one, and find the newest.

OUT is the directory out/ of the repository. If this package is installed without a repository, or if the repository
cannot be written, it is the directory out/ of the current directory.
"""

import contextlib
import itertools
import os
import re
from pathlib import Path

from gpt2core.app.checkpoints.directory import newest_step
from gpt2core.app.checkpoints.run_lock import RunLock
from gpt2core.app.shipped import INSTALLED
from gpt2core.errors import CheckpointError
from gpt2core.presets import PRESETS

ROOT = Path(__file__).resolve().parents[3]


def runs_folder():
    """The Path of OUT."""
    out = ROOT / "out"
    if INSTALLED.is_dir() or not os.access(out if out.exists() else ROOT, os.W_OK):
        return Path("out")
    return shown(out)


def shown(path):
    """A Path as a message shows it: relative if the current directory is in the repository."""
    return Path(os.path.relpath(path)) if Path.cwd().is_relative_to(ROOT) else path


def lock_new_run(stage, preset):
    """Create the directory of a new run and return its RunLock; two runs that start together get two directories.

    Raises CheckpointError if the directory cannot be created.
    """
    folder = runs_folder() / f"{stage}-{preset}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            directory = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                return RunLock(directory, is_new=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the directory of this run cannot be created ({error.strerror}): give another one with --out"
        ) from None


def newest_run(stage, preset=None):
    """The Path of the directory, of all runs of a stage and preset, whose checkpoint was saved last, or None.

    preset: None for the runs of any preset. A directory without a checkpoint is no run.
    """
    presets = "|".join(map(re.escape, PRESETS if preset is None else [preset]))
    name, found = re.compile(rf"{re.escape(stage)}-({presets})(-\d+)?"), []
    with contextlib.suppress(OSError):  # there is no OUT
        for path in runs_folder().iterdir():
            with contextlib.suppress(OSError):  # not a directory, or one that cannot be read
                if name.fullmatch(path.name) and (step := newest_step(path)):
                    found.append((os.stat(step).st_mtime_ns, path))
    return max(found)[1] if found else None
