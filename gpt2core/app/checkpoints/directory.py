"""Atomic checkpoints in the output directory DIR of a run: after the first save, DIR always has a complete checkpoint.

This is also true after a crash at any moment. Arrows are symbolic links:

DIR/step-00000040/   config.json  model.safetensors  tokenizer.json  optimizer.safetensors  state.json
DIR/latest           -> step-00000040, replaced by one rename after all files of the step are on disk
DIR/config.json ...  -> latest/config.json ..., so that transformers' `from_pretrained(DIR)` opens the newest step

On a file system without symbolic links, `latest` is a text file with the name of the step. This module reads that file;
other programs must open DIR/step-00000040. Only one process at a time writes to DIR (see run_lock.py); any number of
processes may read it meanwhile. In this file a "step" is one saved checkpoint, the directory DIR/step-XXXXXXXX.
"""

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

import numpy as np

from gpt2core.app.checkpoints.files import (
    CONFIG,
    FILES,
    MODEL,
    check_shapes,
    checkpoint_errors,
    fsync,
    read_step,
    write_step,
)
from gpt2core.app.exclusive_paths import renamed
from gpt2core.architecture import parameter_shapes
from gpt2core.errors import CheckpointError
from gpt2core.text.input_file import read_file

LATEST = "latest"
STEP = re.compile(r"step-\d{8,}")
# Names from hidden_name(): steps and links that are incomplete, and steps that are to be deleted.
HIDDEN = re.compile(r"\.[\w.-]+\.[0-9a-f]{8}\.partial")


def save_checkpoint(
    directory, step, *, config, parameters, tokenizer=None, moments=None, state=None, keep=2, dtype=np.float32
):
    """Save a checkpoint as directory/step-XXXXXXXX, make `latest` refer to it, delete old ones; return its Path.

    step: the number of updates made. parameters: {name of parameter_shapes(config): array}; views are allowed; stored
    as `dtype`, float32 or float16. moments: {name: (first, second)}, Adam's moments, stored as float32. state: a dict
    for JSON; floats are restored bit for bit. Without `moments` and `state`, no run can be resumed from the checkpoint.
    tokenizer: an object with `save(path)`. keep: how many of the newest steps to keep, 0: all. The newest steps are
    those written last, not those with the largest number, so a run that is resumed from an early step keeps its own
    checkpoints.

    After a crash at any moment, either the earlier checkpoint or the new one can be read. Raises CheckpointError if the
    step cannot be written.
    """
    directory = writable_directory(directory)
    shapes = dict(parameter_shapes(config))
    check_shapes(directory, {name: array.shape for name, array in parameters.items()}, shapes)
    for moment in (0, 1) if moments is not None else ():
        check_shapes(directory, {name: pair[moment].shape for name, pair in moments.items()}, shapes)
    final = directory / f"step-{step:08d}"
    temporary = hidden_name(final)
    remove_leftovers(directory)
    try:
        temporary.mkdir()
        write_step(
            temporary, config=config, parameters=parameters, tokenizer=tokenizer, moments=moments, state=state,
            dtype=dtype,
        )  # fmt: skip
        if final.is_dir():
            move_aside(directory, final)
        os.rename(temporary, final)
        fsync(directory)  # before the link to the step is written: a power cut could otherwise keep only the link
        replace_link(directory / LATEST, final.name)
        link_files(directory)
        fsync(directory)
        prune(directory, keep)
    except OSError as error:
        raise CheckpointError(
            f"{final}: cannot save this checkpoint ({error.strerror or error}): free space or choose another "
            f"directory; the earlier checkpoints in {directory} are unchanged"
        ) from error
    finally:
        remove_leftovers(directory)
    return final


def load_checkpoint(path, *, with_optimizer=False, accept_edited=False):
    """Read the Checkpoint in the directory that resolve_checkpoint(path) returns.

    Weights may be stored as float32, float16 or bfloat16, with or without the `transformer.` prefix, in one file or in
    several. with_optimizer: for a resumed run, read the moments too; optimizer.safetensors and state.json must exist.
    Otherwise the result has `moments` None, and state.json is read only if it exists. Raises CheckpointError, with the
    file's path, for a file that is missing, corrupted or of another model, and, unless `accept_edited`, for a file that
    was changed after it was saved. If another step of the same output directory can be read, the message has its path.
    """
    for _ in range(10):  # a running training may replace the step during a read: read again, also after an error
        step = resolve_checkpoint(path)
        identity = identity_of(step)
        try:
            checkpoint = read_step(step, with_optimizer, accept_edited)
            if identity_of(step) == identity:
                return checkpoint
        except CheckpointError as error:
            if resolve_checkpoint(path) == step and identity_of(step) == identity:
                if alternative := readable_step(step, with_optimizer):
                    raise CheckpointError(f"{error}; {alternative} is complete: give this path instead") from None
                raise
    raise CheckpointError(f"{path}: was replaced during each of 10 reads: try again after its writer has finished")


def readable_step(damaged, with_optimizer):
    """The newest step, in the directory of the step `damaged`, that can be read and was not changed, or None."""
    with contextlib.suppress(OSError):
        for step in complete_steps(damaged.parent) if STEP.fullmatch(damaged.name) else ():
            with contextlib.suppress(CheckpointError):
                if step != damaged and read_step(step, with_optimizer):
                    return step
    return None


def newest_step(directory):
    """The Path of the newest complete step in an output directory (see save_checkpoint), or None if there is none."""
    return latest_step(Path(directory)) or next(iter(complete_steps(Path(directory))), None)


