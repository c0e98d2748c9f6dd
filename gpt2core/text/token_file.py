"""Read a corpus as one contiguous array of token ids, from a UTF-8 text or from a token file; write token files.

A token file is a header of 32 bytes followed by the ids, little-endian. It is memory-mapped, so a corpus can be
larger than memory:

    bytes 0-7    magic number: the byte 0x93, with which no UTF-8 text begins, and the characters GPT2TOK
    bytes 8-11   version, and bytes per id (2 or 4), uint16 each
    bytes 12-15  fingerprint of the tokenizer's vocabulary, uint32
    bytes 16-23  vocabulary size, uint64
    bytes 24-31  number of tokens, uint64

The same directory contains the tokenizer.json that made the ids. data/prepare.py writes both files.
"""

# n: number of tokens

import codecs
import os
import struct
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gpt2core.errors import ConfigError, DataError
from gpt2core.text.input_file import CHUNK, blocks
from gpt2core.text.tokenizer import FILE_NAME, Tokenizer, build_tokenizer

MAGIC, VERSION, HEADER = b"\x93GPT2TOK", 1, struct.Struct("<8sHHIQQ")
TOKEN_FILE = "tokens.bin"
FIRST_CHUNK = 1 << 13  # bytes per read if only the first tokens are needed
CHECKED = 1 << 30  # bytes; all ids of a token file up to this size are checked when it is opened (under a second)


def text_chunks(path, size=CHUNK, pipes=False):
    """Yield the UTF-8 text of a file in chunks of about `size` bytes. Line ends and a byte order mark are not changed.

    pipes: whether the file may be a pipe. Raises DataError, with the path, if the file is missing, of another kind,
    unreadable, empty, or not UTF-8; in the last case also with the offset of the first wrong byte.
    """
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        for block in blocks(path, size, pipes):
            pending = len(decoder.getstate()[0])  # number of bytes of a character that began in the previous block
            try:
                yield decoder.decode(block)
                offset += len(block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - pending + error.start, block) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a UTF-8 text file") from None
    if not offset:
        raise DataError(f"{path} is empty (0 bytes): give a file that contains text")
    if pending := len(decoder.getstate()[0]):
        raise _not_utf8(path, offset - pending)


def _not_utf8(path, offset, block=b""):
    utf16 = block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in block and not utf16:
        return DataError(f"{path} is not a text: it has NUL bytes, like an image or a program; give a UTF-8 text file")
    encoding, note = ("UTF-16", "") if utf16 else ("LATIN1", " (if its encoding is another one, name that)")
    command = f"iconv -f {encoding} -t UTF-8 {path} > new.txt"
    return DataError(f"{path} is not UTF-8: byte {offset} cannot be decoded; convert it with {command}{note}")


def read_text(path, limit=None, pipes=False):
    """Return a whole UTF-8 file as str; raises DataError as text_chunks(), and for more than `limit` characters."""
    chunks, count = [], 0
    for chunk in text_chunks(path, pipes=pipes):
        chunks.append(chunk)
        count += len(chunk)
        if limit is not None and count > limit:
            raise DataError(f"{path} has more than {limit:,} characters: give a shorter text")
    return "".join(chunks)


