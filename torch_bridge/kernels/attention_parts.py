"""Attention with several programs for each tile: the second launch, which adds the results of the programs.

With few heads and a short T there are fewer tiles than the GPU has multiprocessors, and the time is that of the longest
loop. With TileConfig.parts > 1 a tile has several programs, and each computes a part of the loop. For a part of the
keys, forward gives y_i and lse_i; the result for all keys is

    lse = log2(sum of exp2(lse_i))    y = sum of exp2(lse_i - lse) y_i

dq, dk and dv are sums over the loop, so the results of the parts are added. The order of all sums is fixed.
"""

# B batch, T time, H heads, D head size, HEAD_DIM = D rounded up to a power of two, PARTS parts of a loop
# An array of parts (B, H, PARTS, T, D) is contiguous float32.

import triton
import triton.language as tl

from stage2_cuda.attention import launches
from stage2_cuda.attention.forward import LN2, store_tile
from stage2_cuda.attention.hopper_launches import GluonTile
from stage2_cuda.attention.launches import Heads, descriptors, forward_launch, padded_head_size, pointer
from stage2_cuda.runtime.triton_launch import KernelLaunch

PART_ROWS = 16  # rows of one program: few, so that small arrays have enough programs for all multiprocessors
PART_WARPS = 4


@triton.jit
def load_part(parts_ptr, head, part, offs_m, T, D, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The rows offs_m of one part of one head: (ROWS, HEAD_DIM)."""
    cols = tl.arange(0, HEAD_DIM)
    rows = ((head * PARTS + part) * T + offs_m) * D
    mask = (offs_m < T)[:, None] & (cols < D)[None, :]
    return tl.load(parts_ptr + rows[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def combine_kernel(
    y_desc, lse_ptr, y_parts, lse_parts, T, D, H,
    PARTS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """y and the logsumexp of ROWS queries, from y_parts and lse_parts (B, H, PARTS, T), which is in base 2."""
    head, start_m = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    offs_m, offs_p = start_m + tl.arange(0, ROWS), tl.arange(0, PARTS)
    at = lse_parts + (head * PARTS + offs_p)[:, None] * T + offs_m[None, :]
    lses = tl.load(at, mask=(offs_m < T)[None, :], other=0.0)
    row_max = tl.max(lses, 0)
    lse = row_max + tl.math.log2(tl.sum(tl.math.exp2(lses - row_max[None, :]), 0))
    y = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for part in tl.static_range(PARTS):
        lse_part = tl.load(lse_parts + (head * PARTS + part) * T + offs_m, mask=offs_m < T, other=0.0)
        y += tl.math.exp2(lse_part - lse)[:, None] * load_part(y_parts, head, part, offs_m, T, D, PARTS, HEAD_DIM)
    tl.store(lse_ptr + head * T + offs_m, lse * LN2 if NATURAL else lse, mask=offs_m < T)
    store_tile(y_desc, y, tl.program_id(0) // H, tl.program_id(0) % H, start_m, ROWS, HEAD_DIM)


@triton.jit
def add_parts(sum_desc, parts_ptr, T, D, H, PARTS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """ROWS rows of the sum of all parts."""
    start = tl.program_id(1) * ROWS
    offs = start + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for part in tl.static_range(PARTS):
        total += load_part(parts_ptr, tl.program_id(0).to(tl.int64), part, offs, T, D, PARTS, HEAD_DIM)
    if start < T:  # the grid is that of the longest of the three arrays
        store_tile(sum_desc, total, tl.program_id(0) // H, tl.program_id(0) % H, start, ROWS, HEAD_DIM)


@triton.jit
def add_parts_kernel(
    dq_desc, dk_desc, dv_desc, dq_parts, dk_parts, dv_parts, T_q, T_k, D, H,
    PARTS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """ROWS rows of dq, dk or dv: tl.program_id(2) is 0, 1 or 2."""
    if tl.program_id(2) == 0:
        add_parts(dq_desc, dq_parts, T_q, D, H, PARTS, ROWS, HEAD_DIM)
    elif tl.program_id(2) == 1:
        add_parts(dk_desc, dk_parts, T_k, D, H, PARTS, ROWS, HEAD_DIM)
    else:
        add_parts(dv_desc, dv_parts, T_k, D, H, PARTS, ROWS, HEAD_DIM)


# -- launches ----------------------------------------------------------------------------------------------------------

# An array of all parts (B, H * parts, T, D) is that of the kernels, (B, H, PARTS, T, D), with two axes in one.


def forward_launches(y, lse, q, k, v, tile, empty, precision="ieee", causal=True, natural=False):
    """Yield the one or two KernelLaunches that compute y and lse, as forward_launch(), with any tile.parts.

    empty(dtype, *shape) returns an uninitialised array; dtype: "float32" or "float16".
    """
    if isinstance(tile, GluonTile) or tile.parts == 1:
        yield forward_launch(y, lse, q, k, v, tile, precision, causal, natural)
        return
    parts = forward_parts(q, tile, empty)
    yield forward_launch(heads_of(parts[0]), parts[1], q, k, v, tile, precision, causal)
    yield combine_launch(y, lse, parts, tile, natural)


def backward_launches(
    dq, dk, dv, delta, dy, q, k, v, y, lse, tiles, precision="ieee", causal=True, lse2=None, empty=None
):
    """Yield the one or two KernelLaunches that compute dq, dk and dv, with any tiles.both.parts.

    empty: as for forward_launches(). The other arguments are those of backward_launches() of stage 2.
    """
    gradients, parts = (dq, dk, dv), backward_parts((q, k, v), tiles.both, empty) if tiles.both else []
    written = map(heads_of, parts) if parts else gradients
    yield from launches.backward_launches(*written, delta, dy, q, k, v, y, lse, tiles, precision, causal, lse2)
    if parts:
        yield add_parts_launch(gradients, parts, tiles.both)


def forward_parts(q, tile, empty):
    """The arrays of y and lse of all parts."""
    B, H, T, D = q.shape
    return empty("float32", B, H * tile.parts, T, D), empty("float32", B, H * tile.parts, T)


def combine_launch(y, lse, parts, tile, natural):
    """The KernelLaunch that computes y and lse from forward_parts()."""
    B, H, T, D = y.shape
    grid, arguments = (B * H, triton.cdiv(T, PART_ROWS)), (y.descriptor(PART_ROWS), lse, *parts, T, D, H)
    return KernelLaunch(combine_kernel, grid, arguments, parts_options(tile, D, NATURAL=natural))


def backward_parts(inputs, tile, empty):
    """The arrays of dq, dk and dv of all parts; [] if there is only one part. inputs: q, k and v."""
    if tile.parts == 1:
        return []
    return [empty("float32", B, H * tile.parts, T, D) for B, H, T, D in (x.shape for x in inputs)]


def add_parts_launch(gradients, parts, tile):
    """The KernelLaunch that computes dq, dk and dv (`gradients`) from backward_parts()."""
    (B, H, T_q, D), T_k = gradients[0].shape, gradients[1].shape[2]
    arguments = *descriptors(PART_ROWS, *gradients), *parts, T_q, T_k, D, H
    grid = B * H, triton.cdiv(max(T_q, T_k), PART_ROWS), 3
    return KernelLaunch(add_parts_kernel, grid, arguments, parts_options(tile, D))


def parts_options(tile, D, **constants):
    shared = {"PARTS": tile.parts, "ROWS": PART_ROWS, "HEAD_DIM": padded_head_size(D)}
    return {**shared, "num_warps": PART_WARPS, **constants}


def heads_of(array):
    """Heads of a contiguous array (B, H, T, D)."""
    _, H, T, D = array.shape
    return Heads(pointer(array), tuple(array.shape), (H * T * D, T * D, D, 1))
