"""Checks of case 5: attention with scores of any size against its formula, and ordinary training."""

import numpy as np

from exercises.checks.attention import heads_of, joined, probabilities
from exercises.checks.common import expect_curve, random
from exercises.compare import Mismatch, expect

FP32 = 2e-5  # relative norm: float32 rounds to 6e-8, and a score of 300 to 3e-5
T, H, D = 24, 2, 4


def case(low, high, seed=0):
    """qkv (1, T, 3HD) whose scores of each query with all keys are near one number between `low` and `high`."""
    rng = random(seed)
    level = np.linspace(low, high, T)[None, None, :, None]
    q = np.sign(level) * np.ones((1, H, T, D)) * np.sqrt(np.abs(level))
    k = np.ones((1, H, T, D)) * np.sqrt(np.abs(level))
    q, k = q * np.sqrt(1 / D**0.5), k * np.sqrt(1 / D**0.5)
    q, k = (each + 0.01 * rng.standard_normal(each.shape) for each in (q, k))
    v = rng.standard_normal((1, H, T, D))
    return np.concatenate([joined(each) for each in (q, k, v)], 2).astype(np.float32)


def expect_formula(low, high, seed=0, gradients=False):
    from stage0_serial.numpy_backend import NumpyBackend

    backend, qkv = NumpyBackend(), case(low, high, seed)
    q, k, v = (each.astype(np.float64) for each in heads_of(qkv, 3, H))
    p, name = probabilities(q, k, D**-0.5), f"scores from {low} to {high}"
    y, aux = backend.attention_forward(qkv.copy(), H)
    if not np.isfinite(y).all():
        raise Mismatch(f"{name}: {int((~np.isfinite(y)).sum())} of {y.size} elements of y are not finite")
    expect(f"{name}: y", y, joined(p @ v), FP32 * max(1, abs(low), abs(high)))
    if gradients:
        dy = random(seed + 1).standard_normal(y.shape).astype(np.float32)
        (g,) = heads_of(dy.astype(np.float64), 1, H)
        dp = g @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * D**-0.5
        want = [joined(each) for each in (ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ g)]
        got = np.split(backend.attention_backward(dy, qkv, y, aux, H), 3, 2)
        for letter, a, b in zip("qkv", got, want, strict=True):
            expect(f"{name}: d{letter}", a, b, 10 * FP32 * max(1, abs(low), abs(high)))


def large_weights_give_finite_numbers():
    expect_formula(-150, -120)
    expect_formula(-150, 5)


SIZES = (-3, 3), (-40, -30), (-90, -60), (-200, -190), (40, 50), (60, 90), (200, 220), (-300, 300), (-110, -95)


def size_of_the_numbers_does_not_change_the_formula():
    for low, high in SIZES:
        for seed in range(2):
            expect_formula(low, high, seed)


def gradients_are_those_of_the_formula():
    for low, high in SIZES:
        expect_formula(low, high, gradients=True)


def ordinary_training_is_unchanged():
    from stage0_serial.numpy_backend import NumpyBackend

    expect_curve(NumpyBackend, "")
