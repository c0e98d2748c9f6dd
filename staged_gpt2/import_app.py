"""Import gpt2core.app, and undo what its import does for a command: the exception hook, the threads of BLAS.

NumPy is imported before, so that BLAS reads the number of threads that the user has set. train() limits BLAS to one
thread while it runs.
"""

import os
import sys

import numpy  # noqa: F401

_hook, _environment = sys.excepthook, dict(os.environ)

import gpt2core.app  # noqa: E402, F401

sys.excepthook = _hook
for _variable in set(os.environ) - set(_environment):
    del os.environ[_variable]
