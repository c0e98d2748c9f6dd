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

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from torch_bridge.ddp import GradientMean, check_frozen
from torch_bridge.fsdp_units import Shard, Unit, Weights, cast_to_parameters, in_backward
from torch_bridge.process_group import (
    broadcast_module,
    check_same_parameters,
    require_parameters,
    require_process_group,
)

IN_FLIGHT = 2  # reduce-scatters whose gradients are kept at the same time


class FSDP(nn.Module):
    """A module whose large weights are divided over the ranks, each as an fp32 parameter of its part.

    shard: types of the modules that are units; a floating-point parameter with two or more axes, in a unit or below it,
    is sharded. All other parameters are replicated. compute_dtype: dtype in which weights are sent and units compute,
    or None for the parameters' own; other modules with parameters then get their arguments in their parameters' dtype.
    Buffers keep their dtype. Gradients are summed in fp32. The parameters and buffers of rank 0 are used. A weight that
    is read in the forward of another module than its unit is gathered for this one use, in its own dtype.

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
                require_shardable(name, below)
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
        units, units_of, inside = [], {}, set()  # units_of: {module: its units}, two if two units share it
        first_names = {p: name for name, p in reversed(self.names.items())}
        for label, module in self.module.named_modules():
            if module in inside or not isinstance(module, types):
                continue
            inside.update(module.modules())
            own = [p for part in module.modules() for p in part._parameters.values() if p is not None]
            large = [p for p in dict.fromkeys(own) if p in self.shards or (p.dim() >= 2 and p.is_floating_point())]
            for p in large:
                if p not in self.shards:
                    self.shards[p] = Shard(first_names[p], p, self.group, self.compute_dtype)
                    self.shards[p].fsdp = self
            units.append(Unit(self, described(label, module), module, [self.shards[p] for p in large]))
            for part in module.modules():
                units_of.setdefault(part, []).append(units[-1])
        for module in self.module.modules():
            own = [p for p in module._parameters.values() if p is not None]
            if own and (module in units_of or any(p in self.shards for p in own)):
                module._parameters = Weights(module._parameters, self, units_of.get(module, []))
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
        finish_gradient_synchronization(). norm_type: above 0, or infinity. Raises RuntimeError if the norm is infinite
        or NaN and error_if_nonfinite is set.
        """
        norm_type = float(norm_type)  # "inf", as PyTorch's function takes it
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
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped: find "
                f"the cause, or use error_if_nonfinite=False"
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


def described(name, module):
    """The class of a module and its name, which is empty for the module that FSDP was given."""
    return f"{type(module).__name__} {name}".strip()


def require_shardable(name, module):
    """Raise ValueError if FSDP would compute something else than a module in or below a unit."""
    for option, wanted in (("max_norm", None), ("sparse", False)):  # a weight that changes in forward, sparse gradients
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and getattr(module, option) != wanted:
            raise ValueError(
                f"FSDP: {described(name, module)} has {option}={getattr(module, option)}, which FSDP does not support: "
                f"build it with {option}={wanted}, or leave its type out of shard="
            )
    for key, parameter in module._parameters.items():
        if parameter is None or parameter.dim() < 2 or not parameter.is_floating_point():
            continue
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"FSDP: {key} of {described(name, module)} is a {type(parameter).__name__}, and FSDP shards parameters "
                f"of the class torch.nn.Parameter: leave the module's type out of shard="
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"FSDP: {key} of {described(name, module)} has a hook on its gradient, which would never run: change "
                f"gradients after finish_gradient_synchronization() instead"
            )
