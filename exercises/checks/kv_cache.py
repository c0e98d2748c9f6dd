"""Checks of exercise 0.5: attention with a KV cache in float64, and the logits of a model."""

# B batch, t new positions, H heads, D head size

import numpy as np

from exercises.checks.attention import heads_of, joined
from exercises.checks.common import CONFIG, random
from exercises.compare import expect, expect_equal

FP64 = 1e-12  # relative norm: a few roundings of 1e-16, more in a sum
CACHED = "attention_cached"


class CacheCase:
    """A cache of 12 positions, filled with NaN, and qkv of 9 positions of 2 sequences; H = 2, D = 4."""

    def __init__(self):
        from stage0_serial.numpy_backend import NumpyBackend

        self.backend, self.qkv, self.H = NumpyBackend("fp64"), random().standard_normal((2, 9, 24)), 2
        self.keys, self.values = np.full((2, 2, 4, 12), np.nan), np.full((2, 2, 12, 4), np.nan)
        self.q, self.k, self.v = heads_of(self.qkv, 3, self.H)

    def run(self, position, t):
        part = self.qkv[:, position : position + t].copy()
        return self.backend.attention_cached(part, self.keys, self.values, position, self.H)

    def want(self, position, t, scale=0.5, mask=0, keys=slice(None)):
        """The expected output of the positions [position, position + t), or that of a mistake."""
        end = position + t
        rows, k, v = self.q[:, :, position:end], self.k[:, :, :end][:, :, keys], self.v[:, :, :end][:, :, keys]
        s = scale * rows @ k.swapaxes(-1, -2)
        if mask is not None:
            s = np.where(np.tri(t, k.shape[2], position + mask, dtype=bool), s, -np.inf)
        with np.errstate(all="ignore"):
            e = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
            return joined(e / e.sum(-1, keepdims=True) @ v)


def cache_contents():
    case = CacheCase()
    case.run(0, 5)
    case.run(5, 1)
    k, v = case.k[:, :, :6], case.v[:, :, :6]  # (B, H, 6, D)
    order = "qkv has the columns of q, then k, then v."
    expect_stored("k", case.keys.swapaxes(-1, -2), k, [(v, f"v is stored as k: {order}")])
    expect_stored("v", case.values, v, [(k, f"k is stored as v: {order}")])


def expect_stored(name, cache, want, wrong):
    """Compare cache (B, H, block, D), whose other positions are NaN, with want (B, H, 6, D)."""
    look = f"the line of {CACHED} that stores {name} at the positions [position, position + t)"
    written = np.isfinite(cache).all(axis=(0, 1, 3))
    only_first, none = np.arange(12) < 5, np.zeros(12, bool)
    hints = [
        (only_first, f"Only the first call stores {name}: store it in every call."),
        (none, f"{name} is not stored in the cache."),
        (np.arange(12) == 5, f"The second call overwrites the cache, or the first one does not store {name}."),
    ]
    places = [(np.flatnonzero(array).tolist(), hint) for array, hint in hints]
    expect_equal(
        f"the positions for which the cache has {name}", np.flatnonzero(written).tolist(), [*range(6)], places, look
    )
    expect(f"the cached {name}", cache[:, :, :6], want, FP64, wrong, look)


def cache_wrong(case, position, t):
    """The typical mistakes for one call."""
    return [
        (case.want(position, t, scale=1.0), "The scores lack the factor 1/sqrt(D)."),
        (case.want(position, t, scale=0.25), "The scores are divided by D: the factor is 1/sqrt(D)."),
        (
            case.want(position, t, mask=None),
            "The new positions see each other's future: new position i attends to position + i.",
        ),
        (
            case.want(position, t, mask=1),
            "The mask is off by one: a new position attends to itself, not to the next one.",
        ),
        (case.want(position, t, mask=-1), "The mask is off by one: a new position also attends to its own key."),
        (
            case.want(position, t, mask=-position),
            "The mask is not shifted by `position`. Every new position attends to all cached keys, too.",
        ),
        (
            case.want(position, t, mask=None, keys=slice(0, -1)),
            "The last key is missing: attend to keys[..., : position + t].",
        ),
        (np.full((2, t, 8), np.nan), "The result is NaN: it reads positions of the cache that were never written."),
    ]


def cache_tokens():
    case = CacheCase()
    for position in range(5):
        got, wrong = case.run(position, 1), cache_wrong(case, position, 1)
        expect(f"y of position {position}", got, case.want(position, 1), FP64, wrong, CACHED)


def cache_several():
    case = CacheCase()
    case.run(0, 4)
    got, wrong = case.run(4, 3), cache_wrong(case, 4, 3)
    expect(
        "y of the positions 4 to 6, after 4 cached positions",
        got,
        case.want(4, 3),
        FP64,
        wrong,
        f"the mask of {CACHED}",
    )


def cache_model():
    from gpt2core.architecture import parameter_shapes
    from gpt2core.parallel.tensor.loaded_model import load_model
    from gpt2core.sampler import KVCache
    from stage0_serial.numpy_backend import NumpyBackend

    rng, backend = random(5), NumpyBackend()
    model = load_model(
        CONFIG, {n: rng.standard_normal(s).astype(np.float32) for n, s in parameter_shapes(CONFIG)}, backend
    )
    cache, tokens = KVCache(CONFIG, backend), [3, 1, 4]
    new = tokens
    for position in range(3, 12):
        got = model.without_autograd().next_logits(new, cache)
        want = model.logits(np.array([tokens])).numpy()[0, -1]
        expect(
            f"the logits after {position} tokens",
            got,
            want,
            1e-4,
            look=f"{CACHED}, in a model with {position} positions",
        )
        new = [int(want.argmax())]
        tokens = tokens + new
