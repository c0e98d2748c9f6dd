"""Launch every Triton kernel once, with small sizes that no tile size divides, under compute-sanitizer of NVIDIA.

`make sanitize` runs this file. The tool memcheck finds reads and writes outside an array; racecheck finds races between
two threads on shared memory. Every array is a separate allocation, without CuPy's pool, because an access beyond the
end of a pooled array is often an access to valid memory. The results of the kernels are not checked here.

racecheck does not run the kernels with warp specialisation. It reports races in the code that Triton generates for
gl.warp_specialize, which starts the groups of warps through shared memory and named barriers; it reports none in the
shared memory of the kernels themselves.
"""

# B batch, T time, C channels, H heads, V vocabulary, N rows

import importlib
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout that contains this file, installed or not

from benchmarks.harness.processes import run_main  # noqa: E402
from benchmarks.harness.report import BenchmarkParser  # noqa: E402
from gpt2core.codecs import CODECS, GROUP  # noqa: E402
from gpt2core.dropout import Dropout, Mask  # noqa: E402
from gpt2core.errors import ConfigError  # noqa: E402
from gpt2core.optimizer import AdamW  # noqa: E402
from gpt2core.parallel.divided.rounding import rounding_key  # noqa: E402
from stage2_cuda import attention as attention_package  # noqa: E402
from stage2_cuda import decoding, gemm, kernels  # noqa: E402
from stage2_cuda.attention import launches as attention  # noqa: E402
from stage2_cuda.attention.hopper_launches import GluonTile  # noqa: E402
from stage2_cuda.attention.launches import AttentionTiles, TileConfig  # noqa: E402
from stage2_cuda.cuda_backend import dtype_of  # noqa: E402
from stage2_cuda.decoding import batched, cached_attention, cluster_step, gather, sampling, single_row  # noqa: E402
from stage2_cuda.gemm import fp16x3  # noqa: E402
from stage2_cuda.kernels import (  # noqa: E402
    adamw,
    cast,
    codecs,
    column_sums,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layernorm,
    losses,
    rotary,
    rounding,
)
from stage2_cuda.kernels.segment_sum import segment_sum  # noqa: E402
from stage2_cuda.runtime import cuda_launch, triton_launch  # noqa: E402
from stage2_cuda.runtime.gluon_launch import gluon_kind  # noqa: E402
from stage3_mpi_cuda import tree_sum  # noqa: E402
from torch_bridge import kernels as bridge_kernels  # noqa: E402
from torch_bridge.kernels import attention_parts, fp16x3_launches, fused_matmul  # noqa: E402

TOOLS = "memcheck", "racecheck"
STAGE_3_MODULES = tree_sum.__name__, codecs.__name__  # modules whose kernels only stage 3 launches
WARP_SPECIALIZED = "specialized_kernel", "gelu_kernel"  # in Gluon: kernels that racecheck does not run
ERROR_FOUND = 9  # the exit code of compute-sanitizer if it finds an error


class Arrays:
    """Makes random arrays on the device: x() in the given dtype, f() in float32, i() in int32 from 0 to high - 1."""

    def __init__(self, xp, dtype):
        self.xp, self.dtype, self.random = xp, dtype_of(dtype), np.random.default_rng(0)

    def x(self, *shape):
        return self.xp.asarray(self.random.standard_normal(shape).astype(self.dtype))

    def empty(self, dtype, *shape):
        return self.xp.empty(shape, dtype)

    def f(self, *shape):
        return self.xp.asarray(self.random.random(shape, np.float32) + 0.5)

    def i(self, *shape, high):
        return self.xp.asarray(self.random.integers(0, high, shape).astype(np.int32))


# -- functions that launch kernels, one for each file of kernels; a: Arrays -------------------------------------------


