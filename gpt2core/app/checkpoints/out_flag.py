"""The flag --out: which files may be written to its directory, and the command that continues the run from there."""

import os
import shlex
import sys
from pathlib import Path

from gpt2core.app.checkpoints.directory import HIDDEN, LATEST, STEP, describe_step, newest_step
from gpt2core.app.checkpoints.files import FILES
from gpt2core.app.checkpoints.run_lock import LOCK
from gpt2core.app.exclusive_paths import of_another_run
from gpt2core.app.settings.config_file import NAME as SETTINGS
from gpt2core.app.settings.definitions import TrainSettings
from gpt2core.app.settings.setting_fields import AGAIN, defaults_of, flag, names_of
from gpt2core.errors import CheckpointError, ConfigError


def check_names(args):
    """Raise ConfigError if a file that this run writes has a name of a checkpoint's files; args: TrainSettings.

    This is checked in all directories of checkpoints that the run reads or writes, also if a link leads there.
    """
    for setting in names_of(TrainSettings, written=True):
        path = getattr(args, setting)
        for directory in (args.out, args.resume, args.init_from):
            for name in names_inside(path, directory) if path and directory else ():
                if name in (*FILES, LATEST, LOCK, SETTINGS) or STEP.fullmatch(name) or HIDDEN.fullmatch(name):
                    raise ConfigError(
                        f"{flag(setting)} {path}: {name} in {directory} is a name of the checkpoint's own files: "
                        "choose another name"
                    )


def names_inside(path, directory):
    """The first components, after `directory`, of the path and of the file that it links to; [] outside of it."""
    real, parent = os.path.realpath(directory), os.path.realpath(path.parent)
    paths = [os.path.join(parent, path.name), os.path.realpath(path)]
    return [Path(each).relative_to(real).parts[0] for each in paths if each.startswith(os.path.join(real, ""))]


def checkpoint_of_older_run(settings):
    """The Path of the newest checkpoint in --out if it is of another run than the one that --resume continues.

    Otherwise, or if --out has no checkpoint, the result is None. settings: TrainSettings.
    """
    out, resume = settings.out and settings.out.resolve(), settings.resume and Path(settings.resume).resolve()
    is_resumed_run = resume and out in (resume, resume.parent)  # --resume DIR, DIR/latest or DIR/step-XXXXXXXX
    return newest_step(out) if out and out.exists() and not is_resumed_run else None


def check_out_directory(args):
    """Raise an error if --out has the checkpoints of another run and --overwrite is not given, or if it is needed."""
    for name in ("checkpoint_every", "checkpoint_seconds", "async_checkpoints") if args.save is False else ():
        if value := getattr(args, name):
            given = flag(name) if value is True else f"{flag(name)} {value:g}"
            raise ConfigError(f"{given} and --no-save exclude each other: omit one")
    if not args.overwrite and (older := checkpoint_of_older_run(args)):
        raise CheckpointError(of_another_run(f"--out {args.out}", describe_step(older), f" {args.out}", "directory"))


def resume_command(args, processes=None):
    """The command line that continues this run from its --out directory, as text.

    args: the TrainSettings of this run. processes: the number for `mpirun -n`; None: the command has no mpirun.
    """
    module = sys.modules["__main__"].__spec__
    words = [sys.orig_argv[0].removeprefix(f"{os.getcwd()}/"), *(["-m", module.name] if module else sys.argv[:1])]
    words += ["--resume", args.out, "--out", args.out]
    for name in names_of(TrainSettings, kept=AGAIN):
        value = getattr(args, name)
        if value not in (None, defaults_of(TrainSettings)[name]):
            words += [flag(name if value else f"no_{name}")] if isinstance(value, bool) else [flag(name), value]
    if processes:
        mpirun = Path(words[0]).with_name("mpirun")
        words = [mpirun if mpirun.exists() else "mpirun", "-n", processes, *words]
    return shlex.join(map(str, words))


def continue_flags(out):
    """The flags that continue the run in the directory `out`."""
    return f"--resume {out} --out {out}"
