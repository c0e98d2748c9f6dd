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

from gpt2core.parallel.data.strategies import buckets_of

PIECE_MB = 5.0  # minimum size of a piece in 10^6 bytes; with a larger first piece, the forward pass would begin later


class NoGather(contextlib.nullcontext):
    """The gather of parameters that are complete after the update."""

    def wait_for_unit(self, unit):
        """Return at once."""


class AsyncAllGather(contextlib.AbstractContextManager):
    """`with gather: part.forward(...)` all-gathers the buffer `flat` (size), of which each rank owns a part.

    owners: the ranks that divide the arena; all of them must enter the context. piece_mb (10^6 bytes): minimum size of
    a piece. wait_for_unit(unit) is called before the parameters of a unit are read. On exit all pieces are received.
    """

    def __init__(self, arena, flat, owners, piece_mb=PIECE_MB):
        self.arena, self.flat, self.owners = arena, flat, owners
        self.pending, self.lock = {}, threading.Lock()  # pending: {number of a piece: its handles}
        self.pieces, self.pieces_of = [], {unit: set() for unit in arena.units}  # [[(slice, owner)] of each piece]
        units = {name: unit for unit, names in arena.units.items() for name in names}
        for names in reversed(buckets_of(arena, True, piece_mb * 1e6, flat.itemsize)):  # names[0] is the last parameter
            for name in names:
                self.pieces_of[units[name]].add(len(self.pieces))  # numbers of the pieces of a unit
            piece = slice(arena.slices[names[-1]].start, arena.padded(names[0]).stop)
            self.pieces.append(list(owned(arena, piece, owners.size)))

    def __enter__(self):
        self.receive()  # what a step that has failed did not wait for
        self.pending = dict(enumerate([self.start(piece) for piece in self.pieces]))

    def __exit__(self, kind, error, traceback):
        if kind is None:
            self.receive()

    def receive(self):
        """Return when all pieces have been received."""
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

    def wait_for_unit(self, unit):
        """Return when the parameters of this unit are received. A tied head reads wte, which the first unit has."""
        for number in sorted(self.pieces_of[unit]):
            self.wait(number)


def owned(arena, piece, owners):
    """Yield (slice, owner): the share of each owner in `piece`, a slice of the arena. owners: the number of owners."""
    for owner in range(owners):
        share = arena.share(owner, owners)
        start, stop = max(share.start, piece.start), min(share.stop, piece.stop)
        if start < stop:
            yield slice(start, stop), owner
