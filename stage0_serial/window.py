"""The logits after a full window of tokens, computed by one or several worker threads.

When the window slides, all T positions change, so nothing can be cached: each new token needs a forward pass of all T
rows. Most operations compute each row independently of the others. Only attention reads the keys and values of all
rows, but it computes each head independently of the other heads. So a worker computes a part of the rows, and in
attention a part of the heads:

    embedding; LN and q, k, v of the first layer                    a part of the rows
    attention of a layer                                            a part of the heads
    its projection and MLP; LN and q, k, v of the next layer        a part of the rows

The workers wait for each other before and after each attention. In the last layer they compute only the keys and values
of all rows. The calling thread computes the rest, for the last row only.
"""

# T positions, C channels, H heads, D = C // H, V vocabulary; x (T, C): the residual stream

import contextlib
import threading

import numpy as np

from gpt2core.parallel.even_slices import even_slices
from gpt2core.tensor import no_grad


class Window:
    """steps: a TokenStep for each worker, with the worker's backend; pool: the WorkerPool of these backends."""

    def __init__(self, steps, pool):
        self.steps, self.pool = steps, pool
        T, C = steps[0].wpe.shape
        self.x, self.y, self.qkv = (np.empty((T, width), steps[0].backend.dtype) for width in (C, C, 3 * C))
        self.rows, self.heads = (even_slices(n, pool.size) for n in (T, steps[0].n_head))  # of each worker

    @no_grad()
    def logits(self, ids):
        """The logits (V) after T token ids, in an array that the next call overwrites."""
        step, (T, C), count = self.steps[0], self.x.shape, self.pool.size
        barrier = threading.Barrier(count)
        with step.backend.runtime.one_blas_thread() if count > 1 else contextlib.nullcontext():
            arguments = self.steps, [ids] * count, self.rows, self.heads, [barrier] * count
            self.pool.map(self.run_worker, *arguments, stop=barrier.abort)
            ln_1, (w, b), *_ = step.layers[-1]
            q = step.product(step.normalize(self.x[-1:], None, None, *ln_1)[1], w[:, :C]) + b[:C]
            k, v = self.qkv[:, C:].reshape(T, 2, step.n_head, -1).transpose(1, 2, 0, 3)  # each (H, T, D)
            y = step.weighted_sum(q.reshape(step.n_head, -1), k.transpose(0, 2, 1), v)
            return step.logits(*step.after_attention(self.x[-1:], y, step.layers[-1]))[0]

    def run_worker(self, step, ids, rows, heads, barrier):
        """Compute some rows of x and of the q, k, v of each layer, and some heads of y, attention's result."""
        try:
            self.project(step, rows, step.wte[ids[rows]] + step.wpe[rows], None, None, step.layers[0])
            for layer, following in zip(step.layers, step.layers[1:], strict=False):
                barrier.wait()
                self.attend(step, heads)
                barrier.wait()
                self.project(step, rows, *step.after_attention(self.x[rows], self.y[rows], layer), following)
        except threading.BrokenBarrierError:
            pass  # another worker has raised an error, which map() raises, or map() was interrupted
        except BaseException:
            barrier.abort()
            raise

    def project(self, step, rows, x, branch, bias, layer):
        """Write x + branch + bias to these rows of self.x, and q, k, v of their LayerNorm to these rows of self.qkv.

        x, branch: (n, C) for n rows; bias: (C). In the first layer, branch and bias are None. In the last layer, only k
        and v are written.
        """
        ln_1, (w, b), *_ = layer
        self.x[rows], h = step.normalize(x, branch, bias, *ln_1)
        first = self.x.shape[1] if layer is step.layers[-1] else 0  # column
        np.add(step.product(h, w[:, first:]), b[first:], out=self.qkv[rows, first:])

    def attend(self, step, heads):
        """Compute the causal attention of some heads: their columns of y."""
        T, count = len(self.y), heads.stop - heads.start
        if count:  # there may be fewer heads than workers
            qkv = self.qkv.reshape(T, 3, step.n_head, -1)[:, :, heads].reshape(1, T, -1)
            y = step.backend.attention_forward(qkv, count)[0]
            self.y.reshape(T, step.n_head, -1)[:, heads] = y.reshape(T, count, -1)
