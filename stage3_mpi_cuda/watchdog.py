"""A thread that aborts the job if a rank stops responding or NCCL fails; without it the other ranks would hang.

The launcher detects a rank that is killed. It does not detect a rank that is stopped or whose host is unreachable.
The other ranks wait for it in a loop on the host, or in an NCCL kernel, which the host cannot interrupt. So every rank
sends a heartbeat to its right neighbour each second, over MPI, and expects one from its left neighbour.
"""

import atexit
import contextlib
import sys
import threading
import time

import numpy as np

PERIOD = 1.0  # seconds between two heartbeats
SILENCE = 20.0  # seconds without a heartbeat after which a rank counts as lost
STAGGER = 0.4  # seconds between the aborts of two ranks, so that only the first prints the cause
EXIT_TIMEOUT = 5.0  # seconds that a rank waits at its exit for its neighbours to exit too
ALIVE, EXITING = (np.array([message], np.int8) for message in (0, 1))
IN_PROGRESS = 7  # ncclInProgress: the communicator is busy; not an error


class Watchdog:
    """The watchdog of one rank of `world`, an NcclCommunicator; a group of one needs none."""

    def __init__(self, world):
        self._world, self._communicators = world, world.gpu.communicators
        self._left, self._right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        self._exiting = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of rank {world.rank}", daemon=True)

    def start(self):
        if self._left != self._world.rank:
            self._comm = self._world.host.duplicate()
            atexit.register(self._stop)  # _stop() runs before MPI_Finalize
            self._thread.start()

    def _watch(self):
        self._message, self._left_exited = np.empty(1, np.int8), False
        self._receive, self._send = self._comm.Irecv(self._message, self._left), None
        last_heartbeat = last_check = time.monotonic()
        while not self._exiting.wait(PERIOD):
            now = time.monotonic()
            if self._heard() or now - last_check > 3 * PERIOD:  # the check is late if this process itself was stopped
                last_heartbeat = now
            last_check = now
            if self._send is None or self._send.Test():
                self._send = self._comm.Isend(ALIVE, self._right)
            if now - last_heartbeat > SILENCE:
                self._fail(f"rank {self._left} has sent no heartbeat for {SILENCE:.0f} s: it or its host is stuck")
            self._check_nccl()
        self._exit()

    def _heard(self):
        """Whether the left neighbour has sent a message since the last call, or has exited."""
        heard = self._left_exited
        while not self._left_exited and self._receive.Test():
            heard, self._left_exited = True, bool(self._message[0] == EXITING[0])
            if not self._left_exited:
                self._receive = self._comm.Irecv(self._message, self._left)
        return heard

    def _exit(self):
        """Exchange EXITING with the neighbours, because MPI_Finalize requires that no message is pending."""
        deadline, exiting = time.monotonic() + EXIT_TIMEOUT, self._comm.Isend(EXITING, self._right)
        sent = False
        while not (sent and self._heard() and self._left_exited) and time.monotonic() < deadline:
            sent = sent or exiting.Test()
            time.sleep(0.01)
        if not self._left_exited:
            self._receive.Cancel()

    def _check_nccl(self):
        for communicator in list(self._communicators):
            try:
                result, text = communicator.check_async_error() or 0, ""
            except KeyError as error:  # CuPy has no name for this result
                result, text = error.args[0], ""
            except RuntimeError as error:  # an NcclError
                result, text = getattr(error, "status", None), f", {error}"
            if result not in (0, IN_PROGRESS):
                found = f"NCCL has failed (result {result}{text})"
                self._fail(f"{found}: another rank or the network failed; set NCCL_DEBUG=WARN for details")

    def _fail(self, cause):
        """Print the cause and abort the job; higher ranks wait, so that only the lowest rank prints it."""
        time.sleep(STAGGER * min(self._world.rank, 8))
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe may have closed it
            print(f"error: rank {self._world.rank}: {cause}", file=sys.stderr)
        self._world.abort(1)

    def _stop(self):
        self._exiting.set()
        self._thread.join(2 * EXIT_TIMEOUT)
