"""A vocabulary that the ranks of a group divide: each has some of the tokens, their embeddings and their logits."""

# K columns of one rank, N rows, p ranks in a group

import math

from gpt2core.communicator import SOLO


def own_slice(n, rank, parts):
    """The slice of range(n) that one of `parts` ranks has: ceil(n / parts) items, fewer at the end of the range."""
    each = math.ceil(n / parts)
    return slice(min(rank * each, n), min((rank + 1) * each, n))


class Vocabulary:
    """`size` tokens; this rank of `group` has `count` of them, from token `first` on. One rank alone has all tokens."""

    def __init__(self, size, group=SOLO):
        own = own_slice(size, group.rank, group.size)
        self.size, self.group, self.first, self.count = size, group, own.start, own.stop - own.start


def gather_columns(x, group, total, backend):
    """All ranks' columns side by side, (..., total), from this rank's columns x (..., K); an array, as x.

    K is the length of own_slice(total). The last rank may have fewer columns, but all ranks send equal shapes.
    """
    K, p = math.ceil(total / group.size), group.size
    own = x.reshape(-1, x.shape[-1])  # (N, K)
    if own.shape[1] < K:
        fewer, own = own, backend.zeros((len(own), K), x.dtype)
        own[:, : fewer.shape[1]] = fewer
    shards = group.all_gather(own).reshape(p, -1, K)
    return shards.swapaxes(0, 1).reshape(*x.shape[:-1], p * K)[..., :total]
