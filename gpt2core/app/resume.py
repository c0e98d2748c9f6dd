"""Create the content of state.json, which has the progress and the flags of a run, and continue a run from it."""

from dataclasses import dataclass, fields
from pathlib import Path

import gpt2core
from gpt2core.app.fingerprints import token_fingerprint
from gpt2core.app.settings.definitions import TrainSettings
from gpt2core.app.settings.setting_fields import SAVED, flag, has_type, names_of
from gpt2core.app.shipped import SHIPPED
from gpt2core.errors import CheckpointError, ConfigError, DataError
from gpt2core.text.token_file import read_text, split_validation
from gpt2core.text.token_files import data_files
from gpt2core.text.tokenizer import Tokenizer

LIMIT = 1 << 31  # numbers of steps and of sequences per step are always smaller than this


@dataclass(frozen=True)
class Progress:
    """The state from which a resumed run continues; the root reads it from state.json and broadcasts it."""

    path: Path  # the path of state.json, for error messages
    step: int  # number of updates made so far
    position: int  # number of training sequences read so far
    loss_scale: object  # the loss scale of fp16, a result of LossScale.to_json()
    tuned: object  # the choices made by timing: {what is chosen: the choice}, see Runtime.tuned
    tuned_for: str | None  # the device and libraries for which `tuned` is valid; None: nothing was timed
    last_log_row: dict | None  # the last row of the log, see output_files.check_log_of_run()


def run_state(trainer, config, corpus, last_log_row):
    """The content of state.json, a dict: progress, the flags that a resumed run uses again, and the tuned choices.

    config: the RunConfig. corpus: the token_fingerprint() of the training tokens. last_log_row: that of the RunLog.
    """
    arguments = {name: getattr(config, name) for name in names_of(TrainSettings, kept=SAVED)}
    arguments = {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in arguments.items()}
    return {
        "step": trainer.steps,
        "position": trainer.position,
        "seed": trainer.seed,
        "loss_scale": trainer.loss_scale.to_json(),
        "world_size": trainer.world.size,
        "bucket_mb": trainer.bucket_mb,
        "corpus": corpus,
        "arguments": arguments,
        "last_log_row": last_log_row,
        "choices": trainer.tuned or {},
        "chosen_for": trainer.backend.runtime.tuned_for,
        "version": gpt2core.__version__,
    }


def saved_arguments(checkpoint):
    """{name: value} of the flags in the state.json of a Checkpoint; {} if there are none.

    Raises CheckpointError for a value of the wrong type and for an unknown preset.
    """
    path, arguments = checkpoint.path / "state.json", (checkpoint.state or {}).get("arguments", {})
    if not isinstance(arguments, dict):
        raise CheckpointError(f"{path}: arguments is {arguments!r}, not an object: it cannot be used")
    saved = {}
    for each in fields(TrainSettings):
        value = arguments.get(each.name, arguments.get(each.metadata.get("former")))
        if each.metadata["kept"] == SAVED and value is not None:
            kind = str if each.type is Path else each.type
            if not has_type(kind, value):
                raise CheckpointError(f"{path}: {each.name} is {value!r}, not of type {kind.__name__}")
            if value not in (choices := each.metadata.get("choices", [value])):
                raise CheckpointError(f"{path}: {each.name} is {value!r}, not one of {', '.join(choices)}")
            saved[each.name] = value
    return saved


def saved_corpus(checkpoint):
    """The Path of the corpus that a Checkpoint was trained on, or None if that is unknown."""
    path = saved_arguments(checkpoint).get("data")
    return path and Path(path)


def edited_notes(checkpoint):
    """A list with one note if a Checkpoint has files that were changed after they were saved; otherwise []."""
    if not checkpoint or not checkpoint.edited:
        return []
    return [f"note: --accept-edited: {checkpoint.path} was changed after it was saved: {', '.join(checkpoint.edited)}"]


def find_data(checkpoint, args):
    """Check that the data files of a Checkpoint exist; return (its saved_arguments(), notes to print).

    If the saved corpus does not exist any more, a shipped corpus with the same tokens replaces it. Raises
    CheckpointError for any other saved data file that does not exist, unless `args`, the parsed flags, name another.
    """
    saved, notes = saved_arguments(checkpoint), []
    for name in names_of(TrainSettings, compared=True):
        path = saved.get(name)
        if path is None or getattr(args, name) or data_files(path):
            continue
        if name == "data" and (shipped := shipped_corpus(checkpoint, saved)):
            notes.append(f"note: {path} does not exist: the shipped {shipped.name}, which has the same tokens, is used")
            saved["data"] = str(shipped)
        else:
            raise CheckpointError(
                f"{flag(name)}: {path}, which {checkpoint.path} was trained with, does not exist: "
                f"give its present path with {flag(name)}"
            )
    return saved, notes


