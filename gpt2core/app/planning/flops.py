"""The floating-point operations of each unit of the model: their sum is flops_per_token() of architecture.py."""

import functools
import math

from gpt2core.app.planning.layout import own_chunks, recomputed
from gpt2core.architecture import parameter_shapes, unit_of


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
