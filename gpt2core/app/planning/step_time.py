"""The predicted time of a training step, by term: computation by a roofline, messages by alpha and beta, the bubble."""

import math

from gpt2core.app.planning.flops import forward_flops
from gpt2core.app.planning.layout import FP32, own_chunks, recomputed
from gpt2core.app.planning.traffic import arena_of, shard_sizes, tensor_calls, traffic
from gpt2core.app.planning.waves import idle_flops
from gpt2core.communicator import textbook_bytes
from gpt2core.memory.kernel_sizes import ADD, GELU, NORMS, UPDATE
from gpt2core.parallel.mesh import Grid
from gpt2core.parallel.pipeline.simulator import simulate


def rounds(name, size):
    """The rounds of a collective in a group of `size` ranks: the number of alphas."""
    if name == "send":
        return 1
    return math.ceil(math.log2(size)) * (2 if name == "all_reduce" else 1)


def call_seconds(layout, machine, call):
    """The seconds of one call of the list of traffic()."""
    size, tp = layout.sizes[call.group], layout.parallel.tp
    width = {"tensor": tp, "data": tp * layout.replicas}.get(call.group, layout.ranks)  # ranks from first to last
    if width > machine.host_ranks:
        link = machine.far
    elif call.name == "send":
        link = machine.message
    elif call.eager:
        link = machine.background
    else:
        link = machine.collective if call.name == "all_reduce" else machine.gather
    sent = textbook_bytes(call.name, call.elements * call.itemsize, size)
    return rounds(call.name, size) * link.alpha + sent * link.beta + machine.started * call.eager


def unit_seconds(layout, machine, unit, tokens):
    """(forward, backward) seconds of a unit on one rank for `tokens` of a pass, without messages."""
    block, tp = unit.startswith("h."), layout.parallel.tp
    stream = (NORMS + GELU / tp) * block * layout.config.n_embd * layout.compute_bytes * tokens / machine.activations
    rates = (machine.block_forward, machine.block_backward) if block else (machine.ends_forward, machine.ends_backward)
    flops = forward_flops(layout.config, layout.seq_len)[unit] * tokens / tp
    idle = idle_flops(layout.config, tp, tokens, machine.processors) if block else (0.0, 0.0)
    once = block or unit == "head"  # the overheads of embedding and head are those of both together
    forward = rates[0].overhead * once + (flops + idle[0]) / rates[0].flops + stream
    merged = machine.micro_batch * (layout.merged - 1)
    return forward, (rates[1].overhead + merged) * once + (2 * flops + idle[1]) / rates[1].flops + 2 * stream


def chunk_seconds(layout, machine, units, sequences):
    """(forward, backward) seconds of a chunk for one pass, with the blocks that are computed again."""
    tokens, again = sequences * layout.seq_len, recomputed(layout, units)
    times = {unit: unit_seconds(layout, machine, unit, tokens) for unit in units}
    backward = sum(time for _, time in times.values()) + sum(times[unit][0] for unit in again)
    return sum(time for time, _ in times.values()), backward


def step_seconds(layout, machine):
    """{term: seconds} of a step: of the slowest rank of the pipeline, whose terms begin with the computation."""
    tensor = [call_seconds(layout, machine, call) * call.times for call in own_tensor_calls(layout)]
    terms = pipeline_terms(layout, machine) if layout.parallel.pp > 1 else pass_terms(layout, machine)
    terms["sums inside layers"] = sum(tensor)
    calls = [call for call in traffic(layout, Grid()) if call.group in ("data", "world", "replica")]
    seconds = {call: call_seconds(layout, machine, call) * call.times for call in calls}
    window = terms["computation"] * (1 - 1 / (1 + layout.config.n_layer)) * machine.overlaps
    gradients = sum(seconds[call] for call in calls if call.eager and call.purpose == "gradients")
    parameters = sum(seconds[call] for call in calls if call.eager) - gradients
    last = window / (layout.count // layout.merged // layout.threads)  # gradients are complete in the last pass
    hidden = min(window, parameters + min(gradients, last))
    terms["messages of gradients and parameters"] = sum(seconds[call] for call in calls) - hidden
    terms["update"] = update_seconds(layout, machine) + machine.step
    return {term: seconds for term, seconds in terms.items() if seconds}


def own_tensor_calls(layout):
    """The calls inside layers of the rank of the pipeline that makes most."""
    if layout.parallel.tp == 1:
        return []
    lists = [list(tensor_calls(layout, Grid(pipeline=rank))) for rank in range(layout.parallel.pp)]
    return max(lists, key=lambda calls: sum(call.times * call.elements for call in calls))


def pass_terms(layout, machine):
    """The computation of a replica without a pipeline; its threads compute at the same time."""
    (units,) = own_chunks(layout, 0)
    seconds = sum(sum(chunk_seconds(layout, machine, units, rows)) for rows in layout.passes())
    return {"computation": seconds / layout.threads}


def pipeline_terms(layout, machine):
    """The computation of the rank that computes most, and what the schedule adds: waits and messages."""
    timeline = pipeline_timeline(layout, machine)
    busy = max(timeline.busy)
    return {"computation": busy, "bubble and messages of the pipeline": timeline.seconds - busy}


def pipeline_timeline(layout, machine):
    """The simulated Timeline of the passes of a pipeline, without the sums inside layers."""
    parallel, config = layout.parallel, layout.config
    rows = max(layout.passes())
    chunks = {}
    for rank in range(parallel.pp):
        for number, units in enumerate(own_chunks(layout, rank)):
            chunks[rank + parallel.pp * number] = chunk_seconds(layout, machine, units, rows)

    def seconds(kind, chunk):
        forward, backward = chunks[chunk]
        return {"F": forward, "B": backward / 2, "W": backward / 2, "E": 0.0}[kind]

    bytes_of_message = rows * layout.seq_len * config.n_embd * layout.compute_bytes
    link = machine.far if layout.ranks > machine.host_ranks else machine.message
    return simulate(layout.schedule(), seconds, link.alpha + link.beta * bytes_of_message)


def update_seconds(layout, machine):
    """The seconds of clipping, AdamW, and the sums of the gradients of passes, on the rank with most parameters."""
    parallel, passes = layout.parallel, layout.count // layout.merged
    if parallel.zero > 1:
        own = max(sum(shard_sizes(layout, Grid(pipeline=rank)).values()) for rank in range(parallel.pp))
        size = layout.replicas * own
    else:
        size = max(arena_of(layout, rank).size for rank in range(parallel.pp))
        own = size // (layout.replicas if parallel.zero else 1)
    numbers = (
        UPDATE * own / layout.threads + ADD * size * (passes / layout.threads - 1) + ADD * size * (layout.threads > 1)
    )
    return FP32 * numbers / machine.bandwidth
