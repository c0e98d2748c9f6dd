"""A full window that slides: all its positions are computed again for each new token, and no later step reads them.

The matrix products take most of the time; everything else should be few passes over the activations. So the weights of
the layers are copied once, and changed such that the logits are equal up to rounding errors:

    layout        activations are (C, T): OpenBLAS divides W x, W (K, C), better over its threads than x^T W^T, and
                  attention reads q, k and v of a head without copies
    biases        W x + b = (W, b) (x, 1): the last row of the activations has only ones
    LayerNorm     its weight and bias are part of the next linear layer. It would subtract the mean of the residual
                  stream; here the mean is 0, because the embedding and all branches are centred before they are added
    attention     1 / sqrt(D) is a factor of the rows of W that give q
    last layer    only the last position has a query. q (W x) = (q W) x and (W x) p = W (x p), so the keys and values of
                  the other positions are not computed
"""

# T positions, C channels, H heads, D = C // H, K rows of a weight

import numpy as np

from stage0_serial.rows import slices

QUERIES = 64  # of a tile of scores; tiles above the diagonal are skipped
MAX_BYTES = 1 << 29  # of the weights that are copied; the windows of larger models are computed as prompts are


def window_of(step):
    """A Window for the model of a TokenStep, or None if its windows are computed as prompts."""
    weights = [linear[0] for layer in step.layers for each in layer for linear in (each.linear_in, each.linear_out)]
    if step.backend.runtime.bf16 or sum(w.nbytes for w in weights) > MAX_BYTES:
        return None
    return Window(step)


class Window:
    """Called as window(x (T, C)), the embedding of a full window -> (1, C), the last position before the last layer.

    Then attend_last() is the attention of the last layer.
    """

    def __init__(self, step):
        self.backend, self.eps, self.n_head = step.backend, step.eps, step.n_head
        (T, C), (K, _), dtype = step.wpe.shape, step.layers[0][1].linear_out[0].shape, step.wpe.dtype
        *layers, (last, _) = step.layers
        self.layers, self.last = [self.fused(*layer) for layer in layers], with_bias(*with_norm(last))
        sizes = C, C, 3 * C, self.n_head, C + 1, C + 1, K + 1
        arrays = [self.backend.empty((n, T), dtype) for n in sizes]
        self.x, self.branch, self.qkv, self.sums, self.normed, self.attended, self.hidden = arrays
        for each in arrays[4:]:
            each[-1] = 1
        position = np.arange(QUERIES)
        self.later = position > position[:, None]  # (queries, keys)

    def fused(self, attention, mlp):
        """The matrices (K, C + 1) of the linear layers of a layer, in the order of their use."""
        qkv, hidden = (with_bias(*with_norm(each)) for each in (attention, mlp))
        attention_out, mlp_out = (with_bias(*map(centred, each.linear_out)) for each in (attention, mlp))
        C = len(attention_out)
        qkv[:C] *= (C // self.n_head) ** -0.5
        return qkv, attention_out, hidden, mlp_out

    def __call__(self, x):
        np.copyto(self.x, centred(x).T)
        for qkv, attention_out, hidden, mlp_out in self.layers:
            self.backend.matmul(qkv, self.normalize(), self.qkv)
            self.attend()
            self.add_product(attention_out, self.attended)
            h = self.backend.matmul(hidden, self.normalize(), self.hidden[:-1])
            self.backend.gelu(h, None, h, None)
            self.add_product(mlp_out, self.hidden)
        self.normalize()
        return self.x[:, -1:].T.copy()

    def normalize(self):
        """Write x / sqrt(variance + eps) to `normed`, without its row of ones, and return `normed`."""
        x, y = self.x, self.normed[:-1]
        variance = np.add.reduce(np.multiply(x, x, out=y), axis=0) / len(x)
        np.multiply(x, 1 / np.sqrt(variance + self.eps), out=y)
        return self.normed

    def add_product(self, w, x):
        np.add(self.x, self.backend.matmul(w, x, self.branch), out=self.x)

    def attend(self):
        """Write the causal attention of `qkv` to `attended`. A tile of scores is stored as (H, keys, queries)."""
        q, k, v = self.qkv.reshape(3, self.n_head, -1, self.qkv.shape[1])  # each (H, D, T)
        out = self.attended[:-1].reshape(q.shape)
        for queries in slices(0, q.shape[2], QUERIES):
            n, end = queries.stop - queries.start, queries.stop
            e = self.backend.empty((self.n_head, end, n), q.dtype).swapaxes(1, 2)
            q_tile, later = q[:, :, queries].swapaxes(1, 2), self.later[:n, :n]
            self.backend.exp_of_scores(q_tile, k[:, :, :end], later, e, self.sums[:, queries])
            np.matmul(v[:, :, :end], e.swapaxes(1, 2), out=out[:, :, queries])
        np.divide(out, self.sums[:, None], out=out)

    def attend_last(self, new, layer):
        """The attention of the last position in the last layer: reads its query from new.qkv, writes new.attended."""
        _, w_k, w_v = self.last.reshape(3, self.n_head, -1, self.last.shape[1])  # each (H, D, C + 1)
        q = new.qkv.reshape(3, self.n_head, 1, -1)[0]  # (H, 1, D)
        s = np.matmul(q * q.shape[2] ** -0.5, w_k)[:, 0] @ self.normed  # (H, T)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        np.matmul(w_v, (p @ self.normed.T)[:, :, None], out=new.attended.reshape(self.n_head, -1, 1))


def centred(x):
    """x (..., C) without its mean."""
    return x - x.mean(axis=-1, keepdims=True)


def with_norm(sublayer):
    """(w, b) of a linear layer that is LayerNorm's weight and bias, then the first linear layer of the sublayer."""
    (norm_w, norm_b), (w, b) = sublayer.norm, sublayer.linear_in
    return norm_w[:, None] * w, norm_b @ w + b


def with_bias(w, b):
    """w (C, K) and b (K) -> the matrix (w', b), (K, C + 1)."""
    joined = np.empty((len(b), len(w) + 1), w.dtype)
    for part in slices(0, len(w), 16):  # a cache line of the result, or the whole copy would take 3 times as long
        joined[:, part] = w[part].T
    joined[:, -1] = b
    return joined
