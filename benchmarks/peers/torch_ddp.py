"""The PyTorch program of ranks/ranks.py: TorchGPT2 in DistributedDataParallel on gloo, one process per rank."""

import functools
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.torch_gpt2 import make_trainer as make_serial_trainer
from stage1_mpi.mpi_communicator import MpiCommunicator

TIMEOUT = timedelta(minutes=10)  # for one collective


def make_world(ranks):
    """The communicator of an MPI job for requests and results; its ranks are also a process group of gloo."""
    world = MpiCommunicator()
    connect = functools.partial(dist.TCPStore, "127.0.0.1", world_size=world.size, timeout=TIMEOUT)
    store = connect(port=0, is_master=True, wait_for_workers=False) if world.is_root else None  # 0: a free port
    port = world.broadcast_object(store and store.port)
    store = store or connect(port=port)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
    return world


def make_trainer(config, batch_size, seq_len, threads, world):
    """Return `step(inputs, targets) -> loss of this rank's sequences`; the arguments are NumPy int64 arrays.

    Their shape is (batch_size, seq_len): every rank passes the whole batch, and trains on its part.
    """
    # views of the buckets save a copy of the gradients
    wrap = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True)
    step = make_serial_trainer(config, batch_size, seq_len, threads, wrap=wrap)
    per_rank = batch_size // world.size
    rows = slice(world.rank * per_rank, (world.rank + 1) * per_rank)
    return lambda inputs, targets: step(inputs[rows], targets[rows])
