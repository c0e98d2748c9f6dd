"""AdamW in one kernel, and before it the gradient norm and clipping, all on the device.

The parameters p, their gradients g and the moments m and v are slices of arenas: flat buffers that hold all parameters
one after the other (gpt2core/arena.py).

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2                           (Loshchilov and Hutter 2019)
    p = (1 - lr weight_decay) p - rate m / (sqrt(v) + eps'),  rate = lr sqrt(c2) / c1,  eps' = eps sqrt(c2)

with c1 = 1 - beta1^step and c2 = 1 - beta2^step. A CUDA graph of the step is replayed with the same kernel arguments.
Therefore the kernels read every value that changes from step to step from device memory. The host uploads three
coefficients and the key of stochastic rounding; clip_scale() computes the argument `factor` from the gradient norm.
"""

import triton
import triton.language as tl

from stage2_cuda.kernels.rounding import stochastic_bf16
from stage2_cuda.runtime.triton_launch import launch

BLOCK = 1024  # elements per program: one page of the arena; weight decay applies to all elements of a page or to none
PAGES_PER_PROGRAM = 2  # pages whose squares one program of squares_kernel adds


def adamw_step(p, m, v, compute_copy, g, coefficients, factor, decay_flags, beta1, beta2, philox_key=None, offset=0):
    """Update p, m, v (n) float32 with the gradient g (n) float32 * factor. If factor is NaN, do nothing.

    compute_copy (n): receives the new p, rounded to nearest in the dtype of compute_copy; None: no copy is written.
    coefficients (3): the result [rate, eps', 1 - lr weight_decay] of gpt2core.optimizer.AdamW.coefficients() on the
    device, float32 or float64 (rounded to float32 here). factor (1) float32 on the device; None means 1.
    decay_flags (n / 1024) integers: nonzero for a block of 1024 elements with weight decay; None: all blocks have it.
    philox_key (1) int64: rounding_key() of gpt2core, on the device, for stochastic rounding of the copy, or None.
    With a key, compute_copy is uint16 and receives the bits of bfloat16 numbers; `offset` is the arena index of p[0].
    """
    arguments = p, m, v, compute_copy, g, coefficients, factor, decay_flags, p.size
    betas = float(beta1), float(1 - beta1), float(beta2), float(1 - beta2)
    grid = (triton.cdiv(p.size, BLOCK),)
    launch(adamw_kernel, grid, *arguments, *betas, philox_key, offset, BLOCK=BLOCK, num_warps=4)


def page_sums(out, flat):
    """out (n / 1024) float32 = the sum of squares of each page of 1024 elements of flat (n), any float dtype.

    Raises ValueError unless flat consists of whole pages.
    """
    if flat.size != out.size * BLOCK:
        raise ValueError(f"{flat.size} elements are not {out.size} pages of {BLOCK}")
    if out.size:
        grid = (triton.cdiv(out.size, PAGES_PER_PROGRAM),)
        options = dict(PAGES_PER_PROGRAM=PAGES_PER_PROGRAM, BLOCK=BLOCK, num_warps=4)
        launch(squares_kernel, grid, out, flat, out.size, **options)


def clip_scale(factor, norm, squares, max_norm, loss_scale=None, growth_interval=0, stop=None):
    """norm (1) float32 = sqrt(the sum of `squares`); factor (1) float32 = min(1, max_norm / (norm + 1e-6)).

    squares (S) float64: the sums of equal segments of page_sums() (segment_sum.py). max_norm 0: no clipping,
    factor is 1. If the norm is infinity or NaN, factor is NaN, and adamw_step() then changes nothing.
    loss_scale (2) float32 [scale, finite_steps], or None without dynamic loss scaling. The gradients are `scale` times
    too large, so norm and factor are divided by `scale`. This function also updates the array: `scale` is halved if
    the norm is not finite, and doubled after `growth_interval` finite norms in a row, which `finite_steps` counts. stop
    (1) float32, at first 0, or None. A norm that is not finite sets `stop` to NaN. Each later call adds `stop` to
    factor, so all later steps change nothing, also those that the host started before it read the norm.
    """
    arguments = factor, norm, squares, loss_scale, stop, squares.size, float(max_norm), float(growth_interval)
    launch(clip_kernel, (1,), *arguments, BLOCK=triton.next_power_of_2(squares.size), num_warps=1)


