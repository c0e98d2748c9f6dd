"""Shorten the start of Triton: without PyTorch, and with slow work done in another thread.

Both functions use names that are private to Triton (tried with 3.6 and 3.9). If another version lacks one, nothing is
changed, and Triton only starts more slowly.
"""

import contextlib
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


def hash_triton():
    """Let Triton compute the hash of its own files, which it keeps and needs for each kernel: 400 MB are read."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()
