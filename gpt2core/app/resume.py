"""What a checkpoint keeps of a run beside its arrays, and how another run goes on from there."""

from pathlib import Path

import gpt2core
from gpt2core.app.presets import RESUMED
from gpt2core.errors import CheckpointError, ConfigError
from gpt2core.parallel.whole_parameters import load


def run_state(trainer, args, corpus):
    """What state.json keeps: where training stood, the flags that a resume goes on with, and what timing has chosen."""
    arguments = {name: getattr(args, name, None) for name in RESUMED}
    for name in ("data", "val_data"):
        arguments[name] = arguments[name] and str(Path(arguments[name]).resolve())
    return {
        "step": trainer.steps,
        "position": trainer.position,
        "seed": trainer.seed,
        "loss_scale": trainer.loss_scale.to_json(),
        "world_size": trainer.world.size,
        "bucket_mb": trainer.bucket_mb,
        "corpus": corpus,
        "arguments": arguments,
        "choices": trainer.tuned or {},
        "chosen_for": trainer.backend.runtime.tuned_for,
        "version": gpt2core.__version__,
    }


def restore(trainer, resumed, initial, corpus, choose_anew=False):
    """Load the parameters to start from, and of a run to resume also the moments, where it stood, and what it chose.

    Returns what to tell, one sentence or none. Raises CheckpointError when that run learnt another corpus.
    """
    if initial:
        load(trainer, initial.parameters)
    if not resumed:
        return []
    state, path = resumed.state, resumed.path / "state.json"
    for key in ("step", "position"):
        if not isinstance(state.get(key), int) or state[key] < 0:
            raise CheckpointError(f"{path}: has no whole number {key!r}: it cannot be resumed")
    if state.get("corpus", corpus.fingerprint) != corpus.fingerprint:
        raise CheckpointError(
            f"{resumed.path}: was trained on {state['corpus']}, but --data has {corpus.fingerprint}: "
            f"give the same corpus, or start anew with --init-from"
        )
    try:
        progress = state["step"], state["position"], state.get("loss_scale")
        load(trainer, resumed.parameters, resumed.moments, *progress)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}: it cannot be resumed") from None
    return [] if choose_anew else adopt_choices(trainer, state, path)


def adopt_choices(trainer, state, path):
    """Choose as the run did that is resumed, where that is good for this device: -> what to tell, one sentence or none.

    Raises CheckpointError where its choices are none.
    """
    runtime, there, choices = trainer.backend.runtime, state.get("chosen_for"), state.get("choices", {})
    here = runtime.tuned_for
    if here is None or there is None:  # on either side nothing is chosen by timing
        return []
    if here != there:
        return [f"note: the checkpoint's kernels were chosen by timing on {there}: on {here} they are timed anew"]
    if not isinstance(choices, dict) or not all(isinstance(choice, str) for choice in choices.values()):
        raise CheckpointError(f"{path}: choices is {choices!r:.80}, not an object of texts: it cannot be resumed")
    trainer.load_tuned(runtime.tuned | choices)
    return []
