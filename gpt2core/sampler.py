"""Text generation: the KV cache, the decoder, the generation loop of all stages, and the sampling rules."""

# B batch, t new positions, H heads of this rank, D head size, V vocabulary, block the model's block_size

import contextlib

import numpy as np

from gpt2core.communicator import SOLO
from gpt2core.errors import ConfigError


class KVCache:
    """The keys (B, H, D, block) and values (B, H, block, D) of each layer, for the last positions computed so far.

    With rotary positions a full cache slides: a new position replaces the oldest one. This is the forward pass of all
    tokens in which each position attends to itself and to the block - 1 positions before it. The keys and values of a
    later layer depend on tokens that are no longer in the cache; so this is another function than the forward pass of
    the last `block` tokens without the earlier ones. Under tensor parallelism, each rank caches only its own heads.
    """

    def __init__(self, config, backend, batch=1, group=SOLO):
        H, D = config.n_head // group.size, config.n_embd // config.n_head
        self.backend, self.block = backend, config.block_size
        self.length = 0  # the positions computed so far; the next one is at position `length`
        self.keys = [
            backend.empty((batch, H, D, config.block_size), backend.compute_dtype) for _ in range(config.n_layer)
        ]
        self.values = [
            backend.empty((batch, H, config.block_size, D), backend.compute_dtype) for _ in range(config.n_layer)
        ]

    def attend(self, qkv, layer, n_head):
        """Append k and v of qkv (B, t, 3HD) to the cache; return the attention over all cached positions, (B, t, HD).

        Raises ConfigError if t is above 1 and the positions do not fit the cache.
        """
        if qkv.shape[1] > 1 and self.length + qkv.shape[1] > self.block:
            raise ConfigError(
                f"attention: qkv {qkv.shape} after {self.length} positions do not fit {self.block} positions"
            )
        self.drop_oldest(layer)
        return self.backend.attention_cached(qkv, self.keys[layer], self.values[layer], self.place, n_head)

    @property
    def place(self):
        """The index in the arrays of a layer where the next position is written, after drop_oldest()."""
        return min(self.length, self.block - 1)

    def drop_oldest(self, layer):
        """In the arrays of a layer of a full cache, replace the oldest position by the newest one, at the last index.

        The order of the other positions does not matter. If the cache is not full, do nothing.
        """
        last = self.block - 1
        if self.length > last:
            keys, values, oldest = self.keys[layer], self.values[layer], (self.length - self.block) % max(1, last)
            keys[..., oldest], values[:, :, oldest] = keys[..., last], values[:, :, last]


class Decoder:
    """Generates one token per step for each sequence of a batch, one sequence after another; the host samples.

    The model reads only the last block_size tokens. While the sequence fits in the block, a step computes one new
    position and reads the others from the KV cache. After that the window slides: with learned positions each token
    gets another position, so the cached keys and values are no longer valid, and each step recomputes the whole window;
    with rotary positions the cache slides, and a step still computes one position. All ranks of a tensor group have the
    same logits, so equal rules sample the same token on every rank.
    A backend may provide a faster decoder with the same methods (Backend.decoder), or only a faster next_logits.
    """

    steps_ahead = 0  # number of further steps that may be launched before the tokens of a step are read

    def __init__(self, model, next_logits=None):
        self.model, self.next_logits = model, next_logits or model.without_autograd().next_logits

    def start(self, prompts, rules):
        """Begin new sequences. prompts: int64 arrays of up to block_size tokens; rules: one for each prompt."""
        self.sequences = [
            CachedSequence(self.model, prompt.tolist(), rule, self.next_logits)
            for prompt, rule in zip(prompts, rules, strict=True)
        ]
        self.unread = []  # for each step whose tokens have not been read: the list of its tokens

    def step(self):
        """Compute the next token of each sequence; a decoder on a device may return before they are computed."""
        self.unread.append([sequence.step() for sequence in self.sequences])

    def read_tokens(self):
        """The tokens of the oldest step that has not been read, one token for each sequence."""
        return self.unread.pop(0)


