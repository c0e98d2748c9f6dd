"""Fakes of a GPU, with NumPy arrays, and of NCCL, with threads as ranks: they execute stage 3's calls by address.

tests/support/fake_cupy.py has a fake of CuPy, for tests of launches, graphs and tuning.
"""

import contextlib
import ctypes
import queue
import uuid
from types import SimpleNamespace

import numpy as np

from gpt2core.communicator import Solo
from stage3_mpi_cuda.nccl_collectives import NcclCollectives
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

TYPES = {1: np.uint8, 2: np.int32, 4: np.int64, 6: np.float16, 7: np.float32, 8: np.float64}  # ncclDataType_t
OPS = {0: "sum", 2: "max", 3: "min"}  # ncclRedOp_t


class Stream(contextlib.AbstractContextManager):
    """A stream whose work is complete, except the messages that it receives: they are when another stream waits for it.

    ptr: its index in the list of all streams of a fake GPU.
    """

    def __init__(self, ptr=0):
        self.ptr, self.receiving = ptr, []  # Receives

    def __exit__(self, *error):
        pass

    def wait_event(self, event):
        assert event.recorded, "a stream waits for an event that was not recorded"
        for receive in event.receiving:
            receive.wait()

    def record(self, event):
        event.record(self)
        return event

    def synchronize(self):
        for receive in self.receiving:
            receive.wait()


class Event:
    def __init__(self, disable_timing):
        self.recorded, self.receiving = False, []

    def record(self, stream=None):
        self.recorded, self.receiving = True, list(stream.receiving if stream else [])

    def synchronize(self):
        assert self.recorded


def memory(at, count, kind=1):
    """`count` elements of an NCCL data type at an address, as an array."""
    dtype = np.dtype(TYPES[kind])
    if not count:
        return np.empty(0, dtype)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(at)).view(dtype)


def assert_apart(x, out, offset=None):
    """NCCL reads x while it writes to out, both (address, bytes): they overlap only if x starts at out + offset."""
    overlap = x[0] < out[0] + out[1] and out[0] < x[0] + x[1]
    assert not overlap or x[0] - out[0] == offset, "NCCL would overwrite its input"


class Receive:
    """A message from a queue, which wait() copies to an array."""

    def __init__(self, queue, out):
        self.queue, self.out = queue, out

    def wait(self):
        if self.queue:
            self.out[...] = self.queue.get(timeout=60)
            self.queue = None


class Pair:
    """A fake NCCL communicator of two ranks. Outside of groupStart() and groupEnd(), messages go from rank 0 to 1."""

    def __init__(self, nccl, queue, rank):
        self.nccl, self.queue, self.rank = nccl, queue, rank

    def __getattr__(self, name):  # the collectives
        return getattr(self.nccl, name)

    def send(self, at, count, kind, peer, stream):
        if self.nccl.group is not None:
            return self.nccl.send(at, count, kind, peer, stream)
        assert (kind, peer, self.rank) == (1, 1, 0)
        self.queue.put(memory(at, count).copy())

    def recv(self, at, count, kind, peer, stream):
        if self.nccl.group is not None:
            return self.nccl.recv(at, count, kind, peer, stream)
        assert (kind, peer, self.rank) == (1, 0, 1)
        self.nccl.streams[stream].receiving.append(Receive(self.queue, memory(at, count)))


