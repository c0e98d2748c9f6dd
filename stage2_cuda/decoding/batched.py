"""The kernels of a decode step for two or more sequences; layernorm() and unembed() also serve one sequence.

Each sequence gets one new position. A layer takes seven launches (w and b: the weight and the bias of each product; k'
is k transposed):

    h = LN(x)                                             layernorm_kernel
    q, k, v = h w + b; k and v are stored in the cache    linear_kernel
    y = softmax(q k') v                                   attention_kernel
    partial sums of y w, split over K                     split_k_kernel
    h = LN(x + partial sums + b)                          layernorm_kernel
    g = gelu(h w + b)                                     linear_kernel
    partial sums of g w, split over K                     split_k_kernel

A product reads each weight once for all sequences and uses tl.dot. A product with too few columns to occupy the GPU is
split over K, the dimension of the sum (split-K): each program computes a partial sum over part of K. The next
layernorm_kernel adds the partial sums in a fixed order, so no atomics and no further launch are needed. For one
sequence (single_row.py), and for some models and GPUs (cluster_step.py), there are other kernels of the layers.

Sequences may have different lengths. The kernels read the lengths from device memory, so one captured decode step (a
CUDA graph) works for all lengths.
"""

# B sequences, one row each; C channels, H heads, D head size, V vocabulary; a weight is (K, N), lm_head (V, C)
# w' is w transposed. The KV cache of a layer is (B, block, 2C), for `block` positions per sequence: k (C) then v (C) of
# each position, heads side by side

import math
from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stage2_cuda.kernels.gelu import sigmoid_of_2u
from stage2_cuda.runtime.triton_launch import can_overlap, launch

MIN_SCORE = tl.constexpr(-3.0e38)  # finite, because -inf - -inf would be NaN
# For loads of weights, which a step reads once: the L2 cache replaces them first, so that the activations and the KV
# cache stay there. The weights of GPT-2 124M do not fit in the L2 cache.
EVICT_FIRST = tl.constexpr("evict_first")
MAX_BATCH = 32  # sequences of one decode step


class DecodeTiling(NamedTuple):
    """Tile sizes of the decode kernels, and whether they use programmatic dependent launch (pdl).

    With pdl a kernel may start, and load weights, while the previous kernel still runs.
    """

    block_n: int  # columns of a weight per program, in the products that are not split over K
    split_k: int  # number of parts of K in split-K; more if a part would have more than `max_rows` rows
    split_block_n: int  # columns of a weight per program, in the products that are split over K
    # two or more sequences: cached keys per loop iteration, for 16 bits and head size 64; one sequence: the smallest
    # number of keys in one split (single_row.py)
    block_keys: int
    block_vocab: int  # rows of lm_head per program
    max_rows: int = 256  # largest number of rows of a weight in one part of split-K
    elements_per_thread: int = 128  # elements of a weight tile per thread; determines the number of warps
    block_k: int = 128  # rows per tl.dot of a 16-bit weight, for two or more sequences; half as many of an fp32 weight
    stages: int = 4  # tiles of a weight in shared memory at once, for two or more sequences; in the logits 3
    pdl: bool = False


SINGLE = DecodeTiling(block_n=32, split_k=3, split_block_n=64, block_keys=32, block_vocab=8)
BATCHED = DecodeTiling(block_n=32, split_k=2, split_block_n=32, block_keys=256, block_vocab=128)


def tiling_for(B):
    """The fastest DecodeTiling for B sequences, measured on an H200 without the kernels of cluster_step.py."""
    return (SINGLE if B == 1 else BATCHED)._replace(pdl=can_overlap())


class SplitK(NamedTuple):
    """A division of the K rows of a weight: `parts` parts of `rows` rows each; the last part may have fewer."""

    parts: int
    rows: int


def split_k(K, tiling):
    """The SplitK of K rows; `rows` is a multiple of 16, or tiling.max_rows."""
    rows = min(tiling.max_rows, 16 * triton.cdiv(K, 16 * tiling.split_k))
    return SplitK(triton.cdiv(K, rows), rows)


def block_k(tiling, w):
    """The number of rows of the weight w per tl.dot: the same number of bytes for every dtype of w."""
    return tiling.block_k * 2 // w.dtype.itemsize


# -- launches ----------------------------------------------------------------------------------------------------------


