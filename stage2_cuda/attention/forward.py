"""The forward kernel of launches.py, and the functions on tiles that its backward kernels share.

A kernel reads q, k and v (B, H, T, D) through tensor descriptors, which hold the addresses, shapes and strides of the
arrays. On a Hopper GPU the TMA unit then copies a tile between global and shared memory without using registers. Reads
outside an array return zero and writes there are dropped. A tile therefore needs no mask to load or store the rows
beyond T or the columns beyond D. The scores s of keys beyond T_k do need a mask, because a score of zero is not neutral
in a softmax.
"""

# T_q queries, T_k keys, D head size, HEAD_DIM = D rounded up to a power of two, H heads
# a tile of the scores s is BLOCK_M queries (rows) by BLOCK_N keys (columns); offs_m and offs_n are their positions
# CAUSAL: query i attends to the keys 0 to i. MASK_KEYS: tiles may contain keys beyond T_k that no causal mask hides.
# LOOPS: 1 or 2, see TileConfig in launches.py
# IN_PARTS: several programs divide the loop of one tile; tl.program_id(2) is the number of the part

import math

import triton
import triton.language as tl

# The kernels compute exp(x) as exp2(x LOG2E), because the GPU has an instruction for exp2, but none for exp.
LOG2E, LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest float32; unlike -inf, LOWEST - LOWEST is 0


# -- tiles -------------------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(desc, b, h, row, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    return desc.load([b, h, row, 0]).reshape(BLOCK_ROWS, HEAD_DIM)


@triton.jit
def store_tile(desc, tile, b, h, row, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    desc.store([b, h, row, 0], tile.to(desc.dtype).reshape(1, 1, BLOCK_ROWS, HEAD_DIM))


@triton.jit
def key_range(
    start_m, T_k, loop, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOPS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """[begin, end) of the keys in this loop, for the tile of queries [start_m, start_m + BLOCK_M).

    With two loops: loop 0 covers the tiles that need no mask, loop 1 the tiles on the diagonal and at the end. With
    IN_PARTS: only those of this program's part, which may be empty.
    """
    begin, end = 0, T_k
    if CAUSAL:
        end = tl.minimum(start_m + BLOCK_M, T_k)
    if LOOPS == 2:
        full_end = T_k
        if CAUSAL:
            full_end = tl.minimum(start_m, T_k)
        if CAUSAL or MASK_KEYS:
            full_end = full_end // BLOCK_N * BLOCK_N
        if loop == 0:
            end = full_end
        else:
            begin = full_end
    return part_of_range(begin, end, BLOCK_N, IN_PARTS)


@triton.jit
def part_of_range(begin, end, BLOCK: tl.constexpr, IN_PARTS: tl.constexpr):
    """[begin, end) of this program's part of a range with steps of BLOCK; it may be empty."""
    if IN_PARTS:
        size = tl.cdiv(tl.cdiv(end - begin, BLOCK), tl.num_programs(2)) * BLOCK
        begin += size * tl.program_id(2)
        end = tl.minimum(begin + size, end)
    return begin, end


@triton.jit
def head_of_output(h, IN_PARTS: tl.constexpr):
    """The index of this program's output among the heads: with IN_PARTS, a head has one output for each part."""
    if IN_PARTS:
        h = h * tl.num_programs(2) + tl.program_id(2)
    return h


@triton.jit
def causal_mask(offs_m, offs_n):
    return offs_m[:, None] >= offs_n[None, :]  # (BLOCK_M, BLOCK_N): a query attends to its own key and earlier ones


@triton.jit
def mask_tile(
    tile, masked_value, offs_m, start_m, start_n, T_k,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr,
):  # fmt: skip
    """The tile (BLOCK_M, BLOCK_N) with masked_value for each pair of a query and a key that it does not attend to."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    if CAUSAL:
        if start_n + BLOCK_N > start_m:
            tile = tl.where(causal_mask(offs_m, offs_n), tile, masked_value)
    if MASK_KEYS:
        if start_n + BLOCK_N > T_k:
            tile = tl.where(offs_n[None, :] < T_k, tile, masked_value)
    return tile


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def softmax_step(s, row_max, row_sum, acc, scale):
    """One step of the online softmax for the scores s (BLOCK_M, BLOCK_N), in base 2.

    Returns p = exp2(scale s - new maximum), the new maximum, and row_sum (BLOCK_M) and acc (BLOCK_M, HEAD_DIM)
    rescaled to the new maximum, with p added to row_sum.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    p = tl.math.exp2(s * scale - new_max[:, None])
    rescale = tl.math.exp2(row_max - new_max)
    return p, new_max, row_sum * rescale + tl.sum(p, 1), acc * rescale[:, None]


@triton.jit
def forward_kernel(
    y_desc, lse_ptr, q_desc, k_desc, v_desc, T_q, T_k, H, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, LOOPS: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_KEYS: tl.constexpr, IN_PARTS: tl.constexpr, NATURAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y and the logsumexp of BLOCK_M queries; scale: log2(e) / sqrt(D).

    NATURAL: store the logsumexp as a natural logarithm; otherwise in base 2, as the kernels compute it. With IN_PARTS,
    both are those of a part of the keys, for combine_kernel in torch_bridge/kernels/attention_parts.py.
    """
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    start_m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # last queries first: they have the longest loops
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(q_desc, b, h, start_m, BLOCK_M, HEAD_DIM)
    # all scores of a row in a tile may be -inf, and the difference of two infinities would be NaN
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for loop in tl.static_range(LOOPS):
        begin, end = key_range(start_m, T_k, loop, BLOCK_M, BLOCK_N, LOOPS, CAUSAL, MASK_KEYS, IN_PARTS)
        for start_n in tl.range(begin, end, BLOCK_N):
            start_n = tl.multiple_of(start_n, BLOCK_N)
            k = load_tile(k_desc, b, h, start_n, BLOCK_N, HEAD_DIM)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
            if loop == LOOPS - 1:
                s = mask_tile(s, float("-inf"), offs_m, start_m, start_n, T_k, BLOCK_N, CAUSAL, MASK_KEYS)
            p, row_max, row_sum, acc = softmax_step(s, row_max, row_sum, acc, scale)
            v = load_tile(v_desc, b, h, start_n, BLOCK_N, HEAD_DIM)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BLOCK_M, HEAD_DIM)
    lse = row_max + tl.math.log2(row_sum)
    if NATURAL:
        lse *= LN2
    if IN_PARTS:
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # a part without keys: y is 0, the logsumexp is -inf
    head = head_of_output(tl.program_id(0).to(tl.int64), IN_PARTS)
    tl.store(lse_ptr + head * T_q + offs_m, lse, mask=offs_m < T_q)
    store_tile(y_desc, acc / row_sum[:, None], b, head_of_output(h, IN_PARTS), start_m, BLOCK_M, HEAD_DIM)
