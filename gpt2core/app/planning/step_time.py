"""The predicted time of a training step, by term: computation by a roofline, messages by alpha and beta, the bubble."""

import math
from typing import NamedTuple

from gpt2core.app.planning.flops import unit_work
from gpt2core.app.planning.layout import FP32, own_chunks, recomputed
from gpt2core.app.planning.traffic import arena_of, shard_sizes, tensor_calls, traffic
from gpt2core.app.planning.waves import idle_flops
from gpt2core.communicator import textbook_bytes
from gpt2core.memory.kernel_sizes import ADD, UPDATE
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
    elif call.group == "tensor":
        link = machine.inside
    elif call.name == "send":
        link = machine.message
    elif call.eager:
        link = machine.background
    else:
        link = machine.collective if call.name == "all_reduce" else machine.gather
    sent = textbook_bytes(call.name, call.elements * call.itemsize, size)
    return link.call + rounds(call.name, size) * link.alpha + sent * link.beta


class Times(NamedTuple):
    """Seconds of a pass on one rank, without messages. weights: of backward, for the gradients of matrices."""

    forward: float
    backward: float
    weights: float


def unit_seconds(layout, machine, unit, sequences):
    """The Times of a unit for a pass of so many sequences."""
    ends, block = (machine.ends_forward, machine.ends_backward), unit.startswith("h.")
    if unit == "embedding":  # its other times are those of the head
        return Times(*(machine.embedding * rate.overhead for rate in ends), 0.0)
    ends = [rate._replace(overhead=(1 - machine.embedding) * rate.overhead) for rate in ends]
    rates = (machine.block_forward, machine.block_backward) if block else ends
    tp, tokens = layout.parallel.tp, sequences * layout.seq_len
    work = unit_work(layout.config, layout.seq_len, unit, tp, machine.queries)
    idle = idle_flops(layout.config, tp, tokens, machine.processors) if block else (0.0, 0.0)
    forward, backward = (
        rate.seconds(work, sequences, layout.compute_bytes, passes) + waits / rate.flops
        for rate, passes, waits in zip(rates, (1, 2), idle, strict=True)
    )
    gradients = work.parameters * rates[1].parameter
    backward += (machine.micro_batch + gradients) * (layout.merged - 1)  # which have products of their own
    weights = machine.weights + 2 * tokens * work.parameters / rates[1].flops + gradients
    return Times(forward, backward, min(weights, backward))


def chunk_seconds(layout, machine, units, sequences):
    """The Times of a chunk for a pass of so many sequences, with the blocks that are computed again."""
    times = {unit: unit_seconds(layout, machine, unit, sequences) for unit in units}
    forward, backward, weights = map(sum, zip(*times.values(), strict=True))
    again = sum(times[unit].forward + machine.again for unit in recomputed(layout, units))
    return Times(forward, backward + again, weights)


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
    seconds = sum(sum(chunk_seconds(layout, machine, units, rows)[:2]) for rows in layout.passes())
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
        forward, backward, weights = chunks[chunk]
        own = {"F": forward + machine.action, "B": backward - weights, "W": weights + machine.action, "E": 0.0}
        return own[kind]

    bytes_of_message = rows * layout.seq_len * config.n_embd * layout.compute_bytes
    link = machine.far if layout.ranks > machine.host_ranks else machine.message
    message = link.alpha + link.beta * bytes_of_message
    return simulate(layout.schedule(), seconds, message, reaction=machine.reaction)


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
    units = max(sum(map(len, own_chunks(layout, rank))) for rank in range(parallel.pp)) * own / size
    return FP32 * numbers / machine.bandwidth + machine.update * units / layout.threads
