"""Batches (inputs, targets) from a token array. A batch depends only on the seed and on its position in training."""

# n tokens in the corpus, T tokens in a window (one training sequence)

import math

import numpy as np

from gpt2core import checks
from gpt2core.errors import ConfigError


def even_slices(n, parts):
    """`parts` contiguous slices that cover range(n); their lengths differ by at most one."""
    edges = [n * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


class Windows:
    """Windows of seq_len tokens in a circular buffer: after its last token follows its first. No window is padded.

    tokens: (n,) integers, never copied: an array, a memory map, or many files (TokenFiles). seq_len: T. order:
    "sequential": window w has the tokens w*T, ..., w*T + T - 1, modulo n. "shuffled": each epoch visits its ceil(n / T)
    windows once, in an order seeded by (seed, epoch). An offset, also seeded by these, shifts all windows of an epoch.

    `position`, an argument, is the number of windows that training has read before, over all ranks: the only state that
    is needed to resume. A rank reads its own rows of the global batch with batch(position + first row, number of rows).

    Raises DataError unless `tokens` has one axis with at least T + 1 integers, and ConfigError for a wrong option.
    """

    def __init__(self, tokens, seq_len, order="sequential", seed=0):
        tokens = tokens if hasattr(tokens, "dtype") else np.asarray(tokens)
        checks.windows(tokens, seq_len, order, seed)
        self.tokens, self.seq_len, self.order, self.seed = tokens, seq_len, order, seed
        self.windows_per_epoch = math.ceil(len(tokens) / seq_len)
        self.epoch, self.starts = None, None  # the last shuffled epoch that was read, and its starts_of_epoch()

    def batch(self, position, count):
        """Return (inputs, targets), each (count, T), of `count` windows from `position` on. Targets: the next tokens.

        Both are read-only: views of the corpus for sequential windows that do not cross its end, otherwise copies.
        """
        if position < 0 or count < 1:
            raise ConfigError(f"{count} windows at {position}: the count must be positive, the position not negative")
        if self.order == "sequential":
            return self.consecutive(position * self.seq_len, count)
        starts = np.array([self.shuffled_start(position + row) for row in range(count)])
        rows = self.read(starts[:, None] + np.arange(self.seq_len + 1))  # (count, T + 1)
        return rows[:, :-1], rows[:, 1:]

    def once(self, count):
        """Yield (inputs, targets) of up to `count` windows at a time: all windows inside the corpus, each exactly once.

        For evaluation. A window across the end is omitted: it would predict the first token of the text from the last.
        """
        inside = (len(self.tokens) - 1) // self.seq_len  # number of windows
        for first in range(0, inside, count):
            yield self.consecutive(first * self.seq_len, min(count, inside - first))

    def consecutive(self, start, count):
        """Return (inputs, targets) of `count` consecutive windows from token `start` on."""
        tokens = self.read(range(start, start + count * self.seq_len + 1))
        return tokens[:-1].reshape(count, self.seq_len), tokens[1:].reshape(count, self.seq_len)

    def read(self, index):
        """Return the tokens at `index` modulo n, read-only: a view for a range that does not cross the end."""
        n = len(self.tokens)
        inside = isinstance(index, range) and index[0] // n == index[-1] // n
        index = slice(index[0] % n, index[-1] % n + 1) if inside else np.asarray(index) % n
        tokens = np.asarray(self.tokens[index])
        tokens.flags.writeable = False
        return tokens

    def shuffled_start(self, window):
        """Return the index of the first token of shuffled window number `window` (from 0, over all epochs)."""
        epoch, index = divmod(window, self.windows_per_epoch)
        if epoch != self.epoch:
            self.starts, self.epoch = self.starts_of_epoch(epoch), epoch
        return int(self.starts[index])

    def starts_of_epoch(self, epoch):
        """The index of the first token of each window of an epoch, in the order in which they are read."""
        generator = np.random.default_rng((self.seed, epoch))
        return generator.permutation(self.windows_per_epoch) * self.seq_len + generator.integers(self.seq_len)
