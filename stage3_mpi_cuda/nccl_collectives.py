"""Collectives and messages of NCCL on GPU arrays, on streams of their own, so that the caller's kernels overlap.

No call blocks the host, except the first message of a group, which connects its ranks. A call records an event,
`ready`, on the caller's stream and makes the communication stream wait for this event. The call then enqueues NCCL's
kernel on the communication stream, and records a second event, `done`, after the kernel. wait() makes the caller's
stream wait for `done`. During stream capture these two events become the fork and the join of the CUDA graph, so
capture needs no other code. Messages (nccl_channels.py) do the same, on a stream for each pair of ranks and direction.
"""
# p: number of ranks in the group; r: this rank; n: number of elements of x on one rank

import contextlib

from gpt2core.communicator import Communicator, Handle, address, check_op, check_out, rows_per_part, textbook_bytes
from gpt2core.errors import ConfigError
from stage3_mpi_cuda.nccl_channels import BYTE, new_communicator, open_channels
from stage3_mpi_cuda.tree_sum import tree_sum

NATIVE = "nccl"  # the algorithm name that selects NCCL's own sums
# Values of ncclDataType_t and ncclRedOp_t in nccl.h. Collectives that only copy data use the type BYTE for any dtype.
TYPES = {"int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
OPS = {"sum": 0, "max": 2, "min": 3}


class NcclCollectives(Communicator):
    """Collectives of the ranks of mpi_group, an MpiCommunicator of at least two ranks; x and out are CuPy arrays.

    Each rank has its own GPU. gpu: the GpuBinding of this rank. mpi_group only distributes ids of NCCL.

    By default a sum is "canonical"; use_collectives("nccl") selects NCCL's own sums. A canonical sum has three steps:
    all-to-all of parts; the sum of the received parts in the order of gpt2core/tree_sum.py (float16 and
    bfloat16 are added in float32 and rounded once); all-gather of the sums. Sums of integers, minima and maxima do not
    depend on the order; they always use NCCL's own reductions.

    bytes_sent grows by a formula; b is the number of bytes of x: all_reduce 2 (p-1)/p b (rounded down), reduce_scatter
    and all_to_all (p-1)/p b, all_gather (p-1) b, broadcast (p-1) b on root and 0 elsewhere. Replays of a CUDA graph are
    not counted.

    Raises ConfigError if NCCL cannot connect the ranks.
    """

    native_algorithm = NATIVE

    def __init__(self, mpi_group, gpu):
        self._mpi_group, self._gpu = mpi_group, gpu
        self.rank, self.size, self.bytes_sent = mpi_group.rank, mpi_group.size, 0
        self.local_rank, self.local_size = mpi_group.local_rank, mpi_group.local_size
        self._xp, self._cuda, self._stream, self._nccl = gpu.cupy, gpu.cupy.cuda, gpu.stream, gpu.nccl
        self._algorithm = "canonical"
        unique_id = mpi_group.broadcast_object(gpu.nccl.get_unique_id() if mpi_group.is_root else None)
        self._comm = new_communicator(gpu, self.size, unique_id, self.rank)
        self._channels = {}  # {(source, to): Channel} of this rank's messages; empty before the first one
        self._receives = []  # _Receives that are not yet enqueued

    @staticmethod
    def sent_on_device(mpi_group, call, size, rank):
        """See Communicator.sent, for an x on the device."""
        return textbook_bytes(call.name, call.elements * call.itemsize, size, rank == call.root)

    def use_collectives(self, name):
        self._algorithm = name

    # -- collectives; each `run` enqueues NCCL calls on the communication stream ---------------------------------------

    def all_reduce_start(self, x, op="sum", out=None):
        check_op(op)
        check_out(out, x.shape, x.dtype)
        nccl_type, canonical = self._nccl_type(x.dtype), self._is_canonical(op, x.dtype)
        x, out = self._input(x, out, offset=0), self._output(out, x.shape, x.dtype)
        self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size

        def run():
            if canonical:
                self._canonical_all_reduce(x.reshape(-1), out.reshape(-1))
            else:
                self._comm.allReduce(address(x), address(out), x.size, nccl_type, OPS[op], self._stream.ptr)

        return self._enqueue(run, x, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        check_op(op)
        shape = (rows_per_part(x, self.size), *x.shape[1:])
        check_out(out, shape, x.dtype)
        nccl_type, canonical = self._nccl_type(x.dtype), self._is_canonical(op, x.dtype)
        x, out = self._input(x, out, offset=-self.rank * x.nbytes // self.size), self._output(out, shape, x.dtype)
        self.bytes_sent += (self.size - 1) * x.nbytes // self.size

        def run():
            if canonical:
                tree_sum(out.reshape(-1), self._exchange_parts(x.reshape(-1), part_edges(x.size, self.size)))
            else:
                self._comm.reduceScatter(address(x), address(out), out.size, nccl_type, OPS[op], self._stream.ptr)

        return self._enqueue(run, x, out)

    def all_gather_start(self, x, out=None):
        shape = (self.size * rows_per_part(x), *x.shape[1:])
        check_out(out, shape, x.dtype)
        x, out = self._input(x, out, offset=self.rank * x.nbytes), self._output(out, shape, x.dtype)
        self.bytes_sent += (self.size - 1) * x.nbytes

        def run():
            self._comm.allGather(address(x), address(out), x.nbytes, BYTE, self._stream.ptr)

        return self._enqueue(run, x, out)

    def all_to_all_start(self, x, out=None):
        rows_per_part(x, self.size)
        check_out(out, x.shape, x.dtype)
        x, out = self._input(x, out), self._output(out, x.shape, x.dtype)
        self.bytes_sent += (self.size - 1) * x.nbytes // self.size

        def run():
            edges = part_edges(x.size, self.size)
            self._send_recv(buffers(x, edges), buffers(out, edges))

        return self._enqueue(run, x, out)

    def broadcast_start(self, x, root=0, out=None):
        self.check_rank(root, "root")
        check_out(out, x.shape, x.dtype)
        x, out = self._input(x, out, offset=0), self._output(out, x.shape, x.dtype)
        self.bytes_sent += (self.size - 1) * x.nbytes if self.rank == root else 0

        def run():
            self._comm.broadcast(address(x), address(out), x.nbytes, BYTE, root, self._stream.ptr)

        return self._enqueue(run, x, out)

    # -- the canonical sum ---------------------------------------------------------------------------------------------

    def _canonical_all_reduce(self, x, out):
        """Write the sum of x (n) over ranks to out (n); x may be `out`.

        Rank j adds part j of all ranks; an all-gather then sends the sums to all ranks.
        """
        edges = part_edges(x.size, self.size)
        own = out[edges[self.rank] : edges[self.rank + 1]]
        parts = self._exchange_parts(x, edges)
        if own.size:
            tree_sum(own, parts)
        if x.size % self.size:  # allGather needs parts of equal length
            self._send_recv([(address(own), own.nbytes)] * self.size, buffers(out, edges))
        else:
            self._comm.allGather(address(own), address(out), own.nbytes, BYTE, self._stream.ptr)

    def _exchange_parts(self, x, edges):
        """Part r of every rank's x, as an array (p, length of part r); `edges`: see part_edges()."""
        length = edges[self.rank + 1] - edges[self.rank]
        parts = self._xp.empty((self.size, length), x.dtype)
        self._send_recv(buffers(x, edges), buffers(parts, [j * length for j in range(self.size + 1)]))
        return parts

    # -- messages; all ranks of the group must send or receive a first one, which opens the channels -------------------

    # A receive waits on the GPU until the other rank sends, and meanwhile the host must not wait for the GPU, as it may
    # do to allocate memory: the other rank may need a result that this rank has not yet enqueued. So recv_start() only
    # records when the memory of `out` is free; the next send, or wait(), enqueues the receive.

    def send_start(self, x, to, tag=0):
        self.check_peer(to, "to")
        x, channel = self._xp.ascontiguousarray(x), self._channel(self.rank, to, tag)
        self.bytes_sent += x.nbytes
        handle = self._enqueue(lambda: channel.send(x), x, None, stream=channel.stream)
        self._enqueue_receives()
        return handle

    def recv_start(self, out, source, tag=0):
        self.check_peer(source, "source")
        check_out(out, out.shape, out.dtype)
        free = self._cuda.Event(disable_timing=True)
        free.record()
        receive = _Receive(self, self._channel(source, self.rank, tag), free, out)
        self._receives.append(receive)
        return receive

    def _enqueue_receives(self):
        """Enqueue the receives that recv_start() has noted, in their order."""
        receives, self._receives = self._receives, []
        for receive in receives:
            receive.enqueue()

    def _channel(self, source, to, tag):
        if tag:
            raise ConfigError(f"tag {tag}: NCCL has no tags; use tag 0 and receive in the order of sending")
        if not self._channels:
            self._channels = open_channels(self._mpi_group, self._gpu)
        return self._channels[source, to]

    def _send_recv(self, sends, receives):
        """Send buffer j of `sends` to rank j and receive buffer j of `receives` from rank j, for every rank j.

        The ranks include this rank. A buffer is (address, number of bytes).
        """
        with grouped(self._nccl):
            for peer, (to_send, to_receive) in enumerate(zip(sends, receives, strict=True)):
                for call, (start, nbytes) in ((self._comm.send, to_send), (self._comm.recv, to_receive)):
                    if nbytes:
                        call(start, nbytes, BYTE, peer, self._stream.ptr)

    # -- streams and events --------------------------------------------------------------------------------------------

    def _enqueue(self, run, *arrays, stream=None):
        """Call run() with `stream` as current stream, after all earlier work on the caller's stream.

        Returns a Handle. arrays: the arrays that run() uses; the last one is the result. The handle keeps the arrays
        alive until wait(), so that CuPy's memory pool does not reuse their memory earlier. stream: by default the
        communication stream.
        """
        stream = stream or self._stream
        ready, done = (self._cuda.Event(disable_timing=True) for _ in range(2))
        ready.record()
        stream.wait_event(ready)
        with stream:  # temporary arrays belong to this stream, which reuses their memory in order
            run()
        done.record(stream)
        return _StreamOperation(self._cuda, done, arrays)

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _nccl_type(self, dtype):
        """The ncclDataType_t of a dtype; raises ConfigError for a dtype that NCCL cannot reduce."""
        if dtype.name not in TYPES:
            raise ConfigError(f"NCCL cannot reduce {dtype}: use one of {', '.join(TYPES)}")
        return TYPES[dtype.name]

    def _is_canonical(self, op, dtype):
        """Whether a reduction is a canonical sum: a sum of floats, unless use_collectives("nccl") was called."""
        return op == "sum" and dtype.kind not in "iu" and self._algorithm != NATIVE

    def _input(self, x, out, offset=None):
        """x as a contiguous array that NCCL can read while it writes to `out`: a copy of x if x and `out` overlap.

        No copy is needed if x starts `offset` bytes after the start of `out`, because NCCL supports this case in place.
        offset: None for a collective that NCCL does not support in place.
        """
        x = self._xp.ascontiguousarray(x)
        if out is not None and address(x) - address(out) != offset and overlap(x, out):
            return x.copy()
        return x

    def _output(self, out, shape, dtype):
        """`out`, or a new array if `out` is None."""
        return self._xp.empty(shape, dtype) if out is None else out


class _Receive(Handle):
    """A message to `out` through a Channel, after the event `free`; wait() enqueues it if that was not done before."""

    def __init__(self, collectives, channel, free, out):
        super().__init__(out)
        self._collectives, self._channel, self._free, self._operation = collectives, channel, free, None

    def enqueue(self):
        cuda, stream = self._collectives._cuda, self._channel.stream
        stream.wait_event(self._free)
        self._channel.receive(self._result)
        done = cuda.Event(disable_timing=True)
        done.record(stream)
        self._operation = _StreamOperation(cuda, done, (self._result,))

    def wait(self):
        self._collectives._enqueue_receives()
        return self._operation.wait()


class _StreamOperation(Handle):
    """A call on a stream of communication. wait() makes the caller's stream, not the host, wait for the call."""

    def __init__(self, cuda, done, arrays):
        super().__init__(arrays[-1] if arrays else None)
        self._pending = cuda, done, arrays  # None after wait()

    def wait(self):
        if self._pending:
            cuda, done, _ = self._pending
            cuda.get_current_stream().wait_event(done)
            self._pending = None
        return self._result


@contextlib.contextmanager
def grouped(nccl):
    """A context in which NCCL combines all calls into one operation, so that no call waits for another."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


def part_edges(n, p):
    """The p + 1 indices that divide n elements into p parts: part j is the slice from edges[j] to edges[j + 1].

    The lengths of the parts differ by at most one.
    """
    return [n * j // p for j in range(p + 1)]


def buffers(array, edges):
    """[(address, number of bytes)] of the parts of a contiguous array; edges: see part_edges()."""
    start, step = address(array), array.itemsize
    return [(start + a * step, (b - a) * step) for a, b in zip(edges, edges[1:], strict=False)]


def overlap(a, b):
    """Whether two contiguous arrays share memory."""
    return address(a) < address(b) + b.nbytes and address(b) < address(a) + a.nbytes
