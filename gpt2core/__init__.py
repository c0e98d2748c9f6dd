"""The shared tensor and autograd core of a GPT-2 with four runtimes; it imports no stage."""

import os
import sys

__version__ = "0.1.0"

# One BLAS thread for each Python thread, said before NumPy loads its BLAS: the batch is what is parallel here. A BLAS
# that is already loaded (a notebook, a test) is told again by the trainer, through threadpoolctl.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")


def _quiet_interrupt(kind, error, traceback, show=sys.excepthook):
    if hasattr(sys, "ps1") or not issubclass(kind, KeyboardInterrupt):
        show(kind, error, traceback)


# Said before the half second in which a command loads its modules: Ctrl-C ends it there too with 130 and no traceback.
sys.excepthook = _quiet_interrupt
