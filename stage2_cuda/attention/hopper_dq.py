"""dq of attention in Gluon, for Hopper GPUs; launches.py says when it is used.

The algorithm is that of dq_kernel in backward.py. A tile of 64 queries walks over its blocks of keys from the
last one, which the masks concern, to the first. Both kernels keep the tensor cores busy during the exponentials:

pipelined_kernel: small programs of one warp group. dq of block j - 1 and dp of block j are in flight while p of block j
is computed, and stay in flight from one step to the next. For a short T.
specialized_kernel: three warp groups compute, one more warp starts the copies. dp of block j runs while p of block j is
computed; nothing stays in flight between two steps. For a long T.
"""

# Symbols: see hopper_tiles.py. scale: 1 / sqrt(D). delta, lse and lse2: see backward.py
# Tiles in registers: s, p, dp and ds are (ROWS, BLOCK_N), dq is (ROWS, D)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from stage2_cuda.attention import hopper_tiles as ht
from stage2_cuda.attention.forward import LOG2E
from stage2_cuda.runtime import gluon_tiles as gt


@gluon.jit
def row_values(
    dy, y, pointers, head, row, T_q, NATURAL: gl.constexpr, layout: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr
):
    """(delta, lse in base 2) of the rows of a tile, in the layout of the rows of s. Stores delta, and lse if NATURAL.

    dy, y: tiles in shared memory. pointers: to delta, lse2 and lse (B, H, T_q).
    """
    delta_ptr, lse2_ptr, lse_ptr = pointers
    READ: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    delta = gl.sum(y.load(READ).to(gl.float32) * dy.load(READ).to(gl.float32), 1)
    first = head.to(gl.int64) * T_q + row
    offs = gl.arange(0, ht.ROWS, gl.SliceLayout(1, READ))
    gl.store(delta_ptr + first + offs, delta, mask=row + offs < T_q)
    offs = gl.arange(0, ht.ROWS, gl.SliceLayout(1, layout))
    lse = gl.load(lse_ptr + first + offs, mask=row + offs < T_q, other=0.0)
    if NATURAL:
        lse *= LOG2E
        gl.store(lse2_ptr + first + offs, lse, mask=row + offs < T_q)
    return gl.convert_layout(delta, gl.SliceLayout(1, layout)), lse


# -- pipelined ---------------------------------------------------------------------------------------------------------


