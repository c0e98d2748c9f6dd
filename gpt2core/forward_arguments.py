"""The arguments of a forward pass."""

# B batch, T time

from typing import NamedTuple


class ForwardArguments(NamedTuple):
    """What the units of a model get in a forward pass besides their input; each unit reads what it needs.

    position: of the first token. cache: a sampler.KVCache, after whose tokens the new ones follow, or None. targets
    (B, T), scale: see GPT2.loss. dloss: see ops.unembed_cross_entropy.
    """

    position: int = 0
    cache: object = None
    targets: object = None
    scale: float | None = None
    dloss: object = None


FIRST_TOKENS = ForwardArguments()  # for tokens without others before them, and without targets


def after(cache):
    """The ForwardArguments of tokens that follow those of a cache; None: they are the first ones."""
    return ForwardArguments(cache.length, cache) if cache else FIRST_TOKENS
