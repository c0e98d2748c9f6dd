"""A file of choices made by timing, such as tile sizes: all ranks of a machine and later runs use the same choices."""

import json
import os
import platform
import re
import secrets
import warnings
from pathlib import Path


def processor():
    """The name of the CPU, or of its architecture. platform.processor() would run the program uname."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def cache_file(directory, tuned_for):
    """The file in `directory` for choices that are valid for this device and these versions of libraries."""
    return Path(directory, re.sub(r"[^\w.]+", "-", tuned_for) + ".json")


def cache_directory():
    """The directory of the cache files, in the user's home directory; None if there is no home directory."""
    try:
        return Path.home() / ".cache" / "staged-gpt2"
    except RuntimeError:
        return None


def load_choices(path, tuned_for):
    """{what is chosen: choice} in the cache file; raises an error if it is damaged or for another GPU or library."""
    cache = json.loads(path.read_text(encoding="utf-8"))
    if cache["made_for"] != tuned_for:
        raise ValueError(f"it was made for {cache['made_for']}, this is {tuned_for}")
    if not all(isinstance(choice, str) for choice in cache["choices"].values()):
        raise TypeError("a choice is not a string")
    return cache["choices"]


def read_choices(path, tuned_for):
    """{what is chosen: choice} in the cache file; {} if there is none, and {} with a warning if it is damaged."""
    try:
        return load_choices(path, tuned_for)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # write_choices() warns if it cannot be written
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.warn(f"the autotune cache {path} is ignored and will be rewritten: {error!r}", stacklevel=3)
        return {}


def write_choices(path, tuned_for, choices):
    """Add choices to the cache file; warn if it cannot be written."""
    try:
        add_choices(path, tuned_for, choices)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error}), so later runs measure its choices again"
        warnings.warn(f"the autotune cache {path} {problem}", stacklevel=3)


def add_choices(path, tuned_for, choices):
    """Add choices to the cache file, which is replaced atomically; raises OSError if it cannot be written."""
    try:
        stored = load_choices(path, tuned_for)  # read it again: another process may have added choices
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        stored = {}
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"made_for": tuned_for, "choices": stored | choices}, indent=1)
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # of a write that failed
