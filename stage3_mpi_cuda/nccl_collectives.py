"""Collectives on the arrays of GPUs, by NCCL: on a stream of their own, so that kernels go on while data travels.

Nobody waits on the host. A call records an event behind what has been computed so far, the communication stream waits
for it, and NCCL's kernel follows there; wait() lets the caller's stream wait for the event behind that. These two
events are the fork and the join of a CUDA graph, so a step that is being recorded takes the same lines.
"""
# p ranks in a group, r this one; n elements of x on one rank

import contextlib
import ctypes

from gpt2core.communicator import (
    Communicator,
    Handle,
    address,
    check_op,
    check_out,
    check_peer,
    check_rank,
    rows_per_part,
)
from gpt2core.errors import ConfigError
from stage3_mpi_cuda.tree_sum import tree_sum

NATIVE = "nccl"  # NCCL's own sums
# ncclDataType_t and ncclRedOp_t, in the words of nccl.h; what only moves, moves as bytes
TYPES = {"int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
OPS = {"sum": 0, "max": 2, "min": 3}
BYTE = 1


class NcclCollectives(Communicator):
    """The ranks of `host`, an MPI group of more than one, each with its GPU; x and out are arrays there.

    A sum is "canonical" unless use_collectives("nccl") is called: slices to their owners, the tree of
    gpt2core.parallel.tree_sum over what came (float16 and bfloat16 are added up in float32, and rounded once), and the
    sums back to all. Sums of integers, minima and maxima do not depend on an order, and are always NCCL's own.

    bytes_sent: all_reduce 2 (p-1)/p n (rounded down), reduce_scatter and all_to_all (p-1)/p n, all_gather (p-1) n,
    broadcast (p-1) n on root and 0 elsewhere, in bytes of x. A replayed graph counts nothing.

    Raises ConfigError where NCCL cannot connect the ranks.
    """

    def __init__(self, host, gpu):
        self.rank, self.size, self.bytes_sent = host.rank, host.size, 0
        self.local_rank, self.local_size = host.local_rank, host.local_size
        self._xp, self._cuda, self._stream, self._nccl = gpu.cupy, gpu.cupy.cuda, gpu.stream, gpu.nccl
        self._algorithm, self._messages = "canonical", []
        unique = host.broadcast_object(self._nccl.get_unique_id() if host.is_root else None)
        try:
            self._comm = self._nccl.NcclCommunicator(self.size, unique, self.rank)
        except self._nccl.NcclError as error:
            raise ConfigError(
                f"NCCL cannot connect {self.size} ranks ({error}): NCCL_DEBUG=WARN in the environment says why, and "
                f"--transport mpi does without it"
            ) from error
        # For good: NCCL's destructor waits until every graph with a call in it is gone, and at the end of a program
        # nobody says which of the two goes first. The process leaves nothing behind anyway.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))
        gpu.watched.append(self._comm)

    def use_collectives(self, name):
        self._algorithm = name

    # -- the collectives: what NCCL is to do, on the communication stream ----------------------------------------------

    def all_reduce_start(self, x, op="sum", out=None):
        check_op(op)
        check_out(out, x.shape, x.dtype)
        kind, in_order = self._kind(x.dtype), self._in_order(op, x.dtype)
        x, out = self._source(x, out, at=0), self._result(out, x.shape, x.dtype)
        self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size

        def run():
            if in_order:
                self._canonical_all_reduce(x.reshape(-1), out.reshape(-1))
            else:
                self._comm.allReduce(address(x), address(out), x.size, kind, OPS[op], self._stream.ptr)

        return self._behind(run, x, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        check_op(op)
        shape = (rows_per_part(x, self.size), *x.shape[1:])
        check_out(out, shape, x.dtype)
        kind, in_order = self._kind(x.dtype), self._in_order(op, x.dtype)
        x, out = self._source(x, out, at=-self.rank * x.nbytes // self.size), self._result(out, shape, x.dtype)
        self.bytes_sent += (self.size - 1) * x.nbytes // self.size

        def run():
            if in_order:
                tree_sum(out.reshape(-1), self._exchange(x.reshape(-1), edges_of(x.size, self.size)))
            else:
                self._comm.reduceScatter(address(x), address(out), out.size, kind, OPS[op], self._stream.ptr)

        return self._behind(run, x, out)

    def all_gather_start(self, x, out=None):
        shape = (self.size * rows_per_part(x), *x.shape[1:])
        check_out(out, shape, x.dtype)
        x, out = self._source(x, out, at=self.rank * x.nbytes), self._result(out, shape, x.dtype)
        self.bytes_sent += (self.size - 1) * x.nbytes

        def run():
            self._comm.allGather(address(x), address(out), x.nbytes, BYTE, self._stream.ptr)

        return self._behind(run, x, out)

    def all_to_all_start(self, x, out=None):
        rows_per_part(x, self.size)
        check_out(out, x.shape, x.dtype)
        x, out = self._source(x, out), self._result(out, x.shape, x.dtype)
        self.bytes_sent += (self.size - 1) * x.nbytes // self.size

        def run():
            edges = edges_of(x.size, self.size)
            self._swap(pieces(x, edges), pieces(out, edges))

        return self._behind(run, x, out)

    def broadcast_start(self, x, root=0, out=None):
        check_rank(root, self.size, "root")
        check_out(out, x.shape, x.dtype)
        x, out = self._source(x, out, at=0), self._result(out, x.shape, x.dtype)
        self.bytes_sent += (self.size - 1) * x.nbytes if self.rank == root else 0

        def run():
            self._comm.broadcast(address(x), address(out), x.nbytes, BYTE, root, self._stream.ptr)

        return self._behind(run, x, out)

    # -- the canonical sum ---------------------------------------------------------------------------------------------

    def _canonical_all_reduce(self, x, out):
        """Part j of x to rank j, who adds up the tree over all parts j; its sum to all. x and out (n), maybe one."""
        edges = edges_of(x.size, self.size)
        mine = out[edges[self.rank] : edges[self.rank + 1]]
        parts = self._exchange(x, edges)
        if mine.size:
            tree_sum(mine, parts)
        if x.size % self.size:  # parts of different lengths
            self._swap([(address(mine), mine.nbytes)] * self.size, pieces(out, edges))
        else:
            self._comm.allGather(address(mine), address(out), mine.nbytes, BYTE, self._stream.ptr)

    def _exchange(self, x, edges):
        """Everyone's part r of x (n), which the edges divide into p: (p, length of part r)."""
        length = edges[self.rank + 1] - edges[self.rank]
        parts = self._xp.empty((self.size, length), x.dtype)
        self._swap(pieces(x, edges), pieces(parts, [j * length for j in range(self.size + 1)]))
        return parts

    # -- messages: all that are open travel as one group, or two ranks that send first would wait for each other ------

    def send_start(self, x, to, tag=0):
        check_peer(to, self.rank, self.size, "to")
        x = self._xp.ascontiguousarray(x)
        self.bytes_sent += x.nbytes
        return self._message(self._comm.send, x, to, tag)

    def recv_start(self, out, source, tag=0):
        check_peer(source, self.rank, self.size, "source")
        check_out(out, out.shape, out.dtype)
        return self._message(self._comm.recv, out, source, tag, result=out)

    def _message(self, call, array, peer, tag, result=None):
        if tag:
            raise ConfigError(f"tag {tag}: NCCL knows no tags, so receive in the order of sending, with tag 0")
        message = _Message(self, lambda: call(address(array), array.nbytes, BYTE, peer, self._stream.ptr), result)
        self._messages.append(message)
        return message

    def _post_messages(self):
        messages, self._messages = self._messages, []

        def run():
            with grouped(self._nccl):
                for message in messages:
                    message.call()

        if messages:
            behind = self._behind(run)
            for message in messages:
                message.behind = behind

    def _swap(self, gone, come):
        """Send piece j to rank j and receive one from it, (address, bytes) each, for all j, this rank included."""
        with grouped(self._nccl):
            for peer, ((source, length), (place, room)) in enumerate(zip(gone, come, strict=True)):
                if length:
                    self._comm.send(source, length, BYTE, peer, self._stream.ptr)
                if room:
                    self._comm.recv(place, room, BYTE, peer, self._stream.ptr)

    # -- streams and events --------------------------------------------------------------------------------------------

    def _behind(self, run, *arrays):
        """Handle of run() on the communication stream, behind all that the caller's stream has to do by now.

        arrays: what it reads, and last its result; kept until the caller's stream waits for it, so that no one is
        given their memory before.
        """
        self._post_messages()
        begun, done = (self._cuda.Event(disable_timing=True) for _ in range(2))
        begun.record()
        self._stream.wait_event(begun)
        with self._stream:  # what is allocated here is this stream's, and used again in its order
            run()
        done.record(self._stream)
        return _Behind(self._cuda, done, arrays)

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _kind(self, dtype):
        """NCCL's number for a type that it can add up."""
        if dtype.name not in TYPES:
            raise ConfigError(f"NCCL cannot reduce {dtype}: use one of {', '.join(TYPES)}")
        return TYPES[dtype.name]

    def _in_order(self, op, dtype):
        """Whether the result depends on the order, and the canonical one is wanted."""
        return op == "sum" and dtype.kind not in "iu" and self._algorithm != NATIVE

    def _source(self, x, out, at=None):
        """x in one piece, which may lie `at` so many bytes into out, and nowhere else in its memory."""
        x = self._xp.ascontiguousarray(x)
        if out is not None and address(x) - address(out) != at and overlap(x, out):
            return x.copy()
        return x

    def _result(self, out, shape, dtype):
        return self._xp.empty(shape, dtype) if out is None else out


class _Behind(Handle):
    """A call on the communication stream; to wait for it is the business of the caller's stream, not of the host."""

    def __init__(self, cuda, done, arrays):
        super().__init__(arrays[-1] if arrays else None)
        self._open = cuda, done, arrays

    def wait(self):
        if self._open:
            cuda, done, _ = self._open
            cuda.get_current_stream().wait_event(done)
            self._open = None
        return self._result


class _Message(Handle):
    """A message that leaves, with all others that are open, when any of them is waited for."""

    def __init__(self, collectives, call, result):
        super().__init__(result)
        self._collectives, self.call, self.behind = collectives, call, None

    def wait(self):
        if self.behind is None:
            self._collectives._post_messages()
        self.behind.wait()
        return self._result


@contextlib.contextmanager
def grouped(nccl):
    """Calls inside are one to NCCL: none of them can wait for another."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def edges_of(n, p):
    """n elements in p pieces as equal as they come: where they begin, and n."""
    return [n * j // p for j in range(p + 1)]


def pieces(array, edges):
    """(address, bytes) of each piece of a contiguous array; edges in elements."""
    at, step = address(array), array.itemsize
    return [(at + a * step, (b - a) * step) for a, b in zip(edges, edges[1:], strict=False)]


def overlap(a, b):
    """Whether two contiguous arrays share memory."""
    return address(a) < address(b) + b.nbytes and address(b) < address(a) + a.nbytes
