"""Checks of exercise 3.2: NCCL's calls on threads as ranks, with fake GPUs."""

# p ranks

import traceback

import numpy as np

from exercises.checks.canonical_sum import expect_bits, in_turn, mixed
from exercises.checks.common import on_ranks
from exercises.compare import Mismatch, expect, expect_equal
from gpt2core.tree_sum import tree_sum as canonical_sum
from stage3_mpi_cuda import nccl_collectives
from stage3_mpi_cuda.nccl_collectives import NcclCollectives
from testing.fake_gpu import fake_gpu

UNEVEN = "The parts have different lengths, because p does not divide n: use _send_recv in place of allGather."


def on_gpus(p, function):
    """[function(collectives) of each rank]; collectives: NcclCollectives on a fake GPU, ranks are threads."""

    def run(threads):
        return function(NcclCollectives(threads, fake_gpu(threads)))

    return on_ranks(p, run)


def part_edges():
    for n, p in ((12, 3), (7, 2), (7, 3), (2, 4), (0, 2)):
        want = [n * j // p for j in range(p + 1)]
        rounded = [min(n, -(-n // p) * j) for j in range(p + 1)]
        wrong = [
            (want[:-1], "The last edge is missing: there are p + 1 edges, from 0 to n."),
            ([n // p * j for j in range(p + 1)], "The parts do not cover all elements: the last edge is n."),
            (
                [*[n // p * j for j in range(p)], n],
                "The last part has all remaining elements: lengths differ by at most one.",
            ),
            (rounded, "With parts of n / p, rounded up, the last one can be much shorter: use n * j // p."),
        ]
        expect_equal(f"part_edges({n}, {p})", list(nccl_collectives.part_edges(n, p)), want, wrong, "part_edges")


def expected_parts(xs, rank):
    edges = [xs[0].size * j // len(xs) for j in range(len(xs) + 1)]
    return np.stack([x[edges[rank] : edges[rank + 1]] for x in xs])


def exchange_parts():
    for p in (2, 3):
        xs = mixed(p, 3 * p)
        edges = [3 * j for j in range(p + 1)]
        found = on_gpus(p, lambda comm, xs=xs, edges=edges: np.array(comm._exchange_parts(xs[comm.rank], edges)))
        for rank, got in enumerate(found):
            own = np.stack(np.split(xs[rank], p))
            wrong = [(own, "The rows are the parts of this rank's own x: row j is what rank j sent.")]
            wrong += [
                (expected_parts(xs, j), f"Rank {rank} received part {j} of every rank: send part j to rank j.")
                for j in range(p)
                if j != rank
            ]
            look = "_exchange_parts: send part j of x to rank j, receive row j of the result from rank j"
            expect(f"with {p} ranks, the parts that rank {rank} has", got, expected_parts(xs, rank), 0, wrong, look)


def expect_all_reduce(p, n):
    xs = mixed(p, n)
    want = canonical_sum(xs)

    def run(comm):
        x = xs[comm.rank].copy()
        try:
            separate = np.array(comm.all_reduce(x))
        except Exception as error:
            if n % p and any(frame.name == "allGather" for frame in traceback.extract_tb(error.__traceback__)):
                raise Mismatch(f"allGather fails for {n} elements on {p} ranks", UNEVEN) from error
            raise
        if not np.array_equal(x, xs[comm.rank]):
            raise Mismatch(f"on rank {comm.rank}, x is changed", "Write to `out`, not to x.")
        return separate, np.array(comm.all_reduce(x, out=x))

    for rank, results in enumerate(on_gpus(p, run)):
        edges = [n * j // p for j in range(p + 1)]
        own = slice(edges[rank], edges[rank + 1])
        only_own = xs[rank].copy()
        only_own[own] = want[own]
        wrong = [
            (xs[rank], "The result is this rank's x: nothing was added."),
            (only_own, "Only this rank's part is a sum: after the sum, an all-gather sends every part to all ranks."),
            (in_turn(xs), "The ranks' arrays are added one after another: use tree_sum."),
            (in_turn(xs[::-1]), "The ranks' arrays are added one after another: use tree_sum."),
        ]
        for got, place in zip(results, ("", " with out=x"), strict=True):
            look = "_canonical_all_reduce: exchange the parts, add them with tree_sum, all-gather the sums"
            expect_bits(f"the all-reduce of {n} elements on rank {rank} of {p}{place}", got, want, wrong, look)


def canonical_all_reduce():
    for p in (2, 3, 4):
        expect_all_reduce(p, 5 * p)


def canonical_uneven():
    for p, n in ((2, 7), (3, 7), (4, 2), (3, 0)):
        expect_all_reduce(p, n)
