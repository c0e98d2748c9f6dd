"""The logits after a full window of tokens, computed by one or several worker threads.

When the window slides, all T positions change, so nothing can be cached: each new token needs a forward pass of all T
rows. Most operations compute each row independently of the others. Only attention reads the keys and values of all
rows, but it computes each head independently of the other heads. So the workers divide the rows between two attentions,
and the heads in an attention:

    embedding; LN and q, k, v of the first layer                    a part of the rows
    attention of a layer                                            a part of the heads
    its projection and MLP; LN and q, k, v of the next layer        a part of the rows

The workers wait for each other before and after each attention. In the last layer, only the keys and values of all rows
are needed, and the rest of the last row, which the calling thread computes.
"""

# T positions, C channels, H heads, D = C // H; x (T, C): the sum to which the layers add

import contextlib
import threading

import numpy as np

from gpt2core.parallel.even_slices import even_slices
from gpt2core.parallel.threads import WorkerPool
from gpt2core.tensor import no_grad


class Window:
    """steps: a TokenStep for each worker; with several workers, each step has a backend of its own."""

    def __init__(self, steps):
        self.step, self.pool = steps[0], WorkerPool([step.backend for step in steps])
        (T, C), H = self.step.wpe.shape, self.step.n_head
        self.x, self.y, self.qkv = (np.empty((T, width), self.step.backend.dtype) for width in (C, C, 3 * C))
        self.rows = even_slices(T, self.pool.size)  # of each worker
        self.columns = [slice(part.start * C // H, part.stop * C // H) for part in even_slices(H, self.pool.size)]

    @no_grad()
    def logits(self, ids):
        """The logits (V) after T token ids. The next call overwrites them."""
        step, (T, C), H = self.step, self.x.shape, self.step.n_head
        barrier = threading.Barrier(self.pool.size)
        arguments = [ids] * self.pool.size, self.rows, self.columns, [barrier] * self.pool.size
        several = self.pool.size > 1
        with step.backend.runtime.one_blas_thread() if several else contextlib.nullcontext():
            self.pool.map(self.run_worker, self.pool.backends, *arguments)
            k, v = self.qkv[:, C:].reshape(T, 2, H, -1).transpose(1, 2, 0, 3)  # each (H, T, D)
            y = step.weighted_sum(self.qkv[-1, :C].reshape(H, -1), k.transpose(0, 2, 1), v)
            return step.logits(*step.after_attention(self.x[-1:], y, step.layers[-1]))[0]

    def run_worker(self, backend, ids, rows, columns, barrier):
        """Compute some rows of x and of the q, k, v of each layer, and some columns of y, attention's result."""
        step, layers = self.step, self.step.layers
        try:
            np.add(step.wte[ids[rows]], step.wpe[rows], out=self.x[rows])
            self.project(backend, rows, None, None, layers[0])
            for layer, following in zip(layers, layers[1:], strict=False):
                barrier.wait()
                self.attend(backend, columns)
                barrier.wait()
                self.project(backend, rows, *self.after_attention(backend, rows, layer), following)
        except threading.BrokenBarrierError:
            pass  # another worker has raised an error, which map() raises
        except BaseException:
            barrier.abort()
            raise

    def after_attention(self, backend, rows, layer):
        """From some rows of y on, the rest of a layer: (branch, bias), whose sum is to be added to these rows of x."""
        _, _, attn_proj, ln_2, c_fc, mlp_proj = layer
        branch = backend.linear_forward(self.y[rows], attn_proj[0])
        x, h, _ = backend.residual_layernorm_forward(self.x[rows], branch, attn_proj[1], *ln_2, self.step.eps)
        self.x[rows] = x
        h, _ = backend.linear_gelu_forward(h, *c_fc)
        return backend.linear_forward(h, mlp_proj[0]), mlp_proj[1]

    def project(self, backend, rows, branch, bias, layer):
        """Add branch + bias to some rows of x, and compute these rows of the layer's q, k, v from their LayerNorm."""
        ln_1, (w, b), *_ = layer
        x, h, _ = backend.residual_layernorm_forward(self.x[rows], branch, bias, *ln_1, self.step.eps)
        self.x[rows], qkv, C = x, self.qkv[rows], x.shape[1]
        if layer is not self.step.layers[-1]:
            np.add(backend.matmul(h, w, qkv), b, out=qkv)
            return
        qkv[:, C:] = backend.linear_forward(h, w[:, C:], b[C:])
        if rows.stop == len(self.x):
            qkv[-1:, :C] = backend.linear_forward(h[-1:], w[:, :C], b[:C])

    def attend(self, backend, columns):
        """Compute the columns of y that belong to some heads: their causal attention."""
        (T, C), width = self.x.shape, columns.stop - columns.start
        if width:  # there may be fewer heads than workers
            qkv = self.qkv.reshape(T, 3, C)[:, :, columns].reshape(1, T, 3 * width)
            self.y[:, columns] = backend.attention_forward(qkv, width * self.step.n_head // C)[0][0]
