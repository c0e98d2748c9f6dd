"""The memory of one rank by term: that of a GPU by memory/gpu.py, that of a process on the CPU by host_memory.py."""

from gpt2core.app.host_memory import array_terms, largest_unit
from gpt2core.app.planning.layout import FP32, own_chunks, recomputed
from gpt2core.app.planning.traffic import arena_of, shard_sizes, traffic
from gpt2core.memory.gpu import memory_of_ranks
from gpt2core.parallel.pipeline.simulator import peak_of, simulate

CHUNK = 1 << 18  # numbers of a part of a message, for each of which a sum over ranks has two buffers
# Numbers, times C, of a block for each token: (those of every rank of a tensor group, those that the group divides)
KEPT = 4, 12  # for backward: two LayerNorms 2 + 2; qkv 3, attention 1, the hidden layer and its slope 4 + 4
# in backward: gradients of x, LayerNorms and sums, and temporary arrays; gradients of qkv 3, and the hidden layer 4
BACKWARD = 9, 7


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
    terms["buffers of messages"] = FP32 * message_buffers(layout, place)
    return {term: int(count) for term, count in terms.items() if count}


def activations(layout, place):
    """The numbers that one thread keeps from forward to backward, and the temporary arrays of backward and the loss."""
    config, parallel = layout.config, layout.parallel
    C, T, tp, chunks = config.n_embd, layout.seq_len, parallel.tp, own_chunks(layout, place.pipeline)
    blocks = max(sum(unit.startswith("h.") for unit in chunk) for chunk in chunks)
    again = max(len(recomputed(layout, chunk)) for chunk in chunks)
    live, messages, at_once = 1.0, 0.0, int(again > 0)  # at_once: recomputed blocks that are kept at the same time
    if parallel.pp > 1:
        live = simulate(layout.schedule()).peaks[place.pipeline]
        messages = 2 * live  # a received and a sent array (B, T, C)
        at_once = max(at_once, again * waiting(layout.schedule()[place.pipeline]))
    kept = max(live * (blocks - again), at_once)
    whole, divided = (kept * each + most for each, most in zip(KEPT, BACKWARD, strict=True))
    numbers = (whole + divided / tp + live * again + messages) * C + kept * config.n_head * T / tp
    logits = 2 * config.vocab_size / tp * any("head" in chunk for chunk in chunks)  # and their gradient
    return max(layout.passes()) * T * (numbers + logits)


def waiting(actions):
    """The most micro-batches of a rank of a pipeline whose W action waits: it needs what B has computed again."""
    return int(peak_of(actions, {"F": 0, "B": 1, "W": -1, "E": 0})) * any(kind == "W" for kind, _, _ in actions)


def message_buffers(layout, place):
    """The most numbers in the buffers of a sum over the ranks of the data group."""
    p, parts = layout.replicas, {"all_reduce": 1, "reduce_scatter": layout.replicas}
    calls = [call for call in traffic(layout, place) if call.group == "data" and call.name in parts]
    return max((2 * parts[call.name] * min(call.elements // p, CHUNK) for call in calls), default=0)


def device_terms(layout, precision, in_order):
    """[{term: bytes} of each rank of a pipeline] that computes on GPUs: see memory_of_ranks()."""
    sizes = layout.batch_size // layout.replicas, layout.seq_len, precision, layout.count, layout.replicas
    return memory_of_ranks(layout.config, *sizes, layout.parallel, in_order)
