"""The layout of flat buffers: one buffer for all parameters, another for all gradients; tensors are views of them."""

import math

import numpy as np

PAGE = 1024  # elements; each parameter starts at a multiple of PAGE, so no page has elements of two parameters
SEGMENTS = 64  # equal slices of whole pages; 1, 2, 4, ... or 64 threads or ranks can divide them


class Arena:
    """The layout of named arrays in a flat buffer of `size` elements; `shapes`: pairs (name, shape).

    Parameters, gradients and moments have this layout, so AdamW is one loop, and a sum over ranks is one message.
    Between two arrays there may be elements of padding. They are zero and stay zero, because their gradient is zero
    (unless AdamW's eps is 0).
    """

    def __init__(self, shapes):
        self.shapes, self.slices, end = dict(shapes), {}, 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(end, end + math.prod(shape))
            end = round_up(self.slices[name].stop, PAGE)
        self.size = round_up(end, SEGMENTS * PAGE)

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


def round_up(n, multiple):
    return -(-n // multiple) * multiple  # -(-a // b) is a / b, rounded up
