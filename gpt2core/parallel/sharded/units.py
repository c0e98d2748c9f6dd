"""The units of a model as ZeRO-2 and ZeRO-3 divide them: shards, the units that a unit reads, memory."""

from gpt2core.architecture import unit_of
from gpt2core.arena import PAGE, round_up
from gpt2core.parallel.parameter import Parameter
from gpt2core.parallel.sharded.unit_gradients import UnitGradients
from gpt2core.parallel.sharded.unit_parameters import NotInMemory, UnitParameters


def shard_lengths(arena, ranks):
    """{unit: the elements of the shard of each of `ranks` ranks}: whole pages, so that no page has two owners."""
    parts = {unit: arena.unit_slice(unit) for unit in arena.units}
    return {unit: round_up(part.stop - part.start, PAGE * ranks) // ranks for unit, part in parts.items()}


def units_read(config, units, stored):
    """{unit: [the units whose parameters it reads]}: itself, and the head also the unit of the matrix of the logits.

    units: those that a rank computes. stored: those of which it has parameters, its own shards or whole ones.
    """
    reads = {unit: [unit] for unit in units} | {"head": list(dict.fromkeys(["head", unit_of(config.head)]))}
    return {unit: [each for each in reads[unit] if each in stored] for unit in units}


def divided_units(work, units, zero, used_twice=()):
    """(UnitParameters, UnitGradients) of a Workload whose layout is a UnitShards.

    units: those that this rank computes. zero: 2 or 3. used_twice: see UnitGradients.
    """
    shards, backend, shapes = work.layout, work.backend, work.arena.shapes
    reads = units_read(work.config, units, shards.parts)
    tensors = {name: Parameter(NotInMemory(shape, backend.compute_dtype), backend) for name, shape in shapes.items()}
    parameters = UnitParameters(shards, work.parameters, tensors, reads, keeps=zero == 2)
    return parameters, UnitGradients(work, tensors, reads, used_twice)


def memory(work, zero):
    """(bytes of shards, largest number of bytes of whole parameters, the same of whole gradients) of this rank."""
    shards, gradients, parameters = work.layout, work.gradients, work.parameters
    units = [shards.whole_size(unit) for unit in shards.parts]
    # One unit is computed, another is sent; and the gradient of a tied table waits for its second part.
    few = (3 if work.config.tied else 2) * max(units)
    stacked = (work.passes - 1).bit_length() * sum(units)  # 0: one pass
    number, read = gradients.itemsize, parameters.itemsize  # bytes; of what kernels read
    copy = 0 if parameters.dtype == gradients.dtype else read
    return (4 * number + copy) * shards.size, read * (sum(units) if zero == 2 else few), number * (stacked or few)


def most_at_once(config, sizes):
    """The largest sum of `sizes` {unit: number}, in forward order, over the units that two neighbours read."""
    reads, units = units_read(config, sizes, sizes), list(sizes)
    pairs = zip(units, [*units[1:], units[-1]], strict=True)
    return max(sum(sizes[each] for each in {*reads[unit], *reads[following]}) for unit, following in pairs)
