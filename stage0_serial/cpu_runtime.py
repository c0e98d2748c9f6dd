"""The Runtime of NumPy: the library of the matrix products, and its number of threads."""

import contextlib
import functools
import warnings
from pathlib import Path

import numpy as np
import threadpoolctl

from gpt2core.errors import ConfigError
from gpt2core.runtime import Runtime
from gpt2core.threads import limit_blas
from gpt2core.tuned_choices import processor
from stage0_serial.blas import mkl, openblas
from stage0_serial.blas.bf16_products import Bf16Products

LIBRARIES = ("auto", "openblas", "mkl")
MIN_ADDED = 1 << 18  # elements of a result to which BLAS adds a product; a smaller one stays in the cache in any case


class CpuRuntime(Runtime):
    """product(a, b, out=array): the matrix product of the kernels. blas: the name of its library.

    precision: the value of --precision. Raises ConfigError if it is bf16, and the CPU or MKL cannot compute it.
    """

    def __init__(self, precision="fp32"):
        self.threads, self.bf16, self.exact_additions = 1, precision == "bf16", {}
        self.use_blas("auto")

    def use_blas(self, name):
        """Select the library; `auto` is MKL for bf16, and on an Intel CPU if it is installed.

        Raises ConfigError if the library is missing, or cannot multiply in this precision. If `auto` finds an MKL for
        fp32 that cannot be loaded, it gives a warning and uses OpenBLAS.
        """
        if name not in LIBRARIES:
            raise ConfigError(f"`blas={name}` is unknown: choose from {', '.join(LIBRARIES)}")
        if self.bf16:
            check_bf16(name)
            name = "mkl"
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
        self.blas = name
        self.choose_product()
        self.library = "MKL" if name == "mkl" else ""

    def choose_product(self):
        """Set `product`, that of float32 operands; with bf16, it computes only the products of few rows."""
        product = mkl.product if self.blas == "mkl" and self.threads == 1 else np.matmul  # mkl.py: MKL has no threads
        self.product = Bf16Products(product) if self.bf16 else product

    def add_product(self, a, b, out):
        """Let BLAS add a @ b to `out`, and return True. False: `out` has not changed.

        False if the bits would not be those of a product and an addition: BLAS divides a long sum into blocks, and
        would add one block after another to `out`. This is tried once for each product and size.
        """
        if self.bf16 or out.size < MIN_ADDED:
            return False
        key = self.product, a.shape, b.shape, mkl.layout(a), mkl.layout(b), out.dtype
        functions = mkl.load() if self.blas == "mkl" else openblas.load()
        if key not in self.exact_additions:
            self.exact_additions[key] = adds_exactly(functions, self.product, a, b)
        return self.exact_additions[key] and mkl.call_blas(functions, a, b, out, 1)

    def rounded(self, x):
        """x as `product` reads it; an operand of several products is then rounded to bf16 only once."""
        return self.product.rounded(x) if self.bf16 else x

    def use_threads(self, count):
        """Let generation divide each product over `count` threads of OpenBLAS; training divides the batch instead."""
        self.threads = count
        limit_blas(count)
        self.choose_product()

    @contextlib.contextmanager
    def one_blas_thread(self):
        """A context in which BLAS computes each product on the thread of its caller; only one thread may enter it."""
        libraries = blas_libraries()
        counts = [library.num_threads for library in libraries]
        try:
            for library in libraries:
                library.set_num_threads(1)
            yield
        finally:
            for library, count in zip(libraries, counts, strict=True):
                library.set_num_threads(count)


def adds_exactly(functions, product, a, b):
    """Whether call_blas() adds random a @ b to an array with the bits of product(a, b) and an addition."""
    rng = np.random.default_rng(0)
    a, b, c, d = (random_like(x, rng) for x in (a, b, a, b))
    out = product(c, d, out=np.empty((len(a), b.shape[1]), a.dtype))
    expected = product(a, b, out=np.empty_like(out))
    np.add(out, expected, out=expected)
    return mkl.call_blas(functions, a, b, out, 1) and np.array_equal(out, expected)


def random_like(x, rng):
    """Normal random numbers in an array of the shape, dtype and order of dimensions of x."""
    y = np.empty_like(x)
    y[...] = rng.standard_normal(x.shape, x.dtype)
    return y


@functools.cache
def blas_libraries():
    """threadpoolctl's controllers of this process's BLAS libraries; limit_blas() searches for them in each call."""
    return threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers


def check_bf16(blas):
    """Raise ConfigError unless --precision bf16 is possible with this --blas on this CPU."""
    if blas == "openblas":
        raise ConfigError("`blas=openblas` cannot multiply in `precision=bf16`: use `blas=mkl` or `precision=fp32`")
    if not has_amx():
        raise ConfigError(
            f"`precision=bf16` needs amx_bf16 in the flags of /proc/cpuinfo, and {processor()} does not list it: use "
            f"`precision=fp32`, or a GPU stage"
        )
    try:
        mkl.load()
    except ConfigError as error:
        reason = str(error).removeprefix("`blas=mkl`: ")
        raise ConfigError(f"`precision=bf16`: {reason} and `precision=fp32`") from None


def has_amx():
    """Whether this CPU has instructions that multiply bf16 matrices; also False if this is not known."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
