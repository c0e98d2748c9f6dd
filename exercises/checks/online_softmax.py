"""Checks of exercise 2.2: one step of the online softmax, and attention over several tiles, in the interpreter."""

import numpy as np
import triton
import triton.language as tl

from exercises.checks.common import random
from exercises.checks.flash import FP32, AttentionCase
from exercises.compare import expect
from stage2_cuda.attention.forward import softmax_step
from stage2_cuda.runtime.triton_launch import launch


@triton.jit
def step_kernel(p, new_max, new_sum, new_acc, s, row_max, row_sum, acc, scale, M: tl.constexpr, N: tl.constexpr):
    """Load the arguments of the student's softmax_step, call it, and store its four results; acc is (M, N) too."""
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    tile = rows[:, None] * N + cols[None, :]
    a, b, c, d = softmax_step(
        tl.load(s + tile), tl.load(row_max + rows), tl.load(row_sum + rows), tl.load(acc + tile), scale
    )
    tl.store(p + tile, a)
    tl.store(new_max + rows, b)
    tl.store(new_sum + rows, c)
    tl.store(new_acc + tile, d)


def online_softmax_step():
    rng, scale = random(), 0.7
    s, acc = rng.standard_normal((2, 4, 8)).astype(np.float32) * 2
    row_max, row_sum = np.float32([-3, 0.5, 5, -np.inf]), np.float32([2, 1, 3, 0])
    acc[3] = 0
    got = [np.full(shape, np.nan, np.float32) for shape in ((4, 8), 4, 4, (4, 8))]
    launch(step_kernel, (1,), *got, s, row_max, row_sum, acc, scale, M=4, N=8)
    s, old, total, acc = (array.astype(np.float64) for array in (s, row_max, row_sum, acc))
    top = np.maximum(old, scale * s.max(1))
    p, rescale = np.exp2(scale * s - top[:, None]), np.exp2(old - top)
    tile_max = scale * s.max(1)
    wrong_max = [
        (
            np.maximum(old, s.max(1)),
            "The maximum of s lacks the factor `scale`: the running maximum is that of scale s.",
        ),
        (tile_max, "The new maximum ignores the old one: take the larger of row_max and the maximum of the tile."),
    ]
    look = "softmax_step: the line that computes "
    expect("the new maximum", got[1], top, FP32, wrong_max, look + "the new maximum")
    wrong_p = [
        (np.exp2(s - top[:, None]), "p lacks the factor `scale`: p = exp2(scale s - new maximum)."),
        (np.exp2(scale * s), "p lacks the maximum: p = exp2(scale s - new maximum)."),
        (np.exp(scale * s - top[:, None]), "p is a power of e: the kernel computes in base 2, p = exp2(...)."),
        (np.exp2(scale * s - old[:, None]), "p uses the old maximum: subtract the new one."),
        (
            np.exp2(scale * s - tile_max[:, None]),
            "p uses the maximum of this tile: subtract the new maximum of the row.",
        ),
    ]
    expect("p", got[0], p, FP32, wrong_p, look + "p")
    with np.errstate(all="ignore"):
        inverse = np.exp2(top - old)
        wrong_sum = [
            (
                total + p.sum(1),
                "row_sum is not rescaled to the new maximum: multiply it by exp2(row_max - new maximum).",
            ),
            (total * rescale, "The sum of p is not added to row_sum."),
            (p.sum(1), "The old row_sum is lost: the new one is row_sum * exp2(row_max - new maximum) + sum of p."),
            (
                (total + p.sum(1)) * rescale,
                "The sum of p is rescaled too: only the old row_sum is relative to the old maximum.",
            ),
            (total * inverse + p.sum(1), "The sign of the exponent is wrong: rescale by exp2(row_max - new maximum)."),
        ]
        expect("row_sum", got[2], total * rescale + p.sum(1), FP32, wrong_sum, look + "row_sum")
        wrong_acc = [
            (acc, "acc is not rescaled to the new maximum: multiply its rows by exp2(row_max - new maximum)."),
            (acc * inverse[:, None], "The sign of the exponent is wrong: rescale by exp2(row_max - new maximum)."),
            (acc + p, "p is added to acc: the caller adds p v; only rescale acc."),
        ]
        expect("acc", got[3], acc * rescale[:, None], FP32, wrong_acc, look + "acc")


def expect_attention(T, size=1.0):
    case = AttentionCase(T, size)
    y, lse = case.forward()
    look = "softmax_step: are row_sum and acc rescaled when the maximum of a row rises?"
    expect(f"lse of {T} positions", lse, case.lse[..., 0], FP32, look=look)
    expect(f"y of {T} positions", y, case.y, FP32, look=look)


def online_softmax_tiles():
    expect_attention(40)


def online_softmax_large():
    expect_attention(40, size=12.0)
