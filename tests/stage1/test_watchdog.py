"""The watchdog aborts a job when a rank has ended or is silent, never when ranks end normally, and uses no CPU time."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest

from stage1_mpi import watchdog
from stage1_mpi.watchdog import ABORTING, ENDING, RUNNING, Heartbeat, Processes, Watchdog
from tests.support.jobs import mpi, succeeded
from tests.support.mpi import mpiexec

needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

# -- one rank in this process, whose peer is another process -----------------------------------------------------------


class Host(SimpleNamespace):
    """The mpi4py calls of a host with two ranks: this process and `peer`."""

    rank, size = 0, 2

    def Split(self, color, key):
        return Host(peer=self.peer)

    def allgather(self, mine):
        return [mine, (1, self.peer.pid) if isinstance(mine, tuple) else mine]

    def bcast(self, mine):
        return mine

    def Barrier(self):
        pass

    Free = Barrier


@pytest.fixture
def pair(monkeypatch):
    """(peer, its Processes, watchdog, codes): abort() appends to `codes` and sets codes.aborted."""
    monkeypatch.setattr(watchdog, "LAUNCHER_TIME", 0)
    monkeypatch.setattr(watchdog, "PERIOD", 0.05)
    monkeypatch.setattr(watchdog, "atexit", SimpleNamespace(register=lambda call: None))

    class Codes(list):
        aborted = threading.Event()

        def append(self, code):
            super().append(code)
            self.aborted.set()

    codes = Codes()
    codes.aborted.clear()
    peer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    processes = Processes(Host(peer=peer), 0)
    found = Watchdog(0, processes, codes.append)
    found.start()
    yield peer, processes, found, codes
    found.stop()
    peer.kill()
    peer.communicate()


@needs_pidfd
@pytest.mark.parametrize("how", ["killed", "exit code 0"])
def test_a_process_that_ends_without_a_word_aborts_the_job(pair, capsys, how):
    peer, _, _, codes = pair
    if how == "killed":
        peer.kill()
    else:
        peer.communicate(b"\n")
    assert codes.aborted.wait(30) and codes == [1]
    wanted = f"error: rank 0: rank 1 (process {peer.pid}) was killed or exited without MPI_Finalize: "
    error = capsys.readouterr().err
    assert error.startswith(wanted) and error.count("\n") == 1, error


@needs_pidfd
def test_a_process_that_has_announced_its_abort_gives_the_exit_code_and_no_second_line(pair, capsys):
    peer, processes, _, codes = pair
    processes._states[1] = ABORTING + 2
    peer.kill()
    assert codes.aborted.wait(30) and codes == [2] and capsys.readouterr().err == ""


def test_ranks_that_find_a_cause_at_the_same_time_wait_for_their_turn(monkeypatch, capsys):
    """The first one prints it; the others then find its exit code, also on a host with many ranks."""
    slept, codes, processes = [], [], SimpleNamespace(abort_code=lambda: 3)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=slept.append))
    for turn in (0, 1, 8, 100):
        Watchdog(turn, processes, codes.append)._fail("cause", turn)
    assert slept == [0, watchdog.STAGGER, 8 * watchdog.STAGGER, 8 * watchdog.STAGGER]
    assert codes == [3] * 4 and capsys.readouterr().err == ""


@needs_pidfd
def test_a_process_that_ends_normally_or_is_stopped_does_not_abort_the_job(pair, capsys):
    peer, processes, found, codes = pair
    calls = threading.Semaphore(0)
    found.add(SimpleNamespace(cause=calls.release, exit=lambda: None))
    assert calls.acquire(timeout=30)
    peer.send_signal(signal.SIGSTOP)
    peer.send_signal(signal.SIGCONT)
    processes._states[1] = ENDING
    peer.kill()
    peer.wait()
    assert calls.acquire(timeout=30) and calls.acquire(timeout=30)  # the watchdog has seen the end, and goes on
    assert codes == [] and capsys.readouterr().err == ""


@needs_pidfd
def test_a_rank_that_stops_its_watchdog_has_ended_normally(pair):
    _, processes, found, _ = pair
    assert processes._states[0] == RUNNING
    found.stop()
    found.stop()
    assert processes._states[0] == ENDING and not found._thread.is_alive()


class Ring(SimpleNamespace):
    """The mpi4py calls of a Heartbeat: the left neighbour sends EXITING, which arrives at the test number `arrival`."""

    rank, size, cancelled, tests = 0, 2, False, 0

    def allgather(self, rank):
        return [0, 1]

    def Isend(self, message, to):
        return SimpleNamespace(Test=lambda: True)

    def Irecv(self, message, source):
        def test():
            self.tests += 1
            if self.tests >= self.arrival:
                message[:] = watchdog.EXITING
            return self.tests >= self.arrival

        return SimpleNamespace(Test=test, Cancel=lambda: setattr(self, "cancelled", True))


@pytest.mark.parametrize("arrival, cancelled", [(1, False), (5, False), (10**9, True)])
def test_at_its_exit_a_rank_waits_for_its_neighbour_but_not_forever(monkeypatch, arrival, cancelled):
    monkeypatch.setattr(watchdog, "EXIT_TIMEOUT", 0.05 if cancelled else 60)
    ring = Ring(arrival=arrival)
    Heartbeat(ring, 0, 60).exit()
    assert ring.cancelled == cancelled and (cancelled or ring.tests == arrival)


@needs_pidfd
@pytest.mark.parametrize("code, seen", [(0, 0), (137, 137), (253, 253), (254, 253), (255, 253)])
def test_any_exit_code_of_an_abort_fits_into_the_byte_of_the_rank(pair, code, seen):
    _, processes, found, _ = pair
    assert processes.abort_code() is None
    found.announce_abort(code)
    assert processes.abort_code() == seen


def test_a_rank_that_was_stopped_itself_gives_its_neighbour_the_whole_time_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    heartbeat = Heartbeat(Ring(arrival=10**9), 0, silence=60)

    def cause(second):
        now[0] = float(second)
        return heartbeat.cause()

    assert [cause(second) for second in (1, 2, 100, *range(101, 161))] == [None] * 63  # stopped from second 2 to 100
    assert cause(161) == "rank 1 has sent no heartbeat for 60 s: it or its host is stuck"


def test_a_kernel_without_pidfd_makes_each_rank_the_first_of_its_own(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    host = SimpleNamespace(rank=3, allgather=lambda mine: [mine] * 4)
    assert watchdog.namespace_split(host) == (3, 3)


# -- jobs --------------------------------------------------------------------------------------------------------------

JOB = """
import os, select, signal, sys, time
import numpy as np
from stage1_mpi import watchdog
watchdog.LAUNCHER_TIME, watchdog.PERIOD = 0.2, 0.1
{before}
from stage1_mpi.mpi_communicator import MpiCommunicator
world = MpiCommunicator()
from mpi4py import MPI
{then}
"""


def job(ranks, then, before=""):
    mpiexec()  # or skip
    code = JOB.format(before=before, then=textwrap.dedent(then))
    return mpi("-n", ranks, sys.executable, "-c", code)


@needs_pidfd
def test_a_rank_whose_end_the_launcher_misses_ends_the_job():
    done = job(
        3,
        """
        root = os.pidfd_open(world.all_gather_object(os.getpid())[0])
        if world.rank == 1:
            if os.fork():
                os._exit(7)
            select.select([root], [], [])  # until the root has ended, this child keeps the pipes to the launcher open
            os._exit(0)
        world.barrier()
        """,
    )
    assert done.code not in (0, None) and not done.left, done.err
    if "--oversubscribe" not in mpiexec():  # Open MPI's launcher does notice
        assert done.code == 1 and done.err.count("error: rank ") == 1, done.err
        assert done.err.startswith("error: rank 0: rank 1 (process "), done.err


@needs_pidfd
def test_ranks_that_end_normally_at_different_times_are_no_failure():
    """Ranks 0 and 1 watch each other's processes; rank 2 has no pidfd, so ranks 0 and 2 exchange a heartbeat."""
    rank_2 = "'2' in map(os.environ.get, ('PMI_RANK', 'OMPI_COMM_WORLD_RANK'))"
    done = job(
        3,
        """
        assert len(world.watchdog._checks) == (world.rank != 1)
        world.barrier()
        if world.rank == 1:
            MPI.Finalize()
            sys.exit()  # not os._exit(): MPICH's launcher then killed another rank in 8 of 62 jobs on busy cores
        time.sleep(3 + 0.3 * world.rank)
        """,
        f"watchdog.HOST_SILENCE = 2; {rank_2} and vars(os).pop('pidfd_open')",
    )
    succeeded(done)


def test_a_silent_host_ends_the_job():
    stopped = "world.rank == 1 and os.kill(os.getpid(), signal.SIGSTOP); world.barrier()"
    done = job(2, stopped, "watchdog.HOST_SILENCE = 0.8; vars(os).pop('pidfd_open', None)")
    assert done.code not in (0, None) and not done.left
    assert done.err.count("error: rank 0: rank 1 has sent no heartbeat for 1 s: it or its host is stuck") == 1, done.err