def layernorm(h, s, residual, ln_w, ln_b, eps, tiling):
    """Store the sum x + (bias + partials[0] + partials[1] + ...) in s (B, C) float32 and its LayerNorm in h (B, C).

    residual: (x, partials, bias), with x (B, C) float32, partials (parts, B, C) float32, bias (C). If partials and bias
    are None, the sum is x. s may be the array x; if s is None, the sum is not stored.
    """
    x, partials, bias = residual
    B, C = h.shape
    parts, width = 0 if partials is None else len(partials), triton.next_power_of_2(C)
    arguments = h, s, x, partials, bias, ln_w, ln_b, B, C, 1 / C, float(eps)
    launch_tiled(layernorm_kernel, (B,), *arguments, tiling=tiling, PARTS=parts, BLOCK_C=width)


def linear(y, cache, h, w, bias, lengths, block, tiling, precision):
    """Without a cache (None): y (B, N) = gelu(h w + bias); h (B, K), w (K, N).

    With a cache (B, block, 2K): q, k, v = h w + bias. The kernel stores q in y (B, K), and k and v in the cache at the
    newest position of each sequence b, lengths[b] - 1, modulo block. If y is (B, 2K), it stores q and k in y.
    """
    (B, K), N = h.shape, w.shape[1]
    arguments = y, cache, h, w, bias, lengths, B, K, N, y.shape[1], block
    options = dict(BLOCK_B=padded_batch(B), BLOCK_K=block_k(tiling, w), BLOCK_N=tiling.block_n, PRECISION=precision)
    grid = (triton.cdiv(N, tiling.block_n),)
    launch_tiled(linear_kernel, grid, *arguments, tiling=tiling, num_stages=tiling.stages, **options)


