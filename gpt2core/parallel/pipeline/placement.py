"""Which rank of a pipeline has which units and which parameters of a model."""

from gpt2core.architecture import parameter_shapes, unit_names, unit_of
from gpt2core.data import even_slices


def units_of_chunks(config, count):
    """The names of the units of each of `count` chunks of the model.

    The layers are divided evenly; if `count` does not divide them, some chunks have one layer more. The first chunk
    also has the embedding, the last one the head. `count` must be at most n_layer.
    """
    embedding, *blocks, head = unit_names(config)
    chunks = [blocks[part] for part in even_slices(len(blocks), count)]
    chunks[0].insert(0, embedding)
    chunks[-1].append(head)
    return chunks


def ranks_of_parameters(config, ranks, chunks):
    """{name of a parameter: the rank that stores and updates it}, in model order.

    ranks: the size of the pipeline. chunks: the number of chunks on each rank; chunk c is on rank c % ranks. A tied
    table belongs to the rank of the head; that of the embedding has a copy (tied_table.py).
    """
    units = units_of_chunks(config, ranks * chunks)
    rank_of = {unit: number % ranks for number, names in enumerate(units) for unit in names}
    owners = {name: rank_of[unit_of(name)] for name, _ in parameter_shapes(config)}
    return owners | {config.head: rank_of["head"]}


def describe_ranks(config, ranks, chunks):
    """Text such as "pipeline rank 0: embedding, h.0; pipeline rank 1: h.1 to h.3, head"."""
    units = [", ".join(in_words(names)) for names in units_of_chunks(config, ranks * chunks)]
    return "; ".join(f"pipeline rank {rank}: {' and '.join(units[rank::ranks])}" for rank in range(ranks))


def in_words(units):
    """The names of consecutive units, with "h.0 to h.2" in place of several blocks."""
    blocks = [name for name in units if name.startswith("h.")]
    words = [blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"]
    return [name for name in units if name == "embedding"] + words + [name for name in units if name == "head"]
