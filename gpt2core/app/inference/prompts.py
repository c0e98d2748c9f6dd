"""The prompts of the inference command as token ids: from a flag, a file, a line of standard input or the corpus."""

import codecs
import contextlib
import os
import re
import sys

from gpt2core.app.command import error_text
from gpt2core.app.resume import saved_corpus
from gpt2core.app.shipped import BOOK_WEIGHTS, CORPUS, SHIPPED
from gpt2core.errors import ConfigError, DataError
from gpt2core.text.token_file import read_text
from gpt2core.text.token_files import data_files, first_tokens
from gpt2core.text.tokenizer import UnknownWord

# A prompt file is longer only by mistake. Byte pairs of a text that cannot be divided need 200 bytes a character.
PROMPT_CHARACTERS = 1 << 23


def read_prompt(prompt, prompt_file, tokenizer, checkpoint):
    """The token ids of --prompt or --prompt-file; if neither is given, the first tokens of a corpus.

    The number of these tokens is 256, or the block size of the model if it is less. The corpus is the one that the
    Checkpoint was trained on; if this corpus is unknown or missing, it is dummy.txt. Raises ConfigError if both flags
    are given, DataError if the prompt is empty.
    """
    if prompt is not None and prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other: give one of them")
    if prompt is None and prompt_file is None:
        shipped = SHIPPED.get(checkpoint.path.resolve(), CORPUS)
        corpus = saved_corpus(checkpoint) or shipped
        corpus = corpus if data_files(corpus) else CORPUS
        try:
            return first_tokens(corpus, tokenizer, min(256, checkpoint.config.block_size)).tolist()
        except DataError as error:
            raise DataError(f"{corpus.name} cannot be the prompt of these weights: {error}; give --prompt") from None
    if prompt_file is None:
        check_decoded(prompt, "--prompt", sys.getfilesystemencoding())
        tokens = encode_prompt(tokenizer, prompt)
    else:
        text = read_prompt_file(prompt_file).removesuffix("\n").removesuffix("\r")
        tokens = encode_prompt(tokenizer, text, f"{prompt_file}: ")
    if not tokens:
        raise DataError("the prompt is empty: give at least one word to continue")
    return tokens


def read_prompts(path, tokenizer):
    """A list with the token ids of each line of a file; raises DataError for an empty line.

    A line ends with LF or CR LF. Other characters that Python's str.splitlines() takes for line ends are text.
    """
    lines = enumerate(read_prompt_file(path).removesuffix("\n").split("\n"), 1)
    prompts = [encode_prompt(tokenizer, line.removesuffix("\r"), f"{path}: line {number}: ") for number, line in lines]
    empty = [number for number, prompt in enumerate(prompts, 1) if not prompt]
    if empty:
        raise DataError(f"{path}: line {empty[0]} is empty: give at least one word to continue on every line")
    return prompts


def read_prompt_file(path):
    """The text of a prompt file without a byte order mark, which some editors write; see read_text() for errors."""
    return read_text(path, PROMPT_CHARACTERS, pipes=True).removeprefix("\ufeff")


def typed_prompt(tokenizer):
    """The token ids of the next line of standard input; None if the line is empty or the input has ended.

    If the tokenizer cannot encode a line, this function prints the error and reads the next line.
    """
    while line := read_line():
        try:
            check_decoded(line, "the line", sys.stdin.encoding or "utf-8")
            return encode_prompt(tokenizer, line)
        except DataError as error:
            print(f"error: {error_text(error)}", file=sys.stderr, flush=True)
    return None


def read_line():
    """The next line of standard input without its line break, LF or CR LF, or "" at the end of the input.

    On a terminal, "> " is printed before the line is read, and Ctrl-C at this prompt ends the input, as Ctrl-D does.
    Raises DataError for a line of more than PROMPT_CHARACTERS.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  its import gives input() line editing and a history
    try:
        if terminal:
            return input("> ")
        line = sys.stdin.readline(PROMPT_CHARACTERS + 1).removesuffix("\n").removesuffix("\r")
        if len(line) > PROMPT_CHARACTERS:
            raise DataError(f"a line of standard input has more than {PROMPT_CHARACTERS:,} characters: type less")
        return line
    except (EOFError, KeyboardInterrupt) as error:
        if terminal:
            print()  # the shell's prompt begins on a new line
        elif isinstance(error, KeyboardInterrupt):
            raise
        return ""


def check_decoded(text, name, encoding):
    """Raise DataError, with `name`, if `text` has a byte that Python could not decode from `encoding`.

    Python represents such a byte B by the lone surrogate U+DC00 + B (the error handler "surrogateescape").
    """
    if not (found := re.search("[\udc80-\udcff]", text)):
        return
    if codecs.lookup(encoding).name != "utf-8":
        raise DataError(f"{name} cannot be decoded as {encoding}, the encoding of the locale: set PYTHONUTF8=1")
    offset, byte = len(text[: found.start()].encode()), ord(found[0]) - 0xDC00
    raise DataError(f"{name} is not UTF-8: byte {offset} (0x{byte:02X}) cannot be decoded: give a text in UTF-8")


def encode_prompt(tokenizer, text, place=""):
    """A list of the token ids of a prompt; raises DataError, with `place` and advice, for an unknown word."""
    try:
        return tokenizer.encode_prompt(text).tolist()
    except UnknownWord as error:
        book = os.path.relpath(BOOK_WEIGHTS)
        raise DataError(f"{place}{error.problem}: {error.advice}, or --weights {book}") from None
    except DataError as error:
        raise DataError(f"{place}{error}") from None
