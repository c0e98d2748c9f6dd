"""Causal attention over a KV cache: new queries attend to the keys kept so far and to their own, any number of both.

A program for M new rows of a head walks over the cache, then over the new keys up to the diagonal, with the steps of
attention.py. It is for layers that are divided over ranks and for what engine.py does not take; the engine's own
kernels are those of decode.py.
"""

# B batch, t new positions, C channels, H heads, D = C // H head size, in a kernel rounded up to a power of two

import math

import triton
import triton.language as tl

from gpt2core.errors import ConfigError
from stage2_cuda.kernels.attention import (
    LOG2E,
    TileConfig,
    causal_mask,
    padded_head_size,
    shapes_and_tiles,
    softmax_step,
)
from stage2_cuda.runtime.triton_launch import launch

TILE = TileConfig(16, 64, 4, 2)  # new queries by keys; a guess


@triton.jit
def load_new(qkv, rows, dims, t, C, D: tl.constexpr):
    """Rows of q, k or v out of qkv, which points to the first row of a head: (rows, dims)."""
    inside = (rows < t)[:, None] & (dims < D)[None, :]
    return tl.load(qkv + rows.to(tl.int64)[:, None] * 3 * C + dims[None, :], mask=inside, other=0.0)


@triton.jit
def attend(acc, peak, total, q, k, v, visible, scale, PRECISION: tl.constexpr):
    """Let the queries q (M, D) attend to those of the keys k and values v (N, D) that are visible."""
    s = tl.where(visible, tl.dot(q, k.T, input_precision=PRECISION), float("-inf"))  # (M, N)
    p, peak, total, acc = softmax_step(s, peak, total, acc, scale)
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION), peak, total


@triton.jit(do_not_specialize=["position"])
def cached_kernel(
    y, keys, values, qkv, position, t, H, block, scale,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of M new rows, and their k and v into the caches; SIZE is the head size, D it rounded up.

    Other programs write the caches from `position` on meanwhile: the new keys and values are read out of qkv.
    """
    C = H * SIZE
    b, h, head = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(0).to(tl.int64) * SIZE * block
    rows, dims = tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, D)
    new = (rows < t)[:, None] & (dims < SIZE)[None, :]  # (M, D)
    first = b.to(tl.int64) * t
    qkv += first * 3 * C + h * SIZE
    keys += head
    values += head

    slots = position + rows
    new_k, new_v = load_new(qkv + C, rows, dims, t, C, SIZE), load_new(qkv + 2 * C, rows, dims, t, C, SIZE)
    tl.store(keys + dims[None, :] * block + slots[:, None], new_k, mask=new)  # (D, block): keys are kept transposed
    tl.store(values + slots[:, None] * SIZE + dims[None, :], new_v, mask=new)

    q = load_new(qkv, rows, dims, t, C, SIZE)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for n in tl.range(0, position, N):
        old = n + tl.arange(0, N)
        inside = (old < position)[:, None] & (dims < SIZE)[None, :]  # (N, D)
        k = tl.load(keys + dims[None, :] * block + old[:, None], mask=inside, other=0.0)
        v = tl.load(values + old[:, None] * SIZE + dims[None, :], mask=inside, other=0.0)
        acc, peak, total = attend(acc, peak, total, q, k, v, (old < position)[None, :], scale, PRECISION)
    for n in tl.range(0, tl.minimum(tl.program_id(1) * M + M, t), N):
        columns = n + tl.arange(0, N)
        k, v = load_new(qkv + C, columns, dims, t, C, SIZE), load_new(qkv + 2 * C, columns, dims, t, C, SIZE)
        acc, peak, total = attend(acc, peak, total, q, k, v, causal_mask(rows, columns), scale, PRECISION)
    y += first * C + h * SIZE
    y += rows.to(tl.int64)[:, None] * C + dims[None, :]
    tl.store(y, (acc / total[:, None]).to(y.dtype.element_ty), mask=new)


def attention_cached(y, qkv, keys, values, position, n_head, precision="ieee"):
    """qkv (B, t, 3C) of positions [position, position + t) -> y (B, t, C), attending to all positions so far.

    Writes k and v into the caches, keys (B, H, D, block) and values (B, H, block, D).
    """
    B, t, D, _ = shapes_and_tiles(qkv, n_head, precision)
    block = keys.shape[3]
    if position + t > block:
        raise ConfigError(f"a cache of {block} positions has no room for {t} more after {position}")
    arguments = y, keys, values, qkv, position, t, n_head, block, LOG2E.value / math.sqrt(D)
    grid = B * n_head, triton.cdiv(t, TILE.block_m)
    tile = dict(
        M=TILE.block_m, N=TILE.block_n, D=padded_head_size(D), num_warps=TILE.num_warps, num_stages=TILE.num_stages
    )
    launch(cached_kernel, grid, *arguments, SIZE=D, PRECISION=precision, **tile)
