"""Check the arguments of the API, and word its messages for Python: `batch_size` instead of --batch-size."""

import contextlib
import difflib
import re
import warnings
from dataclasses import fields
from pathlib import Path

import numpy as np

from gpt2core import checks
from gpt2core.app.settings.definitions import NAMES
from gpt2core.errors import ConfigError, DeviceMemoryError, ShapeError, UserError


@contextlib.contextmanager
def python_errors():
    """In this context, a UserError names settings as Python does, and NumPy does not warn of an overflow.

    The check of the loss reports an overflow.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except (UserError, DeviceMemoryError) as error:
        error.args = (without_flags(str(error)),)
        raise


def without_flags(text):
    """A message with the names of settings instead of flags: batch_size 10 for --batch-size 10."""

    def name(match):
        words = match[1].replace("-", "_")
        if words in NAMES:
            return words
        negated = words.removeprefix("no_")
        return f"{negated}=False" if negated in NAMES else match[0]

    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])", name, text).replace("omit the flag", "omit it")


def warn(text):
    """Give a note of the commands as a warning, which a program can filter."""
    warnings.warn(without_flags(text.removeprefix("note: ")), stacklevel=2)


def checked(settings, **given):
    """The settings of a class, TrainSettings or InferenceSettings, with the values `given`; NumPy numbers are accepted.

    Raises ConfigError for a name that is no setting, and for a value of a wrong type or out of range.
    """
    names = [each.name for each in fields(settings)]
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            advice = f"did you mean `{near[0]}`?" if near else "docs/USAGE.md lists the settings"
            raise ConfigError(f"`{name}={value!r:.60}`: there is no such setting: {advice}")
    return settings(**{name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()})


def checked_path(path):
    """The path of a directory; raises ConfigError for another type."""
    if not isinstance(path, str | Path):
        raise ConfigError(f"`path={path!r:.60}` must be the path of a directory")
    return Path(path)


def token_array(name, tokens, config):
    """The argument `name`, token ids, as an array (B, T) of integers on the host.

    Raises ConfigError for a text, ShapeError for ids that are not integers, are not (B, T), are outside the vocabulary
    of a GPT2Config or are longer than its block.
    """
    if isinstance(tokens, str) or (isinstance(tokens, list | tuple) and any(isinstance(each, str) for each in tokens)):
        raise ConfigError(f"`{name}={tokens!r:.60}` must be token ids (B, T): use [model.tokenizer.encode(text)]")
    from gpt2core.tensor import Tensor  # here, because generate() does not import autograd

    if isinstance(tokens, Tensor):
        tokens = tokens.numpy()
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise ShapeError(f"`{name}`: the rows have different lengths, but they must be (B, T)") from None
    if array.ndim != 2 or not array.size:
        raise ShapeError(
            f"`{name}`: shape {array.shape} must be (B, T), with at least one token: use [ids] for one text"
        )
    checks.tokens(f"`{name}`", array, config.vocab_size)
    if array.shape[1] > config.block_size:
        raise ShapeError(f"`{name}`: {array.shape[1]} tokens exceed the model's block of {config.block_size}")
    return array
