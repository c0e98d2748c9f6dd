"""Cross-entropy of a chunk of logits. Forward gives three numbers per row; backward gives the gradient of the logits.

For one row of logits, whose columns v are tokens and whose column `target` is the correct token:

    maximum = max over v of logits[v];  sum = sum over v of exp(logits[v] - maximum);  target_logit = logits[target]
    loss = log(sum) - (target_logit - maximum);  dlogits[v] = scale (exp(logits[v] - maximum) / sum - (v == target))

The maximum and the sum are computed in one pass (online softmax, Milakov and Gimelshein 2018): when the maximum rises
from m to m', the sum so far is multiplied by exp(m - m'). A program reads a row in tiles. A tile is divided into groups
of VECTOR adjacent columns; one thread loads a group, 16 bytes with each instruction. There is one maximum and one sum
for group 0 of all tiles, one for group 1 of all tiles, and so on. They are combined once, at the end of the row.

Performance: the rows should be padded to a multiple of 16 columns, or the GPU loads single elements. The padding does
not change the results. The kernels with one program per row load full tiles without a mask. forward_backward_kernel
first computes the gradient of full tiles without the term for the target, and corrects this one element at the end. So
it does not compare the columns of a full tile with vocab or with the target, and needs no tl.where there. The other
tiles need both comparisons and three tl.where per element: write_gradient(). Tiles are large, so that a multiprocessor
runs few programs at a time. Each program has one row, so few rows are in use, and they stay in the L2 cache until the
second pass.
"""

# N: rows of this chunk. width: columns; the first V = vocab columns are tokens, the others are padding.
# first: the token of column 0; column v is token first + v. It differs from 0 only with tensor parallelism, where each
# rank has a part of the vocabulary.

import math
from pathlib import Path

import numpy as np
import triton
import triton.language as tl

from stage2_cuda.runtime import cuda_launch
from stage2_cuda.runtime.cuda_launch import CudaSource
from stage2_cuda.runtime.triton_launch import launch

TILE_BYTES = 32768  # bytes of the logits of one tile, which is a part of one row
VECTOR = 8  # adjacent columns that one thread loads: one 16-byte load in 16 bits, two in fp32
STAGES = 3  # num_stages (software pipelining) of the first pass, which reads memory; the second pass reads the cache
LOG2E = tl.constexpr(math.log2(math.e))
CUDA_FILE, CUDA_THREADS = Path(__file__).with_name("cross_entropy.cu"), 256
# Columns of the logits for which cross_entropy.cu is used, in 16 bits: a row is longer than a tile, and two rows fit
# the shared memory of a multiprocessor.
CUDA_WIDTHS = range(TILE_BYTES // 2 + 32, (112 << 10) // 2 + 1, 32)


def tile_size(logits):
    """(columns, warps) of a tile for these logits (N, width)."""
    columns = min(TILE_BYTES // logits.itemsize, max(VECTOR, triton.next_power_of_2(logits.shape[1])))
    return columns, max(1, columns // 512)


def row_options(logits, vocab):
    """Constants of the kernels with one program per row. A row has full tiles of BLOCK columns and a last tile of TAIL.

    TAIL is 0 if the full tiles cover the row. vocab: V, the number of columns that are not padding.
    """
    block, warps = tile_size(logits)
    full_tiles, width = vocab // block, logits.shape[1]
    tail = triton.next_power_of_2(max(VECTOR, width - full_tiles * block)) if width > full_tiles * block else 0
    return dict(BLOCK=block, TAIL=tail, VECTOR=VECTOR, STAGES=STAGES if full_tiles > 1 else 1, num_warps=warps)


def uses_cuda(dlogits, logits):
    """Whether cross_entropy.cu computes the three numbers of each row and dlogits; dlogits may be None."""
    return logits.shape[1] in CUDA_WIDTHS and cuda_launch.serves(logits.dtype, dlogits, logits)


def launch_cuda(dlogits, maxima, sums, target_logits, logits, targets, scale, vocab, first, dy=None):
    """cross_entropy_forward_backward() by cross_entropy.cu; without dlogits, cross_entropy_forward()."""
    (n, width), targets = logits.shape, targets.astype(np.int32, copy=False)
    dy = None if dy is None else dy.astype(np.float32, copy=False)
    macros = ("BF16", int(logits.dtype.name == "bfloat16")), ("BLOCK_THREADS", CUDA_THREADS)
    source = CudaSource((*cuda_launch.HEADERS, CUDA_FILE), macros)
    arguments = dlogits, maxima, sums, target_logits, logits, targets, dy, float(scale), vocab, width, first
    options = dict(shared_bytes=width * logits.itemsize)
    cuda_launch.launch(source, "cross_entropy_rows", n, CUDA_THREADS, *arguments, **options)


def cross_entropy_forward(maxima, sums, target_logits, logits, targets, vocab, first=0):
    """Write maxima, sums and target_logits (N) float32 for the first V = vocab columns of logits (N, width >= V).

    targets (N): token ids, integers. For a target outside [first, first + V), target_logits is 0.
    """
    if uses_cuda(None, logits):
        launch_cuda(None, maxima, sums, target_logits, logits, targets, 0, vocab, first)
        return
    arguments = maxima, sums, target_logits, logits, targets, vocab, logits.shape[1], first
    launch(forward_kernel, (logits.shape[0],), *arguments, **row_options(logits, vocab))


def cross_entropy_backward(dlogits, logits, targets, maxima, sums, scale, vocab, first=0, dy=None):
    """dlogits (N, width) = dy scale (exp(logits - maxima) / sums - onehot(targets)), and 0 in the padding.

    dlogits and logits may be the same array. scale: a float. dy (1): an array on the device; None means 1.
    """
    block, warps = tile_size(logits)
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], block))
    arguments = dlogits, logits, targets, maxima, sums, dy, float(scale), vocab, logits.shape[1], first
    launch(backward_kernel, grid, *arguments, BLOCK=block, num_warps=warps)


