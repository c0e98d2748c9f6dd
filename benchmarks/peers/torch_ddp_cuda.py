"""The PyTorch program of gpus/scaling.py: nanoGPT's GPT-2, compiled, in DistributedDataParallel, one rank per GPU."""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import torch_ddp
from benchmarks.peers.torch_gpt2_cuda import CudaSteps

make_world = torch_ddp.make_world  # for requests and results; make_variants() creates groups for the gradients


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

        def steps_in_ddp(per_rank):
            steps = CudaSteps(config, per_rank, windows.seq_len, precision, compiled, device=device)
            steps.loss_module = in_ddp(steps.loss_module, group, ranks, device)
            return steps

        return train_function(steps_in_ddp, windows, world.rank, ranks, batch_size)

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


def in_ddp(model, group, ranks, device):
    """The model in DistributedDataParallel with buckets of the default size; with one rank, the model itself.

    As in nanoGPT, the model is already compiled. Gradients are views of the buckets, which saves a copy.
    """
    if ranks == 1:
        return model
    devices = [torch.cuda.current_device()] if device == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, process_group=group, gradient_as_bucket_view=True)
