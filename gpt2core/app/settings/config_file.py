"""--config FILE.toml: settings in a file, which flags override; and the file with the settings of a finished run.

The file has one line for each setting, such as `batch_size = 16`, in any tables or in none. Names are those of the
flags, with `_` or `-` between words.
"""

import argparse
import contextlib
import difflib
import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path

from gpt2core.app.settings.flag_parser import to_path
from gpt2core.app.settings.setting_fields import SAVED, check_value, names_of
from gpt2core.errors import ConfigError
from gpt2core.text.input_file import read_file
from gpt2core.text.token_file import replaced

NAME = "settings.toml"  # the file of a run
HEADER = "# The settings of this run. To repeat it: train_gpt2.py --config FILE\n"
LARGEST_FILE = 1 << 20  # bytes


def with_config_file(settings):
    """The Settings `settings` with the values of their --config file in place of those that were not given.

    Raises ConfigError, with the name of the file, if it cannot be read, for a name that is no setting, and for a value
    that the setting does not accept.
    """
    if settings.config is None:
        return settings
    values = read_settings(settings.config, type(settings))
    for each in fields(settings):  # a flag also overrides the setting that excludes it
        if other := each.metadata.get("instead_of"):
            if getattr(settings, each.name) is not None:
                values.pop(other, None)
            if getattr(settings, other) is not None:
                values.pop(each.name, None)
    return replace(settings, **{name: value for name, value in values.items() if getattr(settings, name) is None})


def read_settings(path, settings):
    """{name: value} in a TOML file; settings: the class of the settings. Raises ConfigError."""
    try:
        content = tomllib.loads(read_file(path, LARGEST_FILE).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError and TOMLDecodeError
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
        try:
            values[name] = checked(known[name], value)
        except (ConfigError, argparse.ArgumentTypeError, OverflowError) as error:
            raise ConfigError(f"--config {path}: {key}: {error}") from None
    return values


def checked(setting, value):
    """A value of a TOML file as the value of a setting; raises an error if the setting does not accept it."""
    if isinstance(value, str):
        if "\0" in value:
            raise ConfigError(f"{value!r:.60} has a NUL byte, which no file name and no text may have")
        value = setting.metadata.get("parse", to_path if setting.type is Path else str)(value)
    check_value(setting, value)
    return float(value) if setting.type is float else value


def pairs(content):
    """Yield (name, value) of a parsed TOML file, also of its tables."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from pairs(value)
        else:
            yield key, value


def earlier_settings(settings):
    """{name: value} of the file NAME of the run that `settings` resume; {} if there is none."""
    folders = [settings.resume, settings.resume.resolve().parent] if settings.resume else []
    for path in (folder / NAME for folder in folders):
        if is_own(path):
            with contextlib.suppress(ConfigError):
                return read_settings(path, type(settings))
    return {}


def is_own(path):
    """Whether a run has written this file."""
    try:
        return read_file(path, LARGEST_FILE).startswith(HEADER.encode())
    except OSError:
        return False


def text_of(given, config, earlier):
    """The content of NAME for a run: the settings that decide its result, and the others that were given.

    given: the Settings as given, config: those with their final values, earlier: see earlier_settings(). A run with
    `--config` and this file has the same settings, except those for one call of the command and the files that a run
    writes.
    """
    omitted = {*names_of(type(given), one_call=True), *names_of(type(given), written=True)}
    decide = names_of(type(given), kept=SAVED)
    values = earlier | {
        name: getattr(config, name)
        for name in names_of(type(given))
        if name not in omitted and (name in decide or getattr(given, name) is not None)
    }
    lines = [line(name, value) for name, value in values.items() if value is not None]
    return "".join([HEADER, *lines])


def write_settings(path, text):
    """Write the file NAME of a run; raises ConfigError if there is a file that no run has written."""
    if path.exists() and not is_own(path):
        raise ConfigError(f"{path} is not of a run, and is not replaced")
    with replaced(path) as file:  # a run that is killed leaves no half of it
        file.write(text.encode("utf-8"))


def line(name, value):
    """The line of a setting."""
    text = f"{name} = {toml(value)}\n"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # the name of a file
        return f"# {name} is not UTF-8: give it as a flag\n"
    return text


def toml(value):
    """A value of a setting as TOML."""
    if isinstance(value, Path) or (isinstance(value, str) and value.endswith(".json")):  # the path of a tokenizer
        value = str(Path(value).resolve())
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's strings are those of TOML
    return repr(value)  # also inf
