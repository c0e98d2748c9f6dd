"""AdamW on the shards of one rank: one pass over one flat array."""

from gpt2core.optimizer import AdamW


class UnitAdamW(AdamW):
    """AdamW of the parameters in this rank's shards; it has the methods of ShardedAdamW that other files call.

    shards: a UnitShards. parameters: the flat array of shards. rounding, seed: for a copy in 16 bits; not used, because
    there is none. updating: see ShardedAdamW. The other arguments are those of AdamW.
    """

    def __init__(self, shards, parameters, backend, *, rounding="nearest", seed=0, **options):
        super().__init__(shards, parameters, backend, **options)
        self.updating = False

    def page_sums(self, flat):
        """The page sums of the model, in the order of one rank: see AdamW.page_sums. All ranks call this method."""
        return self.arena.join(self.backend.page_sums(flat))

    def clip(self, gradients):
        with self.backend.runtime.range("optimizer"):
            return super().clip(gradients)

    def norm(self, flat):
        """The global L2 norm of flat arrays of shards, a Python float. All ranks call this method."""
        return self.backend.to_host(self.backend.clip(self.page_sums(flat), 0.0)[0]).item()

    def update(self, *arguments):
        self.updating = True
        with self.backend.runtime.range("optimizer"):
            super().update(*arguments)

    def gather(self):
        """Nothing: the parameters of a unit are gathered when they are read."""

    gather_parameters = gather

    def refresh_copy(self, steps):
        """Nothing: kernels read the parameters themselves."""

    @property
    def nbytes(self):
        """Bytes of the optimizer state that this rank holds."""
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes

    def moments(self):
        """(first, second): the flat moments of this rank's shards."""
        return self.exp_avg, self.exp_avg_sq

    def load_moments(self, first, second):
        self.exp_avg[...], self.exp_avg_sq[...] = first, second
