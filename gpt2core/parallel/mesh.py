"""The dp x tp x pp grid of process groups: data, tensor and pipeline parallel."""

from gpt2core.errors import ConfigError


class Mesh:
    """The dp x tp x pp grid: this rank's data, tensor and pipeline groups. Ranks of a tensor group are consecutive.

        rank = tensor + tp * (data + dp * pipeline)

    Tensor groups communicate most often, so their ranks are neighbours (on one host: connected by NVLink). For
    dp = tp = 2, each row below is a tensor group:

        rank 0  rank 1      .tensor {0, 1} and {2, 3}
        rank 2  rank 3      .data   {0, 2} and {1, 3}      .pipeline a group of one for each rank

    Raises ConfigError unless dp * tp * pp is the size of the world. The trainer uses pp = 1.
    """

    def __init__(self, world, dp, tp, pp=1):
        if min(dp, tp, pp) < 1 or dp * tp * pp != world.size:
            sizes = f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp}"
            raise ConfigError(f"a mesh of {sizes} ranks does not fit a world of {world.size}: choose sizes that do")
        tensor, data, pipeline = world.rank % tp, world.rank // tp % dp, world.rank // (tp * dp)
        self.world = world
        self.tensor = world.split(data + dp * pipeline, key=tensor)
        self.data = world.split(tensor + tp * pipeline, key=data)
        self.pipeline = world.split(tensor + tp * data, key=pipeline)
