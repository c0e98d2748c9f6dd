"""SHA-256 of the files of a checkpoint. A save records it in state.json; a load compares it with the files read.

state.json has two fields for this: `files_sha256`, {name of another file: its SHA-256}, and `state_sha256`, the SHA-256
of all other fields of state.json itself, as canonical JSON. Checkpoints of other programs and of earlier versions have
neither field; their files are not compared.
"""

import hashlib
import json

FILES_SHA256, STATE_SHA256 = "files_sha256", "state_sha256"


def sha256(data):
    """The SHA-256 of bytes, as text."""
    return hashlib.sha256(data).hexdigest()


def canonical(values):
    """One JSON text for equal `values`: sorted keys and no spaces."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode("utf-8")


def with_digests(state, files):
    """`state`, a result of json.loads, with both fields added; files: {name: SHA-256} of the other files."""
    sealed = state | {FILES_SHA256: files}
    return sealed | {STATE_SHA256: sha256(canonical(sealed))}


def split_digests(values):
    """Divide a parsed state.json into (state without the two fields, files, right).

    files: {name: SHA-256} of the other files; right: whether `state_sha256` is correct. If state.json has neither
    field, files is None and right is True.
    """
    state = {name: value for name, value in values.items() if name not in (FILES_SHA256, STATE_SHA256)}
    if len(state) == len(values):
        return state, None, True
    files, own = values.get(FILES_SHA256), values.get(STATE_SHA256)
    right = own == sha256(canonical(state | {FILES_SHA256: files}))
    return state, files if isinstance(files, dict) else {}, right
