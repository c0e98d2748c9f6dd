"""The logits of a new token, in NumPy calls without autograd: of one position with a KV cache, or of a full window.

One token takes little more than the time to read the weights. If each operation made a Tensor, a large part of this
time would be spent in Python. The new positions of several sequences are rows of the same products, so that the
weights are read once for all of them; attention is computed for each sequence, or for all together if they have similar
lengths. A full window is computed by window.py.
"""

# n sequences, N new positions of all of them, T positions, C channels, H heads, D = C // H, K columns, V vocabulary
# residual = (x, branch, bias): the residual stream is x + branch + bias, arrays (N, C), (N, C) and (C), or only x if
# branch and bias are None. The next LayerNorm computes the sum.

import functools

import numpy as np

from gpt2core.architecture import forward_plan
from gpt2core.plain_backend import rotate, rotation
from gpt2core.threads import WorkerPool
from stage0_serial.blas.bf16_products import MIN_ROWS
from stage0_serial.generation.timed_choice import fastest_way, stored_choice
from stage0_serial.generation.window import Window

MIN_TIMED = 1 << 15  # elements of a window (T, C); a smaller one takes a few milliseconds, and BLAS computes it
TIMED_SECONDS = 0.5  # for which each way to compute a window is timed


def token_step(model):
    """A function to use instead of InferenceModel.next_logits, or None if ranks share the layers of the model."""
    return TokenStep(model, model.backend) if model.is_whole else None


