"""The optimizer divided over threads and ranks (ZeRO), and the copy of the parameters in bf16 or fp16."""

from typing import NamedTuple

import numpy as np

from gpt2core.dropout import dropout_key
from gpt2core.errors import require_not_negative
from gpt2core.kernel_arguments import ParameterCopy
from gpt2core.parallel.divided.rounding import rounding_key


class Coefficients(NamedTuple):
    """The numbers of one update. They are arrays: kernels read them at fixed addresses, so a step can be replayed."""

    rule: np.ndarray  # float64, from the coefficients() of the rule
    key: np.ndarray | None  # (1) int64, from rounding_key(), or None
    dropout: np.ndarray | None = None  # (1) int64, from dropout_key(), or None


class DividedOptimizer:
    """An Optimizer whose update is divided over worker threads and ranks.

    layout: an ArenaLayout or UnitShards, which says what this rank stores, and which slice of it, `own`, it updates.
    parameters: a flat array of this layout. states: {name: flat array} of the rule, only for `own`. pool: the
    WorkerPool whose threads divide the update. compute_copy: a copy of the parameters that kernels read, or None if
    they read these. rounding: how the copy is rounded, "nearest" or "stochastic"; the random numbers depend only on
    `seed`, the step and the index in the arena. gathers: whether update() ends with an all-gather of the array that
    kernels read; otherwise AsyncAllGather gathers it during the next forward pass, or gather() before it. guard: that
    of Backend.clip. dropout_seed: of the key of each step's dropout; None: no dropout. rule, clip: those of Optimizer.

    updating: whether an update has begun that the trainer has not counted; see end_update().
    """

    def __init__(
        self, layout, parameters, pool, rule, *, clip=0.0, compute_copy=None, rounding="nearest", seed=0, gathers=True,
        guard=None, dropout_seed=None,
    ):  # fmt: skip
        require_not_negative(clip=clip)
        self.rule, self.clip, self.guard, self.gathers = rule, clip, guard, gathers
        self.layout, self.own, self.pool, self.backend = layout, layout.own, pool, pool.backends[0]
        self.parameters, self.compute_copy = parameters, compute_copy
        self.compute_parameters = parameters if compute_copy is None else compute_copy
        self.dropout_seed = dropout_seed
        self.seed = seed if rounding == "stochastic" else None
        zeros, shape = self.backend.zeros, parameters[self.own].shape
        self.states = {name: zeros(shape, parameters.dtype) for name in rule.STATES}
        self.decays = self.backend.asarray(layout.decays())  # of each page: whether its parameters decay
        self.updating = False

    def coefficients(self, step, lr):
        dropout = None if self.dropout_seed is None else dropout_key(self.dropout_seed, step)
        return Coefficients(self.rule.coefficients(step, lr), self.key(step), dropout)

    def key(self, step):
        """The rounding_key() of update number `step`, None if the copy is rounded to nearest, as initially (step 0)."""
        return None if self.seed is None or step == 0 else rounding_key(self.seed, step)

    # -- one update ----------------------------------------------------------------------------------------------------

    def norm_and_factor(self, gradients):
        with self.backend.runtime.range("optimizer"):
            return self.backend.clip(self.page_sums(gradients), self.clip, self.guard)

    def page_sums(self, flat):
        """The sums of squares of all pages of the model, in the order of one rank. All ranks call this method."""
        sums = self.map_own(lambda backend, share: backend.page_sums(flat[share]))
        return self.layout.join(sums[0] if len(sums) == 1 else self.backend.xp.concatenate(sums))

    def update(self, gradients, factor, coefficients):
        self.updating = True
        with self.backend.runtime.range("optimizer"):
            self.map_own(lambda backend, share: self.update_share(backend, share, gradients, factor, coefficients))
            self.clear_padding(self.parameters)
            self.clear_padding(self.compute_parameters)
            if self.gathers:
                self.layout.gather(self.compute_parameters)

    def update_share(self, backend, share, gradients, factor, coefficients):
        """Do the work of update() for a part of `own`."""
        for run, first in self.runs(share, coefficients.key):
            p, g, decays, copy = self.parameters[run], gradients[run], self.decays[self.layout.pages(run)], None
            if self.compute_copy is not None:
                copy = ParameterCopy(self.compute_copy[run], coefficients.key, first)
            own = slice(run.start - self.own.start, run.stop - self.own.start)
            states = {name: state[own] for name, state in self.states.items()}
            self.rule.update(backend, p, g, states, coefficients.rule, factor, decays, copy)

    def end_update(self):
        """The trainer counts the update, or will do so. An update that does not reach this line was interrupted."""
        self.updating = False

    def map_own(self, function):
        """[function(backend, share) of each worker]; the slices `share` divide `own`."""
        return self.pool.map(function, self.pool.backends, self.layout.shares(self.pool.size))

    def runs(self, share, key):
        """layout.runs(share), each for one call of a kernel that rounds; without a key, one call is enough."""
        return [(share, 0)] if key is None else self.layout.runs(share)

    def clear_padding(self, flat):
        """Set the padding of a flat array to 0 again if the rule does not keep zeros."""
        for part in () if self.rule.keeps_zeros else self.layout.padding():
            flat[part].view(np.uint8)[...] = 0  # bytes: of any dtype

    # -- between updates -----------------------------------------------------------------------------------------------

    def norm(self, flat):
        """The global L2 norm of a flat array, a Python float."""
        return self.backend.to_host(self.backend.clip(self.page_sums(flat), 0.0)[0]).item()

    def gather(self):
        """All-gather the array that kernels read, unless update() has done so. All ranks must call this method."""
        if not self.gathers:
            self.layout.gather(self.compute_parameters)

    def gather_parameters(self):
        """gather(), then all-gather the parameters too if kernels read a copy. All ranks must call this method."""
        self.gather()
        if self.compute_copy is not None:
            self.layout.gather(self.parameters)

    def refresh_copy(self, steps):
        """Round the parameters to the copy that kernels read, as update number `steps` did: after loading."""
        if self.compute_copy is not None:
            key = self.key(steps)
            for run, first in self.runs(slice(0, len(self.parameters)), key):
                self.backend.cast(self.parameters[run], self.compute_copy[run], key, first)

    @property
    def nbytes(self):
        """Bytes of the states that this rank holds."""
        return sum(state.nbytes for state in self.states.values())

    def gathered_states(self, on_host=True):
        """Yield each state as a flat array of the layout, which may be on the host. All ranks must call this method."""
        return (self.layout.gather_own(state, on_host) for state in self.states.values())

    def load_states(self, flats):
        """Load the results of gathered_states(), after the parameters: an interrupted update has left nothing."""
        for state, flat in zip(self.states.values(), flats, strict=True):
            state[...] = flat[self.own]
        self.end_update()