class CachedSequence:
    """One sequence of a Decoder, with its KV cache. `window` is the last block_size tokens; choose(logits) -> token."""

    def __init__(self, model, prompt, choose, next_logits):
        self.model, self.choose, self.window, self.next_logits = model, choose, prompt, next_logits
        self.clear_cache()

    def clear_cache(self):
        model = self.model
        self.cache = KVCache(model.config, model.backend, group=model.group)
        self.uncached = self.window  # the last tokens of the window, whose keys and values are not in the cache

    def step(self):
        """Sample the next token and return it."""
        config = self.model.config
        if config.learns_positions and self.cache.length + len(self.uncached) > config.block_size:
            self.clear_cache()
        return self.append(self.next_logits(self.uncached, self.cache))

    def append(self, logits):
        """Sample the next token from its logits (V) and return it."""
        token = self.choose(logits)
        self.window, self.uncached = (self.window + [token])[-self.model.config.block_size :], [token]
        return token


def generate(model, prompt, max_new_tokens, choose=None, decoders=None):
    """Yield `max_new_tokens` tokens after `prompt` (a sequence of tokens), one at a time.

    choose: a sampling rule, logits (V) -> token, by default Greedy(). Use a rule for only one sequence: a decoder may
    draw its random numbers in advance. decoders: see generate_batch. Raises ConfigError for an empty prompt.
    """
    for (token,) in generate_batch(model, [prompt], max_new_tokens, [choose or Greedy()], decoders):
        yield token


def generate_batch(model, prompts, max_new_tokens, rules, decoders=None):
    """Yield one list of tokens per step: the next token of each prompt, sampled by the prompt's own rule.

    decoders: {batch size: [decoders of this model that are not in use]}. Pass the same dict again to reuse the decoders
    and their CUDA graphs; by default a new decoder is made. Raises ConfigError for an empty prompt.
    """
    if not all(len(prompt) for prompt in prompts):
        raise ConfigError("the prompt is empty: give at least 1 token")
    block, launched = model.config.block_size, 0
    with borrow_decoder(model, len(prompts), {} if decoders is None else decoders) as decoder:
        decoder.start([np.asarray(prompt[-block:], np.int64) for prompt in prompts], rules)
        for number in range(max_new_tokens):
            ahead = min(number + 1, decoder.steps_ahead)  # launches of more could delay the first token
            while launched < min(number + 1 + ahead, max_new_tokens):
                decoder.step()
                launched += 1
            yield decoder.read_tokens()


@contextlib.contextmanager
def borrow_decoder(model, batch, decoders):
    """Take a decoder for `batch` sequences from `decoders`, or make one; return it to `decoders` at the end."""
    idle = decoders.setdefault(batch, [])
    decoder = idle.pop() if idle else model.backend.decoder(model, batch) or Decoder(model)
    try:
        yield decoder
    finally:
        idle.append(decoder)


class Greedy:
    """The token with the largest logit; the first one if several logits are equal."""

    def __call__(self, logits):
        return int(logits.argmax())


class Sampling:
    """A random token from the distribution softmax(logits / temperature), limited by top-k and then by top-p.

    top_k: keep only the k most probable tokens (0: all). top_p: of these, keep the smallest set of most probable tokens
    whose probabilities add up to at least p (nucleus sampling, Holtzman et al. 2020). seed: of the random numbers.
    Raises ConfigError for a value outside its range.
    """

    def __init__(self, temperature=1.0, top_k=0, top_p=1.0, seed=0):
        if not (np.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"`temperature={temperature}` must be above 0 to sample (0 means greedy) and finite")
        if top_k < 0:
            raise ConfigError(f"`top_k={top_k}` must be 0 (all tokens) or more")
        if not 0 < top_p <= 1:
            raise ConfigError(f"`top_p={top_p}` must be above 0 and at most 1")
        if seed < 0:
            raise ConfigError(f"`seed={seed}` must not be negative")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.random = np.random.default_rng(seed)

    def __call__(self, logits):
        order = np.argsort(-logits, kind="stable")  # most probable first
        order = order[: self.top_k or None]
        p = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / self.temperature)
        p /= p.sum()
        n_kept = int(np.searchsorted(np.cumsum(p), self.top_p)) + 1  # the token that reaches top_p is the last one kept
        p = p[:n_kept] / p[:n_kept].sum()
        drawn = int(np.searchsorted(np.cumsum(p), self.random.random(), "right"))
        return int(order[min(drawn, len(p) - 1)])  # the rounded probabilities may add up to less than 1


def chooser(temperature=0.0, top_k=0, top_p=1.0, seed=0):
    """The sampling rule for these options: Greedy at temperature 0, otherwise Sampling.

    Raises ConfigError for a value outside its range, also if temperature is 0.
    """
    sampling = Sampling(temperature or 1.0, top_k, top_p, seed)
    return sampling if temperature else Greedy()
