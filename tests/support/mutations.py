"""Random changes of the content of a file: of its bytes, its lines, its JSON values, its safetensors header.

mutate(random, name, content) -> (description, changed content). random: a random.Random, so that a seed repeats it.
"""

import json
import struct

import numpy as np

# Values that replace a value of JSON: every type, and the ends of the ranges.
VALUES = [
    None, True, False, 0, 1, -1, 2, 5, 64, 10**4, 2**31, 2**63, 10**30, 10**400, 99999999999, 0.5, -0.0, 1e-30, 1e308,
    float("nan"), float("inf"), float("-inf"), "", "a", "4", "\x00", "\ud800", "../up", [], [1], {}, {"a": 1},
]  # fmt: skip
DEEP = "[" * 100_000


def mutate(random, name, content):
    kinds = [mutate_bytes, mutate_bytes, mutate_lines]
    if name.endswith((".json", ".jsonl")):
        kinds += [mutate_json] * 4
    if name.endswith(".safetensors"):
        kinds += [mutate_safetensors] * 4
    kind = random.choice(kinds)
    try:
        return kind(random, content)
    except (ValueError, KeyError, IndexError, struct.error):  # the content has no such form, for example no JSON
        return mutate_bytes(random, content)


# -- bytes and lines ---------------------------------------------------------------------------------------------------


def mutate_bytes(random, content):
    size = len(content)
    a, b = sorted(random.randrange(size + 1) for _ in range(2))
    noise = random.randbytes(random.choice([1, 8, 100]))
    bit = bytearray(content or b"\0")
    at = random.randrange(len(bit))
    bit[at] ^= 1 << random.randrange(8)
    changes = {
        f"bit of byte {at}": bytes(bit),
        f"cut to {a} bytes": content[:a],
        f"without bytes {a} to {b}": content[:a] + content[b:],
        f"bytes {a} to {b} twice": content[:b] + content[a:],
        f"{noise[:8]!r} at byte {a}": content[:a] + noise + content[a:],
        f"{noise[:8]!r} in place of bytes from {a}": content[:a] + noise + content[a + len(noise) :],
        f"zeros from {a} to {b}": content[:a] + bytes(b - a) + content[b:],
        f"{noise[:8]!r} at the end": content + noise,
        "nothing": b"",
        "a BOM": b"\xef\xbb\xbf" + content,
        "UTF-16": content.decode("utf-8", errors="replace").encode("utf-16"),
        "a space at the end": content + b" ",
        "Windows line ends": content.replace(b"\n", b"\r\n"),
        "[[[[": DEEP.encode(),
    }
    return random.choice(list(changes.items()))


def mutate_lines(random, content):
    lines = content.splitlines(keepends=True) or [b""]
    i, j = (random.randrange(len(lines)) for _ in range(2))
    swapped = list(lines)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    changes = {
        f"without line {i}": lines[:i] + lines[i + 1 :],
        f"line {i} twice": lines[: i + 1] + lines[i:],
        f"lines {i} and {j} swapped": swapped,
        f"an empty line before line {i}": [*lines[:i], b"\n", *lines[i:]],
        f"half of line {i}": [*lines[:i], lines[i][: len(lines[i]) // 2], *lines[i + 1 :]],
        f"half of line {i}, then a line end": [*lines[:i], lines[i][: len(lines[i]) // 2] + b"\n", *lines[i + 1 :]],
    }
    name, lines = random.choice(list(changes.items()))
    return name, b"".join(lines)


# -- JSON --------------------------------------------------------------------------------------------------------------


def places_of(values, path=()):
    """Yield (container, key, path as text) of every value in nested dicts and lists."""
    for key in list(values) if isinstance(values, dict) else range(len(values)):
        yield values, key, ".".join(map(str, (*path, key)))
        if isinstance(values[key], dict | list):
            yield from places_of(values[key], (*path, key))


def mutate_json(random, content):
    """Change one value of a JSON text, or of one of its lines if it has several objects."""
    try:
        values, before, after = json.loads(content), b"", b""
    except ValueError:
        lines = content.splitlines(keepends=True)
        i = random.randrange(len(lines))
        values, before, after = json.loads(lines[i]), b"".join(lines[:i]), b"\n" + b"".join(lines[i + 1 :])
    if not isinstance(values, dict):
        raise ValueError("not an object")
    container, key, path = random.choice(list(places_of(values)))
    other, other_key, other_path = random.choice(list(places_of(values)))
    kind, indent = random.randrange(7), random.choice([None, 2])
    if kind < 3:
        value = random.choice([*VALUES, container[key]])
        if isinstance(container[key], int | float) and random.random() < 0.5:
            value = random.choice([container[key] + 1, container[key] * 2, -container[key], float(container[key])])
        container[key] = value
        name = f"{path} = {value!r:.40}"
    elif kind == 3:
        del container[key]
        name = f"without {path}"
    elif kind == 4:
        container[key], other[other_key] = other[other_key], container[key]
        name = f"{path} and {other_path} swapped"
    elif kind == 5:
        values["another"] = random.choice(VALUES)
        name = f"another = {values['another']!r:.40}"
    else:
        values, name = dict(random.sample(list(values.items()), len(values))), f"other order, indent {indent}"
    text = json.dumps(values, indent=indent)
    return name, before + text.encode() + after


# -- safetensors -------------------------------------------------------------------------------------------------------


def mutate_safetensors(random, content):
    """Change the header, a tensor's description or a tensor's numbers; the file keeps its form."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    names = [name for name in header if name != "__metadata__"]
    one, two = random.sample(names, 2)
    kind = random.randrange(7)
    if kind == 0:
        header[one], header[two] = header[two], header[one]
        name = f"{one} and {two} swapped"
    elif kind == 1:
        start, end = header[one]["data_offsets"]
        value = random.choice([np.nan, np.inf, -np.inf, 0.0, 1e30, 1e-40])
        at = start + 4 * random.randrange((end - start) // 4)
        data[at : at + 4] = np.float32(value).tobytes()
        name = f"{one} has {value}"
    elif kind == 2:
        header[one + random.choice(["x", "\n", " ", ""])] = header.pop(one)
        name = f"{one} renamed"
    elif kind == 3:
        header[one]["dtype"] = random.choice(["F16", "BF16", "F64", "I32", "U8", "BOOL", "F8_E4M3", "?", 3])
        name = f"{one} is {header[one]['dtype']}"
    elif kind == 4:
        header[one]["shape"] = random.choice([header[one]["shape"][::-1], [], [-1], [2**62, 4], "x", [1.5]])
        name = f"{one} has shape {header[one]['shape']}"
    elif kind == 5:
        header[one]["data_offsets"] = random.choice([[0, 0], [0, 2**60], [-4, 0], [8, 4], header[two]["data_offsets"]])
        name = f"{one} has offsets {header[one]['data_offsets']}"
    else:
        header["__metadata__"] = random.choice([{}, {"format": "np"}, None, {"a": 1}, []])
        name = f"metadata {header['__metadata__']}"
    text = json.dumps(header).encode()
    return name, struct.pack("<Q", len(text)) + text + bytes(data)
