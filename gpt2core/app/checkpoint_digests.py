"""SHA-256 of the files of a checkpoint: recorded in state.json by a save, compared with what a load has read.

state.json has two fields for this: `files_sha256`, {name of another file: its SHA-256}, and `state_sha256`, the SHA-256
of all other fields of state.json itself, as canonical JSON. Checkpoints of other programs and of earlier versions have
neither field and are not compared.
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
    """(state without the two fields, {name: SHA-256} or None, whether `state_sha256` is right) of a parsed state.json.

    None: state.json has neither field.
    """
    state = {name: value for name, value in values.items() if name not in (FILES_SHA256, STATE_SHA256)}
    if len(state) == len(values):
        return state, None, True
    files, own = values.get(FILES_SHA256), values.get(STATE_SHA256)
    right = own == sha256(canonical(state | {FILES_SHA256: files}))
    return state, files if isinstance(files, dict) else {}, right
