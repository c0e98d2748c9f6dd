"""Windows of which each rank shuffles a fixed part by itself (--local-shuffle)."""

import math

import numpy as np

from gpt2core.data import Windows


class LocalWindows(Windows):
    """Each of `ranks` ranks shuffles a fixed part of the windows by itself: no rank needs the others' text.

    An epoch's windows are divided into `ranks` contiguous parts of ceil(windows / ranks); rank r visits its part in an
    order seeded by (seed, epoch, r), from a first token seeded by (seed, epoch). The curve depends on `ranks`.
    """

    def __init__(self, tokens, seq_len, seed, rank, ranks):
        super().__init__(tokens, seq_len, "shuffled", seed)
        self.rank, self.ranks = rank, ranks
        self.windows_per_part = math.ceil(self.windows_per_epoch / ranks)

    def batch(self, position, count):
        """As Windows.batch, for a step whose every rank reads `count` windows, this one from `position` on."""
        return super().batch((position - self.rank * count) // self.ranks, count)

    def _shuffled(self, window):
        epoch, index = divmod(window, self.windows_per_part)
        known, starts = self._epoch
        if known != epoch:
            order = np.random.default_rng((self.seed, epoch, self.rank)).permutation(self.windows_per_part)
            offset = np.random.default_rng((self.seed, epoch)).integers(self.seq_len)
            starts = (self.rank * self.windows_per_part + order) * self.seq_len + offset
            self._epoch = (epoch, starts)
        return int(starts[index])
