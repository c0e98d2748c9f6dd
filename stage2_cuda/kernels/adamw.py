"""AdamW over a slice of the arena in one launch, and the norm and the clipping that come before it, all on the device.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2                           (Loshchilov and Hutter 2019)
    p = (1 - lr weight_decay) p - rate m / (sqrt(v) + eps'),  rate = lr sqrt(c2) / c1,  eps' = eps sqrt(c2)

with c = 1 - beta^step. What changes from step to step is read from device memory, so that a CUDA graph of the step can
be replayed: three numbers from the host, and the factor of the gradient, which the norm decides.
"""

import math

import numpy as np
import triton
import triton.language as tl

from stage2_cuda.kernels.rounding import stochastic_bf16
from stage2_cuda.kernels.segment_sum import totals
from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements of one program: a block of the arena, which has one weight decay
ROWS = 2  # blocks that one program squares and adds


def adamw_scalars(step, lr, beta1, beta2, eps, weight_decay):
    """[rate, eps', 1 - lr weight_decay] as float32 (3), for the device; `step` counts from 1."""
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    return np.array([lr / c1 * math.sqrt(c2), eps * math.sqrt(c2), 1 - lr * weight_decay], np.float32)


def adamw_step(p, m, v, copy, g, scalars, grad_scale, decays, beta1, beta2, key=None, offset=0):
    """Update p, m, v (n) float32 in place from g (n) float32 * grad_scale (1); where grad_scale is NaN, not at all.

    copy (n): p in the precision of the kernels, or None; scalars (3): adamw_scalars on the device; grad_scale: an array
    on the device, or None for 1; decays (n / 1024) integers: whether weight decay applies to a block, None for yes.
    key: of rounding.key_of(), on the device: copy is uint16 then, the bits of bf16, stochastically rounded, and offset
    is the number of p's first element in the arena.
    """
    arguments = p, m, v, copy, g, scalars, grad_scale, decays, p.size
    betas = float(beta1), float(1 - beta1), float(beta2), float(1 - beta2)
    launch(adamw_kernel, (triton.cdiv(p.size, BLOCK),), *arguments, *betas, key, offset, BLOCK=BLOCK, num_warps=4)


def sum_of_squares(out, partials, flat):
    """out (segments) float64: one sum of squares for each equal part of flat (n), 1024 elements at a time in float32.

    partials: float32 scratch (n / 1024). The bits of a part depend on nothing but the part.
    """
    segments, blocks = out.size, flat.size // BLOCK
    if not segments:
        return
    if flat.size != blocks * BLOCK or blocks % segments:
        raise ValueError(f"{segments} equal segments of whole blocks of {BLOCK} do not make {flat.size} elements")
    launch(squares_kernel, (triton.cdiv(blocks, ROWS),), partials, flat, blocks, ROWS=ROWS, BLOCK=BLOCK, num_warps=4)
    totals(out, partials)


def clip_scale(grad_scale, norm, squares, clip, loss_scale=None, interval=0, stop=None):
    """norm (1) float32 of the gradients whose sums of squares are `squares` (any number) float64; what clips it.

    grad_scale (1) float32 = min(1, clip / (norm + 1e-6)), or 1 for clip 0. Where the norm is not finite grad_scale is
    NaN, which skips the step. loss_scale (2) float32 or None: the gradients are loss_scale[0] times too large; it is
    halved where the norm is not finite, and doubled after `interval` finite ones, which loss_scale[1] counts. stop (1)
    float32 or None: 0, and NaN from the first norm on that is not finite; it is added to grad_scale.
    """
    width = triton.next_power_of_2(squares.size)
    arguments = grad_scale, norm, squares, loss_scale, stop, squares.size, float(clip), float(interval)
    launch(clip_kernel, (1,), *arguments, WIDTH=width, num_warps=1)


@triton.jit
def adamw_kernel(
    p, m, v, copy, g, scalars, grad_scale, decays, n, beta1, rest1, beta2, rest2, key, offset, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rate, eps = tl.load(scalars).to(tl.float32), tl.load(scalars + 1).to(tl.float32)
    shrink = tl.load(scalars + 2).to(tl.float32)
    scale = 1.0
    if grad_scale is not None:
        scale = tl.load(grad_scale)
        n = tl.where(scale >= 0, n, 0)  # not so for NaN: the gradient is not finite, and nothing is written
    if decays is not None:
        shrink = tl.where(tl.load(decays + block) != 0, shrink, 1.0)
    mask = at < n
    gradient = tl.load(g + at, mask, 0) * scale
    first = beta1 * tl.load(m + at, mask, 0) + rest1 * gradient
    second = beta2 * tl.load(v + at, mask, 0) + rest2 * gradient * gradient
    new = shrink * tl.load(p + at, mask, 0) - rate * (first / (tl.sqrt(second) + eps))
    tl.store(m + at, first, mask)
    tl.store(v + at, second, mask)
    tl.store(p + at, new, mask)
    if copy is not None:
        if key is not None:
            new = stochastic_bf16(new, key, offset + block.to(tl.int64) * BLOCK, BLOCK)
        tl.store(copy + at, new, mask)  # else rounded to nearest


@triton.jit
def squares_kernel(partials, flat, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(flat + at, (block < blocks)[:, None], 0).to(tl.float32)
    tl.store(partials + block, tl.sum(x * x, 1), block < blocks)


@triton.jit
def clip_kernel(grad_scale, norm, squares, loss_scale, stop, count, clip, interval, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    length = tl.sqrt(tl.sum(tl.load(squares + at, at < count, 0), 0)).to(tl.float32)
    unit = 1.0
    if loss_scale is not None:
        factor, finite = tl.load(loss_scale), tl.load(loss_scale + 1) + 1
        unit /= factor
        grown = tl.where((finite >= interval) & (factor < 1.0e38), 2 * factor, factor)  # doubled it stays finite
        overflow = ~(length < float("inf"))  # NaN too
        tl.store(loss_scale, tl.where(overflow, factor / 2, grown))
        tl.store(loss_scale + 1, tl.where(overflow | (finite >= interval), 0.0, finite))
    length *= unit
    scale = unit * tl.where(clip > 0, tl.minimum(1.0, clip / (length + 1e-6)), 1.0)
    scale = tl.where(length < float("inf"), scale, float("nan"))
    if stop is not None:
        scale += tl.load(stop)
        tl.store(stop, tl.where(length < float("inf"), tl.load(stop), float("nan")))
    tl.store(norm, length)
    tl.store(grad_scale, scale)
