"""The shared tensor and autograd core of a GPT-2 with four runtimes; it imports no stage."""

import os

__version__ = "0.1.0"

# One BLAS thread for each Python thread, said before NumPy loads its BLAS: the batch is what is parallel here. A BLAS
# that is already loaded (a notebook, a test) is told again by the trainer, through threadpoolctl.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")
