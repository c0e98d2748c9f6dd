"""NcclCommunicator: NCCL for CuPy arrays and MPI for NumPy arrays; the type of the array selects between them.

MPI starts the processes, numbers them (their ranks), and transfers data in host memory: objects, losses, file contents.
NCCL transfers large arrays directly from GPU to GPU.
"""
# p: number of ranks in a group

import platform
import warnings
from collections import Counter
from dataclasses import dataclass, field

from gpt2core.communicator import Communicator, Solo
from gpt2core.errors import ConfigError, counted
from gpt2core.parallel.all_or_raise import all_or_raise, gather_or_raise, shared_error
from stage1_mpi.mpi_communicator import MpiCommunicator
from stage2_cuda.runtime import triton_launch
from stage3_mpi_cuda.nccl_collectives import NATIVE, NcclCollectives
from stage3_mpi_cuda.staged_collectives import StagedCollectives
from stage3_mpi_cuda.watchdog import watch_gpus

TRANSPORTS = {"nccl": NcclCollectives, "mpi": StagedCollectives}


def of_transport(name):
    """A property of an NcclCommunicator: the attribute `name` of the class that transfers its CuPy arrays."""
    return property(lambda self: getattr(TRANSPORTS[self.transport or "mpi"], name))


class NcclCommunicator(Communicator):
    """One rank of a group that computes on GPUs. Without arguments: the group of all ranks of the MPI job.

    mpi_group: the MpiCommunicator of the same ranks, which transfers NumPy arrays. parent: the communicator whose
    split() creates this one; the new communicator uses the parent's GPU, transport and algorithm.

    CuPy arrays use the transport that use_transport() selected. Transport "nccl" needs one GPU per rank and uses a
    communication stream. Transport "mpi" copies through host memory, and ranks may share a GPU. With TRITON_INTERPRET=1
    all arrays are NumPy arrays.

    Sums are canonical unless use_collectives() selects another algorithm. With transport "nccl" the only other
    algorithm is "nccl": NCCL's own sums, whose order depends on the number of ranks. With transport "mpi" all
    algorithms of MpiCommunicator are available.
    """

    def __init__(self, mpi_group=None, parent=None):
        self.mpi_group = mpi_group or MpiCommunicator()
        self.rank, self.size = self.mpi_group.rank, self.mpi_group.size
        self.local_rank, self.local_size = self.mpi_group.local_rank, self.mpi_group.local_size
        self.gpu, self.transport, self._algorithm = None, None, "canonical"
        if parent is not None:
            self.gpu, self.transport, self._algorithm = parent.gpu, parent.transport, parent._algorithm
        # For CuPy arrays. Created when the first one is passed, because the ranks of the group must then connect.
        self._device_communicator = None

    def plan_transport(self, name):
        if self._is_interpreted():
            return self.use_transport(name)
        check_transport(name)
        self.transport = name or "nccl"
        return self.transport

    def use_transport(self, name):
        check_transport(name)
        if self._is_interpreted():
            if name == "nccl":
                raise ConfigError("`transport=nccl`: needs GPUs, and Triton's interpreter uses none; omit the flag")
            self.transport, self.gpu = "mpi", GpuBinding()
        else:
            self.gpu = all_or_raise(self.mpi_group, lambda: bind_gpu(self.local_rank))
            self.transport = self._choose_transport(name)
            if self.transport == "nccl":
                self.gpu.nccl = all_or_raise(self.mpi_group, lambda: import_nccl(self.gpu.cupy))
        watch_gpus(self)
        return self.transport

    def _is_interpreted(self):
        """Whether all ranks use Triton's interpreter; raises ConfigError if only some of them do."""
        ranks = gather_or_raise(self.mpi_group, lambda: (triton_launch.interpreted(), platform.node()))
        for rank, (interpreted, _) in enumerate(ranks):
            if interpreted != ranks[0][0]:
                with_it, without = (rank, 0) if interpreted else (0, rank)
                raise shared_error(
                    ConfigError(
                        f"rank {with_it} uses Triton's interpreter (on {ranks[with_it][1]}), but rank {without} a GPU "
                        f"(on {ranks[without][1]}): set TRITON_INTERPRET for all ranks or for none, with Open MPI by "
                        "mpirun -x TRITON_INTERPRET"
                    )
                )
        return ranks[0][0]

    def _choose_transport(self, name):
        """The transport to use with the GPUs that the ranks have selected. name: the value of --transport, or None.

        Rank 0 warns if ranks share a GPU. Raises ConfigError if the GPUs are of different models, or if `name`
        is "nccl" and ranks share a GPU.
        """
        gpus = self.mpi_group.all_gather_object((platform.node(), self.gpu.name, self.gpu.pci_bus_id))
        first_host, first_model, _ = gpus[0]
        for rank, (host, model, _) in enumerate(gpus):
            if model != first_model:
                advice = "select GPUs of one model with CUDA_VISIBLE_DEVICES"
                found = f"rank {rank} has an {model} on {host}, but rank 0 has an {first_model} on {first_host}"
                raise shared_error(ConfigError(f"{found}; {advice}"))
        ranks_of = Counter(host for host, *_ in gpus)
        gpus_of = Counter(host for host, *_ in set(gpus))
        found = [
            f"{host} has {counted(gpus_of[host], 'GPU')} for {counted(ranks, 'rank')}"
            for host, ranks in ranks_of.items()
            if gpus_of[host] < ranks
        ]
        if not found:
            return name or "nccl"
        if name == "nccl":
            advice = "start one rank for each GPU, or use `transport=mpi`, where ranks can share a GPU"
            raise shared_error(ConfigError(f"`transport=nccl`: needs a GPU for each rank, but {found[0]}; {advice}"))
        if self.is_root:
            reason = "so ranks share GPUs, which NCCL does not support"
            warnings.warn(f"{found[0]}, {reason}: using `transport=mpi`", stacklevel=2)
        return "mpi"

    native_algorithm, capturable = map(of_transport, ("native_algorithm", "capturable"))

    @property
    def bytes_sent(self):
        return self.mpi_group.bytes_sent + (self._device_communicator.bytes_sent if self._device_communicator else 0)

    def use_collectives(self, name):
        if self.transport == "mpi":
            if name == NATIVE:
                raise ConfigError(
                    f"`collectives={name}`: needs `transport=nccl`, which needs a GPU for each rank, but the transport "
                    "is mpi: omit the flag, or use `collectives=mpi`"
                )
            self.mpi_group.use_collectives(name)
        elif name not in ("canonical", NATIVE):
            raise ConfigError(
                f"`collectives={name}`: not available with NCCL; use canonical, {NATIVE} or `transport=mpi`"
            )
        self._algorithm = name
        if self._device_communicator:
            self._device_communicator.use_collectives(name)

    def sent(self, call, size, rank):
        if call.on_host or triton_launch.interpreted():
            return self.mpi_group.sent(call, size, rank)
        return TRANSPORTS[self.transport].sent_on_device(self.mpi_group, call, size, rank)

    def _communicator_for(self, x):
        """The communicator that transfers x: mpi_group for a NumPy array, that of the transport for a CuPy array."""
        if not hasattr(x, "__cuda_array_interface__"):
            return self.mpi_group
        if self._device_communicator is None:
            self._device_communicator = TRANSPORTS[self.transport](self.mpi_group, self.gpu)
            self._device_communicator.use_collectives(self._algorithm)
        return self._device_communicator

    def abort(self, code):
        self.mpi_group.abort(code)

    def barrier(self):
        self.mpi_group.barrier()

    def split(self, color, key=0):
        mpi_group = self.mpi_group.split(color, key)
        is_group_of_several = mpi_group is not None and not isinstance(mpi_group, Solo)
        return NcclCommunicator(mpi_group, self) if is_group_of_several else mpi_group

    # Collectives and messages for both array types: the non-blocking forms, then the blocking forms

    def all_reduce_start(self, x, op="sum", out=None):
        return self._communicator_for(x).all_reduce_start(x, op, out)

    def all_gather_start(self, x, out=None):
        return self._communicator_for(x).all_gather_start(x, out)

    def reduce_scatter_start(self, x, op="sum", out=None):
        return self._communicator_for(x).reduce_scatter_start(x, op, out)

    def all_to_all_start(self, x, out=None):
        return self._communicator_for(x).all_to_all_start(x, out)

    def broadcast_start(self, x, root=0, out=None):
        return self._communicator_for(x).broadcast_start(x, root, out)

    def send_start(self, x, to, tag=0):
        return self._communicator_for(x).send_start(x, to, tag)

    def recv_start(self, out, source, tag=0):
        return self._communicator_for(out).recv_start(out, source, tag)

    def all_reduce(self, x, op="sum", out=None):
        return self._communicator_for(x).all_reduce(x, op, out)

    def all_gather(self, x, out=None):
        return self._communicator_for(x).all_gather(x, out)

    def reduce_scatter(self, x, op="sum", out=None):
        return self._communicator_for(x).reduce_scatter(x, op, out)

    def all_to_all(self, x, out=None):
        return self._communicator_for(x).all_to_all(x, out)

    def broadcast(self, x, root=0, out=None):
        return self._communicator_for(x).broadcast(x, root, out)