def launch_layernorm(a):
    for n, C in ((37, 172), (3, 1600), (37, 768)):
        s, y, x, branch, ds, dy = (a.x(n, C) for _ in range(6))
        bias, ln_w, ln_b = (a.x(C) for _ in range(3))
        mean, rstd = a.f(n), a.f(n)
        layernorm.residual_layernorm_forward(s, y, mean, rstd, x, branch, bias, ln_w, ln_b, 1e-5)
        layernorm.residual_layernorm_forward(None, y, mean, rstd, x, None, None, ln_w, ln_b, 1e-5)
        sums, partials = [a.f(C) for _ in range(3)], a.f(*layernorm.layernorm_partials_shape(n, C, s.dtype))
        layernorm.residual_layernorm_backward(y, partials, ds, dy, s, ln_w, mean, rstd)
        for each in zip(partials, sums, strict=True):
            column_sums.add_partials(*each)
        layernorm.residual_layernorm_backward(y, partials, None, dy, s, ln_w, mean, rstd)
        layernorm.residual_add(s, x, branch, bias)
        layernorm.residual_bias_gradient(sums[0], partials[0], ds)


def launch_gelu(a):
    n, K = 37, 172
    h, y, dy, bias = a.x(n, K), a.x(n, K), a.x(n, K), a.x(K)
    gelu.gelu_forward(y, h)
    gelu.gelu_backward(y, dy, h)
    gelu.bias_gelu_forward(y, h, bias)
    partials = a.f(*gelu.gelu_partials_shape(n, K))
    gelu.bias_gelu_backward(y, partials, dy, h, bias)
    column_sums.add_partials(partials, a.f(K))


