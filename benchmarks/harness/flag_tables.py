"""The tables of docs/USAGE.md: the flags of the two commands, from gpt2core/app/settings/definitions.py."""

import re
from dataclasses import fields

from gpt2core.app.settings.definitions import InferenceSettings, TrainSettings
from gpt2core.app.settings.setting_fields import flag, help_text


def rows(settings, group):
    """The rows of one group of flags: name and help text; `settings`: TrainSettings or InferenceSettings."""
    chosen = [each for each in fields(settings) if each.metadata["group"] == group]
    return [{group[0]: names(each), "": as_markdown(help_text(each, settings))} for each in chosen]


def names(setting):
    """The flags of a setting in Markdown, with the name of the value if it has one of its own."""
    if value := setting.metadata.get("metavar"):
        return f"`{flag(setting.name)} {value}`".replace("|", "\\|")
    no = f" / {flag('no_' + setting.name)}" if setting.metadata.get("switch") else ""
    return as_markdown(flag(setting.name) + no)


def as_markdown(text):
    """A help text with flags as code; text between backquotes remains as it is."""
    parts = re.split("(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"(--[a-z][a-z0-9-]*)", r"`\1`", part) for part in parts)


# {name: function that returns (rows, [])}, for all groups of both commands; the tables have no source in results/
TABLES = {
    f"{command}-{group[0].replace(' ', '-')}": lambda settings=settings, group=group: (rows(settings, group), [])
    for command, settings in (("train", TrainSettings), ("infer", InferenceSettings))
    for group in dict.fromkeys(each.metadata["group"] for each in fields(settings))
}
