"""Checks of case 3: the collectives end and are right, if a send ends only when it is received."""

import numpy as np

from exercises.checks.common import WatchedSends, random
from exercises.compare import expect, expect_equal
from gpt2core.errors import counted
from gpt2core.parallel.thread_communicator import run_ranks

SECONDS = 2  # a rank that waits longer is taken to wait forever
LENGTHS = 1, 7, 64, 40_000


class Counted(WatchedSends):
    """It also counts the messages that are sent, and refuses a barrier."""

    def __init__(self, comm):
        super().__init__(comm)
        self.messages = 0

    def send_start(self, x, to, tag=0):
        self.messages += 1
        return super().send_start(x, to, tag)


def results(p, n, algorithm):
    """[(all_reduce, bytes sent, messages, whether a send is pending)] of each rank, for inputs(p, n)."""
    from stage1_mpi import collectives

    def run(ranks):
        comm = Counted(ranks)
        out = collectives.all_reduce(comm, inputs(p, n)[comm.rank], algorithm=algorithm)
        return out, ranks.bytes_sent, comm.messages, comm

    return run_ranks(p, run, timeout=SECONDS)


def inputs(p, n):
    return [random(rank).integers(-9, 9, n).astype(np.float64) for rank in range(p)]  # their sums are exact


def expect_sums(cases):
    for p, n, algorithm in cases:
        for rank, (got, *_) in enumerate(results(p, n, algorithm)):
            name = f"{algorithm}, {counted(n, 'element')} on {p} ranks: the sum of rank {rank}"
            expect(name, got, np.sum(inputs(p, n), axis=0), 0)


def two_ranks_end():
    expect_sums([(2, n, algorithm) for n in LENGTHS for algorithm in ("canonical", "ring")])


def number_of_ranks_does_not_matter():
    expect_sums(
        [(p, n, name) for p in (3, 4, 5) for n in LENGTHS for name in ("canonical", "ring", "halving-doubling")]
    )


def every_send_is_complete():
    for p in (2, 3, 4):
        for *_, comm in results(p, 64, "canonical"):
            comm.expect_none_pending()


def bytes_and_messages_are_those_of_the_repository():
    from stage1_mpi.collectives import all_reduce_elements

    for p, n, algorithm in [(2, 64, "canonical"), (4, 64, "canonical"), (4, 64, "ring"), (3, 7, "canonical")]:
        rounds = 2 * (p - 1) if p & (p - 1) or algorithm == "ring" else 2 * (p.bit_length() - 1)
        for rank, (_, sent, messages, _) in enumerate(results(p, n, algorithm)):
            name = f"{algorithm}, {counted(n, 'element')} on {p} ranks: of rank {rank}"
            expect_equal(f"{name} the bytes that it sends", sent, 8 * all_reduce_elements(algorithm, n, p, rank))
            expect_equal(f"{name} the messages that it sends", messages, rounds)
