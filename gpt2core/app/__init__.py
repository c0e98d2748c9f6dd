"""The two commands, train and inference: flags, files, checkpoints, logs, and the comparison of flags between ranks.

Import this package before NumPy, because the import limits BLAS to one thread. The import also installs an exception
hook: after Ctrl-C no traceback is printed, and for a package that is not installed one error line is printed instead.
"""

import os
import sys
from pathlib import Path

from gpt2core.parallel.launcher_env import read_launcher_env

# Each Python thread uses one BLAS thread, because the batch is already divided among Python threads. BLAS reads these
# variables when it is loaded. If BLAS was loaded earlier, the trainer limits its threads through threadpoolctl.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")

PACKAGES = ("numpy", "tokenizers", "tqdm", "matplotlib", "threadpoolctl")  # packages that every stage needs
INSTALL_COMMANDS = dict.fromkeys(PACKAGES, "make train") | {"triton": "make train STAGE=2 PRESET=nano"}


def missing_package(error):
    """The error line to print if `error` is a ModuleNotFoundError for a package of INSTALL_COMMANDS; otherwise None."""
    name = (getattr(error, "name", None) or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name not in INSTALL_COMMANDS:
        return None
    root = Path(__file__).resolve().parents[2]
    venv = root / ".venv"
    venv_not_active = (venv / "bin" / "activate").exists() and Path(sys.prefix) != venv
    advice = f"run `{INSTALL_COMMANDS[name]}`, which installs it into .venv"
    if not (root / "Makefile").exists():  # after a plain `pip install .`
        extra = "[interpreter]" if name == "triton" else ""
        advice = f"run `pip install '.{extra}'` in a clone of the repository"
    elif "MAKELEVEL" in os.environ and os.environ.get("PYTHON"):  # a command such as make train PYTHON=python3
        advice = "omit PYTHON=, so that make uses .venv and installs the missing packages"
    elif venv_not_active:
        advice = f"run `source {venv}/bin/activate` first"
    return f"error: {name} is not installed for {sys.executable}: {advice}"


def _short_errors(error_type, error, traceback, show=sys.excepthook):
    """The exception hook (see the docstring of this file); `show` is the hook that it replaces."""
    if line := missing_package(error):
        variable, _, rank = read_launcher_env()
        line = line.replace("error: ", f"error: rank {rank}: ", 1) if variable else line
        print(line, file=sys.stderr)
        sys.exit(2)
    interactive = hasattr(sys, "ps1")
    if interactive or not issubclass(error_type, KeyboardInterrupt):
        show(error_type, error, traceback)


# Set here, before other imports: Ctrl-C during an import then also ends the command without a traceback.
sys.excepthook = _short_errors
