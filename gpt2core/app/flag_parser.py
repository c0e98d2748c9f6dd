"""The parser of command lines: a wrong flag is a ConfigError of one line, which names the most similar flag."""

import argparse
import difflib
import re

from gpt2core.app.command import HelpPrinted
from gpt2core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError for a wrong flag, HelpPrinted after --help or --version.

    Only the root prints the help; on other ranks set `is_root` to False.
    """

    is_root = True

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        unknown = re.match(r"unrecognized arguments: (-[\w-]+)", message)
        similar = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        advice = f"did you mean {similar[0]}? " if similar else ""
        raise ConfigError(f"{message} ({advice}--help lists the options)")

    def exit(self, status=0, message=None):
        raise HelpPrinted

    def _print_message(self, message, file=None):
        if self.is_root:
            super()._print_message(message, file)
