"""MPI as the communicator: ranks are processes, on one host or on many, and one that waits leaves its core to others.

Collectives run in the caller, or behind it in one thread per communicator, first come, first served. An MPI library
spins while it waits, and so takes the core from a rank that works. Here all waiting is polling, with sleeps that grow;
before a call that does not let itself be polled, the ranks meet, so that inside it nobody waits for work.
"""
# p ranks in a group, n bytes of x on one rank

import atexit
import contextlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gpt2core.communicator import (
    Communicator,
    CommunicatorError,
    Handle,
    Solo,
    check_op,
    check_out,
    check_peer,
    check_rank,
    rows_per_part,
)
from gpt2core.errors import ConfigError
from gpt2core.parallel.launcher_env import read_launcher_env
from stage1_mpi import collectives

NATIVE = "mpi"  # the library's own algorithms
OURS_FROM = 1 << 24  # bytes of the result: from here on our all_gather and all_to_all were faster than MPICH's
LONGEST = 1 << 30  # bytes of one MPI call: Open MPI 4 counts to 2**31, in elements or in bytes
HASTY = 5e-5  # seconds of polling without sleep: the others are about to come
NAP = 1 / 20, 2e-3  # then sleeps of this part of the time waited so far, in seconds at most
WORKED = 2e-5  # seconds on a core: a poll that took more has copied something; an idle one takes a few microseconds
FAREWELL = 0.2  # seconds that a launcher gets to pass on what was written, before it kills the writer


