"""Batches (inputs, targets) from a token array: a batch is a pure function of its position."""

# n tokens in the buffer, T tokens in a window

import math

import numpy as np

from gpt2core.errors import ConfigError, DataError


class Windows:
    """Windows of seq_len tokens, one after another in one circular buffer, so there is no padding.

    tokens: (n,) integers, array or memory map, never copied. seq_len: T. order: "sequential": window w has tokens
    w*T, ..., w*T + T - 1 of the circular stream. "shuffled": each epoch visits its ceil(n / T) windows once. The order
    and an offset of all windows are seeded by (seed, epoch), so a token's position in its window varies by epoch.

    A batch is a pure function of its position, the number of windows consumed since the start of training. This integer
    is the only state needed to resume. A rank reads its own rows with batch(position + first_row, rows).

    Raises DataError unless tokens are one row of integers, enough for one window; ConfigError for a wrong option.
    """

    def __init__(self, tokens, seq_len, order="sequential", seed=0):
        if seq_len < 1:
            raise ConfigError(f"seq_len is {seq_len}, but a window needs at least 1 token")
        if order not in ("sequential", "shuffled"):
            raise ConfigError(f"unknown order {order!r}: choose sequential or shuffled")
        if seed < 0:
            raise ConfigError(f"the seed is {seed}, but it must be 0 or more")
        buffer = np.asarray(tokens)[...]  # a new view, so that the caller's array stays writeable
        if buffer.ndim != 1 or buffer.dtype.kind not in "iu":
            raise DataError(f"tokens must be one row of integers, but they are {buffer.dtype} of shape {buffer.shape}")
        if len(buffer) < seq_len + 1:
            raise DataError(
                f"the corpus has {len(buffer)} tokens, but one window of {seq_len} needs {seq_len + 1} "
                "(the last one is a target): give more text or a shorter --seq-len"
            )
        buffer.flags.writeable = False  # batches are views of the buffer
        self.tokens, self.seq_len, self.order, self.seed = buffer, seq_len, order, seed
        self.windows_per_epoch = math.ceil(len(buffer) / seq_len)
        self._epoch = (None, None)  # (epoch, the first token of each of its windows)

    def batch(self, position, count):
        """Return (inputs, targets), each (count, T), of `count` windows from `position` on; targets: the next tokens.

        Both are read-only views: of the corpus if windows are sequential and do not cross its end, else of a copy.
        """
        if position < 0 or count < 1:
            raise ConfigError(f"{count} windows at {position}: the count must be positive, the position not negative")
        if self.order == "sequential":
            return self._run(position * self.seq_len, count)
        starts = np.array([self._shuffled(position + row) for row in range(count)])
        rows = self._circular(starts[:, None] + np.arange(self.seq_len + 1))  # (count, T + 1)
        return rows[:, :-1], rows[:, 1:]

    def once(self, count):
        """Yield (inputs, targets) of up to `count` windows at a time: each window that does not wrap, exactly once.

        For evaluation: a window that wraps at the buffer's end would predict the first token of the text from the last.
        """
        whole = (len(self.tokens) - 1) // self.seq_len
        for first in range(0, whole, count):
            yield self._run(first * self.seq_len, min(count, whole - first))

    def _run(self, start, count):
        """Return `count` consecutive windows from token `start` on: views unless they cross the buffer's end."""
        start, length = start % len(self.tokens), count * self.seq_len
        if start + length + 1 <= len(self.tokens):
            run = self.tokens[start : start + length + 1]
        else:
            run = self._circular(start + np.arange(length + 1))
        return run[:-1].reshape(count, self.seq_len), run[1:].reshape(count, self.seq_len)

    def _circular(self, index):
        rows = self.tokens[index % len(self.tokens)]
        rows.flags.writeable = False
        return rows

    def _shuffled(self, window):
        """Return the first token of window number `window` of the shuffled stream."""
        epoch, index = divmod(window, self.windows_per_epoch)
        known, starts = self._epoch
        if known != epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, epoch))))
            starts = generator.permutation(self.windows_per_epoch) * self.seq_len + generator.integers(self.seq_len)
            self._epoch = (epoch, starts)  # one tuple: no thread reads an epoch with the starts of another
        return int(starts[index])
