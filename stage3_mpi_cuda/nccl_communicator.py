"""NCCL for the arrays of GPUs and MPI for those of the host: one communicator, which goes by where an array lies.

MPI starts the ranks, tells them apart, and carries all that is small or strange: objects, losses, file contents. What
is large lies on GPUs, and travels from one to the other without a halt in the host's memory; that is NCCL's business.
"""
# p ranks in a group

import platform
import signal
import sys
import warnings
from dataclasses import dataclass, field

from gpt2core.communicator import Communicator, Solo
from gpt2core.errors import ConfigError
from gpt2core.parallel.all_or_raise import all_or_raise, shared_error
from stage1_mpi.mpi_communicator import MpiCommunicator
from stage2_cuda.runtime import triton_launch
from stage3_mpi_cuda.nccl_collectives import NATIVE, NcclCollectives
from stage3_mpi_cuda.staged_collectives import StagedCollectives
from stage3_mpi_cuda.watchdog import Watchdog

ABORT = 5  # seconds that the end of a process may take
TRANSPORTS = {"nccl": NcclCollectives, "mpi": StagedCollectives}


class NcclCommunicator(Communicator):
    """One rank's end of a group of ranks with a GPU each; without arguments the world, all ranks of the MPI job.

    `host` is the same group as an MpiCommunicator, which carries NumPy arrays. CuPy's go by the transport that
    use_transport() chose: nccl, on a stream of their own, or mpi, through the host. Under TRITON_INTERPRET=1 there are
    no others than NumPy's. Sums over GPUs are "canonical" unless use_collectives("nccl") asks for NCCL's own, whose
    order depends on the number of ranks; with transport mpi, those of MpiCommunicator.
    """

    def __init__(self, host=None, parent=None):
        self.host = host or MpiCommunicator()
        self.rank, self.size = self.host.rank, self.host.size
        self.local_rank, self.local_size = self.host.local_rank, self.host.local_size
        self.gpu, self.transport, self._algorithm = None, None, "canonical"
        if parent is not None:
            self.gpu, self.transport, self._algorithm = parent.gpu, parent.transport, parent._algorithm
        self._carrier = None  # of what lies on the GPU: made when there is something to carry

    def use_transport(self, name):
        if name not in (None, *TRANSPORTS):
            raise ConfigError(f"--transport {name} is unknown: choose from {', '.join(TRANSPORTS)}")
        if triton_launch.interpreted():
            if name == "nccl":
                raise ConfigError("--transport nccl is for GPUs, and Triton's interpreter has none: leave it out")
            self.transport, self.gpu = "mpi", Gpu()
        else:
            self.gpu = all_or_raise(self.host, lambda: bind(self.host.local_rank))
            self.transport = self._choose(name)
            if self.transport == "nccl":
                self.gpu.nccl = all_or_raise(self.host, lambda: import_nccl(self.gpu.cupy))
        Watchdog(self).start()
        return self.transport

    def _choose(self, name):
        """The transport, from what GPUs the ranks have; tells on the root where several have to share one."""
        places = self.host.all_gather_object((self.gpu.name, platform.node(), self.gpu.bus))
        for rank, (kind, *_) in enumerate(places):
            if kind != places[0][0]:
                advice = "start the ranks on GPUs of one kind, as CUDA_VISIBLE_DEVICES selects them"
                raise shared_error(ConfigError(f"rank {rank} has an {kind}, but rank 0 an {places[0][0]}: {advice}"))
        count = len(set(places))
        if count == self.size:
            return name or "nccl"
        if name == "nccl":
            found = f"--transport nccl needs a GPU for each rank, and these {self.size} ranks have {count}"
            raise shared_error(
                ConfigError(f"{found}: start {count}, or use --transport mpi, with which ranks can share")
            )
        if self.is_root:
            shared = f"note: {self.size} ranks share {count} GPU{'s' * (count > 1)}, each with a part of its time"
            print(f"{shared}, and so --transport is mpi: NCCL wants a GPU for each rank", file=sys.stderr)
        return "mpi"

    @property
    def native(self):
        return NATIVE if self.transport == "nccl" else self.host.native

    @property
    def recordable(self):
        return self.transport == "nccl"  # the other one waits on the host

    @property
    def shares_updates(self):
        return self.transport == "nccl"  # an update is 1/p then, and no more travels than in an all-reduce

    @property
    def times_buckets(self):
        return self.transport == "nccl"  # the host's arrays travel in the time of the cores that would compute

    @property
    def bytes_sent(self):
        return self.host.bytes_sent + (self._carrier.bytes_sent if self._carrier else 0)

    def use_collectives(self, name):
        if self.transport == "mpi":
            self.host.use_collectives(name)
        elif name not in ("canonical", NATIVE):
            raise ConfigError(f"--collectives {name} is none of NCCL's: use canonical or {NATIVE}, or --transport mpi")
        self._algorithm = name
        if self._carrier:
            self._carrier.use_collectives(name)

    def _by(self, x):
        """Who carries x: the host's communicator, or the transport between GPUs."""
        if not hasattr(x, "__cuda_array_interface__"):
            return self.host
        if self._carrier is None:
            self._carrier = TRANSPORTS[self.transport](self.host, self.gpu)
            self._carrier.use_collectives(self._algorithm)
        return self._carrier

    def abort(self, code):
        signal.alarm(ABORT)  # kills this process: CUDA's end waits for NCCL's kernel, which may wait for another rank
        self.host.abort(code)

    def barrier(self):
        self.host.barrier()

    def split(self, color, key=0):
        host = self.host.split(color, key)
        return host if host is None or isinstance(host, Solo) else NcclCommunicator(host, self)

    # The collectives, of either kind of array: behind the caller, and in it

    def all_reduce_start(self, x, op="sum", out=None):
        return self._by(x).all_reduce_start(x, op, out)

    def all_gather_start(self, x, out=None):
        return self._by(x).all_gather_start(x, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        return self._by(x).reduce_scatter_start(x, op, out)

    def all_to_all_start(self, x, out=None):
        return self._by(x).all_to_all_start(x, out)

    def broadcast_start(self, x, root=0, out=None):
        return self._by(x).broadcast_start(x, root, out)

    def send_start(self, x, to, tag=0):
        return self._by(x).send_start(x, to, tag)

    def recv_start(self, out, source, tag=0):
        return self._by(out).recv_start(out, source, tag)

    def all_reduce(self, x, op="sum", out=None):
        return self._by(x).all_reduce(x, op, out)

    def all_gather(self, x, out=None):
        return self._by(x).all_gather(x, out)

    def reduce_scatter(self, x, op="sum", out=None):
        return self._by(x).reduce_scatter(x, op, out)

    def all_to_all(self, x, out=None):
        return self._by(x).all_to_all(x, out)

    def broadcast(self, x, root=0, out=None):
        return self._by(x).broadcast(x, root, out)


# -- which GPU ---------------------------------------------------------------------------------------------------------


@dataclass
class Gpu:
    """What the groups of a rank share: its GPU, the stream of their calls, and the communicators to be watched."""

    cupy: object = None
    number: int | None = None  # among those that this process sees
    name: str = ""
    bus: str = ""  # where it is in its host: equal for ranks that share it
    stream: object = None
    nccl: object = None
    watched: list = field(default_factory=list)


def bind(local_rank):
    """This process's Gpu: of those that it sees, number `local_rank`, from the first again after the last."""
    cupy = triton_launch.array_module()  # refuses, with the reason, where there is none
    number = local_rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(number).use()
    name = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
    bus = cupy.cuda.Device(number).pci_bus_id
    return Gpu(cupy, number, name, bus, cupy.cuda.Stream(non_blocking=True))


def import_nccl(cupy):
    """cupy.cuda.nccl; ConfigError where it finds no library."""
    with warnings.catch_warnings(record=True) as said:  # CuPy warns, with a reason, and goes on without
        warnings.simplefilter("always")
        from cupy.cuda import nccl
    if not nccl.available:
        reason = f" ({str(said[-1].message).strip().splitlines()[0]})" if said else ""
        wheel = f"nvidia-nccl-cu{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
        raise ConfigError(f"CuPy finds no NCCL{reason}: pip install {wheel}, or use --transport mpi")
    return nccl
