"""The units of a model as ZeRO-2 and ZeRO-3 divide them: shards, the units that a unit reads, memory."""

from gpt2core.architecture import unit_of
from gpt2core.arena import PAGE, round_up
from gpt2core.parallel.sharded.shard_sums import ShardSums
from gpt2core.parallel.sharded.shared_parameters import SharedParameters


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


def divided_units(work, units, zero, threads):
    """(SharedParameters, ShardSums) of the Workload of a rank whose layout is a UnitShards.

    units: those that this rank computes. zero: 2 or 3. threads: the number of workers.
    """
    reads = units_read(work.config, units, work.layout.parts)
    return SharedParameters(work, reads, zero == 2, threads), ShardSums(work)


def memory(work, zero, threads):
    """(bytes of shards, largest number of bytes of whole parameters, the same of whole gradients) of this rank."""
    shards, gradients, parameters = work.layout, work.gradients, work.parameters
    units = [shards.whole_size(unit) for unit in shards.parts]
    # One unit is computed, by all threads. The parameters of the next one arrive; the gradients of another are sent.
    # The table of a tied model is read with the head; its gradient in each thread waits for its second part.
    uses = 2 if work.config.tied else 1
    read_units, whole_gradients = (1 + uses) * max(units), (1 + uses * threads) * max(units)
    stacked = threads * (work.passes // threads - 1).bit_length() * sum(units)  # 0: one pass
    number, read = gradients.itemsize, parameters.itemsize  # bytes; of what kernels read
    # of each number of a shard there are 4: parameter, gradient, two moments
    copy = 0 if parameters.dtype == gradients.dtype else read
    whole_parameters = sum(units) if zero == 2 else read_units
    return (4 * number + copy) * shards.size, read * whole_parameters, number * (stacked or whole_gradients)


def most_at_once(config, sizes):
    """The largest sum of `sizes` {unit: number}, in forward order, over the units that two neighbours read."""
    reads, units = units_read(config, sizes, sizes), list(sizes)
    pairs = zip(units, [*units[1:], units[-1]], strict=True)
    return max(sum(sizes[each] for each in {*reads[unit], *reads[following]}) for unit, following in pairs)
