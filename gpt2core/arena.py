"""The layout of flat buffers: one buffer for all parameters, another for all gradients; tensors are views of them."""

import math

import numpy as np

from gpt2core.architecture import unit_of

PAGE = 1024  # elements; each parameter starts at a multiple of PAGE, so no page has elements of two parameters
SEGMENTS = 64  # equal slices of the buffer; each of 1, 2, 4, ... or 64 owners (ranks or threads) has whole segments


class Arena:
    """The layout of named arrays in a flat buffer of `size` elements; `shapes`: pairs (name, shape).

    Parameters, gradients and moments have this layout, so AdamW is one loop, and a sum over ranks is one message.
    Between two arrays there may be elements of padding. They are zero and stay zero, because their gradient is zero
    (unless AdamW's eps is 0).

    owners: the number of ranks that divide the buffer, in segments. It is the same for 1, 2, 4, ... and 64 of
    them; for other numbers, such as 3, there are more segments, so that all have equal shares.
    """

    def __init__(self, shapes, owners=1):
        self.shapes, self.slices, end = dict(shapes), {}, 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(end, end + math.prod(shape))
            end = round_up(self.slices[name].stop, PAGE)
        self.norm_pages = round_up(end, SEGMENTS * PAGE) // PAGE  # of the norm: the same for any number of owners
        self.segments = math.lcm(SEGMENTS, owners)
        self.size = round_up(end, self.segments * PAGE)
        self.units = {}  # {unit: [its parameters, which are neighbours]}
        for name in self.shapes:
            self.units.setdefault(unit_of(name), []).append(name)

    def views(self, flat):
        """{name: view of flat (size) in the shape of this array}."""
        return {name: flat[own].reshape(self.shapes[name]) for name, own in self.slices.items()}

    def decays(self):
        """int32 (size / PAGE): 1 for each page of a matrix, otherwise 0; weight decay applies only to matrices."""
        decays = np.zeros(self.size // PAGE, np.int32)
        for name, shape in self.shapes.items():
            decays[self.pages(self.padded(name))] = len(shape) > 1
        return decays

    def padded(self, name):
        """The slice of `name` and of the padding after it."""
        own = self.slices[name]
        return slice(own.start, round_up(own.stop, PAGE))

    def pages(self, elements):
        """The slice of page numbers for `elements`, a slice that must consist of whole pages."""
        return slice(elements.start // PAGE, elements.stop // PAGE)

    # -- for threads and ranks ---------------------------------------------------------------------------------------

    def unit_slice(self, unit):
        """The slice of all parameters of a unit, and of the padding after them."""
        names = self.units[unit]
        return slice(self.slices[names[0]].start, self.padded(names[-1]).stop)

    def share(self, owner, owners):
        """The slice of one of `owners`, in whole segments; all have one size if `owners` divides `segments`."""
        edges = [self.segments * i // owners * (self.size // self.segments) for i in (owner, owner + 1)]
        return slice(*edges)

    def padding(self):
        """The slices of the buffer that belong to no array."""
        return gaps(self.slices.values(), self.size)


def gaps(slices, size):
    """The slices of an array of `size` elements that lie between these slices, which are in order."""
    edges = [0, *(edge for each in slices for edge in (each.start, each.stop)), size]
    return [slice(*pair) for pair in zip(edges[::2], edges[1::2], strict=True) if pair[0] < pair[1]]


def round_up(n, multiple):
    return -(-n // multiple) * multiple  # -(-a // b) is a / b, rounded up
