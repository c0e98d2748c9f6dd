"""The kernels of stage 2's lesson, each with a plain version that calls CuPy's functions one after another.

Each function (layernorm, gelu, ...) allocates random inputs and returns a Comparison of the two versions.
"""

# xp: the module cupy, or numpy in the interpreter; rng(*shape): random float32 numbers on the device; sizes: a Sizes

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.harness.rounds import SEED
from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.optimizer import AdamW
from gpt2core.presets import PRESETS
from stage2_cuda.tuning.tuner import difference

ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


class Sizes(NamedTuple):
    """The sizes of the arrays."""

    N: int  # rows of activations
    C: int  # channels
    V: int  # vocabulary
    B: int  # sequences, for attention
    H: int  # heads, each of C // H channels
    T: int  # tokens per sequence
    N_loss: int  # rows of logits
    parameters: str  # the preset whose parameters AdamW updates


GPT2 = Sizes(N=16384, C=768, V=50257, B=8, H=12, T=1024, N_loss=4096, parameters="gpt2")


class Comparison(NamedTuple):
    """Two versions of a kernel: plain() and ours() return the same arrays. Or two timers: both return seconds."""

    section: int  # of the lesson
    name: str
    plain: Callable
    ours: Callable
    tolerance: float = 0.0  # of arrays: largest allowed norm(our result - plain result) / norm(plain result)


def layernorm(xp, rng, sizes):
    """Section 4: a residual addition, s = x + a + bias, and LayerNorm of s."""
    from stage2_cuda.kernels import layernorm as kernels

    x, a, (bias, w, b) = rng(sizes.N, sizes.C), rng(sizes.N, sizes.C), rng(3, sizes.C)
    s, y, mean, rstd = xp.empty_like(x), xp.empty_like(x), xp.empty(sizes.N, np.float32), xp.empty(sizes.N, np.float32)

    def plain():
        s = x + a + bias
        centred = s - s.mean(1, keepdims=True)
        return s, centred / xp.sqrt((centred * centred).mean(1, keepdims=True) + 1e-5) * w + b

    def ours():
        kernels.residual_layernorm_forward(s, y, mean, rstd, x, a, bias, w, b, 1e-5)
        return s, y

    return Comparison(4, "residual and LayerNorm in one kernel", plain, ours, 1e-5)


def gelu(xp, rng, sizes):
    """Section 5: bias and GELU."""
    from stage2_cuda.kernels import gelu as kernels

    h, bias = rng(sizes.N, 4 * sizes.C), rng(4 * sizes.C)
    y = xp.empty_like(h)

    def plain():
        x = h + bias
        return (0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)

    def ours():
        kernels.bias_gelu_forward(y, h, bias)
        return (y,)

    return Comparison(5, "bias and GELU in one kernel", plain, ours, 1e-5)


def column_sums(xp, rng, sizes):
    """Section 4: the gradient of a bias, which is the sum over the rows of dy."""
    from stage2_cuda.kernels import column_sums as kernels

    dy = rng(sizes.N, 4 * sizes.C)
    out, partials = xp.empty(4 * sizes.C, np.float32), xp.empty(kernels.partials_shape(*dy.shape), np.float32)

    def ours():
        kernels.column_sums(out, partials, dy)
        return (out,)

    return Comparison(4, "sums over rows for a bias", lambda: (dy.sum(0),), ours, 1e-5)


