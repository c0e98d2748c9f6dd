"""AdamW over the flat arena, the global norm that clips it, and the learning rate as a function of the step."""

import math
from dataclasses import dataclass

from gpt2core.arena import SEGMENTS
from gpt2core.canonical import tree_sum
from gpt2core.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Learning rate by step (from 0): linear warm-up to `peak`, then constant, or linear or cosine decay to `floor`.

    Raises ConfigError for a rate that is negative or not finite, or an unknown kind.
    """

    kind: str = "constant"
    peak: float = 3e-4
    floor: float = 0.0
    warmup: int = 0  # steps
    steps: int = 50  # where the decay ends

    def __post_init__(self):
        if self.kind not in ("constant", "linear", "cosine"):
            raise ConfigError(f"--schedule {self.kind} is unknown: use constant, linear or cosine")
        for flag, value in (("--lr", self.peak), ("--min-lr", self.floor)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{flag} {value} is not a learning rate: it must be finite and not negative")
        if self.warmup < 0:
            raise ConfigError(f"--warmup {self.warmup} must not be negative")

    def __call__(self, step):
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        remaining = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }[self.kind]
        return self.floor + (self.peak - self.floor) * remaining


class AdamW:
    """Decoupled weight decay, on matrices alone (Loshchilov and Hutter 2019); moments in flat buffers like the arena's.

    `clip` bounds the global norm of the gradient (0: no clipping), as torch.nn.utils.clip_grad_norm_ does.
    """

    def __init__(self, arena, parameters, workers, *, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, clip=0.0):
        for flag, value in (("--beta1", beta1), ("--beta2", beta2)):
            if not 0 <= value < 1:
                raise ConfigError(f"{flag} {value} must be in [0, 1)")
        for flag, value in (("--eps", eps), ("--weight-decay", weight_decay), ("--clip", clip)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{flag} {value} must be finite and not negative")
        self.arena, self.parameters, self.workers = arena, parameters, workers
        self.betas, self.eps, self.weight_decay, self.clip = (beta1, beta2), eps, weight_decay, clip
        self.exp_avg, self.exp_avg_sq = (workers.backends[0].zeros(parameters.shape, parameters.dtype) for _ in "mv")
        self.steps = 0

    def gradient_norm(self, gradients):
        """The global L2 norm: sums over fixed segments in one canonical tree, whoever computed each of them."""

        def squares(backend, part):
            return backend.sum_of_squares(gradients[part], SEGMENTS * (part.stop - part.start) // self.arena.size)

        parts = self.workers.map_parts(squares, self.arena)
        return math.sqrt(tree_sum([float(square) for part in parts for square in part]))

    def step(self, gradients, lr, norm):
        """One update from the flat `gradients` at rate `lr`; `norm` is their gradient_norm."""
        self.steps += 1
        scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0

        def update(backend, part):
            for run, decays in self.arena.decayed(part):
                backend.adamw_step(
                    self.parameters[run],
                    gradients[run],
                    self.exp_avg[run],
                    self.exp_avg_sq[run],
                    self.steps,
                    lr,
                    *self.betas,
                    self.eps,
                    self.weight_decay if decays else 0.0,
                    scale,
                )

        self.workers.map_parts(update, self.arena)
