"""The parser of command lines: --help begins with examples, and a wrong flag is a ConfigError of one line.

It needs only the standard library, because `make doctor` uses it if no package is installed.
"""

import argparse
import difflib
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

from gpt2core.errors import ConfigError


class HelpPrinted(Exception):
    """Raised after --help or --version was printed, to end the command with exit code 0."""


def not_empty(text, what="a path"):
    """`text`; raises an error if it is empty, as the value of a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError(f"it is empty: give {what}, or omit the flag")
    return text


def stop_text(text):
    """`text`, that ends a continuation; raises an error if it is empty."""
    return not_empty(text, "a text")


def to_path(text):
    """The Path in `text`; raises an error for an empty text, because Path("") is the current directory."""
    return Path(not_empty(text))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for a wrong flag, HelpPrinted after --help or --version.

    description: what the command does; its first paragraph is the first line of --help, the others are after the usage.
    examples: [(arguments, comment)], command lines that work as they stand. prog: the command; default: as it was
    started. Only the root prints the help; on other ranks set `is_root` to False.
    """

    is_root = True

    def __init__(self, description, examples=(), prog=None, usage="%(prog)s [flags]", **options):
        self.summary, _, details = description.strip().partition("\n\n")
        self.examples = examples
        prog = prog or started_as()
        super().__init__(prog=prog, usage=usage, description=details, allow_abbrev=False, **options)

    def format_help(self):
        width = shutil.get_terminal_size().columns - 2  # the width that argparse uses
        parts = [textwrap.fill(" ".join(self.summary.split()), width)]
        if self.examples:
            rows = [(f"  {self.prog} {arguments}".rstrip(), f"  # {comment}") for arguments, comment in self.examples]
            column = max(len(command) for command, _ in rows)
            column = column if all(column + len(comment) <= width for _, comment in rows) else 0
            parts.append("\n".join(["examples:", *(f"{command:{column}}{comment}" for command, comment in rows)]))
        return "\n\n".join([*parts, super().format_help()])

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (-[\w-]+)", message)
        similar = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        advice = f"did you mean {similar[0]}? " if similar else ""
        raise ConfigError(f"{message} ({advice}--help lists the options)")

    def exit(self, status=0, message=None):
        raise HelpPrinted

    def _print_message(self, message, file=None):
        if self.is_root and message:  # argparse would suppress the error of a full disk or a closed pipe
            file.write(message)
            file.flush()


def started_as():
    """The command that started this program, as a user types it: a script, a module or an installed command."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    path = sys.argv[0]
    return f"python {shlex.quote(path)}" if path.endswith(".py") else Path(path).name
