"""PyTorch's side of gpus/scaling.py: nanoGPT's GPT-2, compiled, in DistributedDataParallel, one process per GPU."""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.torch_ddp import Processes
from benchmarks.peers.torch_gpt2_cuda import CudaSteps

make_world = Processes  # requests and results travel over gloo, gradients over a separate NCCL group


def make_variants(config, world, windows, variants, precision="bf16", compiled=True, device="cuda"):
    """{name: train(steps) -> {"loss": of the last step}}, or None in place of train on a process that takes no part.

    variants: {name: dict(ranks=, batch_size= of all ranks)}; the first `ranks` processes take part. The first call of
    train() creates the model. Losses are read after the last step, so no step waits for the device.
    """
    if device == "cuda":
        torch.cuda.set_device(world.rank)
    # A second batch size must not make torch.compile switch to dynamic shapes, which are slower.
    torch._dynamo.config.automatic_dynamic_shapes = False

    def variant(ranks, batch_size):
        group = dist.new_group(range(ranks), backend="nccl" if device == "cuda" else "gloo")  # a collective
        if world.rank >= ranks:
            return None
        each, position, model = batch_size // ranks, 0, None

        def train(steps):
            nonlocal position, model
            if model is None:
                model = CudaSteps(config, each, windows.seq_len, precision, compiled, device=device)
                model.loss_of = replicated(model.loss_of, group, ranks, device)
            losses = []
            for _ in range(steps):
                inputs, targets = windows.batch(position + world.rank * each, each)
                losses.append(model(np.array(inputs), np.array(targets), wait=False))
                position += batch_size
            return {"loss": [float(loss) for loss in losses][-1]}

        return train

    return {name: variant(**options) for name, options in variants.items()}


def replicated(model, group, ranks, device):
    """The model in DDP with default buckets, compiled before it is wrapped, as in nanoGPT; on one rank the bare model.

    Gradients are views of the buckets, which saves a copy.
    """
    if ranks == 1:
        return model
    devices = [torch.cuda.current_device()] if device == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, process_group=group, gradient_as_bucket_view=True)
