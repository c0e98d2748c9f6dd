"""The logits after a full window of tokens, computed by worker threads.

When the window slides, all T positions change, so nothing can be cached: each new token needs a forward pass of all T
rows. Most operations compute each row independently of the others. Only attention reads the keys and values of all
rows, but it computes each head independently of the other heads. So the workers divide the rows between two attentions,
and the heads in an attention:

    x = LN of some rows; q, k, v = x w + b      a part of the rows
    attention                                   a part of the heads
    projection, LN, MLP, and the next layer up to its q, k, v      a part of the rows

All workers wait for each other after each of these calls. In the last layer, only the keys and values of all rows are
needed, and the rest of the last row.
"""

# T positions, C channels, H heads, D = C // H; x (T, C): the sum to which the layers add

import numpy as np

from gpt2core.parallel.even_slices import even_slices
from gpt2core.tensor import no_grad


class Window:
    """The arrays of a full window, and the calls that compute it. step: a TokenStep."""

    def __init__(self, step):
        T, C = step.wpe.shape
        self.step, dtype = step, step.backend.dtype
        self.x, self.y, self.qkv = (np.empty((T, width), dtype) for width in (C, C, 3 * C))

    @no_grad()
    def logits(self, ids, pool, last):
        """The logits (V) after T token ids. pool: a WorkerPool; last: a TokenStep for the last row."""
        step, x, layers = self.step, self.x, self.step.layers
        (T, C), H = x.shape, step.n_head
        np.take(step.wte, ids, axis=0, out=x)
        x += step.wpe
        parts = even_slices(T, pool.size)
        heads = [slice(part.start * C // H, part.stop * C // H) for part in even_slices(H, pool.size)]  # as columns
        for before, after in zip([None, *layers[:-1]], layers, strict=True):
            if before:
                pool.map(self.attend, pool.backends, heads)
            pool.map(self.rows, pool.backends, parts, [before] * pool.size, [after] * pool.size)
        k, v = self.qkv[:, C:].reshape(T, 2, H, -1).transpose(1, 2, 0, 3)  # each (H, T, D)
        y = step.weighted_sum(self.qkv[-1, :C].reshape(H, -1), k.transpose(0, 2, 1), v)
        return last.logits(*last.after_attention(x[-1:], y, layers[-1]))[0]

    def rows(self, backend, part, before, after):
        """Compute the rows `part` of q, k, v of the layer `after`, from the attention of the layer `before` on."""
        x, C, eps = self.x[part], self.x.shape[1], self.step.eps
        branch, branch_bias = None, None  # what the next norm adds to x
        if before:
            _, _, attn_proj, ln_2, c_fc, mlp_proj = before
            branch = backend.linear_forward(self.y[part], attn_proj[0])
            x, h, _ = backend.residual_layernorm_forward(x, branch, attn_proj[1], *ln_2, eps)
            h, _ = backend.linear_gelu_forward(h, *c_fc)
            branch, branch_bias = backend.linear_forward(h, mlp_proj[0]), mlp_proj[1]
        ln_1, (w, b) = after[0], after[1]
        self.x[part], h, _ = backend.residual_layernorm_forward(x, branch, branch_bias, *ln_1, eps)
        if after is not self.step.layers[-1]:
            np.add(backend.matmul(h, w, self.qkv[part]), b, out=self.qkv[part])
            return
        self.qkv[part, C:] = backend.linear_forward(h, w[:, C:], b[C:])
        if part.stop == len(self.x):
            self.qkv[-1:, :C] = backend.linear_forward(h[-1:], w[:, :C], b[:C])

    def attend(self, backend, columns):
        """Compute the columns of y that belong to some heads: their causal attention."""
        (T, C), H = self.x.shape, self.step.n_head
        width = columns.stop - columns.start
        if width:  # there may be fewer heads than workers
            qkv = self.qkv.reshape(T, 3, C)[:, :, columns].reshape(1, T, 3 * width)
            self.y[:, columns] = backend.attention_forward(qkv, width * H // C)[0][0]
