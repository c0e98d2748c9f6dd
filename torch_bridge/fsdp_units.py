"""A unit of FSDP: weights that are gathered for a forward and again for its backward, and freed after each.

Autograd keeps no gathered weight. In the forward of a unit, hooks on saved tensors
(torch.autograd.graph.saved_tensors_hooks) keep which weight it was, its shape and its strides, and gather the weight
again when backward asks for it.
"""

# p ranks; a weight of n elements is padded to p * ceil(n / p). Each rank has one part as a parameter (1, .., size)

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from torch_bridge.fsdp_parts import Part, PartParameter, part_from
from torch_bridge.process_group import all_gather_flat, reduce_scatter_flat


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
        return version_of(self.parameter.to_local())

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
        full = gathered[0]
        strides = torch.empty(shard.shape, device="meta").stride()
        # not a view of full: autograd has its own error for a view that forward changes in place
        return full.new_empty(0).set_(full.untyped_storage(), 0, shard.shape, strides)

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
        self.versions = {shard: version_of(weight) for shard, weight in self.weights.items()}
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()

    def end(self):
        """Remove the hooks. Raises RuntimeError if forward has changed a weight."""
        self.hooks.__exit__()
        weights, self.weights = self.weights, {}  # autograd refers to this object until backward
        for shard, weight in weights.items():
            if version_of(weight) != self.versions[shard]:
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

    In the forward of a unit that has the module, an entry is the gathered weight, and a small parameter is in the
    compute dtype. Elsewhere in the forward of FSDP and in backward, it is gathered for this one use. Outside it is this
    rank's part, as in items() everywhere.
    """

    def __init__(self, parameters, fsdp, units):
        super().__init__(parameters)
        self.fsdp, self.units = fsdp, units

    @torch._disable_dynamo
    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        sharded = isinstance(parameter, Part)
        unit = next((unit for unit in self.units if unit.calls), None)
        if unit:
            return unit.calls[-1].weights[parameter.shard] if sharded else self.in_compute_dtype(parameter)
        if not self.fsdp.running():
            return parameter
        # backward computes a part of the unit's forward again, which is in checkpoint()
        as_in_unit = in_backward() and any(not unit.read_by_others for unit in self.units)
        if not sharded:
            return self.in_compute_dtype(parameter) if as_in_unit else parameter
        for unit in () if in_backward() else self.units:
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


def version_of(tensor):
    """The number of changes in place of a tensor; 0 for one of inference_mode(), which are not counted."""
    return 0 if tensor.is_inference() else tensor._version


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
