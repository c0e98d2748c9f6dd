"""The learning-rate schedule, the rule AdamW, and the optimizer: it clips the gradient and applies a rule."""

import math
from dataclasses import dataclass

import numpy as np

from gpt2core.errors import ConfigError, require_decay_rate, require_not_negative


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
        wrong = "is not a learning rate: it must be finite and not negative"
        require_not_negative(wrong, lr=self.peak, min_lr=self.floor)
        if self.warmup < 0:
            raise ConfigError(f"`warmup={self.warmup}` must not be negative")

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        remaining = {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[self.kind]
        return self.floor + (self.peak - self.floor) * remaining


class AdamW:
    """The rule (Loshchilov and Hutter 2019) for parameters p with gradients g. In step t = 1, 2, ...:

        m = beta1 m + (1 - beta1) g                   running mean of the gradient
        v = beta2 v + (1 - beta2) g^2                 running mean of its square
        p = p - lr (m_ / (sqrt(v_) + eps) + weight_decay p)      m_ = m / (1 - beta1^t), v_ = v / (1 - beta2^t)
          = shrink p - rate m / (sqrt(v) + e)                    as Backend.adamw_step computes it

    The divisors correct m and v, which begin with 0. Only matrices decay. Raises ConfigError for a number out of range.
    """

    OPTIONS = "beta1", "beta2", "eps", "weight_decay"
    STATES = "exp_avg", "exp_avg_sq"  # PyTorch's names of m and v

    def __init__(self, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0):
        require_decay_rate(beta1=beta1, beta2=beta2)
        require_not_negative(eps=eps, weight_decay=weight_decay)
        self.betas, self.eps, self.weight_decay = (beta1, beta2), eps, weight_decay
        self.keeps_zeros = eps > 0  # whether p = 0 stays 0 if its gradient is always 0; otherwise it becomes 0 / 0

    def coefficients(self, step, lr):
        """(3) float64 [rate, e, shrink], the numbers of the last line of the formula, in update number `step` (from 1).

        With c1 = 1 - beta1^step and c2 = 1 - beta2^step, m_ / (sqrt(v_) + eps) = (m / c1) / (sqrt(v / c2) + eps) is
        sqrt(c2) / c1 * m / (sqrt(v) + eps sqrt(c2)).
        """
        beta1, beta2 = self.betas
        c1, c2 = 1 - beta1**step, 1 - beta2**step
        return np.array([lr / c1 * math.sqrt(c2), self.eps * math.sqrt(c2), 1 - lr * self.weight_decay])

    def update(self, backend, p, g, states, coefficients, factor, decays, copy=None):
        """Update the flat arrays p and `states`, {name: array}, from g * factor: see Backend.adamw_step."""
        backend.adamw_step(p, *states.values(), g, coefficients, factor, decays, self.betas, copy)


class Optimizer:
    """Clips gradients by their global norm, then updates flat `parameters` by a rule, for example AdamW()."""

    def __init__(self, arena, parameters, backend, rule, clip=0.0):
        require_not_negative(clip=clip)
        self.parameters, self.backend, self.rule, self.clip = parameters, backend, rule, clip
        self.states = {name: backend.zeros(parameters.shape, parameters.dtype) for name in rule.STATES}
        self.decays = backend.asarray(arena.decays())  # of each page: whether its parameters decay

    def coefficients(self, step, lr):
        """The numbers of the rule in update number `step` (from 1), in float64."""
        return self.rule.coefficients(step, lr)

    def norm_and_factor(self, gradients):
        """(norm of flat `gradients`, factor = min(1, clip / (norm + 1e-6))), each of one element.

        clip 0: factor is 1. If the norm is not finite, factor is NaN.
        """
        return self.backend.clip(self.backend.page_sums(gradients), self.clip)

    def update(self, gradients, factor, coefficients):
        """Update the parameters from flat `gradients` * factor; if the norm is not finite, factor is NaN: no change."""
        self.rule.update(self.backend, self.parameters, gradients, self.states, coefficients, factor, self.decays)
