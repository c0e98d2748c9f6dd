"""The logits of new tokens, in NumPy calls without autograd: of one position with a KV cache, or of whole prompts.

One token takes little more than the time to read the weights. If each operation made a Tensor, a large part of this
time would be spent in Python. The new positions of several sequences are rows of the same products, so that the
weights are read once for all of them; attention is computed for each sequence, or for all together if they have similar
lengths. The first full window of a generation is a prompt; window.py computes the later ones, of which nothing is read
again. The threads of BLAS divide the products; the rest is computed by one thread.
"""

# n sequences, N new positions of all of them, t of one, T positions, C channels, H heads, D = C // H, K columns
# V vocabulary
# residual = (x, branch, bias): the residual stream is x + branch + bias, arrays (N, C), (N, C) and (C), or only x if
# branch and bias are None. The next LayerNorm computes the sum.

import itertools
from itertools import accumulate

import numpy as np

from gpt2core.architecture import forward_plan
from gpt2core.plain_backend import rotate, rotation
from stage0_serial.generation.window import window_of


def token_step(model):
    """A function to use instead of InferenceModel.next_logits, or None if ranks share the layers of the model."""
    return TokenStep(model) if model.is_whole else None


class NewPositions:
    """The rows of a call, and arrays for their results: qkv (N, 3C), attended (N, C), branch (N, C), hidden (N, K).

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
    """Called as step(ids, cache) -> logits (V), like InferenceModel.next_logits; it computes one token, or a prompt."""

    operations = "attention", "gelu"  # of the Plan

    def __init__(self, model):
        config = model.config
        self.backend, self.eps, self.n_head = model.backend, config.layer_norm_epsilon, config.n_head
        plan = forward_plan(config, model.without_autograd().arrays, self.operations, "NumPy's decoder")
        # wpe: None with rotary positions, whose cache slides instead of a window
        self.wte, self.wpe, self.layers, self.ln_f, self.head = *plan[:-1], plan.head.T  # head (C, V)
        self.one_each = None  # the NewPositions of a call with one new position of each sequence
        self.start()

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
        x, first, attend = self.wte[ids], 0, self.attend_rows
        if self.wpe is not None:
            x += self.wpe[positions]
        if len(ids) > len(caches):  # in the last layer only keys and values; the rest for the last positions only
            self.backend.check_tokens("embedding", np.array(ids), len(self.wte))
            ends, first = list(accumulate(map(len, uncached))), len(self.layers) - 1
            last, window = np.array(ends) - 1, self.window_for(caches, positions)
            if window:
                x, attend = window(x), window.attend_last
            else:
                new = NewPositions(self, len(ids))
                new.begin(self, ends, positions, caches, batch_cache)
                x = self.store_prompts(new, x)[last]
            positions = positions[last]
            for each, cache in zip(uncached, caches, strict=True):
                cache.length += len(each) - 1
        if self.one_each is None or len(self.one_each.qkv) != len(x):
            self.one_each = NewPositions(self, len(x))
        self.one_each.begin(self, range(1, len(x) + 1), positions, caches, batch_cache)
        logits = self.logits(self.one_each, x, first, attend)
        for cache in caches:
            cache.length += 1
        return logits

    def start(self):
        """Call it before each generation: training may have changed the weights, of which a Window has copies."""
        self.full_windows, self.window = 0, None

    def window_for(self, caches, positions):
        """The Window that computes these positions, or None unless they are a later full window of one sequence."""
        if len(caches) > 1 or self.wpe is None or len(positions) < len(self.wpe):
            return None
        self.full_windows += 1
        if self.full_windows == 2:  # copies of the weights are worth their time only for several windows
            self.window = window_of(self)
        return self.window

    def store_prompts(self, new, x):
        """Write the keys and values of all rows to the caches; return the input (N, C) of the last layer."""
        residual, layers = (x, None, None), len(self.layers)
        for layer in range(layers - 1):
            residual = self.layer(residual, layer, self.attend_prompts, new)
        (norm, (w, b), _, _), C = self.layers[-1][0], x.shape[1]
        x, y = self.normalize(residual, norm)
        first = 0 if new.turn else C  # rotate() reads the queries too
        self.linear(y, (w[:, first:], b[first:]), new.qkv[:, first:])
        for qkv, keys, values, place, _ in self.prompts_of(new, layers - 1):
            self.backend.store_cached(qkv, keys, values, place)
        return x

    def logits(self, new, x, first, attend):
        """The logits (n, V) of n rows, one of each sequence. x (n, C): the input of layer number `first`."""
        residual = x, None, None
        for layer in range(first, len(self.layers)):
            residual = self.layer(residual, layer, attend, new)
        return self.product(self.normalize(residual, self.ln_f)[1], self.head, new.logits)

    def layer(self, residual, layer, attend, new):
        """The residual after layer number `layer`. attend: the attention of new.qkv, attend_prompts or attend_rows."""

        def attention(y, linear):
            self.linear(y, linear, new.qkv)
            attend(new, layer)
            return new.attended

        def gelu(y, linear):
            w, b = linear
            self.backend.gelu(self.product(y, w, new.hidden), b, new.hidden, None)
            return new.hidden

        operations = {"attention": attention, "gelu": gelu}
        for each in self.layers[layer]:
            x, y = self.normalize(residual, each.norm)
            y = operations[each.operation](y, each.linear_in)
            w, bias = each.linear_out
            residual = x, self.product(y, w, new.branch), bias
        return residual

    def normalize(self, residual, norm):
        """The sum of the residual, (N, C), and its LayerNorm; norm: (weight, bias)."""
        (x, branch, bias), (w, b) = residual, norm
        if len(x) == 1:
            return self.backend.layernorm_of_one_row(x, branch, bias, w, b, self.eps)
        return self.backend.residual_layernorm_forward(x, branch, bias, w, b, self.eps)[:2]

    def linear(self, x, linear, out):
        """Write x w + b to `out` and return it; linear: (w, b)."""
        w, b = linear
        return np.add(self.product(x, w, out), b, out)

    def product(self, x, w, out):
        """Write x (N, C) @ w (C, K) to `out` (N, K) and return it."""
        multiply = self.backend.one_row if len(x) == 1 else self.backend.matmul
        return multiply(x, w, out)

    # -- attention: it reads new.qkv and writes new.attended -----------------------------------------------------------

    def prompts_of(self, new, layer):
        """Yield qkv (1, t, 3C), keys, values, the place of the first key and the rows of each sequence."""
        for rows, cache in zip(new.rows(), new.caches, strict=True):
            qkv = new.qkv[rows][None]
            if new.turn:
                qkv = rotate(qkv, self.n_head, *(each[rows] for each in new.turn))
            yield qkv, cache.keys[layer], cache.values[layer], cache.place, rows

    def attend_prompts(self, new, layer):
        """The causal attention of the new positions of each sequence; stores keys and values."""
        for qkv, keys, values, place, rows in self.prompts_of(new, layer):
            new.attended[rows] = self.backend.attention_cached(qkv, keys, values, place, self.n_head)[0]

    def attend_rows(self, new, layer):
        """The attention of one new position of each sequence; stores its key and value."""
        qkv = new.qkv
        if new.turn:
            qkv = rotate(qkv, self.n_head, *new.turn)
        q, k, v = qkv.reshape(len(qkv), 3, self.n_head, -1).transpose(1, 0, 2, 3)  # each (n, H, D)
        out = new.attended.reshape(q.shape)
        if new.batch_cache:
            keys, values = new.batch_cache.keys[layer], new.batch_cache.values[layer]
            keys[new.numbers, :, :, new.places], values[new.numbers, :, new.places] = k, v
            T = new.later.shape[-1]
            out[...] = weighted_sum(q, keys[..., :T], values[:, :, :T], new.later)
            return
        for i, (cache, place) in enumerate(zip(new.caches, new.places, strict=True)):
            keys, values = cache.keys[layer][0], cache.values[layer][0]
            keys[:, :, place], values[:, place] = k[i], v[i]
            out[i] = weighted_sum(q[i], keys[:, :, : place + 1], values[:, : place + 1])


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
