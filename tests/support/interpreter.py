"""Whether Triton's interpreter works with the installed versions of Triton and NumPy."""

from importlib.metadata import PackageNotFoundError, version

import numpy as np

from gpt2core.errors import ConfigError
from stage2_cuda.runtime.triton_launch import check_interpreter


def interpreter_works():
    try:
        check_interpreter(version("triton"), np.__version__)
    except (ConfigError, PackageNotFoundError):
        return False
    return True
