"""Fingerprints: short texts with which ranks compare their files and code, and a resumed run its training tokens."""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np

from gpt2core.errors import DataError

EDGE = 1 << 22  # bytes of a file, or tokens, that are hashed at each end


def token_fingerprint(tokens):
    """Text with the number of training tokens and their hash; see hash_of_ends().

    The hash of tokens in several files includes the names and sizes of the files.
    """
    hashed = hash_of_ends(len(tokens), lambda start, count: np.asarray(tokens[start : start + count]).tobytes())
    if len(getattr(tokens, "files", ())) > 1:
        hashed = hashlib.sha256(f"{hashed} {tokens.layout}".encode()).hexdigest()[:16]
    return f"{len(tokens):,} tokens with hash {hashed}"


def file_fingerprints(paths):
    """{path: fingerprint} of those paths that are files."""
    return {str(path): file_fingerprint(path) for path in paths if path.is_file()}


def file_fingerprint(path):
    """The text SIZE:HASH for a file: its number of bytes, and a hash of its content or, if it is large, of both ends.

    Raises DataError if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:

            def read(start, count):
                file.seek(start)
                return file.read(count)

            size = os.fstat(file.fileno()).st_size
            return f"{size}:{hash_of_ends(size, read)}"
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def hash_of_ends(size, read):
    """A hash of `size` items, 16 hexadecimal digits; of more than 2 EDGE items only both ends are hashed.

    read(start, count): the bytes of the items from `start` on, at most `count` items.
    """
    digest = hashlib.sha256()
    for start in (0, max(EDGE, size - EDGE)):
        digest.update(read(start, EDGE))
    return digest.hexdigest()[:16]


def code_fingerprint():
    """A hash of the source code of all loaded modules of this project: different code could give different results."""
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "gpt2core" or name.startswith("stage"):
            digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:16]