def cross_entropy_forward_backward(
    dlogits, maxima, sums, target_logits, logits, targets, scale, vocab, first=0, dy=None
):
    """cross_entropy_forward() and cross_entropy_backward() in one kernel. The rows must contain the whole vocabulary.

    The reason: the gradient needs the maximum and the sum over the whole vocabulary. With tensor parallelism a rank has
    only a part of it, so the ranks combine their results between the two functions. The second pass over a row reads
    the logits from the cache. If dy contains 1, the result has the same bits as with dy=None.
    """
    width = logits.shape[1]
    if uses_cuda(dlogits, logits):
        launch_cuda(dlogits, maxima, sums, target_logits, logits, targets, scale, vocab, first, dy)
        return
    arguments = dlogits, maxima, sums, target_logits, logits, targets, dy, float(scale), vocab, width, first
    launch(forward_backward_kernel, (logits.shape[0],), *arguments, **row_options(logits, vocab))


@triton.jit
def exp(x):
    """e^x; a result below 2^-126 becomes 0. tl.exp computes such results too, with three more instructions per x."""
    return tl.math.exp2(x * LOG2E)


@triton.jit
def load_masked(logits_ptr, cols, vocab, width, CACHE: tl.constexpr):
    """The logits of the row at logits_ptr in the columns `cols`, float32; -inf in columns >= vocab."""
    # the mask is `cols < width`: with `cols < vocab`, which may not be a multiple of 16, the GPU loads single elements
    x = tl.load(logits_ptr + cols, cols < width, 0, eviction_policy=CACHE).to(tl.float32)
    return tl.where(cols < vocab, x, float("-inf"))


@triton.jit
def online_update(group_max, group_sum, x):
    """The groups' maxima and sums (groups) after one more tile, whose logits are x (groups, VECTOR)."""
    new_max = tl.maximum(group_max, tl.max(x, 1))
    return new_max, group_sum * exp(group_max - new_max) + tl.sum(exp(x - new_max[:, None]), 1)


@triton.jit
def online_start(GROUPS: tl.constexpr):
    """The groups' maxima and sums (groups) before the first tile."""
    # lower than all logits; not -inf, because -inf - -inf is NaN; still finite after the multiplication by LOG2E
    lowest = -2.0e38
    return tl.full((GROUPS,), lowest, tl.float32), tl.zeros((GROUPS,), tl.float32)


