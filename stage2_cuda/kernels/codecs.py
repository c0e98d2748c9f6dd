"""The codecs of --compress (fp16, bf16, int8) for gradients, with one Triton kernel for each method of Codec.

The results have the same bits as those of gpt2core/codecs.py, which also explains the codes and the residual
(error feedback). The NumPy functions there read and write memory once per operation, a dozen times for bf16. A kernel
here reads each number once; it adds and updates the residual in the same pass. A bf16 number is the upper half of the
bits of a float32; it is computed with integers, because Triton's interpreter computes bf16 wrongly.
"""

# p rows, one per rank; m elements per row, a multiple of GROUP; n elements of the gradient, n <= p m

import numpy as np
import triton
import triton.language as tl

from gpt2core.codecs import GROUP, Codec
from stage2_cuda.runtime.triton_launch import launch

GROUPS_PER_PROGRAM = 8  # a group has GROUP = 256 elements; in int8 the elements of a group share one scale
# 1.5 * 2**23. A float32 of this size has no fractional bits, so x + ROUND_MAGIC - ROUND_MAGIC is the integer nearest x.
ROUND_MAGIC = tl.constexpr(12582912.0)


class FusedCodec(Codec):
    """A Codec for arrays of the module xp: cupy on a GPU, numpy in Triton's interpreter."""

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
        """An uninitialised uint8 array for the code of a float32 array of this shape (..., m)."""
        *rows, m = shape
        return self.xp.empty((*rows, m + m // GROUP * 4 if self.kind == "int8" else 2 * m), np.uint8)

    def views(self, code):
        """Views of the memory of `code`: (int8 values, float32 scales); in the 16-bit codecs (uint16 values, None)."""
        return (code.view(np.int8), code.view(np.float32)) if self.kind == "int8" else (code.view(np.uint16), None)

    def run(self, kernel, elements, *arguments, **constants):
        grid = (triton.cdiv(elements, GROUP * GROUPS_PER_PROGRAM),)
        constants |= dict(KIND=self.kind, GROUP=GROUP, GROUPS_PER_PROGRAM=GROUPS_PER_PROGRAM, num_warps=4)
        # NumPy rounds a product before it adds; a fused multiply-add would not, and would give other bits
        launch(kernel, grid, *arguments, **constants, enable_fp_fusion=False)


@triton.jit
def encode(x, KIND: tl.constexpr):
    """Encode x (groups, GROUP) float32: returns (encoded values, scales (groups), decoded values).

    The scales are used only in int8. The encoded values are uint16 in the 16-bit codecs and int8 in int8.
    """
    scale = tl.max(tl.abs(x), 1)
    if KIND == "bf16":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + (0x7FFF + ((bits >> 16) & 1))
        values = (tl.where(x != x, bits | (1 << 22), rounded) >> 16).to(tl.uint16)  # x != x: NaN stays NaN
    elif KIND == "fp16":
        # a finite number becomes at most the largest fp16; infinity and NaN, for which a comparison is false, are kept
        clipped = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        clipped = tl.where(tl.abs(x) < float("inf"), clipped, x)
        values = clipped.to(tl.float16).to(tl.uint16, bitcast=True)
    else:
        scale = tl.where(tl.max((x != x).to(tl.int32), 1) != 0, float("nan"), scale)  # tl.max may have ignored a NaN
        scale = tl.div_rn(scale, 127.0)
        steps = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
        # The comparison is false for infinity and NaN. The decoded values of such a group are not finite in any case,
        # because its scale is not finite.
        steps = tl.where(tl.abs(steps) < 128.0, steps, 0.0)
        values = ((steps + ROUND_MAGIC) - ROUND_MAGIC).to(tl.int8)
    return values, scale, decode(values, scale, KIND)


@triton.jit
def decode(values, scale, KIND: tl.constexpr):
    """The decoded values (groups, GROUP) float32 of encoded values (groups, GROUP) and their scales (groups)."""
    if KIND == "bf16":
        x = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        x = values.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = values.to(tl.float32) * scale[:, None]
    return x


@triton.jit
def code_offsets(row, group_in_row, groups_per_row, KIND: tl.constexpr, GROUP: tl.constexpr):
    """The indices of a group's first value and of its scale, in the two arrays that FusedCodec.views() returns."""
    value_offs = (row * groups_per_row + group_in_row) * GROUP
    if KIND == "int8":  # the code of a row is its values, one byte each, and then its scales, four bytes each
        value_offs += row * groups_per_row * 4
    return value_offs, (row * (GROUP // 4 + 1) + GROUP // 4) * groups_per_row + group_in_row


@triton.jit
def encode_and_store(
    values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, x, KIND: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Store the code of x (groups, GROUP) float32; returns the decoded values. row, group_in_row, mask: (groups)."""
    value_offs, scale_offs = code_offsets(row, group_in_row, groups_per_row, KIND, GROUP)
    values, scale, decoded = encode(x, KIND)
    tl.store(values_ptr + value_offs[:, None] + tl.arange(0, GROUP)[None, :], values, mask[:, None])
    if KIND == "int8":
        tl.store(scales_ptr + scale_offs, scale, mask)
    return decoded


@triton.jit
def load_and_decode(
    values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, KIND: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The decoded values (groups, GROUP) float32 of stored codes. row, group_in_row, mask: (groups)."""
    value_offs, scale_offs = code_offsets(row, group_in_row, groups_per_row, KIND, GROUP)
    values = tl.load(values_ptr + value_offs[:, None] + tl.arange(0, GROUP)[None, :], mask[:, None], 0)
    scale = tl.zeros(mask.shape, tl.float32)
    if KIND == "int8":
        scale = tl.load(scales_ptr + scale_offs, mask, 0.0)
    return decode(values, scale, KIND)


@triton.jit
def load_and_sum(
    values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask,
    KIND: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The sum (groups, GROUP) float32 of the decoded rows [row, row + COUNT), in the canonical order (tree_sum.py).

    The recursion divides the rows in two. The number of rows in the first part is the largest power of two below COUNT.
    """
    if COUNT == 1:
        total = load_and_decode(values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, KIND, GROUP)
    else:
        FIRST_PART: tl.constexpr = triton.next_power_of_2(COUNT) // 2
        total = load_and_sum(values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, KIND, GROUP, FIRST_PART)
        row += FIRST_PART
        REST: tl.constexpr = COUNT - FIRST_PART
        total += load_and_sum(values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, KIND, GROUP, REST)
    return total


@triton.jit
def pack_kernel(
    values_ptr, scales_ptr, residual_ptr, gradient_ptr, n, groups_per_row, n_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Codec.pack(): code (p, bytes) = encode(x), residual = x - decode(code), for x (p, m) = residual + gradient (n).

    If n < p m, the gradient is padded with zeros. Grid (n_groups / GROUPS_PER_PROGRAM): each program processes
    GROUPS_PER_PROGRAM groups, n_groups = p groups_per_row.
    """
    group = tl.program_id(0).to(tl.int64) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    mask, offs = group < n_groups, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(residual_ptr + offs, mask[:, None], 0.0) + tl.load(gradient_ptr + offs, offs < n, 0.0)
    row, group_in_row = group // groups_per_row, group % groups_per_row
    decoded = encode_and_store(values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, x, KIND, GROUP)
    tl.store(residual_ptr + offs, x - decoded, mask[:, None])


@triton.jit
def add_kernel(
    values_ptr, scales_ptr, residual_ptr, in_values_ptr, in_scales_ptr, n_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Codec.add(): code (bytes) = encode(x), residual (m) = x - decode(code), for x = residual + the sum of codes.

    in_values, in_scales: COUNT codes, one per row. Grid (n_groups / GROUPS_PER_PROGRAM), n_groups = m / GROUP.
    """
    group = tl.program_id(0).to(tl.int64) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    mask, offs = group < n_groups, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = tl.zeros_like(group)
    total = load_and_sum(in_values_ptr, in_scales_ptr, row, group, n_groups, mask, KIND, GROUP, COUNT)
    total += tl.load(residual_ptr + offs, mask[:, None], 0.0)
    decoded = encode_and_store(values_ptr, scales_ptr, row, group, n_groups, mask, total, KIND, GROUP)
    tl.store(residual_ptr + offs, total - decoded, mask[:, None])


@triton.jit
def unpack_kernel(
    gradient_ptr, values_ptr, scales_ptr, n, groups_per_row,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Codec.unpack(): gradient (n) float32 = the first n decoded elements. Grid (n / (GROUP * GROUPS_PER_PROGRAM))."""
    group = tl.program_id(0).to(tl.int64) * GROUPS_PER_PROGRAM + tl.arange(0, GROUPS_PER_PROGRAM)
    offs = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row, group_in_row, mask = group // groups_per_row, group % groups_per_row, group * GROUP < n
    x = load_and_decode(values_ptr, scales_ptr, row, group_in_row, groups_per_row, mask, KIND, GROUP)
    tl.store(gradient_ptr + offs, x, offs < n)