@gluon.jit
def pipelined_kernel(
    dq_desc, delta_ptr, lse2_ptr, dy_desc, y_desc, lse_ptr, q_desc, k_desc, v_desc, rotation_ptr, T_q, T_k, H, scale,
    BLOCK_N: gl.constexpr, D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr, NATURAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """delta and dq of 64 queries, by one warp group."""
    S: gl.constexpr = gt.product_layout(BLOCK_N, num_warps)
    DQ: gl.constexpr = gt.product_layout(D, num_warps)
    DS: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    dtype: gl.constexpr = q_desc.dtype
    q_tile, dy_tile, y_tile = gt.new_tiles(q_desc, 1), gt.new_tiles(dy_desc, 1), gt.new_tiles(y_desc, 1)
    k_tiles, v_tiles = gt.new_tiles(k_desc, K_STAGES), gt.new_tiles(v_desc, V_STAGES)
    q_full, dy_full, y_full = gt.new_barriers(1, 1), gt.new_barriers(1, 1), gt.new_barriers(1, 1)
    k_full, v_full = gt.new_barriers(K_STAGES, 1), gt.new_barriers(V_STAGES, 1)
    gt.make_barriers_visible()
    # blocks are numbered from the last to the first; `last` is the first key of block 0
    head, b, h, row, blocks, last = ht.tile_rows(T_k, H, BLOCK_N, CAUSAL)
    ht.load_tile(q_desc, b, h, row, q_full, q_tile, 0)
    for i in gl.static_range(K_STAGES):
        ht.load_tile(k_desc, b, h, last - i * BLOCK_N, k_full, k_tiles, i, i < blocks)
        if i == 0:
            ht.load_tile(dy_desc, b, h, row, dy_full, dy_tile, 0)
            ht.load_tile(y_desc, b, h, row, y_full, y_tile, 0)
        if i < V_STAGES:
            ht.load_tile(v_desc, b, h, last - i * BLOCK_N, v_full, v_tiles, i, i < blocks)

    q, dy, scale2 = ht.matrix(q_tile, 0), ht.matrix(dy_tile, 0), scale * LOG2E
    mbarrier.wait(dy_full.index(0), 0)
    mbarrier.wait(y_full.index(0), 0)
    pointers = (delta_ptr, lse2_ptr, lse_ptr)
    delta, lse = row_values(dy, ht.matrix(y_tile, 0), pointers, head, row, T_q, NATURAL, S, D, num_warps)
    zeros = gl.zeros([ht.ROWS, BLOCK_N], gl.float32, S)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(v_full.index(0), 0)
    s = ht.start_product(q, k_tiles, 0, zeros)
    # The assembler runs products one after the other unless the same products are in flight before the loop and at its
    # end. So dq starts as a product in flight too: 0 times 16 rows of k.
    nothing = gl.convert_layout(gl.zeros([ht.ROWS, 16], dtype, S), DS)
    dq = gl.zeros([ht.ROWS, D], gl.float32, DQ)
    dq = warpgroup_mma(nothing, ht.matrix(k_tiles, 0).slice(0, 16), dq, use_acc=False, is_async=True)
    dp = ht.start_product(dy, v_tiles, 0, zeros)
    s, dq, dp = warpgroup_mma_wait(0, [s, dq, dp])
    dq, dp = hopper.warpgroup_mma_init(dq), hopper.warpgroup_mma_init(dp)
    p = gt.exp2(s * scale2 - lse[:, None])
    p = ht.mask_tile(p, 0.0, row, last, T_k, S, CAUSAL, MASK_KEYS)
    ds = gl.convert_layout(gl.zeros([ht.ROWS, BLOCK_N], dtype, S), DS)
    for j in range(blocks - 1):  # p of block j is in registers; dq of block j - 1 and dp of block j are in flight
        k_slot, _ = gt.slot(j, K_STAGES)
        next_k, next_k_parity = gt.slot(j + 1, K_STAGES)
        next_v, next_v_parity = gt.slot(j + 1, V_STAGES)
        # The branch in this wait keeps the assembler from moving the next wait up.
        mbarrier.wait(k_full.index(next_k), next_k_parity)
        dq, dp, ds = warpgroup_mma_wait(0, [dq, dp, ds])
        s = ht.start_product(q, k_tiles, next_k, zeros)
        gt.synchronize()  # all warps have read k of block j - 1 and v of block j
        old_k, _ = gt.slot(j + K_STAGES - 1, K_STAGES)
        old_v, _ = gt.slot(j, V_STAGES)
        more_k, more_v = (j > 0) & (j - 1 + K_STAGES < blocks), j + V_STAGES < blocks
        ht.load_tile(k_desc, b, h, last - (j - 1 + K_STAGES) * BLOCK_N, k_full, k_tiles, old_k, more_k)
        ht.load_tile(v_desc, b, h, last - (j + V_STAGES) * BLOCK_N, v_full, v_tiles, old_v, more_v)
        ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), DS)
        dq = warpgroup_mma(ds, ht.matrix(k_tiles, k_slot), dq, is_async=True)
        mbarrier.wait(v_full.index(next_v), next_v_parity)
        dp = ht.start_product(dy, v_tiles, next_v, zeros)
        s = warpgroup_mma_wait(2, [s])
        p = gt.exp2(s * scale2 - lse[:, None])
    dq, dp, ds = warpgroup_mma_wait(0, [dq, dp, ds])
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), DS)
    k_slot, _ = gt.slot(blocks - 1, K_STAGES)
    dq = warpgroup_mma(ds, ht.matrix(k_tiles, k_slot), dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, [dq, ds])
    ht.store_tile(dq_desc, b, h, row, q_tile, 0, ht.rotate_back(dq * scale, rotation_ptr, row, T_q))
    tma.store_wait(0)


# -- specialised -------------------------------------------------------------------------------------------------------


