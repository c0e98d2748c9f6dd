"""Distributed data parallelism for any nn.Module: four schedules of the mean of the gradients over the ranks.

                            after backward     during backward
    a message per parameter     NaiveDDP           OverlapDDP
    packed                      FlatDDP            BucketedDDP

All four are used in the same way, on gloo and on nccl, and all give the gradient of the mean of the ranks' losses.
Until finish_gradient_synchronization() a gradient is that of one rank, or is being sent: clip and unscale after it.

    model = BucketedDDP(model, bucket_size_mb=25)
    loss(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

gpt2core/parallel/data/strategies.py has the same four schedules for this project's own model, whose backward is fixed.
A PyTorch module may do something else on each rank, so here buckets are sent in one order on all ranks: bucket k + 1
is never sent before bucket k. A bucket that is not complete after backward is sent by
finish_gradient_synchronization(). A parameter without a gradient counts as zeros in the mean; if it has no gradient on
any rank, its gradient stays None, as in one process, and the attribute `unused` has its name.
"""

import contextlib
import functools
import math
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpt2core.parallel.data.strategies import plan_buckets
from torch_bridge.process_group import (
    broadcast_module,
    check_same_parameters,
    require_parameters,
    require_process_group,
)

MIB = 2**20


class Bucket:
    """The gradients of some parameters as one message. packed: copy them into one tensor, of which they become views.

    The parameters have one dtype and one device. {name: Parameter}
    """

    def __init__(self, parameters, packed):
        self.parameters, self.views = parameters, {}
        if packed:
            first = next(iter(parameters.values()))
            self.flat = first.new_empty(sum(p.numel() for p in parameters.values()), requires_grad=False)
            parts = self.flat.split([p.numel() for p in parameters.values()])
            self.views = {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}

    @torch.no_grad()
    def collect(self, divisor):
        """(the tensor to be reduced, {name: zeros} of the parameters without a gradient). Divides the gradients."""
        absent = {}
        for name, parameter in self.parameters.items():
            gradient, view = parameter.grad, self.views.get(name)
            if gradient is None:
                absent[name] = torch.zeros_like(parameter) if view is None else view.zero_()
            elif gradient.is_sparse:
                raise RuntimeError(f"the gradient of {name} is sparse: build its module with sparse=False")
            elif view is None:
                parameter.grad = gradient.contiguous()
                if divisor != 1:
                    parameter.grad.div_(divisor)
            elif gradient is view:  # zero_grad(set_to_none=False) keeps it
                view.div_(divisor)
            else:
                torch.div(gradient, divisor, out=view)
                parameter.grad = view  # frees the other tensor
        if self.views:
            return self.flat, absent
        [(name, parameter)] = self.parameters.items()
        return absent.get(name, parameter.grad), absent


class GradientMean:
    """Replaces gradients by their mean over the ranks of a process group, with one all-reduce per bucket.

    parameters: {name: Parameter}, the same on all ranks, all with requires_grad. packed: whether a bucket has several
    parameters, at most `most` bytes of them. eager: whether buckets are sent during backward.
    """

    def __init__(self, parameters, group, packed, eager, most=math.inf):
        self.parameters, self.group, self.eager = parameters, group, eager
        # nccl computes means itself, which saves a kernel per message; gloo does not, so gradients are divided before.
        means = dist.get_backend(group) == "nccl"
        self.reduction = dist.ReduceOp.AVG if means else dist.ReduceOp.SUM
        self.divisor = 1 if means else dist.get_world_size(group)
        plan = planned(parameters, packed, most)
        self.buckets = [Bucket({name: parameters[name] for name in names}, packed) for names in plan]
        self.index = {name: number for number, names in enumerate(plan) for name in names}
        self.unused = []
        self.used = next(iter(parameters.values())).new_ones(len(parameters), dtype=torch.int32) if parameters else None
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(functools.partial(self.completed, name))
        hook = register_optimizer_step_pre_hook(functools.partial(require_synchronized, weakref.ref(self)))
        weakref.finalize(self, hook.remove)
        self.synchronizing = True
        self.reset()

    def reset(self):
        self.unfinished = ""  # a name whose gradient of the last backward is not the mean yet
        self.versions = {}  # {name: (gradient, its version)} of the gradients that are being sent
        self.missing = [set(bucket.parameters) for bucket in self.buckets]  # names whose gradient is not complete
        self.sent, self.handles, self.absent = 0, [], {}

    def completed(self, name, parameter):
        """Called by backward when the gradient of a parameter is complete."""
        self.unfinished = name
        if not (self.synchronizing and self.eager):
            return
        missing = self.missing[self.index[name]]
        if name not in missing:
            raise RuntimeError(
                f"backward computed the gradient of {name} twice: call finish_gradient_synchronization() after each "
                f"backward, or accumulate gradients under no_sync()"
            )
        missing.discard(name)
        while self.sent < len(self.buckets) and not self.missing[self.sent]:
            self.send()

    def send(self):
        """Start the all-reduce of the next bucket; return its handle."""
        tensor, absent = self.buckets[self.sent].collect(self.divisor)
        self.sent += 1
        self.absent |= absent
        self.handles.append(dist.all_reduce(tensor, self.reduction, self.group, async_op=True))
        for name in self.buckets[self.sent - 1].parameters if self.unfinished else ():
            gradient = self.parameters[name].grad
            if gradient is not None:
                self.versions[name] = gradient, gradient._version
        return self.handles[-1]

    def require_finished(self):
        """Raise RuntimeError if a gradient of the last backward is not the mean over the ranks yet."""
        if self.unfinished:
            raise RuntimeError(
                f"the gradient of {self.unfinished} is not synchronized: call finish_gradient_synchronization() after "
                f"backward, before gradients are clipped or used by an optimizer"
            )

    def finish(self):
        """After backward: send the remaining buckets and wait for all of them.

        Raises RuntimeError if a gradient was changed, as by clipping, while its bucket was sent.
        """
        changed = [
            name
            for name, (gradient, version) in self.versions.items()
            if self.parameters[name].grad is not gradient or gradient._version != version
        ]
        while self.sent < len(self.buckets):
            handle = self.send()
            if not self.eager:
                handle.wait()
        if self.parameters:
            self.find_used()
        for handle in self.handles:
            handle.wait()
        self.reset()
        if changed:
            raise RuntimeError(
                f"the gradient of {changed[0]} was changed while it was sent: clip or scale gradients after "
                f"finish_gradient_synchronization()"
            )

    def find_used(self):
        """Set the gradients that are absent on this rank, but not on every rank; the others stay None."""
        used = self.used
        if self.absent:
            flags = [name not in self.absent for name in self.parameters]
            used = torch.tensor(flags, dtype=used.dtype, device=used.device)
        else:
            used.fill_(1)
        dist.all_reduce(used, group=self.group, async_op=True).wait()
        # Only ranks with an absent gradient read the counts: with nccl that makes the host wait for the device.
        counts = dict(zip(self.parameters, used.tolist(), strict=True)) if self.absent else {}
        self.unused = [name for name in self.absent if not counts[name]]
        for name, zeros in self.absent.items():
            if counts[name]:
                self.parameters[name].grad = zeros  # the mean, once its bucket is complete


