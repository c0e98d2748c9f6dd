"""What do a sharded optimizer and fully sharded weights save in memory, and what do they cost in time?

    plain               BucketedDDP and AdamW                  per rank: weights P, gradients P, state 2 P
    sharded optimizer   BucketedDDP and ShardedOptimizer                 P               P         2 P / ranks
    fsdp                FSDP and AdamW                                   P / ranks, gradients P / ranks, 2 P / ranks
    fully_shard         PyTorch's FSDP, one unit per block               the same

"counted" is the size of the tensors of these three kinds on rank 0; "GB" is what the GPU's allocator has given out.

    python -m benchmarks.torch.sharding                            # on two GPUs
    python -m benchmarks.torch.sharding --backend gloo --size toy  # a quick trial on the CPU
    python -m benchmarks.torch.sharding --dry-run                  # the names of the rows
"""

import functools

import torch
import torch.distributed as dist

from benchmarks.harness.assignment_tables import MOMENTS, print_tables
from benchmarks.harness.processes import run_main
from benchmarks.harness.rows import run_rows
from benchmarks.torch.groups import BACKENDS, Groups, group_parser, seconds_of, settings_of, slowest
from benchmarks.torch.models import batch_of, build, device_of_rank, loss_of, release_memory
from torch_bridge.ddp import BucketedDDP
from torch_bridge.fsdp import FSDP
from torch_bridge.sharded_optimizer import ShardedOptimizer

PLAIN, SHARDED, FSDP_OURS, FSDP_TORCH = "plain", "sharded optimizer", "fsdp", "fully_shard"
WAYS = [PLAIN, SHARDED, FSDP_OURS, FSDP_TORCH]
BUCKET_MB = 25


def prepare(way, size, context, device):
    """(model, optimizer, finish) of a row; finish() is called after backward."""
    module = build(size, context, device)
    options = dict(lr=1e-4, fused=device.type == "cuda")
    if way == FSDP_TORCH:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import init_device_mesh

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in module.h:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module, torch.optim.AdamW(module.parameters(), **options), lambda: None
    model = FSDP(module) if way == FSDP_OURS else BucketedDDP(module, BUCKET_MB)
    if way == SHARDED:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    return model, optimizer, model.finish_gradient_synchronization


def local_bytes(tensors):
    """The bytes of this rank's part of some tensors."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if torch.is_tensor(t))
    return sum(t.numel() * t.element_size() for t in local)


def counted(model, optimizer):
    """Bytes of the parameters, gradients and optimizer state of this rank."""
    parameters = list(model.parameters())
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return local_bytes(parameters) + local_bytes(p.grad for p in parameters) + local_bytes(state)


def allocated(device):
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def steps(way, size, context, batch, warm_up, repeats):
    """{"seconds": of each measured step, "losses": of every step, "counted", "allocated": {moment: bytes}, "peak"}."""
    release_memory()
    device = device_of_rank()
    before = allocated(device)
    model, optimizer, finish = prepare(way, size, context, device)
    inputs, targets = batch_of(batch, context, device, dist.get_rank())
    losses, sizes, memory = [], {}, {}

    def look(moment):
        if moment not in sizes:  # in the first step
            sizes[moment], memory[moment] = counted(model, optimizer), allocated(device) - before

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, inputs, targets)
        loss.backward()
        losses.append(loss.detach())
        del loss
        finish()
        look("before step")
        optimizer.step()
        look("after step")

    look("init")
    seconds = seconds_of(step, device, warm_up, repeats)
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return {
        "seconds": seconds,
        "losses": (mean / dist.get_world_size()).tolist(),
        "counted": sizes,
        "allocated": memory,
        "peak": peak,
        "parameters": sum(p.numel() * 4 for p in build(size, context, "meta").parameters()),
    }


def predicted(way, parameters, ranks):
    """{moment: bytes} of weights, gradients and state of one rank; `parameters`: bytes of all weights in fp32."""
    weights = parameters / ranks if way in (FSDP_OURS, FSDP_TORCH) else parameters
    state = 2 * parameters / (1 if way == PLAIN else ranks)
    return dict(zip(MOMENTS, (weights, 2 * weights, 2 * weights + state), strict=True))


def way_row(groups, way, ranks, args):
    """The values of a row: the largest memory of a rank, the time of the slowest rank, the mean loss of the ranks."""
    found = groups.run_way(args, ranks, steps, way)
    values = {"way": way, "ranks": ranks, "step": slowest(found, "seconds")}
    wanted = predicted(way, found[0]["parameters"], ranks)
    for moment in MOMENTS:
        values[f"predicted GB {moment}"] = wanted[moment] / 1e9
        values[f"counted GB {moment}"] = max(each["counted"][moment] for each in found) / 1e9
        if found[0]["peak"]:
            values[f"GB {moment}"] = max(each["allocated"][moment] for each in found) / 1e9
    if found[0]["peak"]:
        values["peak GB"] = max(each["peak"] for each in found) / 1e9
    return values | {"first loss": found[0]["losses"][0], "last loss": found[0]["losses"][-1]}


def main():
    text = "nccl on GPUs, nccl-sockets without P2P, nccl-shared with several ranks on a GPU, or gloo on the CPU"
    args = group_parser("benchmarks.torch.sharding", __doc__, BACKENDS, text, ranks=[2]).parse_args()

    cases = {}
    with Groups() as groups:
        for ranks in args.ranks:
            for way in WAYS:
                cases[f"{settings_of(args, ranks)}, {way}"] = functools.partial(way_row, groups, way, ranks, args)
        print_tables(run_rows(args, cases), "sharding")


if __name__ == "__main__":
    run_main(main)
