"""From the three numbers that cross-entropy keeps of each row to the loss: see cross_entropy.py and ops.py.

loss = scale sum over rows of (log(sum) - (picked - highest)),  sum = own sums exp(own maxima - highest)
"""

# N rows

import triton
import triton.language as tl

from stage2_cuda.kernels.segment_sum import totals
from stage2_cuda.runtime.triton_launch import launch

ROWS, TILE = 4096, 1024  # of one program, and of one step of it


def partials_shape(n):
    """The shape (P) of the float64 scratch of loss()."""
    return (triton.cdiv(n, ROWS),)


def rescale(out, maxima, sums, picked, highest):
    """out (2, N) = sums exp(maxima - highest), and picked; all (N) float32."""
    n = maxima.size
    launch(rescale_kernel, (triton.cdiv(n, TILE),), out, maxima, sums, picked, highest, n, TILE=TILE, num_warps=4)


def loss(out, partials, sums, picked, highest, scale):
    """out (1) float64 = the loss of N rows, whose logits' maxima are `highest`; partials: of partials_shape(N)."""
    n, programs = highest.size, partials.size
    arguments = partials if programs > 1 else out, sums, picked, highest, n, float(scale)
    launch(loss_kernel, (programs,), *arguments, ROWS=ROWS, TILE=TILE, num_warps=8)
    if programs > 1:
        totals(out, partials)


@triton.jit
def rescale_kernel(out, maxima, sums, picked, highest, n, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    own = row < n
    ratio = tl.exp(tl.load(maxima + row, own, 0) - tl.load(highest + row, own, 0))
    tl.store(out + row, tl.load(sums + row, own, 0) * ratio, own)
    tl.store(out + n + row, tl.load(picked + row, own, 0), own)


@triton.jit
def loss_kernel(out, sums, picked, highest, n, scale, ROWS: tl.constexpr, TILE: tl.constexpr):
    total = tl.zeros((TILE,), tl.float64)
    for start in tl.range(0, ROWS, TILE):
        row = tl.program_id(0) * ROWS + start + tl.arange(0, TILE)
        own = row < n
        rows = tl.log(tl.load(sums + row, own, 1)) - (tl.load(picked + row, own, 0) - tl.load(highest + row, own, 0))
        total += rows.to(tl.float64)
    tl.store(out + tl.program_id(0), tl.sum(total, 0) * scale)
