"""A thread of each rank that aborts the job if another rank has failed; otherwise the other ranks could wait forever.

The launcher (mpiexec) should end the job when a rank is killed, but it does not always detect this. It never detects
that a host is unreachable. So each rank watches the processes of the other ranks on its host: it opens a pidfd (a Linux
file descriptor of a process) for each, and the kernel makes the pidfd readable when the process ends. A rank that ends
normally first records this in memory that the ranks of a host share. Ranks that cannot watch each other's processes
exchange heartbeats over MPI: the first rank of each host or, on systems without pidfd, every rank. The thread sleeps in
poll(), so it uses almost no CPU time.
"""

import atexit
import contextlib
import mmap
import os
import select
import sys
import threading
import time

import numpy as np

PERIOD = 1.0  # seconds between two heartbeats
HOST_SILENCE = 60.0  # seconds without a heartbeat after which a host counts as lost
LAUNCHER_TIME = 2.0  # seconds for the launcher to detect that a rank has ended, and to end the job itself
STAGGER = 0.4  # seconds between the aborts of two ranks, so that only the first rank prints the cause
EXIT_TIMEOUT = 5.0  # seconds that a rank waits at its exit for its neighbours to exit too
ALIVE, EXITING = (np.array([message], np.int8) for message in (0, 1))  # the two heartbeat messages
RUNNING, ENDING, ABORTING = range(3)  # states of a rank; a rank that aborts has the state ABORTING + exit code


def watch_world(mpi, comm, host, abort):
    """Start and return the Watchdog of this rank. All ranks of the job, at least 2, must call it.

    `comm`: an mpi4py communicator of all ranks of the job; `host`: an mpi4py communicator of the ranks on this host;
    `mpi`: the module mpi4py.MPI; abort(code) ends the job. The heartbeat between hosts needs MPI.THREAD_MULTIPLE;
    without this thread level a lost host is not detected.
    """
    processes = Processes(host, comm.rank)
    watchdog = Watchdog(comm.rank, processes, abort)
    firsts = comm.Split(0 if processes.is_first else mpi.UNDEFINED, comm.rank)  # the first ranks of all groups
    if processes.is_first and firsts.size > 1 and mpi.Query_thread() == mpi.THREAD_MULTIPLE:
        watchdog.add(Heartbeat(firsts, comm.rank, HOST_SILENCE))
    watchdog.start()
    # If the program calls MPI_Finalize, MPI first calls delete_fn. Otherwise mpi4py calls MPI_Finalize at the exit of
    # Python, which is too late to stop a thread; for this case start() registers stop() with atexit.
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=lambda *_: watchdog.stop()), None)
    return watchdog


class Watchdog:
    """The watchdog of one rank: a thread that watches `processes` and calls the checks that add() receives.

    A check has two methods. cause() returns an error text, which aborts the job, or None. exit() is called when this
    rank ends normally.
    """

    def __init__(self, rank, processes, abort):
        self._rank, self._processes, self._abort = rank, processes, abort
        self._checks = []
        self._exiting = threading.Event()
        self._wake_read, self._wake_write = os.pipe()  # a byte written to this pipe makes poll() return
        self._thread = threading.Thread(target=self._watch, name=f"watchdog of rank {rank}", daemon=True)

    def start(self):
        atexit.register(self.stop)  # runs before MPI_Finalize
        self._thread.start()

    def add(self, check):
        """From now on call check.cause() about once every PERIOD seconds."""
        self._checks.append(check)
        os.write(self._wake_write, b"+")

    def announce_abort(self, code):
        """Record that this rank aborts and prints the cause. The other ranks then print nothing and use this code."""
        self._processes.set_state(ABORTING + code)

    def stop(self):
        """Stop watching, and record that this rank ends normally. Later calls do nothing."""
        if not self._exiting.is_set():
            self._exiting.set()
            os.write(self._wake_write, b".")
            self._thread.join(2 * EXIT_TIMEOUT)
            self._processes.set_state(ENDING)

    def _watch(self):
        poll = select.poll()
        for descriptor in (self._wake_read, *self._processes.descriptors):
            poll.register(descriptor, select.POLLIN)
        while True:
            found = [descriptor for descriptor, _ in poll.poll(PERIOD * 1e3 if self._checks else None)]
            if self._wake_read in found:
                os.read(self._wake_read, 1)
            if self._exiting.is_set():
                break
            for descriptor in set(found) - {self._wake_read}:
                poll.unregister(descriptor)
                if cause := self._processes.cause(descriptor):
                    time.sleep(LAUNCHER_TIME)
                    self._fail(cause, self._processes.index)
            self.check()
        for check in self._checks:
            check.exit()

    def check(self):
        """Call cause() of every check once; abort the job if one returns a text."""
        for check in list(self._checks):
            if cause := check.cause():
                self._fail(cause, self._rank)

    def _fail(self, cause, turn):
        """Wait `turn` * STAGGER, print the cause unless another rank has printed it, and abort the job."""
        time.sleep(STAGGER * min(turn, 8))
        code = self._processes.abort_code()
        if code is None:
            self.announce_abort(1)
            with contextlib.suppress(OSError, ValueError):  # the reader of a pipe may have closed it
                print(f"error: rank {self._rank}: {cause}", file=sys.stderr)
        self._abort(1 if code is None else code)


