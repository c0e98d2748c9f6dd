"""What the Gluon kernels of attention share: copies of rows, blocks of keys, masks. Rings: see gluon_tiles.py."""

# T_q queries, T_k keys, D head size (64 or 128), H heads; a tile of s is ROWS queries by BLOCK_N keys
# acc is short for accumulator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from stage2_cuda.runtime.gluon_tiles import slot, start_load, start_store, synchronize

ROWS = gl.constexpr(64)  # rows of a tile of one warp group: the number of rows of a wgmma product


# -- copies ------------------------------------------------------------------------------------------------------------


@gluon.jit
def matrix(tiles, i):
    """Tile number i as a matrix (rows, D)."""
    tile = tiles.index(i)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def load_tile(desc, b, h, row, full, tiles, i, pred=True):
    """Start to copy the rows from `row` on of one head to tile i; its barrier in `full` counts the bytes."""
    mbarrier.expect(full.index(i), desc.block_type.nbytes, pred=pred)
    start_load(desc, [b, h, row, 0], full.index(i), tiles.index(i), pred=pred)


@gluon.jit
def load_when_released(desc, b, h, row, barriers, tiles, j, STAGES: gl.constexpr):
    """As load_tile() for use number j of a ring, once its tile has been released. barriers: (full, empty)."""
    full, empty = barriers
    i, parity = slot(j, STAGES)
    mbarrier.wait(empty.index(i), parity ^ 1)
    load_tile(desc, b, h, row, full, tiles, i)


@gluon.jit
def release_unread(barriers, j, STAGES: gl.constexpr):
    """Release the tile of use number j of a ring, once its copy has arrived. barriers: (full, empty).

    Without the wait a warp group could arrive twice in one phase of `empty`.
    """
    full, empty = barriers
    i, parity = slot(j, STAGES)
    mbarrier.wait(full.index(i), parity)
    mbarrier.arrive(empty.index(i))


@gluon.jit
def load_rows(desc, b, h, row, full, tiles, COUNT: gl.constexpr):
    """As load_tile() for COUNT tiles, one below the other, with one barrier for all."""
    tile_bytes: gl.constexpr = desc.block_type.nbytes
    mbarrier.expect(full, COUNT * tile_bytes)
    for c in gl.static_range(COUNT):
        start_load(desc, [b, h, row + c * desc.block_type.shape[2], 0], full, tiles.index(c))


@gluon.jit
def store_tile(desc, b, h, row, tiles, i, values):
    """Write `values` (rows, D) to one head by way of tile i, which no thread may read any more."""
    synchronize()
    matrix(tiles, i).store(values.to(desc.dtype))
    fence_async_shared()
    start_store(desc, [b, h, row, 0], tiles.index(i))


@gluon.jit
def rotate_back(dx, rotation_ptr, row, T):
    """dx (ROWS, D), the gradient of the rotated rows from `row` on, rotated by the opposite angles.

    rotation_ptr: as for rotate_back() in backward.py. Channels i and i + D / 2 of a row are in one thread.
    """
    if rotation_ptr is not None:
        D: gl.constexpr = dx.shape[1]
        a, b = dx.reshape([ROWS, 2, D // 2]).permute((0, 2, 1)).split()  # (ROWS, D / 2)
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, a.type.layout))
        pairs = gl.arange(0, D // 2, gl.SliceLayout(0, a.type.layout))
        cos_ptr = rotation_ptr + rows[:, None] * D + pairs[None, :]
        inside = (rows < T)[:, None]
        cos, sin = gl.load(cos_ptr, inside, 0.0), gl.load(cos_ptr + D // 2, inside, 0.0)
        rotated = gl.join(a * cos + b * sin, b * cos - a * sin).permute((0, 2, 1)).reshape([ROWS, D])
        dx = gl.convert_layout(rotated, dx.type.layout, assert_trivial=True)
    return dx


# -- programs ----------------------------------------------------------------------------------------------------------


@gluon.jit
def program_head(H):
    """(number, b, h) of the head of this program, whose grid is (heads of a group, tiles, groups).

    Programs start in the order of the first dimension. All tiles of a group are computed before the next group starts,
    so that its keys and values stay in the L2 cache.
    """
    head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    return head, head // H, head % H


@gluon.jit
def tile_rows(T_k, H, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The place of a program that computes ROWS queries.

    (number, b, h) of the head; first row, number of blocks of keys, and first key of the last block.
    """
    head, b, h = program_head(H)
    row = (gl.num_programs(1) - 1 - gl.program_id(1)) * ROWS  # last queries first: they have the longest loops
    blocks = key_blocks(row + ROWS, T_k, BLOCK_N, CAUSAL)
    return head, b, h, row, blocks, (blocks - 1) * BLOCK_N


@gluon.jit
def query_rows(sizes, c: gl.constexpr, BLOCK_N: gl.constexpr, WARP_GROUPS: gl.constexpr, CAUSAL: gl.constexpr):
    """The place of warp group c of a program that computes WARP_GROUPS * ROWS queries. sizes: (T_q, T_k, H).

    (number, b, h) of the head; first row of the warp group; number of blocks of keys of the program.
    """
    T_q, T_k, H = sizes
    head, b, h = program_head(H)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)  # last queries first: they have the longest loops
    row = tile * WARP_GROUPS * ROWS
    blocks = key_blocks(gl.minimum(row + WARP_GROUPS * ROWS, T_q), T_k, BLOCK_N, CAUSAL)
    return head, b, h, row + c * ROWS, blocks


@gluon.jit
def skip_blocks(
    row, blocks, T_k, k_barriers, v_barriers,
    BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """(number of blocks of keys that only later warp groups of the program need, number of the other blocks).

    The former are the first blocks; they are released unread. row: the first row of this warp group. blocks: those of
    the program. k_barriers, v_barriers: (full, empty).
    """
    left = gl.minimum(key_blocks(row + ROWS, T_k, BLOCK_N, CAUSAL), blocks)
    skipped = blocks - left
    for j in range(skipped):
        release_unread(k_barriers, j, K_STAGES)
        release_unread(v_barriers, j, V_STAGES)
    return skipped, left


@gluon.jit
def key_blocks(end_row, T_k, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The number of blocks of BLOCK_N keys to which the queries before end_row attend."""
    end = T_k
    if CAUSAL:
        end = gl.minimum(end_row, T_k)
    return gl.cdiv(end, BLOCK_N)


# -- functions of tiles ------------------------------------------------------------------------------------------------


@gluon.jit
def start_product(a, tiles, i, zeros):
    """Start the product of a (rows, D) and the transpose of tile i. zeros: is not read, has the result's layout."""
    return warpgroup_mma(a, matrix(tiles, i).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def mask_tile(
    tile, masked_value, row, column, T_k, layout: gl.constexpr, CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr
):
    """The tile of s or p whose first element is (row, column), with masked_value where a query does not attend."""
    rows = row + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    if CAUSAL:
        tile = gl.where(rows[:, None] >= columns[None, :], tile, masked_value)
    if MASK_KEYS:
        tile = gl.where(columns[None, :] < T_k, tile, masked_value)
    return tile