def attention(y, q, cache, lengths, n_head, tiling, rotation=None):
    """y (B, C) = attention of the query q[b] to the cached positions of sequence b, for every b.

    q (B, C); cache (B, block, 2C). These are the last lengths[b] positions, at most block; position number i is at
    index i % block. rotation: None, or Sequences.rotation; then q (B, 2C) has q and k of the newest position, and the
    kernel rotates both, and stores k in the cache.
    """
    B, C = y.shape
    block, D = cache.shape[1], C // n_head
    arguments = y, q, cache, rotation, lengths, n_head, block, math.log2(math.e) / math.sqrt(D)
    width = triton.next_power_of_2(D)
    # the tile sizes are those of 16-bit heads of 64; larger heads and fp32 get as many bytes, which fit in registers
    keys = max(16, tiling.block_keys * 2 * 64 // (cache.itemsize * max(64, width)))
    options = dict(SIZE=D, D=width, BLOCK_KEYS=keys)
    launch_tiled(attention_kernel, (B * n_head,), *arguments, tiling=tiling, **options)


def split_k_product(partials, x, w, tiling, precision):
    """Store partial sums of x w in partials (parts, B, N) float32; x (B, K), w (K, N).

    parts = split_k(K, tiling).parts. The sum of partials over the first axis is x w.
    """
    parts, B, N = partials.shape
    K = w.shape[0]
    arguments = partials, x, w, B, K, N, split_k(K, tiling).rows
    block_n = tiling.split_block_n
    options = dict(BLOCK_B=padded_batch(B), BLOCK_K=block_k(tiling, w), BLOCK_N=block_n, PRECISION=precision)
    grid = triton.cdiv(N, block_n), parts
    launch_tiled(split_k_kernel, grid, *arguments, tiling=tiling, num_stages=tiling.stages, **options)


def vocab_tiles(V, tiling):
    """The number of tiles into which unembed() divides the vocabulary; each program computes one tile."""
    return triton.cdiv(V, tiling.block_vocab)


def unembed(logits, maxima, indices, h, w, tiling, precision):
    """logits (B, V) float32 = h w'; h (B, C), w (V, C). Also store the largest logit of each vocabulary tile.

    maxima (B, tiles) float32: the largest logits; indices (B, tiles) int32: their token ids, the smallest id if several
    logits are equal. tiles = vocab_tiles(V, tiling).
    """
    (B, V), K, tiles = logits.shape, h.shape[1], maxima.shape[1]
    k_per_iteration = triton.next_power_of_2(K) if B == 1 else block_k(tiling, w)  # one row: no loop over K
    options = dict(BLOCK_B=padded_batch(B), BLOCK_K=k_per_iteration, BLOCK_N=tiling.block_vocab, PRECISION=precision)
    arguments = logits, maxima, indices, h, w, B, K, V, tiles
    launch_tiled(unembed_kernel, (tiles,), *arguments, tiling=tiling, num_stages=3, **options)


def padded_batch(B):
    """The number of rows of a tile that holds one row for each of B sequences."""
    return 1 if B == 1 else max(16, triton.next_power_of_2(B))  # tl.dot needs at least 16 rows


def launch_tiled(kernel, grid, *arguments, tiling, **options):
    """Launch a kernel, with programmatic dependent launch if tiling.pdl is true.

    The default number of warps gives each thread `tiling.elements_per_thread` elements of the tile of weights, or of
    partial sums (layernorm); it is at least 4 and at most 16.
    """
    elements = options.get("BLOCK_C", options.get("BLOCK_K", 1)) * options.get("BLOCK_N", options.get("PARTS", 1))
    warps = triton.next_power_of_2(elements) // (32 * tiling.elements_per_thread)
    options.setdefault("num_warps", min(16, max(4, warps)))
    if tiling.pdl:
        options["launch_pdl"] = True
    launch(kernel, grid, *arguments, PDL=tiling.pdl, **options)


# -- device functions that several kernels call ------------------------------------------------------------------------


@triton.jit
def wait_for_previous_launch():
    """With PDL: wait until the previous kernel has ended, then allow the next kernel to start early.

    Before this call a kernel may read only memory that the previous kernel does not write, such as weights, and must
    not write. After this call it may read the output of the previous kernel and overwrite the inputs of that kernel.
    The next kernel cannot start before this call. If it could, it would occupy multiprocessors that the previous kernel
    still needs, which costs more time than its early loads save.
    """
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def load_vector(x_ptr, C, BLOCK_C: tl.constexpr):
    """x (C) as float32 (BLOCK_C), zero beyond C."""
    cols = tl.arange(0, BLOCK_C)
    return tl.load(x_ptr + cols, cols < C, 0).to(tl.float32)


@triton.jit
def newest_positions(lengths_ptr, B, block, BLOCK_B: tl.constexpr):
    """The index in the cache of each sequence's newest token (BLOCK_B)."""
    rows = tl.arange(0, BLOCK_B)
    return (tl.load(lengths_ptr + rows, rows < B, 1) - 1) % block


@triton.jit
def load_rotation(rotation_ptr, SIZE: tl.constexpr, D: tl.constexpr):
    """The cosines and sines (D) for load_rotated(). rotation_ptr: SIZE / 2 cosines, then SIZE / 2 sines."""
    d = tl.arange(0, D)
    pair = tl.where(d < SIZE // 2, d, d - SIZE // 2)
    cos, sin = tl.load(rotation_ptr + pair, d < SIZE, 0), tl.load(rotation_ptr + SIZE // 2 + pair, d < SIZE, 0)
    return cos, tl.where(d < SIZE // 2, -sin, sin)


@triton.jit
def load_rotated(x_ptr, cos, sin, SIZE: tl.constexpr, D: tl.constexpr):
    """x (SIZE), a row of one head, rotated (kernels/rotary.py): float32 (D), zero beyond SIZE."""
    d = tl.arange(0, D)
    other = tl.where(d < SIZE // 2, d + SIZE // 2, d - SIZE // 2)  # the other channel of the pair
    x, y = tl.load(x_ptr + d, d < SIZE, 0).to(tl.float32), tl.load(x_ptr + other, d < SIZE, 0).to(tl.float32)
    return x * cos + y * sin


@triton.jit
def add_partials(x_ptr, partials_ptr, bias, row, B, C, PARTS: tl.constexpr, BLOCK_C: tl.constexpr):
    """x + (bias + the partial sums) of one row, float32 (BLOCK_C); only x if there are no partials."""
    cols = tl.arange(0, BLOCK_C)
    s = tl.load(x_ptr + row * C + cols, cols < C, 0)
    if partials_ptr is not None:
        # one part at a time: each thread adds its own columns, and no reduction across warps is needed
        for part in tl.static_range(PARTS):
            bias += tl.load(partials_ptr + (part * B + row) * C + cols, cols < C, 0)
        s += bias
    return s


@triton.jit
def normalize(s, weight, bias, C, inverse_C, eps, BLOCK_C: tl.constexpr):
    """LayerNorm of one row s (BLOCK_C), of which C elements are valid; inverse_C = 1 / C."""
    h = tl.where(tl.arange(0, BLOCK_C) < C, s - tl.sum(s, 0) * inverse_C, 0)
    h *= 1 / tl.sqrt(tl.sum(h * h, 0) * inverse_C + eps)
    return h * weight + bias


@triton.jit
def store_output(y_ptr, cache_ptr, value, B, cols, N, C, y_columns, position, block, BLOCK_B: tl.constexpr):
    """Without a cache (None), store gelu(value) in the columns `cols` of y (B, N); value (BLOCK_B, number of columns).

    With a cache, `value` has columns of q, k and v: store the first y_columns of them in y (B, y_columns), and the
    others in the cache at `position`.
    """
    rows = tl.arange(0, BLOCK_B)
    mask = (rows < B)[:, None] & (cols < N)[None, :]
    if cache_ptr is not None:
        offs = (rows.to(tl.int64) * block + position)[:, None] * (2 * C) + (cols - C)[None, :]
        tl.store(y_ptr + rows[:, None] * y_columns + cols[None, :], value, mask & (cols < y_columns)[None, :])
        tl.store(cache_ptr + offs, value, mask & (cols >= y_columns)[None, :])
    else:
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], value * sigmoid_of_2u(value), mask)


# -- kernels: the functions that launch them, above, state what they compute -------------------------------------------


@triton.jit
def layernorm_kernel(
    h_ptr, s_ptr, x_ptr, partials_ptr, bias_ptr, ln_w_ptr, ln_b_ptr, B, C, inverse_C, eps,
    PARTS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_C)
    ln_w, ln_b, bias = load_vector(ln_w_ptr, C, BLOCK_C), load_vector(ln_b_ptr, C, BLOCK_C), 0.0
    if partials_ptr is not None:
        bias = load_vector(bias_ptr, C, BLOCK_C)
    if PDL:
        wait_for_previous_launch()
    s = add_partials(x_ptr, partials_ptr, bias, row, B, C, PARTS, BLOCK_C)
    if s_ptr is not None:
        tl.store(s_ptr + row * C + cols, s, cols < C)
    tl.store(h_ptr + row * C + cols, normalize(s, ln_w, ln_b, C, inverse_C, eps, BLOCK_C), cols < C)


@triton.jit
def linear_kernel(
    y_ptr, cache_ptr, h_ptr, w_ptr, bias_ptr, lengths_ptr, B, K, N, y_columns, block,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        wait_for_previous_launch()
    rows, cols = tl.arange(0, BLOCK_B), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        h = tl.load(h_ptr + rows[:, None] * K + k[None, :], (rows < B)[:, None] & (k < K)[None, :], 0)
        w = tl.load(w_ptr + k[:, None] * N + cols[None, :], (k < K)[:, None] & (cols < N)[None, :], 0)
        acc = tl.dot(h, w, acc, input_precision=PRECISION)
    acc += tl.load(bias_ptr + cols, cols < N, 0).to(tl.float32)[None, :]
    position = newest_positions(lengths_ptr, B, block, BLOCK_B) if cache_ptr is not None else 0
    store_output(y_ptr, cache_ptr, acc, B, cols, N, K, y_columns, position, block, BLOCK_B)


@triton.jit
def attention_kernel(
    y_ptr, q_ptr, cache_ptr, rotation_ptr, lengths_ptr, H, block, scale,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK_KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes one head of one sequence, with an online softmax over blocks of keys.

    SIZE: head size; D: SIZE rounded up to a power of two; scale: log2(e) / sqrt(SIZE), because exp2 replaces exp.
    """
    b, h, d = tl.program_id(0) // H, tl.program_id(0) % H, tl.arange(0, D)
    C = H * SIZE
    cache_ptr += b.to(tl.int64) * block * 2 * C + h * SIZE
    length = tl.load(lengths_ptr + b)
    newest, length = (length - 1) % block, tl.minimum(length, block)
    if rotation_ptr is not None:
        cos, sin = load_rotation(rotation_ptr + b * SIZE, SIZE, D)
    if PDL:
        wait_for_previous_launch()
    if rotation_ptr is not None:  # the newest position first: the loop does not read what other threads store here
        q_ptr += b * 2 * C + h * SIZE
        newest_ptr = cache_ptr + newest * (2 * C) + d
        q, new_k = load_rotated(q_ptr, cos, sin, SIZE, D) * scale, load_rotated(q_ptr + C, cos, sin, SIZE, D)
        new_k = new_k.to(cache_ptr.dtype.element_ty)
        tl.store(newest_ptr, new_k, d < SIZE)
        maximum, total = tl.sum(q * new_k.to(tl.float32), 0), tl.full((), 1, tl.float32)
        acc = tl.load(newest_ptr + C, d < SIZE, 0).to(tl.float32)
    else:
        q = tl.load(q_ptr + b * C + h * SIZE + d, d < SIZE, 0).to(tl.float32) * scale
        maximum, total, acc = tl.full((), MIN_SCORE, tl.float32), tl.full((), 0, tl.float32), tl.zeros((D,), tl.float32)
    for start in tl.range(0, length, BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        attended = keys < length
        if rotation_ptr is not None:
            attended &= keys != newest
        mask = attended[:, None] & (d < SIZE)[None, :]
        k_ptrs = cache_ptr + keys[:, None] * (2 * C) + d[None, :]
        k, v = tl.load(k_ptrs, mask, 0), tl.load(k_ptrs + C, mask, 0)
        scores = tl.where(attended, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        p, rescale = tl.math.exp2(scores - new_maximum), tl.math.exp2(maximum - new_maximum)
        maximum, total = new_maximum, total * rescale + tl.sum(p, 0)
        acc = acc * rescale + tl.sum(p[:, None] * v.to(tl.float32), 0)
    tl.store(y_ptr + b * C + h * SIZE + d, acc / total, d < SIZE)


@triton.jit
def split_k_kernel(
    partials_ptr, x_ptr, w_ptr, B, K, N, part_rows,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, cols = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_B)
    if PDL:
        wait_for_previous_launch()
    acc = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for start in tl.range(0, part_rows, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_mask = (k < part_rows) & (part * part_rows + k < K)
        k += part * part_rows
        x = tl.load(x_ptr + rows[:, None] * K + k[None, :], (rows < B)[:, None] & k_mask[None, :], 0)
        w = tl.load(w_ptr + k[:, None] * N + cols[None, :], k_mask[:, None] & (cols < N)[None, :], 0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    offs = (part * B + rows)[:, None] * N + cols[None, :]
    tl.store(partials_ptr + offs, acc, (rows < B)[:, None] & (cols < N)[None, :])


@triton.jit
def unembed_kernel(
    logits_ptr, maxima_ptr, indices_ptr, h_ptr, w_ptr, B, K, V, tiles,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows, v = tl.arange(0, BLOCK_B), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_offs = v.to(tl.int64)[:, None] * K
    if BLOCK_B == 1:
        k = tl.arange(0, BLOCK_K)
        w_mask = (v < V)[:, None] & (k < K)[None, :]
        w = tl.load(w_ptr + w_offs + k[None, :], w_mask, 0, eviction_policy=EVICT_FIRST)
        if PDL:
            wait_for_previous_launch()
        h = tl.load(h_ptr + k, k < K, 0).to(tl.float32)
        acc = tl.sum(w.to(tl.float32) * h[None, :], 1)[None, :]
    else:
        if PDL:
            wait_for_previous_launch()
        acc = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            h = tl.load(h_ptr + rows[:, None] * K + k[None, :], (rows < B)[:, None] & (k < K)[None, :], 0)
            w = tl.load(w_ptr + w_offs + k[None, :], (v < V)[:, None] & (k < K)[None, :], 0)
            acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
    tl.store(logits_ptr + rows.to(tl.int64)[:, None] * V + v[None, :], acc, (rows < B)[:, None] & (v < V)[None, :])
    acc = tl.where((v < V)[None, :], acc, float("-inf"))
    maximum = tl.max(acc, 1)
    first_index = tl.min(tl.where(acc == maximum[:, None], v[None, :], V - 1), 1)  # the first of equal logits
    tl.store(maxima_ptr + rows * tiles + tl.program_id(0), maximum, rows < B)
    tl.store(indices_ptr + rows * tiles + tl.program_id(0), first_index, rows < B)
