"""The kernels of a decode step for one sequence: five launches per layer, which load weights ahead of time.

For one row, a layer is a chain of short launches, each of which needs the result of the previous one. Most of the time
is their latency. The weights do not depend on a previous kernel, so each kernel loads its weights before it waits for
the previous kernel (batched.wait_for_previous_launch). These are the launches of a layer (w and b: the weight and the
bias of each product):

    q, k, v = LN(x) w + b; k and v are stored in the cache    layernorm_linear_kernel
    attention of each head over one split of the keys         split_keys_kernel
    y = attention over all splits; partial sums of y w        combine_product_kernel
    s = x + partial sums + b; g = gelu(LN(s) w + b)           layernorm_linear_kernel
    x = s + g w + b                                           linear_residual_kernel

A sum across the warps of a program takes about as long as loading its operands from the L2 cache. To avoid such sums,
each warp computes whole columns of a product, and no other warp adds to these columns. Each column of the weight must
then be contiguous in memory, so these kernels use transposed weights. LayerNorm needs two sums over x before the
product. The kernels compute these sums and the product at the same time:

    LN(x) w + b = r (x o gamma) w - r m (gamma w) + (beta w + b)

m is the mean and r the inverse standard deviation of x; gamma and beta are the weight and the bias of LayerNorm; o is
the elementwise product. The factors that do not depend on x are computed once per generation: the transposed weight w'
(`transpose`), gamma w and beta w + b (`fold_layernorm`). The variance is the mean of the squares minus the square of
the mean, in fp32. If the mean of a row is 30 times its standard deviation, this costs three digits of precision.

The weight of the projection after attention is not transposed. Each program of combine_product_kernel reads all key
splits of its heads, so there are few programs, with many columns each.
"""

# C channels, H heads, D head size; K rows and N columns of a weight, which is (N, K) if it is transposed
# the KV cache of a layer is (1, block, 2C): k (C) then v (C) of each of `block` positions, heads side by side

import math

import triton
import triton.language as tl

from stage2_cuda.decoding.batched import (
    EVICT_FIRST,
    MIN_SCORE,
    launch_tiled,
    load_rotated,
    load_rotation,
    newest_positions,
    wait_for_previous_launch,
)
from stage2_cuda.kernels.gelu import sigmoid_of_2u
from stage2_cuda.runtime.triton_launch import launch

WARPS = 8  # per program, in the kernels in which each warp computes whole columns
CHUNK_BYTES = 512  # part of a column that a warp loads at once
MAX_KEY_SPLITS = 32  # per head; combine_splits holds the results of all splits in registers
TRANSPOSE_BLOCK = 64  # rows and columns of a tile in `transpose`
# If each thread uses at most MAX_REGISTERS registers, a program fits on a multiprocessor together with a program of the
# previous launch. The 16-bit columns of a program then fit in registers if they have at most REGISTER_BYTES in total.
MAX_REGISTERS, REGISTER_BYTES = 128, 48 << 10