def check_transport(name):
    """Raise ConfigError unless `name` is a transport, or None."""
    if name not in (None, *TRANSPORTS):
        raise ConfigError(f"`transport={name}`: unknown transport; choose from {', '.join(TRANSPORTS)}")


# -- binding a rank to its GPU -----------------------------------------------------------------------------------------


@dataclass
class GpuBinding:
    """The GPU of this rank, and objects that all communicators of the rank share. Empty in Triton's interpreter."""

    cupy: object = None  # the module cupy
    device_id: int | None = None  # the number of the GPU among the GPUs that are visible to this process
    name: str = ""  # the GPU's model
    pci_bus_id: str = ""  # the address of the GPU in its computer: equal for ranks that share the GPU
    stream: object = None  # the communication stream, on which all NCCL calls are enqueued
    nccl: object = None  # the module cupy.cuda.nccl
    communicators: list = field(default_factory=list)  # NCCL communicators, which the watchdog checks for errors


def bind_gpu(local_rank):
    """Select GPU local_rank % (number of visible GPUs) as the current device of this thread; return its GpuBinding.

    local_rank: the number of this rank among the ranks of its host. Raises ConfigError if the host has no GPU, or
    if its memory is full.
    """
    try:
        cupy = triton_launch.array_module()
    except ConfigError as error:
        raise ConfigError(f"host {platform.node()}: {error}; or start no ranks on this host") from error
    device_id = local_rank % cupy.cuda.runtime.getDeviceCount()
    triton_launch.open_gpu(cupy, device_id)
    name = cupy.cuda.runtime.getDeviceProperties(device_id)["name"].decode()
    pci_bus_id = cupy.cuda.Device(device_id).pci_bus_id
    return GpuBinding(cupy, device_id, name, pci_bus_id, cupy.cuda.Stream(non_blocking=True))


def import_nccl(cupy):
    """The module cupy.cuda.nccl; raises ConfigError if CuPy cannot load the NCCL library."""
    with warnings.catch_warnings(record=True) as caught:  # if NCCL is missing, CuPy only warns
        warnings.simplefilter("always")
        from cupy.cuda import nccl
    if not nccl.available:
        reason = f" ({str(caught[-1].message).strip().splitlines()[0]})" if caught else ""
        wheel = f"nvidia-nccl-cu{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
        raise ConfigError(f"CuPy finds no NCCL{reason}; pip install {wheel}, or use `transport=mpi`")
    return nccl
