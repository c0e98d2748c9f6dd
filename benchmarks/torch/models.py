"""The models of the systems assignment as torch_gpt2 of the given width and depth, the backends, and a clock.

The vocabulary has 10,000 tokens; d_ff is 4 d_model. GPT-2 has the assignment's sizes, and its own layers.
"""

import gc
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.harness.torch_ranks import TorchRanks
from benchmarks.peers.torch_gpt2 import TorchGPT2
from gpt2core.model import GPT2Config

VOCABULARY = 10_000
BACKENDS = {  # name: (the backend of torch.distributed, environment of its processes)
    "gloo": ("gloo", {}),
    "nccl": ("nccl", {}),
    "nccl-sockets": ("nccl", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),  # through the host's network stack
}
SIZES = {  # name: (d_model, layers, heads)
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
    "2.7B": (2560, 32, 32),
    "toy": (64, 2, 4),  # for a trial on the CPU
}


def build(size, context, device, seed=0):
    """The model of a size on a device, with the same parameters for every rank."""
    width, layers, heads = SIZES[size]
    torch.manual_seed(seed)
    with torch.device(device):
        return TorchGPT2(GPT2Config(VOCABULARY, context, layers, heads, width, tied=False))


def batch_of(batch, context, device, seed):
    """Random (inputs, targets), both (batch, context)."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch, context + 1), generator=generator, device=device)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model, inputs, targets):
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def ranks_of(name, ranks, limit=300):
    """The TorchRanks of a backend; they share the cores of this machine."""
    backend, environment = BACKENDS[name]
    return TorchRanks(ranks, backend, max(1, (os.cpu_count() or 1) // ranks), limit, environment)


def device_of_rank():
    """The device of this rank: a GPU for nccl."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def wait_for(device):
    """Return when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function, device):
    """(seconds, result) of a call, with the work of the device."""
    wait_for(device)
    began = time.perf_counter()
    result = function()
    wait_for(device)
    return time.perf_counter() - began, result


def release_memory():
    """Free what the last case has left, which parameters and their hooks keep in reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
