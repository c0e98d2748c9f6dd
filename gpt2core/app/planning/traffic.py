"""What a rank sends in a training step: every call of a collective and every message, with its exact size.

The list follows the code that sends: ops.py and model.py (tensor parallelism), the schedules (pipeline),
data/ and sharded/ (gradients and parameters), divided/model_pages.py (the norm), mesh.py (the loss).
"""

# B sequences and T tokens of a pass, N = B*T rows, C channels, V vocabulary

import functools
import itertools
import math
from typing import NamedTuple

from gpt2core.app.planning.layout import FP32, own_chunks, recomputed
from gpt2core.architecture import parameter_shapes
from gpt2core.arena import PAGE
from gpt2core.codecs import GROUP
from gpt2core.parallel.data.sparse_embedding import TABLE, tokens_read
from gpt2core.parallel.data.strategies import BUCKET_MB, STRATEGIES, buckets_of
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.divided.async_all_gather import PIECE_MB, owned
from gpt2core.parallel.pipeline.placement import ranks_of_parameters
from gpt2core.parallel.sharded.units import shard_lengths, units_read
from gpt2core.parallel.tensor.shards import shard_shapes, whole_name

LOSS = 8  # bytes of a loss, which is float64
ROW_INDICES = "row indices of the embedding"
CODE = {"fp16": 2 * GROUP, "bf16": 2 * GROUP, "int8": GROUP + FP32}  # bytes of the code of GROUP numbers


class Call(NamedTuple):
    """`times` equal calls of a collective, or messages ("send").

    group: the name of a group of the Mesh. purpose: what is sent. name: of the method of Communicator. elements,
    itemsize: of its input x. root: of a broadcast. eager: whether backward goes on while it runs.
    """

    group: str
    purpose: str
    name: str
    elements: int
    itemsize: int
    times: int = 1
    root: int = 0
    eager: bool = False

    @property
    def on_host(self):
        """Whether x is in host memory on every device."""
        return self.purpose in ("loss", ROW_INDICES)


def arena_of(layout, pipeline, tensor=0):
    """The DividedArena of a rank of the pipeline and of its tensor group, in which rank 0 has a largest one."""
    parallel, owners = layout.parallel, layout.replicas if layout.parallel.zero == 1 else 1
    grid = parallel.pp, parallel.chunks, parallel.tp, parallel.slices
    return divided_arena(layout.config, *grid, owners, pipeline, tensor)


@functools.lru_cache(256)  # a plan reads it many times for each layout
def divided_arena(config, pp, chunks, tp, slices, owners, pipeline, tensor):
    placement = ranks_of_parameters(config, pp, chunks)
    shapes = shard_shapes(parameter_shapes(config), tensor, tp, slices)
    own = {name: shape for name, shape in shapes.items() if placement[whole_name(name)] == pipeline}
    return DividedArena(own, owners)


def traffic(layout, place):
    """The Calls of one step of the rank at `place`, in the order of the step; groups of one rank are omitted."""
    calls = [*pipeline_calls(layout, place), *tensor_calls(layout, place)]
    if layout.parallel.zero > 1:
        calls += unit_calls(layout, place)
    else:
        calls += arena_calls(layout, place)
    calls.append(Call("world", "loss", "all_gather", 1 + layout.count, LOSS))
    return [call for call in calls if layout.sizes[call.group] > 1 and call.times]


# -- activations -------------------------------------------------------------------------------------------------------


def tensor_calls(layout, place):
    """The all-reduces inside the layers, over the tensor group."""
    units = [unit for chunk in own_chunks(layout, place.pipeline) for unit in chunk]
    again = sum(len(recomputed(layout, chunk)) for chunk in own_chunks(layout, place.pipeline))
    blocks = sum(unit.startswith("h.") for unit in units)
    has_head = units[-1] == "head"
    forward = 2 * (blocks + again) + (units[0] == "embedding")  # the sums of attention and MLP; of the embedding
    backward = 2 * blocks + has_head  # the gradients of the inputs of attention, MLP and logits
    for rows in layout.passes():
        tokens = rows * layout.seq_len
        # the sums of several slices are sent in fp32: see sum_of_slices()
        size = tokens * layout.config.n_embd, max(layout.compute_bytes, FP32 * (layout.parallel.slices > 1))
        yield Call("tensor", "activations", "all_reduce", *size, times=forward)
        yield Call("tensor", "gradients of activations", "all_reduce", *size, times=backward)
        # of each row: the maximum of its logits; the sum of their exponentials, and the logit of the target
        yield Call("tensor", "cross-entropy", "all_reduce", tokens, FP32, times=int(has_head))
        yield Call("tensor", "cross-entropy", "all_reduce", 2 * tokens, FP32, times=int(has_head))


