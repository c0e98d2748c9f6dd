"""The PyTorch program of gpus/sharding.py: GPT-2 with fully_shard on each compiled block, one rank per GPU.

As in torchtitan, a block is first checkpointed (if it is), then compiled, then sharded. In bf16, parameters are
gathered in bf16 and gradients are reduced in fp32; the optimizer has fp32 shards.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from benchmarks.peers import torch_ddp
from benchmarks.peers.torch_gpt2_cuda import PAD, CudaSteps, NanoGPT, torch_weights
from benchmarks.torch.models import use_checkpoints

# B batch, T time, C channels, V vocabulary

PADDED_FROM = 10_000  # the smallest vocabulary that is padded: see pad_of()
POLICIES = {"bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def make_world(ranks):
    """The communicator of a benchmark process. The CUDA context of each rank exists when this function returns."""
    world = torch_ddp.make_world(ranks)
    if torch.cuda.is_available():
        torch.cuda.set_device(world.rank)
        torch.cuda.synchronize()
    world.barrier()
    return world


def make_variants(config, world, windows, variants, initial, precision="bf16", compiled=True, device="cuda"):
    """{name: train}; train(steps) returns {"loss": mean loss of all ranks in the last step} and CudaSteps.memory().

    variants: {name: dict(ranks=..., batch_size=...)}, with the number of all ranks and the batch size of all together,
    and perhaps recompute="block": backward computes each block's forward pass again. initial(): an iterator over this
    project's initial parameters. The first call of train() creates the model.
    """
    torch._dynamo.config.automatic_dynamic_shapes = False  # as in torch_ddp.py
    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")
    mesh = DeviceMesh.from_group(group, device)

    def mean(losses):
        dist.all_reduce(losses, group=group)
        return (losses / world.size).tolist()

    def variant(ranks, batch_size, recompute="none"):
        def sharded_steps(per_rank):
            model = sharded(config, mesh, precision, compiled, recompute == "block")
            load(model, initial(), mesh)
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            # The policy computes in bf16, not autocast; other products may use TF32, as under autocast.
            steps_precision = "tf32" if precision == "bf16" else precision
            return CudaSteps(
                config, per_rank, windows.seq_len, steps_precision, compiled=False, device=device, model=model
            )

        return torch_ddp.train_function(sharded_steps, windows, world.rank, ranks, batch_size, mean)

    return {name: variant(**options) for name, options in variants.items()}


class ShardedGPT2(NanoGPT):
    """A NanoGPT whose blocks are compiled one by one, and whose last operations are compiled together."""

    def __init__(self, config, pad):
        super().__init__(config, pad)
        self.head_loss = head_loss

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(self.positions[: ids.shape[1]])  # (B, T, C)
        for block in self.h:
            x = block(x)
        norm = self.ln_f
        return self.head_loss(x, norm.weight, norm.bias, norm.eps, self.lm_head.weight, targets)


def head_loss(x, weight, bias, eps, head, targets):
    """The mean loss of x (B, T, C): LayerNorm with `weight`, `bias`, `eps`; logits by `head` (V, C); cross-entropy."""
    logits = F.layer_norm(x, x.shape[-1:], weight, bias, eps) @ head.T
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def pad_of(config):
    """The argument `pad` of ShardedGPT2: the vocabulary is padded to a multiple of it.

    The padded columns are not masked. In a small vocabulary they would change the loss by more than rounding does, so
    that the losses could not be compared; with 10,000 tokens, by 0.1 % at most.
    """
    return PAD if config.vocab_size >= PADDED_FROM else 1


def sharded(config, mesh, precision, compiled, checkpointed):
    """A ShardedGPT2 whose parameters are divided over `mesh`; their values are not set."""
    with torch.device("meta"):  # no initialisation
        model = ShardedGPT2(config, pad_of(config))
    model.to_empty(device="cpu")  # fully_shard copies a block at a time to the GPU, and keeps this rank's part
    if config.tied:
        model.lm_head.weight = model.wte.weight
    model.positions = torch.arange(config.block_size)
    if checkpointed:
        use_checkpoints(model, 1)
    if compiled:
        model.h = nn.ModuleList(torch.compile(block, fullgraph=True) for block in model.h)
        model.head_loss = torch.compile(head_loss, fullgraph=True)
    policy = POLICIES.get(precision, MixedPrecisionPolicy())
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # The root has the embeddings and the head. It stays gathered between forward and backward, which is the default.
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@torch.no_grad()
def load(model, arrays, mesh):
    """Copy this project's parameters `arrays`, (name, array) in model order, to this rank's shards."""
    plain = (name.replace("_orig_mod.", "").replace(".blocks.0.", ".") for name, _ in model.named_parameters())
    parameters = dict(zip(plain, model.parameters(), strict=True))
    for name, tensor in torch_weights(arrays):
        whole, parameter = tensor.to(mesh.device_type), parameters.pop(name)
        whole = F.pad(whole, (0, 0) * (whole.ndim - 1) + (0, parameter.shape[0] - whole.shape[0]))  # the vocabulary
        # without communication: each rank has the whole parameter
        part = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    if parameters:
        raise ValueError(f"{', '.join(parameters)}: not among the initial parameters")
