"""AdamW on a slice of the arena in one kernel, and the gradient norm and clipping before it, all on the device.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2                           (Loshchilov and Hutter 2019)
    p = (1 - lr weight_decay) p - rate m / (sqrt(v) + eps'),  rate = lr sqrt(c2) / c1,  eps' = eps sqrt(c2)

with c1 = 1 - beta1^step and c2 = 1 - beta2^step. A CUDA graph of the step is replayed with the same kernel arguments,
so everything that changes from step to step is read from device memory: three scalars and the key of stochastic
rounding, from the host, and the gradient scale that clip_scale() computes from the norm.
"""

import triton
import triton.language as tl

from stage2_cuda.kernels.rounding import stochastic_bf16
from stage2_cuda.kernels.segment_sum import segment_sum
from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements per program: one block of the arena, whose elements share one weight decay flag
SQUARES_BLOCKS = 2  # blocks per program of squares_kernel


def adamw_step(p, m, v, copy, g, scalars, grad_scale, decays, beta1, beta2, philox_key=None, offset=0):
    """Update p, m, v (n) float32 in place with the gradient g (n) float32 * grad_scale, unless grad_scale is NaN.

    copy (n): receives p in the compute dtype, rounded to nearest; None: no copy. scalars (3): gpt2core.optimizer's
    adamw_scalars() on the device, [rate, eps', 1 - lr weight_decay], float32 or float64 (rounded to float32 here).
    grad_scale (1) float32 on the device, or None for 1.
    decays (n / 1024) integers: nonzero if weight decay applies to the block, or None for all blocks.
    philox_key (1) int64: gpt2core.optimizer.rounding_key() on the device, or None. With it copy is uint16, the bits of
    bfloat16 rounded stochastically, and `offset` is the arena index of p's first element.
    """
    arguments = p, m, v, copy, g, scalars, grad_scale, decays, p.size
    betas = float(beta1), float(1 - beta1), float(beta2), float(1 - beta2)
    grid = (triton.cdiv(p.size, BLOCK),)
    launch(adamw_kernel, grid, *arguments, *betas, philox_key, offset, BLOCK=BLOCK, num_warps=4)


def sum_of_squares(out, partials, flat):
    """out (S) float64 = the sum of squares of each of the S equal segments of flat (n), any float dtype.

    partials: float32 scratch (n / 1024), one sum for each block of 1024 elements. The bits of a segment's sum depend
    only on that segment. Raises ValueError unless n is S times a whole number of blocks.
    """
    segments, blocks = out.size, flat.size // BLOCK
    if not segments:
        return
    if flat.size != blocks * BLOCK or blocks % segments:
        raise ValueError(f"{flat.size} elements are not {segments} equal segments of whole blocks of {BLOCK}")
    grid = (triton.cdiv(blocks, SQUARES_BLOCKS),)
    launch(squares_kernel, grid, partials, flat, blocks, BLOCKS=SQUARES_BLOCKS, BLOCK=BLOCK, num_warps=4)
    segment_sum(out, partials)


def clip_scale(grad_scale, norm, squares, max_norm, loss_scale=None, growth_interval=0, stop=None):
    """norm (1) float32 = sqrt(sum of squares); grad_scale (1) float32 = min(1, max_norm / (norm + 1e-6)).

    squares: any number of float64 sums of squares. max_norm 0: no clipping, grad_scale 1. If the norm is not finite,
    grad_scale is NaN, and adamw_step skips the step.
    loss_scale (2) float32 [scale, finite steps] or None: dynamic loss scaling. The gradients are `scale` times too
    large, so norm and grad_scale are divided by `scale`. `scale` is halved if the norm is not finite, and doubled after
    `growth_interval` finite norms in a row, which `finite steps` counts.
    stop (1) float32 or None: `stop` is added to grad_scale and becomes NaN when the norm is not finite, so that all
    later steps are skipped too.
    """
    arguments = grad_scale, norm, squares, loss_scale, stop, squares.size, float(max_norm), float(growth_interval)
    launch(clip_kernel, (1,), *arguments, BLOCK=triton.next_power_of_2(squares.size), num_warps=1)


