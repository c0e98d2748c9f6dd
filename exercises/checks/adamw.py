"""Checks of exercise 0.4: AdamW against the textbook formulas in float64, and three training steps."""

import numpy as np

from exercises.checks.common import expect_curve, expect_unchanged, random, real
from exercises.compare import expect

FP64 = 1e-12  # relative norm: a few roundings of 1e-16, more in a sum
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.8, 0.95, 1e-3, 0.1


def adamw_coefficients():
    from gpt2core.optimizer import AdamW

    for step in (1, 3):
        c1, c2 = 1 - BETA1**step, 1 - BETA2**step
        after1, after2 = 1 - BETA1 ** (step + 1), 1 - BETA2 ** (step + 1)
        shrink, root = 1 - LR * DECAY, np.sqrt(c2)
        wrong = [
            ([LR, EPS, shrink], "The bias corrections c1 = 1 - beta1^step and c2 = 1 - beta2^step are missing."),
            ([LR / c1 * root, EPS, shrink], "eps is not multiplied by sqrt(c2): see the page for why it must be."),
            ([LR / c1, EPS * root, shrink], "rate lacks the factor sqrt(c2)."),
            ([LR / c1 * c2, EPS * c2, shrink], "c2 appears without its square root."),
            (
                [LR / after1 * np.sqrt(after2), EPS * np.sqrt(after2), shrink],
                "The exponent is off by one: it is `step`.",
            ),
            (
                [LR * c1 / root, EPS * root, shrink],
                "rate is multiplied by c1 and divided by sqrt(c2): it is lr / c1 * sqrt(c2).",
            ),
            ([LR / c1 * root, EPS * root, LR * DECAY], "shrink is 1 - lr * weight_decay."),
            ([LR / c1 * root, EPS * root, 1 - DECAY], "shrink lacks the learning rate: it is 1 - lr * weight_decay."),
        ]
        want = np.array([LR / c1 * root, EPS * root, shrink])
        got = AdamW(BETA1, BETA2, EPS, DECAY).coefficients(step, LR)
        expect(f"AdamW.coefficients(step={step})", got, want, FP64, wrong, "the body of AdamW.coefficients")


def adamw_run(steps, factor=1.0, decays=(1, 0)):
    """(p, m, v) of the student's adamw_step after some steps from p0, and the gradients; two arena blocks."""
    from stage0_serial.numpy_backend import NumpyBackend

    rule = real("gpt2core/optimizer.py").AdamW(BETA1, BETA2, EPS, DECAY)
    rng = random(4)
    p, m, v = rng.standard_normal(2048), np.zeros(2048), np.zeros(2048)
    start, gradients = p.copy(), [rng.standard_normal(2048) * 0.1 for _ in range(steps)]
    backend = NumpyBackend("fp64")
    for number, g in enumerate(gradients, 1):
        numbers, flags = rule.coefficients(number, LR), np.array(decays, np.int32)
        given = g.copy()
        backend.adamw_step(p, m, v, given, numbers, np.float64(factor), flags, (BETA1, BETA2))
        expect_unchanged("adamw_step", "its input g", given, g)
    return (p, m, v), start, gradients


def adamw_moments():
    (_, m, v), _, gradients = adamw_run(2)
    squares = [g * g for g in gradients]
    nothing = np.zeros(2048)
    in_place = "The array is not changed: adamw_step must change p, m and v in place, as in m[...] = ..."
    wrong = [
        (nothing, in_place),
        (
            running_mean(gradients, BETA1, new=BETA1, old=1 - BETA1),
            "beta1 and 1 - beta1 are exchanged: m = beta1 m + ...",
        ),
        (running_mean(gradients, BETA1, new=1.0), "The factor 1 - beta1 of g is missing: m = beta1 m + (1 - beta1) g."),
        (running_mean(gradients, BETA1, old=1.0), "m is not multiplied by beta1: m = beta1 m + (1 - beta1) g."),
        (running_mean(gradients, BETA1, old=0.0), "The old m is lost: m = beta1 m + (1 - beta1) g."),
        (running_mean(gradients, BETA1, old=BETA2), "m is multiplied by beta2: m = beta1 m + (1 - beta1) g."),
        (running_mean(gradients, BETA2), "m uses beta2: `betas` is (beta1, beta2)."),
    ]
    expect("m", m, running_mean(gradients, BETA1), FP64, wrong, "the line of adamw_step that updates m")
    wrong = [
        (nothing, in_place),
        (
            running_mean(squares, BETA2, new=BETA2, old=1 - BETA2),
            "beta2 and 1 - beta2 are exchanged: v = beta2 v + ...",
        ),
        (
            running_mean(squares, BETA2, new=1.0),
            "The factor 1 - beta2 of g^2 is missing: v = beta2 v + (1 - beta2) g^2.",
        ),
        (running_mean(squares, BETA2, old=1.0), "v is not multiplied by beta2: v = beta2 v + (1 - beta2) g^2."),
        (running_mean(squares, BETA2, old=0.0), "The old v is lost: v = beta2 v + (1 - beta2) g^2."),
        (running_mean(gradients, BETA2), "v lacks the square: v = beta2 v + (1 - beta2) g^2."),
        (running_mean(squares, BETA2, old=BETA1), "v is multiplied by beta1: v = beta2 v + (1 - beta2) g^2."),
        (running_mean(squares, BETA1), "v uses beta1: `betas` is (beta1, beta2)."),
    ]
    expect("v", v, running_mean(squares, BETA2), FP64, wrong, "the line of adamw_step that updates v")


