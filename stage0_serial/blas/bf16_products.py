"""--precision bf16: the large products round their operands to bf16, which matrix units (Intel's AMX) multiply fast.

All arrays stay float32, also the result and the sums of a product. So bf16 is a choice of the product, and the other
kernels are those of fp32.
"""

# M, K, N: a product multiplies (M, K) with (K, N)

import numpy as np

from stage0_serial.blas import mkl
from stage0_serial.buffer_pool import BufferPool
from stage0_serial.rows import block_rows, blocks

MIN_ROWS = 32  # with fewer rows, rounding the weight takes about as long as the product in float32
HALF_UNIT = np.array(1 << 15, np.uint32)  # half a unit in the last place of bf16, as bits of a float32


class Bf16Products:
    """Called as products(a (M, K), b (K, N), out=array (M, N)): float32 operands are rounded to bf16, `out` is float32.

    few_rows: the product of float32 operands with M < MIN_ROWS. Not thread-safe: the memory of operands is reused.
    """

    def __init__(self, few_rows):
        self.few_rows, self.pool = few_rows, BufferPool()

    def __call__(self, a, b, out):
        if len(a) < MIN_ROWS and mkl.BF16 not in (a.dtype, b.dtype):
            return self.few_rows(a, b, out=out)
        return mkl.product(self.rounded(a), self.rounded(b), out)

    def rounded(self, x):
        """x (n, m) float32 -> (n, m) BF16, rounded to nearest, ties away from zero; x itself if it is BF16.

        Infinities stay, and NaN too: arithmetic on x86 and NumPy make no other NaN than 0x7fc00000 and 0xffc00000, and
        checkpoints with NaN are refused.
        """
        if x.dtype == mkl.BF16:
            return x
        if x.strides[0] < x.strides[1]:
            return self.rounded(x.T).T
        y, columns, length = self.pool.empty(x.shape, np.uint16), x.shape[1], block_rows(x) * x.shape[1]
        memory = self.pool.empty((length + 1,), np.uint32)
        sums = memory[:-1].reshape(-1, columns)
        # `upper` is the same memory, two bytes later. On a little-endian CPU its lower halves are the upper halves of
        # `sums`, and conversion to uint16 keeps the lower half. This takes less time than a shift and a conversion.
        upper = memory.view(np.uint8)[2:-2].view(np.uint32).reshape(-1, columns)
        for block in blocks(x):
            n = block.stop - block.start
            np.add(x[block].view(np.uint32), HALF_UNIT, out=sums[:n])
            np.copyto(y[block], upper[:n], casting="unsafe")
        return y.view(mkl.BF16)
