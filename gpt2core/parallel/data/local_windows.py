"""Windows of a rank: each rank reads its own part of the corpus in its own random order."""

import math

import numpy as np

from gpt2core.data import Windows


class LocalWindows(Windows):
    """The windows that rank `rank` of `ranks` data-parallel ranks reads: its own part of each epoch's windows.

    The windows of an epoch are divided into `ranks` contiguous parts of ceil(windows / ranks) windows; the last parts
    may continue at the beginning of the corpus. Rank r reads its part in an order seeded by (seed, epoch, r). An offset
    seeded by (seed, epoch) shifts all windows of an epoch. The loss curve therefore depends on `ranks`.
    """

    def __init__(self, tokens, seq_len, seed, rank, ranks):
        super().__init__(tokens, seq_len, "shuffled", seed)
        self.rank, self.ranks = rank, ranks
        self.windows_per_epoch = math.ceil(self.windows_per_epoch / ranks)  # of this rank

    def batch(self, position, count):
        """As Windows.batch. position: number of windows that all ranks read in earlier steps, plus rank * count."""
        return super().batch((position - self.rank * count) // self.ranks, count)

    def starts_of_epoch(self, epoch):
        order = np.random.default_rng((self.seed, epoch, self.rank)).permutation(self.windows_per_epoch)
        offset = np.random.default_rng((self.seed, epoch)).integers(self.seq_len)
        return (self.rank * self.windows_per_epoch + order) * self.seq_len + offset
