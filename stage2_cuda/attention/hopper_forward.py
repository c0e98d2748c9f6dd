"""The forward pass of attention in Gluon, for Hopper GPUs; launches.py says when it is used.

The algorithm is that of forward.py. The gain comes from two products in flight. A tile of 64 queries walks
over its blocks of keys from the last one, which the masks concern, to the first. In each step the tensor cores compute
s of this block and p v of the previous block, and the exponentials of this block run under the second product:

    start s = q k(j)'     start acc += p(j - 1) v(j - 1)     wait for s     p(j) = exp2(s)     wait for acc

pipelined_kernel: small programs of one warp group, three on a multiprocessor; any thread starts copies. For a short T.
specialized_kernel: two or three warp groups compute, one more warp starts the copies. For a long T.
"""

# Symbols: see hopper_tiles.py. scale: log2(e) / sqrt(D). y, lse and NATURAL: see forward.py

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from stage2_cuda.attention import hopper_tiles as ht
from stage2_cuda.attention.forward import LN2
from stage2_cuda.runtime import gluon_tiles as gt

# -- the online softmax ------------------------------------------------------------------------------------------------


@gluon.jit
def first_softmax(s, scale, operand_layout: gl.constexpr, dtype: gl.constexpr):
    """(p as an operand, row_max, row_sum) of the first block of keys; see softmax_step of forward.py."""
    row_max = gl.max(s, 1) * scale
    p = gt.exp2(s * scale - row_max[:, None])
    return gl.convert_layout(p.to(dtype), operand_layout), row_max, gl.sum(p, 1)


@gluon.jit
def softmax_step(s, row_max, row_sum, scale, operand_layout: gl.constexpr, dtype: gl.constexpr):
    """(p as an operand, new row_max, new row_sum, the factor for acc) of another block of keys."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    p = gt.exp2(s * scale - new_max[:, None])
    rescale = gt.exp2(row_max - new_max)
    row_sum = row_sum * rescale + gl.sum(p, 1)
    return gl.convert_layout(p.to(dtype), operand_layout), new_max, row_sum, rescale


@gluon.jit
def rescaled(acc, rescale, layout: gl.constexpr):
    return acc * gl.convert_layout(rescale, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def start_output(p, acc, rescale, v_tiles, v_full, v_slot, v_parity, layout: gl.constexpr):
    """Start acc * rescale + p v, once the copy to the tile v_slot has arrived."""
    acc = rescaled(acc, rescale, layout)
    mbarrier.wait(v_full.index(v_slot), v_parity)
    return warpgroup_mma(p, ht.matrix(v_tiles, v_slot), acc, is_async=True)


@gluon.jit
def store_lse(lse_ptr, head, row, T_q, row_max, row_sum, NATURAL: gl.constexpr, layout: gl.constexpr):
    lse = row_max + gt.log2(row_sum)
    if NATURAL:
        lse *= LN2
    rows = row + gl.arange(0, ht.ROWS, gl.SliceLayout(1, layout))
    gl.store(lse_ptr + head.to(gl.int64) * T_q + rows, lse, mask=rows < T_q)


# -- pipelined ---------------------------------------------------------------------------------------------------------


@gluon.jit
def pipelined_kernel(
    y_desc, lse_ptr, q_desc, k_desc, v_desc, T_q, T_k, H, scale,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr, NATURAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y and the logsumexp of 64 queries, by one warp group."""
    S: gl.constexpr = gt.product_layout(BLOCK_N, num_warps)
    Y: gl.constexpr = gt.product_layout(D, num_warps)
    P: gl.constexpr = gl.DotOperandLayout(0, Y, 2)
    q_tile, k_tiles, v_tiles = gt.new_tiles(q_desc, 1), gt.new_tiles(k_desc, STAGES), gt.new_tiles(v_desc, STAGES)
    q_full, k_full, v_full = gt.new_barriers(1, 1), gt.new_barriers(STAGES, 1), gt.new_barriers(STAGES, 1)
    gt.make_barriers_visible()
    # blocks are numbered from the last to the first; `last` is the first key of block 0
    head, b, h, row, blocks, last = ht.tile_rows(T_k, H, BLOCK_N, CAUSAL)
    ht.load_tile(q_desc, b, h, row, q_full, q_tile, 0)
    for i in gl.static_range(STAGES):
        ht.load_tile(k_desc, b, h, last - i * BLOCK_N, k_full, k_tiles, i, i < blocks)
        ht.load_tile(v_desc, b, h, last - i * BLOCK_N, v_full, v_tiles, i, i < blocks)

    q = ht.matrix(q_tile, 0)
    zeros = gl.zeros([ht.ROWS, BLOCK_N], gl.float32, S)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = ht.start_product(q, k_tiles, 0, zeros)
    s = warpgroup_mma_wait(0, [s])
    gt.synchronize()  # all warps have read k of block 0
    ht.load_tile(k_desc, b, h, last - STAGES * BLOCK_N, k_full, k_tiles, 0, STAGES < blocks)
    s = ht.mask_tile(s, float("-inf"), row, last, T_k, S, CAUSAL, MASK_KEYS)
    p, row_max, row_sum = first_softmax(s, scale, P, q_desc.dtype)
    acc = gl.zeros([ht.ROWS, D], gl.float32, Y)
    rescale = gl.full([ht.ROWS], 1.0, gl.float32, gl.SliceLayout(1, S))
    mbarrier.wait(k_full.index(1), 0, pred=blocks > 1)
    for j in range(1, blocks):  # k of block j has arrived
        v_slot, v_parity = gt.slot(j - 1, STAGES)
        k_slot, k_parity = gt.slot(j, STAGES)
        s = ht.start_product(q, k_tiles, k_slot, zeros)
        acc = start_output(p, acc, rescale, v_tiles, v_full, v_slot, v_parity, Y)
        s = warpgroup_mma_wait(1, [s])
        next_p, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, scale, P, q_desc.dtype)
        # The branch in this wait keeps the assembler from moving the next wait up, before the exponentials.
        next_slot, next_parity = gt.slot(j + 1, STAGES)
        mbarrier.wait(k_full.index(next_slot), next_parity, pred=j + 1 < blocks)
        acc, p = warpgroup_mma_wait(0, [acc, p])  # p stays in its registers until the product has read it
        p = next_p
        gt.synchronize()  # all warps have read k of block j and v of block j - 1
        row_of_k = last - (j + STAGES) * BLOCK_N
        ht.load_tile(v_desc, b, h, row_of_k + BLOCK_N, v_full, v_tiles, v_slot, j - 1 + STAGES < blocks)
        ht.load_tile(k_desc, b, h, row_of_k, k_full, k_tiles, k_slot, j + STAGES < blocks)

    v_slot, v_parity = gt.slot(blocks - 1, STAGES)
    acc = start_output(p, acc, rescale, v_tiles, v_full, v_slot, v_parity, Y)
    store_lse(lse_ptr, head, row, T_q, row_max, row_sum, NATURAL, S)
    acc, p = warpgroup_mma_wait(0, [acc, p])
    ht.store_tile(y_desc, b, h, row, q_tile, 0, rescaled(acc, 1.0 / row_sum, Y))
    tma.store_wait(0)


