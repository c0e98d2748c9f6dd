"""What the Gluon kernels share: tiles in shared memory, barriers, rings; for attention also masks.

Gluon is the lower level of Triton. A kernel in Triton says what a program computes; in Gluon it also says in which
registers a tile lies (its layout), when a tile is copied to shared memory, and when the tensor cores start and finish.
The kernels here are for Hopper GPUs (compute capability 9.0):

    TMA      copies a tile between global and shared memory. One thread starts the copy. A barrier in shared memory
             (mbarrier) counts the bytes that have arrived.
    wgmma    a matrix product that four warps, a warp group, start together (warpgroup_mma). It reads its operands from
             shared memory or registers, and runs while the warps compute something else, until warpgroup_mma_wait.

A ring is an array of tiles in shared memory with one barrier per tile. Use number i of a ring has tile i % STAGES. The
barrier `full` of a tile completes a phase each time that a copy to this tile has arrived. A wait names the parity of
the phase, which is (i // STAGES) % 2. In a specialized kernel a tile also has a barrier `empty`, which completes a
phase when every warp group that computes has released the tile.
"""

# T_q queries, T_k keys, D head size (64 or 128), H heads; a tile of s is ROWS queries by BLOCK_N keys
# acc is short for accumulator

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

ROWS = gl.constexpr(64)  # rows of a tile of one warp group: the number of rows of a wgmma product
PRODUCER_REGISTERS = gl.constexpr(24)  # per thread of a warp that only starts copies: the minimum

# Triton 3.9 has other names for these functions than Triton 3.6
start_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
start_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
synchronize = getattr(gl, "barrier", None) or gl.thread_barrier  # the threads of a program or of a partition


# -- copies ------------------------------------------------------------------------------------------------------------


@gluon.jit
def new_tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles of this descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers. A phase completes after `arrivals` arrivals and, if bytes are expected, the last byte.

    Each barrier must be used. Triton takes an unused barrier for free memory, which it may use for other data; but an
    initialised barrier must not be read or written as data.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def make_barriers_visible():
    """Make new barriers visible to the TMA unit and to all threads of the program."""
    fence_async_shared()
    synchronize()


@gluon.jit
def matrix(tiles, i):
    """Tile number i as a matrix (rows, D)."""
    tile = tiles.index(i)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def slot(i, STAGES: gl.constexpr):
    """(tile, parity) of use number i of a ring."""
    return i % STAGES, (i // STAGES) & 1


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


# -- functions of tiles ------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def product_layout(columns, warps=4):
    """The layout of a product of `columns` columns that this number of warps computes; 4 are a warp group."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def start_product(a, tiles, i, zeros):
    """Start the product of a (rows, D) and the transpose of tile i. zeros: is not read, has the result's layout."""
    return warpgroup_mma(a, matrix(tiles, i).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def exp2(x):
    """2**x in one instruction. gl.exp2 takes several, because it also returns denormal numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


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


@gluon.jit
def key_blocks(end_row, T_k, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The number of blocks of BLOCK_N keys to which the queries before end_row attend."""
    end = T_k
    if CAUSAL:
        end = gl.minimum(end_row, T_k)
    return gl.cdiv(end, BLOCK_N)
