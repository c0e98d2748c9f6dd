"""A decode step for one sequence on a Hopper GPU: the launches of cluster_step.cu, which has two kernels per layer.

With five launches per layer (single_row.py), most of the time of a step is not needed to load the weights: it is the
time between launches, and the latency of global memory. Here, 8 thread blocks form a cluster and exchange vectors
through their shared memory, so a layer needs two launches. A third kernel computes the logits.
"""

# C channels, H heads; the cache of a layer is (1, block, 2C)

import math
from pathlib import Path

import numpy as np

from stage2_cuda.kernels.gelu import U1, U3
from stage2_cuda.runtime import cuda_launch
from stage2_cuda.runtime.cuda_launch import CudaSource

FILES = "instructions.cuh", "parts.cuh", "step.cu"
SOURCES = *cuda_launch.HEADERS, *(Path(__file__).with_name(f"cluster_{name}") for name in FILES)
CLUSTER, THREADS, HEAD_SIZE = 8, 256, 64  # blocks per cluster, threads per block
WARPS = THREADS // 32
MAX_BLOCK = 1024  # positions: each block of a cluster holds 1/8 of the keys in registers
UNITS = {256: 1, 512: 2, 768: 3}  # {C: hidden units per warp}: so the MLP has 4C / (64 UNITS) = 16 clusters
# Of the kernel for the logits. A multiprocessor can run two blocks, but the 132 multiprocessors of an H200 have room
# for 31 clusters, not 33, because a cluster must run in one part of the GPU. 20 to 28 clusters take the same time.
LOGIT_CLUSTERS = 24


def supports(config, dtype, tiling):
    """Whether the kernels support a model of this GPT2Config with weights of `dtype`, on this GPU.

    tiling: a batched.DecodeTiling; without tiling.pdl the kernels are not used.
    """
    sizes = config.n_embd in UNITS and config.n_embd == HEAD_SIZE * config.n_head and config.block_size <= MAX_BLOCK
    return sizes and tiling.pdl and cuda_launch.serves(dtype)


def mlp_clusters(C):
    """The number of clusters of mlp_kernel, each of which computes a partial sum."""
    return 4 * C // (64 * UNITS[C])


def parts_of_head(head):
    """Parts of the weight of the logits (V, C) that the last layer copies to the L2 cache: there is no next layer.

    Returns ((qkv, proj), (fc, fc_proj)): views with the sizes of these weights, or None if the weight is too small.
    """
    V, C = head.shape
    if V < 12 * C:
        return (None, None), (None, None)
    ends, flat = np.cumsum([3, 1, 4, 4]) * C * C, head.reshape(-1)
    qkv, proj, fc, fc_proj = (flat[end - size * C * C : end] for end, size in zip(ends, (3, 1, 4, 4), strict=True))
    return (qkv, proj), (fc, fc_proj)


def attention_block(partials, s, cache, residual, ln_w, qkv, qkv_ln, proj, lengths, rotation, ahead, eps, overlap):
    """Store s = x + sum of the residual's partials + bias, and partial sums of the attention output times `proj`.

    partials (H, C), s (C): float32 results. cache (1, block, 2C): the kernel stores k and v at the newest position,
    lengths[0] - 1, modulo block. residual: (x, partials, bias); partials and bias may be None. qkv (3C, C), proj
    (C, C): transposed weights; qkv_ln: (gamma_w, beta_w) of single_row.fold_layernorm. rotation: Sequences.rotation, or
    None. ahead: two weights of the same sizes, those of the kernel after the next one, which the kernel copies to the
    L2 cache; or (None, None). overlap: see cuda_launch.launch.
    """
    x, parts, bias = residual
    (H, C), block = partials.shape, cache.shape[1]
    arguments = partials, s, cache, x, parts, bias, ln_w, qkv, *qkv_ln, proj, lengths, rotation, *ahead
    numbers = 0 if parts is None else len(parts), block, float(eps), math.log2(math.e) / math.sqrt(HEAD_SIZE)
    launch("attention_kernel", C, cache.dtype, H, *arguments, *numbers, overlap=overlap)


def mlp_block(partials, s, residual, ln_w, fc, fc_ln, fc_proj, ahead, eps):
    """Store s = x + sum of the residual's partials + bias, and partial sums of gelu(LN(s) fc + b) fc_proj.

    partials (mlp_clusters(C), C), s (C): float32 results. residual: (x, partials, bias). fc (4C, C), fc_proj (C, 4C):
    transposed weights; fc_ln: (gamma_w, beta_w) of single_row.fold_layernorm. ahead: see attention_block().
    """
    x, parts, bias = residual
    clusters, C = partials.shape
    arguments = partials, s, x, parts, bias, ln_w, fc, *fc_ln, fc_proj, *ahead
    launch("mlp_kernel", C, fc.dtype, clusters, *arguments, len(parts), float(eps), overlap=True)


def logits(logits, maxima, indices, s, residual, ln, head, ahead, eps):
    """Store LN(s) head' in `logits` (V), for s = x + sum of the residual's partials + bias.

    maxima, indices (logit_maxima(),): the largest logits of parts of the vocabulary, and their tokens. s (C) float32:
    scratch memory. residual: (x, partials, bias). ln: (weight, bias). head (V, C). ahead: the four transposed weights
    of the first layer, which the kernel copies to the L2 cache.
    """
    x, parts, bias = residual
    V, C = head.shape
    arguments = logits, maxima, indices, s, x, parts, bias, *ln, head, *ahead, len(parts), V
    rows = rows_per_warp(V, LOGIT_CLUSTERS)
    launch("logits_kernel", C, head.dtype, LOGIT_CLUSTERS, *arguments, rows, LOGIT_CLUSTERS, float(eps), overlap=True)


def rows_per_warp(V, clusters):
    """The number of tokens whose logits a warp of logits_kernel computes."""
    return -(-V // (clusters * CLUSTER * WARPS))


def logit_maxima():
    """The number of maxima that logits() stores: one per warp."""
    return LOGIT_CLUSTERS * CLUSTER * WARPS


def launch(name, C, dtype, clusters, *arguments, overlap):
    blocks = clusters * CLUSTER
    cuda_launch.launch(CudaSource(SOURCES, macros(C, dtype)), name, blocks, THREADS, *arguments, overlap=overlap)


def macros(C, dtype):
    """The macros with which SOURCES are compiled: pairs (name, value)."""
    bf16, gelu = int(dtype.name == "bfloat16"), (("U1", f"{U1.value!r}f"), ("U3", f"{U3.value!r}f"))
    return ("C", C), ("UNITS", UNITS[C]), ("BF16", bf16), ("BLOCK_THREADS", THREADS), *gelu