@contextmanager
def replaced(path):
    """A context manager that replaces the file at `path` atomically. It yields a temporary file, open for writing.

    At the end of the block the temporary file is fsynced and renamed to `path`; after an exception it is deleted.
    Raises DataError if it cannot be written (no such directory, no permission, disk full).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; choose another directory or free disk space") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_token_file(path, arrays, tokenizer):
    """Write a token file with the ids in `arrays`, an iterable of integer arrays; return the number of ids.

    The file appears at `path` only when it is complete.
    """
    count, dtype = 0, tokenizer.dtype.newbyteorder("<")
    with replaced(path) as file:
        file.write(bytes(HEADER.size))
        for array in arrays:
            file.write(np.ascontiguousarray(array, dtype).data)
            count += len(array)
        file.seek(0)
        sizes = (tokenizer.vocab_size, count)
        file.write(HEADER.pack(MAGIC, VERSION, dtype.itemsize, tokenizer.fingerprint, *sizes))
    return count


def is_token_file(path):
    """Return whether the file at `path` begins with the magic of a token file; False if it cannot be read."""
    if not os.path.isfile(path):
        return False  # opening a named pipe would block until a writer opens it
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path):
    """Return (dtype, fingerprint, vocab_size, number of tokens); raises DataError if the file size does not fit."""
    try:
        with open(path, "rb") as file:
            head, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}; write it with data/prepare.py") from None
    if not head.startswith(MAGIC):
        raise DataError(f"{path} is not a token file: its first bytes are not {MAGIC!r}; write it with data/prepare.py")
    if len(head) < HEADER.size:
        raise DataError(
            f"{path} is truncated: it has {len(head)} bytes, but its header needs {HEADER.size}; prepare it again"
        )
    _, version, item, fingerprint, vocab_size, count = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(
            f"{path} is a token file of version {version}, this program reads version {VERSION}: prepare it again"
        )
    if item not in (2, 4) or not 0 < vocab_size <= 1 << 8 * item or not count:
        raise DataError(
            f"{path} has a corrupt header ({count} tokens of {item} bytes, vocabulary {vocab_size}): prepare it again"
        )
    if size != HEADER.size + count * item:
        raise DataError(
            f"{path} has {size} bytes, but its header says {count} tokens, which are "
            f"{HEADER.size + count * item} bytes: it is truncated or corrupt, prepare it again"
        )
    return np.dtype(f"<u{item}"), fingerprint, vocab_size, count


def open_token_file(path):
    """Return the ids of a token file as a read-only memory map, (n,) uint16 or uint32.

    Raises DataError if the file is missing, truncated, corrupt or not a token file. If its ids have at most CHECKED
    bytes, also raises DataError if an id is outside the vocabulary.
    """
    dtype, _, vocab_size, count = read_header(path)
    tokens = np.memmap(path, dtype, mode="r", offset=HEADER.size, shape=(count,))
    if count * dtype.itemsize <= CHECKED and (largest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{path} is corrupt: token id {largest} is outside its vocabulary of {vocab_size}; prepare it again"
        )
    return tokens


def is_tokenized(path):
    """Return whether `path` is a token file, or a directory with one, so that load_tokens() needs no `tokenizer`."""
    path = Path(path)
    return is_token_file(path / TOKEN_FILE if (path / TOKEN_FILE).is_file() else path)


def first_tokens(path, tokenizer, count):
    """Return the first `count` ids of a text or token file, or all ids if it has fewer.

    Only the beginning of a text is read, unless it must be encoded as one piece (see cut_at_words, Tokenizer.whole).
    """
    if is_tokenized(path):
        return load_tokens(path, tokenizer)[0][:count]
    ids = np.empty(0, tokenizer.dtype)
    for part in tokenizer.encode_chunks(text_chunks(path, FIRST_CHUNK)):
        ids = np.concatenate([ids, part])
        if len(ids) >= count:
            break
    return ids[:count]


def load_tokens(path, tokenizer=None):
    """Return (tokens (n,), Tokenizer) of a text file, a token file, or a directory written by data/prepare.py.

    tokenizer: "word", "byte", the path of a tokenizer.json, or a Tokenizer, for example that of the training data for
    validation data. None selects the word-level tokenizer of a text, or for a token file the tokenizer.json in its
    directory. Raises DataError if a token file was made with another vocabulary.
    """
    path = Path(path)
    prepared = (path / TOKEN_FILE).is_file()  # then the file is never read as a text, even if its header is corrupt
    path = path / TOKEN_FILE if prepared else path
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"{path} is not a regular file, and a corpus is read more than once: save it to a file first")
    if path.is_dir():
        raise DataError(
            f"cannot read {path}: Is a directory without {TOKEN_FILE}; give a UTF-8 text file, or a directory written "
            "by data/prepare.py"
        )
    if not prepared and not is_token_file(path):
        text = read_text(path)
        tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else build_tokenizer(tokenizer or "word", text)
        return tokenizer.encode(text), tokenizer
    return _load_token_file(path, tokenizer)


def _load_token_file(path, requested):
    """load_tokens() for the token file at `path`. requested: the argument `tokenizer` of load_tokens()."""
    tokenizer = requested
    if not isinstance(requested, Tokenizer):
        own = requested in (None, "word", "byte")
        if own and not (path.parent / FILE_NAME).exists():
            advice = "convert the text again with data/prepare.py"
            raise DataError(f"cannot read the tokenizer {path.parent / FILE_NAME}: {path} needs this file; {advice}")
        tokenizer = Tokenizer.load(path.parent if own else requested)
    _, fingerprint, vocab_size, _ = read_header(path)
    if requested in ("word", "byte") and tokenizer.kind != requested:
        raise DataError(f"`tokenizer={requested}`: {path} contains {tokenizer.kind} tokens; omit the flag")
    if tokenizer.vocab_size != vocab_size or tokenizer.fingerprint != fingerprint:
        raise DataError(
            f"{path} was made with another tokenizer (its vocabulary has {vocab_size} tokens, this one "
            f"{tokenizer.vocab_size}, fingerprints {fingerprint:08x} and {tokenizer.fingerprint:08x}): prepare it again"
        )
    return open_token_file(path), tokenizer


def split_validation(tokens, fraction):
    """Return (training, validation), two views of `tokens`; the last part, of size `fraction`, is for validation."""
    if not 0 <= fraction < 1:
        raise ConfigError(f"`val_fraction={fraction}` must be at least 0 and less than 1")
    cut = len(tokens) - round(len(tokens) * fraction)
    return tokens[:cut], tokens[cut:]
