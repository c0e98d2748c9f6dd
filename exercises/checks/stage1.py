"""The checks of stage 1: the ranks are threads of one process, and training on ranks has the bits of one rank."""

# p ranks, r this rank

import numpy as np

from exercises.checks.common import (
    BUCKET_MB,
    CONFIG,
    CURVE,
    RANK_SECONDS,
    expect_same_training,
    losses,
    random,
    real,
)
from exercises.compare import Mismatch, expect, expect_equal
from gpt2core.arena import Arena
from gpt2core.communicator import Solo
from gpt2core.model import parameter_shapes
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.tensor import Tensor
from stage0_serial.numpy_backend import NumpyBackend

FP64 = 1e-12  # relative norm: a few roundings of 1e-16


def on_ranks(p, function):
    """[function(comm) of each rank]; a rank that waits longer than RANK_SECONDS is an error."""
    return run_ranks(p, function, timeout=RANK_SECONDS)


def segments_of(x, p):
    return [x[x.size * j // p : x.size * (j + 1) // p] for j in range(p)]


def ring_cases():
    """(p, number of elements): first equal segments, then segments whose lengths differ."""
    return [(p, p * 3 + rest) for rest in (0, 1) for p in (2, 3, 4)]


# -- 1.1 ring all-gather -----------------------------------------------------------------------------------------------


def gathered(p, n):
    """[(the array after the student's all-gather, bytes sent) of each rank]; rank r begins with segment r of 0..n-1."""
    from stage1_mpi import collectives

    def run(comm):
        out = np.full(n, np.nan)
        segments = segments_of(out, p)
        segments[comm.rank][...] = segments_of(np.arange(n, dtype=np.float64), p)[comm.rank]
        collectives._ring_all_gather(comm, segments)
        return out, comm.bytes_sent

    return on_ranks(p, run)


def all_gather_values():
    look = "_ring_all_gather: which segment is sent and which is received in each round"
    for p, n in ring_cases():
        want = np.arange(n, dtype=np.float64)
        for rank, (got, _) in enumerate(gathered(p, n)):
            missing, stale, nothing = want.copy(), want.copy(), np.full(n, np.nan)
            segments_of(missing, p)[(rank + 1) % p][...] = np.nan
            segments_of(nothing, p)[rank][...] = segments_of(want, p)[rank]
            for j, segment in enumerate(segments_of(stale, p)):
                if j != rank and n % p == 0:
                    segment[...] = segments_of(want, p)[(rank - 1) % p]
            wrong = [
                (missing, "One segment is missing: the ring has p - 1 rounds."),
                (nothing, "No segment was received: write the received segments into `segments`."),
                (stale, "The same segment is sent in every round: after round 0 a rank sends what it received last."),
            ]
            expect(f"with {p} ranks, the array of rank {rank}", got, want, 0, wrong, look)


def all_gather_bytes():
    for p, n in ring_cases():
        sizes = [segment.nbytes for segment in segments_of(np.zeros(n), p)]
        for rank, (_, sent) in enumerate(gathered(p, n)):
            want = sum(sizes) - sizes[(rank + 1) % p]
            wrong = [(sum(sizes), "A rank sends one segment too many: the ring has p - 1 rounds.")]
            look = "_ring_all_gather: in each of the p - 1 rounds a rank sends one segment, to its right neighbour only"
            expect_equal(f"with {p} ranks, the number of bytes that rank {rank} sends", sent, want, wrong, look)


# -- 1.2 ring reduce-scatter -------------------------------------------------------------------------------------------


def inputs(p, n, seed=0):
    return [random(seed + rank).standard_normal(n) for rank in range(p)]


def scattered(p, n):
    """[(sums[r], bytes sent) of each rank] after the student's reduce-scatter of inputs(p, n)."""
    from stage1_mpi import collectives

    def run(comm):
        x = inputs(p, n)[comm.rank]
        sums = segments_of(np.full(n, np.nan), p)
        collectives._ring_reduce_scatter(comm, segments_of(x, p), sums, np.add)
        if not np.array_equal(x, inputs(p, n)[comm.rank]):
            raise Mismatch(f"rank {comm.rank} changes `parts`", "Write partial sums to `sums`: `parts` is the caller's x.")
        return sums[comm.rank].copy(), comm.bytes_sent

    return on_ranks(p, run)


def reduce_scatter_values():
    look = "_ring_reduce_scatter: which part a rank sends first, and which part it adds in each round"
    for p, n in ring_cases():
        xs = inputs(p, n)
        parts = [[segments_of(x, p)[j] for x in xs] for j in range(p)]  # parts[j][k]: part j of rank k
        for rank, (got, _) in enumerate(scattered(p, n)):
            want = np.sum(parts[rank], axis=0)
            own = parts[rank][rank]
            wrong = [
                (want - own, "The sum lacks this rank's own part: in the last round, add parts[r] and write to sums[r]."),
                (own, "The result is this rank's own part: nothing was received and added."),
                (np.full(want.shape, np.nan), "sums[r] was never written: the result belongs there, after p - 1 rounds."),
                (want + own, "This rank's own part is added twice."),
            ]
            wrong += [(want - part, f"The sum lacks the part of rank {k}.") for k, part in enumerate(parts[rank])]
            for j in range(p):
                if j != rank and parts[j][0].size == want.size:
                    hint = f"Rank {rank} has the sum of part {j}: the index of the parts is off. Part j ends on rank j."
                    wrong.append((np.sum(parts[j], axis=0), hint))
            expect(f"with {p} ranks, sums[r] of rank {rank}", got, want, FP64, wrong, look)


def reduce_scatter_bytes():
    for p, n in ring_cases():
        sizes = [segment.nbytes for segment in segments_of(np.zeros(n), p)]
        for rank, (_, sent) in enumerate(scattered(p, n)):
            want = sum(sizes) - sizes[rank]
            wrong = [(sum(sizes), "A rank sends its result too: the last sum stays on its rank.")]
            look = "_ring_reduce_scatter: a rank sends each part except its own once, to its right neighbour"
            expect_equal(f"with {p} ranks, the number of bytes that rank {rank} sends", sent, want, wrong, look)


def reduce_scatter_buffers():
    from stage1_mpi import collectives

    for p in (2, 3, 4, 5):
        xs = inputs(p, 2 * p)
        total = np.sum(xs, axis=0)
        found = on_ranks(p, lambda comm, xs=xs: collectives.reduce_scatter(comm, xs[comm.rank], algorithm="ring"))
        for rank, got in enumerate(found):
            look = "sums in _ring_reduce_scatter: a buffer is used again two rounds later, so wait for its send before"
            expect(f"with {p} ranks, reduce_scatter() on rank {rank}", got, total[2 * rank : 2 * rank + 2], FP64, look=look)


def ring_all_reduce():
    from stage1_mpi import collectives

    def run(comm, xs, op):
        x = xs[comm.rank].copy()
        return collectives.all_reduce(comm, x, op, algorithm="ring"), collectives.all_reduce(comm, x, op, x, "ring")

    for p, n in [(2, 5), (3, 7), (4, 2)]:
        xs = inputs(p, n)
        for op, want in (("sum", np.sum(xs, axis=0)), ("max", np.max(xs, axis=0))):
            wrong = [(np.sum(xs, axis=0), 'The numbers are added for every op: call the argument `add` in place of "+".')]
            found = on_ranks(p, lambda comm, xs=xs, op=op: run(comm, xs, op))
            for rank, results in enumerate(found):
                for got, place in zip(results, ("", ", with out=x"), strict=True):
                    name = f"with {p} ranks, all_reduce(x, {op!r}{place}) on rank {rank}"
                    expect(name, got, want, FP64, wrong if op == "max" else (), "_ring_reduce_scatter")
                    expect(name, got, found[0][0], 0, look="the ranks, which must have equal bits")


# -- 1.3 buckets -------------------------------------------------------------------------------------------------------

SIZES = {"a": 4, "b": 3, "c": 5, "d": 1, "e": 6}


def planned(sizes, **limits):
    from gpt2core.parallel.data_parallel import plan_buckets

    got = plan_buckets(dict(sizes), **limits)
    if not isinstance(got, list | tuple):
        raise Mismatch("plan_buckets does not return a list", "Return a list of lists of names.")
    return [list(names) if isinstance(names, list | tuple) else names for names in got]


def lists(*words):
    """lists("ed", "c") is [["e", "d"], ["c"]]."""
    return [list(word) for word in words]


def buckets_order():
    wrong = [
        (lists("a", "b", "c", "d", "e"), "The names are in the order of the model: begin with the last name."),
        ([*lists("e", "d", "c", "b", "a"), []], "The last list is empty: return only lists with names."),
        ([[], *lists("e", "d", "c", "b", "a")], "The first list is empty: return only lists with names."),
        (lists("edcba"), "There is one bucket: with least=0 every bucket is closed after its first name."),
    ]
    want = lists("e", "d", "c", "b", "a")
    expect_equal("plan_buckets(sizes)", planned(SIZES), want, wrong, "the order of the names in plan_buckets")
    expect_equal("plan_buckets({})", planned({}), [], [([[]], "Return only lists with names.")], "plan_buckets({})")


def buckets_least():
    wrong = [
        (lists("ed", "cb", "a"), "A bucket with exactly `least` bytes must be closed: compare with >=, not with >."),
        (lists("e", "d", "c", "b", "a"), "The number of bytes is not set back to 0 when a bucket is closed."),
        (lists("e", "dc"), "The last bucket is lost: it is returned even if it has fewer than `least` bytes."),
        (lists("ab", "cd", "e"), "The names are in the order of the model: begin with the last name."),
        (lists("e", "cd", "ab"), "The names of a bucket are in the wrong order: the last name of the model comes first."),
    ]
    look = "the line of plan_buckets that closes a bucket"
    expect_equal("plan_buckets(sizes, least=6)", planned(SIZES, least=6), lists("e", "dc", "ba"), wrong, look)
    wrong = [([], "The last bucket is lost: it is returned even if it has fewer than `least` bytes.")]
    expect_equal("plan_buckets(sizes, least=100)", planned(SIZES, least=100), lists("edcba"), wrong, look)


def buckets_most():
    least = float("inf")
    wrong = [
        (lists("edcba"), "`most` is ignored: close the bucket before a name that would bring it above `most` bytes."),
        (lists("edc", "ba"), "The bucket is closed after the name that brings it above `most`: close it before."),
        (lists("e", "d", "c", "b", "a"), "A bucket may have exactly `most` bytes, and its bytes start again at 0."),
        (lists("e", "dc", "b", "a"), "A bucket may have exactly `most` bytes: compare with >, not with >=."),
        (lists("ed", "c", "b", "a"), "The number of bytes is not set back when `most` closes a bucket."),
    ]
    look = "the line of plan_buckets that compares with `most`"
    got = planned(SIZES, least=least, most=7)
    expect_equal("plan_buckets(sizes, least=inf, most=7)", got, lists("ed", "c", "ba"), wrong, look)
    got = planned(SIZES, least=least, most=2)
    wrong = [([[], *lists("e", "d", "c", "b", "a")], "The first list is empty: return only lists with names.")]
    expect_equal("plan_buckets(sizes, least=inf, most=2)", got, lists("e", "d", "c", "b", "a"), wrong, look)


def buckets_training():
    look = "plan_buckets: every parameter must be in exactly one bucket, from the last one to the first"
    expect_same_training(ParallelConfig(dp="bucket", bucket_mb=BUCKET_MB), look)


# -- 1.4 the slices of ZeRO-1 ------------------------------------------------------------------------------------------


def parts_of_the_arena():
    shapes = list(parameter_shapes(CONFIG))
    for owners, parts in ((1, 1), (1, 2), (2, 2), (1, 3), (3, 3), (4, 4), (64, 64)):
        arena = Arena(shapes, owners)
        segment = arena.size // arena.segments
        edges = [arena.segments * i // parts * segment for i in range(parts + 1)]
        even = [arena.size * i // parts for i in range(parts + 1)]
        for index in range(parts):
            want = slice(edges[index], edges[index + 1])
            wrong = [
                (slice(even[index], even[index + 1]), "The part does not consist of whole segments: round to segments."),
                (slice(arena.segments * index // parts, arena.segments * (index + 1) // parts), "The slice counts segments: multiply by the elements of a segment."),
                (slice(edges[index], edges[index + 1] - 1), "`stop` of a slice is the index after the last element."),
                (slice(edges[index], edges[index] + arena.segments // parts * segment), "The parts do not cover the arena: its last segments belong to no owner."),
            ]  # fmt: skip
            name = f"with {arena.segments} segments of {segment} elements, part({index}, {parts})"
            expect_equal(name, arena.part(index, parts), want, wrong, "the edges in Arena.part")


def owned_pieces():
    from gpt2core.parallel.zero import owned

    arena = real("gpt2core/arena.py").Arena(parameter_shapes(CONFIG), 4)
    part = arena.size // 4
    pieces = {
        "inside one part": (slice(10, 20), [(slice(10, 20), 0)]),
        "in two parts": (slice(part - 5, part + 7), [(slice(part - 5, part), 0), (slice(part, part + 7), 1)]),
        "from the middle of part 1 to the end": (
            slice(part + 9, arena.size),
            [(slice(part + 9, 2 * part), 1), (slice(2 * part, 3 * part), 2), (slice(3 * part, 4 * part), 3)],
        ),
        "equal to part 2": (slice(2 * part, 3 * part), [(slice(2 * part, 3 * part), 2)]),
    }
    whole = [(slice(i * part, (i + 1) * part), i) for i in range(4)]
    for name, (piece, want) in pieces.items():
        clipped = [(slice(max(a.start, piece.start), min(a.stop, piece.stop)), owner) for a, owner in whole]
        touching = [(a, owner) for a, owner in clipped if a.start <= a.stop]
        wrong = [
            (clipped, "Slices without elements are included: yield a slice only if start < stop."),
            (touching, "An empty slice is included: compare with <, not with <=."),
            ([(whole[owner][0], owner) for _, owner in want], "The slices are whole parts: intersect them with the piece."),
            ([(slice(a.start - piece.start, a.stop - piece.start), owner) for a, owner in want], "The slices count from the piece: they count from the arena."),
            ([(owner, a) for a, owner in want], "The pair is (slice, owner), in this order."),
        ]  # fmt: skip
        got = [tuple(pair) for pair in owned(arena, piece, 4)]
        expect_equal(f"owned() of a piece {name}", got, want, wrong, "the intersection of part and piece in owned")


def zero_training():
    look = "Arena.part and owned: the parts of all owners together must be the whole arena, without overlap"
    expect_same_training(ParallelConfig(zero=1, zero_gather="forward", bucket_mb=BUCKET_MB), look)
    expect_same_training(ParallelConfig(zero=1), look)


# -- 1.5 the dual operations -------------------------------------------------------------------------------------------


def through(operation, xs, dys):
    """[(forward, backward) of the student's operation on each rank] for the inputs xs and output gradients dys."""

    def run(comm):
        x = Tensor(xs[comm.rank].copy(), NumpyBackend("fp64"), requires_grad=True)
        y = operation(x, comm)
        if not isinstance(y, Tensor) or not y.requires_grad:
            raise Mismatch("the result is not a Tensor with a gradient", "Return Tensor.from_op(y, (x,), backward).")
        data = np.array(y.data)
        if data.shape == dys[comm.rank].shape:
            y.backward(dys[comm.rank].copy())
        return data, x.grad

    return on_ranks(len(xs), run)


def arrays(p, *shape, seed=0):
    return [random(seed + rank).standard_normal(shape) for rank in range(p)]


def copy_to_group():
    from gpt2core.ops import copy_to_group

    x, dys = arrays(1, 3, 4)[0], arrays(3, 3, 4, seed=10)
    for rank, (y, dx) in enumerate(through(copy_to_group, [x] * 3, dys)):
        wrong = [(3 * x, "The forward pass adds the ranks' x: it must return x, which is equal on all ranks.")]
        expect(f"copy_to_group(x) on rank {rank}", y, x, FP64, wrong, "the forward pass of copy_to_group")
        wrong = [
            (dys[rank], "The gradient of rank r is only its own dy: backward must add the gradients of all ranks."),
            (np.mean(dys, axis=0), "The gradients are averaged: backward must add them."),
        ]
        expect(f"the gradient on rank {rank}", dx, np.sum(dys, axis=0), FP64, wrong, "the backward pass of copy_to_group")


def reduce_from_group():
    from gpt2core.ops import reduce_from_group

    xs, dy = arrays(3, 3, 4), arrays(1, 3, 4, seed=10)[0]
    for rank, (y, dx) in enumerate(through(reduce_from_group, xs, [dy] * 3)):
        wrong = [
            (xs[rank], "The result of rank r is only its own x: the forward pass must add the x of all ranks."),
            (np.mean(xs, axis=0), "The inputs are averaged: the forward pass must add them."),
        ]
        expect(f"reduce_from_group(x) on rank {rank}", y, np.sum(xs, axis=0), FP64, wrong, "the forward pass of reduce_from_group")
        wrong = [(3 * dy, "backward adds the gradients of the ranks: dy is equal on all ranks, so return dy.")]
        expect(f"the gradient on rank {rank}", dx, dy, FP64, wrong, "the backward pass of reduce_from_group")


def gather_from_group():
    from gpt2core.ops import gather_from_group

    xs, dy = arrays(3, 2, 5, 4), arrays(1, 2, 5, 12, seed=10)[0]
    want = np.concatenate(xs, axis=-1)
    for rank, (y, dx) in enumerate(through(gather_from_group, xs, [dy] * 3)):
        wrong = [
            (np.concatenate(xs).reshape(want.shape), "The columns of the ranks are mixed up: all_gather joins along axis 0, so swap the axes of ranks and rows before reshape."),
            (np.concatenate(xs[::-1], axis=-1), "The ranks are in reverse order."),
        ]  # fmt: skip
        expect(f"gather_from_group(x) on rank {rank}", y, want, FP64, wrong, "the forward pass of gather_from_group")
        own = dy[..., 4 * rank : 4 * rank + 4]
        wrong = [
            (dy[..., :4], "Every rank returns the columns of rank 0: use group.rank."),
            (3 * own, "backward adds the gradients of the ranks: dy is equal on all ranks, so take its columns."),
            (dy[..., rank::3], "The columns are taken with a stride: rank r has the columns [r K, (r + 1) K)."),
        ]
        expect(f"the gradient on rank {rank}", dx, own, FP64, wrong, "the backward pass of gather_from_group")


def tensor_parallel_model():
    want = losses(Solo(), NumpyBackend())
    parallel = ParallelConfig(tp=2)
    for rank, got in enumerate(on_ranks(2, lambda world: losses(world, NumpyBackend(), parallel))):
        look = "the backward passes: an all-reduce is missing or superfluous in copy_to_group or reduce_from_group"
        expect(f"on rank {rank}, the loss of step 0 to 2", got[:, 0], want[:, 0], CURVE, look=look)
        expect(f"on rank {rank}, the gradient norm of step 0 to 2", got[:, 1], want[:, 1], 10 * CURVE, look=look)
