"""AdamW divided over threads and ranks (ZeRO-1), and the copy of the parameters in bf16 or fp16."""

from typing import NamedTuple

import numpy as np

from gpt2core.backend import ParameterCopy
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError
from gpt2core.optimizer import AdamW
from gpt2core.parallel.model_pages import ModelPages


def rounding_key(seed, step):
    """(1) int64: the key of one step's random numbers for stochastic rounding."""
    return np.random.SeedSequence((seed, step)).generate_state(1, np.uint64).view(np.int64)


def check_rounding(rounding, backend):
    """Raise ConfigError for an unknown `rounding`, or if it is stochastic and this backend cannot round so."""
    if rounding not in ("nearest", "stochastic"):
        raise ConfigError(f"`rounding={rounding}` is unknown: use nearest or stochastic")
    if rounding == "stochastic" and not backend.rounds_stochastically:
        raise ConfigError(
            f"`rounding=stochastic` applies to the bf16 copy of the parameters, and `precision={backend.precision}` "
            f"has no such copy in this stage: use `precision=bf16` in stage 2 or 3, or `rounding=nearest`"
        )


class Coefficients(NamedTuple):
    """The numbers of one update. They are arrays: kernels read them at fixed addresses, so a step can be replayed."""

    adamw: np.ndarray  # (3) float64, from adamw_coefficients()
    key: np.ndarray | None  # (1) int64, from rounding_key(), or None


class DividedAdamW(AdamW):
    """AdamW with a copy of the parameters, and what else a ParallelTrainer needs.

    parameters: the flat array `all_parameters`. own: the slice of it whose moments this rank has; it is `parameters` of
    AdamW. compute_copy: a copy of all parameters that kernels read, or None if they read these. guard: that of
    Backend.clip for gradients. rounding: how the copy is rounded, "nearest" or "stochastic"; the random numbers depend
    only on `seed`, the step and the index in the arena. The other arguments are those of AdamW.
    """

    def __init__(
        self, arena, parameters, backend, *, own=slice(None), compute_copy=None, guard=None, rounding="nearest", seed=0,
        **options,
    ):  # fmt: skip
        super().__init__(arena, parameters[own], backend, **options)
        self.own, self.all_parameters, self.compute_copy = own, parameters, compute_copy
        self.compute_parameters = parameters if compute_copy is None else compute_copy
        self.seed = seed if rounding == "stochastic" else None
        self.guard = guard
        self.updating = False  # set by update(), cleared by end_update()

    def coefficients(self, step, lr):
        key = None if self.seed is None else rounding_key(self.seed, step)
        return Coefficients(super().coefficients(step, lr), key)

    def pieces(self, key):
        """[(slice of the flat arrays, its first index in the arena)], each for one call of a kernel that rounds."""
        return [(slice(0, len(self.all_parameters)), 0)]

    def page_sums(self, flat):
        """The sums of squares of all pages of the model, in the order of one rank, from this rank's part of an array.

        All ranks call this method, and those that call it.
        """
        raise NotImplementedError

    def norm_and_factor(self, gradients):
        with self.backend.runtime.range("optimizer"):
            return self.backend.clip(self.page_sums(gradients), self.clip, self.guard)

    def update(self, gradients, factor, coefficients):
        self.updating = True
        with self.backend.runtime.range("optimizer"):
            self.update_own(gradients, factor, coefficients)
            self.clear_padding(self.all_parameters)
            self.clear_padding(self.compute_parameters)
            self.share_update()

    def end_update(self):
        """The trainer counts the update, or will do so. An update that does not reach this line was interrupted."""
        self.updating = False

    def share_update(self):
        """Send what the owners have updated to each other; by default nothing is sent."""

    def update_own(self, gradients, factor, coefficients):
        """Do the work of update() for the parameters whose moments this rank has."""
        raise NotImplementedError

    def clear_padding(self, flat):
        """Set the padding of a flat array to 0 again if eps is 0, because the formula is 0 / 0 there."""
        for part in () if self.eps else self.arena.padding():
            flat[part].view(np.uint8)[...] = 0  # bytes: of any dtype

    def norm(self, flat):
        """The global L2 norm of a flat array, a Python float."""
        return self.backend.to_host(self.backend.clip(self.page_sums(flat), 0.0)[0]).item()

    def gather(self):
        """All-gather the array that kernels read, unless update() has done so. All ranks must call this method."""

    def gather_parameters(self):
        """gather(), then all-gather the parameters too if kernels read a copy. All ranks must call this method."""
        self.gather()

    def refresh_copy(self, steps):
        """Round the parameters to the copy that kernels read, as update number `steps` did: after loading."""
        if self.compute_copy is not None:
            key = None if self.seed is None or steps == 0 else rounding_key(self.seed, steps)
            for piece, offset in self.pieces(key):
                self.backend.cast(self.all_parameters[piece], self.compute_copy[piece], key, offset)

    @property
    def nbytes(self):
        """Bytes of the optimizer state that this rank holds."""
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes

    def moments(self):
        """(first, second): the flat moments that a checkpoint of this layout has."""
        return self.exp_avg, self.exp_avg_sq

    def load_moments(self, first, second):
        """Load this rank's moments from those of moments(); the parameters have been loaded."""
        self.end_update()  # an interrupted update has left nothing
        self.exp_avg[...], self.exp_avg_sq[...] = first[self.own], second[self.own]


