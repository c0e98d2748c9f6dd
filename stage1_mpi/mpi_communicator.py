"""MpiCommunicator: ranks are processes on one or many hosts; a rank that waits yields its core to other processes.

The `_start` form of a collective (all_reduce_start, ...) runs in a background thread of the communicator, in the order
of the calls. The blocking form runs in the caller's thread, unless an earlier operation is still pending.

An MPI library waits in a loop that uses a whole core (it "spins"). If ranks share a core, a rank that spins slows a
rank that computes. So this class waits by polling: it calls MPI's Test, which returns whether the operation has ended,
with growing sleeps between the calls. Messages may spin only inside a collective, and only if each rank has enough
cores. A blocking MPI call cannot be polled. Before such a call all ranks pass an Ibarrier (a non-blocking barrier),
which can be polled. They then enter the call at about the same time, and inside it they wait only for data.
"""
# p: number of ranks in the group; n: bytes of x on one rank

import contextlib
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gpt2core.communicator import Communicator, CommunicatorError, Handle, Solo, check_op, check_out, rows_per_part
from gpt2core.errors import ConfigError
from gpt2core.threads import cores_of_process
from stage1_mpi import collectives
from stage1_mpi.import_mpi import FLUSH_TIME, import_mpi
from stage1_mpi.watchdog import watch_world

NATIVE = "mpi"  # the algorithm name that selects the MPI library's own collectives
CHOICES = NATIVE, *collectives.ALL_REDUCE  # the names for use_collectives()
OURS_MIN_BYTES = 1 << 24  # minimum bytes of a result for which our all_gather and all_to_all beat MPICH's
MAX_CALL_BYTES = 1 << 30  # most bytes of one MPI call: Open MPI 4 cannot count more than 2**31 elements or bytes
BUSY_POLL = 5e-5  # seconds of polling without sleep
SLEEP_FRACTION = 1 / 20  # after BUSY_POLL, each sleep is this fraction of the time waited so far
MAX_SLEEP = 2e-3  # seconds
ACTIVE_POLL = 2e-5  # seconds of CPU time: a poll that used more has copied data; an idle poll uses a few microseconds
KILL_TIME = 3.0  # seconds to wait for the launcher to kill this rank; it cannot do so if the host is unreachable
ABORT_TIMEOUT = 5  # seconds after which SIGALRM kills a process that aborts


