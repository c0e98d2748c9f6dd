"""The part of a weight that a rank has under FSDP: a tensor that refuses what would give a wrong number.

A part has the axes of the whole weight, all of length 1 but the last: (1, ..., 1, size). So "decay what has two or more
axes" finds the same parameters as without FSDP. `whole_shape` is the shape of the whole weight.

    elementwise functions, optimizers     computed on the part; the result is the same elements of the whole result
    GradScaler                            found_inf is combined over the ranks
    every other function                  RuntimeError: it would take a part for the whole weight

The functions that are computed are listed by name, so a function that PyTorch adds is an error.
"""

import importlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

# names without the "_" of a function in place and without the "_foreach_" of a function of lists
ELEMENTWISE = """
    abs add addcdiv addcmul ceil clamp clamp_max clamp_min clip clone contiguous copy copysign cos detach div divide erf
    exp expm1 fill floor floor_divide fmax fmin fmod frac isfinite isinf isnan lerp log log10 log1p log2 logical_and
    logical_not logical_or logical_xor masked_fill maximum minimum mul multiply nan_to_num neg negative positive pow
    reciprocal relu remainder round rsqrt rsub sgn sigmoid sign sin sqrt square sub subtract tanh true_divide trunc
    where xlogy zero eq ge gt le lt ne greater greater_equal less less_equal not_equal bitwise_and bitwise_not
    bitwise_or bfloat16 bool cpu cuda double float half long pin_memory to type type_as
    __and__ __eq__ __ge__ __gt__ __invert__ __le__ __lt__ __ne__ __or__ __xor__
""".split()
ELEMENTWISE += [f"__{kind}{op}__" for kind in ("", "i", "r") for op in ("add", "sub", "mul", "div", "truediv", "pow")]
PROPERTIES = """
    __format__ __hash__ __len__ __repr__ __str__ _has_compatible_shallow_copy_type data_ptr dim element_size get_device
    is_complex is_contiguous is_floating_point is_inference is_pinned is_shared is_signed nelement ndimension numel
    requires_grad_ retain_grad share_memory_ size storage_offset stride untyped_storage
""".split()
NEW = "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_tensor new_zeros".split()
FUSED = "_fused_", "_amp_foreach_"  # steps of optimizers and of GradScaler
RANDOM = "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"
RANDOM += "rand_like", "randn_like", "randint_like"


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
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    part = next(x for x in tensors if isinstance(x, Part))
    if name.startswith(FUSED) or (name.startswith("_foreach_") and elementwise(name)):
        return computed_of_lists(func, name, args, kwargs)
    if name in PROPERTIES or name in NEW:
        return func(*args, **kwargs)  # a new tensor, as an optimizer's state, is plain
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
    if not (elementwise(name) or may_set(name, args)):
        refuse(name, part)
    for other in tensors:
        same = other.shard.shape == part.shard.shape if isinstance(other, Part) else other.shape == part.shape
        if not same and (isinstance(other, Part) or other.numel() != 1):
            refuse(name, part, f" and a tensor of the shape {tuple(getattr(other, 'whole_shape', other.shape))}")
    result = func(*args, **kwargs)
    if isinstance(result, tuple) or (isinstance(result, torch.Tensor) and result.shape != part.shape):
        refuse(name, part)
    made = isinstance(result, torch.Tensor) and not any(result is x for x in tensors)
    return part_from(result, part.shard) if made else result


def elementwise(name):
    """Whether a function computes each element of its result from the same elements of its arguments."""
    name = name.removeprefix("_foreach_")
    return (name if name.startswith("__") else name.removesuffix("_")) in ELEMENTWISE


def may_set(name, args):
    """Whether the function is part[mask] = x, the mask of the part's shape, as in Rprop, or part[i] = infinity or NaN.

    A test of GradScaler sets an overflow like this, and which element it is makes no difference.
    """
    if name != "__setitem__":
        return False
    _, index, value = args
    if isinstance(value, float) and not math.isfinite(value):
        return True
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.shape == args[0].shape


def refuse(name, part, others=""):
    """Raise RuntimeError: this function needs the elements of all ranks."""
    if part.shard.fsdp.running():
        advice = "read the weight as an attribute of its module, as in module.weight, not from parameters() or a list"
    else:
        advice = (
            "clip gradients with clip_grad_norm_() of the FSDP module, read whole weights with its "
            "gather_full_params(), or this rank's elements with to_local(); an optimizer or a function that needs the "
            "whole weight cannot be used, so use one that computes each element by itself, such as AdamW"
        )
    raise RuntimeError(
        f"FSDP: {name} of {part.shard.name}{others} would be computed from the elements that this rank has, not from "
        f"the whole {tuple(part.shard.shape)}, and the result would be wrong: {advice}"
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
        if isinstance(result, torch.Tensor) and attribute not in ("data", "grad", "_grad"):
            refuse(attribute, part)
        return part_from(result, part.shard) if attribute == "data" else result
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
    result = func(*args, **kwargs)
    if first is not None and name == "_amp_foreach_non_finite_check_and_unscale_":
        dist.all_reduce(args[1], dist.ReduceOp.MAX, first.shard.group)
    if isinstance(result, list | tuple) and first is not None:
        pairs = list(zip(result, args[0], strict=False))
        for new, old in pairs:
            if isinstance(old, Part) and new.shape != old.shape:
                refuse(name, old, " and a tensor of another shape")
        return [part_from(new, old.shard) if isinstance(old, Part) else new for new, old in pairs]
    return result
