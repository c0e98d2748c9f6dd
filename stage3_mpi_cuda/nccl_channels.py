"""Messages between two GPUs: each pair of ranks has, for each direction, an NCCL communicator and a stream of its own.

So a receive that waits for its message holds up nothing else, and no order of sends and receives waits forever, if the
messages from one rank to another are received in the order of sending.
"""

import ctypes
import itertools

from gpt2core.communicator import address
from gpt2core.errors import ConfigError

BYTE = 1  # the ncclDataType_t of calls that only copy data of any dtype


class Channel:
    """Messages from one rank to another, in order. comm: the NCCL communicator of these two ranks.

    The calls of one communicator run one after another, whatever their streams are. If both directions shared one, two
    ranks that each receive before they send would wait forever.
    """

    def __init__(self, comm, stream):
        self.comm, self.stream = comm, stream

    def send(self, x):
        self.comm.send(address(x), x.nbytes, BYTE, 1, self.stream.ptr)

    def receive(self, out):
        self.comm.recv(address(out), out.nbytes, BYTE, 0, self.stream.ptr)


def open_channels(mpi_group, gpu):
    """{(source, to): Channel} of the messages that this rank sends or receives. All ranks of the group call this.

    NCCL connects two ranks in their first message, and blocks the host until both have called it. So this function
    sends a first message through each channel, in the same order on all ranks.
    """
    rank, size, channels = mpi_group.rank, mpi_group.size, {}
    own = {to: gpu.nccl.get_unique_id() for to in range(size) if to != rank}
    ids = mpi_group.all_gather_object(own)
    for pair in itertools.combinations(range(size), 2):
        for source, to in (pair, pair[::-1]) if rank in pair else ():
            comm = new_communicator(gpu, 2, ids[source][to], int(rank == to))
            # A message is short, and others wait for it: its kernel starts before those of the computation.
            channels[source, to] = channel = Channel(comm, gpu.cupy.cuda.Stream(non_blocking=True, priority=-1))
            first = channel.send if rank == source else channel.receive
            first(gpu.cupy.empty(1, "uint8"))
            channel.stream.synchronize()
    return channels


def new_communicator(gpu, size, unique_id, rank):
    """An NCCL communicator of `size` ranks; raises ConfigError if NCCL cannot connect them."""
    try:
        comm = gpu.nccl.NcclCommunicator(size, unique_id, rank)
    except gpu.nccl.NcclError as error:
        raise ConfigError(
            f"NCCL cannot connect {size} ranks ({error}); set NCCL_DEBUG=WARN in the environment for the "
            f"cause, or use `transport=mpi`"
        ) from error
    # This reference is never released, so NCCL's destructor never runs. It would wait until every CUDA graph that
    # contains a call of this communicator is destroyed. Python destroys objects at exit in an undefined order, so
    # the destructor could wait forever.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
    gpu.communicators.append(comm)
    return comm
