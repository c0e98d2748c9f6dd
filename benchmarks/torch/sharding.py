"""What do a sharded optimizer and fully sharded weights save in memory, and what do they cost in time?

"plain" is BucketedDDP and AdamW, "sharded optimizer" has ShardedOptimizer instead of AdamW; "fsdp" is our FSDP and
"fully_shard" PyTorch's, with one unit per block, both with AdamW. predicted() has the formulas of the memory.
"counted" is the size of the tensors of these three kinds on rank 0; "GB" is what the GPU's allocator has given out.

    python -m benchmarks.torch.sharding                            # on two GPUs
    python -m benchmarks.torch.sharding --backend gloo --size toy  # a quick trial on the CPU
    python -m benchmarks.torch.sharding --dry-run                  # the names of the rows
"""

import functools

import torch
import torch.distributed as dist

from benchmarks.harness.assignment_tables import MOMENTS, print_tables
from benchmarks.harness.rows import run_rows
from benchmarks.harness.script import benchmark
from benchmarks.torch import groups
from benchmarks.torch.ddp import Unsynchronized
from benchmarks.torch.models import build
from torch_bridge.ddp import BucketedDDP
from torch_bridge.fsdp import FSDP
from torch_bridge.sharded_optimizer import ShardedOptimizer

PLAIN, SHARDED, FSDP_OURS, FSDP_TORCH = "plain", "sharded optimizer", "fsdp", "fully_shard"
WAYS = [PLAIN, SHARDED, FSDP_OURS, FSDP_TORCH]
BUCKET_MB = 25


def wrap(way, module, options):
    """(model, optimizer) of a row."""
    if way == FSDP_TORCH:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import init_device_mesh

        mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
        for part in (*module.h, module):
            fully_shard(part, mesh=mesh)
        model = Unsynchronized(module)
    else:
        model = FSDP(module) if way == FSDP_OURS else BucketedDDP(module, BUCKET_MB)
    if way == SHARDED:
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return model, torch.optim.AdamW(model.parameters(), **options)


def local_bytes(tensors):
    """The bytes of this rank's part of some tensors."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if torch.is_tensor(t))
    return sum(t.nbytes for t in local)


def counted(model, optimizer):
    """Bytes of the parameters, gradients and optimizer state of this rank."""
    parameters = list(model.parameters())
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return local_bytes([*parameters, *(p.grad for p in parameters), *state])


def steps(way, size, context, batch, warm_up, repeats):
    """{"seconds": of each measured step, "losses": of every step, "counted", "allocated": {moment: bytes}, "peak"}."""
    training, sizes, memory = groups.Training(functools.partial(wrap, way), size, context, batch), {}, {}
    device, before = training.device, training.bytes_before

    def look(moment):
        if moment not in sizes:  # in the first step
            sizes[moment] = counted(training.model, training.optimizer)
            memory[moment] = groups.allocated(device) - before

    look("init")
    seconds = groups.seconds_of(functools.partial(training.step, look=look), device, warm_up, repeats)
    mean = torch.stack(training.losses)
    dist.all_reduce(mean)
    return {
        "seconds": seconds,
        "losses": (mean / dist.get_world_size()).tolist(),
        "counted": sizes,
        "allocated": memory,
        "peak": torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0,
        "parameters": sum(p.numel() * 4 for p in build(size, context, "meta").parameters()),
    }


def predicted(way, parameters, ranks):
    """{moment: bytes} of weights, gradients and state of one rank; `parameters`: bytes of all weights in fp32."""
    weights = parameters / ranks if way in (FSDP_OURS, FSDP_TORCH) else parameters
    state = 2 * parameters / (1 if way == PLAIN else ranks)
    return dict(zip(MOMENTS, (weights, 2 * weights, 2 * weights + state), strict=True))


def way_row(processes, way, ranks, args):
    """The values of a row: the largest memory of a rank, the time of the slowest rank, the mean loss of the ranks."""
    found = processes.run_way(args, ranks, steps, way)
    values = {"way": way, "ranks": ranks, "step": groups.slowest(found, "seconds")}
    wanted = predicted(way, found[0]["parameters"], ranks)
    for moment in MOMENTS:
        values[f"predicted GB {moment}"] = wanted[moment] / 1e9
        values[f"counted GB {moment}"] = max(each["counted"][moment] for each in found) / 1e9
        if found[0]["peak"]:
            values[f"GB {moment}"] = max(each["allocated"][moment] for each in found) / 1e9
    if found[0]["peak"]:
        values["peak GB"] = max(each["peak"] for each in found) / 1e9
    return values | {"first loss": found[0]["losses"][0], "last loss": found[0]["losses"][-1]}


DESCRIBED = "nccl on GPUs, nccl-sockets without P2P, nccl-shared with several ranks on a GPU, or gloo on the CPU"


@benchmark(
    common=groups.group_flags(groups.BACKENDS, DESCRIBED) | dict(batch=4, context=128, ranks=[2], warm_up=5, repeats=10)
)
def main(args):
    with groups.Groups() as processes:
        cases = {
            f"{groups.settings_of(args, ranks)}, {way}": functools.partial(way_row, processes, way, ranks, args)
            for ranks in args.ranks
            for way in WAYS
        }
        print_tables(run_rows(args, cases), "sharding")
