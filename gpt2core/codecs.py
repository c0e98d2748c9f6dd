"""Gradient codecs: fp16, bf16, or int8 with one float32 scale per 256 elements; with error feedback."""

# p rows, one for each rank; m elements per row, a multiple of GROUP; n elements of a gradient, at most p m

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.tree_sum import tree_reduce

GROUP = 256  # elements that share one scale in int8


def encode_fp16(x):
    """x (..., m) float32 -> bytes (..., 2m) uint8: rounded to nearest; a finite number is clipped to the range of fp16.

    Error feedback sends what clipping removes. inf and NaN are kept, so that a diverged gradient is not finite.
    """
    return np.where(np.isfinite(x), np.clip(x, -65504, 65504), x).astype(np.float16).view(np.uint8)


def decode_fp16(code):
    """bytes (..., 2m) uint8 -> (..., m) float32."""
    return code.view(np.float16).astype(np.float32)


def encode_bf16(x):
    """x (..., m) float32 -> bytes (..., 2m) uint8: the upper 16 bits, rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    rounded = bits + (0x7FFF + (bits >> 16 & 1))
    # rounding could turn NaN into infinity: set a bit of the mantissa instead
    return (np.where(np.isnan(x), bits | 1 << 22, rounded) >> 16).astype(np.uint16).view(np.uint8)


def decode_bf16(code):
    """bytes (..., 2m) uint8 -> (..., m) float32."""
    return (code.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def encode_int8(x):
    """x (..., m) float32 -> bytes (..., m + 4 m / GROUP) uint8: m int8 values, then m / GROUP float32 scales.

    The scale of a group of GROUP elements is max(abs(group)) / 127; an int8 value is x / scale, rounded.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    values = np.rint(groups / np.where(scale > 0, scale, 1))
    # a group that contains inf or NaN has a scale that is not finite, so its decoded values are not finite
    values = np.where(np.isfinite(values), values, 0).astype(np.int8)
    return np.concatenate([values.reshape(x.shape).view(np.uint8), scale[..., 0].view(np.uint8)], axis=-1)


def decode_int8(code):
    """bytes (..., m + 4 m / GROUP) uint8 -> (..., m) float32: value * scale of its group."""
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
    """Encode, sum and decode float32 messages with NumPy functions, which also accept CuPy arrays.

    A code is a uint8 array whose last axis has the bytes of the m elements of one message. A residual is the rounding
    error of a message; error feedback adds it to the next message. stage2_cuda/kernels/codecs.py has a subclass with
    one GPU kernel for each method. Raises ConfigError for an unknown kind.
    """

    def __init__(self, kind):
        if kind not in CODECS:
            raise ConfigError(f"`compress={kind}` is unknown: choose from none, {', '.join(CODECS)}")
        self.kind, (self.encode, self.decode) = kind, CODECS[kind]

    def pack(self, residual, gradient):
        """Return the code (p, bytes) of x = residual + gradient; residual becomes x minus the decoded code.

        residual (p, m) float32 is updated in place. gradient (n) float32 is added to the first n elements of residual.
        """
        residual.reshape(-1)[: gradient.size] += gradient
        code = self.encode(residual)
        residual -= self.decode(code)
        return code

    def add(self, residual, codes):
        """codes (p, bytes) -> the code (bytes) of x = residual + sum of the p decoded codes, in the canonical order.

        residual (m) float32 is updated in place: it becomes x minus the decoded result.
        """
        total = tree_reduce(map(self.decode, codes), lambda a, b: np.add(a, b, out=a))
        total += residual
        code = self.encode(total)
        residual[...] = total - self.decode(code)
        return code

    def unpack(self, gradient, codes):
        """Write the first n decoded elements of codes (p, bytes) to gradient (n) float32."""
        gradient[...] = self.decode(codes).reshape(-1)[: gradient.size]
