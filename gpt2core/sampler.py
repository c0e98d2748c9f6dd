"""The only generation loop: keys and values are cached until the block is full, then the window slides, exactly."""

# B batch, t new positions, T positions so far, H heads of this rank, D width of a head, V vocabulary

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.ops import SOLO
from gpt2core.tensor import Tensor, no_grad


class KVCache:
    """Keys and values of the positions that a model has seen: (B, H, D, block) and (B, H, block, D) for each layer.

    Of a tensor group's heads each rank keeps its own.
    """

    def __init__(self, config, backend, batch=1, group=SOLO):
        H, D = config.n_head // group.size, config.n_embd // config.n_head
        self.length = 0  # positions held
        self.keys = [backend.empty((batch, H, D, config.block_size), backend.compute) for _ in range(config.n_layer)]
        self.values = [backend.empty((batch, H, config.block_size, D), backend.compute) for _ in range(config.n_layer)]

    def attend(self, qkv, layer, n_head):
        """qkv (B, t, 3HD) of the t positions after `length`; -> attention over all of them (B, t, HD)."""
        backend = qkv.backend
        y = backend.attention_cached(qkv.data, self.keys[layer], self.values[layer], self.length, n_head)
        return Tensor(y, backend)


@no_grad()
def next_logits(model, ids, cache):
    """Logits (V) after the last of `ids`, a list of tokens that continue what `cache` holds."""
    ids = np.asarray(ids, np.int64)[None]
    logits = model.logits(ids, cache, last_only=True)
    cache.length += ids.shape[1]
    return logits.numpy()[0, -1]


def generate(model, prompt, max_new_tokens, choose=None):
    """Yield up to `max_new_tokens` tokens after `prompt` (a sequence of tokens), one at a time; greedy by default.

    Only the last block_size tokens are seen. While all of them fit the block, each step computes one position and
    reads the others from the cache. Once the window slides, learned positions move under every token and the cache
    is worthless: the window is computed again, for its last logits alone. All ranks of a tensor group see the same
    logits, so they choose the same tokens by the same rule. Raises ConfigError for an empty prompt.
    """
    if not len(prompt):
        raise ConfigError("the prompt is empty: generation continues at least 1 token")
    choose = choose or Greedy()
    block, backend = model.config.block_size, model.head.backend
    window = [int(token) for token in prompt][-block:]
    cache, fresh = KVCache(model.config, backend, group=model.group), window
    for _ in range(max_new_tokens):
        if cache.length + len(fresh) > block:
            cache, fresh = KVCache(model.config, backend, group=model.group), window
        token = choose(next_logits(model, fresh, cache))
        yield token
        window, fresh = (window + [token])[-block:], [token]


class Greedy:
    """The likeliest token; the first of equals."""

    def __call__(self, logits):
        return int(logits.argmax())


class Sampling:
    """A seeded draw from softmax(logits / temperature).

    Among the top_k likeliest tokens (0: all), and of those the fewest whose probabilities reach top_p (Holtzman et al.
    2020). Raises ConfigError for values outside their range.
    """

    def __init__(self, temperature=1.0, top_k=0, top_p=1.0, seed=0):
        if not (np.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"--temperature {temperature} must be above 0 to sample (0 means greedy) and finite")
        if top_k < 0:
            raise ConfigError(f"--top-k {top_k} must be 0 (all tokens) or more")
        if not 0 < top_p <= 1:
            raise ConfigError(f"--top-p {top_p} must be above 0 and at most 1")
        if seed < 0:
            raise ConfigError(f"--seed {seed} must not be negative")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.random = np.random.default_rng(seed)

    def __call__(self, logits):
        order = np.argsort(-logits, kind="stable")  # likeliest first
        order = order[: self.top_k or None]
        p = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / self.temperature)
        p /= p.sum()
        keep = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1  # the token that reaches top_p is the last one kept
        p = p[:keep] / p[:keep].sum()
        return int(order[min(int(np.searchsorted(np.cumsum(p), self.random.random(), "right")), len(p) - 1)])


class Together:
    """One choice for a whole group: the ranks' logits are averaged, the root chooses, and all get its token."""

    def __init__(self, choose, group):
        self.choose, self.group = choose, group

    def __call__(self, logits):
        mean = self.group.all_reduce(logits) / self.group.size
        return int(self.group.broadcast(np.array([self.choose(mean)]))[0])


def chooser(temperature=0.0, top_k=0, top_p=1.0, seed=0):
    """The rule that these options ask for: greedy at temperature 0."""
    drawing = Sampling(temperature or 1.0, top_k, top_p, seed)  # greedy too refuses options outside their range
    return drawing if temperature else Greedy()
