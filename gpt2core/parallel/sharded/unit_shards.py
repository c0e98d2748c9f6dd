"""The layout of a rank's shards: each unit of the model is divided evenly over the ranks, for ZeRO-2 and ZeRO-3.

ZeRO-1 divides the arena into one contiguous share for each rank. Here each unit is divided, so that an all-gather gives
its parameters, and a reduce-scatter sums its gradients, while other units are computed. For 2 ranks:

    arena    | embedding     | h.0           | head     |
    rank 0   | embedding | h.0   | head |                          the first halves, one after another
    rank 1   | embedding | h.0   | head |                          the second halves
"""

import numpy as np

from gpt2core.arena import PAGE
from gpt2core.data import even_slices
from gpt2core.parallel.divided.arena import gaps
from gpt2core.parallel.divided.flat_layout import FlatLayout
from gpt2core.parallel.divided.model_pages import ModelPages
from gpt2core.parallel.sharded.units import shard_lengths


class UnitShards(FlatLayout):
    """The layout of flat arrays with this rank's shard of each unit; the rank updates all that it stores.

    group: the ranks that divide the arena. pages: see ArenaLayout. A shard has whole pages, so a unit may have padding
    at its end. parts: {unit: the slice of its shard}. pieces: of each parameter of which this rank has elements {name:
    (slice of the flat array, slice of the elements)}.
    """

    def __init__(self, arena, group, backend, pages=None):
        self.arena, self.group, self.backend, self.owner = arena, group, backend, group.rank
        self.model_pages = pages or ModelPages.undivided(arena, backend)
        self.parts, self.size = {}, 0
        for unit, length in shard_lengths(arena, group.size).items():
            self.parts[unit] = slice(self.size, self.size + length)
            self.size += length
        self.own, self.pieces = slice(0, self.size), dict(self.own_pieces())
        self.order = backend.asarray(np.concatenate([self.pages_of(unit) for unit in arena.units]))

    def own_pieces(self):
        """Yield the items of `pieces`."""
        for unit, part in self.parts.items():
            first = self.first(unit)
            for name in self.arena.units[unit]:
                array = self.arena.slices[name]
                start, stop = max(array.start, first), min(array.stop, first + part.stop - part.start)
                if start < stop:
                    own = slice(part.start + start - first, part.start + stop - first)
                    yield name, (own, slice(start - array.start, stop - array.start))

    def first(self, unit):
        """The index in the arena of the first element of this rank's shard."""
        part = self.parts[unit]
        return self.arena.unit_slice(unit).start + self.group.rank * (part.stop - part.start)

    def pages_of(self, unit):
        """The index of each page of a unit among the pages of rank 0, rank 1, ..."""
        whole, part = (self.arena.pages(each) for each in (self.arena.unit_slice(unit), self.parts[unit]))
        rank, page = np.divmod(np.arange(whole.stop - whole.start), part.stop - part.start)
        return rank * (self.size // PAGE) + part.start + page

    # -- the methods of FlatLayout -------------------------------------------------------------------------------------

    def shares(self, workers):
        pages = even_slices(self.size // PAGE, workers)
        return [slice(part.start * PAGE, part.stop * PAGE) for part in pages]

    def runs(self, share):
        found = []
        for unit, part in self.parts.items():
            start, stop = max(part.start, share.start), min(part.stop, share.stop)
            if start < stop:
                found.append((slice(start, stop), self.first(unit) + start - part.start))
        return found

    def gather(self, flat):
        pass  # no other rank updates what this rank stores

    def gather_own(self, own, on_host=True):
        return own

    def decays(self):
        decays, pages = self.arena.decays(), self.arena.pages
        own = np.zeros(self.size // PAGE, np.int32)
        for unit, part in self.parts.items():
            count = (part.stop - part.start) // PAGE
            found = decays[pages(self.arena.unit_slice(unit))][self.group.rank * count :][:count]
            own[pages(part).start :][: len(found)] = found
        return own

    def padding(self):
        return gaps([own for own, _ in self.pieces.values()], self.size)

    def join(self, sums):
        joined = self.backend.zeros((self.arena.norm_pages,), sums.dtype)
        joined[: len(self.order)] = self.group.all_gather(sums)[self.order]
        return self.model_pages.join(joined)

    def put(self, flat, name, array):
        if name in self.pieces:
            own, elements = self.pieces[name]
            flat[own] = self.backend.asarray(array.reshape(-1)[elements])

    def whole(self, flat):
        result = self.backend.zeros((self.arena.size,), flat.dtype)
        for unit, part in self.parts.items():
            whole = result[self.arena.unit_slice(unit)]
            whole[...] = self.group.all_gather(flat[part])[: len(whole)]
        return result

    # -- whole units ---------------------------------------------------------------------------------------------------

    def whole_size(self, unit):
        """The elements of the shards of all ranks of a unit."""
        part = self.parts[unit]
        return self.group.size * (part.stop - part.start)

    def allocate(self, unit, dtype):
        """An uninitialised array for a whole unit; an all-gather of the shards of all ranks fills it."""
        return self.backend.empty((self.whole_size(unit),), dtype)

    def clear_padding(self, unit, array):
        """Set the padding of the array of a whole unit to 0."""
        for gap in gaps(self.parameter_slices(unit).values(), len(array)):
            array[gap] = 0

    def parameter_slices(self, unit):
        """{name: the slice of this parameter} in the array of a whole unit."""
        names, slices = self.arena.units[unit], self.arena.slices
        first = slices[names[0]].start
        return {name: slice(slices[name].start - first, slices[name].stop - first) for name in names}

    def views(self, unit, array):
        """{name: view in the shape of this parameter} of the array of a whole unit."""
        slices, shapes = self.parameter_slices(unit), self.arena.shapes
        return {name: array[part].reshape(shapes[name]) for name, part in slices.items()}