def embedding(xp, rng, sizes):
    """Section 9: the gradient of the embedding, with atomic additions (plain) and without them (ours)."""
    from stage2_cuda.kernels import embedding as kernels

    ids = np.random.default_rng(SEED).integers(0, sizes.V, (sizes.N // sizes.T, sizes.T)).astype(np.int32)
    dy, device_ids = rng(*ids.shape, sizes.C), xp.asarray(ids)
    sorted_tokens = kernels.SortedTokens(*map(xp.asarray, kernels.sort_tokens(ids, sizes.V)))
    chunk_sums = xp.empty(kernels.chunk_sums_shape(ids.size, sizes.C), np.float32)
    dwte = xp.empty((sizes.V, sizes.C), np.float32)

    def plain():
        dwte = xp.zeros((sizes.V, sizes.C), np.float32)
        xp.add.at(dwte, device_ids, dy)
        return (dwte,)

    def ours():
        kernels.token_gradient(dwte, chunk_sums, sorted_tokens, dy)
        return (dwte,)

    return Comparison(9, "the embedding's gradient without atomics", plain, ours, 1e-5)


def attention(xp, rng, sizes):
    """Section 7: attention forward and backward in 16 bits; only the plain version stores the T x T weights."""
    from stage2_cuda.attention import launches as kernels

    B, T, H, D = sizes.B, sizes.T, sizes.H, sizes.C // sizes.H
    qkv, dy = rng(B, T, 3 * sizes.C).astype(np.float16), rng(B, T, sizes.C).astype(np.float16)
    y, dqkv = xp.empty_like(dy), xp.empty_like(qkv)
    lse, delta = xp.empty((B, H, T), np.float32), xp.empty((B, H, T), np.float32)
    later_keys = xp.triu(xp.ones((T, T), bool), 1)  # (queries, keys): the keys that a query must not see

    def heads(x):  # x (B, T, parts * C)
        return x.reshape(B, T, -1, H, D).transpose(2, 0, 3, 1, 4)  # (parts, B, H, T, D)

    def packed(*parts):  # the inverse of heads()
        return xp.stack(parts).transpose(1, 3, 0, 2, 4).reshape(B, T, -1)

    def plain():
        (q, k, v), (dy_heads,), scale = heads(qkv), heads(dy), np.float16(1 / math.sqrt(D))
        weights = xp.where(later_keys, np.float16(-np.inf), (q @ k.swapaxes(2, 3)) * scale)
        weights = xp.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        dweights = dy_heads @ v.swapaxes(2, 3)
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * scale
        dq, dk, dv = dscores @ k, dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dy_heads
        return packed(weights @ v), packed(dq, dk, dv)

    def ours():
        kernels.attention_forward(y, lse, qkv, H)
        kernels.attention_backward(dqkv, delta, dy, qkv, y, lse, H)
        return y, dqkv

    return Comparison(7, "attention without T x T arrays", plain, ours, 2e-2)


def loss(xp, rng, sizes):
    """Section 8: the loss of each row and the gradient of its logits."""
    from stage2_cuda.kernels import cross_entropy as kernels

    n, width = sizes.N_loss, -(-sizes.V // 64) * 64  # width: the vocabulary, padded to a multiple of 64
    logits, rows = rng(n, width), xp.arange(n)
    targets = xp.asarray(np.random.default_rng(SEED).integers(0, sizes.V, n).astype(np.int32))
    dlogits, statistics = xp.empty_like(logits), [xp.empty(n, np.float32) for _ in range(3)]

    def plain():
        x = logits[:, : sizes.V]
        p = xp.exp(x - x.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses = -xp.log(p[rows, targets])
        p[rows, targets] -= 1
        return losses, p / n

    def ours():
        kernels.cross_entropy_forward_backward(dlogits, *statistics, logits, targets, 1 / n, sizes.V)
        maxima, sums, target_logits = statistics
        return xp.log(sums) - (target_logits - maxima), dlogits[:, : sizes.V]

    return Comparison(8, "the loss and its gradient in one kernel", plain, ours, 1e-5)


def adamw(xp, rng, sizes):
    """Section 10: gradient norm, clipping and AdamW, for each tensor (plain) and for the whole arena at once (ours).

    p, m, v, g: parameters, first and second moments, gradients.
    """
    from stage2_cuda.kernels import adamw as kernels
    from stage2_cuda.kernels.segment_sum import segment_sum

    arena = Arena(parameter_shapes(PRESETS[sizes.parameters]))
    plain_buffers, our_buffers = ([xp.zeros(arena.size, np.float32) for _ in "pmvg"] for _ in range(2))
    tensors = [list(arena.views(buffer).values()) for buffer in plain_buffers]
    for name, views in zip("pmvg", tensors, strict=True):
        for view in views:
            view[...] = rng(*view.shape) * 0.02
            if name == "v":
                view *= view  # second moments are not negative
    for our_buffer, plain_buffer in zip(our_buffers, plain_buffers, strict=True):
        our_buffer[...] = plain_buffer
    lr, beta1, beta2, eps, decay = ADAMW.values()
    coefficients, squares = xp.asarray(AdamW(beta1, beta2, eps, decay).coefficients(1, lr)), xp.empty(1, np.float64)
    partials, norm, scale = (xp.empty(n, np.float32) for n in (arena.size // kernels.BLOCK, 1, 1))

    def plain():
        factor = xp.minimum(1, 1 / (xp.sqrt(sum((g * g).sum() for g in tensors[3])) + 1e-6))
        for p, m, v, g in zip(*tensors, strict=True):
            g = g * factor
            m *= beta1
            m += (1 - beta1) * g
            v *= beta2
            v += (1 - beta2) * g * g
            p *= 1 - lr * decay
            p -= lr / (1 - beta1) * m / (xp.sqrt(v / (1 - beta2)) + eps)
        return plain_buffers[:3]

    def ours():
        p, m, v, g = our_buffers
        kernels.page_sums(partials, g)
        segment_sum(squares, partials)
        kernels.clip_scale(scale, norm, squares, 1.0)
        kernels.adamw_step(p, m, v, None, g, coefficients, scale, None, beta1, beta2)
        return p, m, v

    return Comparison(10, "norm, clipping and AdamW over one buffer", plain, ours, 1e-5)


def product(xp, rng, sizes):
    """Section 6: an fp32 product on tensor cores, as three fp16 products of split operands."""
    from stage2_cuda.gemm import fp16x3

    a, b = rng(sizes.N, sizes.C), rng(sizes.C, 4 * sizes.C)
    out = xp.empty((sizes.N, 4 * sizes.C), np.float32)

    def ours():
        operands = []
        for x in (a, b):
            halves, scales = fp16x3.split_shapes(x)
            operands.append(fp16x3.split(xp.empty(halves, np.float16), xp.empty(scales, np.float32), x))
        fp16x3.product(out, None, *operands)
        return (out,)

    return Comparison(6, "an fp32 product on tensor cores", lambda: (a @ b,), ours, 1e-5)


KERNEL_PAIRS = layernorm, gelu, column_sums, embedding, attention, loss, adamw, product  # in the lesson's order


def check_close(pair):
    """Run both versions; raise ArithmeticError if a result differs by more than the tolerance."""
    for ours, plain in zip(pair.ours(), pair.plain(), strict=True):
        if not (error := difference(ours, plain)) <= pair.tolerance:
            bound = f"the tolerance is {pair.tolerance:g}"
            raise ArithmeticError(f"{pair.name}: the two versions differ by {error:.1e}, {bound}")