def shipped_corpus(checkpoint, saved):
    """The Path of the shipped corpus with the same tokens as the corpus of a Checkpoint, or None.

    saved: saved_arguments() of the Checkpoint.
    """
    for path in SHIPPED.values():
        try:
            tokens = Tokenizer.load(checkpoint.path).encode(read_text(path))
            training_tokens, _ = split_validation(tokens, saved.get("val_fraction", 0))
        except (DataError, ConfigError):  # a word of the corpus is not in the vocabulary, or there is no tokenizer
            continue
        if token_fingerprint(training_tokens) == checkpoint.state.get("corpus"):
            return path
    return None


def read_progress(checkpoint, corpus):
    """The Progress in a Checkpoint. corpus: the token_fingerprint() of the training tokens of this run.

    Raises CheckpointError if a value is not possible, or if the checkpoint was trained on another corpus.
    """
    state, path = checkpoint.state, checkpoint.path / "state.json"
    for key in ("step", "position"):
        if type(state.get(key)) is not int or state[key] < 0:
            raise CheckpointError(f"{path}: has no whole number {key!r}: it cannot be resumed")
    if state["step"] >= LIMIT or not state["step"] <= state["position"] < max(1, state["step"]) * LIMIT:
        raise CheckpointError(
            f"{path}: {state['position']} training sequences in {state['step']} steps are not possible: it cannot be "
            "resumed"
        )
    if state.get("corpus", corpus) != corpus:
        raise CheckpointError(
            f"{checkpoint.path}: was trained on {state['corpus']}, but --data has {corpus}: "
            f"give the same corpus, or start a new run with --init-from"
        )
    tuned, tuned_for = state.get("choices", {}), state.get("chosen_for")
    last_log_row = state.get("last_log_row")
    if last_log_row not in (None, {}) and (
        not isinstance(last_log_row, dict) or last_log_row.keys() != {"step", "loss"}
    ):
        raise CheckpointError(f"{path}: last_log_row is {last_log_row!r:.80}, not a step and a loss: cannot be resumed")
    return Progress(path, state["step"], state["position"], state.get("loss_scale"), tuned, tuned_for, last_log_row)


def restore(trainer, checkpoint, progress, retune):
    """Load a checkpoint into the Trainer: the parameters and, if `progress` is given, all state of the resumed run.

    This state is the moments, the counters, the loss scale and, unless `retune`, the tuned choices. All ranks must call
    it; ranks other than the root pass None for `checkpoint`. Returns notes to print. Raises CheckpointError if the loss
    scale or the tuned choices are not valid.
    """
    from gpt2core.parallel.whole_parameters import load  # here, because inference.py imports no code of training

    parameters = checkpoint and checkpoint.parameters
    if progress is None:
        load(trainer, parameters)
        return []
    moments = checkpoint and checkpoint.moments
    try:
        trainer.loss_scale.load(progress.loss_scale)
        load(trainer, parameters, moments, progress.step, progress.position)
    except ConfigError as error:
        raise CheckpointError(f"{progress.path}: {error}: it cannot be resumed") from None
    return [] if retune else load_tuned(trainer, progress)


def load_tuned(trainer, progress):
    """Use the tuned choices in `progress` if they are valid for this device and its libraries; return notes."""
    runtime, saved_for, tuned = trainer.backend.runtime, progress.tuned_for, progress.tuned
    tuned_for = runtime.tuned_for
    if tuned_for is None or saved_for is None:  # this run or the saved one makes no choices by timing
        return []
    if tuned_for != saved_for:
        return [
            f"note: the checkpoint's kernels were chosen by timing on {saved_for}: on {tuned_for} they are timed again"
        ]
    if not isinstance(tuned, dict) or not all(isinstance(choice, str) for choice in tuned.values()):
        raise CheckpointError(
            f"{progress.path}: choices is {tuned!r:.80}, not an object of strings: it cannot be resumed"
        )
    trainer.load_tuned(runtime.tuned | tuned)
    return []
