"""Read a corpus that consists of one or many files of token ids as one sequence, without loading it into memory.

A corpus is a path, or a pattern such as dir/*.bin, whose files are joined in the order of their names. All of them are

    GPT2TOK      token files of this project (see token_file.py)
    llm.c        256 int32, of which the first three are 20240520, 1 and the number of tokens; then uint16 ids
    uint16       only uint16 ids, as nanoGPT writes; the name ends with .bin

All numbers are little-endian. Files without a tokenizer of their own need the tokenizer.json that made their ids.
"""

# n: number of tokens

import glob
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from gpt2core.errors import DataError
from gpt2core.text import token_file
from gpt2core.text.tokenizer import FILE_NAME, Tokenizer, build_tokenizer

LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 256  # the header has 256 int32
BLOCK = 1 << 20  # tokens that are checked at once
TOKENS = "GPT2TOK"


@dataclass(frozen=True)
class TokenFile:
    """A file with `count` ids of `dtype` after `offset` bytes; `kind` is the name of its format."""

    path: Path
    kind: str
    dtype: np.dtype
    offset: int
    count: int

    def map(self):
        """A new memory map of all ids. While it exists, the pages that were read count as memory of this process."""
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.count,))


@dataclass(frozen=True)
class TokenFiles:
    """The ids of several TokenFiles as one read-only sequence (n,); as of an array, a slice is a view.

    files: at least one, all of the same dtype. vocab_size: each id that is read must be smaller. np.asarray() of this
    object, and indexing with an array of indices, read the ids; DataError is raised if one is too large. A file is
    mapped into memory only during a read, so that the memory of the process does not grow with the pages that it reads.
    """

    files: tuple
    vocab_size: int
    start: int = 0  # of this view, in tokens of all files
    stop: int = None
    ends: np.ndarray = field(default=None, repr=False, compare=False)  # ends[i]: number of tokens of the first i files
    ndim = 1

    def __post_init__(self):
        if self.ends is None:
            ends = np.cumsum([0, *(file.count for file in self.files)])
            object.__setattr__(self, "ends", ends)
            object.__setattr__(self, "stop", int(ends[-1]))

    @property
    def dtype(self):
        return self.files[0].dtype

    def __len__(self):
        return self.stop - self.start

    @cached_property
    def layout(self):
        """Text with the names and sizes of the files and the limits of this view."""
        return f"{[(file.path.name, file.count) for file in self.files]} {self.start} {self.stop}"

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError("the step of a slice of TokenFiles must be 1")
            stop = max(start, stop)
            return TokenFiles(self.files, self.vocab_size, self.start + start, self.start + stop, self.ends)
        return self._read(np.asarray(index) + self.start)

    def __array__(self, dtype=None, copy=None):
        ids = np.empty(len(self), self.dtype)
        first, last = np.searchsorted(self.ends, (self.start, self.stop - 1), "right") - 1
        for number in range(first, last + 1):
            begin = max(self.start, self.ends[number])
            end = min(self.stop, self.ends[number + 1])
            part = self.files[number].map()[begin - self.ends[number] : end - self.ends[number]]
            ids[begin - self.start : end - self.start] = part
        self._check(ids, lambda: np.arange(self.start, self.stop))
        return ids if dtype is None else ids.astype(dtype)

    def _read(self, index):
        """The ids at `index`, an array of indices into all files; the result has its shape."""
        ids, numbers = np.empty(index.shape, self.dtype), np.searchsorted(self.ends, index, "right") - 1
        for number in np.flatnonzero(np.bincount(numbers.reshape(-1))):
            inside = numbers == number
            ids[inside] = self.files[number].map()[index[inside] - self.ends[number]]
        self._check(ids, lambda: index)
        return ids

    def _check(self, ids, index):
        """Raise DataError if an id is too large. index(): the indices of the ids in all files."""
        if ids.size and ids.max() >= self.vocab_size:
            wrong = np.flatnonzero(ids >= self.vocab_size)[0]
            place = index().reshape(-1)[wrong]
            number = np.searchsorted(self.ends, place, "right") - 1
            raise DataError(
                f"{self.files[number].path}: token {place - self.ends[number]} has the id {ids.flat[wrong]}, but the "
                f"tokenizer has {self.vocab_size} tokens: give the `tokenizer` that made the ids"
            )

    def check(self):
        """Raise DataError if one of the first ids, as many as fit in token_file.CHECKED bytes, is too large."""
        checked = self[: token_file.CHECKED // self.dtype.itemsize]
        for first in range(0, len(checked), BLOCK):
            np.asarray(checked[first : first + BLOCK])


def is_pattern(path):
    """Whether a path is a pattern such as dir/*.bin, and not the name of an existing file."""
    return glob.has_magic(str(path)) and not os.path.lexists(path)


def data_files(path):
    """The Paths of a corpus that exist: of a pattern, those that match it, sorted; otherwise [path] or []."""
    paths = sorted(glob.glob(str(path))) if is_pattern(path) else [str(path)] * os.path.exists(path)
    return [Path(each) for each in paths]


def token_paths(path):
    """The Paths of the files of tokens of a corpus: [] if it is a text or has no file."""
    if not is_pattern(path) and token_file.is_tokenized(path):
        inside = Path(path) / token_file.TOKEN_FILE
        return [inside if inside.is_file() else Path(path)]
    return [each for each in data_files(path) if is_pattern(path) or (each.suffix == ".bin" and each.is_file())]


def is_tokenized(path):
    """Whether `path` is a file or a pattern of tokens, or a directory with a token file."""
    return is_pattern(path) or bool(token_paths(path))


def has_tokenizer(path):
    """Whether the first file of a corpus is a GPT2TOK file, so that load_tokens() finds its tokenizer."""
    paths = token_paths(path)
    return bool(paths) and token_file.is_token_file(paths[0])


def describe(path):
    """The TokenFile at `path`; raises DataError if it cannot be read or is damaged."""
    if token_file.is_token_file(path):
        dtype, _, _, count = token_file.read_header(path)
        return TokenFile(path, TOKENS, dtype, token_file.HEADER.size, count)
    if not path.is_file():
        raise DataError(f"{path} is not a regular file: give a pattern that matches only files of tokens")
    dtype, size = np.dtype("<u2"), path.stat().st_size
    try:
        head = np.fromfile(path, "<i4", LLMC_HEADER)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if len(head) and head[0] == LLMC_MAGIC:
        version, count = head[1:3] if len(head) > 2 else (LLMC_VERSION, 0)
        if version != LLMC_VERSION:
            raise DataError(f"{path} is an llm.c file of version {version}, this program reads version {LLMC_VERSION}")
        if size != 4 * LLMC_HEADER + 2 * int(count) or count < 1:
            raise DataError(
                f"{path} has {size} bytes, but its header says {count} tokens, which are "
                f"{4 * LLMC_HEADER + 2 * int(count)} bytes: it is truncated or corrupt"
            )
        return TokenFile(path, "llm.c", dtype, 4 * LLMC_HEADER, int(count))
    if path.suffix != ".bin":
        raise DataError(f"{path} is neither a token file nor does its name end with .bin: it has no token ids")
    if size % 2 or not size:
        problem = f"an odd number of bytes ({size})" if size else "no bytes"
        raise DataError(f"{path} has {problem}: a file of uint16 ids has 2 bytes per token")
    return TokenFile(path, "uint16", dtype, 0, size // 2)


def load_tokens(path, tokenizer=None):
    """Return (tokens (n,), Tokenizer) of a text or of a corpus of tokens; the arguments are those of token_file's.

    tokens: an array for a text, a memory map for one GPT2TOK file, otherwise TokenFiles. Raises DataError if there is
    no file, if the files have different formats or no tokenizer, or if an id is not one of the tokenizer's.
    """
    paths = token_paths(path)
    if is_pattern(path) and not paths:
        raise DataError(f"{path}: no file matches this pattern: give the path of a file, or another pattern")
    if not paths or (len(paths) == 1 and token_file.is_tokenized(path)):
        return token_file.load_tokens(path, tokenizer)
    files = tuple(map(describe, paths))
    for other in files:
        if (other.kind, other.dtype) != (files[0].kind, files[0].dtype):
            names = [f"{file.path} has {file.kind} tokens of {file.dtype.itemsize} bytes" for file in (files[0], other)]
            raise DataError(f"{' and '.join(names)}: give files of one format")
    if files[0].kind == TOKENS:
        for file in files:
            _, tokenizer = token_file.load_tokens(file.path, tokenizer)
    elif not isinstance(tokenizer, Tokenizer):
        tokenizer = foreign_tokenizer(files[0], tokenizer)
    tokens = TokenFiles(files, tokenizer.vocab_size)
    tokens.check()
    return tokens, tokenizer


def foreign_tokenizer(file, spec):
    """The Tokenizer of a TokenFile without one: that of the path `spec`, or else the tokenizer.json beside the file."""
    if spec == "word":
        raise DataError(f"`tokenizer=word`: {file.path} has {file.kind} tokens of another tokenizer: give its path")
    if spec is None and not (file.path.parent / FILE_NAME).exists():
        raise DataError(
            f"{file.path} has {file.kind} tokens without a tokenizer: copy the {FILE_NAME} that made them to "
            f"{file.path.parent}, or give its path as `tokenizer`"
        )
    return Tokenizer.load(file.path.parent) if spec is None else build_tokenizer(spec, "")


def first_tokens(path, tokenizer, count):
    """The first `count` ids of a corpus, or all if it has fewer, as an array (see token_file.first_tokens)."""
    if not token_paths(path):
        return token_file.first_tokens(path, tokenizer, count)
    return np.asarray(load_tokens(path, tokenizer)[0][:count])
