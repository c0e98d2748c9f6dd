"""The grid of process groups: dp data-parallel x tp tensor-parallel x pp pipeline-parallel ranks."""

from typing import NamedTuple

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.tree_sum import tree_sum


class Place(NamedTuple):
    """The ranks of one rank in its groups: see Mesh."""

    data: int = 0
    tensor: int = 0
    pipeline: int = 0


def place_of(rank, dp, tp):
    """The Place of a rank of the world."""
    return Place(rank // tp % dp, rank % tp, rank // (tp * dp))


class Mesh:
    """The communicators of this rank's groups in the grid: `data`, `tensor`, `pipeline`, `replica`, and `ends`.

    data: the ranks that divide the batch. gradients: those whose gradients are added; the same ranks as `data`.
    replica: the tp * pp ranks that divide one copy of the model; a rank in it is tensor + tp * pipeline. ends: the
    first and the last rank of the pipeline; None on the ranks between them, and without a pipeline.

    A rank of the world follows from the ranks in these groups: rank = tensor + tp * (data + dp * pipeline). So the
    ranks of a tensor group are consecutive: they communicate most often, and on one host NVLink may connect them.
    For dp = tp = 2 and pp = 1, each row of the grid is a tensor group and each column is a data group:

        rank 0  rank 1      tensor groups   {0, 1} and {2, 3}
        rank 2  rank 3      data groups     {0, 2} and {1, 3}

    Raises ConfigError unless dp * tp * pp is the size of the world.
    """

    def __init__(self, world, dp, tp, pp=1):
        if min(dp, tp, pp) < 1 or dp * tp * pp != world.size:
            sizes = f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp}"
            raise ConfigError(f"a mesh of {sizes} ranks does not fit a world of {world.size}: choose sizes that do")
        data, tensor, pipeline = place_of(world.rank, dp, tp)
        self.world = world
        self.tensor = world.split(data + dp * pipeline, key=tensor)
        self.data = world.split(tensor + tp * pipeline, key=data)
        self.pipeline = world.split(tensor + tp * data, key=pipeline)
        self.gradients, self.replica, self.ends = self.data, self.tensor, None
        if pp > 1:
            self.replica = world.split(data, key=tensor + tp * pipeline)
            self.ends = self.pipeline.split(0 if pipeline in (0, pp - 1) else None, key=pipeline)

    def groups(self):
        """{title: communicator} of all groups of this rank, each group once."""
        named = {
            "all ranks": self.world,
            "data-parallel group": self.data,
            "tensor-parallel group": self.tensor,
            "pipeline": self.pipeline,
            "ranks of one replica": self.replica,
            "ends of the pipeline": self.ends,
        }
        first = {id(group): title for title, group in reversed(named.items()) if group}
        return {title: group for title, group in named.items() if group and first[id(group)] == title}

    def total_loss(self, losses, request=0):
        """(the sum of all ranks' losses in the canonical order, the largest request), as Python numbers.

        request: a whole number, for example of a signal; it needs no message of its own.

        The ranks of a tensor-parallel group have equal losses, so only the losses of its first rank are added. In a
        pipeline, only the last rank has losses.
        """
        own = np.array([request, *losses], np.float64)
        shape = self.pipeline.size, self.data.size, self.tensor.size, len(own)
        gathered = self.world.all_gather(own).reshape(shape)
        return tree_sum([float(loss) for loss in gathered[-1, :, 0, 1:].ravel()]), int(gathered[..., 0].max())
