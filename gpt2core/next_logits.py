"""The logits of the next token: a forward pass whose last layer computes only the last position, to generate text."""

# B batch, T time, C channels, V vocabulary

import numpy as np

from gpt2core import primitives
from gpt2core.stream import Branch, Stream
from gpt2core.tensor import no_grad

LAST = (slice(None), slice(-1, None))  # the index of the last position of an array (B, T, C)


def last_position(model, ids, cache=None):
    """The final LayerNorm's output at the last position of ids (B, T), (B, 1, C). cache: see GPT2.stream.

    The attention of the last block reads all positions; what comes after it is computed only for the last one.
    """
    x = model.embedding(ids, cache.length if cache else 0)
    *blocks, last = model.blocks
    for block in blocks:
        x = block(x, cache)
    a = last.attention(last.ln_1(x), cache)
    x = Stream(primitives.getitem(x.tensor(), LAST)) + Branch(primitives.getitem(a.output, LAST), a.bias)
    return model.head.ln_f(x + last.mlp(last.ln_2(x)))


def last_logits(model, ids, cache=None):
    """The logits of the last position of ids (B, T), (B, 1, V). cache: see GPT2.stream."""
    return model.unembed(last_position(model, ids, cache))


@no_grad()
def next_logits(model, ids, cache):
    """The logits (V) of the token after `ids`, a list of tokens that follow the cached ones; caches `ids` too."""
    logits = last_logits(model, np.asarray(ids, np.int64)[None], cache)
    cache.length += len(ids)
    return logits.numpy()[0, -1]
