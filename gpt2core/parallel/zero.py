"""ZeRO-1's all-gather overlapped with the next forward pass: parameters arrive piece by piece, before they are read.

After an update each part of the arena is up to date on its owner only (Rajbhandari et al. 2020). To gather all parts at
the end of the step is simple, but every rank waits for it. Here the next step begins with the all-gather, and the
forward pass overlaps it:

    compute   ... | update | wait | h.0 | h.1 | h.2 | ...
    send                   | wte, wpe | h.0 | h.1 | ...

A piece is a few neighbouring parameters, in the order of forward. The owners' parts may end anywhere, so a piece may
lie in several of them: each owner broadcasts its share of the piece.
"""

import contextlib
import threading

from gpt2core.errors import ConfigError
from gpt2core.parallel.data_parallel import buckets_of

GATHERS = "end", "forward"  # --zero-gather: gather at the end of a step, or during the forward pass of the next step
PIECE_MB = 5.0  # 10^6 bytes; the first layer would wait longer for a larger piece


def check_gather(when, zero):
    """Raise ConfigError for a --zero-gather that does not exist, or that has nothing to gather."""
    if when not in GATHERS:
        raise ConfigError(f"--zero-gather {when} is unknown: choose from {', '.join(GATHERS)}")
    if when == "forward" and not zero:
        raise ConfigError(f"--zero-gather forward needs --zero 1, and this is --zero {zero}: add --zero 1, or use end")


class AsyncAllGather(contextlib.AbstractContextManager):
    """`with gather: loss = model.loss(...)` all-gathers `flat` (size), of which each owner has a part.

    piece_mb (10^6 bytes): least size of a piece. A model waits for the parameters of a module by wait_on_read(module)
    before it reads them. On exit all pieces have arrived. All ranks of the group must enter it.
    """

    def __init__(self, arena, flat, owners, piece_mb=PIECE_MB):
        self.flat, self.owners = flat, owners
        self.pending, self.lock = {}, threading.Lock()
        self.pieces, self.pieces_of = [], {}  # {module: the numbers of its pieces}
        for names in reversed(buckets_of(arena, True, piece_mb * 1e6, flat.itemsize)):  # each lists the last name first
            for name in names:
                self.pieces_of.setdefault(name.rpartition(".")[0], set()).add(len(self.pieces))
            piece = slice(arena.slices[names[-1]].start, arena.padded(names[0]).stop)
            self.pieces.append(list(owned(arena, piece, owners.size)))

    def __enter__(self):
        self.pending = dict(enumerate([self.start(piece) for piece in self.pieces]))

    def __exit__(self, kind, error, traceback):
        if kind is None:
            for number in range(len(self.pieces)):
                self.wait(number)

    def start(self, piece):
        """Handles of the broadcasts that complete one piece on every rank."""
        arrays = [(self.flat[part], owner) for part, owner in piece]
        return [self.owners.broadcast_start(array, owner, out=array) for array, owner in arrays]

    def wait(self, number):
        with self.lock:  # a second worker thread waits here until the first one has the piece
            for handle in self.pending.pop(number, ()):
                handle.wait()

    def wait_on_read(self, module):
        """Return when the parameters of this module have arrived."""
        for number in sorted(self.pieces_of[module]):
            self.wait(number)


def owned(arena, piece, owners):
    """Yield (slice, owner): the shares of the `owners` ranks in a slice of the arena, in rank order."""
    for owner in range(owners):
        part = arena.part(owner, owners)
        start, stop = max(part.start, piece.start), min(part.stop, piece.stop)
        if start < stop:
            yield slice(start, stop), owner
