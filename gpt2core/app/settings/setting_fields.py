"""A setting is a field of a dataclass: setting() declares it, Settings checks values, add_flags() makes its flag.

A setting that was not given is None. Messages name a setting between backquotes, as Python code does: `top_k`,
`top_k=40`. A command prints them as flags: see with_flags() in definitions.py.
"""

import argparse
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from gpt2core.app.settings.flag_parser import to_path
from gpt2core.errors import ConfigError

# What a resumed run does if the setting is omitted. None: the setting has no use in a resumed run.
SAVED = "saved"  # the checkpoint has the value, in state.json, and the resumed run uses it
AGAIN = "again"  # no checkpoint has the value: it must be given again

LARGEST = (1 << 31) - 1  # the largest whole number: sizes computed from a larger one could overflow
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


def setting(group, help, default=None, kept=None, **options):
    """A field of a class derived from Settings; its value is None if the user does not give it.

    group: (title, description). help: a text, in which a default that is not a value is described. default: the value
    that replaces None if no checkpoint and no preset has one. kept: SAVED, AGAIN or None. Options:
      choices: the possible values. at_least, at_most: the range of a whole number. above: a limit below all values.
      metavar: the value's name in --help.
      parse: a function of the text of the flag, instead of the type. former: an earlier name, which is still accepted.
      switch: for a bool, whether --no-NAME exists too. compared: whether all ranks must have the same file.
      written: whether the run writes this file. one_call: whether it cannot be in the file of `config`.
      instead_of: the setting that this one excludes.
      stage: the only stage that has the setting, if another one checks that.
    """
    return field(default=None, metadata=dict(group=group, help=help, default=default, kept=kept) | options)


@dataclass(frozen=True)
class Settings:
    """The base class of settings. The constructor raises ConfigError for a value of a wrong type or out of range."""

    def __post_init__(self):
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type is Path and isinstance(value, str):
                object.__setattr__(self, each.name, Path(value))
            elif value is not None and each.metadata:
                check_value(each, value)


def check_value(setting, value):
    """Raise ConfigError unless `value` is of the type of a setting, one of its choices and within its range."""
    name, options = setting.name, setting.metadata
    if not has_type(setting.type, value):
        raise ConfigError(f"`{name}={value!r}` must be {TYPE_NAMES[setting.type]}")
    if value not in options.get("choices", [value]):
        raise ConfigError(f"`{name}={value}` is unknown: choose from {', '.join(map(str, options['choices']))}")
    low, high = options.get("at_least", -LARGEST), options.get("at_most", LARGEST)
    if setting.type is int and value < low:
        raise ConfigError(f"`{name}={value}` must {f'be at least {low}' if low else 'not be negative'}")
    if setting.type is int and value > high:
        raise ConfigError(f"`{name}={value}` is too large: the largest value is {high}")
    if "above" in options and not options["above"] < value <= high:
        raise ConfigError(f"`{name}={value:g}` must be more than {options['above']} and at most {high}, or omitted")


def has_type(kind, value):
    """Whether `value` has the type `kind` of a setting. An int is a float too; True and False are not numbers."""
    return isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)


def names_of(settings, **options):
    """The names of the settings of a class that have these options, for example kept=SAVED or group=RANKS."""
    return [each.name for each in fields(settings) if all(each.metadata.get(name) == options[name] for name in options)]


def defaults_of(settings):
    """{name: default} of the settings of a class."""
    return {each.name: each.metadata["default"] for each in fields(settings)}


def complete(settings):
    """The Settings `settings` with the default in place of each value that is None."""
    given = {name: value for name, value in vars(settings).items() if value is not None}
    return type(settings)(**defaults_of(settings) | given)


# -- flags -------------------------------------------------------------------------------------------------------------


def flag(name):
    """The command-line flag of a setting: "--top-k" for "top_k"."""
    return f"--{name.replace('_', '-')}"


def add_flags(parser, settings):
    """Add to an argparse parser one flag for each setting of a class, in the groups of the settings."""
    groups = {}
    for each in fields(settings):
        options = each.metadata
        if options["group"] not in groups:
            groups[options["group"]] = parser.add_argument_group(*options["group"])
        if each.type is not bool:
            kind = to_path if each.type is Path else each.type
            how = dict(type=options.get("parse", kind))
        else:
            how = dict(action=argparse.BooleanOptionalAction if options.get("switch") else "store_true", default=None)
        if "metavar" in options:
            how["metavar"] = options["metavar"]
        groups[options["group"]].add_argument(flag(each.name), help=help_text(each, settings), **how)
        if former := options.get("former"):
            parser.add_argument(flag(former), help=argparse.SUPPRESS, dest=each.name, **how)


def help_text(setting, settings):
    """The help text of a setting of a class, with its default; {AGAIN} becomes the flags with kept=AGAIN."""
    text, default = setting.metadata["help"], setting.metadata["default"]
    if default is not None and "efault" not in text:
        text += " (default: no)" if default is False else f" (default {number_text(default)})"
    if "{AGAIN}" in text:
        again = [each for each in fields(settings) if each.metadata["kept"] == AGAIN]
        title, last = again[-1].metadata["group"][0], again[-1].metadata["group"]
        names = ", ".join(flag(each.name) for each in again if each.metadata["group"] != last)
        text = text.replace("{AGAIN}", f"{names} and all flags of the group '{title}'")
    return text


def number_text(value):
    """A default as text: 3e-4 for 0.0003, 0 for 0.0; a value that is not a float as str() prints it."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return (
        re.sub("e-0?", "e-", f"{value:e}".replace(".000000", ""))
        if text.startswith("0.000")
        else text.replace("e-0", "e-")
    )
