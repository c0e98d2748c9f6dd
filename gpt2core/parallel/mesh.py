"""The grid of ranks, pp pipeline-parallel x dp data-parallel x tp tensor-parallel, and its groups."""

from typing import NamedTuple

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.tree_sum import tree_sum


class Grid(NamedTuple):
    """A number for each axis of the grid of ranks: its size, or the place of a rank on it.

    The ranks of the world are in the order of these fields, the last one fastest. So the ranks of a tensor group are
    consecutive: they communicate most often, and on one host NVLink may connect them.
    """

    pipeline: int = 0
    data: int = 0
    tensor: int = 0


GROUPS = {  # {name of a group, an attribute of Mesh: the axes along which its ranks differ}
    "world": Grid._fields,
    "data": ("data",),  # they divide the batch
    "gradients": ("data",),  # their gradients, and their losses, are added; ZeRO divides over them
    "tensor": ("tensor",),
    "pipeline": ("pipeline",),
    "replica": ("pipeline", "tensor"),  # they divide one copy of the model
}
TITLES = {  # of the groups, for traces
    "world": "all ranks",
    "data": "data-parallel group",
    "gradients": "ranks whose gradients are added",
    "tensor": "tensor-parallel group",
    "pipeline": "pipeline",
    "replica": "ranks of one replica",
    "ends": "ends of the pipeline",
}


def place_of(rank, sizes):
    """The place, a Grid, of a rank of the world, in a grid of these sizes."""
    return Grid(*(int(number) for number in np.unravel_index(rank, sizes)))


def rank_in(place, sizes, axes):
    """The rank of a place in its group along these axes: its number among the places that differ on them."""
    rank = 0
    for axis in axes:
        rank = rank * getattr(sizes, axis) + getattr(place, axis)
    return rank


class WorkerGroups(NamedTuple):
    """The groups in which a worker thread sends activations: those of the Mesh with these names."""

    tensor: object
    pipeline: object
    ends: object

    def all(self):
        """A list of these groups."""
        return [group for group in self if group]


class Mesh:
    """The communicators of this rank: the GROUPS, and `ends`, the first and the last rank of the pipeline.

    `ends` is None on the ranks between them, and without a pipeline. Groups of the same ranks are one object. For dp =
    tp = 2 and pp = 1, each row of the grid is a tensor group and each column is a data group:

        rank 0  rank 1      tensor groups   {0, 1} and {2, 3}
        rank 2  rank 3      data groups     {0, 2} and {1, 3}

    Raises ConfigError unless dp * tp * pp is the size of the world.
    """

    def __init__(self, world, dp, tp, pp=1):
        if min(dp, tp, pp) < 1 or dp * tp * pp != world.size:
            given = f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp}"
            raise ConfigError(f"a mesh of {given} ranks does not fit a world of {world.size}: choose sizes that do")
        self.sizes = sizes = Grid(pipeline=pp, data=dp, tensor=tp)
        place, made = place_of(world.rank, sizes), {}

        def group(name):
            axes = GROUPS[name]
            divided = tuple(axis for axis in axes if getattr(sizes, axis) > 1)
            if divided not in made:
                others = [axis for axis in Grid._fields if axis not in divided]
                made[divided] = world.split(rank_in(place, sizes, others), key=rank_in(place, sizes, axes))
            return made[divided]

        self.world, self.data, self.gradients = world, group("data"), group("gradients")
        self.tensor, self.pipeline, self.replica = group("tensor"), group("pipeline"), group("replica")
        self.ends = None
        if pp > 1:
            self.ends = self.pipeline.split(0 if place.pipeline in (0, pp - 1) else None, key=place.pipeline)

    def groups_of_workers(self, count):
        """[the WorkerGroups of each of the `count` workers of this rank], of their own: they send at the same time."""
        groups = WorkerGroups(self.tensor, self.pipeline, self.ends)
        return [groups] + [WorkerGroups(*(each and each.split(0) for each in groups)) for _ in range(count - 1)]

    def groups(self):
        """{title: communicator} of all groups of this rank, each group once."""
        named = {title: getattr(self, name) for name, title in TITLES.items()}
        first = {id(group): title for title, group in reversed(named.items()) if group}
        return {title: group for title, group in named.items() if group and first[id(group)] == title}

    def total_loss(self, losses, request=0):
        """(the sum of all ranks' losses in the canonical order, the largest request), as Python numbers.

        request: a whole number, for example of a signal; so it needs no message of its own. Losses are added over the
        ranks of `gradients`. In a pipeline only the last rank has losses; along another axis, such as `tensor`, the
        ranks have equal losses, so only those of the first rank are added.
        """
        own = np.array([request, *losses], np.float64)
        gathered = self.world.all_gather(own).reshape(*self.sizes, len(own))
        added = Grid(pipeline=-1)._replace(**dict.fromkeys(GROUPS["gradients"], slice(None)))
        return tree_sum([float(loss) for loss in gathered[added][..., 1:].ravel()]), int(gathered[..., 0].max())
