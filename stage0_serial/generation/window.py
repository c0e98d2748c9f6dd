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

from gpt2core.data import even_slices
from gpt2core.recording import no_grad


class Window:
    """steps: a TokenStep for each worker, with the worker's backend; pool: the WorkerPool of these backends."""

    def __init__(self, steps, pool):
        self.steps, self.pool = steps, pool
        T, C = steps[0].block_size, steps[0].wte.shape[1]
        self.x, self.y, self.qkv = (np.empty((T, width), steps[0].backend.dtype) for width in (C, C, 3 * C))
        self.rows, self.heads = (even_slices(n, pool.size) for n in (T, steps[0].n_head))  # of each worker

    @no_grad()
    def logits(self, ids):
        """The logits (V) after T token ids, in an array that the next call overwrites."""
        step, count = self.steps[0], self.pool.size
        barrier = threading.Barrier(count)
        with step.backend.runtime.one_blas_thread() if count > 1 else contextlib.nullcontext():
            arguments = self.steps, [ids] * count, self.rows, self.heads, [barrier] * count
            self.pool.map(self.run_worker, *arguments, stop=barrier.abort)
            operations = {"attention": self.attend_last, "gelu": step.gelu}
            return step.logits(step.layer((self.x[-1:], None, None), len(step.layers) - 1, operations))[0]

    def run_worker(self, step, ids, rows, heads, barrier):
        """Compute some rows of x and of the q, k, v of each layer, and some heads of y, attention's result."""

        def attention(y, linear, layer):
            step.qkv(y, linear, self.qkv[rows])
            barrier.wait()
            self.attend(step, heads)
            barrier.wait()
            return self.y[rows]

        try:
            residual, operations = step.embedding(ids[rows], rows), {"attention": attention, "gelu": step.gelu}
            for layer in range(len(step.layers) - 1):
                residual = step.layer(residual, layer, operations)
            # in the last layer only k and v; the input of the layer is kept for attend_last()
            first, C = step.layers[-1][0], self.x.shape[1]
            self.x[rows], y = step.normalize(residual, first.norm)
            w, b = first.linear_in
            step.qkv(y, (w[:, C:], b[C:]), self.qkv[rows, C:])
        except threading.BrokenBarrierError:
            pass  # another worker has raised an error, which map() raises, or map() was interrupted
        except BaseException:
            barrier.abort()
            raise

    def attend(self, step, heads):
        """Compute the causal attention of some heads: their columns of y."""
        T, count = len(self.y), heads.stop - heads.start
        if count:  # there may be fewer heads than workers
            qkv = self.qkv.reshape(T, 3, step.n_head, -1)[:, :, heads].reshape(1, T, -1)
            y = step.backend.attention_forward(qkv, count)[0]
            self.y.reshape(T, step.n_head, -1)[:, heads] = y.reshape(T, count, -1)

    def attend_last(self, y, linear, layer):
        """The attention (1, C) of the last row y (1, C) of the last layer to the keys and values of all rows."""
        step, (T, C), (w, b) = self.steps[0], self.x.shape, linear
        q = step.qkv(y, (w[:, :C], b[:C])).reshape(step.n_head, -1)
        k, v = self.qkv[:, C:].reshape(T, 2, step.n_head, -1).transpose(1, 2, 0, 3)  # each (H, T, D)
        return step.weighted_sum(q, k.transpose(0, 2, 1), v)
