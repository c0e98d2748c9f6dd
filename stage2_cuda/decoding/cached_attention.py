"""Causal attention with a KV cache: t new queries attend to all cached keys, and causally to the t new keys.

A program computes M new rows (positions) of one head. It loops over the cached keys in blocks of N, then over the new
keys up to the diagonal, with the softmax steps of attention/forward.py. gpt2core.sampler.Decoder uses this
kernel where GpuDecoder cannot be used: with tensor parallelism or a large batch. GpuDecoder has other kernels for
attention (batched.py, single_row.py).
"""

# B batch, t new positions, C channels, H heads, D = C // H head size (cached_kernel: SIZE; D is the next power of two)

import math

import triton
import triton.language as tl

from gpt2core.errors import ConfigError
from stage2_cuda.attention.forward import LOG2E, causal_mask, softmax_step
from stage2_cuda.attention.launches import TileConfig, head_shape, padded_head_size
from stage2_cuda.runtime.triton_launch import launch

TILE = TileConfig(16, 64, 4, 2)  # 16 new queries by 64 keys; not tuned


@triton.jit
def load_new(qkv_ptr, rows, dims, t, C, SIZE: tl.constexpr):
    """The given rows of q, k or v of one head, (rows, dims); qkv_ptr: the address of this part in the first row."""
    mask = (rows < t)[:, None] & (dims < SIZE)[None, :]
    return tl.load(qkv_ptr + rows.to(tl.int64)[:, None] * 3 * C + dims[None, :], mask=mask, other=0.0)


@triton.jit
def attend(acc, row_max, row_sum, q, k, v, mask, scale, PRECISION: tl.constexpr):
    """One step of flash attention: the queries q (M, D) attend to the keys k (N, D) where `mask` is true.

    mask: (M, N) or (1, N). v (N, D): the values. Returns the new acc (M, D), row_max (M) and row_sum (M) of the online
    softmax (see softmax_step).
    """
    s = tl.where(mask, tl.dot(q, k.T, input_precision=PRECISION), float("-inf"))  # (M, N)
    p, row_max, row_sum, acc = softmax_step(s, row_max, row_sum, acc, scale)
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION), row_max, row_sum


@triton.jit(do_not_specialize=["position"])
def cached_kernel(
    y_ptr, keys_ptr, values_ptr, qkv_ptr, position, t, H, block, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y of M new rows of one head, and store their k and v in the caches.

    The new keys and values are read from qkv, not from the caches, because other programs write the caches at the same
    time. SIZE: head size; D: SIZE rounded up to a power of two.
    """
    C = H * SIZE
    b, h, head_offset = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * SIZE * block
    rows, dims = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, D)
    mask = (rows < t)[:, None] & (dims < SIZE)[None, :]  # (M, D)
    first_row = b.to(tl.int64) * t  # of this sequence in qkv and y
    qkv_ptr += first_row * 3 * C + h * SIZE
    keys_ptr += head_offset
    values_ptr += head_offset

    slots = position + rows  # indices in the caches
    new_k, new_v = load_new(qkv_ptr + C, rows, dims, t, C, SIZE), load_new(qkv_ptr + 2 * C, rows, dims, t, C, SIZE)
    tl.store(keys_ptr + dims[None, :] * block + slots[:, None], new_k, mask=mask)  # keys are cached as (D, block)
    tl.store(values_ptr + slots[:, None] * SIZE + dims[None, :], new_v, mask=mask)

    q = load_new(qkv_ptr, rows, dims, t, C, SIZE)
    row_max, row_sum = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for n in tl.range(0, position, N):
        cached = n + tl.arange(0, N)
        kv_mask = (cached < position)[:, None] & (dims < SIZE)[None, :]  # (N, D)
        k = tl.load(keys_ptr + dims[None, :] * block + cached[:, None], mask=kv_mask, other=0.0)
        v = tl.load(values_ptr + cached[:, None] * SIZE + dims[None, :], mask=kv_mask, other=0.0)
        cached_mask = (cached < position)[None, :]
        acc, row_max, row_sum = attend(acc, row_max, row_sum, q, k, v, cached_mask, scale, PRECISION)
    for n in tl.range(0, tl.minimum(tl.program_id(1) * M + M, t), N):
        columns = n + tl.arange(0, N)
        k, v = load_new(qkv_ptr + C, columns, dims, t, C, SIZE), load_new(qkv_ptr + 2 * C, columns, dims, t, C, SIZE)
        acc, row_max, row_sum = attend(acc, row_max, row_sum, q, k, v, causal_mask(rows, columns), scale, PRECISION)
    y_ptr += first_row * C + h * SIZE
    y_ptr += rows.to(tl.int64)[:, None] * C + dims[None, :]
    tl.store(y_ptr, (acc / row_sum[:, None]).to(y_ptr.dtype.element_ty), mask=mask)


def attention_cached(y, qkv, keys, values, position, n_head, precision="ieee"):
    """y (B, t, C) = causal attention of the new positions, position to position + t - 1, to all positions so far.

    qkv (B, t, 3C): q, k and v of the new positions. Stores k and v in the caches, keys (B, H, D, block) and values
    (B, H, block, D). precision: how tl.dot multiplies float32, "ieee", "tf32" or "tf32x3". Raises ConfigError if
    the caches have room for fewer than position + t positions.
    """
    B, t, D = head_shape(qkv, n_head)
    block = keys.shape[3]
    if position + t > block:
        raise ConfigError(f"a cache of {block} positions has no room for {t} more after {position}")
    arguments = y, keys, values, qkv, position, t, n_head, block, LOG2E.value / math.sqrt(D)
    grid = B * n_head, triton.cdiv(t, TILE.block_m)
    tile = dict(
        M=TILE.block_m, N=TILE.block_n, D=padded_head_size(D), num_warps=TILE.num_warps, num_stages=TILE.num_stages
    )
    launch(cached_kernel, grid, *arguments, SIZE=D, PRECISION=precision, **tile)
