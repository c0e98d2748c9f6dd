"""Multiprocessors of a GPU that wait: the last wave of a product's tiles is rarely complete.

A multiprocessor computes one tile of the result at a time. All of them compute a tile each, which is a wave, and then
those of the next wave. If few tiles are left for the last wave, most multiprocessors have nothing to do. With 64 x 1024
tokens this adds 2 % to the time of the products of a block of GPT-2 124M, with 4 x 1024 tokens 26 %.
"""

import functools
import math

from gpt2core.architecture import parameter_shapes
from gpt2core.parallel.tensor.shards import shard_shape

TILE = 128, 256  # rows and columns of a tile of a large product on a Hopper GPU


def time_of_waves(rows, columns, processors):
    """The time of a product with a result (rows, columns), relative to a product whose waves are all complete."""
    tiles = math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
    return math.ceil(tiles / processors) * processors * math.prod(TILE) / (rows * columns)


@functools.cache  # because a plan compares many layouts
def idle_flops(config, tp, tokens, processors):
    """(forward, backward): operations that a GPU could do while it waits in a block; tp: the ranks that divide it.

    processors: of the GPU; None: a CPU, which has no waves. The gradient of a weight is a sum over all tokens: its
    product divides this sum until all multiprocessors have work.
    """
    if processors is None:
        return 0.0, 0.0
    shapes = [shard_shape(name, shape, 0, tp) for name, shape in parameter_shapes(config) if ".h.0." in name]
    matrices = [shape for shape in shapes if len(shape) == 2]

    def idle(inputs, columns):
        return 2 * tokens * inputs * columns * (time_of_waves(tokens, columns, processors) - 1)

    return sum(idle(C, K) for C, K in matrices), sum(idle(K, C) for C, K in matrices)
