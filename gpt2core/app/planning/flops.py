"""What each unit of the model computes: the sum of its operations is flops_per_token() of architecture.py."""

import functools
import math
from typing import NamedTuple

from gpt2core.app.planning.layout import own_chunks, recomputed
from gpt2core.architecture import parameter_shapes, unit_of
from gpt2core.memory.kernel_sizes import GELU, LOGITS, NORMS


@functools.cache  # it is read for each unit of each layout
def forward_flops(config, seq_len):
    """{unit: operations of its forward pass per token}; backward has twice as many, half of them for parameters.

    A table that is only looked up has none; the head has those of the matrix of the logits, tied or not.
    """
    flops = {}
    for name, shape in parameter_shapes(config):
        unit = unit_of(name)
        computes = unit != "embedding" or name == config.head
        owner = "head" if name == config.head else unit
        flops[unit] = flops.get(unit, 0)
        flops[owner] = flops.get(owner, 0) + 2 * math.prod(shape) * computes
    attention = 4 * config.n_embd * seq_len  # q k and p v of one token, with all positions, also the masked ones
    return {unit: count + attention * unit.startswith("h.") for unit, count in flops.items()}


class Work(NamedTuple):
    """What a rank computes for a unit and one sequence in forward.

    parameters: their count. flops: operations of the products with them, and of attention. numbers: what the
    kernels read and write besides products. scores: those of attention.
    """

    parameters: float
    flops: float
    numbers: float
    scores: float


def unit_work(config, seq_len, unit, tp, queries):
    """The Work of a block, or of embedding and head together ("head"), of one of `tp` ranks that divide each layer.

    queries: the rows of a tile of attention, which skips the tiles above the diagonal.
    """
    T, C, block = seq_len, config.n_embd, unit.startswith("h.")
    scores = block * T * (T + min(T, queries)) / 2
    weights = T * (forward_flops(config, T)[unit] - 4 * C * T * block)
    numbers = T * ((NORMS + GELU / tp) * C if block else NORMS / 2 * C + LOGITS / tp * config.vocab_size)
    return Work(weights / (2 * T * tp), (weights + 4 * C * scores) / tp, numbers, scores * config.n_head / tp)


def step_flops(layout):
    """(operations of the step over all ranks, the same with those of the blocks that backward computes again)."""
    forward, tokens = forward_flops(layout.config, layout.seq_len), layout.batch_size * layout.seq_len
    again = [
        unit
        for rank in range(layout.parallel.pp)
        for chunk in own_chunks(layout, rank)
        for unit in recomputed(layout, chunk)
    ]
    needed = 3 * sum(forward.values())
    return tokens * needed, tokens * (needed + sum(forward[unit] for unit in again))
