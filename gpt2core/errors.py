"""Errors that a user can correct: the command line prints each as one line on standard error and exits with code 2."""

import math
import numbers


class UserError(Exception):
    """Base class. The message names the wrong value and the expected value, and says what to do."""

    shared = False  # True: every rank raises this error at the same place, so only the root prints it


class ConfigError(UserError):
    """An option, a shape or a combination of options that is not supported."""


class DataError(UserError):
    """A corpus, a token file, a prompt or a tokenizer that cannot be used."""


class ShapeError(ValueError):
    """Shapes that do not fit together; the message names them."""


class DeviceMemoryError(MemoryError):
    """The device has too little memory; the message says which sizes would fit. It may be raised on only one rank."""


class CheckpointError(UserError):
    """A checkpoint that is missing, truncated, corrupt, of another model, or that cannot be written."""


class Diverged(UserError):
    """A loss, the gradient or a parameter is not finite, or the replicas of a parameter differ."""

    shared = True  # all ranks have the same numbers, so all ranks raise this error


def diverged(step, loss, norm, lr, keeps_zeros):
    """The Diverged of a step, from 0, whose loss or gradient norm is not finite. keeps_zeros: of the rule."""
    advice = "" if keeps_zeros else ", or raise `eps` (now 0)"
    state = f"are those after {counted(step, 'step')}"  # an update changes nothing if the norm is not finite
    if math.isfinite(norm):
        state = "have been updated: continue from an earlier checkpoint"
    return Diverged(
        f"step {step}: the loss is {loss} and the gradient norm is {norm}: training cannot continue. "
        f"Lower `lr` (now {lr:g}) or set `clip`{advice}; the parameters {state}"
    )


def counted(count, noun):
    """A number with its noun: 1 rank, 2 ranks, 3 micro-batches."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def require_known(argument, options, known):
    """Raise ConfigError if the dictionary `options` has a name that is not one of `known`."""
    for name in options:
        if name not in known:
            raise ConfigError(f"`{argument}` has the name {name!r}, but it may have only {', '.join(known)}: omit it")


def require_not_negative(wrong="must be finite and not negative", /, **numbers):
    """Raise ConfigError, a name with its value and the text `wrong`, unless all numbers are finite and not negative."""
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"`{name}={value}` {wrong}")


def require_decay_rate(**numbers):
    """Raise ConfigError with the name of an argument unless each of `numbers` is in [0, 1)."""
    for name, value in numbers.items():
        if not 0 <= value < 1:
            raise ConfigError(f"`{name}={value}` must be in [0, 1)")


def require_size(name, value):
    """Raise ConfigError with the name of an argument unless `value` is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ConfigError(f"`{name}={value!r}` must be a positive whole number")
