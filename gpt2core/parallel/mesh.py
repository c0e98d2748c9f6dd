"""The dp x tp x pp grid of groups: which ranks share a layer, a batch and a pipeline."""

from gpt2core.errors import ConfigError


class Mesh:
    """The dp x tp x pp grid: each rank's data, tensor and pipeline group, tensor ranks next to each other.

        rank = tensor + tp * (data + dp * pipeline)

    Tensor groups talk most, so they get neighbours (on one host, one NVLink). dp = tp = 2, one row a tensor group:

        rank 0  rank 1      .tensor {0, 1} and {2, 3}
        rank 2  rank 3      .data   {0, 2} and {1, 3}      .pipeline a group of one each

    Raises ConfigError unless dp * tp * pp is the size of the world.
    """

    def __init__(self, world, dp, tp, pp=1):
        if min(dp, tp, pp) < 1 or dp * tp * pp != world.size:
            sizes = f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp}"
            raise ConfigError(f"a mesh of {sizes} ranks does not fit {world.size}: give sizes >= 1 of that product")
        tensor, data, pipeline = world.rank % tp, world.rank // tp % dp, world.rank // (tp * dp)
        self.world = world
        self.tensor = world.split(data + dp * pipeline, key=tensor)
        self.data = world.split(tensor + tp * pipeline, key=data)
        self.pipeline = world.split(tensor + tp * data, key=pipeline)
