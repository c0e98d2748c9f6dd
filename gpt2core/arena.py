"""All parameters are in one flat buffer, all gradients in others of the same layout; each named array is a view."""

import math

import numpy as np

BLOCK = 1024  # elements; each parameter starts at a multiple, so a block has one weight-decay flag and one owner
SEGMENTS = 64  # equal parts of the buffer; each of 1, 2, 4, ... or 64 ranks or threads owns whole segments


class Arena:
    """The layout of named arrays in a flat buffer of `size` elements.

    `size` is equal for 1, 2, 4, ... and 64 `owners`, so slices, norms and checksums do not depend on the number of
    owners. For other numbers (three, for instance) there are more segments, so that each owner has an equal part. The
    padding is zero and stays zero, because its gradient is zero.
    """

    def __init__(self, shapes, owners=1):
        self.shapes, self.slices, end = dict(shapes), {}, 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(end, end + math.prod(shape))
            end = round_up(self.slices[name].stop, BLOCK)
        self.segments = math.lcm(SEGMENTS, owners)
        self.size = round_up(end, self.segments * BLOCK)

    def views(self, flat):
        """{name: the array of its shape inside `flat` (size)}."""
        return {name: flat[part].reshape(self.shapes[name]) for name, part in self.slices.items()}

    def part(self, index, parts):
        """The slice of owner `index` of `parts` owners: whole segments, equally many if `parts` divides `segments`."""
        edges = [self.segments * i // parts * (self.size // self.segments) for i in (index, index + 1)]
        return slice(*edges)

    def padded(self, name):
        """The slice of `name` with the padding after it."""
        part = self.slices[name]
        return slice(part.start, round_up(part.stop, BLOCK))

    def blocks(self, part):
        """The slice of block numbers for `part`, a slice of elements that consists of whole blocks."""
        return slice(part.start // BLOCK, part.stop // BLOCK)

    def decays(self):
        """(size / BLOCK) int32: 1 for the blocks of matrices, to which weight decay applies, else 0."""
        decays = np.zeros(self.size // BLOCK, np.int32)
        for name, shape in self.shapes.items():
            decays[self.blocks(self.padded(name))] = len(shape) > 1
        return decays


def round_up(n, multiple):
    return -(-n // multiple) * multiple