@triton.jit
def adamw_kernel(
    p_ptr, m_ptr, v_ptr, compute_copy_ptr, g_ptr, coefficients_ptr, factor_ptr, decay_flags_ptr, n,
    beta1, one_minus_beta1, beta2, one_minus_beta2, philox_key_ptr, offset, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (n / BLOCK): each program updates one block of p, m, v and compute_copy. Arguments as in adamw_step()."""
    block = tl.program_id(0)
    offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.load(coefficients_ptr).to(tl.float32)
    eps = tl.load(coefficients_ptr + 1).to(tl.float32)
    decay = tl.load(coefficients_ptr + 2).to(tl.float32)  # 1 - lr weight_decay
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
        n = tl.where(factor >= 0, n, 0)  # NaN >= 0 is false: the mask is then false everywhere, nothing is stored
    if decay_flags_ptr is not None:
        decay = tl.where(tl.load(decay_flags_ptr + block) != 0, decay, 1.0)
    mask = offs < n
    g = tl.load(g_ptr + offs, mask, 0) * factor
    m = beta1 * tl.load(m_ptr + offs, mask, 0) + one_minus_beta1 * g
    v = beta2 * tl.load(v_ptr + offs, mask, 0) + one_minus_beta2 * g * g
    p = decay * tl.load(p_ptr + offs, mask, 0) - rate * (m / (tl.sqrt(v) + eps))
    tl.store(m_ptr + offs, m, mask)
    tl.store(v_ptr + offs, v, mask)
    tl.store(p_ptr + offs, p, mask)
    if compute_copy_ptr is not None:
        if philox_key_ptr is not None:
            p = stochastic_bf16(p, philox_key_ptr, offset + block.to(tl.int64) * BLOCK, BLOCK)
        tl.store(compute_copy_ptr + offs, p, mask)  # a float32 p is rounded to nearest here; uint16 bits stay unchanged


@triton.jit
def squares_kernel(partials_ptr, flat_ptr, n_pages, PAGES_PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (n_pages / PAGES_PER_PROGRAM): partials[i] float32 = the sum of squares of page i of flat."""
    blocks = tl.program_id(0) * PAGES_PER_PROGRAM + tl.arange(0, PAGES_PER_PROGRAM)
    mask = blocks < n_pages
    offs = blocks.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(flat_ptr + offs, mask[:, None], 0).to(tl.float32)
    tl.store(partials_ptr + blocks, tl.sum(x * x, 1), mask)


@triton.jit
def clip_kernel(
    factor_ptr, norm_ptr, squares_ptr, loss_scale_ptr, stop_ptr, n, max_norm, growth_interval, BLOCK: tl.constexpr
):
    """Grid (1): one program computes clip_scale(). n: the number of squares, at most BLOCK."""
    offs = tl.arange(0, BLOCK)
    norm = tl.sqrt(tl.sum(tl.load(squares_ptr + offs, offs < n, 0), 0)).to(tl.float32)
    unscale = 1.0  # 1 / loss_scale, for the gradients of this step
    if loss_scale_ptr is not None:
        loss_scale, finite_steps = tl.load(loss_scale_ptr), tl.load(loss_scale_ptr + 1) + 1
        unscale /= loss_scale
        # not doubled above 1e38: the result would not be a finite float32
        grown = tl.where((finite_steps >= growth_interval) & (loss_scale < 1.0e38), 2 * loss_scale, loss_scale)
        overflow = ~(norm < float("inf"))  # infinity or NaN
        tl.store(loss_scale_ptr, tl.where(overflow, loss_scale / 2, grown))
        tl.store(loss_scale_ptr + 1, tl.where(overflow | (finite_steps >= growth_interval), 0.0, finite_steps))
    norm *= unscale
    factor = unscale * tl.where(max_norm > 0, tl.minimum(1.0, max_norm / (norm + 1e-6)), 1.0)
    factor = tl.where(norm < float("inf"), factor, float("nan"))
    if stop_ptr is not None:
        factor += tl.load(stop_ptr)
        tl.store(stop_ptr, tl.where(norm < float("inf"), tl.load(stop_ptr), float("nan")))
    tl.store(norm_ptr, norm)
    tl.store(factor_ptr, factor)
