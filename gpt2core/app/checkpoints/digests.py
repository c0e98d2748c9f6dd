"""The SHA-256 of each file of a checkpoint. A save records them in state.json; a load compares them with the files.

state.json has two fields for this. `files_sha256` is {file name: SHA-256} of the other files of the checkpoint.
`state_sha256` is the SHA-256 of state.json itself without this field, in the form that canonical() returns. Checkpoints
of earlier versions have neither field, and those of other programs have no state.json: their files are not compared.
"""

import hashlib
import json

FILES_SHA256, STATE_SHA256 = "files_sha256", "state_sha256"


def sha256(data):
    """The SHA-256 of bytes, as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()


def canonical(values):
    """`values` as JSON in UTF-8 bytes with sorted keys and no spaces, so that equal values have equal bytes."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode("utf-8")


def with_digests(state, files):
    """`state`, a result of json.loads, with both fields added; files: {name: SHA-256} of the other files."""
    state = state | {FILES_SHA256: files}
    return state | {STATE_SHA256: sha256(canonical(state))}


def split_digests(values):
    """Divide a parsed state.json into (state without the two fields, files, unchanged).

    files: the recorded {name: SHA-256} of the other files, {} if the field is not a dict. unchanged: whether
    `state_sha256` is the SHA-256 of this state.json. If state.json has neither field, files is None and unchanged True.
    """
    state = {name: value for name, value in values.items() if name not in (FILES_SHA256, STATE_SHA256)}
    if len(state) == len(values):
        return state, None, True
    files, recorded = values.get(FILES_SHA256), values.get(STATE_SHA256)
    unchanged = recorded == sha256(canonical(state | {FILES_SHA256: files}))
    return state, files if isinstance(files, dict) else {}, unchanged
