"""An optimizer whose state is divided over the ranks (ZeRO-1): each rank updates the parameters that it owns.

    state bytes of a rank = (state bytes of the plain optimizer) / ranks, rounded up to whole parameters

Rajbhandari et al. 2020 divide the flat state in equal parts. Here a rank owns whole parameters, so every optimizer
class works, also one that needs the shape of a parameter, and the result has the same bits as with the plain
optimizer. An update is the owner's step, then one broadcast of each parameter from its owner.
"""

import inspect

import torch
import torch.distributed as dist

from torch_bridge.fsdp_parts import Part
from torch_bridge.process_group import device_of, require_process_group

OWN = "params", "param_names"  # the entries of a parameter group that are not hyperparameters


class ShardedOptimizer(torch.optim.Optimizer):
    """optimizer_cls(params, **kwargs), of which each rank has the state of the parameters that it owns.

    params: parameters or groups of them, the same on all ranks, as are their gradients. Parameters are assigned to
    ranks by size, the largest first, each to the rank that has the fewest bytes. All ranks must call step(),
    state_dict() and load_state_dict(). Raises RuntimeError if there is no process group, and ValueError for a parameter
    that FSDP has sharded and for an optimizer that needs its closure, such as LBFGS.
    """

    def __init__(self, params, optimizer_cls, process_group=None, **kwargs):
        require_process_group(type(self).__name__)
        closure = inspect.signature(getattr(optimizer_cls, "step", lambda closure=None: None)).parameters.get("closure")
        if closure and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{optimizer_cls.__name__} calls its closure several times in a step, and ShardedOptimizer calls it "
                f"once: use {optimizer_cls.__name__} itself"
            )
        self.group = process_group
        self.rank, self.ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.owners, self.loads = {}, [0] * self.ranks  # {parameter: rank}, bytes of each rank
        self.local = None  # the optimizer of this rank's parameters
        super().__init__(params, kwargs)
        self.local = optimizer_cls([self.owned(group) for group in self.param_groups], **kwargs)
        self.defaults = self.local.defaults
        self.copy_options(self.local.param_groups, self.param_groups)
        self.state = self.local.state

    def add_param_group(self, param_group):
        """Add a group as in torch.optim.Optimizer, and assign its parameters to ranks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if isinstance(parameter, Part):
                raise ValueError(
                    f"ShardedOptimizer: {parameter.shard.name} is divided over the ranks by FSDP, and so is the state "
                    f"of its optimizer: use the plain optimizer with FSDP"
                )
        for parameter in sorted(group["params"], key=torch.Tensor.numel, reverse=True):  # stable, so equal on all ranks
            owner = self.loads.index(min(self.loads))
            self.owners[parameter] = owner
            if parameter.requires_grad:
                self.loads[owner] += parameter.numel() * parameter.element_size()
        if self.local is not None:
            self.local.add_param_group(self.owned(group))

    def owned(self, group):
        """The group with this rank's parameters only, perhaps none."""
        options = {key: value for key, value in group.items() if key not in OWN}
        return options | {"params": [p for p in group["params"] if self.owners[p] == self.rank]}

    @staticmethod
    def copy_options(source, target):
        """Copy the hyperparameters of one list of parameter groups to another."""
        for group, other in zip(source, target, strict=True):
            other.update({key: value for key, value in group.items() if key not in OWN})

    def step(self, closure=None):
        """Update the parameters on their owners, then on all ranks; return the closure's loss, or None.

        The closure is called once, on every rank. An optimizer that calls it several times, as LBFGS, is not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.copy_options(self.param_groups, self.local.param_groups)  # a scheduler changes self.param_groups
        self.local.step()
        self.copy_options(self.local.param_groups, self.param_groups)
        self.broadcast_parameters()
        return loss

    @torch.no_grad()
    def broadcast_parameters(self):
        """Send each parameter from its owner to all ranks."""
        sent = []
        for parameter, owner in self.owners.items():
            if parameter.requires_grad:  # a frozen parameter does not change
                dense = parameter.detach().contiguous()
                work = dist.broadcast(dense, group=self.group, group_src=owner, async_op=True)
                sent.append((work, parameter, dense))
        for work, parameter, dense in sent:
            work.wait()
            if dense.data_ptr() != parameter.data_ptr():
                parameter.copy_(dense)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def numbered(self):
        """[(number in a state_dict, parameter)] of all groups."""
        return list(enumerate(p for group in self.param_groups for p in group["params"]))

    @torch.no_grad()
    def state_dict(self):
        """The state_dict of the plain optimizer, whole, on the CPU of every rank: any number of ranks can load it."""
        groups, start = [], 0
        for group in self.param_groups:
            stop = start + len(group["params"])
            groups.append({key: value for key, value in group.items() if key != "params"})
            groups[-1]["params"] = list(range(start, stop))
            start = stop
        layouts = [None] * self.ranks  # of each rank: {number: {entry: (shape, dtype), or a value that is no tensor}}
        mine = {i: self.local.state[p] for i, p in self.numbered() if p in self.local.state}
        with device_of(next(iter(self.owners), None)):
            dist.all_gather_object(layouts, {i: layout_of(entries) for i, entries in mine.items()}, group=self.group)
        state = {}
        for number, parameter in self.numbered():
            owner = self.owners[parameter]
            if number in layouts[owner]:
                entries = mine.get(number, {})
                state[number] = {
                    key: self.from_owner(value, entries.get(key), owner, parameter.device)
                    for key, value in layouts[owner][number].items()
                }
        return {"state": state, "param_groups": groups}

    def from_owner(self, layout, value, owner, device):
        """One entry of the state on the CPU: `value` of the owner. layout: (shape, dtype) of a tensor, or the value."""
        if not isinstance(layout, TensorLayout):
            return layout
        tensor = layout.empty(device) if value is None else value.detach().to(device).contiguous()
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), group=self.group, group_src=owner)
        return tensor.to("cpu", copy=True)

    def load_state_dict(self, state_dict):
        """Load a state_dict of this class, of any number of ranks, or of the plain optimizer.

        Raises ValueError if it has other groups of parameters.
        """
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        own = [len(group["params"]) for group in self.param_groups]
        if saved != own:
            raise ValueError(
                f"the state has parameter groups of {saved} parameters, and this optimizer of {own}: build it with the "
                f"parameters of the saved run"
            )
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        number_of = {p: number for number, (_, p) in zip(numbers, self.numbered(), strict=True)}
        state, groups, count = {}, [], 0
        for group, source in zip(self.local.param_groups, state_dict["param_groups"], strict=True):
            options = {key: value for key, value in source.items() if key not in OWN}
            groups.append(options | {"params": list(range(count, count + len(group["params"])))})
            for parameter in group["params"]:
                if number_of[parameter] in state_dict["state"]:
                    state[count] = state_dict["state"][number_of[parameter]]
                count += 1
        self.local.load_state_dict({"state": state, "param_groups": groups})
        self.copy_options(self.local.param_groups, self.param_groups)
        self.state = self.local.state


class TensorLayout:
    """The shape and dtype of a tensor that another rank has."""

    def __init__(self, tensor):
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def empty(self, device):
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def layout_of(entries):
    """{entry: TensorLayout, or the value itself if it is no tensor} of the state of one parameter."""
    return {key: TensorLayout(value) if torch.is_tensor(value) else value for key, value in entries.items()}
