"""Write and read a safetensors file and compute its SHA-256 in the same pass, while the bytes are in the CPU's cache.

A file has three parts:

    bytes 0 to 7        n, the number of bytes of the header; uint64, little-endian
    bytes 8 to 8+n-1    the header, JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}}; begin and end count
                        bytes of the data; an entry "__metadata__" is optional
    other bytes         the data of all tensors without gaps, little-endian

The `safetensors` library writes files with exactly the same bytes. It is not used here: it returns no SHA-256, so each
file would be read a second time, and its NumPy interface cannot read bfloat16. Reading, writing and hashing release
Python's GIL, so two threads can process two files at the same time.
"""

import hashlib
import json
import math
import os

import numpy as np

from gpt2core.errors import CheckpointError
from gpt2core.text.input_file import open_file

# {dtype in a header: NumPy's dtype} of the tensors that can be read; NumPy has no bfloat16, see widen()
STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
LARGEST_HEADER = 100_000_000  # bytes; the `safetensors` library has the same limit
BLOCK = 1 << 18  # bytes that are read or written, and hashed, at once: they fit into the cache of one core


def write_safetensors(path, tensors, dtype=np.float32):
    """Write {name: array} as `dtype`, float32 or float16; return the SHA-256 of the file as text.

    An array that is contiguous and of this dtype is not copied. Raises OSError, and CheckpointError for another dtype
    and for a value that is too large for float16.
    """
    names = {stored: name for name, stored in STORED.items() if name != "BF16"}  # {NumPy's dtype: dtype in the header}
    stored = np.dtype(dtype).newbyteorder("<")
    if stored not in names:
        raise CheckpointError(f"{path}: cannot store {np.dtype(dtype)}: choose float32 or float16")
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, array in sorted(tensors.items()):
        begin, end = end, end + array.size * stored.itemsize
        header[name] = {"dtype": names[stored], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8 bytes
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        write_hashed(file, digest, len(text).to_bytes(8, "little") + text)
        for name, array in sorted(tensors.items()):
            try:
                with np.errstate(over="raise"):
                    array = np.ascontiguousarray(array, stored)
            except FloatingPointError as error:
                raise CheckpointError(f"{path}: {name} has values too large for {stored}: use float32") from error
            write_hashed(file, digest, array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def write_hashed(file, digest, data):
    """Write `data`, bytes or a memoryview of bytes, to a file and add it to the digest, one BLOCK after another."""
    for start in range(0, len(data), BLOCK):
        digest.update(data[start : start + BLOCK])
        file.write(data[start : start + BLOCK])


def read_safetensors(path, skip=None):
    """({name: float32 array}, SHA-256 of the file as text) of a file of float32, float16 or bfloat16 tensors.

    skip: a compiled pattern; a tensor whose name contains a match is omitted and can have any dtype. The file is read,
    not memory-mapped: a bus error would kill this process if another process truncated a file that is mapped. Raises
    OSError; ValueError if the file is truncated or not a safetensors file; CheckpointError for another dtype.
    """
    digest, tensors = hashlib.sha256(), {}
    with open_file(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for name, dtype, shape, nbytes in read_header(file, digest, size):
            data = np.empty(nbytes, np.uint8)
            read_hashed(file, digest, data.data)
            if skip and skip.search(name):
                continue
            if dtype not in STORED:
                raise CheckpointError(f"{path}: {name} is stored as {dtype!r}: save it as one of {list(STORED)}")
            if nbytes != math.prod(shape) * STORED[dtype].itemsize:
                raise ValueError(f"{name} has {nbytes} bytes, which are not {shape} of {dtype}")
            array = data.view(STORED[dtype]).reshape(shape)
            tensors[name] = widen(array) if dtype == "BF16" else array.astype(np.float32, copy=False)
    return tensors, digest.hexdigest()


def read_header(file, digest, size):
    """A list of (name, dtype, shape, number of bytes) of the tensors, in the order of their data.

    size: bytes of the file. Raises ValueError unless the header is valid, and header and tensors fill the file without
    gaps.
    """
    length_bytes = bytearray(8)
    read_hashed(file, digest, memoryview(length_bytes))
    length = int.from_bytes(length_bytes, "little")
    if length > min(size - 8, LARGEST_HEADER):
        raise ValueError(f"its header would have {length} bytes, the file has {size}")
    text = bytearray(length)
    read_hashed(file, digest, memoryview(text))
    header, end, tensors = json.loads(text), 0, []
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (begin, next_end), shape = entry["data_offsets"], tuple(entry["shape"])
        if not name.isprintable():
            raise ValueError(f"{name!r} is not a tensor name")
        if not all(type(n) is int and n >= 0 for n in (begin, next_end, *shape)) or begin != end or next_end < begin:
            raise ValueError(f"{name} of shape {shape} at bytes {begin} to {next_end} does not follow byte {end}")
        end = next_end
        tensors.append((name, entry["dtype"], shape, next_end - begin))
    if 8 + length + end != size:
        raise ValueError(f"its header describes {8 + length + end} bytes, the file has {size}")
    return tensors


def read_hashed(file, digest, data):
    """Fill `data`, a writable memoryview of bytes, from an unbuffered file, and add it to the digest.

    Raises ValueError if the file ends before `data` is full.
    """
    start = 0
    while start < len(data):
        count = file.readinto(data[start : start + BLOCK])
        if not count:
            raise ValueError(f"it ends {len(data) - start} bytes early")
        digest.update(data[start : start + count])
        start += count


def widen(array):
    """The float32 array for an array of bfloat16, whose bits are given as uint16, because NumPy has no bfloat16.

    The bits of a bfloat16 are the upper half of the bits of a float32.
    """
    bits = array.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)
