"""The kernels of stage 2's lesson, each with a plain version that calls CuPy's functions one after another."""

# xp: CuPy, or NumPy in the interpreter; rng(*shape): random float32 numbers; of: Sizes

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpt2core.app.presets import PRESETS
from gpt2core.arena import Arena
from gpt2core.model import parameter_shapes
from gpt2core.optimizer import adamw_scalars

SEED = 20260101
ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


class Sizes(NamedTuple):
    """N rows, C channels, V vocabulary; B x H heads of D for T tokens; N_loss rows of logits."""

    N: int
    C: int
    V: int
    B: int
    H: int
    T: int
    N_loss: int
    parameters: str  # the preset whose arena AdamW updates


GPT2 = Sizes(N=16384, C=768, V=50257, B=8, H=12, T=1024, N_loss=4096, parameters="gpt2")


class Row(NamedTuple):
    """One kernel. plain() and ours() return their results, which are compared; then both are timed."""

    section: int
    name: str
    plain: Callable
    ours: Callable
    tolerance: float  # relative norm of the difference


def layernorm(xp, rng, of):
    """Section 2: a residual addition and LayerNorm of the sum."""
    from stage2_cuda.kernels import layernorm as kernels

    x, a, (bias, w, b) = rng(of.N, of.C), rng(of.N, of.C), rng(3, of.C)
    s, y, mean, rstd = xp.empty_like(x), xp.empty_like(x), xp.empty(of.N, np.float32), xp.empty(of.N, np.float32)

    def plain():
        s = x + a + bias
        centred = s - s.mean(1, keepdims=True)
        return s, centred / xp.sqrt((centred * centred).mean(1, keepdims=True) + 1e-5) * w + b

    def ours():
        kernels.residual_layernorm_forward(s, y, mean, rstd, x, a, bias, w, b, 1e-5)
        return s, y

    return Row(2, "residual and LayerNorm in one kernel", plain, ours, 1e-5)


def gelu(xp, rng, of):
    """Section 2: bias and GELU."""
    from stage2_cuda.kernels import gelu as kernels

    h, bias = rng(of.N, 4 * of.C), rng(4 * of.C)
    y = xp.empty_like(h)

    def plain():
        x = h + bias
        return (0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)

    def ours():
        kernels.bias_gelu_forward(y, h, bias)
        return (y,)

    return Row(2, "bias and GELU in one kernel", plain, ours, 1e-5)


def column_sums(xp, rng, of):
    """Section 2: the gradient of a bias."""
    from stage2_cuda.kernels import column_sums as kernels

    dy = rng(of.N, 4 * of.C)
    out, partials = xp.empty(4 * of.C, np.float32), xp.empty(kernels.partials_shape(*dy.shape), np.float32)

    def ours():
        kernels.column_sums(out, partials, dy)
        return (out,)

    return Row(2, "sums over rows for a bias", lambda: (dy.sum(0),), ours, 1e-5)