def require_synchronized(mean, optimizer, args, kwargs):
    """Called before each step of every optimizer: raise RuntimeError if a gradient is not the mean over the ranks yet.

    mean: a weak reference to a GradientMean.
    """
    mean = mean()
    if mean is not None and mean.unfinished:
        own = {id(parameter) for parameter in mean.parameters.values()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            mean.require_finished()


def check_frozen(owner, frozen):
    """Raise RuntimeError if a parameter requires a gradient now that did not when the module was built."""
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            raise RuntimeError(
                f"{name} was frozen when {owner} was built, and now it requires a gradient: set requires_grad before"
            )


def planned(parameters, packed, most):
    """Lists of names, one per bucket: reverse order of `parameters`, one dtype and device per bucket."""
    kinds = {}
    for name, parameter in parameters.items():
        size = parameter.numel() * parameter.element_size()
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = size
    least = math.inf if packed else 0
    plan = [names for sizes in kinds.values() for names in plan_buckets(sizes, least, most)]
    place = {name: number for number, name in enumerate(reversed(parameters))}
    return sorted(plan, key=lambda names: place[names[-1]])  # in the order in which backward completes them


class DistributedModule(nn.Module):
    """Base class: a module with the parameters and buffers of rank 0, whose gradients become means over the ranks.

    process_group: the ranks (default: all). A parameter that occurs twice in the module is sent once. Raises
    RuntimeError if there is no process group, or if the models of the ranks differ in more than their values.
    """

    packed = eager = False

    def __init__(self, module, process_group=None, most=math.inf):
        super().__init__()
        name = type(self).__name__
        require_process_group(name)
        self.module = module
        require_parameters(name, dict(module.named_parameters()))
        check_same_parameters(name, dict(module.named_parameters()), process_group)
        broadcast_module(module, process_group)
        trained = {key: p for key, p in module.named_parameters() if p.requires_grad}
        self.frozen = {key: p for key, p in module.named_parameters() if not p.requires_grad}
        self.gradients = GradientMean(trained, process_group, self.packed, self.eager, most)

    def forward(self, *inputs, **kwargs):
        """The result of the module's forward."""
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self):
        """Return when all gradients are means over the ranks; with nccl, when the current stream waits for them.

        All ranks must call it after backward, before the optimizer's step.
        """
        check_frozen(type(self).__name__, self.frozen)
        self.gradients.finish()

    @property
    def unused(self):
        """The names of the parameters that had no gradient on any rank at the last synchronization."""
        return self.gradients.unused

    @contextlib.contextmanager
    def no_sync(self):
        """Accumulate gradients on each rank: a backward inside sends nothing."""
        before, self.gradients.synchronizing = self.gradients.synchronizing, False
        try:
            yield
        finally:
            self.gradients.synchronizing = before


class NaiveDDP(DistributedModule):
    """One all-reduce per parameter, one after another, after backward."""


class FlatDDP(DistributedModule):
    """One all-reduce of all gradients, packed into one tensor (one for each dtype), after backward."""

    packed = True


class OverlapDDP(DistributedModule):
    """One all-reduce per parameter, started during backward as soon as the gradient is complete."""

    eager = True


class BucketedDDP(DistributedModule):
    """One all-reduce per bucket, started during backward (Li et al. 2020).

    A bucket has at most bucket_size_mb * 2^20 bytes of parameters; a larger parameter has a bucket of its own. None:
    one bucket. The gradients become views of the buckets, which stay allocated. Raises ValueError unless
    bucket_size_mb is above 0.
    """

    packed = eager = True

    def __init__(self, module, bucket_size_mb, process_group=None):
        if bucket_size_mb is not None and not bucket_size_mb > 0:
            raise ValueError(
                f"bucket_size_mb is {bucket_size_mb}, and a bucket needs a size above 0: use a number of MiB such as "
                f"25, or None for one bucket"
            )
        super().__init__(module, process_group, math.inf if bucket_size_mb is None else bucket_size_mb * MIB)
