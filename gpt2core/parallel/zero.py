"""ZeRO-1's all-gather overlapped with the next forward pass: parameters are received in pieces, before they are read.

After an update, each part of the parameters is up to date only on the rank that owns it (Rajbhandari et al. 2020). With
an all-gather at the end of the step, all ranks wait for the whole all-gather. Here the next step starts the all-gather,
and computes layer i (h.i) while the parameters of later layers are sent:

    compute   ... | update | wait | h.0 | h.1 | h.2 | ...
    send                   | wte, wpe | h.0 | h.1 | ...

A piece consists of a few neighbouring parameters; the pieces are sent in the order of the forward pass. A piece may
contain elements of several owners, so each owner broadcasts its share of the piece.
"""

import contextlib
import threading

from gpt2core.errors import ConfigError
from gpt2core.parallel.data_parallel import buckets_of

GATHERS = "end", "forward"  # --zero-gather: gather at the end of a step, or during the forward pass of the next step
PIECE_MB = 5.0  # minimum size of a piece in 10^6 bytes; with a larger first piece, the forward pass would begin later


def check_gather(when, zero):
    """Raise ConfigError for an unknown --zero-gather, or for "forward" without --zero 1."""
    if when not in GATHERS:
        raise ConfigError(f"--zero-gather {when} is unknown: choose from {', '.join(GATHERS)}")
    if when == "forward" and not zero:
        raise ConfigError(f"--zero-gather forward needs --zero 1, and this is --zero {zero}: add --zero 1, or use end")


class AsyncAllGather(contextlib.AbstractContextManager):
    """`with gather: loss = model.loss(...)` all-gathers the buffer `flat` (size), of which each rank owns a part.

    owners: the ranks that divide the arena; all of them must enter the context. piece_mb (10^6 bytes): minimum size of
    a piece. A model calls wait_on_read(module) before it reads the parameters of a module. On exit all pieces have been
    received.
    """

    def __init__(self, arena, flat, owners, piece_mb=PIECE_MB):
        self.flat, self.owners = flat, owners
        self.pending, self.lock = {}, threading.Lock()  # pending: {number of a piece: its handles}
        self.pieces, self.pieces_of = [], {}  # [[(slice, owner)] of each piece]; {module: numbers of its pieces}
        for names in reversed(buckets_of(arena, True, piece_mb * 1e6, flat.itemsize)):  # names[0] is the last parameter
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
        """Start the broadcasts that complete one piece on every rank, and return their handles."""
        arrays = [(self.flat[part], owner) for part, owner in piece]
        return [self.owners.broadcast_start(array, owner, out=array) for array, owner in arrays]

    def wait(self, number):
        """Return when piece `number` has been received."""
        with self.lock:  # a second worker thread waits here until the first thread has received the piece
            for handle in self.pending.pop(number, ()):
                handle.wait()

    def wait_on_read(self, module):
        """Return when the parameters of this module have been received."""
        for number in sorted(self.pieces_of[module]):
            self.wait(number)


def owned(arena, piece, owners):
    """Yield (slice, owner): the share of each owner in `piece`, a slice of the arena. owners: the number of owners."""
    for owner in range(owners):
        part = arena.part(owner, owners)
        start, stop = max(part.start, piece.start), min(part.stop, piece.stop)
        if start < stop:
            yield slice(start, stop), owner
