"""Checks of exercise 1.1: the all-gather of a ring, on threads as ranks."""

# p ranks

import numpy as np

from exercises.checks.common import on_ranks
from exercises.compare import expect, expect_equal


def segments_of(x, p):
    return [x[x.size * j // p : x.size * (j + 1) // p] for j in range(p)]


def ring_cases():
    """(p, number of elements): first equal segments, then segments whose lengths differ."""
    return [(p, p * 3 + rest) for rest in (0, 1) for p in (2, 3, 4)]


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
