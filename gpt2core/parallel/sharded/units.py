"""The units of a model as ZeRO-2 and ZeRO-3 divide them: the length of a shard, and the units that a unit reads."""

from gpt2core.architecture import unit_of
from gpt2core.arena import PAGE, round_up


def shard_lengths(arena, ranks):
    """{unit: the elements of the shard of each of `ranks` ranks}: whole pages, so that no page has two owners."""
    parts = {unit: arena.unit_slice(unit) for unit in arena.units}
    return {unit: round_up(part.stop - part.start, PAGE * ranks) // ranks for unit, part in parts.items()}


def units_read(config, units):
    """{unit: [the units whose parameters it reads]}: itself, and the head also the unit of the matrix of the logits."""
    reads = {unit: [unit] for unit in units}
    reads["head"] = list(dict.fromkeys(["head", unit_of(config.head)]))
    return reads


def most_at_once(config, sizes):
    """The largest sum of `sizes` {unit: number}, in forward order, over the units that two neighbours read."""
    reads, units = units_read(config, sizes), list(sizes)
    pairs = zip(units, [*units[1:], units[-1]], strict=True)
    return max(sum(sizes[each] for each in {*reads[unit], *reads[following]}) for unit, following in pairs)
