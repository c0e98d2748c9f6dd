"""Shorten the start of Triton: do not import PyTorch, hash 400 MB of Triton's files, or start ptxas once per thread.

All functions use names that are private to Triton (tried with 3.6 and 3.9). If another version lacks one, nothing is
changed, and Triton only starts more slowly.
"""

import contextlib
import functools
import hashlib
import os
import sys


def inspect_first_argument():
    """Let Triton inspect an argument for the first time, without PyTorch.

    At the first argument of the process, Triton 3.6 imports PyTorch if it is installed, to recognise its tensors. This
    takes seconds. Stage 2 never passes PyTorch tensors. If PyTorch was imported before, it is not hidden from Triton.
    """
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # importing it raises ImportError, as if it were not installed
    try:
        with contextlib.suppress(Exception):
            from triton._C.libtriton import native_specialize_impl
            from triton.backends.compiler import BaseBackend

            native_specialize_impl(BaseBackend, 1, False, True, True)
    finally:
        if hide:
            del sys.modules["torch"]


def identify_by_file_times():
    """Let Triton identify its own files by size and time of modification, as `make` does, not by their contents.

    The name of each compiled kernel in Triton's cache depends on triton_key(). Triton's own function hashes the
    contents of its files, 400 MB, which takes 1 to 2 s in each process. It returns the version and hashes that are
    joined by "-"; the text here has another form, so both kinds of names can share a cache directory.
    """
    with contextlib.suppress(Exception):
        from triton.runtime import cache

        cache.triton_key.__wrapped__  # noqa: B018  raises AttributeError if Triton has another kind of key
        cache.triton_key = key_of_files
        key_of_files()  # it is cached; otherwise every thread that compiles a kernel would compute it


@functools.cache
def key_of_files():
    """The version of Triton and a hash of the path, size and modification time of each file of its package."""
    import triton

    root, digest = os.path.dirname(os.path.abspath(triton.__file__)), hashlib.sha256()
    for directory, names, files in os.walk(root):
        names[:] = sorted(set(names) - {"__pycache__"})
        for name in sorted(files):
            path = os.path.join(directory, name)
            status = os.stat(path)
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return f"{triton.__version__} by file times {digest.hexdigest()}"


def read_compiler_version(capability):
    """Let Triton read the version of ptxas, NVIDIA's assembler, which it needs for each kernel and then keeps.

    Otherwise every thread that compiles a kernel would start a process of ptxas at the same time to read the version.
    """
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.compiler import get_ptxas_version

        major, minor = capability
        get_ptxas_version(10 * major + minor)