def embedding(xp, rng, of):
    """Section 3: the gradient of the embedding, with atomic additions and without."""
    from stage2_cuda.kernels import embedding as kernels

    ids = np.random.default_rng(SEED).integers(0, of.V, (of.N // of.T, of.T)).astype(np.int32)
    dy, rows = rng(*ids.shape, of.C), xp.asarray(ids)
    runs = kernels.SortedTokens(*map(xp.asarray, kernels.sort_tokens(ids, of.V)))
    pieces, out = xp.empty(kernels.chunk_sums_shape(ids.size, of.C), np.float32), xp.empty((of.V, of.C), np.float32)

    def plain():
        out = xp.zeros((of.V, of.C), np.float32)
        xp.add.at(out, rows, dy)
        return (out,)

    def ours():
        kernels.embedding_backward(out, None, pieces, runs, dy)
        return (out,)

    return Row(3, "the embedding's gradient without atomics", plain, ours, 1e-5)


def attention(xp, rng, of):
    """Section 4: attention forward and backward in 16 bits, with T x T weights in memory and without."""
    from stage2_cuda.kernels import attention as kernels

    B, T, H, D = of.B, of.T, of.H, of.C // of.H
    qkv, dy = rng(B, T, 3 * of.C).astype(np.float16), rng(B, T, of.C).astype(np.float16)
    y, dqkv = xp.empty_like(dy), xp.empty_like(qkv)
    lse, delta = xp.empty((B, H, T), np.float32), xp.empty((B, H, T), np.float32)
    later = xp.triu(xp.ones((T, T), bool), 1)

    def heads(x):
        return x.reshape(B, T, -1, H, D).transpose(2, 0, 3, 1, 4)  # (parts, B, H, T, D)

    def packed(*parts):
        return xp.stack(parts).transpose(1, 3, 0, 2, 4).reshape(B, T, -1)

    def plain():
        (q, k, v), (g,), scale = heads(qkv), heads(dy), np.float16(1 / math.sqrt(D))
        weights = xp.where(later, np.float16(-np.inf), (q @ k.swapaxes(2, 3)) * scale)
        weights = xp.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        dweights = g @ v.swapaxes(2, 3)
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * scale
        dq, dk, dv = dscores @ k, dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ g
        return packed(weights @ v), packed(dq, dk, dv)

    def ours():
        kernels.attention_forward(y, lse, qkv, H)
        kernels.attention_backward(dqkv, delta, dy, qkv, y, lse, H)
        return y, dqkv

    return Row(4, "attention without T x T arrays", plain, ours, 2e-2)


def loss(xp, rng, of):
    """Section 5: the loss of each row and the gradient of its logits."""
    from stage2_cuda.kernels import cross_entropy as kernels

    n, width = of.N_loss, -(-of.V // 64) * 64
    logits, rows = rng(n, width), xp.arange(n)
    targets = xp.asarray(np.random.default_rng(SEED).integers(0, of.V, n).astype(np.int32))
    dlogits, statistics = xp.empty_like(logits), [xp.empty(n, np.float32) for _ in range(3)]

    def plain():
        x = logits[:, : of.V]
        p = xp.exp(x - x.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses = -xp.log(p[rows, targets])
        p[rows, targets] -= 1
        return losses, p / n

    def ours():
        kernels.cross_entropy_forward_backward(dlogits, *statistics, logits, targets, 1 / n, of.V)
        maxima, sums, picked = statistics
        return xp.log(sums) - (picked - maxima), dlogits[:, : of.V]

    return Row(5, "the loss and its gradient in one kernel", plain, ours, 1e-5)


def adamw(xp, rng, of):
    """Section 6: norm, clipping and AdamW, for each tensor and for the whole arena at once."""
    from stage2_cuda.kernels import adamw as kernels

    arena = Arena(parameter_shapes(PRESETS[of.parameters]))
    both = [[xp.zeros(arena.size, np.float32) for _ in "pmvg"] for _ in range(2)]
    views = [list(arena.views(flat).values()) for flat in both[0]]
    for number, each in enumerate(views):
        for view in each:
            view[...] = rng(*view.shape) * 0.02
            if number == 2:
                view *= view
    for mine, other in zip(both[1], both[0], strict=True):
        mine[...] = other
    lr, beta1, beta2, eps, decay = ADAMW.values()
    scalars, squares = xp.asarray(adamw_scalars(1, *ADAMW.values())), xp.empty(1, np.float64)
    partials, norm, scale = (xp.empty(n, np.float32) for n in (arena.size // kernels.BLOCK, 1, 1))

    def plain():
        factor = xp.minimum(1, 1 / (xp.sqrt(sum((g * g).sum() for g in views[3])) + 1e-6))
        for p, m, v, g in zip(*views, strict=True):
            g = g * factor
            m *= beta1
            m += (1 - beta1) * g
            v *= beta2
            v += (1 - beta2) * g * g
            p *= 1 - lr * decay
            p -= lr / (1 - beta1) * m / (xp.sqrt(v / (1 - beta2)) + eps)
        return both[0][:3]

    def ours():
        p, m, v, g = both[1]
        kernels.sum_of_squares(squares, partials, g)
        kernels.clip_scale(scale, norm, squares, 1.0)
        kernels.adamw_step(p, m, v, None, g, scalars, scale, None, beta1, beta2)
        return p, m, v

    return Row(6, "norm, clipping and AdamW over one buffer", plain, ours, 1e-5)


def product(xp, rng, of):
    """Section 7: an fp32 product on tensor cores, in three passes."""
    from stage2_cuda.gemm import fp16x3

    a, b = rng(of.N, of.C), rng(of.C, 4 * of.C)
    out = xp.empty((of.N, 4 * of.C), np.float32)

    def ours():
        operands = []
        for x in (a, b):
            halves, scales = fp16x3.split_shapes(x)
            operands.append(fp16x3.split(xp.empty(halves, np.float16), xp.empty(scales, np.float32), x))
        fp16x3.product(out, None, *operands)
        return (out,)

    return Row(7, "an fp32 product on tensor cores", lambda: (a @ b,), ours, 1e-5)


KERNELS = layernorm, gelu, column_sums, embedding, attention, loss, adamw, product


def compare(row, xp):
    """Raise ArithmeticError if the two versions differ by more than the tolerance."""
    for mine, plain in zip(row.ours(), row.plain(), strict=True):
        mine, plain = (array.astype(np.float32) for array in (mine, plain))
        error = float(xp.linalg.norm((mine - plain).ravel()) / xp.linalg.norm(plain.ravel()))
        if not error <= row.tolerance:
            bound = f"the tolerance is {row.tolerance:g}"
            raise ArithmeticError(f"{row.name}: the two versions differ by {error:.1e}, {bound}")
