"""The only generation loop: keys and values are cached until the block is full, then the window slides, exactly."""

# B batch, t new positions, T positions so far, H heads of this rank, D width of a head, V vocabulary

import contextlib

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


class Decoder:
    """What continues texts: this one with the kernels of training, one text after the other, chosen on the host.

    A backend may bring another (Backend.decoder). Only the last block_size tokens are seen. While all of them fit the
    block, each step computes one position and reads the others from the cache. Once the window slides, learned
    positions move under every token and the cache is worthless: the window is computed again, for its last logits
    alone. All ranks of a tensor group see the same logits, so they choose the same tokens by the same rule.
    """

    ahead = 0  # steps that may be under way while the tokens of an earlier one are being read

    def __init__(self, model):
        self.model = model

    def begin(self, prompts, rules):
        """Start anew, with up to block_size tokens of each text and the rule that chooses its next ones."""
        self.texts, self.chosen = [Text(self.model, *each) for each in zip(prompts, rules, strict=True)], []

    def step(self):
        """Compute one more token for each text, or start to."""
        self.chosen.append([text.step() for text in self.texts])

    def tokens(self):
        """The tokens of the first step whose tokens have not been read yet, one for each text."""
        return self.chosen.pop(0)


class Text:
    """One text that Decoder continues."""

    def __init__(self, model, prompt, choose):
        self.model, self.choose, self.window = model, choose, prompt
        self.restart()

    def restart(self):
        model = self.model
        self.cache, self.fresh = KVCache(model.config, model.head.backend, group=model.group), self.window

    def step(self):
        block = self.model.config.block_size
        if self.cache.length + len(self.fresh) > block:
            self.restart()
        token = self.choose(next_logits(self.model, self.fresh, self.cache))
        self.window, self.fresh = (self.window + [token])[-block:], [token]
        return token


def generate(model, prompt, max_new_tokens, choose=None):
    """Yield up to `max_new_tokens` tokens after `prompt` (a sequence of tokens), one at a time; greedy by default.

    `choose` serves one text: a device may draw its random numbers ahead. Raises ConfigError for an empty prompt.
    """
    for (token,) in generate_together(model, [prompt], max_new_tokens, [choose or Greedy()]):
        yield token


def generate_together(model, prompts, max_new_tokens, rules):
    """The same for several prompts at once: yield lists of one token for each, which its own rule has chosen."""
    if not all(len(prompt) for prompt in prompts):
        raise ConfigError("the prompt is empty: generation continues at least 1 token")
    block, started = model.config.block_size, 0
    with idle_decoder(model, len(prompts)) as decoder:
        decoder.begin([[int(token) for token in prompt[-block:]] for prompt in prompts], rules)
        for number in range(max_new_tokens):
            for _ in range(started, min(number + 1 + decoder.ahead, max_new_tokens)):
                decoder.step()
                started += 1
            yield decoder.tokens()


@contextlib.contextmanager
def idle_decoder(model, batch):
    """A decoder of `model` for that many texts, which nobody else uses meanwhile; it is kept for the next ones."""
    idle = model.decoders.setdefault(batch, [])
    decoder = idle.pop() if idle else model.head.backend.decoder(model, batch) or Decoder(model)
    try:
        yield decoder
    finally:
        idle.append(decoder)


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


class GroupSampler:
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
