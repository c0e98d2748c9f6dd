"""The models of the systems assignment as torch_gpt2 of the given width and depth, the backends, and a clock.

The vocabulary has 10,000 tokens; d_ff is 4 d_model. GPT-2 has the assignment's sizes, and its own layers.
"""

import contextlib
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.report import benchmark_parser
from benchmarks.harness.rows import mean_and_deviation
from benchmarks.peers import torch_gpt2
from gpt2core.architecture import GPT2Config
from gpt2core.errors import ConfigError
from testing.torch_ranks import RanksFailed, TorchRanks

VOCABULARY = 10_000
PRECISIONS = "fp32", "bf16"
BACKENDS = {  # name: options of TorchRanks
    "gloo": dict(backend="gloo"),
    "nccl": dict(backend="nccl"),
    # through the host's network stack
    "nccl-sockets": dict(backend="nccl", environment={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
    "nccl-shared": dict(backend="nccl", share_gpus=True),  # more ranks than GPUs
}
TIMED_BACKENDS = [name for name in BACKENDS if name != "nccl-shared"]  # whose times are those of a GPU per rank
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


def slowest(found, field):
    """{"mean", "std", "n"} in ms of the slowest rank in each run; found: {field: seconds of each run} of each rank."""
    return mean_and_deviation([1e3 * max(each) for each in zip(*(rank[field] for rank in found), strict=True)])


def add_run_flags(add, warm_up, repeats):
    """The flags of a measurement."""
    add("--warm-up", type=int, default=warm_up, help=f"runs before the measurement (default {warm_up})")
    add("--repeats", type=int, default=repeats, help=f"measured runs of each row (default {repeats})")


def add_device_flag(add):
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cuda, or cpu for a trial (default cuda)")


def model_parser(benchmark, docstring, models, precisions, everything):
    """The parser of a command that measures models; the other arguments are parts of help texts.

    models: what is measured without --sizes and --contexts. precisions, everything: of --precisions and --all.
    """
    trial = ("--device cpu --sizes toy --contexts 32", "a quick trial on the CPU")
    examples = ("", "a selection, on a GPU"), trial, ("--dry-run", "the names of the rows")
    parser = benchmark_parser(benchmark, docstring, *examples)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SIZES, help=f"models (default: {models})")
    add("--contexts", type=int, nargs="+", metavar="T", help=f"tokens of a sequence (default: {models})")
    add("--batch", type=int, default=4, help="sequences (default 4)")
    add("--precisions", nargs="+", choices=PRECISIONS, help=precisions)
    add("--all", action="store_true", help=everything)
    add_device_flag(add)
    return parser


def add_group_flags(add, backends, described):
    """The flags of a command that trains a model on a group of ranks. described: the backends, for the help text."""
    add("--size", choices=SIZES, default="xl", help="model (default xl)")
    add("--backend", choices=backends, default="nccl", help=f"{described} (default nccl)")
    add("--batch", type=int, default=4, help="sequences of a rank (default 4)")
    add("--context", type=int, default=128, help="tokens of a sequence (default 128)")
    add_run_flags(add, warm_up=5, repeats=10)


def settings_of(args, ranks):
    """The settings of add_group_flags() as the beginning of the names of rows."""
    return f"{args.size}, {args.backend}, {ranks} ranks, batch {args.batch}, context {args.context}"


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
    """Free the memory of the last case: its parameters and their hooks are in reference cycles."""
    gc.collect()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
