"""The norm of a model that ranks divide: the page sums of all ranks in model order, in a pipeline as on one rank."""

import numpy as np

from gpt2core.arena import SEGMENTS, round_up
from gpt2core.communicator import Solo
from gpt2core.parallel.tensor.shards import is_replicated, whole_name


class ModelPages:
    """Joins the page sums of the ranks of a group, each of which has a part of the model.

    arenas: those of the ranks of `group`. names: of all parameters, in model order. The result has parameter after
    parameter, and for each of them the pages of rank 0, rank 1, ... with its shards, each slice after slice. A
    parameter that several ranks have as a whole counts once.
    """

    def __init__(self, arenas, names, group, backend):
        self.group, self.backend, self.rows = group, backend, max(arena.norm_pages for arena in arenas)
        found = {name: {} for name in names}  # {parameter: {rank: [its pages in the all-gather, slice after slice]}}
        for rank, arena in enumerate(arenas):
            for name in arena.slices:
                pages, start = arena.pages(arena.padded(name)), rank * self.rows
                own = found[whole_name(name)].setdefault(rank, [])
                own.extend(range(start + pages.start, start + pages.stop))
        order = []  # indices of the all-gather of the page sums
        for name, pages_of in found.items():
            ranks = list(pages_of.values())
            for own in ranks[:1] if is_replicated(name) else ranks:
                order.extend(own)
        self.order = None if len(arenas) == 1 else backend.asarray(np.array(order, np.intp))

    @classmethod
    def undivided(cls, arena, backend):
        """The ModelPages of a rank that has the whole model."""
        return cls([arena], list(arena.slices), Solo(), backend)

    def join(self, sums):
        """The page sums of the model, from those of this rank's arena. All ranks of the group must call this method."""
        if self.order is None:  # they are in order
            return sums
        if len(sums) < self.rows:
            padded, sums = sums, self.backend.zeros((self.rows,), sums.dtype)
            sums[: len(padded)] = padded
        joined = self.backend.zeros((round_up(len(self.order), SEGMENTS),), sums.dtype)
        joined[: len(self.order)] = self.group.all_gather(sums)[self.order]
        return joined