@triton.jit
def grouped_cols(start, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """The column numbers [start, start + BLOCK) in the shape (groups, VECTOR), groups = BLOCK / VECTOR."""
    return start + tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def row_statistics(
    logits_ptr, target, vocab, width,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """(maximum, sum, target_logit), three scalars, of the row at logits_ptr.

    target: the target's column; outside [0, vocab) if the row does not contain it. CACHE: the loads' eviction policy.
    """
    target_mask = (target >= 0) & (target < vocab)
    # kept in a register: the caller may overwrite the logits with their gradient
    target_logit = tl.load(logits_ptr + target, target_mask, 0).to(tl.float32)
    group_max, group_sum = online_start(BLOCK // VECTOR)
    full_columns = vocab // BLOCK * BLOCK
    for start in tl.range(0, full_columns, BLOCK, num_stages=STAGES):
        x = tl.load(logits_ptr + grouped_cols(start, BLOCK, VECTOR), eviction_policy=CACHE).to(tl.float32)
        group_max, group_sum = online_update(group_max, group_sum, x)
    maximum = tl.max(group_max, 0)
    if TAIL:
        tail_max, tail_sum = online_start(TAIL // VECTOR)
        tail = load_masked(logits_ptr, grouped_cols(full_columns, TAIL, VECTOR), vocab, width, CACHE)
        tail_max, tail_sum = online_update(tail_max, tail_sum, tail)
        maximum = tl.maximum(maximum, tl.max(tail_max, 0))
        total_of_tail = tl.sum(tail_sum * exp(tail_max - maximum), 0)
    else:
        total_of_tail = 0.0
    return maximum, tl.sum(group_sum * exp(group_max - maximum), 0) + total_of_tail, target_logit


@triton.jit
def write_gradient(
    dlogits_ptr, logits_ptr, target, maximum, weight, scale, start, vocab, width,
    BLOCK: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Store BLOCK columns, from `start` on, of dlogits = weight exp(logits - maximum) - scale onehot(target).

    weight: scale / sum. logits_ptr, dlogits_ptr: the start of one row. The columns [vocab, width) become 0.
    """
    cols = start + tl.arange(0, BLOCK)
    x = load_masked(logits_ptr, cols, vocab, width, CACHE)
    g = weight * exp(x - maximum) - tl.where(cols == target, scale, 0.0)
    tl.store(dlogits_ptr + cols, tl.where(cols < vocab, g, 0.0), cols < width, eviction_policy=CACHE)


@triton.jit
def times_dy(scale, dy_ptr):
    """scale * dy; scale itself if dy is None."""
    if dy_ptr is not None:
        scale *= tl.load(dy_ptr).to(tl.float32)
    return scale


@triton.jit
def forward_kernel(
    maxima_ptr, sums_ptr, target_logits_ptr, logits_ptr, targets_ptr, vocab, width, first,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (N): each program computes the three numbers of one row. Arguments as in cross_entropy_forward()."""
    row = tl.program_id(0)
    target, offs = tl.load(targets_ptr + row).to(tl.int32) - first, row.to(tl.int64) * width
    maximum, total, target_logit = row_statistics(
        logits_ptr + offs, target, vocab, width, BLOCK, TAIL, VECTOR, STAGES, ""
    )
    tl.store(maxima_ptr + row, maximum)
    tl.store(sums_ptr + row, total)
    tl.store(target_logits_ptr + row, target_logit)


@triton.jit
def backward_kernel(
    dlogits_ptr, logits_ptr, targets_ptr, maxima_ptr, sums_ptr, dy_ptr, scale, vocab, width, first, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (N, width / BLOCK): each program computes BLOCK columns of one row of dlogits."""
    row, scale = tl.program_id(0), times_dy(scale, dy_ptr)
    target, maximum = tl.load(targets_ptr + row).to(tl.int32) - first, tl.load(maxima_ptr + row)
    offs, start = row.to(tl.int64) * width, tl.program_id(1) * BLOCK
    weight = scale / tl.load(sums_ptr + row)
    write_gradient(
        dlogits_ptr + offs, logits_ptr + offs, target, maximum, weight, scale, start, vocab, width, BLOCK, ""
    )


@triton.jit
def forward_backward_kernel(
    dlogits_ptr, maxima_ptr, sums_ptr, target_logits_ptr, logits_ptr, targets_ptr, dy_ptr, scale, vocab, width, first,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (N): each program computes the three numbers of one row, and then its row of dlogits."""
    row, scale = tl.program_id(0), times_dy(scale, dy_ptr)
    target, offs = tl.load(targets_ptr + row).to(tl.int32) - first, row.to(tl.int64) * width
    logits_ptr, dlogits_ptr = logits_ptr + offs, dlogits_ptr + offs
    maximum, total, target_logit = row_statistics(
        logits_ptr, target, vocab, width, BLOCK, TAIL, VECTOR, STAGES, "evict_last"
    )
    tl.store(maxima_ptr + row, maximum)
    tl.store(sums_ptr + row, total)
    tl.store(target_logits_ptr + row, target_logit)
    weight, full_columns = scale / total, vocab // BLOCK * BLOCK
    for start in tl.range(0, full_columns, BLOCK, num_stages=1):  # without the onehot term, which is subtracted below
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + cols, eviction_policy="evict_first").to(tl.float32)
        tl.store(dlogits_ptr + cols, weight * exp(x - maximum), eviction_policy="evict_first")
    if TAIL:
        write_gradient(
            dlogits_ptr, logits_ptr, target, maximum, weight, scale, full_columns, vocab, width, TAIL, "evict_first"
        )
    tl.debug_barrier()  # another thread may have stored the target's column above; the next store must be later
    target_mask = (target >= 0) & (target < full_columns)
    tl.store(dlogits_ptr + target, weight * exp(target_logit - maximum) - scale, target_mask)
