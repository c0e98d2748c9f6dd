"""AdamW, clipping by the global norm of the gradient, and the learning-rate schedule."""

import math
from dataclasses import dataclass

import numpy as np

from gpt2core.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Learning rate of step 0, 1, ...: linear warm-up to `peak`, then constant, or linear or cosine decay to `floor`.

    Raises ConfigError for an unknown kind, a rate that is negative or not finite, or a negative warm-up.
    """

    kind: str = "constant"
    peak: float = 3e-4
    floor: float = 0.0
    warmup: int = 0  # steps
    steps: int = 50  # the step at which the decay ends

    def __post_init__(self):
        if self.kind not in ("constant", "linear", "cosine"):
            raise ConfigError(f"`schedule={self.kind}` is unknown: use constant, linear or cosine")
        for name, value in (("lr", self.peak), ("min_lr", self.floor)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"`{name}={value}` is not a learning rate: it must be finite and not negative")
        if self.warmup < 0:
            raise ConfigError(f"`warmup={self.warmup}` must not be negative")

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        remaining = {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[self.kind]
        return self.floor + (self.peak - self.floor) * remaining


def adamw_coefficients(step, lr, beta1, beta2, eps, weight_decay):
    """(3) float64 [rate, e, shrink]: the formula of AdamW as p = shrink p - rate m / (sqrt(v) + e).

    With c1 = 1 - beta1^step and c2 = 1 - beta2^step: (m / c1) / (sqrt(v / c2) + eps) is
    sqrt(c2) / c1 * m / (sqrt(v) + eps sqrt(c2)).
    """
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    return np.array([lr / c1 * math.sqrt(c2), eps * math.sqrt(c2), 1 - lr * weight_decay])


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) on flat arrays of parameters p and gradients g. In step t = 1, 2, ...:

        g = g min(1, clip / (norm(g) + 1e-6))         norm over all parameters; clip 0: no clipping
        m = beta1 m + (1 - beta1) g                   running mean of the gradient
        v = beta2 v + (1 - beta2) g^2                 running mean of its square
        p = p - lr (m_ / (sqrt(v_) + eps) + weight_decay p)      m_ = m / (1 - beta1^t), v_ = v / (1 - beta2^t)

    m and v begin with 0; without the divisors of m_ and v_ they would be too small in the first steps. Only matrices
    decay. Backend.clip and Backend.adamw_step compute these lines. Raises ConfigError for a number out of range.
    """

    OPTIONS = "beta1", "beta2", "eps", "weight_decay", "clip"

    def __init__(
        self, arena, parameters, backend, *, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, clip=0.0
    ):  # fmt: skip
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= value < 1:
                raise ConfigError(f"`{name}={value}` must be in [0, 1)")
        for name, value in (("eps", eps), ("weight_decay", weight_decay), ("clip", clip)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"`{name}={value}` must be finite and not negative")
        self.arena, self.parameters, self.backend = arena, parameters, backend
        self.betas, self.eps, self.weight_decay, self.clip = (beta1, beta2), eps, weight_decay, clip
        self.exp_avg, self.exp_avg_sq = (backend.zeros(parameters.shape, parameters.dtype) for _ in ("m", "v"))
        self.decays = backend.asarray(arena.decays())  # of each page: whether its parameters decay

    def coefficients(self, step, lr):
        """The numbers of update number `step` (from 1), in double precision: see adamw_coefficients()."""
        return adamw_coefficients(step, lr, *self.betas, self.eps, self.weight_decay)

    def norm_and_factor(self, gradients):
        """(the global norm of flat `gradients`, the factor that clips them), each of one element.

        If the norm is not finite, the factor is NaN, and update() changes nothing.
        """
        return self.backend.clip(self.backend.page_sums(gradients), self.clip)

    def update(self, gradients, factor, coefficients):
        """Update the parameters from flat `gradients` * factor; see norm_and_factor() and coefficients()."""
        p, m, v = self.parameters, self.exp_avg, self.exp_avg_sq
        self.backend.adamw_step(p, m, v, gradients, coefficients, factor, self.decays, self.betas)
