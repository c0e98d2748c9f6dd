"""Fully sharded data parallelism (ZeRO-3, FSDP): each rank has 1/p of every large weight, its gradient and its state.

A unit is a module whose weights are sharded, by default every Linear and Embedding. One training step:

    forward of a unit    all-gather its weights, compute, free them;    the all-gather of the next unit has started
    backward of a unit   all-gather its weights, compute, free them;    the all-gather of the unit before has started
                         reduce-scatter its gradients
    after backward       all-reduce the gradients of the other, small parameters

The tensors that autograd keeps for backward share the storage of the gathered weight. The storage is resized to 0 bytes
after forward and filled again before backward, so autograd needs no change; PyTorch's FSDP does the same (Zhao et al.
2023). All ranks must run the same units in the same order.
"""

# p ranks; a weight of n elements is padded to p * ceil(n / p), and each rank has one part as a flat fp32 parameter

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from torch_bridge.ddp import GradientMean
from torch_bridge.process_group import (
    all_gather_flat,
    broadcast_module,
    check_same_parameters,
    reduce_scatter_flat,
    require_process_group,
)

IN_FLIGHT = 2  # reduce-scatters whose gradients are kept at the same time


class Shard:
    """One weight: the parameter, which becomes this rank's part of it, and the storage of the whole weight."""

    def __init__(self, name, parameter, group, compute_dtype):
        self.name, self.parameter, self.group = name, parameter, group
        self.ranks, self.shape, self.n = dist.get_world_size(group), parameter.shape, parameter.numel()
        self.size = math.ceil(self.n / self.ranks)  # elements of a part
        self.compute_dtype = compute_dtype or parameter.dtype
        self.master_dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.full = parameter.new_empty(self.size * self.ranks, dtype=self.compute_dtype, requires_grad=False)
        self.full.untyped_storage().resize_(0)
        self.handle, self.gathered, self.sums = None, False, []
        parameter.data, parameter.grad = self.part_of(parameter.detach()), None

    def part_of(self, whole):
        """This rank's part (size,) of a whole weight in the dtype of the master, padded with zeros."""
        start = dist.get_rank(self.group) * self.size
        part = self.parameter.new_zeros(self.size, dtype=self.master_dtype, requires_grad=False)
        mine = whole.reshape(-1)[start : start + self.size]
        part[: mine.numel()] = mine
        return part

    @torch.no_grad()
    def gather_start(self):
        """Start the all-gather of the weight in the compute dtype, unless it has been started."""
        if not self.gathered:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
            self.part = self.parameter.detach().to(self.compute_dtype)
            # .data: writing to the tensor itself would mark what autograd keeps as modified
            self.handle = all_gather_flat(self.full.data, self.part, group=self.group, async_op=True)
            self.gathered = True

    def wait(self):
        """Return when the all-gather of the weight has ended."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = self.part = None

    def free(self):
        """Free the whole weight; this rank's part remains."""
        self.wait()
        self.full.untyped_storage().resize_(0)
        self.gathered = False

    @torch.no_grad()
    def reduce_start(self, gradient):
        """Start the reduce-scatter of the whole weight's gradient: the mean over the ranks, in the master's dtype.

        Returns (handle, the tensor that is sent, which must be kept until handle.wait() has returned).
        """
        whole = torch.zeros_like(self.full, dtype=self.master_dtype)
        whole[: self.n] = gradient.reshape(-1)
        whole.div_(self.ranks)
        part = torch.empty_like(self.parameter)
        handle = reduce_scatter_flat(part, whole, group=self.group, async_op=True)
        self.sums.append(part)
        return handle, whole

    def add_sums(self):
        """Add the parts of the gradient to the parameter's .grad."""
        for part in self.sums:
            self.parameter.grad = part if self.parameter.grad is None else self.parameter.grad.add_(part)
        self.sums = []


class GatheredWeight(torch.autograd.Function):
    """part (size,) -> the whole weight, already gathered; backward starts the reduce-scatter of its gradient."""

    @staticmethod
    def forward(ctx, part, shard, unit):
        ctx.shard, ctx.unit = shard, unit
        return shard.full.data[: shard.n].view(shard.shape)

    @staticmethod
    def backward(ctx, gradient):
        ctx.unit.done = True
        ctx.unit.fsdp.reduce(ctx.shard, gradient)
        return None, None, None  # finish_gradient_synchronization() sets .grad


