"""What a data-parallel module checks and sends when it is built: a process group, equal models, rank 0's values."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from torch_bridge.fsdp_parts import Part

# PyTorch 2.13 has new names for these two collectives of flat tensors, and warns of the old ones.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def require_process_group(name):
    """Raise RuntimeError, which names the class, unless torch.distributed has been initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{name} needs a process group, and torch.distributed is not initialised: call "
            f"torch.distributed.init_process_group first"
        )


def require_parameters(name, parameters):
    """Raise ValueError for a parameter that has no values yet, or that is divided over the ranks already."""
    for key, parameter in parameters.items():
        if isinstance(parameter, Part):
            raise ValueError(
                f"{name}: {key} is a part of a weight that is divided over the ranks already: use one of the two"
            )
        if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
            raise ValueError(
                f"{name}: {key} has no shape yet: run one forward of the lazy module before {name}(module)"
            )
        if parameter.is_meta:
            raise ValueError(
                f"{name}: {key} is on the device meta and has no values: call to_empty(device=...) and initialise or "
                f"load the module before {name}(module)"
            )


def check_same_parameters(name, parameters, group):
    """Raise RuntimeError unless all ranks have the same {parameter name: Parameter}: names, shapes, dtypes, frozen."""
    mine = [(key, tuple(p.shape), str(p.dtype), p.requires_grad) for key, p in parameters.items()]
    everyone = [None] * dist.get_world_size(group)
    with device_of(next(iter(parameters.values()), None)):
        dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            differences = (pair for pair in zip(everyone[0], theirs, strict=False) if pair[0] != pair[1])
            first, other = next(differences, (f"{len(everyone[0])} parameters", f"{len(theirs)} parameters"))
            raise RuntimeError(
                f"{name}: the model of rank {rank} differs from that of rank 0: {other} instead of {first} (name, "
                f"shape, dtype, requires_grad): build the same model on every rank"
            )


def device_of(tensor):
    """A context in which nccl sends objects through this tensor's GPU, whatever the current GPU is."""
    return torch.cuda.device(tensor.device) if tensor is not None and tensor.is_cuda else contextlib.nullcontext()


@torch.no_grad()
def broadcast_module(module, group):
    """Replace all parameters and buffers of a module, frozen parameters too, by those of rank 0 of the group."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().contiguous()
        flat = dense.reshape(-1)
        if flat.numel():
            dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)  # bytes, because gloo lacks some dtypes
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)
