"""An all-reduce of gradients in fewer bits with error feedback: rounding errors are added to the next step's sum."""

# p ranks, n elements of one bucket; each rank sums m elements: n / p, rounded up to a multiple of codecs.GROUP

import numpy as np

from gpt2core.codecs import GROUP
from gpt2core.communicator import Handle
from gpt2core.errors import ConfigError


class Compressed:
    """An all-reduce with encoded messages: an all-to-all of parts, the sum of part r on rank r, an all-gather of sums.

    Each rank stores two rounding errors, those of its encoded gradient and of its encoded sums, and adds them in the
    next call (Seide et al. 2014; for both messages as in DoubleSqueeze, Tang et al. 2019). Sums are in float32, in the
    canonical order (tree_sum.py). Every rank decodes the same bytes, so all ranks get the same bits. A rank sends
    2 (p-1)/p of the encoded size. A checkpoint does not contain the errors: after a resume they are zero.

    codec: backend.codec(kind). gradients: the flat buffer, reduced in place. xp: its array module, NumPy or CuPy.
    Raises ConfigError unless gradients are float32.
    """

    def __init__(self, codec, gradients, group, xp=np):
        self.codec, self.gradients, self.group, self.xp = codec, gradients, group, xp
        if gradients.dtype != np.float32:
            raise ConfigError(f"`compress={codec.kind}`: needs float32 gradients, not {gradients.dtype}; omit the flag")
        self.errors = {}  # index of a slice's first element -> (errors of gradients (p, m), of this rank's sums (m))

    def reduce_start(self, part):
        """Start the all-reduce of the slice `part` of the gradients, in place; return its handle."""
        n, p = part.stop - part.start, self.group.size
        m = -(-n // (p * GROUP)) * GROUP
        if part.start not in self.errors:
            self.errors[part.start] = self.xp.zeros((p, m), np.float32), self.xp.zeros(m, np.float32)
        gradient_errors, _ = self.errors[part.start]
        code = self.codec.pack(gradient_errors, self.gradients[part])  # (p, bytes)
        return PendingReduction(self, part, self.group.all_to_all_start(code))

    def finish(self, part, codes):
        """codes: every rank's code of the elements that this rank sums. Add them, and all-gather the encoded sums."""
        _, sum_errors = self.errors[part.start]
        code = self.codec.add(sum_errors, codes)
        self.codec.unpack(self.gradients[part], self.group.all_gather(code[None]))


class PendingReduction(Handle):
    """The pending all-reduce of one slice; wait() completes the all-to-all, then calls Compressed.finish()."""

    def __init__(self, compressed, part, all_to_all):
        super().__init__()
        self.unfinished = compressed, part, all_to_all

    def wait(self):
        if self.unfinished:
            compressed, part, all_to_all = self.unfinished
            self.unfinished = None
            compressed.finish(part, all_to_all.wait())
