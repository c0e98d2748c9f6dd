"""The layout of flat arrays with the whole arena. Ranks may divide its update: each owns an equal share (ZeRO-1)."""

from gpt2core.communicator import Solo
from gpt2core.parallel.model_pages import ModelPages


class ArenaLayout:
    """The layout of flat arrays of the `size` of a DividedArena, all of which this rank stores. See also UnitShards.

    owners: the ranks that divide the update (Rajbhandari et al. 2020), by default a group of one. own: the slice of a
    flat array that this rank updates. pages: the ModelPages of the model, or None if its parameters are not divided.
    """

    owner = 0  # equal on all ranks: they have the same elements

    def __init__(self, arena, backend, owners=None, pages=None):
        self.arena, self.size, self.backend = arena, arena.size, backend
        self.owners = owners or Solo()
        self.model_pages = pages or ModelPages([arena], list(arena.slices), Solo(), backend)
        (self.own,) = self.shares(1)

    # -- what DividedOptimizer reads -----------------------------------------------------------------------------------

    def shares(self, workers):
        """The slices of a flat array that the worker threads of this rank update; together they are `own`."""
        first, count = self.owners.rank * workers, self.owners.size * workers
        return [self.arena.share(first + i, count) for i in range(workers)]

    def runs(self, share):
        """[(slice, index of its first element in the arena)]: the parts of a share that are contiguous in the arena."""
        return [(share, share.start)]

    def pages(self, share):
        return self.arena.pages(share)

    def decays(self):
        return self.arena.decays()

    def padding(self):
        return self.arena.padding()

    def join(self, sums):
        """The page sums of the model as on one rank, from those of `own`. All ranks call this method.

        The last pages, which are padding for the owners, are left out. So the bits of the norm do not depend on the
        number of owners.
        """
        return self.model_pages.join(self.owners.all_gather(sums)[: self.arena.norm_pages])

    def gather(self, flat):
        """Copy the owners' shares of a flat array to all ranks. All owners call this method."""
        self.owners.all_gather(flat[self.own], out=flat)

    def gather_own(self, own):
        """A flat array on the host, gathered from the owners' arrays `own`. All owners call this method."""
        return self.owners.all_gather(self.backend.to_host(own))

    # -- parameters in one piece ---------------------------------------------------------------------------------------

    def put(self, flat, name, array):
        """Copy a parameter into `flat`, unless another rank of a pipeline stores it. array: on the host."""
        if name in self.arena.slices:
            flat[self.arena.slices[name]].reshape(array.shape)[...] = self.backend.asarray(array)

    def whole(self, flat):
        return flat
