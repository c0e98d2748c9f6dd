"""Change a saved checkpoint: `edit_json` rewrites fields of one of its files."""

import json

DIGESTS = ("files_sha256", "state_sha256")


def edit_json(path, **changes):
    """Set fields of config.json or state.json; a state.json loses its hashes, as if an earlier version had saved it."""
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in DIGESTS}))
