"""Fully sharded data parallelism (ZeRO-3, FSDP): each rank has 1/p of every large weight, its gradient and its state.

A unit is a module whose weights are sharded, by default every Linear and Embedding. One training step:

    forward of a unit    all-gather its weights, compute, free them;    the all-gather of the next unit has started
    backward of a unit   all-gather its weights, compute, free them;    the all-gather of the unit before has started
                         reduce-scatter its gradients
    after backward       all-reduce the gradients of the other, small parameters

Autograd keeps no weight for backward: hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks) keep only which
weight it was, and gather the weight again when backward asks for it. So the weights are right whatever a unit returns
or keeps. PyTorch's FSDP frees and refills the storage of the gathered weight instead (Zhao et al. 2023). All ranks must
run the same units in the same order.
"""

# p ranks; a weight of n elements is padded to p * ceil(n / p). Each rank has one part as an fp32 parameter (1, .., size)

import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_map

from torch_bridge.ddp import GradientMean, check_frozen
from torch_bridge.fsdp_parts import Part, PartParameter, part_from
from torch_bridge.process_group import (
    all_gather_flat,
    broadcast_module,
    check_same_parameters,
    reduce_scatter_flat,
    require_parameters,
    require_process_group,
)

IN_FLIGHT = 2  # reduce-scatters whose gradients are kept at the same time


class Shard:
    """One weight: the parameter, which becomes this rank's part of it, and the whole weight while it is gathered."""

    def __init__(self, name, parameter, group, compute_dtype):
        self.name, self.parameter, self.group = name, parameter, group
        self.ranks, self.shape, self.n = dist.get_world_size(group), parameter.shape, parameter.numel()
        self.size = math.ceil(self.n / self.ranks)  # elements of a part
        self.compute_dtype, self.dtype = compute_dtype or parameter.dtype, parameter.dtype
        self.master_dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.full = None  # the whole weight in the compute dtype, flat and padded
        self.handle, self.version, self.sums = None, None, []
        parameter.data, parameter.grad = self.part_of(parameter.detach()), None
        parameter.__class__, parameter.shard = PartParameter, self  # the same object, for optimizers that have it

    def part_of(self, whole):
        """This rank's part (1, .., size) of a whole weight in the dtype of the master, padded with zeros."""
        start = dist.get_rank(self.group) * self.size
        part = whole.new_zeros(self.size, dtype=self.master_dtype, requires_grad=False)
        mine = whole.reshape(-1)[start : start + self.size]
        part[: mine.numel()] = mine
        return part.view(*[1] * (len(self.shape) - 1), self.size)

    def current(self):
        """The version of the parameter: the number of changes of its data in place."""
        return self.parameter.to_local()._version

    @torch.no_grad()
    def all_gather(self, dtype, async_op=False):
        """(the whole weight, flat and padded; what is sent; the handle of the all-gather)."""
        part = self.parameter.to_local().reshape(-1).to(dtype)
        full = part.new_empty(self.size * self.ranks)
        return full, part, all_gather_flat(full, part, group=self.group, async_op=async_op)

    def gather_start(self):
        """Start the all-gather of the weight in the compute dtype, unless it has been started."""
        if self.full is not None and self.version != self.current():
            self.free()
        if self.full is None:
            self.version = self.current()
            self.full, self.part, self.handle = self.all_gather(self.compute_dtype, async_op=True)

    def wait(self):
        """Return when the all-gather of the weight has ended."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = self.part = None

    def free(self):
        """Release the whole weight; this rank's part remains."""
        self.wait()
        self.full = None

    @torch.no_grad()
    def reduce_start(self, gradient):
        """Start the reduce-scatter of the whole weight's gradient: the mean over the ranks, in the master's dtype.

        Returns (handle, the tensor that is sent, which must be kept until handle.wait() has returned).
        """
        whole = gradient.new_zeros(self.size * self.ranks, dtype=self.master_dtype)
        whole[: self.n] = gradient.reshape(-1)
        whole.div_(self.ranks)
        part = whole.new_empty(self.size)
        handle = reduce_scatter_flat(part, whole, group=self.group, async_op=True)
        self.sums.append(part.view(self.parameter.shape))
        return handle, whole

    def add_sums(self):
        """Add the parts of the gradient to the parameter's .grad."""
        sums, self.sums = self.sums, []
        for part in sums:
            grad = self.parameter.grad
            self.parameter.grad = part_from(part, self) if grad is None else grad.add_(part)

    def require_finished(self):
        """Raise RuntimeError if backward has computed a gradient that is not in the parameter's .grad yet."""
        if self.sums:
            raise RuntimeError(
                f"FSDP: the gradient of {self.name} is not synchronized: call finish_gradient_synchronization() after "
                f"backward, before the gradient is read, clipped, cleared or used by an optimizer"
            )


