"""PyTorch's programs of ranks/ranks.py and gpus/scaling.py: GPT-2 in DistributedDataParallel, one process per rank."""

import functools
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.torch_gpt2 import make_trainer as make_serial_trainer
from benchmarks.peers.torch_gpt2_cuda import CudaSteps
from stage1_mpi.mpi_communicator import MpiCommunicator

TIMEOUT = timedelta(minutes=10)  # for one collective
in_ddp = functools.partial(DistributedDataParallel, gradient_as_bucket_view=True)  # views save a copy of the gradients


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
    """Return `step(inputs, targets) -> loss of this rank's sequences`, on the CPU; the arguments are int64 arrays.

    Their shape is (batch_size, seq_len): every rank passes the whole batch, and trains on its part.
    """
    step = make_serial_trainer(config, batch_size, seq_len, threads, wrap=in_ddp)
    per_rank = batch_size // world.size
    rows = slice(world.rank * per_rank, (world.rank + 1) * per_rank)
    return lambda inputs, targets: step(inputs[rows], targets[rows])


def make_variants(config, world, windows, variants, precision="bf16", compiled=True, device="cuda"):
    """{name: train} of all variants; train(steps) runs training steps and returns {"loss": loss of the last step}.

    variants: {name: dict(ranks=..., batch_size=...)}, with the batch size of all ranks together. Only the first `ranks`
    processes train; the other processes have None instead of train. windows: the Windows from which batches are read.
    The first call of train() creates the model. Losses are read after the last step, so no step waits for the device.
    """
    if device == "cuda":
        torch.cuda.set_device(world.rank)
    # A second batch size must not make torch.compile switch to dynamic shapes, which are slower.
    torch._dynamo.config.automatic_dynamic_shapes = False

    def variant(ranks, batch_size):
        group = dist.new_group(range(ranks), backend="nccl" if device == "cuda" else "gloo")  # all processes call it
        if world.rank >= ranks:
            return None

        def build(per_rank):
            steps = CudaSteps(config, per_rank, windows.seq_len, precision, compiled, device=device)
            if ranks > 1:  # as in nanoGPT, the model is already compiled
                devices = [torch.cuda.current_device()] if device == "cuda" else None
                steps.loss_module = in_ddp(steps.loss_module, device_ids=devices, process_group=group)
            return steps

        return train_function(build, windows, world.rank, ranks, batch_size)

    return {name: variant(**options) for name, options in variants.items()}


def train_function(build, windows, rank, ranks, batch_size, read=torch.Tensor.tolist):
    """Return train(steps), which trains on this rank's rows of `batch_size` sequences and returns {"loss": the last}.

    build(sequences per step of a rank): the CudaSteps, called by the first call of train(). read(losses): the list of
    the losses of all steps from a tensor, called after the last step.
    """
    per_rank, position, train_step = batch_size // ranks, 0, None  # position: number of windows that were read

    def train(steps):
        nonlocal position, train_step
        train_step, losses = train_step or build(per_rank), []
        for _ in range(steps):
            inputs, targets = windows.batch(position + rank * per_rank, per_rank)
            losses.append(train_step(np.array(inputs), np.array(targets), wait=False))
            position += batch_size
        return {"loss": read(torch.stack(losses))[-1], **train_step.memory()}

    return train
