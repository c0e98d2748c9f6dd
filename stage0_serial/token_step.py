"""The logits of a new token, in NumPy calls without autograd: of one position with a KV cache, or of a full window.

One token takes little more than the time to read the weights. If each operation made a Tensor, a large part of this
time would be spent in Python. The new positions of several sequences are rows of the same products, so that the
weights are read once for all of them; attention is computed for each sequence, or for all together if they have similar
lengths. A full window is computed by window.py.
"""

# n sequences, N new positions of all of them, T positions, C channels, H heads, D = C // H, K columns, V vocabulary

import functools

import numpy as np

from gpt2core.communicator import Solo
from gpt2core.parallel.threads import WorkerPool
from gpt2core.sampler import next_logits
from stage0_serial.bf16_products import MIN_ROWS
from stage0_serial.timed_choice import fastest_way, stored_choice
from stage0_serial.window import Window

MODULES = "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"  # of a layer
MIN_TIMED = 1 << 15  # elements of a window (T, C); a smaller one takes a few milliseconds, and BLAS computes it
TIMED_SECONDS = 0.5  # for which each way to compute a window is timed


def token_step(model):
    """A function to use instead of sampler.next_logits, or None if ranks share the layers of the model."""
    return TokenStep(model, model.head.backend) if isinstance(model.group, Solo) else None


class TokenStep:
    """Called as step(model, ids, cache) -> logits (V), like next_logits; it computes a token or a window itself.

    backend: the model's backend, or one of a worker thread with the same precision.
    """

    def __init__(self, model, backend):
        config = model.config
        self.window = None  # made when a window is full
        self.backend, self.eps, self.n_head = backend, config.layer_norm_epsilon, config.n_head
        self.block_size = config.block_size
        arrays = {name: tensor.data for name, tensor in model.parameters.items()}
        self.wte, self.wpe = arrays["transformer.wte.weight"], arrays["transformer.wpe.weight"]
        self.layers = [
            [self.module(arrays, f"transformer.h.{layer}.{name}") for name in MODULES]
            for layer in range(config.n_layer)
        ]
        self.ln_f, self.head = self.module(arrays, "transformer.ln_f"), model.head.data.T  # head (C, V)
        widths = {weight.shape[1] for layer in self.layers for weight, _ in layer if weight.ndim == 2}
        self.outputs = {width: np.empty((1, width), backend.dtype) for width in widths | {self.head.shape[1]}}

    @staticmethod
    def module(arrays, name):
        """(weight, bias) of a module."""
        return arrays[f"{name}.weight"], arrays[f"{name}.bias"]

    def __call__(self, model, ids, cache):
        if len(ids) == self.block_size > 1:
            cache.length = self.block_size  # the cache counts as full, and the next token begins a new one
            self.window = self.window or self.new_window(model, ids)
            return self.window.logits(ids).copy()
        if len(ids) > 1:
            return next_logits(model, ids, cache)
        return self.next_positions([ids], [cache])[0]

    def new_window(self, model, ids):
        """The faster Window for `ids`: with BLAS's threads, or with worker threads; the choice is kept in the backend.

        A worker has at least MIN_ROWS rows; with fewer, bf16 products would be computed in fp32.
        """
        runtime, (T, C), pools = self.backend.runtime, self.wpe.shape, self.backend.window_pools
        what = f"window {T} x {C}, {len(self.layers)} layers, {self.n_head} heads, {runtime.blas}, "
        what += f"{self.backend.precision}, threads {runtime.threads}"
        if what not in pools:
            ways, workers = {"BLAS threads": WorkerPool([self.backend])}, min(runtime.threads, T // MIN_ROWS)
            if workers > 1 and T * C >= MIN_TIMED:
                ways["workers"] = self.backend.new_workers(workers)
            pools[what] = ways[self.fastest_pool(model, ids, what, ways)]
        return self.window_of(model, pools[what])

    def fastest_pool(self, model, ids, what, ways):
        """The name of the pool that computes the window of `ids` in the least time. ways: {name: WorkerPool}."""
        if len(ways) == 1:
            return next(iter(ways))
        calls = {name: functools.partial(self.window_of(model, pool).logits, ids) for name, pool in ways.items()}
        return stored_choice(what, ways, lambda: fastest_way(calls, TIMED_SECONDS))

    def window_of(self, model, pool):
        """A Window with the backends of the pool."""
        return Window([TokenStep(model, backend) for backend in pool.backends], pool)

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
        x = self.wte[ids] + self.wpe[positions]  # (N, C)
        branch, branch_bias = None, None  # what the next norm adds to x
        for layer, (ln_1, c_attn, *_) in enumerate(self.layers):
            x, y = self.normalize(x, branch, branch_bias, *ln_1)
            qkv = self.product(y, c_attn[0])
            qkv += c_attn[1]
            if together:
                y = self.attention_of_batch(qkv, batch_cache.keys[layer], batch_cache.values[layer], positions)
            else:
                for rows, cache in zip(parts, caches, strict=True):
                    y[rows] = self.attention(qkv[rows], cache.keys[layer], cache.values[layer], cache.length)
            if layer == len(self.layers) - 1 and len(x) > len(ends):
                last = np.array(ends) - 1  # only the last position's logits are needed
                x, y = x[last], y[last]  # (n, C)
            x, branch, branch_bias = self.after_attention(x, y, self.layers[layer])
        for ids, cache in zip(uncached, caches, strict=True):
            cache.length += len(ids)
        return self.logits(x, branch, branch_bias).copy()

    def after_attention(self, x, y, layer):
        """x (n, C) and attention's result y (n, C) -> (x, branch, bias), whose sum is the result of the layer."""
        _, _, attn_proj, ln_2, c_fc, mlp_proj = layer
        x, y = self.normalize(x, self.product(y, attn_proj[0]), attn_proj[1], *ln_2)
        h = self.product(y, c_fc[0])
        self.backend.gelu(h, c_fc[1], h, None)
        return x, self.product(h, mlp_proj[0]), mlp_proj[1]

    def logits(self, x, branch, branch_bias):
        """The logits (n, V) of x + branch + branch_bias, from (n, C), (n, C), (C); one row is overwritten later."""
        return self.product(self.normalize(x, branch, branch_bias, *self.ln_f)[1], self.head)

    def normalize(self, x, branch, branch_bias, w, b):
        """x (n, C) -> x + branch + branch_bias, and its LayerNorm."""
        if len(x) == 1:
            return self.backend.layernorm_of_one_row(x, branch, branch_bias, w, b, self.eps)
        return self.backend.residual_layernorm_forward(x, branch, branch_bias, w, b, self.eps)[:2]

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
        """qkv (n, 3C) at positions (n), one of each sequence -> (n, C); stores k and v.

        keys (n, H, D, block), values (n, H, block, D): finite also after the position of their sequence.
        """
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
