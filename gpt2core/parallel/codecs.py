"""Gradient codecs for --compress: fp16, bf16, or int8 with one float32 scale per 256 elements; with error feedback."""

# p rows, one for each rank; m elements per row, a multiple of GROUP

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.parallel.tree_sum import tree_reduce

GROUP = 256  # elements that share one scale in int8


def encode_fp16(x):
    """x (..., m) float32 -> bytes (..., 2m), clipped to the range of fp16, rounded to nearest."""
    return np.clip(x, -65504, 65504).astype(np.float16).view(np.uint8)  # infinity would make the residual infinite


def decode_fp16(code):
    return code.view(np.float16).astype(np.float32)


def encode_bf16(x):
    """x (..., m) float32 -> bytes (..., 2m): the upper halves, rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    return (np.where(np.isnan(x), bits | 1 << 22, rounded) >> 16).astype(np.uint16).view(np.uint8)


def decode_bf16(code):
    return (code.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def encode_int8(x):
    """x (..., m) float32 -> bytes (..., m + 4 m / GROUP): m int8 values, then m / GROUP float32 scales.

    The scale of a group is max(abs(group)) / 127.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    values = np.rint(groups / np.where(scale > 0, scale, 1))
    # a group that contains inf or NaN has a scale that is not finite, so its decoded values are not finite
    values = np.where(np.isfinite(values), values, 0).astype(np.int8)
    return np.concatenate([values.reshape(x.shape).view(np.uint8), scale[..., 0].view(np.uint8)], axis=-1)


def decode_int8(code):
    elements = code.shape[-1] * GROUP // (GROUP + 4)
    values, scale = code[..., :elements].view(np.int8), code[..., elements:].copy().view(np.float32)
    groups = values.reshape(*code.shape[:-1], -1, GROUP) * scale[..., None]
    return groups.reshape(*code.shape[:-1], elements)


CODECS = {
    "fp16": (encode_fp16, decode_fp16),
    "bf16": (encode_bf16, decode_bf16),
    "int8": (encode_int8, decode_int8),
}


class Codec:
    """Encode, sum and decode float32 messages, with NumPy functions, which take CuPy arrays too.

    A code is a uint8 array whose last axis holds the m elements of one message. The residual is the error feedback:
    the rounding error of one message, which is added to the next. stage2_cuda/kernels/codecs.py has a subclass with one
    kernel per method. Raises ConfigError for an unknown kind.
    """

    def __init__(self, kind):
        if kind not in CODECS:
            raise ConfigError(f"--compress {kind} is unknown: choose from none, {', '.join(CODECS)}")
        self.kind, (self.encode, self.decode) = kind, CODECS[kind]

    def pack(self, residual, gradient):
        """Return the code (p, bytes) of x = residual + gradient; residual becomes x minus the decoded code.

        residual (p, m) float32, updated in place; gradient (n) float32, n <= p m, as the first n elements of (p, m).
        """
        residual.reshape(-1)[: gradient.size] += gradient
        code = self.encode(residual)
        residual -= self.decode(code)
        return code

    def add(self, residual, codes):
        """Return the code (bytes) of x = residual + the sum of the decoded codes; residual becomes x - decoded code.

        residual (m) float32, updated in place; codes (p, bytes).
        """
        total = tree_reduce(map(self.decode, codes), lambda a, b: np.add(a, b, out=a))
        total += residual
        code = self.encode(total)
        residual[...] = total - self.decode(code)
        return code

    def unpack(self, gradient, codes):
        """gradient (n) float32 = the first n decoded elements of codes (p, bytes), n <= p m."""
        gradient[...] = self.decode(codes).reshape(-1)[: gradient.size]
