"""Collectives on the arrays of GPUs over plain MPI: down to pinned memory of the host, over, and up again.

This is how one does it first, and where no MPI can read a GPU's memory and there is no NCCL the only way. A GPU copies
from and to *pinned* memory, which the system cannot move, by itself; so an all-reduce goes in chunks, and while one is
summed on the host, the next comes down and the one before goes up. What NCCL saves is the way down and up.
"""
# p ranks in a group, n bytes of x on one rank

from concurrent.futures import ThreadPoolExecutor

import numpy as np

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

CHUNK = 8 << 20  # bytes of an all-reduce that are summed at once
DOWN, UP = 2, 1  # cudaMemcpyKind


class StagedCollectives(Communicator):
    """The ranks of `host`, an MPI group of more than one; x and out are arrays of their GPUs.

    Sums, their order and bytes_sent are those of the MpiCommunicator. Calls are made one after the other in a thread,
    while the caller goes on; wait() waits on the host, and so this can be no part of a CUDA graph.
    """

    def __init__(self, host, gpu):
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size = host.local_rank, host.local_size
        self._host, self._wire = host, host.split(0, host.rank)  # the thread's own: its calls meet none of the caller's
        self._cupy, self._number, self._stream = gpu.cupy, gpu.number, gpu.cupy.cuda.Stream(non_blocking=True)
        self._thread = ThreadPoolExecutor(1, f"transport of rank {self.rank}")
        self._pinned = {}

    @property
    def bytes_sent(self):
        return self._wire.bytes_sent

    def use_collectives(self, name):
        self._wire.use_collectives(name)

    # -- the collectives -----------------------------------------------------------------------------------------------

    def all_reduce_start(self, x, op="sum", out=None):
        check_op(op)
        check_out(out, x.shape, x.dtype)
        x, out = self._cupy.ascontiguousarray(x), self._result(out, x.shape, x.dtype)
        return self._behind(lambda: self._all_reduce_chunks(x, op, out), x, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        check_op(op)
        return self._whole(
            x, out, (rows_per_part(x, self.size), *x.shape[1:]), lambda a, b: self._wire.reduce_scatter(a, op, b)
        )

    def all_gather_start(self, x, out=None):
        return self._whole(x, out, (self.size * rows_per_part(x), *x.shape[1:]), self._wire.all_gather)

    def all_to_all_start(self, x, out=None):
        rows_per_part(x, self.size)
        return self._whole(x, out, x.shape, self._wire.all_to_all)

    def broadcast_start(self, x, root=0, out=None):
        check_rank(root, self.size, "root")
        return self._whole(x, out, x.shape, lambda a, b: self._wire.broadcast(a, root, b))

    def send_start(self, x, to, tag=0):
        check_peer(to, self.rank, self.size, "to")
        return self._host.send_start(x.get(), to, tag)

    def recv_start(self, out, source, tag=0):
        check_peer(source, self.rank, self.size, "source")
        check_out(out, out.shape, out.dtype)
        return _Arriving(self._host.recv_start(np.empty(out.shape, out.dtype), source, tag), out)

    # -- down, over, and up --------------------------------------------------------------------------------------------

    def _whole(self, x, out, shape, call):
        """Handle of call(x, out) of copies on the host; `out` has, or gets, `shape`."""
        check_out(out, shape, x.dtype)
        x, out = self._cupy.ascontiguousarray(x), self._result(out, shape, x.dtype)

        def run():
            below, above = self._buffer("in", x.nbytes, x.dtype), self._buffer("out", out.nbytes, out.dtype)
            self._copy(address(below), address(x), x.nbytes, DOWN)
            self._stream.synchronize()
            call(below.reshape(x.shape), above.reshape(shape))
            self._copy(address(out), address(above), out.nbytes, UP)

        return self._behind(run, x, out)

    def _all_reduce_chunks(self, x, op, out):
        """Two buffers in turn. The copies are one stream's, so a chunk comes down only when the one before it is up."""
        step = CHUNK // x.itemsize * x.itemsize
        chunks = [(start, min(step, x.nbytes - start)) for start in range(0, x.nbytes, step)]
        arrived = []

        def fetch(number):
            start, length = chunks[number]
            buffer = self._buffer(number % 2, length, x.dtype)
            self._copy(address(buffer), address(x) + start, length, DOWN)
            arrived.append((buffer, self._stream.record(self._cupy.cuda.Event(disable_timing=True))))

        for number in range(min(2, len(chunks))):
            fetch(number)
        for number, (start, length) in enumerate(chunks):
            buffer, event = arrived[number]
            event.synchronize()
            self._wire.all_reduce(buffer, op, out=buffer)
            self._copy(address(out) + start, address(buffer), length, UP)
            if number + 2 < len(chunks):
                fetch(number + 2)

    def _behind(self, run, x, out):
        """Handle of run() in the thread, behind all that the caller's stream has to do by now."""
        cuda = self._cupy.cuda
        begun = cuda.Event(disable_timing=True)
        begun.record()

        def job():
            with cuda.Device(self._number):  # a thread begins on the first one
                self._stream.wait_event(begun)
                run()
                self._stream.synchronize()

        return _Staged(self._thread.submit(job), x, out)

    def _copy(self, to, source, length, kind):
        self._cupy.cuda.runtime.memcpyAsync(to, source, length, kind, self._stream.ptr)

    def _buffer(self, name, length, dtype):
        """Pinned memory as a flat array, the same for the same name, as large as it was ever wanted."""
        if name not in self._pinned or self._pinned[name].nbytes < length:
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, length))
            self._pinned[name] = np.frombuffer(memory, np.uint8, max(1, length))
        return self._pinned[name][:length].view(dtype)

    def _result(self, out, shape, dtype):
        return self._cupy.empty(shape, dtype) if out is None else out


class _Staged(Handle):
    """A call in the thread; x and out live until it is done."""

    def __init__(self, future, x, out):
        super().__init__(out)
        self._open = future, x

    def wait(self):
        if self._open:
            self._open[0].result()
            self._open = None
        return self._result


class _Arriving(Handle):
    """A message on its way to the host, and then to the GPU."""

    def __init__(self, message, out):
        super().__init__(out)
        self._open = message

    def wait(self):
        if self._open:
            self._result.set(self._open.wait())
            self._open = None
        return self._result
