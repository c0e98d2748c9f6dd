"""AdamW over the flat arena, clipping by the global norm of the gradient, and the learning-rate schedule."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpt2core.communicator import Solo
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
        cosine = (1 + math.cos(math.pi * progress)) / 2
        remaining = {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[self.kind]
        return self.floor + (self.peak - self.floor) * remaining


class Hyperparameters(NamedTuple):
    """The numbers of one AdamW step. They are arrays, because a CUDA graph reads new values from fixed addresses."""

    scalars: np.ndarray  # (3) float64, from adamw_scalars()
    key: np.ndarray | None  # (1) int64, the key of stochastic rounding, or None


def adamw_scalars(step, lr, beta1, beta2, eps, weight_decay):
    """(3) float64 [rate, e, shrink]: the update of p with moments m, v is p = shrink * p - rate * m / (sqrt(v) + e)."""
    c1, c2 = 1 - beta1**step, 1 - beta2**step  # the bias corrections m / c1, v / c2 are part of rate and e
    return np.array([lr / c1 * math.sqrt(c2), eps * math.sqrt(c2), 1 - lr * weight_decay])


def rounding_key(seed, step):
    """(1) int64: the key of one step's random numbers for stochastic rounding."""
    return np.random.SeedSequence((seed, step)).generate_state(1, np.uint64).view(np.int64)


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) on flat arrays, with decoupled weight decay of the matrices.

    pool: the WorkerPool whose threads divide the update. clip: maximum of the gradient's global norm, as in
    torch.nn.utils.clip_grad_norm_ (0: no clipping). owners: the ranks that divide the arena (default: a group of one);
    each holds only the moments of its own part (ZeRO-1, Rajbhandari et al. 2020). tensor_group: the ranks that divide
    each layer. repeated: slices that this rank omits from the norm, because the root of tensor_group adds them.
    compute_copy: a copy of `parameters` that kernels read, or None if they read `parameters`. rounding: how the copy is
    rounded, "nearest" or "stochastic". The random numbers depend only on `seed`, the step and the element's index in
    the arena, so they are equal for any number of owners. gathers: whether update() ends with an all-gather of the
    array that kernels read. If not, zero.AsyncAllGather gathers it during the next forward pass, or gather()
    before it.
    """

    def __init__(
        self, arena, parameters, pool, *, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, clip=0.0,
        rounding="nearest", seed=0, owners=None, tensor_group=None, repeated=(), compute_copy=None, gathers=True,
    ):  # fmt: skip
        for flag, value in (("--beta1", beta1), ("--beta2", beta2)):
            if not 0 <= value < 1:
                raise ConfigError(f"{flag} {value} must be in [0, 1)")
        for flag, value in (("--eps", eps), ("--weight-decay", weight_decay), ("--clip", clip)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{flag} {value} must be finite and not negative")
        self.arena, self.parameters, self.compute_copy, self.pool = arena, parameters, compute_copy, pool
        self.backend = pool.backends[0]
        self.seed = seed if rounding == "stochastic" else None
        self.owners, self.tensor_group, self.repeated = owners or Solo(), tensor_group or Solo(), repeated
        self.compute_parameters, self.gathers = parameters if compute_copy is None else compute_copy, gathers
        self.betas, self.eps, self.weight_decay, self.clip = (beta1, beta2), eps, weight_decay, clip
        self.own = arena.part(self.owners.rank, self.owners.size)
        size = self.own.stop - self.own.start
        self.exp_avg, self.exp_avg_sq = (self.backend.zeros((size,), parameters.dtype) for _ in "mv")
        self.decays = self.backend.asarray(arena.decays())
        self.stop = self.backend.zeros((1,), np.float32)  # NaN after a norm that is not finite: no more updates

    def hyperparameters(self, step, lr):
        """The Hyperparameters of update number `step` (from 1), computed on the host in double precision."""
        scalars = adamw_scalars(step, lr, *self.betas, self.eps, self.weight_decay)
        return Hyperparameters(scalars, None if self.seed is None else rounding_key(self.seed, step))

    def map_own(self, function):
        """[function(backend, part) of each worker]; the slices `part` divide this rank's part of the arena."""
        return self.pool.map_parts(function, self.arena, self.owners.rank, self.owners.size)

    def norm_and_scale(self, gradients, loss_scale=None, stop=None):
        """(global L2 norm of flat `gradients`, grad_scale: the factor that clips them); each has one element.

        Only this rank's part of `gradients` is read. The sums over fixed segments are added in a fixed order, so the
        bits are the same for 1, 2, 4, ... or 64 owners. loss_scale: a LossScale or None; stop: see Backend.clip.
        """
        size, segments = self.arena.size, self.arena.segments

        def squares(backend, part):
            return backend.sum_of_squares(gradients[part], segments * (part.stop - part.start) // size)

        own_sums = self.backend.xp.concatenate(self.map_own(squares))
        for part in self.in_own(self.repeated):  # subtract it from any segment: only the total is used
            own_sums[:1] -= self.backend.sum_of_squares(gradients[part], 1)
        scaling = {} if loss_scale is None else {"loss_scale": loss_scale.state, "interval": loss_scale.interval}
        sums = self.tensor_group.all_reduce(self.owners.all_gather(own_sums))
        return self.backend.clip(sums, self.clip, stop=stop, **scaling)

    def norm(self, flat):
        """The global L2 norm of a flat buffer, a Python float."""
        return self.backend.to_host(self.norm_and_scale(flat)[0]).item()

    def in_own(self, slices):
        """Yield the intersection of each of these slices with this rank's part of the arena, if it is not empty."""
        for part in slices:
            start, stop = max(part.start, self.own.start), min(part.stop, self.own.stop)
            if start < stop:
                yield slice(start, stop)

    def update(self, gradients, grad_scale, hyper):
        """Update this rank's part from flat `gradients` * grad_scale; if `gathers`, all-gather the updated parts."""

        def update_part(backend, part):
            moments = slice(part.start - self.own.start, part.stop - self.own.start)
            copy = None if self.compute_copy is None else self.compute_copy[part]
            arrays = self.parameters[part], self.exp_avg[moments], self.exp_avg_sq[moments], copy, gradients[part]
            decays = self.decays[self.arena.blocks(part)]
            backend.adamw_step(*arrays, hyper, grad_scale, decays, self.betas, part.start)

        self.map_own(update_part)
        if self.gathers:
            self.owners.all_gather(self.compute_parameters[self.own], out=self.compute_parameters)

    def gather(self):
        """All-gather the array that kernels read, unless update() has done so. All ranks must call this method."""
        if not self.gathers:
            self.owners.all_gather(self.compute_parameters[self.own], out=self.compute_parameters)

    def gather_parameters(self):
        """gather(), then all-gather the parameters too if kernels read a copy. All ranks must call this method."""
        self.gather()
        if self.compute_copy is not None:
            self.owners.all_gather(self.parameters[self.own], out=self.parameters)

    def refresh_copy(self, steps):
        """Round the parameters to compute_copy as update number `steps` did; call it after a checkpoint is loaded."""
        if self.compute_copy is not None:
            key = None if self.seed is None or steps == 0 else rounding_key(self.seed, steps)
            self.backend.cast(self.parameters, self.compute_copy, key)

    @property
    def nbytes(self):
        """Bytes of the optimizer state that this rank holds."""
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes

    def moments(self):
        """(first, second): the flat moments of the whole arena on the host, gathered from all owners."""
        return tuple(self.owners.all_gather(self.backend.to_host(flat)) for flat in (self.exp_avg, self.exp_avg_sq))

    def load_moments(self, first, second):
        """Load this rank's part of the moments; first, second: flat moments of the whole arena."""
        self.exp_avg[...], self.exp_avg_sq[...] = first[self.own], second[self.own]
