"""Checks of exercise 0.3: causal attention and its gradient in float64, and three training steps."""

# B batch, T time, C channels, H heads, D = C // H

import numpy as np

from exercises.checks.common import expect_curve, expect_unchanged, random
from exercises.compare import Mismatch, expect

FP64 = 1e-12  # relative norm: a few roundings of 1e-16, more in a sum


def attention_case(T):
    """(the student's backend, qkv (2, T, 24), dy (2, T, 8), heads H = 2): more than one block of queries, D = 4."""
    from stage0_serial.numpy_backend import NumpyBackend

    rng = random()
    return NumpyBackend("fp64"), rng.standard_normal((2, T, 24)), rng.standard_normal((2, T, 8)), 2


def heads_of(array, parts, H):
    """(B, T, parts C) as (parts, B, H, T, D)."""
    B, T, columns = array.shape
    return array.reshape(B, T, parts, H, -1).transpose(2, 0, 3, 1, 4)


def joined(array):
    """(B, H, T, D) as (B, T, C)."""
    B, H, T, D = array.shape
    return array.transpose(0, 2, 1, 3).reshape(B, T, H * D)


def exponentials(q, k, scale, mask=0, shifted=True):
    """exp(s - the maximum of each row), s = scale q k', with the keys up to query + mask; mask None: all keys.

    shifted=False: exp(s).
    """
    s = scale * q @ k.swapaxes(-1, -2)
    if mask is not None:
        s = np.where(np.tri(*s.shape[-2:], mask, dtype=bool), s, -np.inf)
    with np.errstate(all="ignore"):  # a mask of -1 leaves no key for the first query
        return np.exp(s - s.max(-1, keepdims=True) if shifted else s)


def probabilities(q, k, scale, mask=0):
    """softmax(scale q k') with the keys up to query + mask; mask None: all keys."""
    e = exponentials(q, k, scale, mask)
    with np.errstate(all="ignore"):
        return e / e.sum(-1, keepdims=True)


def attention_output(backend, qkv, H):
    given = qkv.copy()
    got = backend.attention_forward(given, H)
    expect_unchanged("attention_forward", "its input qkv", given, qkv)
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Mismatch("attention_forward must return two values", "Return y, aux; aux is what your backward needs.")
    return got


def for_two_lengths(check):
    """The check without arguments that runs check(T) for a short and for a longer sequence."""

    def run():
        for T in (6, 70):
            check(T)

    return run


@for_two_lengths
def attention_values(T):
    backend, qkv, _, H = attention_case(T)
    y, _ = attention_output(backend, qkv, H)
    q, k, v = heads_of(qkv, 3, H)
    D = q.shape[-1]
    p = probabilities(q, k, D**-0.5)
    raw = np.where(np.tri(T, dtype=bool), np.exp(q @ k.swapaxes(-1, -2) * D**-0.5), 0)
    columns = raw / raw.sum(-2, keepdims=True)
    want = joined(p @ v)
    wrong = [
        (joined(probabilities(q, k, 1.0) @ v), "The scores lack the factor 1/sqrt(D)."),
        (joined(probabilities(q, k, 1 / D) @ v), "The scores are divided by D: the factor is 1/sqrt(D)."),
        (
            joined(probabilities(q, k, qkv.shape[2] ** -0.5 * 3**0.5) @ v),
            "The scores are divided by sqrt(C): the factor is 1/sqrt(D), with D = C / n_head.",
        ),
        (joined(probabilities(q, k, D**-0.5, None) @ v), "The causal mask is missing: query i attends to keys 0 to i."),
        (
            joined(probabilities(q, k, D**-0.5, 1) @ v),
            "The causal mask is off by one: query i also attends to key i + 1. It attends to the keys 0 to i.",
        ),
        (
            joined(probabilities(q, k, D**-0.5, -1) @ v),
            "The causal mask is off by one: query i does not attend to its own key i. It attends to the keys 0 to i.",
        ),
        (joined(raw @ v), "The result is not divided by the sum of the exponentials of each row."),
        (
            joined(columns @ v),
            "The softmax runs along the queries: it runs along the keys, the last axis of the scores.",
        ),
        ((p @ v).reshape(want.shape), "The heads are not moved back: transpose (H, T, D) to (T, H, D) before reshape."),
    ]
    expect(
        f"y of {T} positions",
        y,
        want,
        FP64,
        wrong,
        "attention_forward: the scores, the mask, the softmax and the product with v",
    )


