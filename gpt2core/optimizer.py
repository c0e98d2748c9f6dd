"""AdamW over the flat arena, the global norm that clips it, the learning rate of a step, and fp16's loss scale."""

import math
from dataclasses import dataclass

import numpy as np

from gpt2core.communicator import Solo
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

    owners: the ranks that divide the arena among them, each with the moments of its part alone, which is ZeRO-1
    (Rajbhandari et al. 2020); the default is a group of one that owns it all. tensor_group: the ranks that hold a
    shard of the model each, and `repeated`: slices of the arena that another of them counts in the norm already.
    rounding: of the copy that kernels read, "nearest" or "stochastic", whose random numbers are drawn from `seed`, the
    number of the step and an element's place in the arena: the same for any owners.
    copy: what kernels read, where that are not the parameters. gathers: whether update() brings all of that to
    everyone; else gather() does.
    """

    def __init__(
        self, arena, parameters, workers, *, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, clip=0.0,
        rounding="nearest", seed=0, owners=None, tensor_group=None, repeated=(), copy=None, gathers=True,
    ):  # fmt: skip
        for flag, value in (("--beta1", beta1), ("--beta2", beta2)):
            if not 0 <= value < 1:
                raise ConfigError(f"{flag} {value} must be in [0, 1)")
        for flag, value in (("--eps", eps), ("--weight-decay", weight_decay), ("--clip", clip)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{flag} {value} must be finite and not negative")
        if rounding not in ("nearest", "stochastic"):
            raise ConfigError(f"--rounding {rounding} is unknown: use nearest or stochastic")
        if rounding == "stochastic" and not workers.backends[0].rounds_stochastically:
            raise ConfigError(
                f"--rounding stochastic is of the bf16 copy of the parameters, and --precision "
                f"{workers.backends[0].precision} has none: use --precision bf16, on a GPU, or --rounding nearest"
            )
        self.seed = seed if rounding == "stochastic" else None
        self.arena, self.parameters, self.copy, self.workers = arena, parameters, copy, workers
        self.owners, self.tensor_group, self.repeated = owners or Solo(), tensor_group or Solo(), repeated
        self.read, self.gathers = parameters if copy is None else copy, gathers
        self.betas, self.eps, self.weight_decay, self.clip = (beta1, beta2), eps, weight_decay, clip
        self.own = arena.part(self.owners.rank, self.owners.size)
        size = self.own.stop - self.own.start
        self.exp_avg, self.exp_avg_sq = (workers.backends[0].zeros((size,), parameters.dtype) for _ in "mv")
        self.steps = 0
        self.stop = workers.backends[0].zeros((1,), np.float32)  # 0, or NaN since a gradient was not finite

    def map_own(self, function):
        """[function(backend, part)] over this rank's part of the arena, in one slice for each worker."""
        return self.workers.map_parts(function, self.arena, self.owners.rank, self.owners.size)

    def norm_and_scale(self, gradients, loss_scale=None, stop=None):
        """The global L2 norm, and what clips it: sums over fixed segments in one canonical tree, whoever computed each.

        Of `gradients` only this rank's part is read. Both are numbers of the device. loss_scale: the LossScale whose
        factor is in the gradients, which is brought up to date. stop: see Backend.clip.
        """

        def squares(backend, part):
            return backend.sum_of_squares(gradients[part], self.arena.segments * (part.stop - part.start) // arena_size)

        arena_size, backend = self.arena.size, self.workers.backends[0]
        own = backend.xp.concatenate(self.map_own(squares))
        for part in self.in_own(self.repeated):  # another tensor rank counts them; whose squares hold them is no matter
            own[:1] -= backend.sum_of_squares(gradients[part], 1)
        scaling = {} if loss_scale is None else {"loss_scale": loss_scale.state, "interval": loss_scale.interval}
        return backend.clip(self.tensor_group.all_reduce(self.owners.all_gather(own)), self.clip, stop=stop, **scaling)

    def gradient_norm(self, gradients):
        """The global L2 norm, a Python float."""
        return self.workers.backends[0].number(self.norm_and_scale(gradients)[0])

    def in_own(self, slices):
        """What of these slices lies in this rank's part."""
        for part in slices:
            start, stop = max(part.start, self.own.start), min(part.stop, self.own.stop)
            if start < stop:
                yield slice(start, stop)

    def begin(self, lr, ahead=0):
        """Say what the next update() needs of the step's number and rate, before it may be a recorded one.

        ahead: updates that are under way already, and not counted in `steps` yet.
        """
        arguments = self.steps + 1 + ahead, lr, *self.betas, self.eps, self.weight_decay, self.seed
        self.rates = {backend: backend.adamw_rates(*arguments) for backend in self.workers.backends}

    def update(self, gradients, scale):
        """Each owner updates its part from `gradients` (all of the arena) times `scale`.

        Where it `gathers`, all receive all parts of what kernels read: the copy, if there is one, else the parameters.
        """

        def update(backend, part):
            moments = slice(part.start - self.own.start, part.stop - self.own.start)
            runs = [(slice(a.start - part.start, a.stop - part.start), b) for a, b in self.arena.decayed(part)]
            copy = None if self.copy is None else self.copy[part]
            arrays = self.parameters[part], self.exp_avg[moments], self.exp_avg_sq[moments], copy, gradients[part]
            backend.adamw_step(*arrays, self.rates[backend], scale, runs, part.start)

        self.map_own(update)
        if self.gathers:  # what the kernels read: nobody needs more before the end
            self.owners.all_gather(self.read[self.own], out=self.read)

    def gather(self):
        """Bring everyone all of what kernels read, where updates leave it with the owners. All ranks must call it."""
        if not self.gathers:
            self.owners.all_gather(self.read[self.own], out=self.read)

    def refresh_copy(self):
        """Make the copy of all parameters that the last update has made of them, which no checkpoint keeps."""
        if self.copy is not None:
            drawn = None if self.seed is None or self.steps == 0 else (self.seed, self.steps)
            self.workers.backends[0].refresh(self.copy, self.parameters, drawn)

    def gather_parameters(self):
        """Bring everyone all parameters too, where an update exchanges only a copy of them. All ranks must call it."""
        self.gather()
        if self.copy is not None:
            self.owners.all_gather(self.parameters[self.own], out=self.parameters)

    def step(self, gradients, lr):
        """One update from the flat `gradients` at rate `lr`; returns their norm."""
        self.begin(lr)
        norm, scale = self.norm_and_scale(gradients)
        self.update(gradients, scale)
        self.steps += 1
        return self.workers.backends[0].number(norm)

    @property
    def nbytes(self):
        """Bytes of the optimizer state that this rank holds."""
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes

    def moments(self):
        """The flat first and second moments of the whole arena, gathered from their owners; on the host.

        A device that holds its part alone need not have room for all of them.
        """
        to_host = self.workers.backends[0].to_host
        return tuple(self.owners.all_gather(to_host(flat)) for flat in (self.exp_avg, self.exp_avg_sq))

    def load_moments(self, first, second):
        """Copy this rank's part of the flat moments of the whole arena."""
        self.exp_avg[...], self.exp_avg_sq[...] = first[self.own], second[self.own]
