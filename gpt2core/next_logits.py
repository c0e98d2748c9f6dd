"""The logits of the next token: a forward pass whose last layer computes only the last position, to generate text."""

# B batch, T time, C channels, V vocabulary

import numpy as np

from gpt2core.forward_arguments import after
from gpt2core.stream import Branch, Stream
from gpt2core.tensor import Tensor, no_grad


def last_position(model, ids, cache=None):
    """The final LayerNorm's output at the last position of ids (B, T), (B, 1, C). cache: see ForwardArguments.

    The attention of the last block reads all positions; what comes after it is computed only for the last one.
    """
    x, arguments = ids, after(cache)
    *before, last = model.units[:-1]
    for unit in before:
        x = unit(x, arguments)
    a = last.attention(last.ln_1(x), arguments)
    x = Stream(at_last(x.tensor())) + Branch(at_last(a.output), a.bias)
    return model.head.ln_f(x + last.mlp(last.ln_2(x)))


def at_last(x):
    """The last position of x (B, T, C), (B, 1, C)."""

    def backward(dy):
        dx = x.backend.zeros(x.shape, x.dtype)
        dx[:, -1:] = dy
        return (dx,)

    return Tensor.from_op(x.data[:, -1:], (x,), backward)


def last_logits(model, ids, cache=None):
    """The logits of the last position of ids (B, T), (B, 1, V). cache: see ForwardArguments."""
    return model.unembed(last_position(model, ids, cache))


@no_grad()
def next_logits(model, ids, cache):
    """The logits (V) of the token after `ids`, a list of tokens that follow the cached ones; caches `ids` too."""
    logits = last_logits(model, np.asarray(ids, np.int64)[None], cache)
    cache.length += len(ids)
    return logits.numpy()[0, -1]
