"""NcclCommunicator: NCCL for CuPy arrays and MPI for NumPy arrays; the type of the array selects between them.

MPI starts the processes, numbers them (their ranks), and transfers data in host memory: objects, losses, file contents.
NCCL transfers large arrays directly from GPU to GPU.
"""
# p: number of ranks in a group

import platform
import sys
import warnings
from dataclasses import dataclass, field

from gpt2core.communicator import Communicator, Solo
from gpt2core.errors import ConfigError, counted
from gpt2core.parallel.all_or_raise import all_or_raise, shared_error
from stage1_mpi.mpi_communicator import MpiCommunicator
from stage2_cuda.runtime import triton_launch
from stage3_mpi_cuda.nccl_collectives import NATIVE, NcclCollectives
from stage3_mpi_cuda.staged_collectives import StagedCollectives
from stage3_mpi_cuda.watchdog import watch_gpus

TRANSPORTS = {"nccl": NcclCollectives, "mpi": StagedCollectives}


class NcclCommunicator(Communicator):
    """One rank of a group that computes on GPUs. Without arguments: the group of all ranks of the MPI job.

    `host` is the MpiCommunicator of the same group, for NumPy arrays; split() also passes the `parent` group. CuPy
    arrays use the transport that use_transport() selected. Transport "nccl" needs one GPU per rank and uses a
    communication stream. Transport "mpi" copies through host memory, and ranks may share a GPU. With
    TRITON_INTERPRET=1 all arrays are NumPy arrays.

    Sums are canonical unless use_collectives() selects another algorithm. With transport "nccl" the only other
    algorithm is "nccl": NCCL's own sums, whose order depends on the number of ranks. With transport "mpi" all
    algorithms of MpiCommunicator are available.
    """

    def __init__(self, host=None, parent=None):
        self.host = host or MpiCommunicator()
        self.rank, self.size = self.host.rank, self.host.size
        self.local_rank, self.local_size = self.host.local_rank, self.host.local_size
        self.gpu, self.transport, self._algorithm = None, None, "canonical"
        if parent is not None:
            self.gpu, self.transport, self._algorithm = parent.gpu, parent.transport, parent._algorithm
        self._device_collectives = None  # created for the first CuPy array; NCCL connects the ranks at that time

    def use_transport(self, name):
        if name not in (None, *TRANSPORTS):
            raise ConfigError(f"--transport {name}: unknown transport; choose from {', '.join(TRANSPORTS)}")
        if triton_launch.interpreted():
            if name == "nccl":
                raise ConfigError("--transport nccl: needs GPUs, and Triton's interpreter uses none; omit the flag")
            self.transport, self.gpu = "mpi", GpuBinding()
        else:
            self.gpu = all_or_raise(self.host, lambda: bind_gpu(self.host.local_rank))
            self.transport = self._choose(name)
            if self.transport == "nccl":
                self.gpu.nccl = all_or_raise(self.host, lambda: import_nccl(self.gpu.cupy))
        watch_gpus(self)
        return self.transport

    def _choose(self, name):
        """The transport to use with the GPUs to which the ranks are bound. `name`: --transport, or None if not given.

        Rank 0 prints a note if ranks share a GPU. Raises ConfigError if the GPUs are of different models, or if `name`
        is "nccl" and ranks share a GPU.
        """
        gpus = self.host.all_gather_object((self.gpu.name, platform.node(), self.gpu.pci_bus_id))
        model_of_rank_0, count = gpus[0][0], len(set(gpus))
        for rank, (model, *_) in enumerate(gpus):
            if model != model_of_rank_0:
                advice = "select GPUs of one model with CUDA_VISIBLE_DEVICES"
                found = f"rank {rank} has an {model}, but rank 0 has an {model_of_rank_0}"
                raise shared_error(ConfigError(f"{found}; {advice}"))
        if count == self.size:
            return name or "nccl"
        found = f"{self.size} ranks have {counted(count, 'GPU')}"
        if name == "nccl":
            advice = f"start {counted(count, 'rank')}, or use --transport mpi, where ranks can share a GPU"
            raise shared_error(ConfigError(f"--transport nccl: needs a GPU for each rank, but {found}; {advice}"))
        if self.is_root:
            reason = "so ranks share GPUs, which NCCL does not support"
            print(f"note: {found}, {reason}: using --transport mpi", file=sys.stderr)
        return "mpi"

    @property
    def native_collectives(self):
        return NATIVE if self.transport == "nccl" else self.host.native_collectives

    @property
    def capturable(self):
        return self.transport == "nccl"  # transport "mpi" waits on the host, which a CUDA graph cannot contain

    @property
    def prefers_zero(self):
        return self.transport == "nccl"  # ZeRO-1 sends as much as an all-reduce, and a rank computes 1/p of the update

    @property
    def measures_buckets(self):
        return self.transport == "nccl"  # with "mpi", messages and computation compete for the host's cores

    @property
    def bytes_sent(self):
        return self.host.bytes_sent + (self._device_collectives.bytes_sent if self._device_collectives else 0)

    def use_collectives(self, name):
        if self.transport == "mpi":
            if name == NATIVE:
                raise ConfigError(
                    f"--collectives {name}: needs --transport nccl, which needs a GPU for each rank, but the transport "
                    "is mpi: omit the flag, or use --collectives mpi"
                )
            self.host.use_collectives(name)
        elif name not in ("canonical", NATIVE):
            raise ConfigError(
                f"--collectives {name}: not available with NCCL; use canonical, {NATIVE} or --transport mpi"
            )
        self._algorithm = name
        if self._device_collectives:
            self._device_collectives.use_collectives(name)

    def _collectives_for(self, x):
        """The communicator for the array type of x: `host` for NumPy arrays, the transport's for CuPy arrays."""
        if not hasattr(x, "__cuda_array_interface__"):
            return self.host
        if self._device_collectives is None:
            self._device_collectives = TRANSPORTS[self.transport](self.host, self.gpu)
            self._device_collectives.use_collectives(self._algorithm)
        return self._device_collectives

    def abort(self, code):
        self.host.abort(code)

    def barrier(self):
        self.host.barrier()

    def split(self, color, key=0):
        host = self.host.split(color, key)
        return host if host is None or isinstance(host, Solo) else NcclCommunicator(host, self)

    # Collectives and messages for both array types: the non-blocking forms, then the blocking forms

    def all_reduce_start(self, x, op="sum", out=None):
        return self._collectives_for(x).all_reduce_start(x, op, out)

    def all_gather_start(self, x, out=None):
        return self._collectives_for(x).all_gather_start(x, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        return self._collectives_for(x).reduce_scatter_start(x, op, out)

    def all_to_all_start(self, x, out=None):
        return self._collectives_for(x).all_to_all_start(x, out)

    def broadcast_start(self, x, root=0, out=None):
        return self._collectives_for(x).broadcast_start(x, root, out)

    def send_start(self, x, to, tag=0):
        return self._collectives_for(x).send_start(x, to, tag)

    def recv_start(self, out, source, tag=0):
        return self._collectives_for(out).recv_start(out, source, tag)

    def all_reduce(self, x, op="sum", out=None):
        return self._collectives_for(x).all_reduce(x, op, out)

    def all_gather(self, x, out=None):
        return self._collectives_for(x).all_gather(x, out)

    def reduce_scatter(self, x, op="sum", out=None):
        return self._collectives_for(x).reduce_scatter(x, op, out)

    def all_to_all(self, x, out=None):
        return self._collectives_for(x).all_to_all(x, out)

    def broadcast(self, x, root=0, out=None):
        return self._collectives_for(x).broadcast(x, root, out)


# -- binding a rank to its GPU -----------------------------------------------------------------------------------------


@dataclass
class GpuBinding:
    """The GPU of this rank, and what all groups of the rank share. With Triton's interpreter no field is set."""

    cupy: object = None  # the module cupy
    device_id: int | None = None  # the number of the GPU among the GPUs that this process sees
    name: str = ""  # the GPU's model
    pci_bus_id: str = ""  # equal for ranks of a host that share a GPU
    stream: object = None  # the communication stream, on which all NCCL calls are enqueued
    nccl: object = None  # the module cupy.cuda.nccl
    communicators: list = field(default_factory=list)  # NCCL communicators, which the watchdog checks for errors


def bind_gpu(local_rank):
    """Select GPU local_rank % (number of visible GPUs) as the current device of this thread; return its GpuBinding.

    Raises ConfigError if there is no GPU.
    """
    cupy = triton_launch.array_module()
    device_id = local_rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(device_id).use()
    name = cupy.cuda.runtime.getDeviceProperties(device_id)["name"].decode()
    pci_bus_id = cupy.cuda.Device(device_id).pci_bus_id
    return GpuBinding(cupy, device_id, name, pci_bus_id, cupy.cuda.Stream(non_blocking=True))


def import_nccl(cupy):
    """The module cupy.cuda.nccl; raises ConfigError if CuPy cannot load the NCCL library."""
    with warnings.catch_warnings(record=True) as caught:  # without NCCL, CuPy only warns and imports an empty module
        warnings.simplefilter("always")
        from cupy.cuda import nccl
    if not nccl.available:
        reason = f" ({str(caught[-1].message).strip().splitlines()[0]})" if caught else ""
        wheel = f"nvidia-nccl-cu{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
        raise ConfigError(f"CuPy finds no NCCL{reason}; pip install {wheel}, or use --transport mpi")
    return nccl