class GatheredWeight(torch.autograd.Function):
    """part (1, .., size) -> the whole weight, already gathered; backward starts the reduce-scatter of its gradient.

    unit: the unit in whose forward the weight is read, or None. gathered: [the whole weight, flat and padded].
    """

    @staticmethod
    def forward(ctx, part, shard, unit, gathered):
        ctx.shard, ctx.unit = shard, unit
        return gathered[0][: shard.n].view(shard.shape)

    @staticmethod
    def backward(ctx, gradient):
        name = ctx.shard.name
        if torch.is_grad_enabled():
            raise RuntimeError(f"FSDP: the gradient of {name} has no gradient itself: omit create_graph=True")
        if gradient.is_sparse:
            raise RuntimeError(f"FSDP: the gradient of {name} is sparse: build its module with sparse=False")
        ctx.shard.fsdp.reduce(ctx.shard, gradient, ctx.unit)
        return None, None, None, None  # finish_gradient_synchronization() sets .grad


class Call:
    """One forward of a unit: its whole weights, and the hooks on the tensors that autograd saves in it.

    Of a weight, autograd keeps (shard, version, shape, strides, offset). Everything else is saved as without the hooks:
    by the hooks around the unit, as those of activation checkpointing, or as it is, with a check of its version.
    """

    def __init__(self, unit):
        self.unit = unit
        self.weights = {
            shard: GatheredWeight.apply(shard.parameter, shard, unit, [shard.full]) for shard in unit.shards
        }
        self.shard_at = {shard.full.untyped_storage().data_ptr(): shard for shard in unit.shards}
        self.versions = {shard: weight._version for shard, weight in self.weights.items()}
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()

    def end(self):
        """Remove the hooks. Raises RuntimeError if forward has changed a weight."""
        self.hooks.__exit__()
        for shard, weight in self.weights.items():
            if weight._version != self.versions[shard]:
                raise RuntimeError(
                    f"FSDP: the forward of {self.unit.label} has changed its weight {shard.name} in place, and the "
                    f"change would be lost: change parameters after backward, outside of forward"
                )

    def pack(self, x):
        strided = x.layout is torch.strided and type(x) in (torch.Tensor, nn.Parameter)
        shard = self.shard_at.get(x.untyped_storage().data_ptr()) if strided else None
        if shard is not None and x.dtype == shard.compute_dtype:
            self.unit.saved = True
            return shard, shard.version, x.size(), x.stride(), x.storage_offset()
        if self.outer:
            return (self.outer[0](x),)
        return x.detach(), x._version  # detach(): an output of the operation would refer to itself

    def unpack(self, packed):
        if isinstance(packed[0], Shard):
            shard, version, *geometry = packed
            if shard.current() != version:
                raise RuntimeError(
                    f"FSDP: the weight {shard.name} was changed after the forward whose gradients are computed: call "
                    f"optimizer.step() after backward"
                )
            self.unit.before_backward(shard)
            return shard.full.as_strided(*geometry)
        if self.outer:
            return self.outer[1](*packed)
        x, version = packed
        if x._version != version:
            raise RuntimeError(
                f"FSDP: a tensor of the shape {tuple(x.shape)} that backward of {self.unit.label} needs was changed in "
                f"place: replace the operation in place, such as relu_ or +=, by one that returns a new tensor"
            )
        return x


class Unit:
    """A module whose weights are gathered and freed together."""

    def __init__(self, fsdp, label, module, shards):
        self.fsdp, self.label, self.shards = fsdp, label, shards
        self.calls = []  # the forwards that are running
        self.saved = False  # whether autograd has saved a weight, so that backward needs it
        self.started = self.done = False  # whether backward has reached it, and has computed a gradient
        self.read_by_others = False  # whether another module reads its weights
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
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

    @torch._disable_dynamo
    def before_forward(self, module, args, kwargs):
        """Gather the weights, which the module then reads; cast the arguments to the compute dtype."""
        self.gather()
        self.fsdp.prefetch_forward(self)
        self.calls.append(Call(self))
        dtype = self.fsdp.compute_dtype
        return (args, kwargs) if dtype is None else (cast(args, dtype), cast(kwargs, dtype))

    @torch._disable_dynamo
    def after_forward(self, module, args, output):
        """Free the weights, unless backward computes this forward again."""
        if self.calls:  # else a hook of the module has raised an error before before_forward
            call = self.calls.pop()
            if not in_backward():  # activation checkpointing: the weights are needed at once
                self.free()
            call.end()

    def before_backward(self, shard):
        """Called when backward needs a weight: gather the weights again."""
        if shard.full is None or shard.handle is not None:
            self.gather()
        if not self.started:
            self.started = True
            self.fsdp.prefetch_backward(self)


