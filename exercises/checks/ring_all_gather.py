"""Checks of exercise 1.1: the all-gather of a ring, on threads as ranks."""

# p ranks

import numpy as np

from exercises.checks.common import WatchedSends, on_ranks
from exercises.compare import Mismatch, expect, expect_equal
from gpt2core.errors import ConfigError


def parts_of(x, p):
    return [x[x.size * j // p : x.size * (j + 1) // p] for j in range(p)]


def ring_cases():
    """(p, number of elements): first equal parts, then parts whose lengths differ."""
    return [(p, p * 3 + rest) for rest in (0, 1) for p in (2, 3, 4)]


def gathered(p, n):
    """[(the array after the student's all-gather, bytes sent) of each rank]; rank r begins with part r of 0..n-1."""
    from stage1_mpi import collectives

    def run(ranks):
        comm, out = WatchedSends(ranks), np.full(n, np.nan)
        parts = parts_of(out, p)
        parts[comm.rank][...] = parts_of(np.arange(n, dtype=np.float64), p)[comm.rank]
        views = list(parts)
        try:
            collectives._ring_all_gather(comm, parts)
        except (ConfigError, IndexError) as error:
            if isinstance(error, IndexError) or "is not a rank" in str(error):
                raise Mismatch(
                    f"{type(error).__name__}: {error}",
                    "Ranks and parts are counted modulo p: (r + 1) % p, (r - 1) % p, (r - t) % p.",
                ) from error
            raise
        for j, (part, view) in enumerate(zip(parts, views, strict=True)):
            if part is not view:
                raise Mismatch(
                    f"parts[{j}] is replaced by another array",
                    f"Write into the view, which is a part of the caller's array: parts[{j}][...] = new_array, or "
                    "receive into parts[i] itself.",
                )
        comm.expect_none_pending()
        return out, comm.bytes_sent

    return on_ranks(p, run)


def exchanged(p, n, indices):
    """[the array of each rank] after a ring. indices(r, step): the parts that rank r sends and receives."""
    arrays = [np.full(n, np.nan) for _ in range(p)]
    for rank, array in enumerate(arrays):
        parts_of(array, p)[rank][...] = parts_of(np.arange(n, dtype=np.float64), p)[rank]
    for step in range(p - 1):
        sent = [parts_of(array, p)[indices(rank, step)[0] % p].copy() for rank, array in enumerate(arrays)]
        for rank, array in enumerate(arrays):
            parts_of(array, p)[indices(rank, step)[1] % p][...] = sent[rank - 1]
    return arrays


def all_gather_values():
    look = "_ring_all_gather: which part is sent and which is received in each round"
    for p, n in sorted(ring_cases(), key=lambda case: case[0] == 2):  # with 2 ranks, many mistakes have equal results
        want = np.arange(n, dtype=np.float64)
        for rank, (got, sent) in enumerate(gathered(p, n)):
            missing, stale, nothing = want.copy(), want.copy(), np.full(n, np.nan)
            parts_of(missing, p)[(rank + 1) % p][...] = np.nan
            parts_of(nothing, p)[rank][...] = parts_of(want, p)[rank]
            for j, part in enumerate(parts_of(stale, p)):
                if j != rank and n % p == 0:
                    part[...] = parts_of(want, p)[(rank - 1) % p]
            wrong = [(nothing, "No part was received: in each round, call _sendrecv to receive into `parts`.")]
            if n % p == 0:
                hint = (
                    "Is `to` the rank r + 1 and `source` the rank r - 1? Then a part is wrong: in round t, "
                    "send part r - t and receive part r - t - 1: minus, not plus."
                )
                if sent == want.nbytes * (p - 1) // p:  # not a round too few
                    wrong.append((exchanged(p, n, lambda r, step: (r + step, r - step - 1))[rank], hint))
                wrong.append((exchanged(p, n, lambda r, step: (r + step, r + step + 1))[rank], hint))
            wrong += [
                (missing, "One part is missing: the ring has p - 1 rounds."),
                (stale, "The same part is sent in every round: after round 0 a rank sends what it received last."),
            ]
            expect(f"with {p} ranks, the array of rank {rank}", got, want, 0, wrong, look)


def all_gather_bytes():
    for p, n in ring_cases():
        sizes = [part.nbytes for part in parts_of(np.zeros(n), p)]
        for rank, (_, sent) in enumerate(gathered(p, n)):
            want = sum(sizes) - sizes[(rank + 1) % p]
            wrong = [(sum(sizes), "A rank sends one part too many: the ring has p - 1 rounds.")]
            look = "_ring_all_gather: in each of the p - 1 rounds a rank sends one part, to its right neighbour only"
            expect_equal(f"with {p} ranks, the number of bytes that rank {rank} sends", sent, want, wrong, look)
