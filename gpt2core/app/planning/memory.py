"""The memory of one rank by term: that of a GPU by memory/gpu.py, that of a process on the CPU by host_memory.py."""

from gpt2core.app.host_memory import array_terms, largest_unit
from gpt2core.app.planning.layout import FP32, own_chunks, recomputed
from gpt2core.app.planning.traffic import arena_of, shard_sizes
from gpt2core.memory.gpu import memory_of_ranks
from gpt2core.parallel.micro_batches.merged import kept_numbers
from gpt2core.parallel.pipeline.simulator import simulate


def host_terms(layout, place):
    """{term: bytes} of a rank whose arrays are in host memory; Python and its libraries are not counted."""
    config, parallel = layout.config, layout.parallel
    part, unit = arena_of(layout, place.pipeline, place.tensor).size, largest_unit(config)
    if parallel.zero > 1:
        shards = shard_sizes(layout, place).values()
        part, unit = layout.replicas * sum(shards), layout.replicas * max(shards)
    terms = array_terms(part, unit, parallel, layout.threads, layout.replicas)
    passes = layout.count // layout.merged // layout.threads
    partial_sums = (passes - 1).bit_length()  # whole gradients
    if parallel.zero < 2:
        partial_sums = max(0, partial_sums - 1)  # the first one is the term `gradients`
    elif partial_sums:
        terms.pop("whole gradients")
    terms["partial sums of gradients"] = FP32 * partial_sums * layout.threads * part
    terms["activations"] = FP32 * activations(layout, place) * layout.threads
    return {term: int(count) for term, count in terms.items() if count}


def activations(layout, place):
    """The numbers that one thread keeps from forward to backward, and the logits of a pass with their gradient."""
    config, parallel = layout.config, layout.parallel
    tokens, chunks = max(layout.passes()) * layout.seq_len, own_chunks(layout, place.pipeline)
    blocks = max(sum(unit.startswith("h.") for unit in chunk) for chunk in chunks)
    inputs = max(len(recomputed(layout, chunk)) for chunk in chunks)
    kept = max(blocks - inputs, int(inputs > 0))  # one block is computed again at a time
    live = 1.0
    if parallel.pp > 1:
        live = simulate(layout.schedule()).peaks[place.pipeline]
    numbers = live * (blocks - inputs) * kept_numbers(config, layout.seq_len) + live * inputs * config.n_embd
    numbers += (kept - (blocks - inputs)) * kept_numbers(config, layout.seq_len)
    has_head = any("head" in chunk for chunk in chunks)
    return tokens * (numbers + 2 * config.vocab_size * has_head) / parallel.tp


def device_terms(layout, precision, in_order):
    """[{term: bytes} of each rank of a pipeline] that computes on GPUs: see memory_of_ranks()."""
    sizes = layout.batch_size // layout.replicas, layout.seq_len, precision, layout.count, layout.replicas
    return memory_of_ranks(layout.config, *sizes, layout.parallel, in_order)