class Weights(dict):
    """module._parameters, {name: parameter}, of a module with sharded weights; module.name is the whole weight.

    In the forward of its unit, an entry is the gathered weight, and a small parameter is in the compute dtype. Elsewhere
    in the forward of FSDP and in backward, it is gathered for this one use. Outside it is this rank's part, as in
    items() everywhere.
    """

    def __init__(self, parameters, fsdp, unit):
        super().__init__(parameters)
        self.fsdp, self.unit = fsdp, unit

    @torch._disable_dynamo
    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        sharded, unit = isinstance(parameter, Part), self.unit
        if unit and unit.calls:
            return unit.calls[-1].weights[parameter.shard] if sharded else self.in_compute_dtype(parameter)
        if not self.fsdp.running():
            return parameter
        as_in_unit = unit and in_backward() and not unit.read_by_others  # checkpoint() inside the forward of the unit
        if not sharded:
            return self.in_compute_dtype(parameter) if as_in_unit else parameter
        if unit and not in_backward():
            unit.read_by_others = True
        shard = parameter.shard
        gathered, *_ = shard.all_gather(shard.compute_dtype if as_in_unit else shard.dtype)
        return GatheredWeight.apply(parameter, shard, None, [gathered])

    def in_compute_dtype(self, parameter):
        """A small parameter, or None, as the unit computes with it."""
        dtype = self.fsdp.compute_dtype
        cast = dtype is not None and parameter is not None and parameter.is_floating_point()
        return parameter.to(dtype) if cast else parameter

    def __setitem__(self, name, parameter):
        before = super().get(name)
        if isinstance(before, Part) and parameter is not before:
            raise RuntimeError(f"FSDP: {before.shard.name} is sharded: replace parameters before FSDP(module)")
        super().__setitem__(name, parameter)