class Processes:
    """A group of ranks on one host that watch each other's processes. Each rank has a state in shared memory.

    `host`: an mpi4py communicator of the ranks on this host; `rank`: this rank's number in the job. Ranks in different
    PID namespaces are in different groups. On a system without pidfd or memfd (Linux 5.3 has both), each rank is a
    group of its own.
    """

    def __init__(self, host, rank):
        group = host.Split(*namespace_split(host))
        states = shared_bytes(group)
        if not all(group.allgather(states is not None)):
            group, states = group.Split(group.rank), bytearray(1)  # each rank is a group of its own
        self._states, self.index, self.is_first = states, group.rank, group.rank == 0
        self._watched = {}  # pidfd: (index in the group, "rank R (process P)")
        for index, (number, pid) in enumerate(group.allgather((rank, os.getpid()))):
            if index != group.rank:
                self._watched[os.pidfd_open(pid)] = index, f"rank {number} (process {pid})"
        group.Barrier()  # no rank may end before every rank watches it
        group.Free()

    @property
    def descriptors(self):
        """One pidfd for each other process of the group; it becomes readable when the process ends."""
        return list(self._watched)

    def set_state(self, state):
        self._states[self.index] = min(state, 255)

    def abort_code(self):
        """The exit code of the lowest rank that has called announce_abort(), or None."""
        return next((state - ABORTING for state in self._states[:] if state >= ABORTING), None)

    def cause(self, descriptor):
        """Called when the process of `descriptor` has ended: returns an error text, or None if it ended normally."""
        index, name = self._watched[descriptor]
        if self._states[index] == ENDING:
            return None
        how = "was killed or exited without MPI_Finalize"
        return f"{name} {how}: see its output, or the kernel's log if memory was full; continue with --resume"


def namespace_split(host):
    """The arguments (color, key) of host.Split() for groups in which the ranks can open pidfds of each other."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except (AttributeError, OSError):
        namespace = None
    namespaces = host.allgather(namespace)
    return (host.rank if namespace is None else namespaces.index(namespace)), host.rank


def shared_bytes(group):
    """Memory that all ranks of `group` share: one byte per rank, initially 0. None if this process cannot open it."""
    try:
        descriptor = os.memfd_create("states of the ranks")
        os.ftruncate(descriptor, group.size)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    except (AttributeError, OSError):
        descriptor, path = None, ""
    path = group.bcast(path)  # every rank opens the file of rank 0
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), group.size)
    except OSError:
        return None
    finally:
        group.Barrier()  # rank 0 must not close the file before all ranks have opened it
        if descriptor is not None:
            os.close(descriptor)


class Heartbeat:
    """A check of the watchdog: each rank of a ring sends a message, ALIVE, to its right neighbour about once a second.

    A rank that receives nothing from its left neighbour for too long reports the left neighbour as lost.
    `comm`: an mpi4py communicator of the ring; `rank`: this rank's number in the job; `silence`: seconds without a
    heartbeat after which a neighbour counts as lost.
    """

    def __init__(self, comm, rank, silence):
        self._comm, self._silence = comm, silence
        left, self._right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self._left, self._left_rank = left, comm.allgather(rank)[left]
        self._message, self._left_exited = np.empty(1, np.int8), False
        self._receive, self._send = comm.Irecv(self._message, left), None
        self._last_heartbeat = self._last_check = time.monotonic()

    def cause(self):
        """Send a heartbeat. Returns an error text if the left neighbour has sent nothing for too long, else None."""
        now = time.monotonic()
        # If this process itself was stopped for a while, count that as a heartbeat: the neighbour may have sent some.
        received = now - self._last_check > 3 * PERIOD
        self._last_check = now
        with contextlib.suppress(RuntimeError):  # MPI raises it if a neighbour is lost or has ended normally
            received = self._receive_all() or received
            if self._send is None or self._send.Test():
                self._send = self._comm.Isend(ALIVE, self._right)
        if received:
            self._last_heartbeat = now
        if now - self._last_heartbeat > self._silence:
            return f"rank {self._left_rank} has sent no heartbeat for {self._silence:.0f} s: it or its host is stuck"
        return None

    def _receive_all(self):
        """Receive all arrived messages; returns whether there was one, or the left neighbour has ended normally."""
        received = self._left_exited
        while not self._left_exited and self._receive.Test():
            received, self._left_exited = True, bool(self._message[0] == EXITING[0])
            if not self._left_exited:
                self._receive = self._comm.Irecv(self._message, self._left)
        return received

    def exit(self):
        """Exchange EXITING with the neighbours, because MPI_Finalize requires that no message is pending."""
        deadline, sent = time.monotonic() + EXIT_TIMEOUT, False
        with contextlib.suppress(RuntimeError):
            exiting = self._comm.Isend(EXITING, self._right)
            while not (sent and self._receive_all() and self._left_exited) and time.monotonic() < deadline:
                sent = sent or exiting.Test()
                time.sleep(0.01)
            if not self._left_exited:
                self._receive.Cancel()