# -- specialised -------------------------------------------------------------------------------------------------------


@gluon.jit
def producer(
    tiles, barriers, descs, sizes,
    WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warp that starts all copies: q, then k and v in the order in which they are used, v one block later."""
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = barriers
    q_desc, k_desc, v_desc = descs
    head, b, h, row, blocks = ht.query_rows(sizes, 0, BLOCK_N, WARP_GROUPS, CAUSAL)
    ht.load_rows(q_desc, b, h, row, q_full.index(0), q_tiles, WARP_GROUPS)
    start = (blocks - 1) * BLOCK_N
    for j in range(blocks + 1):
        if j < blocks:
            ht.load_when_released(k_desc, b, h, start, (k_full, k_empty), k_tiles, j, STAGES)
        if j > 0:
            ht.load_when_released(v_desc, b, h, start + BLOCK_N, (v_full, v_empty), v_tiles, j - 1, STAGES)
        start -= BLOCK_N


@gluon.jit
def consumer(
    arrays, sizes, scale, c: gl.constexpr,
    WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr, NATURAL: gl.constexpr,
):  # fmt: skip
    """y and the logsumexp of the c-th 64 queries of the program, by one warp group."""
    tiles, barriers, y_desc, lse_ptr = arrays
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = barriers
    T_q, T_k, H = sizes
    S: gl.constexpr = gt.product_layout(BLOCK_N)
    Y: gl.constexpr = gt.product_layout(D)
    P: gl.constexpr = gl.DotOperandLayout(0, Y, 2)
    head, b, h, row, blocks = ht.query_rows(sizes, c, BLOCK_N, WARP_GROUPS, CAUSAL)
    k_barriers, v_barriers = (k_full, k_empty), (v_full, v_empty)
    skipped, left = ht.skip_blocks(row, blocks, T_k, k_barriers, v_barriers, BLOCK_N, STAGES, STAGES, CAUSAL)

    q = ht.matrix(q_tiles, c)
    zeros = gl.zeros([ht.ROWS, BLOCK_N], gl.float32, S)
    mbarrier.wait(q_full.index(0), 0)
    i, parity = gt.slot(skipped, STAGES)
    mbarrier.wait(k_full.index(i), parity)
    s = ht.start_product(q, k_tiles, i, zeros)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(k_empty.index(i))
    s = ht.mask_tile(s, float("-inf"), row, (left - 1) * BLOCK_N, T_k, S, CAUSAL, MASK_KEYS)
    p, row_max, row_sum = first_softmax(s, scale, P, y_desc.dtype)
    acc = gl.zeros([ht.ROWS, D], gl.float32, Y)
    rescale = gl.full([ht.ROWS], 1.0, gl.float32, gl.SliceLayout(1, S))
    next_slot, next_parity = gt.slot(skipped + 1, STAGES)
    mbarrier.wait(k_full.index(next_slot), next_parity, pred=left > 1)
    for j in range(skipped + 1, blocks):  # k of block j has arrived
        v_slot, v_parity = gt.slot(j - 1, STAGES)
        k_slot, k_parity = gt.slot(j, STAGES)
        s = ht.start_product(q, k_tiles, k_slot, zeros)
        acc = start_output(p, acc, rescale, v_tiles, v_full, v_slot, v_parity, Y)
        s = warpgroup_mma_wait(1, [s])
        mbarrier.arrive(k_empty.index(k_slot))
        next_p, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, scale, P, y_desc.dtype)
        # The branch in this wait keeps the assembler from moving the next wait up, before the exponentials.
        next_slot, next_parity = gt.slot(j + 1, STAGES)
        mbarrier.wait(k_full.index(next_slot), next_parity, pred=j + 1 < blocks)
        acc, p = warpgroup_mma_wait(0, [acc, p])  # p stays in its registers until the product has read it
        mbarrier.arrive(v_empty.index(v_slot))
        p = next_p

    v_slot, v_parity = gt.slot(blocks - 1, STAGES)
    acc = start_output(p, acc, rescale, v_tiles, v_full, v_slot, v_parity, Y)
    store_lse(lse_ptr, head, row, T_q, row_max, row_sum, NATURAL, S)
    acc, p = warpgroup_mma_wait(0, [acc, p])
    if row < T_q:
        ht.store_tile(y_desc, b, h, row, q_tiles, c, rescaled(acc, 1.0 / row_sum, Y))
    tma.store_wait(0)


@gluon.jit
def specialized_kernel(
    y_desc, lse_ptr, q_desc, k_desc, v_desc, T_q, T_k, H, scale,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr, MASK_KEYS: gl.constexpr, NATURAL: gl.constexpr,
):  # fmt: skip
    """y and the logsumexp of WARP_GROUPS * 64 queries. REGISTERS: of each thread that computes."""
    tiles = (gt.new_tiles(q_desc, WARP_GROUPS), gt.new_tiles(k_desc, STAGES), gt.new_tiles(v_desc, STAGES))
    k_full, v_full = gt.new_barriers(STAGES, 1), gt.new_barriers(STAGES, 1)
    k_empty, v_empty = gt.new_barriers(STAGES, WARP_GROUPS), gt.new_barriers(STAGES, WARP_GROUPS)
    barriers = (gt.new_barriers(1, 1), k_full, k_empty, v_full, v_empty)
    hopper.fence_async_shared()
    descs, sizes = (q_desc, k_desc, v_desc), (T_q, T_k, H)
    arrays = (tiles, barriers, y_desc, lse_ptr)
    if WARP_GROUPS == 2:
        gl.warp_specialize([
            (consumer, (arrays, sizes, scale, 0, 2, BLOCK_N, D, STAGES, CAUSAL, MASK_KEYS, NATURAL)),
            (consumer, (arrays, sizes, scale, 1, 2, BLOCK_N, D, STAGES, CAUSAL, MASK_KEYS, NATURAL)),
            (producer, (tiles, barriers, descs, sizes, 2, BLOCK_N, STAGES, CAUSAL)),
        ], [4, 1], [REGISTERS, gt.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.static_assert(WARP_GROUPS == 3)
        gl.warp_specialize([
            (consumer, (arrays, sizes, scale, 0, 3, BLOCK_N, D, STAGES, CAUSAL, MASK_KEYS, NATURAL)),
            (consumer, (arrays, sizes, scale, 1, 3, BLOCK_N, D, STAGES, CAUSAL, MASK_KEYS, NATURAL)),
            (consumer, (arrays, sizes, scale, 2, 3, BLOCK_N, D, STAGES, CAUSAL, MASK_KEYS, NATURAL)),
            (producer, (tiles, barriers, descs, sizes, 3, BLOCK_N, STAGES, CAUSAL)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, gt.PRODUCER_REGISTERS])  # fmt: skip
