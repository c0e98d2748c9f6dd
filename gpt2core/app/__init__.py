"""The two commands, train and inference: flags, files, checkpoints, logs, and agreement between ranks.

Importing this package prepares the process for a command, before NumPy is imported: one BLAS thread, a quiet Ctrl-C.
"""

import os
import sys

# One BLAS thread per Python thread: the batch is divided among Python threads already. NumPy's BLAS reads these
# variables when it is loaded; one that is loaded already is limited by the Trainer, through threadpoolctl.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")


def _quiet_interrupt(kind, error, traceback, show=sys.excepthook):
    if hasattr(sys, "ps1") or not issubclass(kind, KeyboardInterrupt):
        show(kind, error, traceback)


# Ctrl-C ends a command with exit code 130 and no traceback, also while its modules are still being imported.
sys.excepthook = _quiet_interrupt