class ShardedAdamW(DividedAdamW):
    """AdamW whose arena is divided over `owners`: each has only the moments of its own share (Rajbhandari et al. 2020).

    pool: the WorkerPool whose threads divide the update. owners: by default a group of one. pages: the ModelPages of
    the model, or None if its parameters are not divided. gathers: whether update() ends with an all-gather of the array
    that kernels read; otherwise AsyncAllGather gathers it during the next forward pass, or gather() before it. The
    other arguments are those of DividedAdamW.
    """

    def __init__(self, arena, parameters, pool, *, owners=None, pages=None, gathers=True, **options):
        self.pool, self.owners, self.gathers = pool, owners or Solo(), gathers
        own = arena.share(self.owners.rank, self.owners.size)
        super().__init__(arena, parameters, pool.backends[0], own=own, **options)
        self.pages = pages or ModelPages([arena], list(arena.slices), Solo(), self.backend)

    def map_own(self, function):
        """[function(backend, share) of each worker]; the slices `share` divide this rank's share of the arena."""
        return self.pool.map_shares(function, self.arena, self.owners.rank, self.owners.size)

    def page_sums(self, flat):
        """See DividedAdamW; without the last pages, which are padding for the owners.

        The ranks exchange the sums, and each rank adds them as one rank does. So the bits of the norm do not depend on
        the number of owners.
        """
        sums = self.map_own(lambda backend, share: backend.page_sums(flat[share]))
        own = sums[0] if len(sums) == 1 else self.backend.xp.concatenate(sums)  # without a copy
        return self.pages.join(self.owners.all_gather(own)[: self.arena.norm_pages])

    def share_update(self):
        if self.gathers:
            self.owners.all_gather(self.compute_parameters[self.own], out=self.compute_parameters)

    def update_own(self, gradients, factor, coefficients):
        def update(backend, share):
            copy = None
            if self.compute_copy is not None:
                copy = ParameterCopy(self.compute_copy[share], coefficients.key, share.start)
            *arrays, decays = self.arrays(share, gradients)
            backend.adamw_step(*arrays, coefficients.adamw, factor, decays, self.betas, copy)

        self.map_own(update)

    def arrays(self, share, gradients):
        """p, m, v, g and the flags of weight decay of a share of `own`, as Backend.adamw_step needs them."""
        moments = slice(share.start - self.own.start, share.stop - self.own.start)
        p, m, v, g = self.all_parameters[share], self.exp_avg[moments], self.exp_avg_sq[moments], gradients[share]
        return p, m, v, g, self.decays[self.arena.pages(share)]

    def gather(self):
        if not self.gathers:
            self.owners.all_gather(self.compute_parameters[self.own], out=self.compute_parameters)

    def gather_parameters(self):
        super().gather_parameters()
        if self.compute_copy is not None:
            self.owners.all_gather(self.all_parameters[self.own], out=self.all_parameters)

    def moments(self):
        """(first, second): the flat moments of the whole arena on the host, gathered from all owners."""
        return tuple(self.owners.all_gather(self.backend.to_host(flat)) for flat in super().moments())
