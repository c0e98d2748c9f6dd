"""Every kernel as its textbook formula and its derivative, in plain NumPy: a complete Backend without tricks.

Read this file to learn what is computed, and NumpyBackend (stage 0) to learn how the same is computed fast. dy is the
gradient of the loss with respect to y. Every formula below follows from dx = J' dy, where the Jacobian J of y has the
derivatives dy_j/dx_i. `aux` is what a forward kernel saves for its backward kernel. The base class ComposedKernels
calls these kernels for larger ones: the MLP, the residual stream with its LayerNorm, the logits with their loss.
"""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows; w' is w transposed
# first, own: several ranks can divide the vocabulary; `first` is the first token of this rank, and `own` says which
# tokens it has. On one rank, first is 0 and it has all of them.

import math

import numpy as np

from gpt2core.arena import PAGE
from gpt2core.composed_kernels import ComposedKernels
from gpt2core.errors import ConfigError
from gpt2core.runtime import Runtime

A = math.sqrt(2 / math.pi)
BASE = 10000.0  # of rotary positions: from one position to the next, pair i of channels turns by BASE^(-2i / D)


class PlainBackend(ComposedKernels):
    """A complete Backend. A subclass replaces the kernels that it makes faster, and keeps the others."""

    name = "plain"
    xp = np

    def __init__(self, precision="fp32", deterministic=True):
        if precision not in ("fp32", "fp64"):
            raise ConfigError(f"`precision={precision}` is not available here: use fp32 or fp64")
        self.precision, self.runtime = precision, Runtime()
        self.dtype = self.compute_dtype = np.dtype({"fp32": np.float32, "fp64": np.float64}[precision])

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def asarray(self, array, dtype=None):
        return np.asarray(array, dtype)

    def to_host(self, array):
        return np.asarray(array)

    # -- linear: y = x w + b;  dx = dy w',  dw = x' dy,  db = sum of dy over the rows ----------------------------------

    def linear_forward(self, x, w, b=None):
        return x @ w if b is None else x @ w + b

    def linear_backward(self, dy, x, w, bias=True):
        return dy @ w.T, rows(x).T @ rows(dy), self.bias_backward(dy) if bias else None

    def bias_backward(self, dy):
        return rows(dy).sum(0)

    # -- gelu: y = x (1 + t) / 2,  t = tanh(u),  u = A (x + 0.044715 x^3) ----------------------------------------------
    #    the slope is (1 + t) / 2 + x / 2 dt/dx,  dt/dx = (1 - t^2) du/dx;  dx = slope dy

    def gelu_forward(self, x):
        return x * (1 + np.tanh(A * (x + 0.044715 * x * x * x))) / 2

    def gelu_backward(self, dy, x):
        t = np.tanh(A * (x + 0.044715 * x * x * x))
        slope = (1 + t) / 2 + x * (1 - t * t) / 2 * A * (1 + 3 * 0.044715 * x * x)
        return dy * slope

    # -- layernorm: h = (x - mean) r,  r = 1 / sqrt(variance + eps),  y = h w + b --------------------------------------
    #    dmean/dx_i = 1 / C, dvariance/dx_i = 2 (x_i - mean) / C, so dr/dx_i = -r^3 / 2 times this = -r^2 h_i / C,
    #    and dh_j/dx_i = r ((1 if i = j else 0) - 1 / C - h_i h_j / C), because x_j - mean = h_j / r.
    #    With g = dy w, the gradient of h:  dx = r (g - mean(g) - h mean(g h))

    def layernorm_forward(self, x, w, b, eps):
        centred = x - x.mean(-1, keepdims=True)
        r = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
        h = centred * r
        return h * w + b, (h, r)

    def layernorm_backward(self, dy, w, aux):
        h, r = aux
        g = dy * w
        dx = r * (g - g.mean(-1, keepdims=True) - h * (g * h).mean(-1, keepdims=True))
        return dx, rows(dy * h).sum(0), rows(dy).sum(0)

    # -- dropout: y = keep (x + b) / (1 - p);  dx = keep dy / (1 - p) --------------------------------------------------

    def dropout(self, x, mask, bias=None):
        y = x if bias is None else x + bias
        return np.where(mask.keeps(x.shape), y * x.dtype.type(mask.dropout.scale), x.dtype.type(0))

    # -- rotary positions: channels i and i + D / 2 of each q and k are a point of the plane, (a, b), which is rotated:
    #    (a cos - b sin, b cos + a sin), angle = position 10000^(-2i / D);  backward rotates by the opposite angle

    def rotary_forward(self, qkv, n_head, position=0):
        cos, sin = rotation(position + np.arange(qkv.shape[-2]), qkv.shape[-1] // 3 // n_head, qkv.dtype)
        return rotate(qkv, n_head, cos, sin)

    def rotary_backward(self, dy, n_head, position=0):
        cos, sin = rotation(position + np.arange(dy.shape[-2]), dy.shape[-1] // 3 // n_head, dy.dtype)
        return rotate(dy, n_head, cos, -sin)

    # -- attention: for each head P = softmax(S), S = q k' / sqrt(D) with -inf above the diagonal, y = P v -------------
    #    dv = P' dy,  dP = dy v',  dS = P (dP - rowsum(P dP)),  dq = dS k / sqrt(D),  dk = dS' q / sqrt(D), because
    #    ∂P_j/∂S_i = P_j ((1 if i = j else 0) - P_i) in each row

    def attention_forward(self, qkv, n_head):
        q, k, v = split_heads(qkv, n_head)
        p = softmax(causal(q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])))
        return merge_heads(p @ v), p

    def attention_backward(self, dy, qkv, y, aux, n_head):
        (q, k, v), p = split_heads(qkv, n_head), aux
        dy = dy.reshape(*y.shape[:2], n_head, -1).swapaxes(1, 2)
        dp = dy @ v.swapaxes(2, 3)
        ds, scale = p * (dp - (p * dp).sum(-1, keepdims=True)), 1 / math.sqrt(q.shape[3])
        dq, dk, dv = ds @ k * scale, ds.swapaxes(2, 3) @ q * scale, p.swapaxes(2, 3) @ dy
        return np.concatenate([merge_heads(each) for each in (dq, dk, dv)], -1)

    # -- embedding: y = wte[ids] + wpe[positions];  each row of dy is added to the row of its token and its position ---

    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        token, own = local_tokens(ids, first, len(wte))
        y = np.where(own[..., None], wte[token], 0)
        return y if wpe is None else y + wpe[position : position + ids.shape[-1]]

    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0):
        (token, own), dwte = local_tokens(ids, first, len(wte)), np.zeros(wte.shape, wte.dtype)
        np.add.at(dwte, token[own], dy[own])
        if wpe is None:
            return dwte, None
        dwpe = np.zeros_like(wpe)
        dwpe[position : position + ids.shape[-1]] = dy.sum(0)
        return dwte, dwpe

    # -- logits: s = x w' ----------------------------------------------------------------------------------------------

    def unembed_forward(self, x, w):
        return x @ w.T

    def unembed_backward(self, dy, x, w):
        return dy @ w, rows(dy).T @ rows(x)

    # -- cross-entropy: the loss of a row of logits s is log(sum(exp(s))) - s[target];  ds = softmax(s) - onehot(target)
    #    The next three functions are this formula, cut where ranks that divide the vocabulary exchange numbers
    #    (ops.loss_of_rows). Each rank computes m = max(s), sum(exp(s - m)) and s[target] of its own logits. With M, the
    #    maximum over the ranks, loss_rows() gives sum(exp(s - M)), and after the sum over the ranks loss() gives
    #    log(sum) + M - s[target]. On one rank M = m, and the exchange changes nothing.

    def cross_entropy_forward(self, logits, targets, first=0):
        (token, own), row = local_tokens(targets, first, logits.shape[1]), np.arange(len(targets))
        maxima = logits.max(1)
        return maxima, np.exp(logits - maxima[:, None]).sum(1), np.where(own, logits[row, token], 0), None

    def loss_rows(self, maxima, sums, target_logits, row_maxima):
        return np.stack([sums * np.exp(maxima - row_maxima), target_logits])

    def loss(self, row_maxima, sums, target_logits, scale):
        losses = np.log(sums) + row_maxima - target_logits
        return np.asarray(losses.sum(dtype=np.float64) * scale)

    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        token, own = local_tokens(targets, first, logits.shape[1])
        p = np.exp(logits - maxima[:, None]) / sums[:, None]  # softmax
        p[np.flatnonzero(own), token[own]] -= 1
        return p * p.dtype.type(float(dy) * scale)

    # -- flat buffers: the norm of the gradient, and clipping; 1e-6 as in PyTorch's clip_grad_norm_ --------------------

    def page_sums(self, flat):
        return (flat.reshape(-1, PAGE) ** 2).sum(1)

    def clip(self, sums, clip, guard=None):
        norm = np.float64(math.sqrt(sums.sum(dtype=np.float64)))
        if not math.isfinite(norm):
            return norm, np.float64(math.nan)
        return norm, np.float64(min(1.0, clip / (norm + 1e-6)) if clip else 1.0)

    # -- AdamW, whose formula is in optimizer.py: m and v are running means of g and of g^2;
    #    p = shrink p - rate m / (sqrt(v) + e)

    def adamw_step(self, p, m, v, g, coefficients, factor, decays, betas, copy=None):
        if math.isnan(factor):
            return
        (rate, e, shrink), (beta1, beta2) = coefficients.tolist(), betas
        g = g * p.dtype.type(factor)
        m[...] = beta1 * m + (1 - beta1) * g
        v[...] = beta2 * v + (1 - beta2) * g * g
        decay = np.repeat(np.where(decays, shrink, 1.0).astype(p.dtype), PAGE)
        p[...] = decay * p - rate * m / (np.sqrt(v) + e)

    # -- generation only, not a training step: attention, with the keys and values of earlier positions in a cache -----

    def attention_cached(self, qkv, keys, values, position, n_head):
        q, k, v = split_heads(qkv, n_head)
        end = position + q.shape[2]
        keys[..., position:end], values[:, :, position:end] = k.swapaxes(2, 3), v
        p = softmax(causal(q @ keys[..., :end] / math.sqrt(q.shape[3]), position))
        return merge_heads(p @ values[:, :, :end])


