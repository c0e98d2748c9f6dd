"""The worker threads that compute new positions together: each has some columns of a weight, and some of the attention.

    LayerNorm                           all rows, in each worker
    product with a weight               some columns
    attention of several sequences      some of the sequences
    attention of fewer sequences        some heads of each of them

A worker reads only its columns, so that together they read each weight once, also if there are few rows. They wait for
each other after each product and after attention. The logits have the same bits for any number of workers: OpenBLAS
computes a column from the same numbers in the same order, unless a product is small. So small products are not divided;
the first worker computes them. LayerNorm is not divided, because its bits depend on the place of a row in its block.
"""

import numpy as np

from gpt2core.data import even_slices
from gpt2core.threads import leaving

# Multiplications of a worker in a product. With a million or fewer, OpenBLAS uses another kernel, whose long sums have
# another order.
MIN_PART = 1 << 20
ALL = slice(None)  # the columns of the only worker
COLUMNS = 16  # a worker has a multiple of so many columns: BLAS computes the columns after the last multiple otherwise


class Worker:
    """Number `index` of `count` workers. barrier: a threading.Barrier of all of them."""

    def __init__(self, index, count, barrier):
        self.index, self.count, self.barrier = index, count, barrier

    def wait(self):
        """Wait until all workers have called wait(); raises BrokenBarrierError if one of them has failed."""
        self.barrier.wait()

    def run(self, function, *arguments):
        """function(*arguments, self); an error lets the calls of the other workers return soon."""
        with leaving(self.barrier):
            return function(*arguments, self)

    def columns(self, rows, w):
        """The slice of the columns of w (C, K) with which this worker multiplies so many rows; it may be empty."""
        (C, K), full = w.shape, w.shape[1] // COLUMNS
        too_small = rows * C * (full // self.count) * COLUMNS < MIN_PART
        if too_small or (w.dtype == np.float64 and K % COLUMNS):  # the bits of the last columns would differ
            return slice(0, K if self.index == 0 else 0)
        part = even_slices(-(-K // COLUMNS), self.count)[self.index]
        return slice(part.start * COLUMNS, min(part.stop * COLUMNS, K))

    def part(self, sequences, heads):
        """The slices of the sequences and of the heads whose attention this worker computes; one may be empty."""
        if sequences < self.count:
            return slice(0, sequences), even_slices(heads, self.count)[self.index]
        return even_slices(sequences, self.count)[self.index], slice(0, heads)


class OnlyWorker(Worker):
    """The only worker: it has all columns, sequences and heads."""

    def __init__(self):
        super().__init__(0, 1, None)

    def wait(self):
        """Return at once."""

    def columns(self, rows, w):
        return ALL

    def part(self, sequences, heads):
        return slice(0, sequences), slice(0, heads)


def worker_count(rows, size, threads):
    """The largest number of workers, up to `threads`, that divide the product of so many rows with `size` elements."""
    return max(1, min(threads, rows * size // MIN_PART))
