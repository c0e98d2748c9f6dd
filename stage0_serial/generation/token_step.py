"""The logits of new tokens, in NumPy calls without autograd: of one position with a KV cache, or of whole prompts.

One token takes little more than the time to read the weights. If each operation made a Tensor, a large part of this
time would be spent in Python. The new positions of several sequences are rows of the same products, so that the
weights are read once for all of them; attention is computed for each sequence, or for all together if they have similar
lengths. A full window is a prompt. Worker threads divide the products and the attention (workers.py).
"""

# n sequences, N new positions of all of them, t of one, T positions, C channels, H heads, D = C // H, K columns
# V vocabulary; m of the n sequences, h of the H heads: those of a worker
# residual = (x, branch, bias): the residual stream is x + branch + bias, arrays (N, C), (N, C) and (C), or only x if
# branch and bias are None. The next LayerNorm computes the sum.

import contextlib
import functools
import itertools
import threading
from itertools import accumulate

import numpy as np

from gpt2core.architecture import forward_plan
from gpt2core.plain_backend import rotate, rotation
from stage0_serial.generation.workers import ALL, OnlyWorker, Worker, worker_count


def token_step(model):
    """A function to use instead of InferenceModel.next_logits, or None if ranks share the layers of the model."""
    return TokenStep(model, model.backend) if model.is_whole else None


