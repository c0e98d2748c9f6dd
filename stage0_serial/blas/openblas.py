"""NumPy's OpenBLAS called without NumPy, because np.matmul cannot add a product to an array."""

import ctypes
import functools

import numpy as np
import threadpoolctl

from stage0_serial.blas.mkl import declared

# Of the package scipy-openblas, of which NumPy's wheels have a copy; another library may have other types of integers.
NAMES = (("scipy_cblas_{}gemm64_", ctypes.c_int64), ("scipy_cblas_{}gemm", ctypes.c_int))


@functools.cache
def load():
    """{dtype of the operands: the function cblas_?gemm} of the OpenBLAS in this process; {} if it has other names."""
    for library in threadpoolctl.ThreadpoolController().select(internal_api="openblas").lib_controllers:
        functions = ctypes.CDLL(library.filepath)
        for name, integer in NAMES:
            if hasattr(functions, name.format("s")):
                return {
                    np.dtype(dtype): declared(getattr(functions, name.format(letter)), integer, real)
                    for letter, real, dtype in (("s", ctypes.c_float, np.float32), ("d", ctypes.c_double, np.float64))
                }
    return {}