@triton.jit
def adamw_kernel(
    p_ptr, m_ptr, v_ptr, copy_ptr, g_ptr, scalars_ptr, grad_scale_ptr, decays_ptr, n,
    beta1, one_minus_beta1, beta2, one_minus_beta2, philox_key_ptr, offset, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.load(scalars_ptr).to(tl.float32)
    eps = tl.load(scalars_ptr + 1).to(tl.float32)
    decay = tl.load(scalars_ptr + 2).to(tl.float32)  # 1 - lr weight_decay
    grad_scale = 1.0
    if grad_scale_ptr is not None:
        grad_scale = tl.load(grad_scale_ptr)
        n = tl.where(grad_scale >= 0, n, 0)  # false for NaN, a gradient that is not finite: then nothing is written
    if decays_ptr is not None:
        decay = tl.where(tl.load(decays_ptr + block) != 0, decay, 1.0)
    mask = offs < n
    g = tl.load(g_ptr + offs, mask, 0) * grad_scale
    m = beta1 * tl.load(m_ptr + offs, mask, 0) + one_minus_beta1 * g
    v = beta2 * tl.load(v_ptr + offs, mask, 0) + one_minus_beta2 * g * g
    p = decay * tl.load(p_ptr + offs, mask, 0) - rate * (m / (tl.sqrt(v) + eps))
    tl.store(m_ptr + offs, m, mask)
    tl.store(v_ptr + offs, v, mask)
    tl.store(p_ptr + offs, p, mask)
    if copy_ptr is not None:
        if philox_key_ptr is not None:
            p = stochastic_bf16(p, philox_key_ptr, offset + block.to(tl.int64) * BLOCK, BLOCK)
        tl.store(copy_ptr + offs, p, mask)  # float32 is rounded to nearest here; the bits in uint16 are stored as is


@triton.jit
def squares_kernel(partials_ptr, flat_ptr, n_blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    mask = blocks < n_blocks
    offs = blocks.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(flat_ptr + offs, mask[:, None], 0).to(tl.float32)
    tl.store(partials_ptr + blocks, tl.sum(x * x, 1), mask)


@triton.jit
def clip_kernel(
    grad_scale_ptr, norm_ptr, squares_ptr, loss_scale_ptr, stop_ptr, n, max_norm, growth_interval, BLOCK: tl.constexpr
):
    offs = tl.arange(0, BLOCK)
    norm = tl.sqrt(tl.sum(tl.load(squares_ptr + offs, offs < n, 0), 0)).to(tl.float32)
    unscale = 1.0  # 1 / loss scale
    if loss_scale_ptr is not None:
        loss_scale, finite_steps = tl.load(loss_scale_ptr), tl.load(loss_scale_ptr + 1) + 1
        unscale /= loss_scale
        # doubled only if the result is finite
        grown = tl.where((finite_steps >= growth_interval) & (loss_scale < 1.0e38), 2 * loss_scale, loss_scale)
        overflow = ~(norm < float("inf"))  # infinity or NaN
        tl.store(loss_scale_ptr, tl.where(overflow, loss_scale / 2, grown))
        tl.store(loss_scale_ptr + 1, tl.where(overflow | (finite_steps >= growth_interval), 0.0, finite_steps))
    norm *= unscale
    grad_scale = unscale * tl.where(max_norm > 0, tl.minimum(1.0, max_norm / (norm + 1e-6)), 1.0)
    grad_scale = tl.where(norm < float("inf"), grad_scale, float("nan"))
    if stop_ptr is not None:
        grad_scale += tl.load(stop_ptr)
        tl.store(stop_ptr, tl.where(norm < float("inf"), tl.load(stop_ptr), float("nan")))
    tl.store(norm_ptr, norm)
    tl.store(grad_scale_ptr, grad_scale)
