"""The codecs of --compress as one Triton kernel per method, with the same bits as gpt2core/parallel/codecs.py.

NumPy's functions would read and write memory once per operation: a dozen times for bf16. Here each number is read
once, and the residual (error feedback) is added and updated in the same pass. bf16 is the upper half of a float32 and
is computed with integers, because Triton's interpreter has no bf16.
"""
# p rows, one per rank; m elements per row, a multiple of GROUP; n elements of the gradient, n <= p m

import numpy as np
import triton
import triton.language as tl

from gpt2core.parallel.codecs import GROUP, Codec
from stage2_cuda.runtime.triton_launch import launch

GROUPS = 8  # groups of GROUP elements per program
ROUND_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: x + ROUND_MAGIC - ROUND_MAGIC is x rounded to an integer


class FusedCodec(Codec):
    """A Codec for arrays of the module xp: cupy, or numpy under Triton's interpreter."""

    def __init__(self, kind, xp):
        super().__init__(kind)
        self.xp = xp

    def pack(self, residual, gradient):
        code = self.empty_code(*residual.shape)
        arguments = *self.views(code), residual, gradient, gradient.size, residual.shape[1] // GROUP
        self.run(pack_kernel, residual.size, *arguments, residual.size // GROUP)
        return code

    def add(self, residual, codes):
        code = self.empty_code(residual.size)
        arguments = *self.views(code), residual, *self.views(codes), residual.size // GROUP
        self.run(add_kernel, residual.size, *arguments, COUNT=len(codes))
        return code

    def unpack(self, gradient, codes):
        groups_per_row = codes.shape[1] // (self.empty_code(GROUP).size)
        self.run(unpack_kernel, gradient.size, gradient, *self.views(codes), gradient.size, groups_per_row)

    def empty_code(self, *shape):
        """An uninitialised code, uint8, for a float32 message of this shape (..., m)."""
        *rows, m = shape
        return self.xp.empty((*rows, m + m // GROUP * 4 if self.kind == "int8" else 2 * m), np.uint8)

    def views(self, code):
        """The same memory as int8 values and float32 scales; for the 16-bit codecs as uint16 values and None."""
        return (code.view(np.int8), code.view(np.float32)) if self.kind == "int8" else (code.view(np.uint16), None)

    def run(self, kernel, elements, *arguments, **constants):
        grid = (triton.cdiv(elements, GROUP * GROUPS),)
        constants |= dict(KIND=self.kind, GROUP=GROUP, GROUPS=GROUPS, num_warps=4)
        launch(kernel, grid, *arguments, **constants, enable_fp_fusion=False)  # NumPy rounds the product before the sum


@triton.jit
def encode(x, KIND: tl.constexpr):
    """x (GROUPS, GROUP) float32 -> its encoded values, their scales (GROUPS), and x as decode() will return it."""
    scale = tl.max(tl.abs(x), 1)
    if KIND == "bf16":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + (0x7FFF + ((bits >> 16) & 1))
        values = (tl.where(x != x, bits | (1 << 22), rounded) >> 16).to(tl.uint16)
    elif KIND == "fp16":
        clipped = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))  # avoids infinity
        values = clipped.to(tl.float16).to(tl.uint16, bitcast=True)
    else:
        scale = tl.where(tl.max((x != x).to(tl.int32), 1) != 0, float("nan"), scale)  # tl.max may ignore NaN
        scale = tl.div_rn(scale, 127.0)
        steps = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
        steps = tl.where(tl.abs(steps) < 128.0, steps, 0.0)  # inf or NaN: then the scale is not finite
        values = ((steps + ROUND_MAGIC) - ROUND_MAGIC).to(tl.int8)
    return values, scale, decode(values, scale, KIND)


@triton.jit
def decode(values, scale, KIND: tl.constexpr):
    """Encoded values (GROUPS, GROUP) and their scales (GROUPS) -> float32."""
    if KIND == "bf16":
        x = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        x = values.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = values.to(tl.float32) * scale[:, None]
    return x


@triton.jit
def code_offsets(row, group, groups_per_row, KIND: tl.constexpr, GROUP: tl.constexpr):
    """(index of the first value of a row's group in the array of values, index of its scale in the array of scales)."""
    value_offs = (row * groups_per_row + group) * GROUP
    if KIND == "int8":  # a row holds its values, then its scales, of 4 bytes each
        value_offs += row * groups_per_row * 4
    return value_offs, (row * (GROUP // 4 + 1) + GROUP // 4) * groups_per_row + group


@triton.jit
def store_code(
    values_ptr, scales_ptr, row, group, groups_per_row, mask, x, KIND: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Store the code of x (GROUPS, GROUP) float32; returns x as decode() will return it. mask (GROUPS)."""
    value_offs, scale_offs = code_offsets(row, group, groups_per_row, KIND, GROUP)
    values, scale, decoded = encode(x, KIND)
    tl.store(values_ptr + value_offs[:, None] + tl.arange(0, GROUP)[None, :], values, mask[:, None])
    if KIND == "int8":
        tl.store(scales_ptr + scale_offs, scale, mask)
    return decoded


@triton.jit
def load_code(values_ptr, scales_ptr, row, group, groups_per_row, mask, KIND: tl.constexpr, GROUP: tl.constexpr):
    """The decoded message (GROUPS, GROUP) float32. mask (GROUPS)."""
    value_offs, scale_offs = code_offsets(row, group, groups_per_row, KIND, GROUP)
    values = tl.load(values_ptr + value_offs[:, None] + tl.arange(0, GROUP)[None, :], mask[:, None], 0)
    scale = tl.zeros(mask.shape, tl.float32)
    if KIND == "int8":
        scale = tl.load(scales_ptr + scale_offs, mask, 0.0)
    return decode(values, scale, KIND)


@triton.jit
def sum_codes(
    values_ptr, scales_ptr, row, group, groups_per_row, mask,
    KIND: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The sum of COUNT rows from `row` on, in the order of parallel/tree_sum.py.

    The first half has as many rows as the largest power of two below COUNT.
    """
    if COUNT == 1:
        total = load_code(values_ptr, scales_ptr, row, group, groups_per_row, mask, KIND, GROUP)
    else:
        HALF: tl.constexpr = triton.next_power_of_2(COUNT) // 2
        total = sum_codes(values_ptr, scales_ptr, row, group, groups_per_row, mask, KIND, GROUP, HALF)
        total += sum_codes(values_ptr, scales_ptr, row + HALF, group, groups_per_row, mask, KIND, GROUP, COUNT - HALF)
    return total


@triton.jit
def pack_kernel(
    values_ptr, scales_ptr, residual_ptr, gradient_ptr, n, groups_per_row, n_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """code = encode(residual + gradient); residual = that sum minus the decoded code."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask, offs = group < n_groups, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(residual_ptr + offs, mask[:, None], 0.0) + tl.load(gradient_ptr + offs, offs < n, 0.0)
    row, group_in_row = group // groups_per_row, group % groups_per_row
    decoded = store_code(values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, x, KIND, GROUP)
    tl.store(residual_ptr + offs, x - decoded, mask[:, None])


@triton.jit
def add_kernel(
    values_ptr, scales_ptr, residual_ptr, in_values_ptr, in_scales_ptr, n_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """code = encode(residual + the sum of COUNT decoded rows); residual = that sum minus the decoded code."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask, offs = group < n_groups, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = tl.zeros_like(group)
    total = sum_codes(in_values_ptr, in_scales_ptr, row, group, n_groups, mask, KIND, GROUP, COUNT)
    total += tl.load(residual_ptr + offs, mask[:, None], 0.0)
    decoded = store_code(values_ptr, scales_ptr, row, group, n_groups, mask, total, KIND, GROUP)
    tl.store(residual_ptr + offs, total - decoded, mask[:, None])


@triton.jit
def unpack_kernel(
    gradient_ptr, values_ptr, scales_ptr, n, groups_per_row,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """gradient = the first n decoded elements."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    offs = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row, group_in_row, mask = group // groups_per_row, group % groups_per_row, group * GROUP < n
    x = load_code(values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, KIND, GROUP)
    tl.store(gradient_ptr + offs, x, offs < n)
