"""Two additional checks of the watchdog in stage 3: heartbeats of all ranks, and errors of NCCL.

A heartbeat is a message that a rank sends to the next rank every second. In stage 1 heartbeats only detect a lost host,
so only the first rank of each host sends them: when a process ends, the other ranks of its host detect this by its
pidfd. But a process can also hang without ending. Then the other ranks wait for it forever, in a loop on the host or in
an NCCL kernel, which the host cannot interrupt. So in stage 3 every rank sends heartbeats.
"""

from stage1_mpi.watchdog import Heartbeat

SILENCE = 20.0  # seconds without a heartbeat after which a rank counts as lost
IN_PROGRESS = 7  # ncclInProgress: the communicator is busy; not an error


def watch_gpus(world):
    """Add both checks to the watchdog of `world`, the NcclCommunicator of all ranks; a job of one rank has none."""
    watchdog = world.mpi_group.watchdog
    if watchdog:
        watchdog.add(Heartbeat(world.mpi_group.duplicate(), world.rank, SILENCE))
        watchdog.add(NcclErrors(world.gpu.communicators))


class NcclErrors:
    """A check of all NCCL communicators in a list; new communicators may be appended to the list at any time."""

    def __init__(self, communicators):
        self._communicators = communicators

    def cause(self):
        """An error text if a communicator has failed, else None."""
        for communicator in list(self._communicators):
            try:
                result, text = communicator.check_async_error() or 0, ""
            except KeyError as error:  # a result for which CuPy has no name
                result, text = error.args[0], ""
            except RuntimeError as error:  # CuPy's NcclError
                result, text = getattr(error, "status", None), f", {error}"
            if result not in (0, IN_PROGRESS):
                found = f"NCCL has failed (result {result}{text})"
                return f"{found}: another rank or the network failed; set NCCL_DEBUG=WARN for details"
        return None

    def exit(self):
        """Called when this rank ends normally. There is nothing to do: this check sends no messages."""