class MpiCommunicator(Communicator):
    """One rank's end of an MPI communicator (an mpi4py one; default: all ranks of the job).

    Sums by the algorithms of stage1_mpi.collectives, "canonical" unless use_collectives is called, or by "mpi": the
    library's, whose order of addition is its own, so that there reduce_scatter and all_reduce may differ in rounding.
    all_gather, all_to_all and broadcast only move data: the library's, but for large all_gather and all_to_all.

    bytes_sent counts the messages of our algorithms, and for the library's calls what the direct algorithm hands over:
    all_reduce 2 (p-1)/p n (rounded down), reduce_scatter and all_to_all (p-1)/p n, all_gather (p-1) n, broadcast
    (p-1) n on root and 0 elsewhere.

    The `_start` form of a collective needs MPI.THREAD_MULTIPLE (mpi4py's default) and raises ConfigError without. A
    message is under way while either end waits for something. Raises ConfigError where mpi4py or an MPI library is
    missing, or where the launcher belongs to another MPI than the library.
    """

    native = NATIVE

    def __init__(self, comm=None):
        self._mpi = import_mpi()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        self.rank, self.size = comm.rank, comm.size
        host = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = host.rank, host.size
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count()))
        own = len(cores) // host.allgather(cores).count(cores)
        self._cores = comm.allreduce(own, self._mpi.MIN)  # that each rank has for itself; 0 where ranks outnumber them
        host.Free()
        # Two duplicates: no message of an algorithm is ever taken for one of the caller's.
        self._comm = comm.Dup()
        self._messages, self._inner = _Messages(self._mpi, self._comm), _Messages(self._mpi, comm.Dup())
        self._algorithm = "canonical"
        self._library_bytes = 0
        self._thread = self._latest = None

    @property
    def bytes_sent(self):
        return self._library_bytes + self._messages.bytes_sent + self._inner.bytes_sent

    def use_collectives(self, name):
        choices = [NATIVE, *collectives.ALL_REDUCE]
        if name not in choices:
            raise ConfigError(f"--collectives {name} is unknown here: choose one of {', '.join(choices)}")
        self._algorithm = name

    def abort(self, code):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody may be there to read it
                stream.flush()
        time.sleep(FAREWELL)
        self._mpi.COMM_WORLD.Abort(code)  # of another communicator MPICH would not tell the launcher, but end itself

    # Each collective: check now, and return what there is to do, in this thread or behind it.

    def _all_reduce(self, x, op="sum", out=None):
        x, p, name = np.asarray(x), self.size, self._algorithm
        add = self._op(op, x.dtype)

        def own():
            self._meet_to_spin()
            return collectives.all_reduce(self._inner, x, op, out, name)

        def native():
            self._meet()
            result = _filled(out, x)  # in place: from one array into another it would take longer than this copy
            for part in _parts(result):
                self._comm.Allreduce(self._mpi.IN_PLACE, part, add)
            return result

        if name == NATIVE:
            return self._plan(x, out, x.shape, native, 2 * (p - 1) * x.nbytes // p)
        return self._plan(x, out, x.shape, own)

    def _reduce_scatter(self, x, op="sum", out=None):
        x, p, name = np.asarray(x), self.size, self._algorithm
        add = self._op(op, x.dtype)
        shape = (rows_per_part(x, p), *x.shape[1:])

        def own():
            self._meet_to_spin()
            return collectives.reduce_scatter(self._inner, x, op, out, "ring" if name == NATIVE else name)

        def native():
            self._meet()
            result = np.empty(shape, x.dtype)
            self._comm.Reduce_scatter_block(np.ascontiguousarray(x), result, add)
            return result if out is None else _filled(out, result)

        if name == NATIVE and x.nbytes <= LONGEST:
            return self._plan(x, out, shape, native, (p - 1) * x.nbytes // p)
        return self._plan(x, out, shape, own)

    def _all_gather(self, x, out=None):
        x, p = np.asarray(x), self.size
        shape = (p * rows_per_part(x), *x.shape[1:])

        def own():
            self._meet_to_spin()
            return collectives.all_gather(self._inner, x, out)

        def native():
            self._meet()
            result = np.empty(shape, x.dtype) if out is None else out
            result.reshape(p, *x.shape)[self.rank] = x
            self._comm.Allgather(self._mpi.IN_PLACE, _bytes(result))
            return result

        if p * x.nbytes < OURS_FROM:
            return self._plan(x, out, shape, native, (p - 1) * x.nbytes)
        return self._plan(x, out, shape, own)

    def _all_to_all(self, x, out=None):
        x, p = np.asarray(x), self.size
        rows_per_part(x, p)

        def own():
            self._meet_to_spin()
            return collectives.all_to_all(self._inner, x, out)

        def native():
            self._meet()
            result = np.empty(x.shape, x.dtype) if out is None else out
            apart = np.array(x, order="C") if np.may_share_memory(x, result) else np.ascontiguousarray(x)
            self._comm.Alltoall(_bytes(apart), _bytes(result))
            return result

        if x.nbytes < OURS_FROM:
            return self._plan(x, out, x.shape, native, (p - 1) * x.nbytes // p)
        return self._plan(x, out, x.shape, own)

    def _broadcast(self, x, root=0, out=None):
        x, p = np.asarray(x), self.size
        check_rank(root, p, "root")

        def native():
            self._meet()
            result = _filled(out, x)
            for part in _parts(result):
                self._comm.Bcast(_bytes(part), root)
            return result

        return self._plan(x, out, x.shape, native, (p - 1) * x.nbytes if self.rank == root else 0)

    def _plan(self, x, out, shape, run, library_bytes=0):
        check_out(out, shape, x.dtype)
        if self.size == 1:
            return lambda: Solo().broadcast(x, out=out)
        self._library_bytes += library_bytes
        return run

    def _op(self, op, dtype):
        """MPI's name of `op`; ConfigError where it has to add up a dtype that it does not know."""
        check_op(op)
        if self._algorithm == NATIVE and (dtype.kind not in "iuf" or dtype == np.float16):
            raise ConfigError(f"--collectives {NATIVE} cannot reduce {dtype}: choose another one")
        return {"sum": self._mpi.SUM, "min": self._mpi.MIN, "max": self._mpi.MAX}[op]

    # Who runs it, and when

    def _here(self, run):
        """The result of run(), in this thread unless calls are under way behind it: then after them."""
        if self._latest is not None and not self._latest.done():
            return self._behind(run).wait()
        self._latest = None  # its result may be large
        return self._guarded(run, cores=1)

    def _behind(self, run):
        """Handle of run(), which goes on while the caller computes."""
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise ConfigError("a collective behind the caller needs MPI.THREAD_MULTIPLE: leave mpi4py.rc.threads alone")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, f"collectives of rank {self.rank}")
        self._latest = self._thread.submit(self._guarded, run, cores=2)  # one for the caller
        return _Behind(self._latest)

    def _guarded(self, run, cores):
        """run(), whose messages may spin where this rank has so many cores; MPI's exceptions as ours."""
        self._inner.spins = self._cores >= cores
        try:
            return run()
        except self._mpi.Exception as error:
            raise CommunicatorError(f"MPI on rank {self.rank} of {self.size}: {error}") from error

    def _meet(self):
        """Return when every rank has come here: an Ibarrier, polled."""
        _wait_for(self._comm.Ibarrier().Test)

    def _meet_to_spin(self):
        """Before messages that may spin, on all ranks or none; where none does, the first message can wait as well."""
        if self._cores:
            self._meet()

    # The five collectives, behind the caller and in it

    def all_reduce_start(self, x, op="sum", out=None):
        return self._behind(self._all_reduce(x, op, out))

    def all_gather_start(self, x, out=None):
        return self._behind(self._all_gather(x, out))

    def reduce_scatter_start(self, x, op="sum", out=None):
        return self._behind(self._reduce_scatter(x, op, out))

    def all_to_all_start(self, x, out=None):
        return self._behind(self._all_to_all(x, out))

    def broadcast_start(self, x, root=0, out=None):
        return self._behind(self._broadcast(x, root, out))

    def all_reduce(self, x, op="sum", out=None):
        return self._here(self._all_reduce(x, op, out))

    def all_gather(self, x, out=None):
        return self._here(self._all_gather(x, out))

    def reduce_scatter(self, x, op="sum", out=None):
        return self._here(self._reduce_scatter(x, op, out))

    def all_to_all(self, x, out=None):
        return self._here(self._all_to_all(x, out))

    def broadcast(self, x, root=0, out=None):
        return self._here(self._broadcast(x, root, out))

    # Messages, meetings, groups

    def send_start(self, x, to, tag=0):
        check_peer(to, self.rank, self.size, "to")
        return self._messages.send_start(np.asarray(x), to, tag)

    def recv_start(self, out, source, tag=0):
        check_peer(source, self.rank, self.size, "source")
        check_out(out, out.shape, out.dtype)
        return self._messages.recv_start(out, source, tag)

    def barrier(self):
        self._here(self._meet)

    def duplicate(self):
        """The same ranks as an mpi4py communicator of the caller's own, whose messages meet none of these."""
        return self._comm.Dup()

    def split(self, color, key=0):
        def run():
            self._meet()
            group = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
            if color is None:
                return None
            communicator = Solo() if group.size == 1 else MpiCommunicator(group)
            group.Free()
            return communicator

        communicator = self._here(run)
        if isinstance(communicator, MpiCommunicator):
            communicator.use_collectives(self._algorithm)
        return communicator


class _Behind(Handle):
    """A collective in the communicator's thread."""

    def __init__(self, future):
        self._future = future

    def wait(self):
        return self._future.result()


class _Messages:
    """Point-to-point on an mpi4py communicator: what the algorithms of stage1_mpi.collectives are made of."""

    def __init__(self, mpi, comm):
        self.mpi, self._comm = mpi, comm
        self.rank, self.size, self.bytes_sent = comm.rank, comm.size, 0
        self.spins = False  # whether to wait in MPI's own way: fastest, and with a core for nothing else

    def send_start(self, x, to, tag=0):
        self.bytes_sent += x.nbytes
        parts = _parts(np.ascontiguousarray(x))
        return _Message(self, [self._comm.Isend(_bytes(part), to, tag) for part in parts])

    def recv_start(self, out, source, tag=0):
        return _Message(self, [self._comm.Irecv(_bytes(part), source, tag) for part in _parts(out)], out)


class _Message(Handle):
    """A message under way, in one or several MPI messages."""

    def __init__(self, messages, requests, result=None):
        self._messages, self._requests, self._result = messages, requests, result

    def wait(self):
        try:
            while self._requests:
                if self._messages.spins:
                    self._requests[0].Wait()
                else:
                    _wait_for(self._requests[0].Test)
                del self._requests[0]
        except self._messages.mpi.Exception as error:
            raise CommunicatorError(f"MPI: {error}") from error
        return self._result


def _wait_for(done):
    """Poll done() until it holds: at first without sleep, then ever less often, since ranks may outnumber cores.

    MPI moves bytes only while it is polled, so a poll that took long has worked, and the waiting starts anew.
    """
    idle_since = time.perf_counter()
    while True:
        on_core = time.thread_time()  # neither another rank on this core nor another thread with the GIL is work
        if done():
            return
        worked, now = time.thread_time() - on_core > WORKED, time.perf_counter()
        if worked:
            idle_since = now
        elif now - idle_since < HASTY:
            _give_way()
        else:
            time.sleep(min((now - idle_since) * NAP[0], NAP[1]))


_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))  # macOS has none


