"""A decode step on a Hopper GPU: the launches of cluster_step.cu and cluster_rows.cu, which have two kernels per layer.

With five or seven launches per layer (single_row.py, batched.py), most of the time of a step is not needed to load the
weights: it is the time between launches, and the latency of global memory. Here, 8 thread blocks form a cluster and
exchange vectors through their shared memory, so a layer needs two launches. cluster_step.cu serves one sequence, and
has a third kernel, for the logits. cluster_rows.cu serves several sequences.
"""

# B sequences, C channels, H heads; the cache of a layer is (B, block, 2C)

import math
from pathlib import Path

import numpy as np

from stage2_cuda.kernels.gelu import U1, U3
from stage2_cuda.runtime import cuda_launch
from stage2_cuda.runtime.cuda_launch import CudaSource

FILES = [
    Path(__file__).with_name(f"cluster_{name}") for name in ("instructions.cuh", "parts.cuh", "step.cu", "rows.cu")
]
SOURCES, ROWS_SOURCES = ((*cuda_launch.HEADERS, *FILES[:2], kernels) for kernels in FILES[2:])  # one sequence, several
CLUSTER, THREADS, HEAD_SIZE = 8, 256, 64  # blocks per cluster, threads per block
WARPS = THREADS // 32
MAX_BLOCK = 1024  # positions, for one sequence: each block of a cluster holds 1/8 of the keys in registers
# ROWS: sequences of a cluster. MAX_ROWS: the most sequences of a decode step. CHUNK_BYTES: of 128 keys and values.
# A step of GPT-2 124M in bf16 on an H200 for 2, 8, 16 and 32 sequences: 160, 170, 265 and 475 us; by the kernels of
# batched.py 308, 318, 348 and 416 us. More sequences need more clusters than the GPU runs at the same time.
ROWS, MAX_ROWS, CHUNK_BYTES = 8, 16, 128 * HEAD_SIZE * 4
UNITS = {256: 1, 512: 2, 768: 3}  # {C: hidden units per warp}: so the MLP has 4C / (64 UNITS) = 16 clusters
# Of the kernel for the logits. A multiprocessor can run two blocks, but the 132 multiprocessors of an H200 have room
# for 31 clusters, not 33, because a cluster must run in one part of the GPU. 20 to 28 clusters take the same time.
LOGIT_CLUSTERS = 24


def supports(config, dtype, tiling, B):
    """Whether the kernels support B sequences, and a model of this GPT2Config with weights of `dtype`, on this GPU.

    tiling: a batched.DecodeTiling; without tiling.pdl the kernels are not used.
    """
    sizes = config.n_embd in UNITS and config.n_embd == HEAD_SIZE * config.n_head
    fits = config.block_size <= MAX_BLOCK if B == 1 else B <= MAX_ROWS
    return sizes and fits and tiling.pdl and cuda_launch.serves(dtype)


def mlp_clusters(C):
    """The number of clusters of mlp_kernel for up to 8 sequences; each computes a partial sum."""
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


def chunks_ahead(B):
    """The number of chunks of keys and values that a block copies to shared memory before it needs them."""
    return 4 if B <= ROWS else 2  # if there are more clusters than fit on the GPU, two blocks fit on a multiprocessor


def attention_block(partials, s, cache, residual, ln_w, qkv, qkv_ln, proj, lengths, rotation, ahead, eps, overlap):
    """Store s = x + sum of the residual's partials + bias, and partial sums of the attention output times `proj`.

    partials (H, B, C), s (B, C): float32 results. cache (B, block, 2C): the kernel stores k and v at the newest
    position of each sequence b, lengths[b] - 1, modulo block. residual: (x, partials, bias); partials and bias may be
    None. qkv (3C, C), proj (C, C): transposed weights; qkv_ln: (gamma_w, beta_w) of single_row.fold_layernorm.
    rotation: Sequences.rotation, or None. ahead: two weights of the same sizes, those of the kernel after the next one,
    which the kernel copies to the L2 cache; or (None, None). overlap: see cuda_launch.launch.
    """
    x, parts, bias = residual
    arguments = partials, s, cache, x, parts, bias, ln_w, qkv, *qkv_ln, proj, lengths, rotation, *ahead
    numbers = cache.shape[1], float(eps), math.log2(math.e) / math.sqrt(HEAD_SIZE)
    shared_bytes = proj.nbytes // (CLUSTER * len(partials)) + chunks_ahead(len(s)) * CHUNK_BYTES
    launch_layer("attention_kernel", cache.dtype, arguments, parts, numbers, shared_bytes, overlap)


