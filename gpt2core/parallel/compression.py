"""Gradients travel in fewer bits, and what rounding took away is added to the next step's: error feedback."""

# p ranks, n elements of one bucket, m = n / p of them (padded) that one rank sums

import numpy as np

from gpt2core.canonical import tree_reduce
from gpt2core.communicator import Handle
from gpt2core.errors import ConfigError

GROUP = 256  # elements that share one scale in int8


def encode_fp16(x):
    return np.clip(x, -65504, 65504).astype(np.float16).view(np.uint8)  # beyond is infinity, which no feedback mends


def decode_fp16(code):
    return code.view(np.float16).astype(np.float32)


def encode_bf16(x):
    """The upper half of a float32, rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    return (np.where(np.isnan(x), bits | 1 << 22, rounded) >> 16).astype(np.uint16).view(np.uint8)


def decode_bf16(code):
    return (code.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def encode_int8(x):
    """127 steps to the largest of each GROUP; the bytes of the steps, then those of the float32 scales."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    steps = np.rint(groups / np.where(scale > 0, scale, 1))
    steps = np.where(np.isfinite(steps), steps, 0).astype(np.int8)  # what is not finite shows in its scale
    return np.concatenate([steps.reshape(x.shape).view(np.uint8), scale[..., 0].view(np.uint8)], axis=-1)


def decode_int8(code):
    elements = code.shape[-1] * GROUP // (GROUP + 4)
    steps, scale = code[..., :elements].view(np.int8), code[..., elements:].copy().view(np.float32)
    groups = steps.reshape(*code.shape[:-1], -1, GROUP) * scale[..., None]
    return groups.reshape(*code.shape[:-1], elements)


CODECS = {
    "fp16": (encode_fp16, decode_fp16),
    "bf16": (encode_bf16, decode_bf16),
    "int8": (encode_int8, decode_int8),
}


class Compressed:
    """An all-reduce whose every message is encoded: slices to their owners, and their sums back to all.

    A rank keeps what encoding its gradient lost, and an owner what encoding its sums lost, and each adds it the next
    time (Seide et al. 2014; both ways as in DoubleSqueeze, Tang et al. 2019). Sums are taken in float32, in the
    canonical tree; every rank decodes the same bytes, so all end with the same bits. 2 (p-1)/p of the encoded size is
    sent a rank. What is kept is not part of a checkpoint: a resumed run starts with none.
    """

    def __init__(self, kind, gradients, group, xp=np):
        if kind not in CODECS:
            raise ConfigError(f"--compress {kind} is unknown: choose from none, {', '.join(CODECS)}")
        if gradients.dtype != np.float32:
            raise ConfigError(f"--compress {kind} needs float32 gradients, and these are {gradients.dtype}")
        (self.encode, self.decode), self.gradients, self.group, self.xp = CODECS[kind], gradients, group, xp
        self.lost = {}  # first element of a slice -> (lost of my gradients (p, m), lost of my sums (m))

    def reduce_start(self, part):
        """Start the sum over the group of one slice of the gradients, in place; returns its handle."""
        n, p = part.stop - part.start, self.group.size
        m = -(-n // (p * GROUP)) * GROUP
        if part.start not in self.lost:
            self.lost[part.start] = self.xp.zeros((p, m), np.float32), self.xp.zeros(m, np.float32)
        mine, _ = self.lost[part.start]
        mine.reshape(-1)[:n] += self.gradients[part]  # from here on what is to be sent, and then what was lost of it
        code = self.encode(mine)  # (p, bytes)
        mine -= self.decode(code)
        return Pending(self, part, self.group.all_to_all_start(code))

    def finish(self, part, codes):
        """The second half: sum the slice that this rank owns, and exchange the encoded sums."""
        _, lost = self.lost[part.start]
        total = tree_reduce(map(self.decode, codes), lambda a, b: np.add(a, b, out=a))
        total += lost
        code = self.encode(total)
        lost[...] = total - self.decode(code)
        sums = self.decode(self.group.all_gather(code[None]))  # (p, m)
        self.gradients[part] = sums.reshape(-1)[: part.stop - part.start]


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
