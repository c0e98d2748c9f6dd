"""The peer on many GPUs: nanoGPT's GPT-2, compiled, in DistributedDataParallel over NCCL, a process for each GPU."""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.torch_ddp import Processes
from benchmarks.peers.torch_gpt2_cuda import CudaSteps

make_world = Processes  # they speak by gloo, which is no work for a GPU; the gradients have a group of their own


def make_variants(config, world, windows, variants, precision="bf16", compiled=True, device="cuda"):
    """{name: train(steps) -> {"loss": that of the last one}}; None where this process has no part in it.

    variants: {name: dict(ranks=, batch_size= of all ranks)}; the ranks are the first ones. A model is made at its
    first turn. The losses of a turn are read at its end, at once: a peer should not wait for what it need not know.
    """
    if device == "cuda":
        torch.cuda.set_device(world.rank)
    # A second batch size must not make the first one's code general: a compiled model of fixed shapes is faster.
    torch._dynamo.config.automatic_dynamic_shapes = False

    def variant(ranks, batch_size):
        group = dist.new_group(range(ranks), backend="nccl" if device == "cuda" else "gloo")  # all processes call it
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
    """The model in DDP with its default buckets, compiled before it is wrapped, as in nanoGPT; one rank does without.

    The gradients lie in the buckets, which saves a copy.
    """
    if ranks == 1:
        return model
    devices = [torch.cuda.current_device()] if device == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, process_group=group, gradient_as_bucket_view=True)