def attention_future():
    backend, qkv, _, H = attention_case(70)
    before = np.array(attention_output(backend, qkv, H)[0])
    changed = qkv.copy()
    changed[:, 40:] += 1
    after = attention_output(backend, changed, H)[0]
    expect(
        "y of the positions 0 to 39, after a change of the positions from 40 on", after[:, :40], before[:, :40], FP64,
        look="the causal mask in attention_forward: query i attends to the keys 0 to i",
    )  # fmt: skip
    if np.array_equal(after[:, 40:], before[:, 40:]):
        raise Mismatch("y does not depend on the input", "Look at attention_forward.")


@for_two_lengths
def attention_gradient(T):
    backend, qkv, dy, H = attention_case(T)
    y, aux = attention_output(backend, qkv, H)
    given = dy.copy(), qkv.copy()
    dqkv = backend.attention_backward(*given, y, aux, H)
    for name, array, before in zip(("dy", "qkv"), given, (dy, qkv), strict=True):
        expect_unchanged("attention_backward", f"its input {name}", array, before)
    q, k, v = heads_of(qkv, 3, H)
    (g,) = heads_of(dy, 1, H)
    scale = q.shape[-1] ** -0.5
    p = probabilities(q, k, scale)
    dp = g @ v.swapaxes(-1, -2)
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta)
    if dqkv is None or np.shape(dqkv) != qkv.shape:
        raise Mismatch(
            f"attention_backward must return dqkv {qkv.shape}", "Return the gradients of q, k, v side by side."
        )
    got_q, got_k, got_v = np.split(np.asarray(dqkv), 3, axis=2)

    def dq(ds, scale=scale):
        return joined(ds @ k * scale)

    def dk(ds, scale=scale):
        return joined(ds.swapaxes(-1, -2) @ q * scale)

    without_delta = "ds lacks the term delta = sum(dp * p) of each row: ds = p * (dp - delta)."
    not_p = "ds lacks the factor p: ds = p * (dp - delta)."
    sign = "The sign of delta is wrong: ds = p * (dp - delta)."
    look = "attention_backward: "
    not_transposed = [p @ g]
    for e in (exponentials(q, k, scale), exponentials(q, k, scale, shifted=False)):
        not_transposed.append(e @ (g / e.sum(-1, keepdims=True)))
    wrong = [
        *((joined(dv), "dv lacks a transpose: it is p' dy, with the transpose of p.") for dv in not_transposed),
        (joined(p.swapaxes(-1, -2) @ g * scale), "dv has a factor 1/sqrt(D) too many: only dq and dk have it."),
    ]
    expect("dv", got_v, joined(p.swapaxes(-1, -2) @ g), FP64, wrong, look + "the line that computes dv = p' dy")
    for name, got, gradient, other in (("dq", got_q, dq, k), ("dk", got_k, dk, q)):
        wrong = [
            (gradient(ds, 1.0), f"{name} lacks the factor 1/sqrt(D)."),
            (gradient(ds, scale**2), f"{name} has the factor 1/sqrt(D) twice."),
            (gradient(p * dp), without_delta),
            (gradient(dp - delta), not_p),
            (gradient(p * (dp + delta)), sign),
            (
                joined((ds.swapaxes(-1, -2) if name == "dq" else ds) @ other * scale),
                f"{name} uses {'the transpose of ds' if name == 'dq' else 'ds'}: dq = ds k, but dk = ds' q.",
            ),
        ]
        expect(name, got, gradient(ds), FP64, wrong, look + f"the line that computes {name}, and ds = p * (dp - delta)")


def attention_model():
    from stage0_serial.numpy_backend import NumpyBackend

    expect_curve(NumpyBackend, "attention_forward and attention_backward: are arrays reused that are still needed?")