class MpiCommunicator(Communicator):
    """A rank of an mpi4py communicator (default: COMM_WORLD, all ranks of the job).

    Sums use the algorithm "canonical" of stage1_mpi.collectives. use_collectives() selects another algorithm of that
    module, or "mpi": the MPI library's own collectives. The order of the library's sums is unknown, so its
    reduce_scatter may round differently from its all_reduce. broadcast always calls the library; so do all_gather and
    all_to_all if the result is smaller than OURS_MIN_BYTES, otherwise they use stage1_mpi.collectives.

    bytes_sent counts the messages of stage1_mpi.collectives. How many bytes a library call sends is unknown. For such
    a call bytes_sent grows by a formula: all_reduce 2 (p-1)/p n (rounded down), reduce_scatter and all_to_all
    (p-1)/p n, all_gather (p-1) n, broadcast (p-1) n on root and 0 elsewhere.

    The `_start` form of a collective needs MPI.THREAD_MULTIPLE (mpi4py's default) and raises ConfigError without it.
    A pending message progresses while its sender or receiver waits for any operation, and in Handle.progress(). Open
    MPI may need both for each part of a message: if the kernel does not let a process read the memory of another one.
    The constructor raises ConfigError if mpi4py or an MPI library is missing, or if launcher and library are different
    MPI implementations.
    """

    native_algorithm = NATIVE

    def __init__(self, comm=None, watchdog=None):
        self._mpi = import_mpi()
        is_world, comm = comm is None, self._mpi.COMM_WORLD if comm is None else comm
        self.rank, self.size = comm.rank, comm.size
        host = comm.Split_type(self._mpi.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = host.rank, host.size
        cores = cores_of_process()
        ranks_on_these_cores = host.allgather(cores).count(cores)
        # The smallest number on any host; 0 if a host has more ranks than cores.
        self._cores_per_rank = comm.allreduce(len(cores) // ranks_on_these_cores, self._mpi.MIN)
        self.watchdog = watchdog  # one per process, shared by all its communicators; None in a job of one rank
        if is_world and self.size > 1:
            self.watchdog = watch_world(self._mpi, comm, host, self.abort)
        host.Free()
        # Two duplicates: a message of the caller must never match a message inside a collective.
        self._comm = comm.Dup()
        self._messages, self._internal_messages = _Messages(self._mpi, self._comm), _Messages(self._mpi, comm.Dup())
        self._algorithm = "canonical"
        self._library_bytes = 0  # bytes_sent of the calls of the MPI library
        self._thread = self._latest = None  # the background thread, and the future of its latest operation

    @property
    def bytes_sent(self):
        return self._library_bytes + self._messages.bytes_sent + self._internal_messages.bytes_sent

    def use_collectives(self, name):
        if name not in CHOICES:
            raise ConfigError(f"`collectives={name}`: unknown algorithm; choose one of {', '.join(CHOICES)}")
        self._algorithm = name

    def sent(self, call, size, rank):
        nbytes, name = call.elements * call.itemsize, self._algorithm
        if call.name == "all_reduce" and name != NATIVE:
            return collectives.all_reduce_elements(name, call.elements, size, rank) * call.itemsize
        if call.name == "reduce_scatter" and not (name == NATIVE and nbytes <= MAX_CALL_BYTES):
            name = "ring" if name == NATIVE else name
            return collectives.reduce_scatter_elements(name, call.elements, size, rank) * call.itemsize
        return super().sent(call, size, rank)

    def abort(self, code):
        # SIGALRM kills this process if it cannot exit: CUDA waits at exit for NCCL, which may wait for another rank.
        signal.alarm(ABORT_TIMEOUT)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader of a pipe may have closed it
                stream.flush()
        time.sleep(FLUSH_TIME)
        if self.watchdog:
            self.watchdog.announce_abort(code)
        self._mpi.COMM_WORLD.Abort(code)  # with MPICH, Abort of another communicator ends only this process
        time.sleep(KILL_TIME)  # with MPICH, Abort returns, and the launcher then kills this process
        os._exit(code)

    # Each of these methods checks its arguments immediately and returns a function that runs the collective: ours(), an
    # algorithm of stage1_mpi.collectives, or native(), a call of the MPI library. _blocking() calls the returned
    # function in the caller's thread, _start() in the background thread.

    def _all_reduce(self, x, op="sum", out=None):
        x, p, name = np.asarray(x), self.size, self._algorithm
        add = self._mpi_op(op, x.dtype)

        def ours():
            self._barrier_before_spinning()
            return collectives.all_reduce(self._internal_messages, x, op, out, name)

        def native():
            self._polled_barrier()
            result = _copied(x, out)  # to copy and reduce in place is faster than to reduce from x into another array
            for piece in _pieces(result):
                self._comm.Allreduce(self._mpi.IN_PLACE, piece, add)
            return result

        if name == NATIVE:
            return self._checked(x, out, x.shape, native, 2 * (p - 1) * x.nbytes // p)
        return self._checked(x, out, x.shape, ours)

    def _reduce_scatter(self, x, op="sum", out=None):
        x, p, name = np.asarray(x), self.size, self._algorithm
        add = self._mpi_op(op, x.dtype)
        shape = (rows_per_part(x, p), *x.shape[1:])

        def ours():
            self._barrier_before_spinning()
            return collectives.reduce_scatter(self._internal_messages, x, op, out, "ring" if name == NATIVE else name)

        def native():
            self._polled_barrier()
            result = np.empty(shape, x.dtype)
            self._comm.Reduce_scatter_block(np.ascontiguousarray(x), result, add)
            return result if out is None else _copied(result, out)

        if name == NATIVE and x.nbytes <= MAX_CALL_BYTES:
            return self._checked(x, out, shape, native, (p - 1) * x.nbytes // p)
        return self._checked(x, out, shape, ours)

    def _all_gather(self, x, out=None):
        x, p = np.asarray(x), self.size
        shape = (p * rows_per_part(x), *x.shape[1:])

        def ours():
            self._barrier_before_spinning()
            return collectives.all_gather(self._internal_messages, x, out)

        def native():
            self._polled_barrier()
            result = np.empty(shape, x.dtype) if out is None else out
            result.reshape(p, *x.shape)[self.rank] = x
            self._comm.Allgather(self._mpi.IN_PLACE, _bytes(result))
            return result

        if p * x.nbytes < OURS_MIN_BYTES:
            return self._checked(x, out, shape, native, (p - 1) * x.nbytes)
        return self._checked(x, out, shape, ours)

    def _all_to_all(self, x, out=None):
        x, p = np.asarray(x), self.size
        rows_per_part(x, p)

        def ours():
            self._barrier_before_spinning()
            return collectives.all_to_all(self._internal_messages, x, out)

        def native():
            self._polled_barrier()
            result = np.empty(x.shape, x.dtype) if out is None else out
            source = np.array(x, order="C") if np.may_share_memory(x, result) else np.ascontiguousarray(x)
            self._comm.Alltoall(_bytes(source), _bytes(result))
            return result

        if x.nbytes < OURS_MIN_BYTES:
            return self._checked(x, out, x.shape, native, (p - 1) * x.nbytes // p)
        return self._checked(x, out, x.shape, ours)

    def _broadcast(self, x, root=0, out=None):
        x, p = np.asarray(x), self.size
        self.check_rank(root, "root")

        def native():
            self._polled_barrier()
            result = _copied(x, out)
            for piece in _pieces(result):
                self._comm.Bcast(_bytes(piece), root)
            return result

        return self._checked(x, out, x.shape, native, (p - 1) * x.nbytes if self.rank == root else 0)

    def _checked(self, x, out, shape, run, library_bytes=0):
        """Check `out`, count the bytes of a library call, return `run`; for a group of one, a function that copies."""
        check_out(out, shape, x.dtype)
        if self.size == 1:
            return lambda: Solo().broadcast(x, out=out)
        self._library_bytes += library_bytes
        return run

    def _mpi_op(self, op, dtype):
        """The MPI operation for `op`; raises ConfigError if "mpi" is selected and MPI cannot reduce the dtype."""
        check_op(op)
        if self._algorithm == NATIVE and (dtype.kind not in "iuf" or dtype == np.float16):
            raise ConfigError(f"`collectives={NATIVE}`: cannot reduce {dtype}; use canonical")
        return {"sum": self._mpi.SUM, "min": self._mpi.MIN, "max": self._mpi.MAX}[op]

    # The caller's thread and the background thread

    def _blocking(self, run):
        """The result of run() in the caller's thread, or in the background thread if operations are pending there."""
        if self._latest is not None and not self._latest.done():
            return self._start(run).wait()
        self._latest = None  # frees the result of the last operation, which may be large
        return self._run(run, cores=1)

    def _start(self, run):
        """Start run() in the background thread and return its Handle at once."""
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise ConfigError(
                "a non-blocking collective needs MPI.THREAD_MULTIPLE, which MPI was started without: "
                "do not set mpi4py.rc.threads or mpi4py.rc.thread_level"
            )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, f"collectives of rank {self.rank}")
        self._latest = self._thread.submit(self._run, run, cores=2)  # the caller's thread uses the other core
        return _BackgroundOperation(self._latest)

    def _run(self, function, cores):
        """The result of function(). Its messages may spin if each rank has at least `cores` cores.

        Raises CommunicatorError if MPI fails.
        """
        self._internal_messages.spins = self._cores_per_rank >= cores
        try:
            return function()
        except self._mpi.Exception as error:
            raise CommunicatorError(f"MPI on rank {self.rank} of {self.size}: {error}") from error

    def _polled_barrier(self):
        """A barrier that waits by polling an Ibarrier, with sleeps."""
        _poll(self._comm.Ibarrier().Test)

    def _barrier_before_spinning(self):
        """A barrier before messages that may spin. It is omitted with more ranks than cores: then no message spins."""
        if self._cores_per_rank:
            self._polled_barrier()

    # The five collectives, non-blocking and blocking

    def all_reduce_start(self, x, op="sum", out=None):
        return self._start(self._all_reduce(x, op, out))

    def all_gather_start(self, x, out=None):
        return self._start(self._all_gather(x, out))

    def reduce_scatter_start(self, x, op="sum", out=None):
        return self._start(self._reduce_scatter(x, op, out))

    def all_to_all_start(self, x, out=None):
        return self._start(self._all_to_all(x, out))

    def broadcast_start(self, x, root=0, out=None):
        return self._start(self._broadcast(x, root, out))

    def all_reduce(self, x, op="sum", out=None):
        return self._blocking(self._all_reduce(x, op, out))

    def all_gather(self, x, out=None):
        return self._blocking(self._all_gather(x, out))

    def reduce_scatter(self, x, op="sum", out=None):
        return self._blocking(self._reduce_scatter(x, op, out))

    def all_to_all(self, x, out=None):
        return self._blocking(self._all_to_all(x, out))

    def broadcast(self, x, root=0, out=None):
        return self._blocking(self._broadcast(x, root, out))

    # Messages, barrier, groups

    def send_start(self, x, to, tag=0):
        self.check_peer(to, "to")
        return self._messages.send_start(np.asarray(x), to, tag)

    def recv_start(self, out, source, tag=0):
        self.check_peer(source, "source")
        check_out(out, out.shape, out.dtype)
        return self._messages.recv_start(out, source, tag)

    def barrier(self):
        self._blocking(self._polled_barrier)

    def duplicate(self):
        """An mpi4py communicator of the same ranks. Its messages cannot match messages of this communicator."""
        return self._comm.Dup()

    def split(self, color, key=0):
        def run():
            self._polled_barrier()
            group = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
            if color is None:
                return None
            communicator = Solo() if group.size == 1 else MpiCommunicator(group, self.watchdog)
            group.Free()
            return communicator

        communicator = self._blocking(run)
        if isinstance(communicator, MpiCommunicator):
            communicator.use_collectives(self._algorithm)
        return communicator


class _BackgroundOperation(Handle):
    """A pending collective in the communicator's background thread. Traces read from `future` when it has ended."""

    def __init__(self, future):
        self.future = future

    def wait(self):
        return self.future.result()


class _Messages:
    """Point-to-point messages of an mpi4py communicator, which the algorithms of stage1_mpi.collectives use."""

    def __init__(self, mpi, comm):
        self.mpi, self._comm = mpi, comm
        self.rank, self.size, self.bytes_sent = comm.rank, comm.size, 0
        self.spins = False  # True: wait in MPI's own loop, which has the lowest latency but uses a core

    def send_start(self, x, to, tag=0):
        self.bytes_sent += x.nbytes
        pieces = _pieces(np.ascontiguousarray(x))
        return _Message(self, [self._comm.Isend(_bytes(piece), to, tag) for piece in pieces])

    def recv_start(self, out, source, tag=0):
        return _Message(self, [self._comm.Irecv(_bytes(piece), source, tag) for piece in _pieces(out)], out)


class _Message(Handle):
    """A pending message, sent as one or several MPI messages."""

    def __init__(self, messages, requests, result=None):
        self._messages, self._requests, self._result = messages, requests, result

    @contextlib.contextmanager
    def _as_communicator_error(self):
        try:
            yield
        except self._messages.mpi.Exception as error:
            raise CommunicatorError(f"MPI: {error}") from error

    def progress(self):
        with self._as_communicator_error():
            if self._requests and self._requests[0].Test():
                del self._requests[0]

    def wait(self):
        with self._as_communicator_error():
            while self._requests:
                if self._messages.spins:
                    self._requests[0].Wait()
                else:
                    _poll(self._requests[0].Test)
                del self._requests[0]
        return self._result


def _poll(done):
    """Call done() until it returns True: at first without sleep, then with longer and longer sleeps.

    MPI transfers data only while it is polled. A poll that used CPU time has transferred data; after such a poll the
    sleeps start again from zero. Elapsed time would not show whether a poll transferred data, because it includes the
    time in which other ranks use the core and other threads hold the GIL.
    """
    idle_since = time.perf_counter()
    while True:
        cpu = time.thread_time()
        if done():
            return
        transferred, now = time.thread_time() - cpu > ACTIVE_POLL, time.perf_counter()
        if transferred:
            idle_since = now
        elif now - idle_since < BUSY_POLL:
            _yield_core()
        else:
            time.sleep(min((now - idle_since) * SLEEP_FRACTION, MAX_SLEEP))


_yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))  # macOS has no sched_yield


def _copied(x, out):
    """x copied into `out`, or into a new C-contiguous array."""
    if out is None:
        return np.array(x, order="C")
    if out is not x:
        out[...] = x
    return out


def _pieces(x):
    """The C-contiguous x in flat pieces of at most MAX_CALL_BYTES bytes; one piece for an empty x."""
    flat, step = x.reshape(-1), max(1, MAX_CALL_BYTES // x.itemsize)
    return [flat[start : start + step] for start in range(0, max(1, flat.size), step)]


def _bytes(x):
    """The C-contiguous x as a flat array of bytes, because MPI does not have a type for every dtype."""
    return x.reshape(-1).view(np.uint8)
