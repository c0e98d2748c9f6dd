"""Checks of exercise 0.2: the gradient of LayerNorm in float64, and three training steps."""

# C channels

import numpy as np

from exercises.checks.common import arrays, expect_curve, expect_unchanged, random
from exercises.compare import Mismatch, expect, is_near

FP64 = 1e-12  # relative norm: a few roundings of 1e-16, more in a sum
LAYERNORM = "residual_layernorm_backward"


def layernorm_case(ds=False, lead=(2, 3)):
    """(the student's dx, da_bias, dw, db; float64 arrays x, r, h, g, dy, ds by name) for 6 rows of 8 channels.

    lead: the leading axes of the arrays: (B, T), or (M, B, T) for M micro-batches.

    Raises Mismatch if an input is overwritten.
    """
    from stage0_serial.numpy_backend import NumpyBackend

    rng, backend = random(), NumpyBackend("fp64")
    x, dy = rng.standard_normal((*lead, 8)), rng.standard_normal((*lead, 8))
    w, residual = rng.standard_normal(8) + 1, rng.standard_normal((*lead, 8)) if ds else None
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    r = 1 / np.sqrt(variance + 1e-5)
    h = (x - mean) * r
    inputs = {"ds": residual, "dy": dy, "w": w, "h, aux[0]": h, "r, aux[1]": r.reshape(-1)}
    given = {name: None if array is None else array.copy() for name, array in inputs.items()}
    ds_given, dy_given, w_given, *aux = given.values()
    got = backend.residual_layernorm_backward(ds_given, dy_given, w_given, tuple(aux))
    for name, array in inputs.items():
        if array is not None:
            expect_unchanged(LAYERNORM, f"its input {name}", given[name], array)
    if not isinstance(got, tuple | list) or len(got) != 4:
        raise Mismatch(f"{LAYERNORM} must return 4 arrays", "Return dx, da_bias, dw, db, in this order.")
    return arrays(got), dict(x=x, dy=dy, w=w, r=r, h=h, g=dy * w, ds=residual)


def mean(array):
    return array.mean(-1, keepdims=True)


def expect_order(got, case):
    """Raise Mismatch if `got` has the right dx and then da_bias, dw and db in another order."""
    dx, h, dy = (np.reshape(array, (6, 8)) for array in (got[0], case["h"], case["dy"]))
    names, right = ["da_bias", "dw", "db"], [dx.sum(0), (dy * h).sum(0), dy.sum(0)]
    order = [name for array in got[1:] for name, sums in zip(names, right, strict=True) if is_close(array, sums)]
    if sorted(order) == sorted(names) and order != names:
        raise Mismatch(
            f"{LAYERNORM} returns dx, {', '.join(order)}", "Wrong order? Return dx, da_bias, dw, db, in this order."
        )


def is_close(array, sums):
    return np.shape(array) == sums.shape and is_near(np.asarray(array), sums, 1e-6)


def layernorm_dx():
    (dx, *_), case = layernorm_case()
    r, h, g, dy = (case[name] for name in ("r", "h", "g", "dy"))
    want = r * (g - mean(g) - h * mean(g * h))
    wrong = [
        (r * (g - h * mean(g * h)), "dx lacks the term mean(g): the mean of the row also depends on x."),
        (r * (g - mean(g)), "dx lacks the term h * mean(g * h): the variance of the row also depends on x."),
        (r * g, "dx lacks the terms mean(g) and h * mean(g * h)."),
        (
            r * (g - mean(g) + h * mean(g * h)),
            "The sign of h * mean(g * h) is wrong: both terms are subtracted from g.",
        ),
        (r * (g + mean(g) - h * mean(g * h)), "The sign of mean(g) is wrong: both terms are subtracted from g."),
        (r * (g - mean(g) - mean(g * h)), "The term mean(g * h) lacks its factor h."),
        (g - mean(g) - h * mean(g * h), "dx lacks the factor r = rstd."),
        ((g - mean(g) - h * mean(g * h)) / r, "dx is divided by r = rstd: multiply by it."),
        (r * (dy - mean(dy) - h * mean(dy * h)), "dx lacks the weight: use g = dy * w in place of dy."),
        (
            r * (g - mean(g) - h * mean(dy * h)),
            "The second term lacks the weight: it is h * mean(g * h) with g = dy * w.",
        ),
        (
            r * (g - g.sum(-1, keepdims=True) - h * (g * h).sum(-1, keepdims=True)),
            "The two terms are means over the C channels, not sums: divide by C.",
        ),
    ]
    expect("dx", dx, want, FP64, wrong, f"the lines of {LAYERNORM} that compute dx")


def layernorm_parameters():
    got, case = layernorm_case()
    if np.shape(got[0]) == case["dy"].shape:
        expect_order(got, case)
    _, _, dw, db = got
    dy, h, g, x = (case[name].reshape(6, 8) for name in ("dy", "h", "g", "x"))
    wrong_dw = [
        (dy.sum(0), "dw lacks the factor h: it is the sum over the rows of dy * h."),
        (
            (g * h).sum(0),
            "dw contains the weight: it is the sum over the rows of dy * h, with dy, not with g = dy * w.",
        ),
        ((dy * x).sum(0), "dw uses x in place of the normalised h."),
    ]
    wrong_db = [
        (g.sum(0), "db contains the weight: it is the sum over the rows of dy, not of g = dy * w."),
        ((dy * h).sum(0), "db is the sum over the rows of dy, without h."),
    ]
    rows = [(1 / 6, "{} is a mean over the rows: use a sum over the rows.")]
    look = f"the sums over the rows in {LAYERNORM}"
    expect("dw", dw, (dy * h).sum(0), FP64, wrong_dw, look, [(f, hint.format("dw")) for f, hint in rows])
    expect("db", db, dy.sum(0), FP64, wrong_db, look, [(f, hint.format("db")) for f, hint in rows])


def layernorm_residual():
    (dx, da_bias, *_), case = layernorm_case(ds=True)
    r, h, g, ds = (case[name] for name in ("r", "h", "g", "ds"))
    through = r * (g - mean(g) - h * mean(g * h))
    wrong = [
        (through, "dx lacks ds: the gradient of the residual stream is added to the gradient through LayerNorm."),
        (through + r * ds, "ds is multiplied by rstd: add it after the multiplication."),
    ]
    expect("dx", dx, through + ds, FP64, wrong, f"the place of {LAYERNORM} where ds is added")
    total = (through + ds).reshape(6, 8)
    wrong = [
        (through.reshape(6, 8).sum(0), "da_bias is the sum over the rows of the complete dx, ds included."),
        (ds.reshape(6, 8).sum(0), "da_bias is the sum over the rows of the complete dx, not only of ds."),
    ]
    expect("da_bias", da_bias, total.sum(0), FP64, wrong, "the column sums of dx", [(1 / 6, "da_bias is a mean.")])


def layernorm_model():
    from stage0_serial.numpy_backend import NumpyBackend

    look = f"the sums in {LAYERNORM}: rows() has the rows of all micro-batches, and each sum is over all of them"
    (dx, *sums), case = layernorm_case(lead=(3, 1, 2))
    terms = dx, case["dy"] * case["h"], case["dy"]
    for name, got, term in zip(("da_bias", "dw", "db"), sums, terms, strict=True):
        expect(f"{name} of three micro-batches", got, term.reshape(6, 8).sum(0), FP64, (), look)
    expect_curve(NumpyBackend, look)
