"""AdamW on the shards of one rank: one pass over one flat array."""

from gpt2core.parallel.sharded_adamw import DividedAdamW


class UnitAdamW(DividedAdamW):
    """AdamW of the parameters in this rank's shards.

    shards: a UnitShards. parameters: the flat array of shards. rounding, seed: for a copy in 16 bits; not used, because
    there is none. The other arguments are those of AdamW.
    """

    def __init__(self, shards, parameters, backend, *, rounding="nearest", seed=0, **options):
        super().__init__(shards, parameters, backend, **options)

    def page_sums(self, flat):
        return self.arena.join(self.backend.page_sums(flat))

    def update(self, *arguments):
        with self.backend.runtime.range("optimizer"):
            super().update(*arguments)
            self.clear_padding(self.parameters)