class NewPositions:
    """The rows of a call, and what its workers share: qkv (N, 3C), attended (N, C), branch (N, C), hidden (N, K).

    A later call with as many rows may write to the same arrays.
    """

    def __init__(self, step, N):
        empty, dtype, (C, K) = step.backend.empty, step.backend.dtype, step.layers[0][-1].linear_in[0].shape
        self.qkv, self.attended, self.branch, self.hidden = (empty((N, width), dtype) for width in (3 * C, C, C, K))

    def begin(self, step, ends, positions, caches, batch_cache):
        """ends (n): the row after the last one of each sequence; positions (N): of the rows."""
        self.ends, self.caches, self.places = ends, caches, [cache.place for cache in caches]
        self.turn = self.batch_cache = None
        if step.wpe is None:  # cosines and sines of rotary positions
            self.turn = rotation(positions, self.attended.shape[1] // step.n_head, step.wte.dtype)
        if batch_cache and len(positions) == len(caches) and similar_lengths(positions + 1):
            self.batch_cache, self.numbers, self.places = batch_cache, np.arange(len(caches)), np.array(self.places)
            self.later = np.arange(self.places.max() + 1) > self.places[:, None, None, None]  # (n, 1, 1, T)
        self.logits = np.empty((len(caches), len(step.wte)), self.qkv.dtype)

    def rows(self):
        """The slice of the rows of each sequence."""
        return [slice(*edges) for edges in itertools.pairwise([0, *self.ends])]


class TokenStep:
    """Called as step(ids, cache) -> logits (V), like InferenceModel.next_logits; it computes one token, or a prompt.

    backend: the model's backend, or one of a worker thread with the same precision.
    """

    operations = "attention", "gelu"  # of the Plan

    def __init__(self, model, backend):
        config = model.config
        self.model = model.without_autograd()
        self.backend, self.eps, self.n_head = backend, config.layer_norm_epsilon, config.n_head
        plan = forward_plan(config, self.model.arrays, self.operations, "NumPy's decoder")
        # wpe: None with rotary positions, whose cache slides instead of a window
        self.wte, self.wpe, self.layers, self.ln_f, self.head = *plan[:-1], plan.head.T  # head (C, V)
        self.largest = max(each.linear_in[0].size for layer in self.layers for each in layer)  # elements of a weight
        self.pool, self.steps = None, [self]  # the WorkerPool, and a TokenStep for each of its backends
        self.one_each = None  # the NewPositions of a call with one new position of each sequence

    def __call__(self, ids, cache):
        return self.next_positions([ids], [cache])[0]

    def next_positions(self, uncached, caches, batch_cache=None):
        """The logits (n, V) after n sequences. uncached: the last tokens of each sequence, which follow its cache.

        batch_cache: a KVCache whose sequence i is caches[i], or None.
        """
        ids, starts = [token for each in uncached for token in each], zip(uncached, caches, strict=True)
        positions = np.array([cache.length + i for each, cache in starts for i in range(len(each))])
        if self.wpe is None:
            for cache in caches:
                for layer in range(len(self.layers)):
                    cache.drop_oldest(layer)
        x, first = self.wte[ids], 0
        if self.wpe is not None:
            x += self.wpe[positions]
        if len(ids) > len(caches):  # in the last layer only keys and values; the rest for the last positions only
            self.backend.check_tokens("embedding", np.array(ids), len(self.wte))
            ends, new = list(accumulate(map(len, uncached))), NewPositions(self, len(ids))
            new.begin(self, ends, positions, caches, batch_cache)
            last, first = np.array(ends) - 1, len(self.layers) - 1
            x, positions = self.divide(TokenStep.store_prompts, new, x)[last], positions[last]
            for each, cache in zip(uncached, caches, strict=True):
                cache.length += len(each) - 1
        if self.one_each is None or len(self.one_each.qkv) != len(x):
            self.one_each = NewPositions(self, len(x))
        self.one_each.begin(self, range(1, len(x) + 1), positions, caches, batch_cache)
        logits = self.divide(TokenStep.logits, self.one_each, x, first)
        for cache in caches:
            cache.length += 1
        return logits

    def divide(self, function, new, x, *arguments):
        """function(step, new, x, *arguments, worker), by as many workers as x (N, C) needs; the first one's result."""
        runtime = self.backend.runtime
        count = worker_count(len(x), self.largest, runtime.threads) if len(x) > 1 else 1
        # One row is multiplied by RowProducts, perhaps on several threads of BLAS.
        with runtime.one_blas_thread() if len(x) > 1 else contextlib.nullcontext():
            if count == 1:
                return function(self, new, x, *arguments, OnlyWorker())
            barrier, pool = threading.Barrier(count), self.backend.workers()
            if self.pool is not pool:
                self.pool, self.steps = pool, [TokenStep(self.model, backend) for backend in pool.backends]
            calls = [functools.partial(Worker(index, count, barrier).run, function) for index in range(count)]
            arguments = [[each] * count for each in (new, x, *arguments)]
            return pool.map(call, calls, self.steps[:count], *arguments, stop=barrier.abort)[0]

    def store_prompts(self, new, x, worker):
        """Write the keys and values of all rows to the caches; return the input (N, C) of the last layer."""
        residual, layers = (x, None, None), len(self.layers)
        for layer in range(layers - 1):
            residual = self.layer(residual, layer, self.attend_prompts, new, worker)
        (norm, (w, b), _, _), C = self.layers[-1][0], x.shape[1]
        x, y = self.normalize(residual, norm)
        first = 0 if new.turn else C  # rotate() reads the queries too
        self.linear(y, (w[:, first:], b[first:]), new.qkv[:, first:], worker)
        for qkv, keys, values, place, _ in self.prompts_of(worker, new, layers - 1):
            self.backend.store_cached(qkv, keys, values, place)
        return x

    def logits(self, new, x, first, worker):
        """The logits (n, V) of n rows, one of each sequence. x (n, C): the input of layer number `first`."""
        residual = x, None, None
        for layer in range(first, len(self.layers)):
            residual = self.layer(residual, layer, self.attend_rows, new, worker)
        self.product(self.normalize(residual, self.ln_f)[1], self.head, new.logits, worker)
        return new.logits

    def layer(self, residual, layer, attend, new, worker):
        """The residual after layer number `layer`. attend: the attention of new.qkv, attend_prompts or attend_rows."""

        def attention(y, linear):
            self.linear(y, linear, new.qkv, worker)
            attend(new, layer, worker)
            worker.wait()
            return new.attended

        def gelu(y, linear):
            return self.linear(y, linear, new.hidden, worker, gelu=True)

        operations = {"attention": attention, "gelu": gelu}
        for each in self.layers[layer]:
            x, y = self.normalize(residual, each.norm)
            y = operations[each.operation](y, each.linear_in)
            w, bias = each.linear_out
            self.product(y, w, new.branch, worker)
            worker.wait()
            residual = x, new.branch, bias
        return residual

    def normalize(self, residual, norm):
        """The sum of the residual, (N, C), and its LayerNorm; norm: (weight, bias)."""
        (x, branch, bias), (w, b) = residual, norm
        if len(x) == 1:
            return self.backend.layernorm_of_one_row(x, branch, bias, w, b, self.eps)
        return self.backend.residual_layernorm_forward(x, branch, bias, w, b, self.eps)[:2]

    def linear(self, x, linear, out, worker, gelu=False):
        """Write x w + b, or gelu(x w + b), to `out`, and wait for the columns of the other workers; linear: (w, b)."""
        w, b = linear
        y, columns = self.product(x, w, out, worker)
        b = b if columns is ALL else b[columns]
        if gelu and y.size:
            self.backend.gelu(y, b, y, None)
        elif y.size:
            np.add(y, b, y)
        worker.wait()
        return out

    def product(self, x, w, out, worker):
        """Write this worker's columns of x (N, C) @ w (C, K) to `out` (N, K); return them and their slice."""
        columns = worker.columns(len(x), w)
        y, w = (out, w) if columns is ALL else (out[:, columns], w[:, columns])
        if y.size:
            multiply = self.backend.one_row if len(x) == 1 else self.backend.matmul
            multiply(x, w, y)
        return y, columns

    # -- attention: it reads new.qkv, of which a worker has some sequences or heads, and writes new.attended -----------

    def prompts_of(self, worker, new, layer):
        """Yield qkv (1, t, 3hD), keys, values, the place of the first key and `out` (t, h, D) of each sequence."""
        sequences, heads = worker.part(len(new.caches), self.n_head)
        count = heads.stop - heads.start
        for rows, cache in list(zip(new.rows(), new.caches, strict=True))[sequences] if count else ():
            length = rows.stop - rows.start
            qkv = new.qkv[rows].reshape(length, 3, self.n_head, -1)[:, :, heads].reshape(1, length, -1)
            if new.turn:
                qkv = rotate(qkv, count, *(each[rows] for each in new.turn))
            out = new.attended[rows].reshape(length, self.n_head, -1)[:, heads]
            yield qkv, cache.keys[layer][:, heads], cache.values[layer][:, heads], cache.place, out

    def attend_prompts(self, new, layer, worker):
        """The causal attention of the new positions of each sequence; stores keys and values."""
        for qkv, keys, values, place, out in self.prompts_of(worker, new, layer):
            out[...] = self.backend.attention_cached(qkv, keys, values, place, out.shape[1]).reshape(out.shape)

    def attend_rows(self, new, layer, worker):
        """The attention of one new position of each sequence; stores its key and value."""
        sequences, heads = worker.part(n := len(new.caches), self.n_head)
        count = heads.stop - heads.start
        qkv = new.qkv.reshape(n, 3, self.n_head, -1)[sequences, :, heads]
        if not qkv.size:
            return
        if new.turn:
            flat = qkv.reshape(len(qkv), -1)
            qkv = rotate(flat, count, *(each[sequences] for each in new.turn)).reshape(qkv.shape)
        q, k, v = qkv.transpose(1, 0, 2, 3)  # each (m, h, D)
        out, places = new.attended.reshape(n, self.n_head, -1)[sequences, heads], new.places[sequences]
        if new.batch_cache:
            keys, values = (each[layer][sequences, heads] for each in (new.batch_cache.keys, new.batch_cache.values))
            keys[new.numbers[: len(k)], :, :, places], values[new.numbers[: len(k)], :, places] = k, v
            T = new.later.shape[-1]
            out[...] = weighted_sum(q, keys[..., :T], values[:, :, :T], new.later[sequences])
            return
        for i, (cache, place) in enumerate(zip(new.caches[sequences], places, strict=True)):
            keys, values = cache.keys[layer][0, heads], cache.values[layer][0, heads]
            keys[:, :, place], values[:, place] = k[i], v[i]
            out[i] = weighted_sum(q[i], keys[:, :, : place + 1], values[:, : place + 1])


def call(function, *arguments):
    return function(*arguments)


def weighted_sum(q, keys, values, masked=None):
    """The softmax attention (..., H, D) of q (..., H, D), which is overwritten, to keys (..., H, D, T).

    values (..., H, T, D); masked (..., 1, 1, T), or None: True for positions whose weight is 0. Keys and values must be
    finite there too.
    """
    q *= q.shape[-1] ** -0.5
    s = np.matmul(q[..., None, :], keys)  # (..., H, 1, T)
    if masked is not None:
        np.copyto(s, -np.inf, where=masked)
    s -= np.maximum.reduce(s, axis=-1, keepdims=True)
    np.exp(s, out=s)
    y = np.matmul(s, values)  # (..., H, 1, D)
    y /= np.add.reduce(s, axis=-1, keepdims=True)
    return y[..., 0, :]


def similar_lengths(lengths):
    """Whether one call for all sequences computes at most twice as many positions as the sequences have."""
    return lengths.max() * len(lengths) <= 2 * lengths.sum()
