"""All parameters in one flat buffer, all gradients in others of the same layout: a name is a view into them."""

import math

BLOCK = 1024  # elements; every parameter starts on a block, so a block has one weight decay and one owner
SEGMENTS = 64  # equal parts of the buffer; any power of two of ranks or threads up to 64 owns whole segments


class Arena:
    """The layout of named arrays in a flat buffer of `size` elements.

    `size` is a multiple of SEGMENTS * BLOCK, whatever the number of ranks, so that slices, norms and checksums are the
    same for all of them. The padding is zero and stays zero: its gradient is. Only where `owners` ranks, each with an
    equal part, do not divide SEGMENTS (three, for instance) are there more segments.
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
        """The slice that belongs to number `index` of `parts` equal owners, in whole segments where they divide."""
        edges = [self.segments * i // parts * (self.size // self.segments) for i in (index, index + 1)]
        return slice(*edges)

    def padded(self, name):
        """The slice of `name` with the padding behind it: these slices, in order, are the buffer but for its end."""
        part = self.slices[name]
        return slice(part.start, round_up(part.stop, BLOCK))

    def decayed(self, part):
        """Yield (slice, whether weight decay applies) over `part`: matrices decay, biases and LayerNorm do not."""
        runs = []
        for name, shape in self.shapes.items():
            start = max(self.slices[name].start, part.start)
            stop = min(round_up(self.slices[name].stop, BLOCK), part.stop)
            if start < stop:
                decays = len(shape) > 1
                if runs and runs[-1][2] == decays:
                    runs[-1][1] = stop
                else:
                    runs.append([start, stop, decays])
        return [(slice(start, stop), decays) for start, stop, decays in runs]


def round_up(n, multiple):
    return -(-n // multiple) * multiple