def rows(x):
    """(..., C) as (N, C)."""
    return x.reshape(-1, x.shape[-1])


def rotation(positions, D, dtype):
    """The cosines and sines (T, D / 2) of the angles of `positions` (T), computed in float64 and rounded once."""
    angles = np.outer(positions, BASE ** (-np.arange(0, D, 2) / D))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rotate(qkv, n_head, cos, sin):
    """qkv (..., T, 3C) with q and k rotated by the angles with these cosines and sines (T, D / 2)."""
    pairs = qkv.reshape(*qkv.shape[:-1], 3, n_head, 2, -1)  # (..., T, 3, H, 2, D / 2)
    cos, sin = cos[:, None, None], sin[:, None, None]  # for q and k, and for each head
    y, (a, b) = pairs.copy(), np.moveaxis(pairs[..., :2, :, :, :], -2, 0)
    y[..., :2, :, 0, :], y[..., :2, :, 1, :] = a * cos - b * sin, b * cos + a * sin
    return y.reshape(qkv.shape)


def split_heads(qkv, n_head):
    """(B, T, 3C) -> q, k, v, each (B, H, T, D)."""
    return (x.reshape(*x.shape[:2], n_head, -1).swapaxes(1, 2) for x in np.split(qkv, 3, -1))


def merge_heads(x):
    """(B, H, T, D) -> (B, T, C)."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def causal(s, position=0):
    """Scores (B, H, t, T) of the queries from `position` on: -inf for keys after the query."""
    return np.where(np.tri(*s.shape[2:], position, dtype=bool), s, s.dtype.type(-np.inf))


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def local_tokens(ids, first, count):
    """(index among the tokens [first, first + count), whether the token is one of them), each of the shape of ids."""
    index = ids.astype(np.intp) - first
    own = (index >= 0) & (index < count)
    return np.where(own, index, 0), own