class TokenStep:
    """Called as step(ids, cache) -> logits (V), like InferenceModel.next_logits; it computes one token, or a window.

    backend: the model's backend, or one of a worker thread with the same precision.
    """

    operations = "attention", "gelu"  # of the Plan

    def __init__(self, model, backend):
        config = model.config
        self.window = None  # made when a window is full
        self.model = model.without_autograd()
        self.backend, self.eps, self.n_head = backend, config.layer_norm_epsilon, config.n_head
        self.block_size = config.block_size
        plan = forward_plan(config, self.model.arrays, self.operations, "NumPy's decoder")
        # wpe: None with rotary positions, whose cache slides instead of a window
        self.wte, self.wpe, self.layers, self.ln_f, self.head = *plan[:-1], plan.head.T  # head (C, V)
        weights = [w for layer in self.layers for each in layer for w in (each.linear_in[0], each.linear_out[0])]
        widths = {w.shape[1] for w in (*weights, self.head)}
        self.outputs = {width: np.empty((1, width), backend.dtype) for width in widths}

    def __call__(self, ids, cache):
        if self.wpe is not None and len(ids) == self.block_size > 1:
            cache.length = self.block_size  # the cache counts as full, and the next token begins a new one
            self.window = self.window or self.new_window(ids)
            return self.window.logits(ids).copy()
        if len(ids) > 1:
            return self.model.next_logits(ids, cache)
        return self.next_positions([ids], [cache])[0]

    def new_window(self, ids):
        """The faster Window for `ids`: with BLAS's threads, or with worker threads; the choice is kept in the backend.

        A worker has at least MIN_ROWS rows; with fewer, bf16 products would be computed in fp32.
        """
        runtime, pools = self.backend.runtime, self.backend.window_pools
        T, C = self.block_size, self.wte.shape[1]
        what = f"window {T} x {C}, {len(self.layers)} layers, {self.n_head} heads, {runtime.blas}, "
        what += f"{self.backend.precision}, threads {runtime.threads}"
        if what not in pools:
            ways, workers = {"BLAS threads": WorkerPool([self.backend])}, min(runtime.threads, T // MIN_ROWS)
            if workers > 1 and T * C >= MIN_TIMED:
                ways["workers"] = self.backend.new_workers(workers)
            pools[what] = ways[self.fastest_pool(ids, what, ways)]
        return self.window_of(pools[what])

    def fastest_pool(self, ids, what, ways):
        """The name of the pool that computes the window of `ids` in the least time. ways: {name: WorkerPool}."""
        if len(ways) == 1:
            return next(iter(ways))
        calls = {name: functools.partial(self.window_of(pool).logits, ids) for name, pool in ways.items()}
        return stored_choice(what, ways, lambda: fastest_way(calls, TIMED_SECONDS))

    def window_of(self, pool):
        """A Window with the backends of the pool."""
        return Window([TokenStep(self.model, backend) for backend in pool.backends], pool)

    def next_positions(self, uncached, caches, batch_cache=None):
        """The logits (n, V) after n sequences. uncached: the last tokens of each sequence, which follow its cache.

        batch_cache: a KVCache whose sequence i is caches[i], or None.
        """
        ends = np.cumsum([len(ids) for ids in uncached]).tolist()
        parts = [slice(end - len(ids), end) for ids, end in zip(uncached, ends, strict=True)]  # rows of each sequence
        pairs = [
            (cache.length + i, token)
            for ids, cache in zip(uncached, caches, strict=True)
            for i, token in enumerate(ids)
        ]
        positions, ids = np.transpose(pairs)
        together = batch_cache and len(ids) == len(caches) and similar_lengths(positions + 1)
        turn = rotation(positions, self.wte.shape[1] // self.n_head, self.wte.dtype) if self.wpe is None else None
        last = np.array(ends) - 1 if len(ids) > len(ends) else None  # only the last positions' logits are needed

        def attention(y, linear, layer):
            qkv = self.qkv(y, linear)
            if self.wpe is None:
                qkv = rotate(qkv, self.n_head, *turn)
            for cache in caches:
                cache.drop_oldest(layer)
            places = [cache.place for cache in caches]
            if together:
                return self.attention_of_batch(qkv, batch_cache.keys[layer], batch_cache.values[layer], places)
            results = [
                self.attention(qkv[rows], cache.keys[layer], cache.values[layer], place)
                for rows, cache, place in zip(parts, caches, places, strict=True)
            ]
            return results[0] if len(results) == 1 else np.concatenate(results)

        residual, operations = self.embedding(ids, positions), {"attention": attention, "gelu": self.gelu}
        for layer in range(len(self.layers) - 1):
            residual = self.layer(residual, layer, operations)
        residual = self.layer(residual, len(self.layers) - 1, operations, last)
        for ids, cache in zip(uncached, caches, strict=True):
            cache.length += len(ids)
        return self.logits(residual).copy()

    def embedding(self, ids, positions):
        """The residual of N tokens at N positions."""
        x = self.wte[ids]
        return x if self.wpe is None else x + self.wpe[positions], None, None

    def layer(self, residual, layer, operations, rows=None):
        """The residual after layer number `layer`.

        operations: {name: function(y, linear_in, layer)}; a function computes linear_in and the operation. rows: the
        positions whose result is needed, or None for all; attention reads all positions.
        """
        for each in self.layers[layer]:
            x, y = self.normalize(residual, each.norm)
            y = operations[each.operation](y, each.linear_in, layer)
            if rows is not None and len(y) > len(rows):
                x, y = x[rows], y[rows]
            w, bias = each.linear_out
            residual = x, self.product(y, w), bias
        return residual

    def logits(self, residual):
        """The logits (n, V) of a residual (n, C); one row is overwritten later."""
        return self.product(self.normalize(residual, self.ln_f)[1], self.head)

    def normalize(self, residual, norm):
        """The sum of the residual, (n, C), and its LayerNorm; norm: (weight, bias)."""
        (x, branch, bias), (w, b) = residual, norm
        if len(x) == 1:
            return self.backend.layernorm_of_one_row(x, branch, bias, w, b, self.eps)
        return self.backend.residual_layernorm_forward(x, branch, bias, w, b, self.eps)[:2]

    def qkv(self, y, linear, out=None):
        """y (n, C) -> q, k and v, y w + b; or some of them, if linear = (w, b) has only some columns of linear_in."""
        w, b = linear
        qkv = self.product(y, w)
        return np.add(qkv, b, qkv if out is None else out)

    def gelu(self, y, linear, layer):
        """y (n, C) -> gelu(y w + b), (n, 4C)."""
        w, b = linear
        h = self.product(y, w)
        self.backend.gelu(h, b, h, None)
        return h

    def product(self, x, w):
        """x (n, C), w (C, K) -> (n, K); one row is an array that the next product of this width overwrites."""
        return self.backend.one_row(x, w, self.outputs[w.shape[1]]) if len(x) == 1 else self.backend.matmul(x, w)

    def attention(self, qkv, keys, values, position):
        """qkv (t, 3C) from `position` on, keys (1, H, D, block), values (1, H, block, D) -> (t, C); stores k and v."""
        if len(qkv) > 1:
            return self.backend.attention_cached(qkv[None], keys, values, position, self.n_head)[0]
        q, k, v = qkv.reshape(3, self.n_head, -1)  # each (H, D)
        keys[0, :, :, position], values[0, :, position] = k, v
        return self.weighted_sum(q, keys[0, :, :, : position + 1], values[0, :, : position + 1])

    def attention_of_batch(self, qkv, keys, values, positions):
        """qkv (n, 3C) at the indices `positions` (n) of the caches, one of each sequence -> (n, C); stores k and v.

        keys (n, H, D, block), values (n, H, block, D): finite also after the position of their sequence.
        """
        positions = np.asarray(positions)
        n, T = len(qkv), positions.max() + 1
        q, k, v = qkv.reshape(n, 3, self.n_head, -1).transpose(1, 0, 2, 3)  # each (n, H, D)
        keys[range(n), :, :, positions], values[range(n), :, positions] = k, v
        later = np.arange(T) > positions[:, None, None, None]  # (n, 1, 1, T)
        return self.weighted_sum(q, keys[..., :T], values[:, :, :T], later).reshape(n, -1)

    @staticmethod
    def weighted_sum(q, keys, values, masked=None):
        """The softmax attention of q (..., H, D), which is overwritten, to keys (..., H, D, T), as one row.

        values (..., H, T, D); masked (..., 1, 1, T), or None: True for positions whose weight is 0.
        """
        q *= q.shape[-1] ** -0.5
        s = np.matmul(q[..., None, :], keys)  # (..., H, 1, T)
        if masked is not None:
            np.copyto(s, -np.inf, where=masked)
        s -= np.maximum.reduce(s, axis=-1, keepdims=True)
        np.exp(s, out=s)
        y = np.matmul(s, values)  # (..., H, 1, D)
        y /= np.add.reduce(s, axis=-1, keepdims=True)
        return y.reshape(1, -1)


def similar_lengths(lengths):
    """Whether one call for all sequences computes at most twice as many positions as the sequences have."""
    return lengths.max() * len(lengths) <= 2 * lengths.sum()