class FSDP(nn.Module):
    """A module whose large weights are divided over the ranks, each as an fp32 parameter of its part.

    shard: types of the modules that are units; a floating-point parameter with two or more axes, in a unit or below it,
    is sharded. All other parameters are replicated. compute_dtype: dtype in which weights are sent and units compute, or
    None for the parameters' own; other modules with parameters then get their arguments in their parameters' dtype.
    Gradients are summed in fp32. The parameters and buffers of rank 0 are used.

    A sharded parameter is this rank's part (1, .., size), with the axes of the whole weight, so parameter groups by
    p.dim() are those of the module. p.whole_shape is the shape of the whole weight, of every parameter. Optimizers that
    compute each element by itself, and torch.amp.GradScaler, work as they are. A norm or another reduction of a part is
    a RuntimeError (torch_bridge/fsdp_parts.py): use clip_grad_norm_() of this class.

    Raises RuntimeError without a process group, and ValueError if the module has no unit, if it has a parameter that
    cannot be sharded, or if compute_dtype is not a floating-point type.
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
        named = dict(module.named_parameters())
        require_parameters(type(self).__name__, named)
        inside = {below for unit in module.modules() if isinstance(unit, shard) for below in unit.modules()}
        for name, below in module.named_modules():
            if below in inside:
                require_kept_weights(name, below)
        check_same_parameters(type(self).__name__, named, process_group)
        broadcast_module(module, process_group)
        self.module, self.compute_dtype, self.group = module, compute_dtype, process_group
        self.names = dict(module.named_parameters(remove_duplicate=False))
        for p in named.values():
            p.whole_shape = p.shape
        self.shards = {}  # {parameter: Shard}
        self.units = self.build_units(shard)
        small = {name: p for name, p in named.items() if p not in self.shards}
        self.frozen = {name: p for name, p in small.items() if not p.requires_grad}
        trained = {name: p for name, p in small.items() if p.requires_grad}
        self.replicated = GradientMean(trained, process_group, packed=True, eager=False)
        self.order, self.running_order = [], []  # units in the order of the last forward, and of the one that runs
        self.in_flight = []  # (handle, tensor that is sent) of reduce-scatters
        self.depth = 0  # of the forwards that are running

    def build_units(self, types):
        """The units of all modules of these types that are not below another unit."""
        units, unit_of = [], {}
        first_names = {p: name for name, p in reversed(self.names.items())}
        for label, module in self.module.named_modules():
            if module in unit_of or not isinstance(module, types):
                continue
            below = [part for part in module.modules() if part not in unit_of]
            own = [p for part in below for p in part._parameters.values() if p is not None]
            large = [p for p in dict.fromkeys(own) if p in self.shards or (p.dim() >= 2 and p.is_floating_point())]
            for p in large:
                if p not in self.shards:
                    self.shards[p] = Shard(first_names[p], p, self.group, self.compute_dtype)
                    self.shards[p].fsdp = self
            units.append(
                Unit(self, f"{type(module).__name__} {label}".strip(), module, [self.shards[p] for p in large])
            )
            unit_of.update(dict.fromkeys(below, units[-1]))
        for module in self.module.modules():
            own, unit = [p for p in module._parameters.values() if p is not None], unit_of.get(module)
            if any(p in self.shards for p in own) or (unit and own):
                module._parameters = Weights(module._parameters, self, unit)
            elif own and self.compute_dtype is not None:
                module.register_forward_pre_hook(cast_to_parameters, with_kwargs=True)
        return units

    @torch._disable_dynamo
    def forward(self, *inputs, **kwargs):
        """The result of the module's forward."""
        if not in_backward():
            self.free()  # a weight that an earlier forward left gathered is out of date after a step
            self.order, self.running_order = self.running_order or self.order, []
        self.depth += 1
        try:
            return self.module(*inputs, **kwargs)
        finally:
            self.depth -= 1

    def running(self):
        """Whether the module's forward or a backward is running."""
        return self.depth > 0 or in_backward()

    def free(self):
        for unit in self.units:
            unit.free()

    def __deepcopy__(self, memo):
        result = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.group)] = self.group  # a process group cannot be copied
        copy.deepcopy(self.shards, memo)  # before the parameters, which find their shards in memo
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        return result

    def __reduce_ex__(self, protocol):
        raise TypeError("FSDP cannot be pickled, because it has a process group: save gather_full_params()")

    # -- prefetch ------------------------------------------------------------------------------------------------------

    def neighbour(self, unit, offset):
        """The unit that ran `offset` places after this one in the last forward, or None."""
        place = self.order.index(unit) + offset if unit in self.order else -1
        return self.order[place] if 0 <= place < len(self.order) else None

    def prefetch_forward(self, unit):
        """Start the all-gather of the unit that followed this one in the last forward."""
        if not in_backward():
            self.running_order.append(unit)
        following = self.neighbour(unit, 1)
        if following and not following.done:
            following.gather_start()

    def prefetch_backward(self, unit):
        """Start the all-gather of the unit whose backward follows."""
        if self.running_order:
            self.order, self.running_order = self.running_order, []
        earlier = self.neighbour(unit, -1)
        if earlier and earlier.saved and not earlier.done:
            earlier.gather_start()

    # -- gradients -----------------------------------------------------------------------------------------------------

    def reduce(self, shard, gradient, unit):
        """Called when the gradient of a whole weight is complete: free the weight, start the reduce-scatter."""
        if unit:
            unit.done = True
            shard.free()
        if len(self.in_flight) >= IN_FLIGHT:
            self.in_flight.pop(0)[0].wait()
        self.in_flight.append(shard.reduce_start(gradient))

    def finish_gradient_synchronization(self):
        """Return when every gradient is the mean over the ranks; all ranks must call it after each backward.

        The .grad of a sharded parameter is this rank's part (1, .., size), in fp32.
        """
        check_frozen(type(self).__name__, self.frozen)
        for handle, _ in self.in_flight:
            handle.wait()
        self.in_flight = []
        for shard in self.shards.values():
            shard.add_sums()
        self.replicated.finish()
        self.free()
        for unit in self.units:
            unit.started = unit.done = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False):
        """Scale all gradients so that their norm is at most max_norm; return the norm before, the same on every rank.

        As torch.nn.utils.clip_grad_norm_ of the module in one process. All ranks must call it, after
        finish_gradient_synchronization(). norm_type: above 0, or infinity. Raises RuntimeError if error_if_nonfinite and
        the norm is infinite or NaN.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type}, and FSDP computes norms above 0: use 2.0 or math.inf")
        self.replicated.require_finished()
        parts = [p.grad.to_local() for p in self.shards if p.grad is not None]
        small = [p.grad for p in self.replicated.parameters.values() if p.grad is not None]
        first = next(iter(self.shards))
        local = first.new_zeros(()) if not parts else get_total_norm(parts, norm_type)
        norms = [torch.zeros_like(local) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(norms, local, group=self.group)
        norms += [get_total_norm(small, norm_type).to(local.device)] if small else []
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped: find the "
                f"cause, or use error_if_nonfinite=False"
            )
        clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    # -- whole parameters ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_full_params(self):
        """{name in the module: whole parameter, in fp32 if sharded}; a copy on every rank. All ranks must call it."""
        whole = {}
        for parameter, shard in self.shards.items():
            flat, *_ = shard.all_gather(parameter.dtype)
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


def require_kept_weights(name, module):
    """Raise ValueError for an embedding whose weight changes in forward or has sparse gradients."""
    for option, wanted in (("max_norm", None), ("sparse", False)):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and getattr(module, option) != wanted:
            raise ValueError(
                f"FSDP: {type(module).__name__} {name} has {option}={getattr(module, option)}, which FSDP does not "
                f"support: build it with {option}={wanted}, or leave its type out of shard="
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