class Unit:
    """A module whose weights are gathered and freed together. owners: [(module, attribute, Shard)] of its weights.

    small: [(module, attribute)] of its replicated parameters, which are cast to the compute dtype.
    """

    def __init__(self, fsdp, module, owners, small):
        self.fsdp, self.module, self.owners, self.small = fsdp, module, owners, small
        self.shards = list(dict.fromkeys(shard for _, _, shard in owners))
        self.reads_in_backward = not isinstance(module, nn.Embedding)  # the gradient of a lookup needs no weight
        self.done = False  # whether backward has passed it, so that nothing is prefetched for it
        module.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)

    def gather_start(self):
        for shard in self.shards:
            shard.gather_start()

    def gather(self):
        self.gather_start()
        for shard in self.shards:
            shard.wait()

    def free(self):
        for shard in self.shards:
            shard.free()

    def before_forward(self, module, args, kwargs):
        """Gather the weights and put them where the module reads them; cast the arguments to the compute dtype."""
        self.gather()
        self.fsdp.prefetch_forward(self)
        weights = {shard: GatheredWeight.apply(shard.parameter, shard, self) for shard in self.shards}
        for owner, name, shard in self.owners:
            owner.__dict__[name] = weights[shard]  # an attribute of the instance hides the registered parameter
        dtype = self.fsdp.compute_dtype
        if dtype is None:
            return args, kwargs
        for owner, name in self.small:
            owner.__dict__[name] = owner._parameters[name].to(dtype)
        return cast(args, dtype), cast(kwargs, dtype)

    def after_forward(self, module, args, output):
        """Remove the weights from the module and free them, unless backward computes its forward again."""
        for owner, name, *_ in [*self.owners, *self.small]:
            owner.__dict__.pop(name, None)
        if in_backward():  # activation checkpointing: the weights are needed at once
            return
        self.free()
        for tensor in tree_leaves(output) if self.reads_in_backward else ():
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(self.before_backward)

    def before_backward(self, gradient):
        """Called with the gradient of an output, before the unit's backward: gather the weights again."""
        self.gather()
        self.fsdp.prefetch_backward(self)