def pipeline_calls(layout, place):
    """The messages between the ranks of a pipeline, and the copy of a tied table."""
    config, parallel = layout.config, layout.parallel
    P, last = parallel.pp, parallel.pp * parallel.chunks - 1
    if P == 1:
        return
    if config.tied and place.pipeline == P - 1:
        table = [(config.head, (config.vocab_size, config.n_embd))]
        for shape in shard_shapes(table, place.tensor, parallel.tp, parallel.slices).values():
            yield Call("pipeline", "tied table", "send", math.prod(shape), layout.compute_bytes)
    rows, count = layout.passes(), layout.count // layout.threads  # count: micro-batches of a thread
    for thread, (kind, m, chunk) in itertools.product(range(layout.threads), layout.schedule()[place.pipeline]):
        size = rows[thread * count + m] * layout.seq_len * config.n_embd, layout.compute_bytes
        if kind == "F" and chunk < last:
            yield Call("pipeline", "activations", "send", *size)
        if kind == "B" and chunk == 0 and config.tied:
            yield Call("pipeline", "gradients of the embedding", "send", *size)
        if kind == "B" and chunk:
            yield Call("pipeline", "gradients of activations", "send", *size)


# -- gradients, norm and parameters: ZeRO-0 and ZeRO-1 -----------------------------------------------------------------


