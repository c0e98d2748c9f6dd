"""The Runtime of NumPy: the library of the matrix products, and its number of threads."""

import warnings

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.parallel.threads import limit_blas
from gpt2core.parallel.tuned_choices import processor
from gpt2core.runtime import Runtime
from stage0_serial import mkl

LIBRARIES = ("auto", "openblas", "mkl")


class CpuRuntime(Runtime):
    """product(a, b, out=array): the matrix product of the kernels. blas: the name of its library."""

    def __init__(self):
        self.threads = 1
        self.use_blas("auto")

    def use_blas(self, name):
        """Select the library; `auto` is MKL on an Intel CPU if it is installed. Raises ConfigError if it is missing.

        If `auto` finds an MKL that cannot be loaded, it gives a warning and uses OpenBLAS.
        """
        if name not in LIBRARIES:
            raise ConfigError(f"--blas {name} is unknown: choose from {', '.join(LIBRARIES)}")
        if name == "mkl":
            mkl.load()
        if name == "auto":
            name = "openblas"
            if "Intel" in processor() and mkl.library_path():
                try:
                    mkl.load()
                    name = "mkl"
                except ConfigError as error:
                    warnings.warn(str(error), stacklevel=2)
        self.blas, self.product = name, mkl.product if name == "mkl" else np.matmul
        self.library = "MKL" if name == "mkl" else ""

    def use_threads(self, count):
        """Let OpenBLAS divide each product over `count` threads of its own; training divides the batch instead."""
        self.threads = count
        limit_blas(count)
        if count > 1:  # mkl.py loads MKL without threads
            self.product = np.matmul
