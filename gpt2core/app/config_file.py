"""--config FILE.toml: settings in a file, which flags override; and the file with the settings of a finished run.

The file has one line for each setting, such as `batch_size = 16`, in any tables or in none. Names are those of the
flags, with `_` or `-` between words.
"""

import difflib
import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path

from gpt2core.app.setting_fields import SAVED, check_value, names_of
from gpt2core.errors import ConfigError

NAME = "settings.toml"  # the file of a run


def with_config_file(settings):
    """The Settings `settings` with the values of their --config file in place of those that were not given.

    Raises ConfigError, with the name of the file, if it cannot be read, for a name that is no setting, and for a value
    that the setting does not accept.
    """
    if settings.config is None:
        return settings
    values = read_settings(settings.config, type(settings))
    return replace(settings, **{name: value for name, value in values.items() if getattr(settings, name) is None})


def read_settings(path, settings):
    """{name: value} in a TOML file; settings: the class of the settings. Raises ConfigError."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: it is not a TOML file: {error}") from None
    known, only_flags, values = {each.name: each for each in fields(settings)}, names_of(settings, one_call=True), {}
    for key, value in pairs(content):
        name = key.replace("-", "_")
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1)
            advice = f": did you mean {similar[0]}?" if similar else " (--help lists them)"
            raise ConfigError(f"--config {path}: {key} is not a setting{advice}")
        if name in only_flags:
            raise ConfigError(f"--config {path}: {key} is for one call of the command: give it as a flag")
        if name in values:
            raise ConfigError(f"--config {path}: {key} is there twice: remove one of the lines")
        values[name] = Path(value) if known[name].type is Path and isinstance(value, str) else value
        try:
            check_value(known[name], values[name])
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from None
    return values


def pairs(content):
    """Yield (name, value) of a parsed TOML file, also of its tables."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from pairs(value)
        else:
            yield key, value


def text_of(given, config):
    """The content of NAME for a run: the settings that decide its result, and the others that were given.

    given: the Settings as given, config: those with their final values. A run with `--config` and this file has the
    same settings, except those for one call of the command and the files that a run writes.
    """
    omitted = {*names_of(type(given), one_call=True), *names_of(type(given), written=True)}
    decide = names_of(type(given), kept=SAVED)
    values = {
        name: getattr(config, name)
        for name in names_of(type(given))
        if name not in omitted and (name in decide or getattr(given, name) is not None)
    }
    lines = [f"{name} = {toml(value)}\n" for name, value in values.items() if value is not None]
    return "".join(["# The settings of this run. To repeat it: train_gpt2.py --config FILE\n", *lines])


def toml(value):
    """A value of a setting as TOML."""
    if isinstance(value, Path):
        value = str(value.resolve())
    if isinstance(value, bool | str):
        return json.dumps(value)  # true, false, and JSON's strings are those of TOML
    return repr(value)  # also inf