def split_heads(H, D, tiling):
    """(parts, heads per part): combine_product divides the H heads into parts and computes a partial sum for each."""
    heads = max(1, min(triton.cdiv(H, tiling.split_k), tiling.max_rows // D))
    return triton.cdiv(H, heads), heads


def keys_per_split(block, tiling):
    """The number of keys in one split of a cache with `block` positions. tiling.block_keys must be a power of two."""
    return max(tiling.block_keys, triton.next_power_of_2(triton.cdiv(block, MAX_KEY_SPLITS)))


def key_splits(block, tiling):
    """The number of splits of one head's keys, rounded up to a power of two."""
    return triton.next_power_of_2(triton.cdiv(block, keys_per_split(block, tiling)))


# -- launches, once per generation -------------------------------------------------------------------------------------


def transpose(pairs):
    """out (N, K) = w (K, N) transposed, for each of up to four pairs (out, w), in one launch."""
    arguments, tiles = [], []
    for out, w in pairs:
        K, N = w.shape
        arguments += [out, w, K, N]
        tiles.append(triton.cdiv(K, TRANSPOSE_BLOCK) * triton.cdiv(N, TRANSPOSE_BLOCK))
    arguments += [None, None, 0, 0] * (4 - len(tiles))
    launch(transpose_kernel, (max(tiles), len(tiles)), *arguments, BLOCK=TRANSPOSE_BLOCK, num_warps=4)


def fold_layernorm(gamma_w, beta_w, w, ln_w, ln_b, bias):
    """gamma_w (N) = ln_w w', beta_w (N) = ln_b w' + bias, both float32; w (N, K) is stored transposed."""
    grid, options = column_options(w, WARPS)
    launch(fold_layernorm_kernel, grid, gamma_w, beta_w, w, ln_w, ln_b, bias, w.shape[1], w.shape[0], **options)


# -- launches, every step ----------------------------------------------------------------------------------------------


def layernorm_linear(y, cache, s, residual, ln_w, w, gamma_w, beta_w, lengths, block, eps, tiling):
    """Without a cache (None): y (1, N) = gelu(LN(sum) w' + b); w (N, K) is stored transposed.

    With a cache (1, block, 2K): q, k, v = LN(sum) w' + b. The kernel stores q in y (1, K), and k and v in the cache at
    the newest position, lengths[0] - 1, modulo block. If y is (1, 2K), it stores q and k in y.

    residual: (x, partials, bias); sum = x + partials[0] + partials[1] + ... + bias, with x (1, K) float32, partials
    (parts, 1, K) float32, bias (K). If partials and bias are None, the sum is x. s (1, K) float32 receives the sum; it
    is None if the sum is not needed later. gamma_w, beta_w: from fold_layernorm; beta_w contains b and the bias of
    LayerNorm.
    """
    x, partials, bias = residual
    (N, K), (grid, options) = w.shape, column_options(w, tiling.block_n)
    arrays = y, cache, s, x, partials, bias, ln_w, w, gamma_w, beta_w, lengths
    arguments = *arrays, block, 1 / K, float(eps), K, N, y.shape[1]
    parts = 0 if partials is None else len(partials)
    launch_tiled(layernorm_linear_kernel, grid, *arguments, tiling=tiling, PARTS=parts, **options)


def split_keys_attention(y, maxima, sums, q, cache, lengths, n_head, tiling, rotation=None):
    """q (1, C) attends to the positions of the cache (1, block, 2C), split over the keys: see batched.attention().

    For each head and each split that has keys, store in float32 (flash decoding): the largest score in maxima
    (H, splits); the sum of the weights exp2(score - maximum) in sums (H, splits); the sum of the values times these
    weights in y (H, splits, D).
    """
    block, D = cache.shape[1], y.shape[2]
    keys, width = keys_per_split(block, tiling), triton.next_power_of_2(D)
    arguments = y, maxima, sums, q, cache, rotation, lengths, n_head, block, math.log2(math.e) / math.sqrt(D)
    warps = min(8, max(1, keys * width // 2048))  # preferably one: no synchronization between warps
    options = dict(SIZE=D, D=width, KEYS=keys, SPLITS=maxima.shape[1], num_warps=warps)
    launch_tiled(split_keys_kernel, (n_head, maxima.shape[1]), *arguments, tiling=tiling, **options)


def combine_product(partials, y, maxima, sums, lengths, w, block, tiling):
    """Combine the key splits to the attention output (1, C), and multiply it by w (C, N).

    y, maxima, sums: from split_keys_attention. Stores partial sums of the product in partials (parts, 1, N) float32;
    parts: from split_heads(). The sum of partials over the first axis is the product.
    """
    (H, splits, D), N = y.shape, w.shape[1]
    (parts, heads), width = split_heads(H, D, tiling), triton.next_power_of_2(D)
    arguments = partials, y, maxima, sums, lengths, w, H, N, heads, block
    options = dict(SIZE=D, D=width, SPLITS=splits, KEYS=keys_per_split(block, tiling))
    options |= dict(HEADS=triton.next_power_of_2(heads), BLOCK_N=tiling.split_block_n)
    options |= dict(BLOCK_K=options["HEADS"] * width)
    grid = triton.cdiv(N, tiling.split_block_n), parts
    launch_tiled(combine_product_kernel, grid, *arguments, tiling=tiling, **options)


def linear_residual(out, s, x, w, bias, tiling):
    """out (1, N) float32 = s + x w' + bias; s (1, N) float32, x (1, K), w (N, K) is stored transposed."""
    grid, options = column_options(w, WARPS)
    launch_tiled(linear_residual_kernel, grid, out, s, x, w, bias, w.shape[1], w.shape[0], tiling=tiling, **options)


def column_options(w, block_n):
    """(grid, options) of a kernel in which each warp computes whole columns of the weight; w (N, K) is transposed.

    A program has block_n columns, a power of two; fewer if they would not fit in REGISTER_BYTES.
    """
    (N, K), size = w.shape, w.dtype.itemsize
    while block_n > WARPS and block_n * K * size > REGISTER_BYTES:
        block_n //= 2
    chunk = CHUNK_BYTES // size
    options = dict(CHUNKS=triton.cdiv(K, chunk), CHUNK=chunk, BLOCK_N=block_n, num_warps=WARPS)
    if size == 2 and block_n * K * size <= REGISTER_BYTES:
        options["maxnreg"] = MAX_REGISTERS
    return (triton.cdiv(N, block_n),), options


# -- device functions on whole columns ---------------------------------------------------------------------------------
# A row vector of K elements is a tuple of CHUNKS vectors (CHUNK). The BLOCK_N weight columns of a program are a tuple
# of CHUNKS tiles (BLOCK_N, CHUNK): a row of a tile is part of one column of the weight and lies in one warp.


@triton.jit
def program_columns(BLOCK_N: tl.constexpr):
    """The columns of the weight that this program computes (BLOCK_N)."""
    return tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def load_columns(w_ptr, cols, K, N, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ONCE: tl.constexpr = False):
    """The columns `cols` of a weight, which is stored transposed (N, K): a tuple of tiles (BLOCK_N, CHUNK).

    ONCE: a step reads this weight once, so the L2 cache should replace it before other data, see EVICT_FIRST.
    """
    k, tiles = tl.arange(0, CHUNK)[None, :], ()
    for c in tl.static_range(CHUNKS):
        ptrs, mask = w_ptr + cols[:, None] * K + k + c * CHUNK, (cols < N)[:, None] & (k + c * CHUNK < K)
        if ONCE:
            tiles += (tl.load(ptrs, mask, 0, eviction_policy=EVICT_FIRST),)
        else:
            tiles += (tl.load(ptrs, mask, 0),)
    return tiles


@triton.jit
def load_row(x_ptr, K, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """x (K) as float32: a tuple of vectors (CHUNK), zero beyond K."""
    k, chunks = tl.arange(0, CHUNK), ()
    for c in tl.static_range(CHUNKS):
        chunks += (tl.load(x_ptr + k + c * CHUNK, k + c * CHUNK < K, 0).to(tl.float32),)
    return chunks


@triton.jit
def dot_columns(tiles, row, CHUNKS: tl.constexpr):
    """The dot product of a row vector (from load_row) with each column (from load_columns), float32 (BLOCK_N)."""
    total = tiles[0].to(tl.float32) * row[0][None, :]
    for c in tl.static_range(1, CHUNKS):
        total += tiles[c].to(tl.float32) * row[c][None, :]
    return tl.sum(total, 1)


@triton.jit
def add_rows(a, b, CHUNKS: tl.constexpr):
    """The sum of two row vectors, each a tuple of CHUNKS vectors."""
    chunks = ()
    for c in tl.static_range(CHUNKS):
        chunks += (a[c] + b[c],)
    return chunks


@triton.jit
def add_pairs(a, b, c, d):
    """The combine function of a tl.reduce over two arrays: (a, b) + (c, d)."""
    return a + c, b + d


# -- kernels: the functions that launch them, above, state what they compute -------------------------------------------


@triton.jit
def transpose_tile(out_ptr, w_ptr, K, N, BLOCK: tl.constexpr):
    """Transpose tile number program_id(0) of w (K, N); do nothing if there are fewer tiles."""
    tile_rows = tl.cdiv(K, BLOCK)
    rows = tl.program_id(0) % tile_rows * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(0) // tile_rows * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(w_ptr + rows[:, None] * N + cols[None, :], (rows < K)[:, None] & (cols < N)[None, :])
    tl.store(out_ptr + cols[:, None] * K + rows[None, :], tile.T, (cols < N)[:, None] & (rows < K)[None, :])


@triton.jit
def transpose_kernel(
    out_0_ptr, w_0_ptr, K_0, N_0, out_1_ptr, w_1_ptr, K_1, N_1, out_2_ptr, w_2_ptr, K_2, N_2, out_3_ptr, w_3_ptr,
    K_3, N_3, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    if number == 0:
        transpose_tile(out_0_ptr, w_0_ptr, K_0, N_0, BLOCK)
    if w_1_ptr is not None:
        if number == 1:
            transpose_tile(out_1_ptr, w_1_ptr, K_1, N_1, BLOCK)
    if w_2_ptr is not None:
        if number == 2:
            transpose_tile(out_2_ptr, w_2_ptr, K_2, N_2, BLOCK)
    if w_3_ptr is not None:
        if number == 3:
            transpose_tile(out_3_ptr, w_3_ptr, K_3, N_3, BLOCK)


@triton.jit
def fold_layernorm_kernel(
    gamma_w_ptr, beta_w_ptr, w_ptr, ln_w_ptr, ln_b_ptr, bias_ptr, K, N,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = program_columns(BLOCK_N)
    w, bias = load_columns(w_ptr, cols, K, N, CHUNKS, CHUNK), tl.load(bias_ptr + cols, cols < N, 0).to(tl.float32)
    tl.store(gamma_w_ptr + cols, dot_columns(w, load_row(ln_w_ptr, K, CHUNKS, CHUNK), CHUNKS), cols < N)
    tl.store(beta_w_ptr + cols, dot_columns(w, load_row(ln_b_ptr, K, CHUNKS, CHUNK), CHUNKS) + bias, cols < N)


@triton.jit
def layernorm_linear_kernel(
    y_ptr, cache_ptr, s_ptr, x_ptr, partials_ptr, bias_ptr, ln_w_ptr, w_ptr, gamma_w_ptr, beta_w_ptr, lengths_ptr,
    block, inverse_K, eps, K, N, y_columns,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cols, k = program_columns(BLOCK_N), tl.arange(0, CHUNK)
    # first, because this load takes longest; no kernel writes w
    w = load_columns(w_ptr, cols, K, N, CHUNKS, CHUNK, ONCE=True)
    ln_w = load_row(ln_w_ptr, K, CHUNKS, CHUNK)
    gamma_w, beta_w = tl.load(gamma_w_ptr + cols, cols < N, 0), tl.load(beta_w_ptr + cols, cols < N, 0)
    bias = ()
    if partials_ptr is not None:
        bias = load_row(bias_ptr, K, CHUNKS, CHUNK)
    if PDL:
        wait_for_previous_launch()
    position = newest_positions(lengths_ptr, 1, block, 1) if cache_ptr is not None else 0
    x = load_row(x_ptr, K, CHUNKS, CHUNK)  # issue all loads before the first value is used
    if partials_ptr is not None:
        for part in tl.static_range(PARTS):
            x = add_rows(x, load_row(partials_ptr + part * K, K, CHUNKS, CHUNK), CHUNKS)
        x = add_rows(x, bias, CHUNKS)
    scaled, total, squares = (), tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for c in tl.static_range(CHUNKS):
        scaled += (x[c] * ln_w[c],)
        total += x[c]
        squares += x[c] * x[c]
    value = dot_columns(w, scaled, CHUNKS)
    mean, mean_square = tl.reduce((total * inverse_K, squares * inverse_K), 0, add_pairs)
    value = (value - mean * gamma_w) / tl.sqrt(tl.maximum(mean_square - mean * mean, 0) + eps) + beta_w
    if cache_ptr is not None:
        tl.store(y_ptr + cols, value, cols < y_columns)
        tl.store(cache_ptr + position * (2 * K) + cols - K, value, (cols >= y_columns) & (cols < N))
    else:
        tl.store(y_ptr + cols, value * sigmoid_of_2u(value), cols < N)
    if s_ptr is not None:
        if tl.program_id(0) == 0:
            for c in tl.static_range(CHUNKS):
                tl.store(s_ptr + k + c * CHUNK, x[c], k + c * CHUNK < K)


@triton.jit
def linear_residual_kernel(
    out_ptr, s_ptr, x_ptr, w_ptr, bias_ptr, K, N,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    cols = program_columns(BLOCK_N)
    w = load_columns(w_ptr, cols, K, N, CHUNKS, CHUNK, ONCE=True)
    bias = tl.load(bias_ptr + cols, cols < N, 0).to(tl.float32)
    if PDL:
        wait_for_previous_launch()
    # x is loaded as BLOCK_N equal columns: each warp loads all of x, and no data moves between warps
    s, x = tl.load(s_ptr + cols, cols < N, 0), load_columns(x_ptr, 0 * cols, K, 1, CHUNKS, CHUNK)
    total = tl.zeros((BLOCK_N, CHUNK), tl.float32)
    for c in tl.static_range(CHUNKS):
        total += w[c].to(tl.float32) * x[c].to(tl.float32)
    tl.store(out_ptr + cols, s + (tl.sum(total, 1) + bias), cols < N)


@triton.jit
def split_keys_kernel(
    y_ptr, maxima_ptr, sums_ptr, q_ptr, cache_ptr, rotation_ptr, lengths_ptr, H, block, scale,
    SIZE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes the attention of one head over one split of KEYS keys.

    SIZE: head size; D: SIZE rounded up to a power of two; scale: log2(e) / sqrt(SIZE), because exp2 replaces exp.
    """
    h, split, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    length = tl.load(lengths_ptr)
    newest, length = (length - 1) % block, tl.minimum(length, block)
    if split * KEYS >= length:
        return  # the sequence does not reach this split yet
    C = H * SIZE
    cache_ptr += h * SIZE
    keys = split * KEYS + tl.arange(0, KEYS)
    k_ptrs = cache_ptr + keys[:, None] * (2 * C) + d[None, :]
    earlier = (keys < length) & (keys != newest)
    mask = earlier[:, None] & (d < SIZE)[None, :]
    k, v = tl.load(k_ptrs, mask, 0), tl.load(k_ptrs + C, mask, 0)  # written by earlier steps
    if rotation_ptr is not None:
        cos, sin = load_rotation(rotation_ptr, SIZE, D)
    if PDL:
        wait_for_previous_launch()
    new_mask = d < tl.where(newest // KEYS == split, SIZE, 0)  # the previous kernel wrote the newest key and value
    q_ptr += h * SIZE
    cache_ptr += newest * (2 * C)
    if rotation_ptr is not None:
        q, new_k = load_rotated(q_ptr, cos, sin, SIZE, D), load_rotated(q_ptr + C, cos, sin, SIZE, D)
        new_k = new_k.to(cache_ptr.dtype.element_ty)
        tl.store(cache_ptr + d, new_k, new_mask)
    else:
        q, new_k = tl.load(q_ptr + d, d < SIZE, 0).to(tl.float32), tl.load(cache_ptr + d, new_mask, 0)
    q, new_k = q * scale, new_k.to(tl.float32)
    new_v = tl.load(cache_ptr + C + d, new_mask, 0).to(tl.float32)
    scores = tl.where(earlier, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf"))
    new_score = tl.where(newest // KEYS == split, tl.sum(new_k * q, 0), float("-inf"))
    maximum = tl.maximum(tl.max(scores, 0), new_score)
    p, new_p = tl.math.exp2(scores - maximum), tl.math.exp2(new_score - maximum)
    offs = h * SPLITS + split
    tl.store(maxima_ptr + offs, maximum)
    tl.store(sums_ptr + offs, tl.sum(p, 0) + new_p)
    tl.store(y_ptr + offs * SIZE + d, tl.sum(p[:, None] * v.to(tl.float32), 0) + new_p * new_v, d < SIZE)


@triton.jit
def combine_splits(
    y_ptr, maxima_ptr, sums_ptr, heads, head_mask, used_splits,
    SIZE: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The attention output (HEADS, D) of `heads` (HEADS): combine their first `used_splits` key splits."""
    split, d = tl.arange(0, SPLITS), tl.arange(0, D)
    offs, mask = heads[:, None] * SPLITS + split[None, :], head_mask[:, None] & (split < used_splits)[None, :]
    maximum, total = tl.load(maxima_ptr + offs, mask, MIN_SCORE), tl.load(sums_ptr + offs, mask, 1)
    y_mask = mask[:, :, None] & (d < SIZE)[None, None, :]
    y = tl.load(y_ptr + offs[:, :, None] * SIZE + d[None, None, :], y_mask, 0)
    weight = tl.math.exp2(maximum - tl.max(maximum, 1)[:, None])
    return tl.sum(weight[:, :, None] * y, 1) / tl.sum(weight * total, 1)[:, None]


@triton.jit
def combine_product_kernel(
    partials_ptr, y_ptr, maxima_ptr, sums_ptr, lengths_ptr, w_ptr, H, N, heads_per_part, block,
    SIZE: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, cols = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_head, rows = part * heads_per_part, tl.arange(0, BLOCK_K)
    end_head = tl.minimum(first_head + heads_per_part, H)
    row_heads = first_head + rows // D  # the head of each row of w
    mask = ((row_heads < end_head) & (rows % D < SIZE))[:, None] & (cols < N)[None, :]
    w_ptrs = w_ptr + (row_heads * SIZE + rows % D)[:, None] * N + cols[None, :]
    w = tl.load(w_ptrs, mask, 0, eviction_policy=EVICT_FIRST)
    used_splits = tl.cdiv(tl.minimum(tl.load(lengths_ptr), block), KEYS)
    if PDL:
        wait_for_previous_launch()
    heads = first_head + tl.arange(0, HEADS)
    y = combine_splits(y_ptr, maxima_ptr, sums_ptr, heads, heads < end_head, used_splits, SIZE, D, SPLITS)
    x = tl.reshape(y, (BLOCK_K,))
    tl.store(partials_ptr + part * N + cols, tl.sum(x[:, None] * w.to(tl.float32), 0), cols < N)
