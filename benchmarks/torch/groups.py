"""Groups of ranks that PyTorch's backends connect: the backends, the processes, and the flags of their commands."""

import os

import torch
import torch.distributed as dist

from benchmarks.harness.rows import ROW_FLAGS, mean_and_deviation
from benchmarks.torch.models import SIZES, batch_of, build, device_of_rank, loss_of, release_memory, timed
from testing.torch_ranks import RanksFailed, TorchRanks

BACKENDS = {  # name: options of TorchRanks
    "gloo": dict(backend="gloo"),
    "nccl": dict(backend="nccl"),
    # through the host's network stack
    "nccl-sockets": dict(backend="nccl", environment={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
    "nccl-shared": dict(backend="nccl", share_gpus=True),  # more ranks than GPUs
}
TIMED_BACKENDS = [name for name in BACKENDS if name != "nccl-shared"]  # whose times are those of a GPU per rank


class Groups:
    """A context manager. run(backend, ranks, function, *args) calls a function on every rank; see TorchRanks.

    The processes of one backend and number of ranks are kept until another one is asked for. Raises
    torch.OutOfMemoryError if a rank had too little GPU memory.
    """

    def __init__(self, limit=300):
        self.limit, self.key, self.ranks = limit, None, None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.ranks:
            self.ranks.__exit__()

    def run(self, name, ranks, function, *args):
        if self.key != (name, ranks):
            self.__exit__()
            threads = max(1, (os.cpu_count() or 1) // ranks)
            self.key = name, ranks
            self.ranks = TorchRanks(ranks, threads=threads, limit=self.limit, **BACKENDS[name])
        try:
            return self.ranks.run(function, *args)
        except RanksFailed as error:
            if "OutOfMemoryError" in str(error):
                raise torch.OutOfMemoryError(str(error)) from None
            raise

    def run_way(self, args, ranks, steps, way):
        """[the result of steps(way, size, context, batch, warm_up, repeats)] of each rank."""
        settings = args.size, args.context, args.batch, args.warm_up, args.repeats
        return self.run(args.backend, ranks, steps, way, *settings)


class Training:
    """A model of a size on this rank; step() trains one step and keeps its loss in `losses`.

    wrap(module, optimizer_options) returns (model, optimizer); the model has finish_gradient_synchronization().
    """

    def __init__(self, wrap, size, context, batch):
        release_memory()
        self.device, self.losses = device_of_rank(), []
        self.bytes_before = allocated(self.device)
        options = dict(lr=1e-4, fused=self.device.type == "cuda")
        self.model, self.optimizer = wrap(build(size, context, self.device), options)
        self.batch = batch_of(batch, context, self.device, dist.get_rank())

    def step(self, finish=None, look=lambda moment: None):
        """finish(): called instead of the model's finish_gradient_synchronization(). look(moment): see MOMENTS."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.model, *self.batch)
        loss.backward()
        self.losses.append(loss.detach())
        del loss
        (finish or self.model.finish_gradient_synchronization)()
        look("before step")
        self.optimizer.step()
        look("after step")


def allocated(device):
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def slowest(found, field):
    """{"mean", "std", "n"} in ms of the slowest rank in each run; found: {field: seconds of each run} of each rank."""
    return mean_and_deviation([1e3 * max(each) for each in zip(*(rank[field] for rank in found), strict=True)])


def seconds_of(function, device, warm_up, repeats):
    """The seconds of each measured call of function() on this rank. All ranks begin a call together."""
    for _ in range(warm_up):
        function()
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        seconds.append(timed(function, device)[0])
    return seconds


def group_flags(backends, described):
    """The flags of a command that trains a model on a group of ranks. described: the backends, for --help."""
    return ROW_FLAGS | {
        "size": dict(choices=SIZES, default="xl", help="model (default xl)"),
        "backend": dict(choices=backends, default="nccl", help=f"{described} (default nccl)"),
    }


def settings_of(args, ranks):
    """The settings of group_flags() as the beginning of the names of rows."""
    return f"{args.size}, {args.backend}, {ranks} ranks, batch {args.batch}, context {args.context}"
