"""The part of a weight that a rank has under FSDP: a tensor that refuses what would give a wrong number.

A part has the axes of the whole weight, all of length 1 but the last: (1, ..., 1, size). So "decay what has two or more
axes" finds the same parameters as without FSDP. `whole_shape` is the shape of the whole weight.

    elementwise operations, optimizers    computed on the part; the result is the same elements of the whole result
    GradScaler                            found_inf is combined over the ranks
    norms and other reductions            RuntimeError: each rank would get another number
    a matrix product, another shape       RuntimeError: the operation needs the whole weight
"""

import importlib

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

OF_LISTS = "_foreach_", "_fused_", "_amp_"  # operations on each tensor of a list by itself
LIST_REDUCTIONS = "_foreach_norm", "_foreach_max", "_foreach_powsum"
JOINING = "cat", "concat", "concatenate", "stack", "hstack", "vstack", "column_stack"
INDEXING = "__getitem__", "__setitem__", "index_select", "masked_select", "take", "gather"
RANDOM = "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"
SHAPE_OF = "view_as", "reshape_as", "expand_as", "copy_", "resize_as_", "type_as", "to", "set_"


class Part(torch.Tensor):
    """Elements of one rank of a whole tensor: the gradient of a sharded weight, or a result computed from parts.

    shard: the Shard of the weight.
    """

    @property
    def whole_shape(self):
        """The shape of the whole weight."""
        return self.shard.shape

    def to_local(self):
        """This rank's elements as a plain tensor, which shares their memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def __reduce_ex__(self, protocol):
        return self.to_local().__reduce_ex__(protocol)  # a saved part is a plain tensor

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = memo[id(self)] = part_from(self.to_local().clone(), None)
            if isinstance(self, PartParameter):
                copy.__class__ = PartParameter
            copy.requires_grad_(self.requires_grad)
            copy.shard = memo.get(id(self.shard), self.shard)
            copy.grad = None if self.grad is None else part_from(self.grad.to_local().clone(), copy.shard)
        return memo[id(self)]

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return computed(func, args, kwargs or {})


class PartParameter(Part, nn.Parameter):
    """A parameter whose data is the part of this rank. Its padding is 0 and has gradients of 0."""


for module in "torch.optim.optimizer", "torch.utils._foreach_utils":  # or optimizers would update them one by one
    getattr(importlib.import_module(module), "_foreach_supported_types", []).extend([Part, PartParameter])


def part_from(tensor, shard):
    """A plain tensor as a part of the shard's weight."""
    with torch._C.DisableTorchFunctionSubclass():
        part = tensor.as_subclass(Part)
    part.shard = shard
    return part


def computed(func, args, kwargs):
    """func(*args, **kwargs) of parts. Raises RuntimeError if the result would not be elements of a whole result."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return attribute(func, name, args)
    if name.startswith(OF_LISTS):
        return computed_of_lists(func, name, args, kwargs)
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    part = next(x for x in tensors if isinstance(x, Part))
    if name in RANDOM:
        raise RuntimeError(
            f"FSDP: {name} would fill this rank's part of {part.shard.name}, with the numbers of the other ranks if "
            f"their seeds are equal: initialise the module before FSDP(module), or use load_full_params()"
        )
    if name in ("register_hook", "register_post_accumulate_grad_hook"):
        raise RuntimeError(
            f"FSDP: a hook on the gradient of {part.shard.name} would never run: change gradients after "
            f"finish_gradient_synchronization() instead"
        )
    if name not in (*JOINING, *INDEXING, *SHAPE_OF):
        for other in tensors:
            if other.numel() != 1 and other.shape != part.shape and other.shape != (part.numel(),):
                raise RuntimeError(
                    f"FSDP: {name} was called with the weight {part.shard.name} {tuple(part.shard.shape)} and a "
                    f"tensor of the shape {tuple(other.shape)}, where this rank has only a part of the weight. It is "
                    f"whole as an attribute of its module, and only in the forward of FSDP: call the model through "
                    f"FSDP and read the weight there, or leave the module's type out of shard="
                )
    result = func(*args, **kwargs)
    if name.endswith("_like") or name.startswith("new_"):
        return result  # a new tensor, as an optimizer's state, is plain

    def checked(x):
        if not isinstance(x, torch.Tensor) or isinstance(x, Part):
            return x
        same = x.shape == part.shape or x.numel() == part.numel() > 1 or name in (*JOINING, *INDEXING)
        if not same and not any(shares_memory(x, other) for other in tensors if isinstance(other, Part)):
            refuse_reduction(name, part)
        return part_from(x, part.shard) if not any(x is other for other in tensors) else x

    return tree_map(checked, result)


def shares_memory(one, other):
    """Whether one of two tensors is a view of the other."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def refuse_reduction(name, part):
    """Raise RuntimeError: this operation needs the elements of all ranks."""
    raise RuntimeError(
        f"FSDP: {name} of {part.shard.name} would be computed from the elements that this rank has, not from the whole "
        f"{tuple(part.shard.shape)}, and each rank would get another number: clip gradients with clip_grad_norm_() of "
        f"the FSDP module, read whole weights with its gather_full_params(), or this rank's elements with to_local()"
    )


def attribute(func, name, args):
    """The result of reading or writing an attribute of a part, such as data or grad."""
    part, attribute = args[0], func.__self__.__name__
    if not isinstance(part, Part):  # x.data = part
        return func(*args)
    if name == "__get__":
        if attribute == "grad" and part.shard is not None:
            part.shard.require_finished()
        result = func(*args)
        return part_from(result, part.shard) if attribute in ("data", "T", "mT", "H", "mH") else result
    value = args[1]
    if attribute == "data" and (value.shape, value.dtype, value.device) != (part.shape, part.dtype, part.device):
        raise RuntimeError(
            f"FSDP: {part.shard.name} cannot become {value.dtype} on {value.device} of the shape {tuple(value.shape)}, "
            f"because this rank's part is {part.dtype} on {part.device} of the shape {tuple(part.shape)}: convert or "
            f"move the module before FSDP(module), or use load_full_params()"
        )
    if attribute == "grad" and value is not None and not isinstance(value, Part):
        args = part, part_from(value, part.shard)
    return func(*args)


def computed_of_lists(func, name, args, kwargs):
    """func of lists of tensors, some of them parts. The overflow that GradScaler looks for is that of all ranks."""
    first = next((x for x in args[0] if isinstance(x, Part)), None)
    if first is not None and name in LIST_REDUCTIONS:
        refuse_reduction(name, first)
    result = func(*args, **kwargs)
    if first is not None and name == "_amp_foreach_non_finite_check_and_unscale_":
        dist.all_reduce(args[1], dist.ReduceOp.MAX, first.shard.group)
    if isinstance(result, list | tuple) and first is not None:
        pairs = zip(result, args[0], strict=False)
        return [part_from(new, old.shard) if isinstance(old, Part) else new for new, old in pairs]
    return result
