"""The layout of flat arrays with the whole arena. Ranks may divide its update: each owns an equal share (ZeRO-1)."""

from gpt2core.communicator import Solo
from gpt2core.parallel.divided.flat_layout import FlatLayout
from gpt2core.parallel.divided.model_pages import ModelPages


class ArenaLayout(FlatLayout):
    """The layout of flat arrays with all elements of a DividedArena.

    owners: the ranks that divide the update (Rajbhandari et al. 2020), by default a group of one. pages: the ModelPages
    of the model, or None if its parameters are not divided.
    """

    owner = 0

    def __init__(self, arena, backend, owners=None, pages=None):
        self.arena, self.size, self.backend = arena, arena.size, backend
        self.owners = owners or Solo()
        self.model_pages = pages or ModelPages.undivided(arena, backend)
        (self.own,) = self.shares(1)

    def shares(self, workers):
        first, count = self.owners.rank * workers, self.owners.size * workers
        return [self.arena.share(first + i, count) for i in range(workers)]

    def runs(self, share):
        return [(share, share.start)]

    def decays(self):
        return self.arena.decays()

    def padding(self):
        return self.arena.padding()

    def join(self, sums):
        # The last pages are padding for the owners. Without them, the norm does not depend on the number of owners.
        return self.model_pages.join(self.owners.all_gather(sums)[: self.arena.norm_pages])

    def gather(self, flat):
        self.owners.all_gather(flat[self.own], out=flat)

    def gather_own(self, own, on_host=True):
        return self.owners.all_gather(self.backend.to_host(own) if on_host else own)

    def put(self, flat, name, array):
        if name in self.arena.slices:  # otherwise another rank of the pipeline stores it
            flat[self.arena.slices[name]].reshape(array.shape)[...] = self.backend.asarray(array)

    def whole(self, flat):
        return flat
