"""A gradient written in fewer bits, and what that lost kept: fp16, bf16, or int8 with a scale for each 256 elements."""

# p rows, one for each rank, m elements of a row; m is a multiple of GROUP

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.parallel.tree_sum import tree_reduce

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


class Codec:
    """One way to write, add up and read float32 messages; composed of NumPy's functions, which CuPy's arrays take too.

    A code is an array of bytes whose last axis holds m elements. A runtime may have a Codec of one kernel a method.
    """

    def __init__(self, kind):
        if kind not in CODECS:
            raise ConfigError(f"--compress {kind} is unknown: choose from none, {', '.join(CODECS)}")
        self.kind, (self.encode, self.decode) = kind, CODECS[kind]

    def pack(self, lost, gradient):
        """lost (p, m), gradient (n), n <= p m -> the code (p, bytes) of lost + gradient; lost = what that lacks."""
        lost.reshape(-1)[: gradient.size] += gradient
        code = self.encode(lost)
        lost -= self.decode(code)
        return code

    def add(self, lost, codes):
        """lost (m), codes (p, bytes) -> the code (bytes) of lost + their canonical sum; lost = what that lacks."""
        total = tree_reduce(map(self.decode, codes), lambda a, b: np.add(a, b, out=a))
        total += lost
        code = self.encode(total)
        lost[...] = total - self.decode(code)
        return code

    def unpack(self, gradient, codes):
        """gradient (n) = the first n elements of codes (p, bytes), n <= p m."""
        gradient[...] = self.decode(codes).reshape(-1)[: gradient.size]