def launch_rotary(a):
    for B, T, H, D in ((2, 37, 3, 10), (1, 5, 2, 64)):  # a head size that is not a power of two
        qkv, y, rotation = a.x(B, T, 3 * H * D), a.x(B, T, 3 * H * D), a.f(T, 2, D // 2)
        rotary.compute_rotation(rotation, 3)
        rotary.rotate(y, qkv, rotation, H, 1)
        rotary.rotate(qkv, qkv, rotation, H, -1)


def launch_dropout(a):
    for B, T, C in ((2, 37, 30), (1, 5, 300)):
        mask = Mask(Dropout(0.1, a.xp.zeros((1,), np.int64), row=3), place=2, position=5)
        for bias in (a.x(C), None):
            dropout.dropout(a.x(B, T, C), a.x(B, T, C), bias, mask)


def launch_column_sums(a):
    for n, K in ((37, 172), (2, 1600)):
        column_sums.column_sums(a.f(K), a.f(*column_sums.partials_shape(n, K)), a.x(n, K))


def launch_embedding(a):
    for B, T, C, V in ((3, 50, 40, 5), (2, 9, 300, 172)):  # each token occurs often; some tokens do not occur
        ids, dy, wte, wpe = a.i(B, T, high=V + 2), a.x(B, T, C), a.x(V, C), a.x(T + 3, C)
        embedding.embedding_forward(dy, ids, wte, wpe, 3, 1)
        host_ids = ids if a.xp is np else ids.get()
        sorted_tokens = embedding.SortedTokens(*map(a.xp.asarray, embedding.sort_tokens(host_ids, V + 2)))
        chunk_sums, dwte = a.f(*embedding.chunk_sums_shape(ids.size, C)), a.f(V, C)
        for accumulate in (False, True):
            embedding.token_gradient(dwte, chunk_sums, sorted_tokens, dy, accumulate, 1)
        embedding.position_gradient(a.f(T + 3, C), dy, 3)


def launch_cross_entropy(a):
    for N, V, width in ((9, 50, 64), (2, 9001, 9024), (3, 172, 172), (3, 20001, 20032)):
        rows, targets, logits = [a.f(N) for _ in range(3)], a.i(N, high=V), a.x(N, width)
        cross_entropy.cross_entropy_forward(*rows, logits, targets, V)
        cross_entropy.cross_entropy_forward_backward(a.x(N, width), *rows, logits, targets, 0.1, V, 3, a.f(1))
        cross_entropy.cross_entropy_backward(logits, logits, targets, *rows[:2], 0.1, V, 3, a.f(1))


def launch_losses(a):
    for n in (9, losses.ROWS_PER_PROGRAM + 5):
        rows = a.f(2, n)
        losses.rescale(rows, *(a.f(n) for _ in range(4)))
        losses.loss(a.xp.empty(1), a.xp.empty(losses.partials_shape(n)), *rows, a.f(n), 0.1)


def launch_fp16x3(a):
    def split(x):
        halves, scales = fp16x3.split_shapes(x)
        return fp16x3.split(a.xp.empty(halves, np.float16), a.f(*scales), x)

    for m, k, n in ((5, 48, 24), (170, 33, 200), (8, 1200, 9)):
        partials = fp16x3.partials_shape(m, n, k)
        for trans in ((False, False), (False, True), (True, False)):
            shape_a, shape_b = (shape[::-1] if t else shape for shape, t in zip(((m, k), (k, n)), trans, strict=True))
            operands = split(a.f(*shape_a)), split(a.f(*shape_b))
            fp16x3.product(a.f(m, n), None, *operands, a.f(n), *trans, True)
            fp16x3.product(a.f(m, n), partials and a.f(*partials), *operands, None, *trans)


def launch_matmul(a):
    for M, N, K in ((170, 72, 40), (65, 33, 9)):  # by descriptors, and by pointers with masks
        d, h, product = a.x(M, N), a.x(M, N), (a.x(M, K), a.x(K, N))
        fused_matmul.matmul(d, *product, a.x(M, N), "relu")
        fused_matmul.matmul(d, *product, a.x(N), "gelu", h)
        fused_matmul.matmul(d, *product)


def launch_adamw(a):
    n = 3 * adamw.BLOCK + 7
    coefficients = a.xp.asarray(AdamW(0.9, 0.95, 1e-8, 0.1).coefficients(3, 1e-3))
    p, m, v, g = (a.f(n) for _ in range(4))
    adamw.adamw_step(p, m, v, None, g, coefficients, None, None, 0.9, 0.95)
    adamw.adamw_step(p, m, v, a.x(n), g, coefficients, a.f(1), a.i(4, high=2), 0.9, 0.95)
    philox_key, bits = a.xp.asarray(rounding_key(1, 2)), a.xp.empty(n, np.uint16)
    adamw.adamw_step(p, m, v, bits, g, coefficients, a.f(1), a.i(4, high=2), 0.9, 0.95, philox_key, 4096)
    rounding.round_to_bf16(bits, p, philox_key)
    squares, sums = a.xp.empty(3, np.float64), a.f(9)
    adamw.page_sums(sums, a.f(9 * adamw.BLOCK))
    segment_sum(squares, sums)
    for state in (None, a.f(2)):
        adamw.clip_scale(a.f(1), a.f(1), squares, 1.0, state, 2000)


def launch_cast(a):
    for n in (1, 5001):
        cast.cast(a.x(n), a.f(n))


def attend_separately(a, shape, precision, tiles=None):
    """Attention of separate q, k and v (B, H, T, D), not causal and causal, with a natural logarithm."""
    B, H, T_q, T_k, D = shape
    arrays = [a.x(B, H, T, D) for T in (T_q, T_k, T_k, T_q, T_q, T_k, T_k, T_q)]
    q, k, v, y, dq, dk, dv, dy = map(attention_parts.heads_of, arrays)
    lse, delta, lse2 = (a.f(B, H, T_q) for _ in range(3))
    T = max(T_q, T_k)
    gluon = attention.gluon_table(q.base.dtype.itemsize, B * H, T, D)
    tiles = tiles or attention.default_tiles(q.base.dtype.itemsize, T, D, precision, gluon)
    for causal in (False, True):
        attention.forward_launch(y, lse, q, k, v, tiles.forward, precision, causal, natural=True).run()
        arguments = dq, dk, dv, delta, dy, q, k, v, y, lse, tiles, precision, causal, lse2
        for kernel_launch in attention.backward_launches(*arguments):
            kernel_launch.run()


def launch_attention(a):
    precisions = ("ieee", "tf32", "tf32x3") if a.dtype == np.float32 else ("ieee",)
    for precision in precisions:
        for B, T, H, D in ((2, 70, 3, 24), (1, 300, 1, 64), (1, 320, 2, 64), (1, 133, 1, 128)):
            qkv, dqkv, y, dy = (a.x(B, T, parts * H * D) for parts in (3, 3, 1, 1))
            lse, delta = a.f(B, H, T), a.f(B, H, T)
            attention.attention_forward(y, lse, qkv, H, precision)
            for rotation in (None, a.f(T, 2, D // 2)):
                attention.attention_backward(dqkv, delta, dy, qkv, y, lse, H, precision, rotation=rotation)
        for T_q, T_k in ((72, 133), (300, 170)):  # the Gluon kernels need a T_q that is a multiple of 4
            attend_separately(a, (2, 3, T_q, T_k, 24), precision)
            if attention.gluon_table(np.dtype(a.dtype).itemsize, 6, 300, 64):
                for D, design in ((64, "pipelined"), (64, "specialized"), (128, "specialized")):
                    tiles = attention.AttentionTiles(*[GluonTile(design)] * 3)
                    attend_separately(a, (2, 3, T_q, T_k, D), precision, tiles)
        B, H, D, block = 2, 3, 24, 37
        keys, values = a.x(B, H, D, block), a.x(B, H, block, D)
        for t, position in ((1, 36), (19, 5)):
            y, qkv = a.x(B, t, H * D), a.x(B, t, 3 * H * D)
            cached_attention.attention_cached(y, qkv, keys, values, position, H, precision)


def attend_in_parts(a, shape, tiles, kernels):
    """As attend_separately(), with the launches of `kernels`, a module; several programs may have one tile."""
    B, H, T_q, T_k, D = shape
    arrays = [a.x(B, H, T, D) for T in (T_q, T_k, T_k, T_q, T_q, T_k, T_k, T_q)]
    q, k, v, y, dq, dk, dv, dy = map(attention_parts.heads_of, arrays)
    lse, delta, lse2 = (a.f(B, H, T_q) for _ in range(3))
    for causal in (False, True):
        forward, backward = (y, lse, q, k, v, tiles.forward, a.empty), (dq, dk, dv, delta, dy, q, k, v, y, lse)
        if kernels is fp16x3_launches:
            launches = [*kernels.forward_launches(*forward, causal)]
            launches += kernels.backward_launches(*backward, tiles.both, a.empty, causal)
        else:
            launches = [*kernels.forward_launches(*forward, "ieee", causal)]
            launches += kernels.backward_launches(*backward, tiles, "ieee", causal, lse2, a.empty)
        for kernel_launch in launches:
            kernel_launch.run()


def launch_attention_in_parts(a):
    for T_q, T_k in ((70, 133), (300, 170)):
        for D, tiles in fp16x3_launches.TILES.items():
            in_parts = AttentionTiles(TileConfig(64, 32, 4, 2, parts=4), both=TileConfig(32, 32, 4, 2, parts=4))
            attend_in_parts(a, (2, 3, T_q, T_k, D - 8), in_parts, attention_parts)
            if np.dtype(a.dtype).itemsize == 4:
                for parts in (1, 2):
                    config = AttentionTiles(*[tile and tile._replace(parts=parts) for tile in tiles])
                    attend_in_parts(a, (2, 3, T_q, T_k, D), config, fp16x3_launches)


def launch_gelu_product(a):
    if np.dtype(a.dtype).itemsize == 2 and gluon_kind(*triton_launch.gpu_model()):
        from stage2_cuda.gemm import gluon_gelu

        for M, N, K in ((128, 128, 64), (170, 72, 40), (640, 512, 192)):
            y, h, dy, partials = a.x(M, N), a.x(M, N), a.x(M, K), a.f(*gluon_gelu.partials_shape(M, N))
            gluon_gelu.gelu_product(y, h, a.x(M, K), a.x(K, N), a.x(N))
            gluon_gelu.gelu_backward_product(y, partials, dy, a.x(N, K), h)


def launch_decode(a):
    block, precision, eps = 70, "tf32x3", 1e-5
    for C, H, V in ((48, 2, 37), (300, 3, 172)):
        ln, head = (a.x(C), a.x(C)), a.x(V, C)
        qkv, fc, fc_proj = ((a.x(K, N), a.x(N)) for K, N in ((C, 3 * C), (C, 4 * C), (4 * C, C)))
        for B in (1, 2, 17):
            tiling, lengths = batched.tiling_for(B), a.i(B, high=block) + 1
            x, h, g = a.f(B, C), a.x(B, C), a.x(B, 4 * C)
            q, cache, partials = a.x(B, C), a.x(B, block, 2 * C), a.f(batched.split_k(4 * C, tiling).parts, B, C)
            residual = x, partials, a.x(C)
            if B == 1:
                single_row_kernels(a, x, q, cache, lengths, (ln, qkv, fc, fc_proj), H, eps, tiling)
            else:
                batched.linear(q, cache, h, *qkv, lengths, block, tiling, precision)
                batched.linear(g, None, h, *fc, lengths, block, tiling, precision)
                batched.attention(h, q, cache, lengths, H, tiling)
                batched.linear(q_and_k := a.x(B, 2 * C), cache, h, *qkv, lengths, block, tiling, precision)
                batched.attention(h, q_and_k, cache, lengths + 2 * block, H, tiling, a.f(B, 2, C // H // 2))
                batched.split_k_product(partials, g, fc_proj[0], tiling, precision)
            batched.layernorm(h, None, (x, None, None), *ln, eps, tiling)
            batched.layernorm(h, x, residual, *ln, eps, tiling)
            count = batched.vocab_tiles(V, tiling)
            batched.unembed(a.f(B, V), a.f(B, count), a.i(B, count, high=V), h, head, tiling, precision)


def single_row_kernels(a, x, q, cache, lengths, weights, H, eps, tiling):
    """The kernels of decoding/single_row.py, for launch_decode()."""
    C, block, (ln, qkv, fc, fc_proj) = q.shape[1], cache.shape[1], weights
    D = C // H
    transposed = [a.x(*w.shape[::-1]) for w, _ in (qkv, fc, fc_proj)]
    folded = [[a.f(len(bias)) for _ in range(2)] for _, bias in (qkv, fc)]  # [gamma_w, beta_w]
    single_row.transpose([(out, w) for out, (w, _) in zip(transposed, (qkv, fc, fc_proj), strict=True)])
    for out, w, (_, bias) in zip(folded, transposed, (qkv, fc), strict=False):
        single_row.fold_layernorm(*out, w, *ln, bias)
    common = lengths, block, eps, tiling
    single_row.layernorm_linear(q, cache, None, (x, None, None), ln[0], transposed[0], *folded[0], *common)
    splits = single_row.key_splits(block, tiling)
    split_results = a.f(H, splits, D), a.f(H, splits), a.f(H, splits)
    single_row.split_keys_attention(*split_results, q, cache, lengths, H, tiling)
    q_and_k, rotation = a.x(1, 2 * C), a.f(1, 2, D // 2)
    single_row.split_keys_attention(*split_results, q_and_k, cache, lengths + 2 * block, H, tiling, rotation)
    partials = a.f(single_row.split_heads(H, D, tiling)[0], 1, C)
    single_row.combine_product(partials, *split_results, lengths, a.x(C, C), block, tiling)
    s, g = a.f(1, C), a.x(1, 4 * C)
    single_row.layernorm_linear(g, None, s, (x, partials, a.x(C)), ln[0], transposed[1], *folded[1], *common)
    single_row.linear_residual(a.f(1, C), s, g, transposed[2], fc_proj[1], tiling)


def launch_cluster_step(a):
    on_gpu = isinstance(triton_launch.launcher(), triton_launch.GpuLauncher)
    if not on_gpu or np.dtype(a.dtype).itemsize != 2 or triton_launch.gpu_model()[0] != cuda_launch.HOPPER:
        return
    for C, V, length in ((256, 37, 1), (768, 1000, 70)):
        H, block, eps, clusters = C // cluster_step.HEAD_SIZE, 70, 1e-5, cluster_step.mlp_clusters(C)
        ln, bias = (a.x(C), a.x(C)), a.x(C)
        qkv, proj, fc, fc_proj = a.x(3 * C, C), a.x(C, C), a.x(4 * C, C), a.x(C, 4 * C)
        for B in (11, 1):
            s, x, partials, sums = a.f(B, C), a.f(B, C), a.f(H, B, C), a.f(clusters, B, C)
            cache, lengths = a.x(B, block, 2 * C), a.i(B, high=block) + length
            for rotation in (None, a.f(B, 2, cluster_step.HEAD_SIZE // 2)):
                rest = ln[0], qkv, (a.f(3 * C), a.f(3 * C)), proj, lengths, rotation, (qkv, proj), eps, False
                for residual in ((x, None, None), (x, sums, bias)):
                    cluster_step.attention_block(partials, s, cache, residual, *rest)
            folded = a.f(4 * C), a.f(4 * C)
            cluster_step.mlp_block(sums, s, (x, partials, bias), ln[0], fc, folded, fc_proj, (fc, fc_proj), eps)
        maxima, indices = a.f(cluster_step.logit_maxima()), a.i(cluster_step.logit_maxima(), high=V)
        weights = qkv, proj, fc, fc_proj
        cluster_step.logits(a.f(V), maxima, indices, s, (x, sums, bias), ln, a.x(V, C), weights, eps)


def launch_gather(a):
    for B, C, block in ((1, 48, 9), (17, 300, 1000)):
        lengths = a.i(B, high=2 * block) + 1
        gather.gather_last_rows(a.x(B, C), a.x(B, 9, C), lengths)
        gather.gather_windows(a.i(B, block, high=37), a.i(B, block, high=37), lengths)


def launch_sampling(a):
    for B, C, V, pairs in ((3, 48, 37, 0), (2, 300, 1301, 0), (2, 300, 37, 50)):  # pairs: with rotary positions
        wpe, readback = None if pairs else a.x(9, C), a.i(B, sampling.READBACK, high=V)
        sequences = sampling.Sequences(a.xp.empty, B, C, 9, a.x(V, C), wpe, readback, pairs)
        sequences.lengths[...] = 8
        logits, maxima, indices = a.f(B, V), a.f(B, 5) + 1, a.i(B, 5, high=V)
        sampling.append_greedy(sequences, maxima, indices)
        sampling.append_given(sequences)
        sampler = sampling.DeviceSampler(a.xp.empty, B, V, (B, 7), True, True)
        sampler.top_p_and_temperature[...], sampler.top_k[...], sampler.uniforms[...] = 0.9, 5, 0.3
        sampler.append_sampled(sequences, logits, maxima)
        mask = sampling.TokenMask(a.xp.empty, B, V)
        mask.valid[...] = 1
        sampling.append_greedy(sequences, *mask.exclude(logits))


def launch_tree_sum(a):
    for p, n in ((1, 9), (3, 5000), (8, tree_sum.BLOCK)):
        tree_sum.tree_sum(a.x(n), a.x(p, n))


def launch_codecs(a):
    p, m, n = 3, 5 * GROUP, 13 * GROUP + 1
    for kind in CODECS:
        codec = codecs.FusedCodec(kind, a.xp)
        code = codec.pack(a.f(p, m), a.f(n))
        codec.add(a.f(m), code)
        codec.unpack(a.f(n), code)


# -- all kernels ------------------------------------------------------------------------------------------------------


def name_of(kernel):
    """The name of a kernel with its file, such as "decoding.batched.layernorm_kernel"."""
    return triton_launch.kernel_name(kernel.fn)


def is_gluon(name):
    """Whether the kernel of this name is written in Gluon."""
    return name.split(".")[1].startswith(("gluon_", "hopper_"))


def all_kernels(stages=(2, 3)):
    """Yield the names of all kernels of these stages; a kernel is a function whose name ends in _kernel."""
    packages = attention_package, kernels, gemm, decoding, bridge_kernels
    stage_2 = [f"{p.__name__}.{module.name}" for p in packages for module in pkgutil.iter_modules(p.__path__)]
    stage_2 = [name for name in stage_2 if name not in STAGE_3_MODULES]
    for module in [*(stage_2 if 2 in stages else ()), *(STAGE_3_MODULES if 3 in stages else ())]:
        for name, function in vars(importlib.import_module(module)).items():
            if name.endswith("_kernel"):
                yield name_of(function)


def call_all_launches(xp, dtypes, skip_warp_specialized=False):
    """Call every launch_* function for each dtype; return the names of the kernels that these functions do not launch.

    skip_warp_specialized: do not launch the kernels with warp specialisation.
    """
    launched, launcher = set(), triton_launch.launcher()
    launch = launcher.launch

    def record_and_launch(kernel, *arguments):
        name = name_of(kernel)
        launched.add(name)
        if not (skip_warp_specialized and is_gluon(name) and name.rpartition(".")[2] in WARP_SPECIALIZED):
            launch(kernel, *arguments)

    launcher.launch = record_and_launch
    try:
        for dtype in dtypes:
            for name, function in list(globals().items()):
                if name.startswith("launch_"):
                    function(Arrays(xp, dtype))
    finally:
        launcher.launch = launch
    gluon = attention.gluon_table(2, 1, 300, 64)  # {} on a GPU without Gluon kernels
    return {name for name in all_kernels() if gluon or not is_gluon(name)} - launched


def run_on_gpu(skip_warp_specialized):
    """The program that compute-sanitizer runs: launch every kernel. Raises ConfigError if a kernel has no launch_*.

    skip_warp_specialized: see call_all_launches().
    """
    xp = triton_launch.array_module()
    if xp is np:
        raise ConfigError("TRITON_INTERPRET is set: compute-sanitizer needs a GPU; unset it")
    xp.cuda.set_allocator(None)  # no pool: every array is a separate allocation
    arguments = xp, ("float32", "float16", "bfloat16"), skip_warp_specialized
    triton_launch.compile_ahead(call_all_launches, *arguments)  # in threads; one after another takes 10 minutes
    if missing := call_all_launches(*arguments):
        raise ConfigError(f"no launch of {', '.join(sorted(missing))}: add one to {Path(__file__).name}")
    xp.cuda.Device().synchronize()


def main():
    parser = BenchmarkParser(__doc__.splitlines()[0])
    parser.add_argument(
        "--tool", choices=TOOLS, nargs="+", default=TOOLS, help="tools of compute-sanitizer to run (default: both)"
    )
    parser.add_argument("--program", action="store_true", help="launch the kernels without compute-sanitizer")
    parser.add_argument("--skip-warp-specialized", action="store_true", help="with --program: not these kernels")
    args = parser.parse_args()
    if args.program:
        return run_on_gpu(args.skip_warp_specialized)
    if not triton_launch.has_driver():
        raise ConfigError("no GPU was found: compute-sanitizer needs a machine with an NVIDIA GPU and its driver")
    triton_launch.array_module()  # raises its ConfigError if there is no GPU
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        raise ConfigError("compute-sanitizer is not on the PATH: install NVIDIA's CUDA toolkit")
    for tool in args.tool:
        exception = ", except those with warp specialisation" if tool == "racecheck" else ""
        print(f"{tool}: every kernel of stages 2 and 3{exception}", flush=True)
        flags = ["--tool", tool, "--error-exitcode", str(ERROR_FOUND), "--target-processes", "application-only"]
        program = [sys.executable, __file__, "--program"] + ["--skip-warp-specialized"] * (tool == "racecheck")
        if code := subprocess.run([sanitizer, *flags, *program], cwd=ROOT).returncode:
            reason = f"{ERROR_FOUND} means that it found the error that is printed above"
            sys.exit(f"error: {tool} ended with exit code {code}; {reason}")


if __name__ == "__main__":
    run_main(main, measures_time=False)
