"""The two commands, train and inference: flags, files, checkpoints, logs, and agreement between ranks.

Importing this package, before NumPy is imported, limits BLAS to one thread and removes the traceback of Ctrl-C.
"""

import os
import sys

# One BLAS thread per Python thread, because the batch is divided among Python threads already. BLAS reads these
# variables when it is loaded. If it was loaded before, the Trainer limits it through threadpoolctl.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")


def _quiet_interrupt(kind, error, traceback, show=sys.excepthook):
    if hasattr(sys, "ps1") or not issubclass(kind, KeyboardInterrupt):
        show(kind, error, traceback)


# Ctrl-C ends a command with exit code 130 and no traceback, even while its modules are being imported.
sys.excepthook = _quiet_interrupt
