"""Write and read a safetensors file in one pass over its bytes, which are hashed while they are in the cache.

    bytes 0-8       the length n of the header, uint64, little-endian
    bytes 8-(8+n)   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}}, "__metadata__" is optional
    the rest        the data of the tensors without gaps, little-endian

The written files are those of the `safetensors` library, byte for byte. Reading and writing release the interpreter's
lock, so two threads work on two files at the same time.
"""

import hashlib
import json
import math
import os

import numpy as np

from gpt2core.errors import CheckpointError

STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}  # dtypes that can be read
LARGEST_HEADER = 100_000_000  # bytes, the library's own limit
BLOCK = 1 << 18  # bytes that are hashed at once: they fit into the cache of one core


def write_safetensors(path, tensors, dtype=np.float32):
    """Write {name: array} as `dtype`, float32 or float16; return the SHA-256 of the file as text.

    An array that is contiguous and of this dtype is not copied. Raises OSError, and CheckpointError for another dtype
    and for a value that is too large for float16.
    """
    names = {stored: name for name, stored in STORED.items() if name != "BF16"}
    stored = np.dtype(dtype).newbyteorder("<")
    if stored not in names:
        raise CheckpointError(f"{path}: cannot store {np.dtype(dtype)}: choose float32 or float16")
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, array in sorted(tensors.items()):
        begin, end = end, end + array.size * stored.itemsize
        header[name] = {"dtype": names[stored], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # so that the data is aligned
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
    """Write bytes to a file and add them to the digest, one BLOCK after another."""
    for start in range(0, len(data), BLOCK):
        digest.update(data[start : start + BLOCK])
        file.write(data[start : start + BLOCK])


def read_safetensors(path, skip=None):
    """({name: float32 array}, SHA-256 of the file as text) of a file of float32, float16 or bfloat16 tensors.

    skip: a compiled pattern; tensors whose name contains a match are omitted, of any dtype. The file is read, not
    memory-mapped: if it were truncated while mapped, a bus error would kill this process. Raises OSError, ValueError if
    the file is truncated or not a safetensors file, and CheckpointError for another dtype.
    """
    digest, tensors = hashlib.sha256(), {}
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for name, dtype, shape, count in read_header(file, digest, size):
            data = np.empty(count, np.uint8)
            read_hashed(file, digest, data.data)
            if skip and skip.search(name):
                continue
            if dtype not in STORED:
                raise CheckpointError(f"{path}: {name} is stored as {dtype!r}: save it as one of {list(STORED)}")
            if count != math.prod(shape) * STORED[dtype].itemsize:
                raise ValueError(f"{name} has {count} bytes, which are not {shape} of {dtype}")
            array = data.view(STORED[dtype]).reshape(shape)
            tensors[name] = widen(array) if dtype == "BF16" else array.astype(np.float32, copy=False)
    return tensors, digest.hexdigest()


def read_header(file, digest, size):
    """[(name, dtype, shape, bytes)] of the tensors in the order of their data; raises ValueError.

    size: bytes of the file. Header and tensors together must have exactly this size, without gaps.
    """
    head = bytearray(8)
    read_hashed(file, digest, memoryview(head))
    length = int.from_bytes(head, "little")
    if length > min(size - 8, LARGEST_HEADER):
        raise ValueError(f"its header would have {length} bytes, the file has {size}")
    text = bytearray(length)
    read_hashed(file, digest, memoryview(text))
    header, end, tensors = json.loads(text), 0, []
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (begin, after), shape = entry["data_offsets"], tuple(entry["shape"])
        if not name.isprintable():
            raise ValueError(f"{name!r} is not a tensor name")
        if not all(type(n) is int and n >= 0 for n in (begin, after, *shape)) or begin != end or after < begin:
            raise ValueError(f"{name} of shape {shape} at bytes {begin} to {after} does not follow byte {end}")
        end = after
        tensors.append((name, entry["dtype"], shape, after - begin))
    if 8 + length + end != size:
        raise ValueError(f"its header describes {8 + length + end} bytes, the file has {size}")
    return tensors


def read_hashed(file, digest, data):
    """Fill `data`, a writable memoryview of bytes, from an unbuffered file; raises ValueError at the file's end."""
    start = 0
    while start < len(data):
        count = file.readinto(data[start : start + BLOCK])
        if not count:
            raise ValueError(f"it ends {len(data) - start} bytes early")
        digest.update(data[start : start + count])
        start += count


def widen(array):
    """bfloat16 -> float32; `array` holds the bits as uint16, because NumPy has no bfloat16.

    A bfloat16 is the upper half of a float32.
    """
    bits = array.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)
