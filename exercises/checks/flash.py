"""Flash attention in float64 and by the student's kernels; typical mistakes of its gradients."""

# T time, C channels, H heads, D head size

import numpy as np

from exercises.checks.common import random
from stage2_cuda.attention import launches as attention
from stage2_cuda.attention.launches import AttentionTiles, TileConfig

FP32 = 1e-5  # relative norm: a few roundings of 6e-8, more in a sum
TILE = TileConfig(16, 16, 4, 1)


class AttentionCase:
    """qkv (1, T, 3C), dy (1, T, C) in float32, and all results of attention in float64; H = 2, D = 8."""

    def __init__(self, T, size=1.0):
        rng, self.H, self.T = random(), 2, T
        self.qkv = (rng.standard_normal((1, T, 48)) * size).astype(np.float32)
        self.dy_packed = rng.standard_normal((1, T, 16)).astype(np.float32)
        self.q, self.k, self.v = self.qkv.astype(np.float64).reshape(T, 3, 2, 8).transpose(1, 2, 0, 3)  # (H, T, D)
        self.dy = self.dy_packed.astype(np.float64).reshape(T, 2, 8).transpose(1, 0, 2)
        self.scale = 8**-0.5
        self.mask = np.tri(T, dtype=bool)
        self.raw = self.scale * self.q @ self.k.swapaxes(1, 2)
        s = np.where(self.mask, self.raw, -np.inf)
        peak = s.max(-1, keepdims=True)
        self.lse = peak + np.log(np.exp(s - peak).sum(-1, keepdims=True))
        self.p = np.exp(s - self.lse)
        self.y = self.p @ self.v
        self.dp = self.dy @ self.v.swapaxes(1, 2)
        self.delta = (self.dy * self.y).sum(-1, keepdims=True)
        self.ds = self.p * (self.dp - self.delta)
        self.dq, self.dk = self.ds @ self.k * self.scale, self.ds.swapaxes(1, 2) @ self.q * self.scale
        self.dv = self.p.swapaxes(1, 2) @ self.dy

    def forward(self):
        """The student's (y (H, T, D), lse (H, T) as a natural logarithm)."""
        y, lse = np.full((1, self.T, 16), np.nan, np.float32), np.full((1, self.H, self.T), np.nan, np.float32)
        attention.attention_forward(y, lse, self.qkv, self.H, tiles=AttentionTiles(forward=TILE))
        return self.unpacked(y)[0], lse[0] * np.log(2)

    def backward(self, tiles, delta=None):
        """The student's (dq, dk, dv (H, T, D), delta (H, T)); delta: the given one, or NaN for the kernel to write."""
        dqkv = np.full((1, self.T, 48), np.nan, np.float32)
        delta = np.full((1, self.H, self.T), np.nan, np.float32) if delta is None else np.float32(delta)[None, ..., 0]
        y = np.ascontiguousarray(self.y.transpose(1, 0, 2).reshape(1, self.T, 16), np.float32)
        lse = np.ascontiguousarray(self.lse[None, ..., 0] / np.log(2), np.float32)
        delta = np.ascontiguousarray(delta)
        attention.attention_backward(dqkv, delta, self.dy_packed, self.qkv, y, lse, self.H, tiles=tiles)
        return *self.unpacked(dqkv), delta[0]

    def unpacked(self, array):
        """(1, T, parts C) as (parts, H, T, D)."""
        return array.reshape(self.T, -1, 2, 8).transpose(1, 2, 0, 3)


DS = "The line is ds = p * (dp - delta)."


def wrong_ds(case, gradient, name):
    """The typical mistakes that dq and dk share; gradient(ds, scale) is the expected product."""
    unmasked = np.exp(case.raw - case.lse)
    return [
        (gradient(case.ds, 1.0), f"{name} lacks the factor `scale` = 1/sqrt(D): multiply when it is stored."),
        (gradient(case.ds, case.scale**2), f"{name} has the factor `scale` twice."),
        (gradient(case.p * case.dp, case.scale), f"ds lacks delta. {DS}"),
        (gradient(case.dp - case.delta, case.scale), f"ds lacks the factor p. {DS}"),
        (gradient(case.p * (case.dp + case.delta), case.scale), f"The sign of delta is wrong. {DS}"),
        (gradient(case.p * case.delta, case.scale), f"ds lacks dp. {DS}"),
        (gradient(unmasked * (case.dp - case.delta), case.scale), "The causal mask is missing: p is 0 for later keys."),
        (
            gradient(np.where(np.tri(case.T, k=-1), case.p, 0) * (case.dp - case.delta), case.scale),
            "The causal mask is off by one: a query also attends to its own key.",
        ),
        (
            gradient(
                np.where(case.mask, np.exp2(case.raw - case.lse / np.log(2)), 0) * (case.dp - case.delta), case.scale
            ),
            "p lacks LOG2E: the kernel computes exp2, so the scores are multiplied by scale * LOG2E.",
        ),
        (
            gradient(np.where(case.mask, np.exp(case.raw), 0) * (case.dp - case.delta), case.scale),
            "p lacks the logsumexp: p = exp2(s * (scale * LOG2E) - lse).",
        ),
    ]