def _filled(out, x):
    """x in `out`, or in a new C-contiguous array."""
    if out is None:
        return np.array(x, order="C")
    if out is not x:
        out[...] = x
    return out


def _parts(x):
    """The C-contiguous x in flat pieces of at most LONGEST bytes; at least one, also of an empty x."""
    flat, step = x.reshape(-1), max(1, LONGEST // x.itemsize)
    return [flat[start : start + step] for start in range(0, max(1, flat.size), step)]


def _bytes(x):
    """The C-contiguous x as bytes, whatever its dtype: MPI does not know them all."""
    return x.reshape(-1).view(np.uint8)


def import_mpi():
    """mpi4py.MPI; ConfigError where it, or a library for it, is missing, or where launcher and library do not match."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, a library is not
        reason = str(error).splitlines()[0]
        tell_launcher_at_exit()
        raise ConfigError(f"stage 1 needs mpi4py and an MPI library: pip install mpi4py mpich ({reason})") from error
    variable, ranks, _ = read_launcher_env()
    if MPI.COMM_WORLD.size == 1 and ranks > 1:
        vendor, version = MPI.get_vendor()
        library = f"{vendor} {'.'.join(map(str, version))}"
        raise ConfigError(
            f"the launcher started {ranks} processes ({variable}), but {library}, which mpi4py loads, sees 1 rank: "
            f"they do not belong together, so use the mpiexec of {vendor}, or pip install mpich for both"
        )
    return MPI


def tell_launcher_at_exit():
    """MPICH's launcher ignores a rank that ends before MPI_Init, for which the others wait: tell it, in PMI-1."""
    fd, rank = os.environ.get("PMI_FD", ""), int(os.environ.get("PMI_RANK", 0))
    if fd.isdigit():
        time.sleep(2 * FAREWELL * min(rank, 8))  # lower ranks first: the cause is told once
        atexit.register(os.write, int(fd), b"cmd=abort exitcode=2\n")
        atexit.register(time.sleep, FAREWELL)  # comes before it: what was said has to reach the launcher first
