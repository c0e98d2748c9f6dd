"""Checks of exercise 2.5: cross-entropy and its gradient, in Triton's interpreter."""

# V vocabulary

import numpy as np

from exercises.checks.common import random
from exercises.checks.guarded import guarded
from exercises.compare import expect
from stage2_cuda.kernels import cross_entropy

FP32 = 1e-5  # relative norm: a few roundings of 6e-8, more in a sum


class EntropyCase:
    """Logits (3, width) whose first V columns are tokens, targets, and all results in float64; scale 0.5."""

    def __init__(self, vocab, width, targets=None):
        rng = random()
        self.vocab, self.width, self.scale = vocab, width, 0.5
        # the maximum rises along a row, so that an online softmax must rescale its sum
        rows = rng.standard_normal((3, width)) + np.linspace(0, 8, width)
        self.logits, _ = guarded(rows)
        self.logits[:, vocab:] = 77  # padding, which must not change a result
        self.targets = np.array([0, vocab // 2, vocab - 1] if targets is None else targets, np.int32)
        own = np.flatnonzero((self.targets >= 0) & (self.targets < vocab))  # the rows whose target this rank has
        x = self.x = self.logits[:, :vocab].astype(np.float64)
        self.maxima, self.target_logits = x.max(1), np.zeros(3)
        self.target_logits[own] = x[own, self.targets[own]]
        self.sums = np.exp(x - self.maxima[:, None]).sum(1)
        softmax = np.exp(x - self.maxima[:, None]) / self.sums[:, None]
        self.softmax, self.onehot = np.zeros((3, width)), np.zeros((3, width))
        self.softmax[:, :vocab] = softmax
        self.onehot[own, self.targets[own]] = 1

    def empty(self, *shape):
        return guarded(np.full(shape, np.nan))[0]

    def statistics(self):
        got = self.empty(3), self.empty(3), self.empty(3)
        cross_entropy.cross_entropy_forward(*got, self.logits, self.targets, self.vocab)
        return got

    def sums_not_rescaled(self):
        """The sums of an online softmax in groups of 8 columns that does not rescale the sum so far."""
        block = cross_entropy.tile_size(self.logits)[0]
        top, total = np.full((3, block // 8), -2e38), np.zeros((3, block // 8))
        for start in range(0, self.vocab // block * block, block):
            x = self.x[:, start : start + block].reshape(3, -1, 8)
            top = np.maximum(top, x.max(2))
            total = total + np.exp(x - top[:, :, None]).sum(2)
        tail = np.exp(self.x[:, self.vocab // block * block :] - self.maxima[:, None]).sum(1)
        return (total * np.exp(top - self.maxima[:, None])).sum(1) + tail

    def expect_statistics(self, got, place):
        maxima, sums, target_logits = got
        expect("maxima", maxima, self.maxima, FP32, look=f"the new maximum in online_update, and {place}")
        wrong = [(np.log(self.sums), "The sum is stored as its logarithm: store the sum itself.")]
        if self.vocab > 8192:
            hint = "The sum so far is not rescaled when the maximum rises: multiply it by exp(old - new maximum)."
            wrong.append((self.sums_not_rescaled(), hint))
        expect("sums", sums, self.sums, FP32, wrong, f"the sum in online_update, and {place}")
        expect("target_logits", target_logits, self.target_logits, FP32, look=place)

    def expect_gradient(self, got, look):
        p, onehot, scale = self.softmax, self.onehot, self.scale
        padding = np.zeros_like(p)
        padding[:, self.vocab :] = 1
        stray = np.zeros_like(onehot)  # the column of a target of another rank, if it is in the padding
        inside = np.flatnonzero((self.targets >= self.vocab) & (self.targets < self.width))
        stray[inside, self.targets[inside]] = 1
        wrong = [
            (
                scale * (p - onehot - stray),
                "A target of another rank is subtracted in the padding: columns >= vocab become 0.",
            ),
            (scale * p, "The gradient lacks the term of the target: subtract scale in the target's column."),
            (scale * (p + onehot), "The sign of the target's term is wrong: it is subtracted."),
            (scale * p - onehot, "The target's term lacks the factor scale."),
            (p - scale * onehot, "The softmax lacks the factor scale: weight is scale / sum."),
            (p - onehot, "The gradient lacks the factor scale."),
            (scale * (p * self.sums[:, None] - onehot), "The exponentials are not divided by the sum: use `weight`."),
            (scale * (p - np.roll(onehot, 1, 1)), "The target's term is one column late: compare cols with target."),
            (
                scale * (p - onehot) + np.where(padding, np.nan, 0),
                "The padding is not written: columns >= vocab become 0.",
            ),
        ]
        expect("dlogits", got, scale * (p - onehot), FP32, wrong, look)

    def fused(self):
        dlogits, statistics = self.empty(3, self.width), (self.empty(3), self.empty(3), self.empty(3))
        cross_entropy.cross_entropy_forward_backward(
            dlogits, *statistics, self.logits, self.targets, self.scale, self.vocab
        )
        return dlogits, statistics


def cross_entropy_statistics():
    for vocab, width in ((20, 24), (2 * 8192 + 100, 2 * 8192 + 112)):
        case = EntropyCase(vocab, width)
        case.expect_statistics(case.statistics(), "row_statistics, which calls it for each tile")


def cross_entropy_gradient():
    expect_separate(EntropyCase(20, 24))
    expect_separate(EntropyCase(20, 24, targets=[3, 22, -5]))  # two targets of other ranks, one of them in the padding


def expect_separate(case):
    dlogits = case.empty(3, 24)
    maxima, sums = (np.float32(array) for array in (case.maxima, case.sums))
    arguments = dlogits, case.logits, case.targets, maxima, sums, case.scale, case.vocab
    cross_entropy.cross_entropy_backward(*arguments)
    case.expect_gradient(
        dlogits, "write_gradient: weight exp(logits - maximum) - scale onehot(target), 0 in the padding"
    )


def expect_fused(vocab, width):
    case = EntropyCase(vocab, width)
    dlogits, statistics = case.fused()
    case.expect_statistics(statistics, "the three tl.store of forward_backward_kernel")
    case.expect_gradient(dlogits, "forward_backward_kernel: the columns of each tile, and the column of the target")


def cross_entropy_fused():
    expect_fused(20, 24)


def cross_entropy_fused_tiles():
    expect_fused(8192 + 100, 8192 + 112)