class Nccl:
    """A fake of the module cupy.cuda.nccl for one rank of a group of threads; streams: of its fake GPU."""

    NcclError = RuntimeError
    queues = {}  # {unique id: the messages of a Pair}

    def __init__(self, threads, streams):
        self.threads, self.streams, self.group = threads.split(0), streams, None

    def get_unique_id(self):
        unique = str(uuid.uuid4())
        self.queues[unique] = queue.SimpleQueue()
        return unique

    def NcclCommunicator(self, size, unique, rank):
        if size == 2:
            return Pair(self, self.queues[unique], rank)
        assert (size, rank) == (self.threads.size, self.threads.rank)
        return self

    def groupStart(self):
        assert self.group is None
        self.group = []

    def groupEnd(self):
        handles, loops = [], ([], [])
        for at, count in {(at, count) for sends, at, count, _ in self.group if sends}:
            for sends, to, length, peer in self.group:
                if not sends:
                    assert_apart((at, count), (to, length), 0 if peer == self.threads.rank else None)
        for sends, at, count, peer in self.group:
            if peer == self.threads.rank:
                loops[sends].append(memory(at, count))
            elif sends:
                handles.append(self.threads.send_start(memory(at, count), peer))
            else:
                handles.append(self.threads.recv_start(memory(at, count), peer))
        for received, sent in zip(*loops, strict=True):
            received[...] = sent.copy()
        for handle in handles:
            handle.wait()
        self.group = None

    def send(self, at, count, kind, peer, stream):
        self.group.append((True, at, count, peer))

    def recv(self, at, count, kind, peer, stream):
        self.group.append((False, at, count, peer))

    def allReduce(self, x, out, count, kind, op, stream):
        nbytes = count * np.dtype(TYPES[kind]).itemsize
        assert_apart((x, nbytes), (out, nbytes), 0)
        memory(out, count, kind)[...] = self.threads.all_reduce(memory(x, count, kind).copy(), OPS[op])

    def reduceScatter(self, x, out, count, kind, op, stream):
        nbytes = count * np.dtype(TYPES[kind]).itemsize
        assert_apart((x, self.threads.size * nbytes), (out, nbytes), -self.threads.rank * nbytes)
        x = memory(x, count * self.threads.size, kind).copy()
        memory(out, count, kind)[...] = self.threads.reduce_scatter(x, OPS[op])

    def allGather(self, x, out, count, kind, stream):
        nbytes = count * np.dtype(TYPES[kind]).itemsize
        assert_apart((x, nbytes), (out, self.threads.size * nbytes), self.threads.rank * nbytes)
        memory(out, count * self.threads.size, kind)[...] = self.threads.all_gather(memory(x, count, kind).copy())

    def broadcast(self, x, out, count, kind, root, stream):
        assert_apart((x, count), (out, count), 0)
        memory(out, count, kind)[...] = self.threads.broadcast(memory(x, count, kind).copy(), root)


def copy(to, source, length, kind, stream):
    ctypes.memmove(to, source, length)


def fake_gpu(threads):
    """A fake of nccl_communicator.bind_gpu() for one rank of a group of threads."""
    stream = Stream()
    streams = [stream]

    def new_stream(non_blocking, priority=0):
        streams.append(Stream(len(streams)))
        return streams[-1]

    cuda = SimpleNamespace(
        Event=Event,
        Stream=new_stream,
        Device=lambda number: contextlib.nullcontext(),
        get_current_stream=lambda: stream,
        alloc_pinned_memory=bytearray,
        runtime=SimpleNamespace(memcpyAsync=copy),
    )
    cupy = SimpleNamespace(cuda=cuda, empty=np.empty, ascontiguousarray=np.ascontiguousarray)
    return SimpleNamespace(cupy=cupy, stream=stream, device_id=0, nccl=Nccl(threads, streams), communicators=[])


class OnFakeGpu(NcclCommunicator):
    """NcclCommunicator on a group of threads, each with a fake GPU: NcclCollectives transfers all arrays."""

    def __init__(self, threads, parent=None):
        super().__init__(threads, parent)
        self.gpu, self.transport = fake_gpu(threads), "nccl"

    def _communicator_for(self, x):
        self._device_communicator = self._device_communicator or NcclCollectives(self.mpi_group, self.gpu)
        return self._device_communicator

    def split(self, color, key=0):
        group = self.mpi_group.split(color, key)
        return group if group is None or isinstance(group, Solo) else OnFakeGpu(group, self)

    def broadcast_object(self, obj, root=0):
        return self.mpi_group.broadcast_object(obj, root)

    def all_gather_object(self, obj):
        return self.mpi_group.all_gather_object(obj)
