"""Dropout: in training, numbers of the residual stream are set to zero at random (Srivastava et al. 2014).

A number is dropped with probability p, and divided by 1 - p otherwise, so its mean is unchanged. The random bits are a
hash of (seed, step, place, row, position, channel). So nothing is stored for backward, which computes the bits again,
and the bits do not depend on how the batch is divided over micro-batches, threads and ranks.
"""
# B sequences of a pass, T positions, C channels

import math
from typing import NamedTuple

import numpy as np

from gpt2core.errors import ConfigError

GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio: the hash of consecutive channels starts at distant numbers


class Dropout(NamedTuple):
    """p: the probability. key (1) int64: from dropout_key(). row: the row of the first sequence in the global batch."""

    p: float
    key: object
    row: int = 0

    @property
    def scale(self):
        return 1 / (1 - self.p)

    @property
    def threshold(self):
        """A number is kept if its 32 random bits are at least this integer."""
        return round(self.p * 2**32)


class Mask(NamedTuple):
    """The numbers that are dropped at one place of the model: 0 after the embedding, then 1, 2, ... for each branch.

    position: of the first token of each sequence.
    """

    dropout: Dropout
    place: int
    position: int = 0

    def keeps(self, shape):
        """bool (..., T, C): which numbers of an array on the host are kept; the leading axes are B sequences."""
        *lead, T, C = shape
        row, B = self.dropout.row, math.prod(lead)
        h = mixed(self.dropout.key.astype(np.uint32) + np.uint32(self.place))  # (1)
        h = mixed(h + np.arange(row, row + B, dtype=np.uint32))  # (B)
        h = mixed(h[:, None] + np.arange(self.position, self.position + T, dtype=np.uint32))  # (B, T)
        h = mixed(h[..., None] + np.arange(C, dtype=np.uint32) * np.uint32(GOLDEN))  # (B, T, C)
        return (h >= self.dropout.threshold).reshape(shape)


def mixed(h):
    """uint32 -> uint32: each bit of the result depends on all bits of h (the last steps of MurmurHash3)."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def dropout_key(seed, step):
    """(1) int64: the key of update number `step` (from 1)."""
    return np.random.SeedSequence((seed, step, 1)).generate_state(1).astype(np.int64)


def check_dropout(p):
    """`p`; raises ConfigError unless 0 <= p < 1."""
    if not 0 <= p < 1:
        raise ConfigError(f"`dropout={p:g}` must be at least 0 and below 1: use `dropout=0.1`, or omit it")
    return p
