"""Collectives on GPU arrays over plain MPI: copy to pinned host memory, call MPI there, and copy back.

This transport needs no NCCL and no CUDA-aware MPI, and ranks may share a GPU. A GPU can copy asynchronously only from
and to *pinned* host memory: memory that the operating system does not move. An all-reduce is divided into chunks: while
the host sums one chunk, the sum of the previous chunk is copied back to the GPU and the next chunk to the host. NCCL
needs neither copy.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gpt2core.communicator import Communicator, Handle, address, check_op, check_out, rows_per_part
from stage1_mpi.mpi_communicator import MpiCommunicator

CHUNK = 8 << 20  # bytes of an all-reduce that the host sums in one call
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # values of cudaMemcpyKind


class StagedCollectives(Communicator):
    """Collectives of the ranks of mpi_group, an MpiCommunicator of at least two ranks; x and out are CuPy arrays.

    gpu: the GpuBinding of this rank. An MpiCommunicator computes the sums, so their order and bytes_sent are as
    documented there. A background thread runs the collectives in the order of the calls while the caller continues.
    wait() blocks the host, so a CUDA graph cannot capture these calls.
    """

    native_algorithm = MpiCommunicator.native_algorithm
    capturable = False

    def __init__(self, mpi_group, gpu):
        self.rank, self.size = mpi_group.rank, mpi_group.size
        self.local_rank, self.local_size = mpi_group.local_rank, mpi_group.local_size
        # The thread has its own communicator: a message of the thread must never match a message of the caller.
        self._mpi_group, self._thread_group = mpi_group, mpi_group.split(0, mpi_group.rank)
        self._cupy, self._device_id, self._stream = gpu.cupy, gpu.device_id, gpu.cupy.cuda.Stream(non_blocking=True)
        self._thread = ThreadPoolExecutor(1, f"transport of rank {self.rank}")
        self._pinned = {}  # {name: pinned host buffer}

    @staticmethod
    def sent_on_device(mpi_group, call, size, rank):
        """See Communicator.sent, for an x on the device; an all-reduce is divided into chunks."""
        if call.name != "all_reduce":
            return mpi_group.sent(call, size, rank)
        most = CHUNK // call.itemsize
        chunks = [min(most, call.elements - start) for start in range(0, call.elements, most)]
        return sum(mpi_group.sent(call._replace(elements=chunk), size, rank) for chunk in chunks)

    @property
    def bytes_sent(self):
        return self._thread_group.bytes_sent

    def use_collectives(self, name):
        self._thread_group.use_collectives(name)

    # -- the collectives -----------------------------------------------------------------------------------------------

    def all_reduce_start(self, x, op="sum", out=None):
        check_op(op)
        check_out(out, x.shape, x.dtype)
        x, out = self._cupy.ascontiguousarray(x), self._output(out, x.shape, x.dtype)
        return self._enqueue(lambda: self._all_reduce_chunks(x, op, out), x, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        check_op(op)
        shape = (rows_per_part(x, self.size), *x.shape[1:])
        call = lambda host_x, host_out: self._thread_group.reduce_scatter(host_x, op, host_out)  # noqa: E731
        return self._staged(x, out, shape, call)

    def all_gather_start(self, x, out=None):
        return self._staged(x, out, (self.size * rows_per_part(x), *x.shape[1:]), self._thread_group.all_gather)

    def all_to_all_start(self, x, out=None):
        rows_per_part(x, self.size)
        return self._staged(x, out, x.shape, self._thread_group.all_to_all)

    def broadcast_start(self, x, root=0, out=None):
        self.check_rank(root, "root")
        call = lambda host_x, host_out: self._thread_group.broadcast(host_x, root, host_out)  # noqa: E731
        return self._staged(x, out, x.shape, call)

    def send_start(self, x, to, tag=0):
        self.check_peer(to, "to")
        return self._mpi_group.send_start(x.get(), to, tag)

    def recv_start(self, out, source, tag=0):
        self.check_peer(source, "source")
        check_out(out, out.shape, out.dtype)
        return _PendingReceive(self._mpi_group.recv_start(np.empty(out.shape, out.dtype), source, tag), out)

    # -- copies to the host and back -----------------------------------------------------------------------------------

    def _staged(self, x, out, shape, call):
        """Start a collective on host memory; returns a Handle of `out`, its result.

        The background thread copies x to the pinned buffer host_x, calls call(host_x, host_out), and copies host_out to
        `out`. out: a CuPy array of `shape`, or None for a new array.
        """
        check_out(out, shape, x.dtype)
        x, out = self._cupy.ascontiguousarray(x), self._output(out, shape, x.dtype)

        def run():
            host_x = self._pinned_buffer("x", x.nbytes, x.dtype)
            host_out = self._pinned_buffer("out", out.nbytes, out.dtype)
            self._copy(address(host_x), address(x), x.nbytes, DEVICE_TO_HOST)
            self._stream.synchronize()
            call(host_x.reshape(x.shape), host_out.reshape(shape))
            self._copy(address(out), address(host_out), out.nbytes, HOST_TO_DEVICE)

        return self._enqueue(run, x, out)

    def _all_reduce_chunks(self, x, op, out):
        """All-reduce x into `out`, chunk by chunk, with two pinned buffers that alternate.

        All copies are enqueued on one stream, so a buffer is refilled only after its result was copied to the GPU.
        """
        chunk_bytes = CHUNK // x.itemsize * x.itemsize  # whole elements
        chunks = [(start, min(chunk_bytes, x.nbytes - start)) for start in range(0, x.nbytes, chunk_bytes)]
        copies = []  # of each chunk: (its pinned buffer, the event after the copy to this buffer)

        def copy_to_host(number):
            start, length = chunks[number]
            buffer = self._pinned_buffer(number % 2, length, x.dtype)
            self._copy(address(buffer), address(x) + start, length, DEVICE_TO_HOST)
            copies.append((buffer, self._stream.record(self._cupy.cuda.Event(disable_timing=True))))

        for number in range(min(2, len(chunks))):
            copy_to_host(number)
        for number, (start, length) in enumerate(chunks):
            buffer, copied = copies[number]
            copied.synchronize()
            self._thread_group.all_reduce(buffer, op, out=buffer)
            self._copy(address(out) + start, address(buffer), length, HOST_TO_DEVICE)
            if number + 2 < len(chunks):
                copy_to_host(number + 2)

    def _enqueue(self, run, x, out):
        """Let the background thread call run() after all earlier work on the caller's stream; return a Handle."""
        cuda = self._cupy.cuda
        ready = cuda.Event(disable_timing=True)
        ready.record()

        def job():
            with cuda.Device(self._device_id):  # each thread has its own current device, which is initially device 0
                self._stream.wait_event(ready)
                run()
                self._stream.synchronize()

        return _ThreadOperation(self._thread.submit(job), x, out)

    def _copy(self, target, source, length, kind):
        self._cupy.cuda.runtime.memcpyAsync(target, source, length, kind, self._stream.ptr)

    def _pinned_buffer(self, name, length, dtype):
        """A flat array of `dtype` with `length` bytes of pinned memory. Calls with the same `name` share one buffer."""
        if name not in self._pinned or self._pinned[name].nbytes < length:
            memory = self._cupy.cuda.alloc_pinned_memory(max(1, length))
            self._pinned[name] = np.frombuffer(memory, np.uint8, max(1, length))
        return self._pinned[name][:length].view(dtype)

    def _output(self, out, shape, dtype):
        """`out`, or a new array if `out` is None."""
        return self._cupy.empty(shape, dtype) if out is None else out


class _ThreadOperation(Handle):
    """A call in the background thread. The handle keeps x and out alive until the call is complete."""

    def __init__(self, future, x, out):
        super().__init__(out)
        self._pending = future, x

    def wait(self):
        if self._pending:
            self._pending[0].result()
            self._pending = None
        return self._result


class _PendingReceive(Handle):
    """A pending receive into host memory; wait() copies the received data to `out` on the GPU."""

    def __init__(self, message, out):
        super().__init__(out)
        self._pending = message

    def wait(self):
        if self._pending:
            self._result.set(self._pending.wait())
            self._pending = None
        return self._result
