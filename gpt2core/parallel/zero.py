"""ZeRO-1's second half beside the next forward: what kernels read comes piece by piece, each before it is asked for.

After an update each part of the arena is up to date with its owner alone (Rajbhandari et al. 2020). To gather the parts
there and then is simple, and all wait for it. Or the next step begins by sending them, and computes meanwhile:

    compute   ... | update | wait | h.0 | h.1 | h.2 | ...
    send                   | wte, wpe | h.0 | h.1 | ...

A piece is a few neighbouring parameters, in the order of forward. Parts end where they like, so that a piece may lie in
several of them: each of its owners broadcasts what it has of it.
"""

import contextlib
import threading

from gpt2core.errors import ConfigError
from gpt2core.parallel.data_parallel import buckets_of

GATHERS = "end", "forward"  # when a step gathers: what its own update has left with the owners, or the last step's
PIECE_MB = 5.0  # 10^6 bytes: of a larger piece more comes than the first layer needs, and it waits for all of it


def check_gather(when, zero):
    """Raise ConfigError for a --zero-gather that does not exist, or that has nothing to gather."""
    if when not in GATHERS:
        raise ConfigError(f"--zero-gather {when} is unknown: choose from {', '.join(GATHERS)}")
    if when == "forward" and not zero:
        raise ConfigError(f"--zero-gather forward is about --zero 1, and this is --zero {zero}: add that, or use end")


class Arriving(contextlib.AbstractContextManager):
    """`with arriving: loss = model.loss(...)` brings everyone all of `flat` (size), of which each owner has a part.

    piece_mb (10^6 bytes) bounds a piece from below. A model that reads its parameters through watched() waits for each
    when it first asks for it. At the end all have come. All ranks of the group must enter it.
    """

    def __init__(self, arena, flat, owners, piece_mb=PIECE_MB):
        self.flat, self.owners = flat, owners
        self.on_their_way, self.one_at_a_time = {}, threading.Lock()
        self.pieces, self.number_of = [], {}
        for names in reversed(buckets_of(arena, True, piece_mb * 1e6, flat.itemsize)):  # each of them last first
            self.number_of |= dict.fromkeys(names, len(self.pieces))
            piece = slice(arena.slices[names[-1]].start, arena.padded(names[0]).stop)
            self.pieces.append(list(owned(arena, piece, owners.size)))

    def __enter__(self):
        self.on_their_way = dict(enumerate([self.send(piece) for piece in self.pieces]))

    def __exit__(self, kind, error, traceback):
        if kind is None:
            for number in range(len(self.pieces)):
                self.wait(number)

    def send(self, piece):
        """Handles of what brings everyone one piece."""
        arrays = [(self.flat[part], owner) for part, owner in piece]
        return [self.owners.broadcast_start(array, owner, out=array) for array, owner in arrays]

    def wait(self, number):
        with self.one_at_a_time:  # a second lane waits for the first one, which waits for the piece
            for handle in self.on_their_way.pop(number, ()):
                handle.wait()

    def watched(self, tensors):
        """{name: Tensor} as one that a model may read at any time."""
        return Watched(tensors, lambda name: self.wait(self.number_of[name]))


class Watched(dict):
    """A dictionary that calls arrive(key) before it gives out what it has of it."""

    def __init__(self, items, arrive):
        super().__init__(items)
        self.arrive = arrive

    def __getitem__(self, key):
        self.arrive(key)
        return super().__getitem__(key)


def owned(arena, piece, owners):
    """Yield (slice, owner): the parts of a slice of the arena that the `owners` ranks have of it, in their order."""
    for owner in range(owners):
        part = arena.part(owner, owners)
        start, stop = max(part.start, piece.start), min(part.stop, piece.stop)
        if start < stop:
            yield slice(start, stop), owner