@gluon.jit
def producer(
    tiles, barriers, descs, sizes,
    WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warp that starts all copies: q, k, dy, y, v, and then k and v of each block of keys."""
    q_tiles, dy_tiles, y_tiles, k_tiles, v_tiles = tiles
    q_full, dy_full, y_full, k_full, k_empty, v_full, v_empty = barriers
    q_desc, dy_desc, y_desc, k_desc, v_desc = descs
    head, b, h, row, blocks = ht.query_rows(sizes, 0, BLOCK_N, WARP_GROUPS, CAUSAL)
    ht.load_rows(q_desc, b, h, row, q_full.index(0), q_tiles, WARP_GROUPS)
    start = (blocks - 1) * BLOCK_N
    for j in range(blocks):
        ht.load_when_released(k_desc, b, h, start, (k_full, k_empty), k_tiles, j, K_STAGES)
        if j == 0:
            ht.load_rows(dy_desc, b, h, row, dy_full.index(0), dy_tiles, WARP_GROUPS)
            ht.load_rows(y_desc, b, h, row, y_full.index(0), y_tiles, WARP_GROUPS)
        ht.load_when_released(v_desc, b, h, start, (v_full, v_empty), v_tiles, j, V_STAGES)
        start -= BLOCK_N


@gluon.jit
def step(
    dq, s, j, blocks, q, dy, zeros, delta, lse, scale2, tiles, barriers, dtype: gl.constexpr, LAST: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, DS: gl.constexpr,
):  # fmt: skip
    """dq with the part of block j, and s of block j + 1 unless this is the LAST block. s: of block j."""
    k_tiles, v_tiles = tiles
    k_full, k_empty, v_full, v_empty = barriers
    k_slot, _ = gt.slot(j, K_STAGES)
    v_slot, v_parity = gt.slot(j, V_STAGES)
    next_k, next_parity = gt.slot(j + 1, K_STAGES)
    mbarrier.wait(v_full.index(v_slot), v_parity)
    dp = ht.start_product(dy, v_tiles, v_slot, zeros)
    p = gt.exp2(s * scale2 - lse[:, None])
    # The branch in this wait keeps the assembler from moving the next wait up, before the exponentials.
    mbarrier.wait(k_full.index(next_k), next_parity, pred=j + 1 < blocks)
    dp = warpgroup_mma_wait(0, [dp])
    mbarrier.arrive(v_empty.index(v_slot))
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), DS)
    if not LAST:
        s = ht.start_product(q, k_tiles, next_k, zeros)
    dq = warpgroup_mma(ds, ht.matrix(k_tiles, k_slot), dq, is_async=True)
    if LAST:
        dq, ds = warpgroup_mma_wait(0, [dq, ds])
    else:
        s, dq, ds = warpgroup_mma_wait(0, [s, dq, ds])
    mbarrier.arrive(k_empty.index(k_slot))
    return dq, s


@gluon.jit
def consumer(
    tiles, barriers, dq_desc, pointers, rotation_ptr, sizes, scale, c: gl.constexpr,
    WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    KEEP_OPERANDS: gl.constexpr, CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr, NATURAL: gl.constexpr,
):  # fmt: skip
    """delta and dq of the c-th 64 queries of the program, by one warp group."""
    q_tiles, dy_tiles, y_tiles, k_tiles, v_tiles = tiles
    q_full, dy_full, y_full, k_full, k_empty, v_full, v_empty = barriers
    T_q, T_k, H = sizes
    S: gl.constexpr = gt.product_layout(BLOCK_N)
    DQ: gl.constexpr = gt.product_layout(D)
    DS: gl.constexpr = gl.DotOperandLayout(0, DQ, 2)
    dtype: gl.constexpr = dq_desc.dtype
    head, b, h, row, blocks = ht.query_rows(sizes, c, BLOCK_N, WARP_GROUPS, CAUSAL)
    mbarrier.wait(dy_full.index(0), 0)
    mbarrier.wait(y_full.index(0), 0)
    delta, lse = row_values(ht.matrix(dy_tiles, c), ht.matrix(y_tiles, c), pointers, head, row, T_q, NATURAL, S, D, 4)
    k_barriers, v_barriers = (k_full, k_empty), (v_full, v_empty)
    skipped, left = ht.skip_blocks(row, blocks, T_k, k_barriers, v_barriers, BLOCK_N, K_STAGES, V_STAGES, CAUSAL)

    zeros, scale2 = gl.zeros([ht.ROWS, BLOCK_N], gl.float32, S), scale * LOG2E
    mbarrier.wait(q_full.index(0), 0)
    if KEEP_OPERANDS:  # in registers: then a product reads half as much shared memory
        q = ht.matrix(q_tiles, c).load(gl.DotOperandLayout(0, S, 2))
        dy = ht.matrix(dy_tiles, c).load(gl.DotOperandLayout(0, S, 2))
    else:
        q, dy = ht.matrix(q_tiles, c), ht.matrix(dy_tiles, c)
    i, parity = gt.slot(skipped, K_STAGES)
    mbarrier.wait(k_full.index(i), parity)
    s = ht.start_product(q, k_tiles, i, zeros)
    s = warpgroup_mma_wait(0, [s])
    s = ht.mask_tile(s, float("-inf"), row, (left - 1) * BLOCK_N, T_k, S, CAUSAL, MASK_KEYS)
    dq = gl.zeros([ht.ROWS, D], gl.float32, DQ)
    ring, ring_barriers = (k_tiles, v_tiles), (k_full, k_empty, v_full, v_empty)
    for j in range(skipped, blocks - 1):
        dq, s = step(
            dq, s, j, blocks, q, dy, zeros, delta, lse, scale2, ring, ring_barriers, dtype, False,
            K_STAGES, V_STAGES, DS,
        )  # fmt: skip
    dq, s = step(
        dq, s, blocks - 1, blocks, q, dy, zeros, delta, lse, scale2, ring, ring_barriers, dtype, True,
        K_STAGES, V_STAGES, DS,
    )  # fmt: skip
    if row < T_q:
        ht.store_tile(dq_desc, b, h, row, q_tiles, c, ht.rotate_back(dq * scale, rotation_ptr, row, T_q))
    tma.store_wait(0)


@gluon.jit
def specialized_kernel(
    dq_desc, delta_ptr, lse2_ptr, dy_desc, y_desc, lse_ptr, q_desc, k_desc, v_desc, rotation_ptr, T_q, T_k, H, scale,
    BLOCK_N: gl.constexpr, D: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, KEEP_OPERANDS: gl.constexpr,
    CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr, NATURAL: gl.constexpr,
):  # fmt: skip
    """delta and dq of 192 queries. REGISTERS: of each thread that computes. KEEP_OPERANDS: see consumer()."""
    rows = (gt.new_tiles(q_desc, 3), gt.new_tiles(dy_desc, 3), gt.new_tiles(y_desc, 3))
    ring = (gt.new_tiles(k_desc, K_STAGES), gt.new_tiles(v_desc, V_STAGES))
    tiles = (rows[0], rows[1], rows[2], ring[0], ring[1])
    k_full, k_empty = gt.new_barriers(K_STAGES, 1), gt.new_barriers(K_STAGES, 3)
    v_full, v_empty = gt.new_barriers(V_STAGES, 1), gt.new_barriers(V_STAGES, 3)
    barriers = (gt.new_barriers(1, 1), gt.new_barriers(1, 1), gt.new_barriers(1, 1), k_full, k_empty, v_full, v_empty)
    hopper.fence_async_shared()
    descs, sizes, pointers = (q_desc, dy_desc, y_desc, k_desc, v_desc), (T_q, T_k, H), (delta_ptr, lse2_ptr, lse_ptr)
    gl.warp_specialize([
        (consumer, (tiles, barriers, dq_desc, pointers, rotation_ptr, sizes, scale, 0, 3, BLOCK_N, D, K_STAGES,
                    V_STAGES, KEEP_OPERANDS, CAUSAL, MASK_KEYS, NATURAL)),
        (consumer, (tiles, barriers, dq_desc, pointers, rotation_ptr, sizes, scale, 1, 3, BLOCK_N, D, K_STAGES,
                    V_STAGES, KEEP_OPERANDS, CAUSAL, MASK_KEYS, NATURAL)),
        (consumer, (tiles, barriers, dq_desc, pointers, rotation_ptr, sizes, scale, 2, 3, BLOCK_N, D, K_STAGES,
                    V_STAGES, KEEP_OPERANDS, CAUSAL, MASK_KEYS, NATURAL)),
        (producer, (tiles, barriers, descs, sizes, 3, BLOCK_N, K_STAGES, V_STAGES, CAUSAL)),
    ], [4, 4, 1], [REGISTERS, REGISTERS, gt.PRODUCER_REGISTERS])  # fmt: skip