def arena_calls(layout, place):
    """What data/strategies.py and the files of divided/ send."""
    parallel, p = layout.parallel, layout.replicas
    arena = arena_of(layout, place.pipeline, place.tensor)
    if parallel.zero and parallel.zero_gather == "forward":
        piece_mb = min(PIECE_MB, bucket_mb(parallel))
        for names in reversed(buckets_of(arena, True, piece_mb * 1e6, layout.compute_bytes)):
            for part, owner in owned(arena, span(arena, names), p):
                size = part.stop - part.start, layout.compute_bytes
                yield Call("data", "parameters", "broadcast", *size, root=owner, eager=True)
    yield from gradient_calls(layout, arena)
    if parallel.zero:
        yield Call("data", "norm", "all_gather", arena.size // PAGE // p, FP32)
    yield pages_of_replica(layout)
    if parallel.zero and parallel.zero_gather == "end":
        yield Call("data", "parameters", "all_gather", arena.size // p, layout.compute_bytes)


def pages_of_replica(layout):
    """The all-gather of the page sums inside a replica: see ModelPages.join()."""
    pages = max(arena_of(layout, rank).norm_pages for rank in range(layout.parallel.pp))
    return Call("replica", "norm", "all_gather", pages, FP32)


def bucket_mb(parallel):
    """The bucket size; if it is measured at the start of a run, its default."""
    return BUCKET_MB if parallel.bucket_mb is None else parallel.bucket_mb


def span(arena, names):
    """The slice of a bucket, whose first name is the last parameter."""
    return slice(arena.slices[names[-1]].start, arena.padded(names[0]).stop)


def gradient_calls(layout, arena):
    """The sums of the gradients over the replicas, bucket by bucket: see make_data_parallel()."""
    parallel, p = layout.parallel, layout.replicas
    packed, eager = STRATEGIES[parallel.dp]
    if parallel.compress == "none" and parallel.dp == "flat" and parallel.zero:
        yield Call("data", "gradients", "reduce_scatter", arena.size, FP32)
        return
    for names in buckets_of(arena, packed, bucket_mb(parallel) * 1e6 if eager else math.inf, FP32):
        part = span(arena, names)
        elements = part.stop - part.start
        if parallel.sparse_embedding and TABLE in names:
            yield from row_calls(layout, arena.shapes[TABLE], eager)
            elements = part.stop - arena.padded(TABLE).stop
        if not elements:
            continue
        if parallel.compress == "none":
            yield Call("data", "gradients", "all_reduce", elements, FP32, eager=eager)
        else:
            code = -(-elements // (p * GROUP)) * CODE[parallel.compress]  # of the numbers that one rank adds
            yield Call("data", "gradients", "all_to_all", p * code, 1, eager=eager)
            yield Call("data", "gradients", "all_gather", code, 1)


def row_calls(layout, shape, eager):
    """What sparse_embedding.py sends at most for a table of this shape: if all tokens of a rank are distinct."""
    V, C = shape
    rows = min(V, tokens_read(layout.batch_size, layout.seq_len, layout.replicas))
    yield Call("data", ROW_INDICES, "all_gather", rows, FP32)
    yield Call("data", "rows of the embedding, at most", "all_gather", rows * C, FP32, eager=eager)


# -- gradients, norm and parameters: ZeRO-2 and ZeRO-3 -----------------------------------------------------------------


def shard_sizes(layout, place):
    """{unit: the elements of a rank's shard of it}: see UnitShards."""
    return shard_lengths(arena_of(layout, place.pipeline, place.tensor), layout.replicas)


def unit_calls(layout, place):
    """What unit_parameters.py, unit_gradients.py and unit_shards.py send."""
    shards = shard_sizes(layout, place)
    for unit, times in gathers(layout, place, list(shards)).items():
        yield Call("data", "parameters", "all_gather", shards[unit], layout.compute_bytes, times, eager=True)
    for unit in reversed(shards):
        yield Call("data", "gradients", "reduce_scatter", layout.replicas * shards[unit], FP32, eager=True)
    yield Call("data", "norm", "all_gather", sum(shards.values()) // PAGE, FP32)
    yield pages_of_replica(layout)


def gathers(layout, place, stored):
    """{unit: how often its parameters are gathered in a step}: see UnitParameters. stored: the units with shards."""
    if layout.parallel.zero == 2:
        return dict.fromkeys(stored, 1)
    counts, gathered = dict.fromkeys(stored, 0), set()
    order = units_in_order(layout, place)
    reads = units_read(layout.config, dict.fromkeys(order), stored)
    order = [unit for unit, before in zip(order, [None, *order], strict=False) if unit != before]
    if "embedding" in stored and "embedding" not in order:  # a tied table is sent to the first rank of the pipeline
        counts["embedding"], gathered = 1, {"embedding"}
    for unit, following in zip(order, [*order[1:], None], strict=True):
        needed = {*reads[unit], *reads.get(following, [])}
        for each in needed - gathered:
            counts[each] += 1
        gathered = needed
    return counts


def units_in_order(layout, place):
    """The units that a rank reads in a step, in order: each pass forward and backward, or the actions of a pipeline."""
    chunks, P = own_chunks(layout, place.pipeline), layout.parallel.pp
    if P == 1:
        return [*chunks[0], *reversed(chunks[0])] * (layout.count // layout.merged // layout.threads)
    orders = {"F": lambda units: units, "B": reversed}
    actions = layout.schedule()[place.pipeline]
    return [unit for kind, _, c in actions if kind in orders for unit in orders[kind](chunks[c // P])]


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_sent(layout, place, calls, sent):
    """The bytes that the rank at `place` sends in these calls.

    sent: a function like Communicator.sent, which gives the bytes of one call.
    """
    ranks = layout.rank_of(place)
    return sum(call.times * sent(call, layout.sizes[call.group], ranks[call.group]) for call in calls)


def by_collective(layout, place, calls, sent):
    """[(purpose, name, number of calls, bytes)] of the rank at `place`: its calls, added by purpose and name."""
    rows, ranks = {}, layout.rank_of(place)
    for call in calls:
        row = rows.setdefault((call.purpose, call.name), [0, 0])
        row[0] += call.times
        row[1] += call.times * sent(call, layout.sizes[call.group], ranks[call.group])
    return [(*key, *row) for key, row in rows.items()]
