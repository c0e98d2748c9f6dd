"""The product of one row with a weight, the main cost of a generated token: the fastest of several ways.

A product of one row reads each element of the weight once, so its time is that of reading memory. The fastest way
differs between CPUs: on AMD Zen 4 it is einsum, on an Intel Xeon it is BLAS. Therefore the ways are timed when a weight
of a new shape is used first, and the choice is kept in a file (timed_choice.py).
"""

import functools

import numpy as np

from stage0_serial.blas import mkl
from stage0_serial.generation.timed_choice import fastest_way, stored_choice

MIN_ELEMENTS = 1 << 16  # of a weight for which the ways are timed; a product with a smaller one is a short call of BLAS
MAX_EINSUM = 1 << 14  # rows of the weight: einsum adds them one by one, which is inaccurate for long sums
PART = 384  # rows of the weight in one product of in_parts()
SECONDS = 0.02  # for which each way is timed
MEMORY = 1 << 25  # bytes of copies of the weight that are timed in turn, so that they are not in the first cache levels


class RowProducts:
    """Called as row_products(x (1, C), w (C, K), y (1, K)): writes x @ w to y. runtime: a CpuRuntime."""

    def __init__(self, runtime):
        self.runtime, self.ways = runtime, {}  # {layout of a weight: the way that was chosen, a function}
        self.names = {}  # {description of a layout: the name of the way}

    def __call__(self, x, w, y):
        layout = w.shape, w.strides, w.dtype
        if layout not in self.ways:
            self.ways[layout] = self.choose(x, w, y)
        self.ways[layout](x, w, y)
        return y

    def choose(self, x, w, y):
        """The way for weights like w: from the file, or the fastest one, which is then added to the file."""
        ways = self.candidates(w)
        if len(ways) == 1 or w.size < MIN_ELEMENTS:
            return ways["blas"]
        order = "by rows" if w.flags.c_contiguous else "by columns"
        what = f"one row, {w.dtype} {w.shape[0]} x {w.shape[1]} stored {order}, threads {self.runtime.threads}"
        what += ", with MKL" if "mkl" in ways else ""
        self.names[what] = name = stored_choice(what, ways, lambda: fastest(ways, x, w, y))
        return ways[name]

    def candidates(self, w):
        """{name: function(x, w, y)} of the ways for weights like w."""
        ways = {"blas": lambda x, w, y: np.matmul(x, w, out=y)}
        if w.flags.c_contiguous and len(w) <= MAX_EINSUM:
            ways["einsum"] = lambda x, w, y: np.einsum("nc,ck->nk", x, w, out=y)
        if w.flags.c_contiguous and len(w) > PART and len(w) % PART == 0:
            ways["parts"] = in_parts
        if self.runtime.blas == "mkl":
            ways["mkl"] = mkl.product
        if self.runtime.threads > 1:
            ways["blas, one thread"] = self.on_one_thread
        return ways

    def on_one_thread(self, x, w, y):
        """Write x @ w to y by BLAS on one thread."""
        with self.runtime.one_blas_thread():
            np.matmul(x, w, out=y)


def in_parts(x, w, y):
    """Write x @ w to y as a sum of products with PART rows of w each: BLAS reads a matrix with few rows faster."""
    n = len(w) // PART
    np.matmul(x.reshape(n, 1, PART), w.reshape(n, PART, -1)).sum(axis=0, out=y)


def fastest(ways, x, w, y):
    """The name of the way that takes the least time with weights like w that are not in the first cache levels."""
    copies = [w] + [w.copy(order="K") for _ in range(min(MEMORY // w.nbytes, 64))]

    def each_copy(way):
        for copy in copies:
            way(x, copy, y)

    return fastest_way({name: functools.partial(each_copy, way) for name, way in ways.items()}, SECONDS)