def describe_step(step):
    """The name of a step's directory and the time at which it was saved: "step-00000040 (2026-11-20 17:03)"."""
    saved = time.localtime(os.stat(step).st_mtime)
    return f"{step.name} ({time.strftime('%Y-%m-%d %H:%M', saved)})"


def resolve_checkpoint(path):
    """The Path of the directory to read: the newest complete step of an output directory, otherwise `path` itself.

    If `latest` is missing or broken, the newest step is found by file times. Raises CheckpointError if `path` is not a
    directory, or has neither a complete step nor a config.json.
    """
    path = Path(path)
    if not os.path.isdir(path):
        problem = "is a file, not a directory" if os.path.exists(path) else "does not exist"
        raise CheckpointError(f"{path}: {problem}: give a checkpoint directory, or the output directory of a run")
    if path.name == LATEST and path.is_symlink():
        path = path.parent  # resolve the link once, here: a writer may change it between reading two files
    with checkpoint_errors(path):
        newest = newest_step(path)
    if newest:
        return newest
    if not os.path.exists(path / CONFIG):
        other = next(filter(is_checkpoint, [*sorted(path.iterdir()), *renamed(path)]), None)
        advice = f"for example {other}" if other else "or the output directory of a run"
        raise CheckpointError(
            f"{path}: holds neither {CONFIG} nor a step-XXXXXXXX directory: it is not a checkpoint: give a checkpoint "
            f"directory, {advice}"
        )
    return path


def is_checkpoint(path):
    """Whether resolve_checkpoint() accepts this Path."""
    try:
        return path.is_dir() and bool(newest_step(path) or (path / CONFIG).exists())
    except OSError:
        return False


def writable_directory(path):
    """Create the directory `path` if needed and check that checkpoints can be written there; return it as a Path.

    Raises CheckpointError if this is not possible, or if `path` has a file with one of the names FILES that is not a
    link, because link_files() would replace this file.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = hidden_name(path / LATEST)
        probe.write_bytes(b"probe")
        probe.unlink()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot write checkpoints here ({getattr(error, 'strerror', None) or error}): "
            "choose another directory"
        ) from error
    for name in FILES:
        if os.path.exists(path / name) and not (path / name).is_symlink():
            raise CheckpointError(
                f"{path / name}: this file is not a link to a checkpoint in {path}, so other programs would "
                "open it instead of the newest checkpoint: choose another directory"
            )
    return path


# --- renames and links ---


def hidden_name(path):
    """An unused temporary path in the directory of `path`; its name matches HIDDEN."""
    return path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.partial")


def replace_link(link, target):
    """Make `link` a link to `target`, by one rename: a symbolic link, or a text file if links are not supported."""
    temporary = hidden_name(link)
    try:
        os.symlink(target, temporary)
    except (OSError, NotImplementedError):
        temporary.write_text(target + "\n", encoding="utf-8")
        fsync(temporary)
    os.replace(temporary, link)


def latest_step(directory):
    """The directory that `directory`/latest refers to, or None if there is none."""
    link = directory / LATEST
    if not (link.is_symlink() or link.is_file()):
        return None
    try:
        name = os.readlink(link) if link.is_symlink() else read_file(link, 4096).decode("utf-8").strip()
    except (OSError, ValueError):
        return None
    return directory / name if name and os.path.isdir(directory / name) else None


def identity_of(directory):
    """A value that changes when `directory` is replaced by another of the same name; None if it does not exist."""
    try:
        stat = os.stat(directory)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def complete_steps(directory):
    """The Paths of all steps with a final name (STEP) and a weights file, from the newest to the oldest."""

    def time_written(step):
        try:
            return os.stat(step / MODEL).st_mtime_ns
        except OSError:  # there is no such file
            return 0

    steps = [(time_written(path), path) for path in directory.iterdir() if STEP.fullmatch(path.name)]
    return [path for written, path in sorted(steps, reverse=True) if written]


def move_aside(directory, final):
    """Rename the existing step `final` before it is saved again, because a rename cannot replace a non-empty directory.

    If `latest` refers to `final`, `latest` is first changed to refer to a copy that consists of hard links, so that a
    crash loses no checkpoint. remove_leftovers() deletes the renamed directory and the copy after the save.
    """
    if latest_step(directory) == final:
        copy = hidden_name(final)
        copy.mkdir()
        for path in filter(Path.is_file, final.iterdir()):
            try:
                os.link(path, copy / path.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, copy / path.name)
                fsync(copy / path.name)
        fsync(copy)
        replace_link(directory / LATEST, copy.name)
    os.rename(final, hidden_name(final))


def link_files(directory):
    """Make `directory`/config.json and the other FILES links to the files of the latest step."""
    for name in FILES:
        link, exists = directory / name, os.path.exists(directory / LATEST / name)
        if exists and not link.is_symlink() and (directory / LATEST).is_symlink():
            replace_link(link, f"{LATEST}/{name}")
        elif link.is_symlink() and not exists:
            link.unlink()


def prune(directory, keep):
    """Give all but the `keep` newest steps a hidden name; remove_leftovers() then deletes them. keep 0: keep all."""
    latest = latest_step(directory)
    for step in complete_steps(directory)[keep:] if keep > 0 else ():
        if step != latest:
            with contextlib.suppress(OSError):  # a step that cannot be renamed only uses disk space
                os.rename(step, hidden_name(step))  # so that no reader opens a step that is partly deleted


def remove_leftovers(directory):
    """Delete all files and directories with a hidden name, except a directory that `latest` refers to."""
    latest = latest_step(directory)
    with contextlib.suppress(OSError):
        for path in list(directory.iterdir()):
            if HIDDEN.fullmatch(path.name) and path != latest:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
