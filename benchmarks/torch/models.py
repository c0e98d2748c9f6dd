"""The models of the systems assignment as torch_gpt2 of the given width and depth, the backends, and a clock.

The vocabulary has 10,000 tokens; d_ff is 4 d_model. GPT-2 has the assignment's sizes, and its own layers.
"""

import gc
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.harness.report import print_table
from benchmarks.harness.rows import mean_and_deviation
from benchmarks.harness.torch_ranks import RanksFailed, TorchRanks
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
            backend, environment = BACKENDS[name]
            threads = max(1, (os.cpu_count() or 1) // ranks)
            self.key, self.ranks = (name, ranks), TorchRanks(ranks, backend, threads, self.limit, environment)
        try:
            return self.ranks.run(function, *args)
        except RanksFailed as error:
            if "OutOfMemoryError" in str(error):
                raise torch.OutOfMemoryError(str(error)) from None
            raise


def slowest(found, field):
    """{"mean", "std", "n"} in ms of the slowest rank in each run; found: {field: seconds of each run} of each rank."""
    return mean_and_deviation([1e3 * max(each) for each in zip(*(rank[field] for rank in found), strict=True)])


def print_rows(rows):
    """Print rows with all their columns; a time is its mean and standard deviation."""
    if rows:
        columns = dict.fromkeys(key for row in rows for key in row if key not in ("commit", "date"))
        print()
        print_table([{key: cell(row.get(key, "")) for key in columns} for row in rows])


def cell(value):
    if isinstance(value, dict):
        return f"{value['mean']:.4g} ± {value['std']:.2g}" if "mean" in value else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def add_run_flags(add, warm_up, repeats):
    """The flags of a measurement."""
    add("--warm-up", type=int, default=warm_up, help=f"runs before the measurement (default {warm_up})")
    add("--repeats", type=int, default=repeats, help=f"measured runs of each row (default {repeats})")


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