def mlp_block(partials, s, residual, ln_w, fc, fc_ln, fc_proj, ahead, eps):
    """Store s = x + sum of the residual's partials + bias, and partial sums of gelu(LN(s) fc + b) fc_proj.

    partials (mlp_clusters(C), B, C), s (B, C): float32 results. residual: (x, partials, bias). fc (4C, C), fc_proj
    (C, 4C): transposed weights; fc_ln: (gamma_w, beta_w) of single_row.fold_layernorm. ahead: see attention_block().
    """
    x, parts, bias = residual
    arguments = partials, s, x, parts, bias, ln_w, fc, *fc_ln, fc_proj, *ahead
    shared_bytes = fc_proj.nbytes // (CLUSTER * len(partials))
    launch_layer("mlp_kernel", fc.dtype, arguments, parts, (float(eps),), shared_bytes, True)


def logits(logits, maxima, indices, s, residual, ln, head, ahead, eps):
    """Store LN(s) head' in `logits` (V), for s = x + sum of the residual's partials + bias.

    maxima, indices (logit_maxima(),): the largest logits of parts of the vocabulary, and their tokens. s (C) float32:
    scratch memory. residual: (x, partials, bias). ln: (weight, bias). head (V, C). ahead: the four transposed weights
    of the first layer, which the kernel copies to the L2 cache.
    """
    x, parts, bias = residual
    V, C = head.shape
    arguments = logits, maxima, indices, s, x, parts, bias, *ln, head, *ahead, len(parts), V
    numbers = rows_per_warp(V, LOGIT_CLUSTERS), LOGIT_CLUSTERS, float(eps)
    launch(SOURCES, "logits_kernel", C, head.dtype, LOGIT_CLUSTERS, *arguments, *numbers, overlap=True)


def rows_per_warp(V, clusters):
    """The number of tokens whose logits a warp of logits_kernel computes."""
    return -(-V // (clusters * CLUSTER * WARPS))


def logit_maxima():
    """The number of maxima that logits() stores: one per warp."""
    return LOGIT_CLUSTERS * CLUSTER * WARPS


def launch_layer(name, dtype, arguments, parts, numbers, shared_bytes, overlap):
    """Launch the kernel `name` of cluster_step.cu for one sequence, or that of cluster_rows.cu for several.

    arguments: the arrays, first partials (clusters, B, C); then the numbers. parts: the residual's partials.
    shared_bytes: for several sequences, of a block's part of the second weight and of keys and values.
    """
    clusters, B, C = arguments[0].shape
    if B == 1:
        count = 0 if parts is None else len(parts)
        launch(SOURCES, name, C, dtype, clusters, *arguments, count, *numbers, overlap=overlap)
    else:
        options = dict(overlap=overlap, shared_bytes=shared_bytes, ahead=chunks_ahead(B))
        launch(ROWS_SOURCES, f"rows_{name}", C, dtype, clusters * -(-B // ROWS), *arguments, *numbers, B, **options)


def launch(sources, name, C, dtype, clusters, *arguments, ahead=0, **options):
    source = CudaSource(sources, macros(C, dtype, ahead))
    cuda_launch.launch(source, name, clusters * CLUSTER, THREADS, *arguments, **options)


def macros(C, dtype, ahead=0):
    """The macros with which the sources are compiled: pairs (name, value). ahead: chunks_ahead(), of ROWS_SOURCES."""
    bf16, gelu = int(dtype.name == "bfloat16"), (("U1", f"{U1.value!r}f"), ("U3", f"{U3.value!r}f"))
    return ("C", C), ("UNITS", UNITS[C]), ("BF16", bf16), ("BLOCK_THREADS", THREADS), ("AHEAD", ahead), *gelu
