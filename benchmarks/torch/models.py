"""The models of the systems assignment as torch_gpt2 of the given width and depth, and a clock.

The vocabulary has 10,000 tokens; d_ff is 4 d_model. GPT-2 has the assignment's sizes, and its own layers.
"""

import contextlib
import gc
import itertools
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.rows import ROW_FLAGS
from benchmarks.peers import torch_gpt2
from gpt2core.architecture import GPT2Config
from gpt2core.errors import ConfigError

VOCABULARY = 10_000
PRECISIONS = "fp32", "bf16"
CONTEXTS = 128, 256, 512, 1024
SIZES = {  # name: (d_model, layers, heads)
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 36, 20),
    "xl": (1600, 48, 25),
    "2.7B": (2560, 32, 32),
    "toy": (64, 2, 4),  # for a trial on the CPU
}


def config_of(size, context):
    """The GPT2Config of a size."""
    width, layers, heads = SIZES[size]
    return GPT2Config(VOCABULARY, context, layers, heads, width, tied=False)


def build(size, context, device, seed=0, attention=None):
    """The model of a size on a device, with the same parameters for every rank. attention: a class to use instead."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = torch_gpt2.TorchGPT2(config_of(size, context))
    if attention:
        for block in model.h:
            block.attn.__class__ = attention
    return model


class NaiveAttention(torch_gpt2.Attention):
    """Attention as in the assignment's model: the scores and the weights (B, H, T, T) are written to memory."""

    def attend(self, q, k, v, causal):
        return naive_attention(q, k, v, causal)


def naive_attention(q, k, v, causal=True):
    """softmax(q k' / sqrt(D)) v in three named ranges; q, k, v (B, H, T, D)."""
    with named_range("attention scores", q.device):
        s = attention_scores(q, k, causal)
    with named_range("attention softmax", q.device):
        p = s.softmax(-1)  # float32 under autocast
    with named_range("attention values", q.device):
        return p @ v


def attention_scores(q, k, causal):
    """q k' / sqrt(D) (..., T, T); causal: minus infinity where the key comes after the query."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        positions = torch.arange(q.shape[-2], device=q.device)
        s = s.masked_fill(positions > positions[:, None], float("-inf"))
    return s


def named_range(name, device):
    """A context whose work a profiler of NVIDIA shows under this name, as an NVTX range."""
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else contextlib.nullcontext()


class CheckpointedBlocks(nn.Module):
    """Consecutive blocks of which forward keeps only the input; backward computes their forward pass again."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x, cache=None, past=0, last_only=False):
        return checkpoint(self.blocks, x, use_reentrant=False)


def use_checkpoints(model, count):
    """Checkpoint the blocks of a model of build() in groups of `count`."""
    groups = (model.h[first : first + count] for first in range(0, len(model.h), count))
    model.h = nn.ModuleList(map(CheckpointedBlocks, groups))


def batch_of(batch, context, device, seed):
    """Random (inputs, targets), both (batch, context)."""
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch, context + 1), generator=generator, device=device)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model, inputs, targets):
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def model_examples(name):
    """Examples for the docstring of a command that measures models."""
    return f"""
    python -m benchmarks.torch.{name}  # a selection, on a GPU
    python -m benchmarks.torch.{name} --device cpu --sizes toy --contexts 32  # a quick trial on the CPU
    python -m benchmarks.torch.{name} --dry-run  # the names of the rows
    """


def model_flags(precisions):
    """The flags of a command that measures models, for chosen_models(); precisions: a help text."""
    without = "(default without these three flags: a selection, a few minutes on an H200)"
    return ROW_FLAGS | {
        "sizes": dict(nargs="+", choices=SIZES, help=f"models {without}"),
        "contexts": dict(type=int, nargs="+", metavar="T", help=f"tokens of a sequence {without}"),
        "precisions": dict(nargs="+", choices=PRECISIONS, help=precisions),
    }


def chosen_models(args, precisions=PRECISIONS):
    """[(size, context, precision)] of the flags --sizes, --contexts and --precisions; [] without these flags."""
    if not (args.sizes or args.contexts or args.precisions):
        return []
    sizes = args.sizes or [size for size in SIZES if size != "toy"]
    lists = itertools.product(args.precisions or precisions, args.contexts or CONTEXTS, sizes)
    return [(size, context, precision) for precision, context, size in lists]


def check_device(args):
    """Raise ConfigError if the device of --device does not exist."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sizes = " --sizes toy" * hasattr(args, "sizes")
        raise ConfigError(f"--device cuda: PyTorch found no GPU: use --device cpu{sizes} for a trial")


def device_of_rank():
    """The device of this rank: its GPU for nccl."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def wait_for(device):
    """Return when the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function, device):
    """(seconds, result) of a call; the time includes the work of the device."""
    wait_for(device)
    began = time.perf_counter()
    result = function()
    wait_for(device)
    return time.perf_counter() - began, result


def release_memory():
    """Free the memory of the last case: its parameters and their hooks are in reference cycles.

    Also forget compiled code, because torch.compile limits the number of its compilations.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
