"""dk and dv of attention in Gluon, for Hopper GPUs; launches.py says when they are used.

The algorithm is that of dkdv_kernel in backward.py. A tile of 64 keys walks over blocks of 64 queries, from
the diagonal on. The tiles of s, p, dp and ds are transposed, so p and ds are in registers where the products dv and dk
need them as first operands. The tensor cores compute dp of block i while the exponentials of this block are computed,
and s of block i + 1 together with dk of block i. Nothing is in flight between two steps.

pipelined_kernel: small programs of one warp group. For a short T.
specialized_kernel: two warp groups compute, one more warp starts the copies. For a long T.
"""

# Symbols: see hopper_tiles.py. scale: 1 / sqrt(D). A block has ROWS queries; s, p, dp and ds are (ROWS keys, ROWS
# queries), dk and dv are (ROWS, D). lse is in base 2; it is copied with the q of its block, delta with dy.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from stage2_cuda.attention import hopper_tiles as ht
from stage2_cuda.attention.forward import LOG2E
from stage2_cuda.runtime import gluon_tiles as gt


@gluon.jit
def new_vectors(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT vectors of ROWS values of the logsumexp or delta."""
    return gl.allocate_shared_memory(gl.float32, [COUNT, ht.ROWS], desc.layout)


@gluon.jit
def load_block(descs, b, h, row, head_start, full, ring, i, pred=True):
    """Start to copy 64 queries to slot i of a ring: q with their logsumexp, or dy with their delta.

    Beyond T_q the logsumexp and delta are those of another head; step() does not use them. A copy starts at a multiple
    of 16 bytes, so T_q must be a multiple of 4.
    """
    desc, vector_desc = descs
    tiles, vectors = ring
    tile_bytes: gl.constexpr = desc.block_type.nbytes
    mbarrier.expect(full.index(i), tile_bytes + ht.ROWS * 4, pred=pred)
    gt.start_load(desc, [b, h, row, 0], full.index(i), tiles.index(i), pred=pred)
    gt.start_load(vector_desc, [head_start + row], full.index(i), vectors.index(i), pred=pred)


@gluon.jit
def query_blocks(first_key, T_q, WARP_GROUPS: gl.constexpr, CAUSAL: gl.constexpr):
    """(first row, number of blocks of queries) for the keys of a program, at least one block for each warp group."""
    begin = first_key if CAUSAL else gl.to_tensor(0)
    least: gl.constexpr = WARP_GROUPS if CAUSAL else 1  # with a causal mask warp group c starts at block c
    return begin, gl.maximum(gl.cdiv(T_q - begin, ht.ROWS), least)


@gluon.jit
def step(
    dk, dv, s, i, k, v, zeros, scale2, key, place, rings, barriers, dtype: gl.constexpr,
    MASK: gl.constexpr, LAST: gl.constexpr, LEAN: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """dk and dv with the parts of block i, and s of block i + 1 unless this is the LAST block. s: of block i.

    MASK: the block may be on the diagonal or contain queries beyond T_q. LEAN: wait for dv before ds is computed, which
    needs fewer registers; otherwise start s of the next block before ds is computed.
    """
    q_ring, dy_ring = rings
    q_tiles, lse_vectors = q_ring
    dy_tiles, delta_vectors = dy_ring
    q_full, dy_full = barriers
    begin, blocks, T_q = place
    here, parity = gt.slot(i, STAGES)
    after, next_parity = gt.slot(i + 1, STAGES)
    rows = begin + i * ht.ROWS + gl.arange(0, ht.ROWS, gl.SliceLayout(0, S))
    mbarrier.wait(dy_full.index(here), parity)
    dp = ht.start_product(v, dy_tiles, here, zeros)
    lse = lse_vectors.index(here).load(gl.SliceLayout(0, S))
    if MASK:
        lse = gl.where(rows < T_q, lse, float("inf"))  # then p is 0
    p = gt.exp2(s * scale2 - lse[None, :])
    if MASK and CAUSAL:
        keys = key + gl.arange(0, ht.ROWS, gl.SliceLayout(1, S))
        p = gl.where(rows[None, :] >= keys[:, None], p, 0.0)
    p16 = gl.convert_layout(p.to(dtype), P)
    if LEAN:
        dv = warpgroup_mma(p16, ht.matrix(dy_tiles, here), dv, is_async=True)
        mbarrier.wait(q_full.index(after), next_parity, pred=i + 1 < blocks)
        dp, dv, p16 = warpgroup_mma_wait(0, [dp, dv, p16])
    else:
        mbarrier.wait(q_full.index(after), next_parity, pred=i + 1 < blocks)
        dp = warpgroup_mma_wait(0, [dp])
        dv = warpgroup_mma(p16, ht.matrix(dy_tiles, here), dv, is_async=True)
        if not LAST:
            s = ht.start_product(k, q_tiles, after, zeros)
    delta = delta_vectors.index(here).load(gl.SliceLayout(0, S))
    if MASK:
        delta = gl.where(rows < T_q, delta, 0.0)
    ds = gl.convert_layout((p * (dp - delta[None, :])).to(dtype), P)
    if LEAN and not LAST:
        s = ht.start_product(k, q_tiles, after, zeros)
    dk = warpgroup_mma(ds, ht.matrix(q_tiles, here), dk, is_async=True)
    if LAST:
        dk, dv, p16, ds = warpgroup_mma_wait(0, [dk, dv, p16, ds])
    elif LEAN:
        s, dk, ds = warpgroup_mma_wait(0, [s, dk, ds])
    else:
        s, dk, dv, p16, ds = warpgroup_mma_wait(0, [s, dk, dv, p16, ds])
    return dk, dv, s


@gluon.jit
def first_products(
    k, q, zeros, dtype: gl.constexpr, D: gl.constexpr, S: gl.constexpr, DK: gl.constexpr, P: gl.constexpr
):
    """Start s of the first block, and dk and dv as products with 0.

    If dk and dv were set to 0, the assembler would run the products of the loop one after the other. Their operands
    differ, because equal products would be merged and then copied.
    """
    nothing = gl.convert_layout(gl.zeros([ht.ROWS, 16], dtype, S), P)
    empty = gl.zeros([ht.ROWS, D], gl.float32, DK)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dv = warpgroup_mma(nothing, q.slice(0, 16), empty, use_acc=False, is_async=True)
    dk = warpgroup_mma(nothing, q.slice(16, 16), empty, use_acc=False, is_async=True)
    return s, dk, dv


# -- pipelined ---------------------------------------------------------------------------------------------------------


@gluon.jit
def pipelined_kernel(
    dk_desc, dv_desc, delta_desc, dy_desc, lse_desc, q_desc, k_desc, v_desc, rotation_ptr, T_q, H, scale,
    D: gl.constexpr, STAGES: gl.constexpr, LEAN: gl.constexpr, CAUSAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, by one warp group."""
    S: gl.constexpr = gt.product_layout(ht.ROWS, num_warps)
    DK: gl.constexpr = gt.product_layout(D, num_warps)
    P: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    dtype: gl.constexpr = q_desc.dtype
    k_tile, v_tile = gt.new_tiles(k_desc, 1), gt.new_tiles(v_desc, 1)
    q_ring = (gt.new_tiles(q_desc, STAGES), new_vectors(lse_desc, STAGES))
    dy_ring = (gt.new_tiles(dy_desc, STAGES), new_vectors(delta_desc, STAGES))
    k_full, v_full = gt.new_barriers(1, 1), gt.new_barriers(1, 1)
    q_full, dy_full = gt.new_barriers(STAGES, 1), gt.new_barriers(STAGES, 1)
    gt.make_barriers_visible()
    head, b, h = ht.program_head(H)
    head_start = head * T_q
    key = gl.program_id(1) * ht.ROWS  # first keys first: with a mask they have the longest loops
    begin, blocks = query_blocks(key, T_q, 1, CAUSAL)
    q_descs, dy_descs = (q_desc, lse_desc), (dy_desc, delta_desc)
    ht.load_tile(k_desc, b, h, key, k_full, k_tile, 0)
    for i in gl.static_range(STAGES):
        load_block(q_descs, b, h, begin + i * ht.ROWS, head_start, q_full, q_ring, i, i < blocks)
        if i == 0:
            ht.load_tile(v_desc, b, h, key, v_full, v_tile, 0)
        load_block(dy_descs, b, h, begin + i * ht.ROWS, head_start, dy_full, dy_ring, i, i < blocks)

    k, v, scale2 = ht.matrix(k_tile, 0), ht.matrix(v_tile, 0), scale * LOG2E
    zeros = gl.zeros([ht.ROWS, ht.ROWS], gl.float32, S)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s, dk, dv = first_products(k, ht.matrix(q_ring[0], 0), zeros, dtype, D, S, DK, P)
    mbarrier.wait(v_full.index(0), 0)
    s, dk, dv = warpgroup_mma_wait(0, [s, dk, dv])
    place, rings, barriers = (begin, blocks, T_q), (q_ring, dy_ring), (q_full, dy_full)
    masked = gl.to_tensor(0)
    if CAUSAL:
        masked = gl.minimum(1, blocks - 1)
    for i in range(masked):
        dk, dv, s = step(
            dk, dv, s, i, k, v, zeros, scale2, key, place, rings, barriers, dtype, True, False, LEAN,
            STAGES, CAUSAL, S, P,
        )  # fmt: skip
        reload(q_descs, dy_descs, b, h, begin, head_start, i, blocks, rings, barriers, STAGES)
    for i in range(masked, blocks - 1):
        dk, dv, s = step(
            dk, dv, s, i, k, v, zeros, scale2, key, place, rings, barriers, dtype, False, False, LEAN,
            STAGES, CAUSAL, S, P,
        )  # fmt: skip
        reload(q_descs, dy_descs, b, h, begin, head_start, i, blocks, rings, barriers, STAGES)
    dk, dv, s = step(
        dk, dv, s, blocks - 1, k, v, zeros, scale2, key, place, rings, barriers, dtype, True, True, LEAN,
        STAGES, CAUSAL, S, P,
    )  # fmt: skip
    ht.store_tile(dv_desc, b, h, key, v_tile, 0, dv)
    ht.store_tile(dk_desc, b, h, key, k_tile, 0, ht.rotate_back(dk * scale, rotation_ptr, key, T_q))
    tma.store_wait(0)


@gluon.jit
def reload(q_descs, dy_descs, b, h, begin, head_start, i, blocks, rings, barriers, STAGES: gl.constexpr):
    """Start to copy later blocks to the slots of block i."""
    q_ring, dy_ring = rings
    q_full, dy_full = barriers
    gt.synchronize()  # all warps have read block i
    here, _ = gt.slot(i, STAGES)
    row = begin + (i + STAGES) * ht.ROWS
    load_block(dy_descs, b, h, row, head_start, dy_full, dy_ring, here, i + STAGES < blocks)
    load_block(q_descs, b, h, row, head_start, q_full, q_ring, here, i + STAGES < blocks)


# -- specialised -------------------------------------------------------------------------------------------------------


@gluon.jit
def producer(
    tiles, barriers, descs, sizes,
    WARP_GROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warp that starts all copies: k, q, v, dy, and then q and dy of each block of queries."""
    k_tiles, v_tiles, q_ring, dy_ring = tiles
    k_full, v_full, q_full, q_empty, dy_full, dy_empty = barriers
    k_desc, v_desc, q_descs, dy_descs = descs
    T_q, H = sizes
    head, b, h = ht.program_head(H)
    key = gl.program_id(1) * WARP_GROUPS * ht.ROWS
    begin, blocks = query_blocks(key, T_q, WARP_GROUPS, CAUSAL)
    ht.load_rows(k_desc, b, h, key, k_full.index(0), k_tiles, WARP_GROUPS)
    for i in range(blocks):
        row = begin + i * ht.ROWS
        j, parity = gt.slot(i, STAGES)
        mbarrier.wait(q_empty.index(j), parity ^ 1)
        load_block(q_descs, b, h, row, head * T_q, q_full, q_ring, j)
        if i == 0:
            ht.load_rows(v_desc, b, h, key, v_full.index(0), v_tiles, WARP_GROUPS)
        mbarrier.wait(dy_empty.index(j), parity ^ 1)
        load_block(dy_descs, b, h, row, head * T_q, dy_full, dy_ring, j)


@gluon.jit
def consumer(
    tiles, barriers, out_descs, rotation_ptr, sizes, scale, c: gl.constexpr,
    WARP_GROUPS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    LEAN: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dk and dv of the c-th 64 keys of the program, by one warp group."""
    k_tiles, v_tiles, q_ring, dy_ring = tiles
    k_full, v_full, q_full, q_empty, dy_full, dy_empty = barriers
    dk_desc, dv_desc = out_descs
    T_q, H = sizes
    S: gl.constexpr = gt.product_layout(ht.ROWS)
    DK: gl.constexpr = gt.product_layout(D)
    P: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    dtype: gl.constexpr = dk_desc.dtype
    head, b, h = ht.program_head(H)
    first_key = gl.program_id(1) * WARP_GROUPS * ht.ROWS
    begin, blocks = query_blocks(first_key, T_q, WARP_GROUPS, CAUSAL)
    key = first_key + c * ht.ROWS
    skipped = gl.to_tensor(0)
    if CAUSAL:  # earlier blocks concern only earlier keys
        skipped = gl.to_tensor(c)
        for i in range(skipped):
            ht.release_unread((q_full, q_empty), i, STAGES)
            ht.release_unread((dy_full, dy_empty), i, STAGES)

    k, v, scale2 = ht.matrix(k_tiles, c), ht.matrix(v_tiles, c), scale * LOG2E
    zeros = gl.zeros([ht.ROWS, ht.ROWS], gl.float32, S)
    mbarrier.wait(k_full.index(0), 0)
    j, parity = gt.slot(skipped, STAGES)
    mbarrier.wait(q_full.index(j), parity)
    s, dk, dv = first_products(k, ht.matrix(q_ring[0], j), zeros, dtype, D, S, DK, P)
    mbarrier.wait(v_full.index(0), 0)
    s, dk, dv = warpgroup_mma_wait(0, [s, dk, dv])
    place, rings, full = (begin, blocks, T_q), (q_ring, dy_ring), (q_full, dy_full)
    unmasked = skipped
    if CAUSAL:
        unmasked = gl.minimum(skipped + 1, blocks - 1)
    for i in range(skipped, unmasked):
        dk, dv, s = step(
            dk, dv, s, i, k, v, zeros, scale2, key, place, rings, full, dtype, True, False, LEAN,
            STAGES, CAUSAL, S, P,
        )  # fmt: skip
        release(q_empty, dy_empty, i, STAGES)
    for i in range(unmasked, blocks - 1):
        dk, dv, s = step(
            dk, dv, s, i, k, v, zeros, scale2, key, place, rings, full, dtype, False, False, LEAN,
            STAGES, CAUSAL, S, P,
        )  # fmt: skip
        release(q_empty, dy_empty, i, STAGES)
    dk, dv, s = step(
        dk, dv, s, blocks - 1, k, v, zeros, scale2, key, place, rings, full, dtype, True, True, LEAN,
        STAGES, CAUSAL, S, P,
    )  # fmt: skip
    ht.store_tile(dv_desc, b, h, key, v_tiles, c, dv)
    ht.store_tile(dk_desc, b, h, key, k_tiles, c, ht.rotate_back(dk * scale, rotation_ptr, key, T_q))
    tma.store_wait(0)


@gluon.jit
def release(q_empty, dy_empty, i, STAGES: gl.constexpr):
    """Tell the producer that this warp group has read block i."""
    here, _ = gt.slot(i, STAGES)
    mbarrier.arrive(dy_empty.index(here))
    mbarrier.arrive(q_empty.index(here))


@gluon.jit
def specialized_kernel(
    dk_desc, dv_desc, delta_desc, dy_desc, lse_desc, q_desc, k_desc, v_desc, rotation_ptr, T_q, H, scale,
    D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, LEAN: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dk and dv of 128 keys. REGISTERS: of each thread that computes."""
    q_ring = (gt.new_tiles(q_desc, STAGES), new_vectors(lse_desc, STAGES))
    dy_ring = (gt.new_tiles(dy_desc, STAGES), new_vectors(delta_desc, STAGES))
    tiles = (gt.new_tiles(k_desc, 2), gt.new_tiles(v_desc, 2), q_ring, dy_ring)
    q_full, q_empty = gt.new_barriers(STAGES, 1), gt.new_barriers(STAGES, 2)
    dy_full, dy_empty = gt.new_barriers(STAGES, 1), gt.new_barriers(STAGES, 2)
    barriers = (gt.new_barriers(1, 1), gt.new_barriers(1, 1), q_full, q_empty, dy_full, dy_empty)
    hopper.fence_async_shared()
    descs, out_descs = (k_desc, v_desc, (q_desc, lse_desc), (dy_desc, delta_desc)), (dk_desc, dv_desc)
    sizes = (T_q, H)
    gl.warp_specialize([
        (consumer, (tiles, barriers, out_descs, rotation_ptr, sizes, scale, 0, 2, D, STAGES, LEAN, CAUSAL)),
        (consumer, (tiles, barriers, out_descs, rotation_ptr, sizes, scale, 1, 2, D, STAGES, LEAN, CAUSAL)),
        (producer, (tiles, barriers, descs, sizes, 2, STAGES, CAUSAL)),
    ], [4, 1], [REGISTERS, gt.PRODUCER_REGISTERS])  # fmt: skip
