"""AdamW on the shards of one rank: one pass over one flat array."""

from gpt2core.backend import ParameterCopy
from gpt2core.parallel.sharded_adamw import DividedAdamW


class UnitAdamW(DividedAdamW):
    """AdamW of the parameters in this rank's shards.

    shards: a UnitShards. parameters, and compute_copy if it is given: flat arrays of shards. The other arguments are
    those of DividedAdamW.
    """

    def page_sums(self, flat):
        return self.arena.join(self.backend.page_sums(flat))

    def pieces(self, key):
        """See DividedAdamW. With a key, a piece is a shard of a unit: its elements are neighbours in the arena too."""
        if key is None:
            return super().pieces(key)
        return [(part, self.arena.first(unit)) for unit, part in self.arena.parts.items()]

    def update_own(self, gradients, factor, coefficients):
        adamw, key = coefficients
        p, m, v = self.all_parameters, self.exp_avg, self.exp_avg_sq
        for piece, offset in self.pieces(key):
            copy = None
            if self.compute_copy is not None:
                copy = ParameterCopy(self.compute_copy[piece], key, offset)
            arrays, decays = [array[piece] for array in (p, m, v, gradients)], self.decays[self.arena.pages(piece)]
            self.backend.adamw_step(*arrays, adamw, factor, decays, self.betas, copy)
