"""The layout of flat buffers: one buffer for all parameters, another for all gradients; tensors are views of them."""

import math

import numpy as np

BLOCK = 1024  # elements; each parameter starts at a multiple of BLOCK, so no block contains parts of two parameters
SEGMENTS = 64  # equal parts of the buffer; each of 1, 2, 4, ... or 64 owners (ranks or threads) has whole segments


class Arena:
    """The layout of named arrays in a flat buffer of `size` elements; `shapes`: pairs (name, shape).

    owners: the number of ranks that divide the buffer. The layout is the same for 1, 2, 4, ... and 64 owners. For other
    numbers, such as 3, there are more segments, so that all owners have equal parts. Between two arrays there may be
    elements of padding. They are zero, and they stay zero because their gradient is zero.
    """

    def __init__(self, shapes, owners=1):
        self.shapes, self.slices, end = dict(shapes), {}, 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(end, end + math.prod(shape))
            end = round_up(self.slices[name].stop, BLOCK)
        self.segments = math.lcm(SEGMENTS, owners)
        self.size = round_up(end, self.segments * BLOCK)

    def views(self, flat):
        """{name: view of flat (size) in the shape of this array}."""
        return {name: flat[part].reshape(self.shapes[name]) for name, part in self.slices.items()}

    def part(self, index, parts):
        """Slice `index` of the `parts` into which whole segments are divided; equal if `parts` divides `segments`."""
        edges = [self.segments * i // parts * (self.size // self.segments) for i in (index, index + 1)]
        return slice(*edges)

    def padded(self, name):
        """The slice of `name` and of the padding after it."""
        part = self.slices[name]
        return slice(part.start, round_up(part.stop, BLOCK))

    def blocks(self, part):
        """The slice of block numbers for `part`, a slice of elements; `part` must consist of whole blocks."""
        return slice(part.start // BLOCK, part.stop // BLOCK)

    def decays(self):
        """int32 (size / BLOCK): 1 for each block of a matrix, otherwise 0; weight decay applies only to matrices."""
        decays = np.zeros(self.size // BLOCK, np.int32)
        for name, shape in self.shapes.items():
            decays[self.blocks(self.padded(name))] = len(shape) > 1
        return decays


def round_up(n, multiple):
    return -(-n // multiple) * multiple  # -(-a // b) is a / b, rounded up
