"""Matrix products by Intel's MKL instead of NumPy's OpenBLAS: --blas mkl, after `pip install mkl`.

MKL is faster on Intel CPUs (results/cpu), so --blas auto selects it there if it is installed. It also multiplies bf16
matrices (bf16_products.py).
"""

import ctypes
import functools
from importlib import metadata
from pathlib import Path

import numpy as np

from gpt2core.errors import ConfigError

ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112  # cblas.h
SEQUENTIAL = 1  # MKL_THREADING_SEQUENTIAL: the worker threads use the cores
REPRODUCIBLE = 2  # MKL_CBWR_AUTO: the same bits for any memory alignment
BF16 = np.dtype("V2")  # two bytes without a meaning for NumPy, so that np.matmul refuses them
SYSTEM_NAMES = ("libmkl_rt.so", "libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so.1")  # of an MKL not installed by pip


def library_path():
    """The file of MKL's runtime library, or a name that the dynamic linker finds; None if MKL is not installed."""
    try:
        files = metadata.files("mkl") or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(path.locate()) for path in files if path.name.startswith("libmkl_rt.so")]
    return next((str(path) for path in found if path.exists()), None) or next(filter(is_loadable, SYSTEM_NAMES), None)


def is_loadable(name):
    """Whether the dynamic linker loads this library. ctypes.util.find_library() would run gcc, which writes a file."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


@functools.cache
def load():
    """{dtype of the operands: the function cblas_?gemm for it}; ConfigError if MKL is missing or cannot be loaded."""
    path = library_path()
    if path is None:
        raise ConfigError("`blas=mkl`: MKL is not installed: pip install mkl, or use `blas=openblas`")
    try:
        library = ctypes.CDLL(path)
        library.MKL_Set_Threading_Layer(SEQUENTIAL)
        library.MKL_CBWR_Set(REPRODUCIBLE)
        functions = {
            np.dtype(dtype): declared(getattr(library, name), ctypes.c_int, real)
            for name, real, dtype in (
                ("cblas_sgemm", ctypes.c_float, np.float32),
                ("cblas_dgemm", ctypes.c_double, np.float64),
                ("cblas_gemm_bf16bf16f32", ctypes.c_float, BF16),
            )
        }
    except (OSError, AttributeError) as error:
        raise ConfigError(f"`blas=mkl`: {path} cannot be loaded ({error}): use `blas=openblas`") from None
    return functions


def declared(function, integer, real):
    """The function cblas_?gemm of a library, with the types of its arguments. integer: of sizes; real: of factors."""
    flag, pointer = ctypes.c_int, ctypes.c_void_p
    function.argtypes = [flag] * 3 + [integer] * 3 + [real, pointer, integer, pointer, integer, real, pointer, integer]
    function.restype = None
    return function


def product(a, b, out):
    """Write a (M, K) @ b (K, N) to `out` (M, N) and return it; np.matmul computes dtypes and layouts that MKL lacks.

    The result of two BF16 operands is float32; other operands have the dtype of the result.
    """
    return out if call_blas(load(), a, b, out, 0) else np.matmul(a, b, out=out)


def call_blas(functions, a, b, out, factor):
    """out = a b + factor out, by one of the functions from load(); return False, and do nothing, if none can do it.

    factor: 0 or 1. `out` is not read for 0.
    """
    function, layouts = functions.get(a.dtype), (layout(a), layout(b))
    dtypes = a.dtype, np.dtype(np.float32) if a.dtype == BF16 else a.dtype  # of b and of the result
    if function is None or None in layouts or out.strides[1] != out.itemsize or (b.dtype, out.dtype) != dtypes:
        return False
    (a_transposed, lda), (b_transposed, ldb) = layouts
    sizes = len(a), b.shape[1], a.shape[1]
    ldc = max(out.strides[0] // out.itemsize, out.shape[1])
    operands = 1, address(a), lda, address(b), ldb, factor, address(out), ldc
    function(ROW_MAJOR, a_transposed, b_transposed, *sizes, *operands)
    return True


def layout(x):
    """(NO_TRANSPOSE or TRANSPOSE, leading dimension) of x for BLAS; None if the elements of its rows have gaps.

    The leading dimension is the number of elements from one stored row to the next.
    """
    for flag, array in ((NO_TRANSPOSE, x), (TRANSPOSE, x.T)):
        step = array.strides[0] // x.itemsize
        if array.strides[1] == x.itemsize and (step >= array.shape[1] or len(array) == 1):
            return flag, max(step, array.shape[1])
    return None


def address(array):
    return array.__array_interface__["data"][0]
