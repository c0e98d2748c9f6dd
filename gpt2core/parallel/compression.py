"""Gradients travel in fewer bits, and what rounding took away is added to the next step's: error feedback."""

# p ranks, n elements of one bucket, m = n / p of them (padded) that one rank sums

import numpy as np

from gpt2core.communicator import Handle
from gpt2core.errors import ConfigError
from gpt2core.parallel.codecs import GROUP


class Compressed:
    """An all-reduce whose every message is encoded: slices to their owners, and their sums back to all.

    A rank keeps what encoding its gradient lost, and an owner what encoding its sums lost, and each adds it the next
    time (Seide et al. 2014; both ways as in DoubleSqueeze, Tang et al. 2019). Sums are taken in float32, in the
    canonical tree; every rank decodes the same bytes, so all end with the same bits. 2 (p-1)/p of the encoded size is
    sent a rank. What is kept is not part of a checkpoint: a resumed run starts with none.
    """

    def __init__(self, codec, gradients, group, xp=np):
        self.codec, self.gradients, self.group, self.xp = codec, gradients, group, xp
        if gradients.dtype != np.float32:
            raise ConfigError(f"--compress {codec.kind}: needs float32 gradients, not {gradients.dtype}; omit the flag")
        self.lost = {}  # first element of a slice -> (lost of my gradients (p, m), lost of my sums (m))

    def reduce_start(self, part):
        """Start the sum over the group of one slice of the gradients, in place; returns its handle."""
        n, p = part.stop - part.start, self.group.size
        m = -(-n // (p * GROUP)) * GROUP
        if part.start not in self.lost:
            self.lost[part.start] = self.xp.zeros((p, m), np.float32), self.xp.zeros(m, np.float32)
        mine, _ = self.lost[part.start]
        code = self.codec.pack(mine, self.gradients[part])  # (p, bytes)
        return Pending(self, part, self.group.all_to_all_start(code))

    def finish(self, part, codes):
        """The second half: sum the slice that this rank owns, and exchange the encoded sums."""
        _, lost = self.lost[part.start]
        code = self.codec.add(lost, codes)
        self.codec.unpack(self.gradients[part], self.group.all_gather(code[None]))


class Pending(Handle):
    """The exchange of a slice under way; the sums are exchanged when it is waited for."""

    def __init__(self, owner, part, exchange):
        super().__init__()
        self.open = owner, part, exchange

    def wait(self):
        if self.open:
            owner, part, exchange = self.open
            self.open = None
            owner.finish(part, exchange.wait())
