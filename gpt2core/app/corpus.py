"""The corpus of a training run: read it on the root, and give every rank the same tokens."""

import contextlib
import functools
import os
import warnings
from dataclasses import dataclass

import numpy as np

from gpt2core.app.checkpoint_tokenizer import load_tokenizer
from gpt2core.app.fingerprints import file_fingerprints, token_fingerprint
from gpt2core.app.rank_agreement import compare_files
from gpt2core.app.settings.setting_fields import flag
from gpt2core.app.shipped import BOOK_WEIGHTS
from gpt2core.errors import ConfigError, DataError, counted
from gpt2core.parallel.all_or_raise import all_or_raise, gather_or_raise, shared_error
from gpt2core.text.token_file import split_validation
from gpt2core.text.token_files import TokenFiles, has_tokenizer, is_tokenized, load_tokens, token_paths
from gpt2core.text.tokenizer import Tokenizer, UnknownWord

LARGE_TEXT = 32 << 20  # bytes; word tokens of a text of this size are encoded in about 20 s on two idle cores


@dataclass(frozen=True)
class Corpus:
    """The token ids for training and validation, and their tokenizer."""

    tokens: np.ndarray | TokenFiles
    validation: np.ndarray | TokenFiles | None
    tokenizer: Tokenizer

    @functools.cached_property
    def fingerprint(self):
        """Text that identifies the training tokens in a checkpoint."""
        return token_fingerprint(self.tokens)


def read_texts(settings, source, default):
    """(tokens for training, tokens of the text for validation or None, Tokenizer); settings: TrainSettings.

    source: the Checkpoint that the run loads, or None. default: the tokenizer without a checkpoint, see read_corpus().
    Raises DataError, with the flag, for an unknown word.
    """
    note_large_text(settings.data)
    with unknown_words("data", settings):
        tokens, tokenizer = read_corpus(settings.data, settings.tokenizer, source, default)
    with unknown_words("val_data", settings):
        validation = load_tokens(settings.val_data, tokenizer)[0] if settings.val_data else None
    return tokens, validation, tokenizer


def check_validation(settings):
    """Raise ConfigError if the settings ask for validation, but name no data for it."""
    if settings.eval_every and not (settings.val_data or settings.val_fraction):
        raise ConfigError(
            f"--eval-every {settings.eval_every} needs validation data: give --val-data FILE or --val-fraction F"
        )


def text_names(settings):
    """The names, for messages, of the texts for training and for validation."""
    if settings.val_fraction:
        return [f"--val-fraction {settings.val_fraction}, {part}" for part in ("training", "validation")]
    return [f"--data {settings.data}", f"--val-data {settings.val_data}"]


def note_large_text(path):
    """Warn if the corpus at `path` is a text of LARGE_TEXT bytes or more: encoding it prints nothing else."""
    if os.path.isfile(path) and not is_tokenized(path) and (size := os.path.getsize(path)) >= LARGE_TEXT:
        advice = "data/prepare.py converts it once to a token file"
        warnings.warn(f"encoding {path} ({size / 1e6:.0f} MB) can take minutes at each start: {advice}", stacklevel=2)


def read_corpus(path, tokenizer, source, default):
    """(tokens, Tokenizer) of the corpus at `path`; tokenizer: the value of --tokenizer.

    For a corpus without a tokenizer, and without --tokenizer, it is that of the Checkpoint `source`. If that is None,
    it is `default` for a text, and for files of tokens the one beside them.
    """
    if not tokenizer and source and not has_tokenizer(path):
        tokenizer = load_tokenizer(None, source.path)
    elif not tokenizer and not is_tokenized(path):
        tokenizer = default
    return load_tokens(path, tokenizer)


@contextlib.contextmanager
def unknown_words(name, settings):
    """In this context, add the flag of the setting `name`, its value and advice to the error for an unknown word."""
    try:
        yield
    except UnknownWord as error:
        advice = "or train a new model with --tokenizer byte"
        if settings.init_from:
            advice = f"omit --init-from, or use --init-from {os.path.relpath(BOOK_WEIGHTS)}"
        elif settings.resume:
            advice = "or start a new run"
        raise DataError(f"{flag(name)} {getattr(settings, name)}: {error.problem}: {error.advice}, {advice}") from None


@contextlib.contextmanager
def naming_text(name):
    """In this context, add `name`, the name of a text, to a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def split_corpus(tokens, validation, fraction):
    """(training tokens, validation tokens or None); `fraction` of `tokens`, if given, replaces `validation`."""
    return split_validation(tokens, fraction) if fraction else (tokens, validation)


def share_corpus(world, config, texts, tokenizer):
    """The Corpus on every rank; texts: (tokens, validation) of read_texts() on the root, None on other ranks."""
    tokens, validation = texts or (None, None)
    tokens = share_tokens(world, config.data, tokens, tokenizer)
    if config.val_data:
        validation = share_tokens(world, config.val_data, validation, tokenizer)
    return Corpus(*split_corpus(tokens, validation, config.val_fraction), tokenizer)


def share_tokens(world, path, tokens, tokenizer):
    """The token ids of the file at `path`, on every rank; `tokens`: the ids that the root has read, None elsewhere.

    Files of tokens can be larger than memory. If they exist on every rank, each rank reads its own copies, and
    ConfigError is raised if a copy differs from that of rank 0. Otherwise the root broadcasts the tokens.
    """
    paths = gather_or_raise(world, lambda: list(map(str, token_paths(path))))
    if all(paths):
        for rank, own in enumerate(paths):
            if own != paths[0]:
                here, there = (f"{counted(len(each), 'file')} of tokens up to {each[-1]}" for each in (own, paths[0]))
                problem = f"rank {rank} has {here}, but rank 0 has {there}"
                raise shared_error(ConfigError(f"{path}: {problem}: copy the files of rank 0"))
        compare_files(gather_or_raise(world, lambda: file_fingerprints(token_paths(path))))
        return all_or_raise(world, lambda: load_tokens(path, tokenizer)[0] if tokens is None else tokens)
    tokens = None if tokens is None else np.asarray(tokens)
    shape, dtype = world.broadcast_object(tokens is not None and (tokens.shape, tokens.dtype))
    return world.broadcast(np.empty(shape, dtype) if tokens is None else tokens)
