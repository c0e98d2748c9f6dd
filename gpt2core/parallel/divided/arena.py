"""An arena that threads and ranks divide: into units, and into shares of equal size."""

import math

from gpt2core.architecture import unit_of
from gpt2core.arena import PAGE, SEGMENTS, Arena, round_up


class DividedArena(Arena):
    """An Arena that consists of equal `segments`. owners: the number of ranks that divide it, in whole segments.

    The segments are the same for 1, 2, 4, ... and 64 owners; for other numbers, such as 3, there are more of them, so
    that all shares are equal. norm_pages: the pages of the norm, the same for any number of owners. units: {unit: [its
    parameters, which are neighbours]}.
    """

    def __init__(self, shapes, owners=1):
        super().__init__(shapes)
        self.units = {}
        for name in self.shapes:
            self.units.setdefault(unit_of(name), []).append(name)
        self.norm_pages, self.segments = self.size // PAGE, math.lcm(SEGMENTS, owners)
        self.size = round_up(self.size, self.segments * PAGE)

    def share(self, owner, owners):
        """The slice of one of `owners`, in whole segments; all have one size if `owners` divides `segments`."""
        edges = [self.segments * i // owners * (self.size // self.segments) for i in (owner, owner + 1)]
        return slice(*edges)

    def unit_slice(self, unit):
        """The slice of all parameters of a unit, and of the padding after them."""
        names = self.units[unit]
        return slice(self.slices[names[0]].start, self.padded(names[-1]).stop)

    def padding(self):
        """The slices of the buffer that belong to no array."""
        return gaps(self.slices.values(), self.size)


def gaps(slices, size):
    """The slices of an array of `size` elements that lie between these slices, which are in order."""
    edges = [0, *(edge for each in slices for edge in (each.start, each.stop)), size]
    return [slice(*pair) for pair in zip(edges[::2], edges[1::2], strict=True) if pair[0] < pair[1]]