class FSDP(nn.Module):
    """A module whose large weights are divided over the ranks, each as a flat fp32 parameter of its part.

    shard: types of the modules that are units; a parameter with two or more axes, in a unit or below it, is sharded.
    All other parameters are replicated. compute_dtype: dtype in which weights are sent and units compute, or None for
    the parameters' own; other modules with parameters then get their arguments in their parameters' dtype. Gradients
    are summed in fp32. The parameters and buffers of rank 0 are used. Raises RuntimeError without a process group, and
    ValueError if the module has no unit or compute_dtype is not a floating-point type.
    """

    def __init__(self, module, compute_dtype=None, shard=(nn.Linear, nn.Embedding), process_group=None):
        super().__init__()
        require_process_group(type(self).__name__)
        shard = tuple(shard)
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype is {compute_dtype}, and weights are floating-point: use torch.bfloat16")
        if not any(isinstance(part, shard) for part in module.modules()):
            names = ", ".join(kind.__name__ for kind in shard)
            raise ValueError(
                f"{type(module).__name__} has no module of the types {names}, so nothing would be sharded: name the "
                f"types of its large layers, as in shard=(Block,)"
            )
        check_same_parameters(type(self).__name__, dict(module.named_parameters()), process_group)
        broadcast_module(module, process_group)
        self.module, self.compute_dtype, self.group = module, compute_dtype, process_group
        self.names = dict(module.named_parameters(remove_duplicate=False))
        self.shards = {}  # {parameter: Shard}
        self.units = self.build_units(shard)
        small = {name: p for name, p in module.named_parameters() if p not in self.shards and p.requires_grad}
        self.replicated = GradientMean(small, process_group, packed=True, eager=False)
        self.order, self.running = [], []  # units in the order of the last forward, and of the forward that runs
        self.in_flight = []  # (handle, tensor that is sent) of reduce-scatters

    def build_units(self, types):
        """The units of all modules of these types that are not below another unit."""
        units, inside = [], set()
        first_names = {p: name for name, p in reversed(self.names.items())}
        for module in self.module.modules():
            if module in inside:
                continue
            own = [(name, p) for name, p in module._parameters.items() if p is not None]
            if isinstance(module, types):
                below = list(module.modules())
                inside.update(below)
                own = [(owner, name, p) for owner in below for name, p in owner._parameters.items() if p is not None]
                large = [entry for entry in own if entry[2].dim() >= 2 or entry[2] in self.shards]
                for _, _, p in large:
                    if p not in self.shards:
                        self.shards[p] = Shard(first_names[p], p, self.group, self.compute_dtype)
                owners = [(owner, name, self.shards[p]) for owner, name, p in large]
                small = [(owner, name) for owner, name, p in own if p not in self.shards and p.is_floating_point()]
                units.append(Unit(self, module, owners, small))
            elif own and self.compute_dtype is not None:
                module.register_forward_pre_hook(cast_to_parameters, with_kwargs=True)
        return units

    def forward(self, *inputs, **kwargs):
        """The result of the module's forward."""
        if not in_backward():
            self.free()  # a weight that an earlier forward left gathered is out of date after a step
            self.order, self.running = self.running or self.order, []
        return self.module(*inputs, **kwargs)

    def free(self):
        for unit in self.units:
            unit.free()

    # -- prefetch ------------------------------------------------------------------------------------------------------

    def neighbour(self, unit, offset):
        """The unit that ran `offset` places after this one in the last forward, or None."""
        place = self.order.index(unit) + offset if unit in self.order else -1
        return self.order[place] if 0 <= place < len(self.order) else None

    def prefetch_forward(self, unit):
        """Start the all-gather of the unit that followed this one in the last forward."""
        if not in_backward():
            self.running.append(unit)
        following = self.neighbour(unit, 1)
        if following and not following.done:
            following.gather_start()

    def prefetch_backward(self, unit):
        """Start the all-gather of the unit whose backward follows."""
        if self.running:
            self.order, self.running = self.running, []
        earlier = self.neighbour(unit, -1)
        if earlier and earlier.reads_in_backward and not earlier.done:
            earlier.gather_start()

    # -- gradients -----------------------------------------------------------------------------------------------------

    def reduce(self, shard, gradient):
        """Called when the gradient of a whole weight is complete: free the weight, start the reduce-scatter."""
        shard.free()
        if len(self.in_flight) >= IN_FLIGHT:
            self.in_flight.pop(0)[0].wait()
        self.in_flight.append(shard.reduce_start(gradient))

    def finish_gradient_synchronization(self):
        """Return when every gradient is the mean over the ranks; all ranks must call it after each backward.

        The .grad of a sharded parameter is this rank's part (size,), in fp32.
        """
        for handle, _ in self.in_flight:
            handle.wait()
        self.in_flight = []
        for shard in self.shards.values():
            shard.add_sums()
        self.replicated.finish()
        self.free()
        for unit in self.units:
            unit.done = False

    # -- whole parameters ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_full_params(self):
        """{name in the module: whole parameter, in fp32 if sharded}; a copy on every rank. All ranks must call it."""
        whole = {}
        for parameter, shard in self.shards.items():
            flat = parameter.new_empty(shard.size * shard.ranks)
            all_gather_flat(flat, parameter.detach(), group=self.group)
            whole[parameter] = flat[: shard.n].view(shard.shape)
        return {name: whole[p] if p in whole else p.detach().clone() for name, p in self.names.items()}

    @torch.no_grad()
    def load_full_params(self, parameters):
        """Load {name: whole parameter}, as gather_full_params() returns it, on any number of ranks.

        Raises ValueError for a missing name or another shape.
        """
        for name, parameter in self.names.items():
            shard = self.shards.get(parameter)
            shape = tuple(shard.shape if shard else parameter.shape)
            found = tuple(parameters[name].shape) if name in parameters else "missing"
            if found != shape:
                raise ValueError(f"parameter {name} is {found}, and this model needs {shape}: load another checkpoint")
        for name, parameter in self.names.items():
            shard, whole = self.shards.get(parameter), parameters[name].to(parameter.device)
            parameter.copy_(shard.part_of(whole) if shard else whole)

    def get_extra_state(self):
        """Part of state_dict(), which has this rank's parts: whose parts these are."""
        return {"rank": dist.get_rank(self.group), "world_size": dist.get_world_size(self.group)}

    def set_extra_state(self, state):
        """Raises ValueError if a loaded state_dict has the parts of another rank or of another number of ranks."""
        own = self.get_extra_state()
        if state != own:
            raise ValueError(
                f"the state_dict has the parts of rank {state['rank']} of {state['world_size']}, and this is rank "
                f"{own['rank']} of {own['world_size']}: save gather_full_params(), and load it with load_full_params()"
            )


def in_backward():
    """Whether autograd's backward is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def cast(values, dtype):
    """The arguments with each floating-point tensor in this dtype."""
    return tree_map(lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, values)


def cast_to_parameters(module, args, kwargs):
    """A forward pre-hook: cast the arguments to the dtype of the module's first floating-point parameter."""
    dtype = next((p.dtype for p in module._parameters.values() if p is not None and p.is_floating_point()), None)
    return (args, kwargs) if dtype is None else (cast(args, dtype), cast(kwargs, dtype))
