"""A thread that ends the job when a rank stands still or NCCL has failed: all the others would wait for it forever.

A rank that is killed is the launcher's business. But one that was stopped, or whose host is out of reach, just says
nothing; and what waits for it is on the host a loop, and on the GPU a kernel of NCCL, which no host can leave. So every
rank tells its right neighbour each second that it lives, over MPI, and listens to its left one.
"""

import atexit
import contextlib
import sys
import threading
import time

import numpy as np

PERIOD = 1.0  # seconds between two signs of life
SILENCE = 20.0  # seconds without one until a rank counts as lost
TURN = 0.4  # seconds that a rank has to tell the cause before the next one would
FAREWELL = 5.0  # seconds that a rank which ends waits for its neighbours to end too
ALIVE, LEAVING = (np.array([word], np.int8) for word in (0, 1))
IN_PROGRESS = 7  # ncclResult_t of a communicator that is not done, and fine


class Watchdog:
    """Of one rank of `world`, an NcclCommunicator; a group of one has nobody to watch."""

    def __init__(self, world):
        self._world, self._watched = world, world.gpu.watched
        self._left, self._right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of rank {world.rank}", daemon=True)

    def start(self):
        if self._left != self._world.rank:
            self._comm = self._world.host.duplicate()
            atexit.register(self._end)  # is called before MPI's own end
            self._thread.start()

    def _watch(self):
        self._news, self._gone = np.empty(1, np.int8), False
        self._coming, self._going = self._comm.Irecv(self._news, self._left), None
        heard = looked = time.monotonic()
        while not self._ending.wait(PERIOD):
            now = time.monotonic()
            if self._hear() or now - looked > 3 * PERIOD:  # or it was this process that stood still
                heard = now
            looked = now
            if self._going is None or self._going.Test():
                self._going = self._comm.Isend(ALIVE, self._right)
            if now - heard > SILENCE:
                self._fail(f"rank {self._left} has given no sign of life for {SILENCE:.0f} s: it or its host is stuck")
            self._check_nccl()
        self._leave()

    def _hear(self):
        """Whether the left neighbour has said something since, or will say no more."""
        heard = self._gone
        while not self._gone and self._coming.Test():
            heard, self._gone = True, bool(self._news[0] == LEAVING[0])
            if not self._gone:
                self._coming = self._comm.Irecv(self._news, self._left)
        return heard

    def _leave(self):
        """Say so, and take the neighbour's word: MPI wants no message to be open at its end."""
        until, last = time.monotonic() + FAREWELL, self._comm.Isend(LEAVING, self._right)
        sent = False
        while not (sent and self._hear() and self._gone) and time.monotonic() < until:
            sent = sent or last.Test()
            time.sleep(0.01)
        if not self._gone:
            self._coming.Cancel()

    def _check_nccl(self):
        for communicator in list(self._watched):
            try:
                result, text = communicator.check_async_error() or 0, ""
            except KeyError as error:  # CuPy has no name for the result
                result, text = error.args[0], ""
            except RuntimeError as error:  # an NcclError
                result, text = getattr(error, "status", None), f", {error}"
            if result not in (0, IN_PROGRESS):
                found = f"NCCL has failed (result {result}{text})"
                self._fail(f"{found}: another rank, or the way to it, is gone; NCCL_DEBUG=WARN says more")

    def _fail(self, cause):
        """Tell the cause and end the job; a lower rank that has seen it too is given the time to tell it alone."""
        time.sleep(TURN * min(self._world.rank, 8))
        with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
            print(f"error: rank {self._world.rank}: {cause}", file=sys.stderr)
        self._world.abort(1)

    def _end(self):
        self._ending.set()
        self._thread.join(2 * FAREWELL)
