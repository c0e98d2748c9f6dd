"""Checks of exercise 1.2: the reduce-scatter of a ring, and the all-reduce that consists of both, on threads."""

# p ranks

import numpy as np

from exercises.checks.common import WatchedSends, on_ranks, random
from exercises.checks.ring_all_gather import parts_of, ring_cases
from exercises.compare import Mismatch, expect, expect_equal

FP64 = 1e-12  # relative norm: a few roundings of 1e-16
WAITS = (
    "Before round t, wait for the handles of round t - 2, whose buffer is used again. "
    "Before you return, wait for those of the last two rounds."
)


def inputs(p, n, seed=0):
    return [random(seed + rank).standard_normal(n) for rank in range(p)]


def scattered(p, n):
    """[(sums[r], bytes sent) of each rank] after the student's reduce-scatter of inputs(p, n)."""
    from stage1_mpi import collectives

    def run(comm):
        x = inputs(p, n)[comm.rank]
        sums = parts_of(np.full(n, np.nan), p)
        collectives._ring_reduce_scatter(comm, parts_of(x, p), sums, np.add)
        if not np.array_equal(x, inputs(p, n)[comm.rank]):
            raise Mismatch(
                f"rank {comm.rank} changes `parts`", "Write partial sums to `sums`: `parts` is the caller's x."
            )
        return sums[comm.rank].copy(), comm.bytes_sent

    return on_ranks(p, run)


def reduce_scatter_values():
    look = "_ring_reduce_scatter: which part a rank sends first, and which part it adds in each round"
    for p, n in ring_cases():
        xs = inputs(p, n)
        parts = [[parts_of(x, p)[j] for x in xs] for j in range(p)]  # parts[j][k]: part j of rank k
        for rank, (got, _) in enumerate(scattered(p, n)):
            want = np.sum(parts[rank], axis=0)
            own = parts[rank][rank]
            wrong = [
                (
                    want - own,
                    "The sum lacks this rank's own part: in the last round, add parts[r] and write to sums[r].",
                ),
                (own, "The result is this rank's own part: nothing was received and added."),
                (
                    np.full(want.shape, np.nan),
                    "sums[r] was never written: the result belongs there, after p - 1 rounds.",
                ),
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
        sizes = [part.nbytes for part in parts_of(np.zeros(n), p)]
        for rank, (_, sent) in enumerate(scattered(p, n)):
            want = sum(sizes) - sizes[rank]
            wrong = [(sum(sizes), "A rank sends its result too: the last sum stays on its rank.")]
            look = "_ring_reduce_scatter: a rank sends each part except its own once, to its right neighbour"
            expect_equal(f"with {p} ranks, the number of bytes that rank {rank} sends", sent, want, wrong, look)


def reduce_scatter_buffers():
    from stage1_mpi import collectives

    def run(ranks, xs):
        comm = WatchedSends(ranks)
        try:
            result = collectives.reduce_scatter(comm, xs[comm.rank], algorithm="ring")
            comm.expect_none_pending()
        except Mismatch as error:
            raise Mismatch(str(error), WAITS) from None
        return result

    for p in (5, 4, 3, 2):  # first the ranks that use a buffer twice
        xs = inputs(p, 2 * p)
        total = np.sum(xs, axis=0)
        found = on_ranks(p, lambda ranks, xs=xs: run(ranks, xs))
        for rank, got in enumerate(found):
            look = "sums in _ring_reduce_scatter: a buffer is used again two rounds later, so wait for its send before"
            expect(
                f"with {p} ranks, reduce_scatter() on rank {rank}", got, total[2 * rank : 2 * rank + 2], FP64, look=look
            )


def ring_all_reduce():
    from stage1_mpi import collectives

    def run(comm, xs, op):
        x = xs[comm.rank].copy()
        return collectives.all_reduce(comm, x, op, algorithm="ring"), collectives.all_reduce(comm, x, op, x, "ring")

    for p, n in [(2, 5), (3, 7), (4, 2)]:
        xs = inputs(p, n)
        for op, want in (("sum", np.sum(xs, axis=0)), ("max", np.max(xs, axis=0))):
            wrong = [
                (np.sum(xs, axis=0), 'The numbers are added for every op: call the argument `add` in place of "+".')
            ]
            found = on_ranks(p, lambda comm, xs=xs, op=op: run(comm, xs, op))
            for rank, results in enumerate(found):
                for got, place in zip(results, ("", ", with out=x"), strict=True):
                    name = f"with {p} ranks, all_reduce(x, {op!r}{place}) on rank {rank}"
                    expect(name, got, want, FP64, wrong if op == "max" else (), "_ring_reduce_scatter")
                    expect(name, got, found[0][0], 0, look="the ranks, which must have equal bits")
