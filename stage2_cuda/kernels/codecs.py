"""What --compress says of a gradient, by one kernel each way: what was lost is added and kept in the same pass.

NumPy's functions would read and write memory once for each operation, a dozen times for bf16; here each number is read
once. The bits are those of gpt2core/parallel/codecs.py. bf16 is the upper half of a float32, made by integers, so that
the interpreter, which has no such type, computes it too.
"""
# p rows, one for each rank, m elements of a row, a multiple of GROUP; n elements of the gradient, n <= p m

import numpy as np
import triton
import triton.language as tl

from gpt2core.parallel.codecs import GROUP, Codec
from stage2_cuda.runtime.triton_launch import launch

GROUPS = 8  # of GROUP elements, in one program
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: a small number added to it, and taken off again, is rounded to a whole


class FusedCodec(Codec):
    """A Codec of arrays of a GPU, or of NumPy's in the interpreter; xp: their module."""

    def __init__(self, kind, xp):
        super().__init__(kind)
        self.kind, self.xp = kind, xp

    def pack(self, lost, gradient):
        code = self.empty(*lost.shape)
        arguments = *self.parts(code), lost, gradient, gradient.size, lost.shape[1] // GROUP
        self.run(pack_kernel, lost.size, *arguments, lost.size // GROUP)
        return code

    def add(self, lost, codes):
        code = self.empty(lost.size)
        arguments = *self.parts(code), lost, *self.parts(codes), lost.size // GROUP
        self.run(add_kernel, lost.size, *arguments, COUNT=len(codes))
        return code

    def unpack(self, gradient, codes):
        per_row = codes.shape[1] // (self.empty(GROUP).size)
        self.run(unpack_kernel, gradient.size, gradient, *self.parts(codes), gradient.size, per_row)

    def empty(self, *shape):
        """An uninitialised code of a message of this shape."""
        *rows, m = shape
        return self.xp.empty((*rows, m + m // GROUP * 4 if self.kind == "int8" else 2 * m), np.uint8)

    def parts(self, code):
        """The same memory as arrays of steps and of scales, or of 16 bits and None."""
        return (code.view(np.int8), code.view(np.float32)) if self.kind == "int8" else (code.view(np.uint16), None)

    def run(self, kernel, elements, *arguments, **constants):
        grid = (triton.cdiv(elements, GROUP * GROUPS),)
        constants |= dict(KIND=self.kind, GROUP=GROUP, GROUPS=GROUPS, num_warps=4)
        launch(kernel, grid, *arguments, **constants, enable_fp_fusion=False)  # NumPy rounds the product before the sum


@triton.jit
def encoded(x, KIND: tl.constexpr):
    """x (GROUPS, GROUP) float32 -> what is stored of it, its scales (GROUPS), and what will be read of it."""
    scale = tl.max(tl.abs(x), 1)
    if KIND == "bf16":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + (0x7FFF + ((bits >> 16) & 1))
        code = (tl.where(x != x, bits | (1 << 22), rounded) >> 16).to(tl.uint16)
    elif KIND == "fp16":
        bounded = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))  # beyond is infinity
        code = bounded.to(tl.float16).to(tl.uint16, bitcast=True)
    else:
        scale = tl.where(tl.max((x != x).to(tl.int32), 1) != 0, float("nan"), scale)  # which max may leave out
        scale = tl.div_rn(scale, 127.0)
        steps = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
        steps = tl.where(tl.abs(steps) < 128.0, steps, 0.0)  # what is not finite shows in its scale
        code = ((steps + ROUND) - ROUND).to(tl.int8)
    return code, scale, decoded(code, scale, KIND)


@triton.jit
def decoded(code, scale, KIND: tl.constexpr):
    if KIND == "bf16":
        x = (code.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        x = code.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = code.to(tl.float32) * scale[:, None]
    return x


@triton.jit
def places(row, group, per_row, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Where group number `group` of a row begins in the array of steps, and where its scale is."""
    at = (row * per_row + group) * GROUP
    if KIND == "int8":  # a row: its steps, and then its scales, of 4 bytes each
        at += row * per_row * 4
    return at, (row * (GROUP // 4 + 1) + GROUP // 4) * per_row + group


@triton.jit
def write(steps, scales, row, group, per_row, inside, x, KIND: tl.constexpr, GROUP: tl.constexpr):
    """Store the code of x (GROUPS, GROUP); -> what will be read of it."""
    at, scale_at = places(row, group, per_row, KIND, GROUP)
    code, scale, kept = encoded(x, KIND)
    tl.store(steps + at[:, None] + tl.arange(0, GROUP)[None, :], code, inside[:, None])
    if KIND == "int8":
        tl.store(scales + scale_at, scale, inside)
    return kept


@triton.jit
def read(steps, scales, row, group, per_row, inside, KIND: tl.constexpr, GROUP: tl.constexpr):
    """-> (GROUPS, GROUP) float32."""
    at, scale_at = places(row, group, per_row, KIND, GROUP)
    code = tl.load(steps + at[:, None] + tl.arange(0, GROUP)[None, :], inside[:, None], 0)
    scale = tl.zeros(inside.shape, tl.float32)
    if KIND == "int8":
        scale = tl.load(scales + scale_at, inside, 0.0)
    return decoded(code, scale, KIND)


@triton.jit
def tree_of_codes(
    steps, scales, row, group, per_row, inside, KIND: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """The sum of COUNT rows from `row` on: the largest power of two below COUNT of them, and then the others."""
    if COUNT == 1:
        total = read(steps, scales, row, group, per_row, inside, KIND, GROUP)
    else:
        HALF: tl.constexpr = triton.next_power_of_2(COUNT) // 2
        total = tree_of_codes(steps, scales, row, group, per_row, inside, KIND, GROUP, HALF)
        total += tree_of_codes(steps, scales, row + HALF, group, per_row, inside, KIND, GROUP, COUNT - HALF)
    return total


@triton.jit
def pack_kernel(
    steps, scales, lost, gradient, n, per_row, groups, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside, at = number < groups, number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(lost + at, inside[:, None], 0.0) + tl.load(gradient + at, at < n, 0.0)
    kept = write(steps, scales, number // per_row, number % per_row, per_row, inside, x, KIND, GROUP)
    tl.store(lost + at, x - kept, inside[:, None])


@triton.jit
def add_kernel(
    steps, scales, lost, come, come_scales, groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside, at = number < groups, number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    first = tl.zeros_like(number)
    total = tree_of_codes(come, come_scales, first, number, groups, inside, KIND, GROUP, COUNT)
    total += tl.load(lost + at, inside[:, None], 0.0)
    kept = write(steps, scales, first, number, groups, inside, total, KIND, GROUP)
    tl.store(lost + at, total - kept, inside[:, None])


@triton.jit
def unpack_kernel(
    gradient, steps, scales, n, per_row, KIND: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = read(steps, scales, number // per_row, number % per_row, per_row, number * GROUP < n, KIND, GROUP)
    tl.store(gradient + at, x, at < n)
