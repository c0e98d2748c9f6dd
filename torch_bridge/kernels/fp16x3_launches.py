"""Launches of the kernels of attention_fp16x3.py, for separate float32 q, k and v of any strides."""

# Symbols: see attention_fp16x3.py

import math

import triton

from stage2_cuda.attention.forward import LOG2E
from stage2_cuda.attention.hopper_launches import mask_keys
from stage2_cuda.attention.launches import (
    AttentionTiles,
    TileConfig,
    descriptors,
    padded_head_size,
    parts_grid,
    tile_options,
)
from stage2_cuda.runtime.triton_launch import KernelLaunch
from torch_bridge.kernels import attention_fp16x3
from torch_bridge.kernels.attention_parts import (
    add_parts_launch,
    backward_parts,
    combine_launch,
    forward_parts,
    heads_of,
)

ROWS = attention_fp16x3.ROWS.value
# {largest D: tiles}. The fastest with one head on an H100; with D above 64, backward spills registers with any tile.
TILES = {
    64: AttentionTiles(TileConfig(64, 64, 4, 3), both=TileConfig(64, 64, 4, 2)),
    128: AttentionTiles(TileConfig(64, 64, 4, 2), both=TileConfig(64, 64, 4, 2)),
}


def split_launches(inputs, halves, sizes, empty, dy=None, y=None, dy_halves=None, delta=None):
    """Yield the two KernelLaunches that write the sizes and halves of q, k and v; with dy also those of dy, and delta.

    inputs: Heads of q, k and v; halves: an array (2 B, H, T, D) float16 for each; sizes: sizes_of_heads(). dy and y are
    Heads, delta is (B, H, T_q) float32.
    """
    (B, H, T_q, D), T_k = inputs[0].shape, inputs[1].shape[2]
    grid = B * H, triton.cdiv(max(T_q, T_k), ROWS), 3 if dy is None else 4
    *arrays, y = (None if x is None else x.descriptor(ROWS) for x in (*inputs, dy, y))
    norms, options = empty("float32", 2, grid[2], *grid[:2]), dict(HEAD_DIM=padded_head_size(D), num_warps=4)
    yield KernelLaunch(attention_fp16x3.norms_kernel, grid, (*arrays, norms, H), options)
    arguments = *arrays, y, *halves, dy_halves, delta, norms, sizes, T_q, T_k, max(T_q, T_k), D, H
    yield KernelLaunch(attention_fp16x3.split_kernel, grid, arguments, options)


def halves_of(x, empty):
    """An array for the halves of Heads x."""
    B, H, T, D = x.shape
    return empty("float16", 2 * B, H, T, D)


def sizes_of_heads(q, k, arrays, empty):
    """An array for the sizes of the heads and rows of this number of arrays: q, k, v and in backward dy."""
    return empty("float32", arrays, q.shape[0] * q.shape[1], 1 + max(q.shape[2], k.shape[2]))


def forward_launches(y, lse, q, k, v, tile, empty, causal=True, natural=False):
    """Yield the KernelLaunches that compute y and lse; for the arguments see attention_parts.forward_launches()."""
    (B, H, T_q, D), T_k = q.shape, k.shape[2]
    halves, sizes = [halves_of(x, empty) for x in (q, k, v)], sizes_of_heads(q, k, 3, empty)
    yield from split_launches((q, k, v), halves, sizes, empty)
    parts = forward_parts(q, tile, empty) if tile.parts > 1 else None
    y_out, lse_out = (heads_of(parts[0]), parts[1]) if parts else (y, lse)
    y_m, q_m = descriptors(tile.block_m, y_out, heads_of(halves[0]))
    k_n, v_n = descriptors(tile.block_n, *map(heads_of, halves[1:]))
    arguments = y_m, lse_out, q_m, k_n, v_n, sizes, max(T_q, T_k), T_q, T_k, H, LOG2E.value / math.sqrt(D)
    masks = dict(CAUSAL=causal, MASK_KEYS=mask_keys(T_q, T_k, tile.block_n, causal))
    options = tile_options(tile, D, IN_PARTS=tile.parts > 1, NATURAL=natural and not parts, **masks)
    grid = parts_grid((B * H, triton.cdiv(T_q, tile.block_m)), tile)
    yield KernelLaunch(attention_fp16x3.forward_kernel, grid, arguments, options)
    if parts:
        yield combine_launch(y, lse, parts, tile, natural)


def backward_launches(dq, dk, dv, delta, dy, q, k, v, y, lse, tile, empty, causal=True, natural=False):
    """Yield the KernelLaunches that compute dq, dk and dv.

    tile: a TileConfig with block_m = block_n. The other arguments: see attention_parts.backward_launches().
    """
    (B, H, T_q, D), T_k = q.shape, k.shape[2]
    halves, sizes = [halves_of(x, empty) for x in (q, k, v, dy)], sizes_of_heads(q, k, 4, empty)
    yield from split_launches((q, k, v), halves[:3], sizes, empty, dy, y, halves[3], delta)
    gradients, parts = (dq, dk, dv), backward_parts((q, k, v), tile, empty)
    written = descriptors(tile.block_m, *(map(heads_of, parts) if parts else gradients))
    q_m, k_n, v_n, dy_m = descriptors(tile.block_m, *map(heads_of, halves))
    scales = 1 / math.sqrt(D), LOG2E.value / math.sqrt(D)
    arguments = *written, delta, dy_m, lse, q_m, k_n, v_n, sizes, max(T_q, T_k), T_q, T_k, H, *scales
    masks = dict(CAUSAL=causal, MASK_KEYS=mask_keys(T_q, T_k, tile.block_n, causal), EVEN=T_q % tile.block_m == 0)
    grid = parts_grid((B * H, 2 * triton.cdiv(max(T_q, T_k), tile.block_m)), tile)
    options = tile_options(tile, D, IN_PARTS=tile.parts > 1, NATURAL=natural, **masks)
    yield KernelLaunch(attention_fp16x3.backward_kernel, grid, arguments, options)
    if parts:
        yield add_parts_launch(gradients, parts, tile)