def running_mean(arrays, beta, new=None, old=None):
    """old * mean + new * array for each array; the defaults are beta and 1 - beta."""
    mean = 0.0
    for array in arrays:
        mean = (beta if old is None else old) * mean + (1 - beta if new is None else new) * array
    return mean


def textbook_adamw(p, gradients, decay, *, sign=1, where="p", root=True, inside=False, eps=EPS):
    """AdamW as in the paper, or with one mistake."""
    p, m, v = p.copy(), 0.0, 0.0
    for step, g in enumerate(gradients, 1):
        if where == "gradient":
            g = g + decay * p
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        mh, vh = m / (1 - BETA1**step), v / (1 - BETA2**step)
        if where == "p":
            p = p * (1 - LR * decay)
        divisor = np.sqrt(vh + eps) if inside else (np.sqrt(vh) if root else vh) + eps
        p = p - sign * LR * mh / divisor
    return p


def adamw_parameters():
    (p, *_), start, gradients = adamw_run(3)
    decay = np.repeat([DECAY, 0.0], 1024)  # the second block has no weight decay
    want = textbook_adamw(start, gradients, decay)
    wrong = [
        (start, "p is not changed: adamw_step must change p in place, as in p -= ..."),
        (
            textbook_adamw(start, gradients, decay, sign=-1),
            "The sign of the update is wrong: p -= rate m / (sqrt(v) + eps).",
        ),
        (
            textbook_adamw(start, gradients, 0 * decay),
            "Weight decay is missing: p is multiplied by shrink where decays is 1.",
        ),
        (
            textbook_adamw(start, gradients, decay * 0 + DECAY),
            "Weight decay is applied to every block: `decays` has one flag for each block of 1024 elements.",
        ),
        (textbook_adamw(start, gradients, decay[::-1]), "The flags of `decays` are used the wrong way round."),
        (
            textbook_adamw(start, gradients, decay, where="gradient"),
            "Weight decay is added to the gradient: it shrinks p.",
        ),
        (textbook_adamw(start, gradients, decay, eps=0), "eps is missing: the update divides by sqrt(v) + eps."),
        (textbook_adamw(start, gradients, decay, root=False), "The update divides by v: it divides by sqrt(v) + eps."),
        (
            textbook_adamw(start, gradients, decay, inside=True),
            "eps is inside the square root: the update divides by sqrt(v) + eps.",
        ),
    ]
    expect("p", p, want, 1e-10, wrong, "the lines of adamw_step that update p")


def adamw_scale():
    (_, m, _), _, (g,) = adamw_run(1, factor=0.5)
    wrong = [((1 - BETA1) * g, "The argument factor is ignored: the gradient is g * factor.")]
    expect("m with a factor of 0.5", m, (1 - BETA1) * 0.5 * g, FP64, wrong, "factor in adamw_step")
    (p, m, v), start, _ = adamw_run(1, factor=float("nan"))
    hint = "factor is NaN after a gradient that is not finite: adamw_step must return before it changes anything"
    for name, got, want in (("p", p, start), ("m", m, 0 * start), ("v", v, 0 * start)):
        expect(f"{name} with a factor of NaN", got, want, 0, [(np.full(2048, np.nan), hint + ".")], hint)


def adamw_model():
    from stage0_serial.numpy_backend import NumpyBackend

    expect_curve(NumpyBackend, "adamw_step: is g changed, although it belongs to the caller?")
