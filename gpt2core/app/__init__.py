"""The two commands, train and inference: flags, files, checkpoints, logs, and agreement between ranks.

Import this package before NumPy, so that BLAS is limited to one thread. The import also installs an exception hook:
Ctrl-C prints no traceback, and a package that is not installed gives one error line instead of a traceback.
"""

import os
import sys
from pathlib import Path

from gpt2core.parallel.launcher_env import read_launcher_env

# One BLAS thread per Python thread, because the batch is divided among Python threads already. BLAS reads these
# variables when it is loaded. If it was loaded before, the Trainer limits it through threadpoolctl.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")

PACKAGES = ("numpy", "tokenizers", "tqdm", "matplotlib", "threadpoolctl")  # packages that every stage needs
INSTALLS = dict.fromkeys(PACKAGES, "make train") | {"triton": "make train STAGE=2 PRESET=nano"}


def missing_package(error):
    """The error line to print if `error` is a ModuleNotFoundError for a package of INSTALLS; otherwise None."""
    name = (getattr(error, "name", None) or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name not in INSTALLS:
        return None
    venv = Path(__file__).resolve().parents[2] / ".venv"
    other = (venv / "bin" / "activate").exists() and Path(sys.prefix) != venv
    advice = f"run `{INSTALLS[name]}`, which installs it into .venv"
    if "MAKELEVEL" in os.environ and os.environ.get("PYTHON"):  # the variable of a make command
        advice = "omit PYTHON=, so that make uses .venv and installs what is missing"
    elif other:
        advice = f"run `source {venv}/bin/activate` first"
    return f"error: {name} is not installed for {sys.executable}: {advice}"


def _short_errors(kind, error, traceback, show=sys.excepthook):
    if line := missing_package(error):
        *_, number = read_launcher_env()
        if not number:  # the other processes of a job print the same line
            print(line, file=sys.stderr)
        sys.exit(2)
    if hasattr(sys, "ps1") or not issubclass(kind, KeyboardInterrupt):
        show(kind, error, traceback)


# Ctrl-C ends a command with exit code 130 and no traceback, even while its modules are being imported.
sys.excepthook = _short_errors
