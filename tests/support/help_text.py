"""What the --help of every command must have: a sentence, examples that work as they stand, a short usage line."""

import argparse
import shlex

import pytest


class Parsed(Exception):
    """A command line was accepted."""


def examples_of(text):
    """The command lines of the examples in a text of --help; asserts that it begins as every --help does."""
    sentence, examples, usage, *_ = text.split("\n\n")
    title, *lines = examples.splitlines()
    assert sentence.strip()[-1] in ".?`" and title == "examples:" and 2 <= len(lines) <= 4
    assert usage.splitlines()[0].startswith("usage: ") and len(usage.splitlines()) <= 2 and len(usage) < 160
    return [line.partition("  # ")[0].strip() for line in lines]


def assert_parsed(monkeypatch, run, words):
    """run() must accept the arguments `words`, a list, with its parser; nothing after the parser runs."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, arguments=None, namespace=None):
        original(self, words, namespace)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        with pytest.raises(Parsed):
            run()


def arguments_of(command, program):
    """The arguments of a command line that starts with `program`."""
    words, start = shlex.split(command), shlex.split(program)
    assert words[: len(start)] == start
    return words[len(start) :]
