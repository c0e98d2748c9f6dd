"""Every algorithm of stage1_mpi.collectives on threads: values of the oracle, textbook bytes, any number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from gpt2core.communicator import REDUCTIONS
from gpt2core.errors import ConfigError
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.tree_sum import tree_sum
from stage1_mpi import collectives
from tests.support.collectives import ALGORITHMS, DTYPES, assert_same, check_reduced, rank_inputs

RANKS = [1, 2, 3, 4, 5, 8]
LENGTHS = [0, 1, 7, 40]  # zero, fewer than ranks, divisible and not


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Small chunks, so that even short arrays are sent as several messages."""
    monkeypatch.setattr(collectives, "CHUNK", 64)


def every_sum(comm, algorithm, op, dtype):
    """All lengths of all-reduce, in place and out of place, and of reduce-scatter."""
    for length in LENGTHS:
        xs = rank_inputs(length, comm.size, (length,), dtype)
        x = xs[comm.rank].copy()
        result = collectives.all_reduce(comm, x, op, algorithm=algorithm)
        check_reduced(result, xs, op, algorithm)
        assert_same(x, xs[comm.rank])
        assert collectives.all_reduce(comm, x, op, out=x, algorithm=algorithm) is x
        assert_same(x, result)  # the same order in place

        longs = rank_inputs(length + 1, comm.size, (comm.size * length,), dtype)
        long, mine = longs[comm.rank].copy(), slice(comm.rank * length, (comm.rank + 1) * length)
        want = collectives.all_reduce(comm, long, op, algorithm=algorithm)
        assert_same(collectives.reduce_scatter(comm, long, op, algorithm=algorithm), want[mine])
        assert_same(long, longs[comm.rank])
        collectives.reduce_scatter(comm, long, op, out=long[mine], algorithm=algorithm)
        assert_same(long[mine], want[mine])
    return result


@pytest.mark.parametrize("algorithm, op, dtype", [  # each pair of them; the other combinations are long
    pytest.param(algorithm, op, dtype, marks=[] if (i + j + k) % 3 == 0 else pytest.mark.long)
    for i, algorithm in enumerate(ALGORITHMS) for j, op in enumerate(REDUCTIONS) for k, dtype in enumerate(DTYPES)
])  # fmt: skip
def test_sums_equal_their_oracle_on_any_number_of_ranks(algorithm, op, dtype):
    for ranks in RANKS:
        first, *others = run_ranks(ranks, every_sum, algorithm, op, dtype)
        for other in others:
            assert_same(other, first)  # all ranks have the same bits


def every_data_movement(comm, dtype):
    """All-gather, all-to-all and broadcast of zero or more rows, in place and out of place."""
    p, r = comm.size, comm.rank
    for rows in (0, 1, 13):
        xs = [(x % 251).astype(dtype) for x in rank_inputs(rows, p, (rows, 3), np.int64)]
        longs = [(x % 251).astype(dtype) for x in rank_inputs(rows + 1, p, (p * rows, 3), np.int64)]
        mine = slice(r * rows, (r + 1) * rows)
        exchanged = np.concatenate([long[mine] for long in longs])
        x, long = xs[r].copy(), longs[r].copy()
        assert_same(collectives.all_gather(comm, x), np.concatenate(xs))
        assert_same(collectives.all_gather(comm, x.T), np.concatenate([x.T for x in xs]))
        assert_same(collectives.all_to_all(comm, long), exchanged)
        for root in {0, p // 2, p - 1}:
            assert_same(collectives.broadcast(comm, x, root), xs[root])
        assert_same(x, xs[r])
        assert_same(long, longs[r])
        gathered = np.zeros((p * rows, 3), dtype)
        gathered[mine] = x
        assert collectives.all_gather(comm, gathered[mine], out=gathered) is gathered
        assert_same(gathered, np.concatenate(xs))
        assert collectives.all_to_all(comm, long, out=long) is long
        assert_same(long, exchanged)
        assert collectives.broadcast(comm, x, p - 1, out=x) is x
        assert_same(x, xs[p - 1])


@pytest.mark.parametrize("dtype", [*DTYPES, np.uint8, np.uint16, np.float16, np.bool_])
def test_data_movements_equal_their_oracle_with_any_dtype(dtype):
    for ranks in RANKS:
        run_ranks(ranks, every_data_movement, dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_strided_and_scalar_inputs(algorithm):
    def main(comm):
        xs = rank_inputs(1, comm.size, (6, 10), np.float64)
        got = collectives.all_reduce(comm, xs[comm.rank].T, algorithm=algorithm)
        check_reduced(got, [x.T for x in xs], "sum", algorithm)
        backwards = xs[comm.rank].copy()
        got = collectives.all_reduce(
            comm, backwards[::-1], out=backwards, algorithm=algorithm
        )  # x is a reversed view of out
        check_reduced(got, [x[::-1] for x in xs], "sum", algorithm)
        scalars = rank_inputs(2, comm.size, (), np.float32)
        got = collectives.all_reduce(comm, scalars[comm.rank], algorithm=algorithm)
        check_reduced(got, [np.asarray(x) for x in scalars], "sum", algorithm)

    for ranks in RANKS:
        run_ranks(ranks, main)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 11), st.integers(0, 100), st.integers(0, 2**32 - 1), st.sampled_from(ALGORITHMS),
    st.sampled_from(DTYPES), st.sampled_from(list(REDUCTIONS)),
)  # fmt: skip
def test_any_rank_count_and_length(ranks, length, seed, algorithm, dtype, op):
    xs = rank_inputs(seed, ranks, (length,), dtype)
    for got in run_ranks(ranks, lambda comm: collectives.all_reduce(comm, xs[comm.rank], op, algorithm=algorithm)):
        check_reduced(got, xs, op, algorithm)


def test_only_canonical_and_tree_have_the_canonical_order():
    """On eight ranks, the other algorithms give other bits."""
    xs = rank_inputs(3, 8, (1000,), np.float32)
    want = tree_sum(xs)
    for algorithm in ALGORITHMS:
        got = run_ranks(8, lambda comm: collectives.all_reduce(comm, xs[comm.rank], algorithm=algorithm))[0]  # noqa: B023
        assert_allclose(got, want, rtol=1e-3, atol=1e-3)  # values are up to 1e4 and may cancel
        assert (got != want).any() == (algorithm not in ("canonical", "tree"))


@pytest.mark.parametrize("algorithm", ["canonical", "tree"])
def test_zeros_and_nans_are_the_same_on_all_ranks_and_in_the_tree(algorithm):
    """Of two NaN the left one is the result, so its bits depend on the order; on some CPUs those of min(+0, -0) too."""
    xs = [np.array([0.0, -0.0, np.nan, 1.0][k:] + [0.0, -0.0, np.nan, 1.0][:k] + [np.nan] * 4) for k in range(4)]
    for rank, x in enumerate(xs):
        x.view(np.uint64)[np.isnan(x)] += np.uint64(rank + 1)  # NaN of this rank's own bits
    for op in REDUCTIONS:
        tree = REDUCTIONS[op](REDUCTIONS[op](xs[0], xs[1]), REDUCTIONS[op](xs[2], xs[3]))
        for got in run_ranks(4, lambda comm: collectives.all_reduce(comm, xs[comm.rank], op, algorithm=algorithm)):  # noqa: B023
            assert_same(got.view(np.uint64), tree.view(np.uint64))


# -- bytes -------------------------------------------------------------------------------------------------------------


def below(rank, p):
    """Number of children of `rank` in the binomial tree: the ranks that give `rank` without their lowest bit."""
    return sum(1 for other in range(1, p) if other & (other - 1) == rank)


def pairing(rank, p):
    """(largest power of two of ranks, whether `rank` is in a pair, whether it takes part if so)."""
    core = 1 << (p.bit_length() - 1)
    return core, rank < 2 * (p - core), rank % 2 == 1


def textbook(algorithm, rank, p, n):
    """Bytes that `rank` of p sends in an all-reduce of n bytes."""
    if algorithm == "root":
        return n if rank else (p - 1) * n
    if algorithm == "tree":
        return n * (below(rank, p) + (rank > 0))
    core, paired, takes_part = pairing(rank, p)
    if algorithm == "halving-doubling" and paired:
        return n + 2 * (core - 1) * n // core if takes_part else n
    if algorithm == "halving-doubling":
        return 2 * (core - 1) * n // core
    return 2 * (p - 1) * n // p  # the minimum, on every rank


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_sent_are_the_textbook_volume(algorithm, ranks):
    x = np.ones(ranks * 120, np.float32)
    n = x.nbytes

    def sent(comm, call, *args, **options):
        before = comm.bytes_sent
        call(comm, *args, **options)
        return comm.bytes_sent - before

    def main(comm):
        return [
            sent(comm, collectives.all_reduce, x, algorithm=algorithm),
            sent(comm, collectives.reduce_scatter, x, algorithm=algorithm),
            sent(comm, collectives.all_gather, x),
            sent(comm, collectives.all_to_all, x),
            sent(comm, collectives.broadcast, x),
        ]

    for rank, (reduced, scattered, gathered, exchanged, broadcast) in enumerate(run_ranks(ranks, main)):
        assert reduced == textbook(algorithm, rank, ranks, n)
        half = (ranks - 1) * n // ranks
        assert scattered == (half if algorithm in ("ring", "canonical") else reduced)
        assert gathered == (ranks - 1) * n
        assert exchanged == half
        assert broadcast == n * below(rank, ranks)


def test_the_total_of_all_ranks_is_the_textbook_volume_for_an_odd_length():
    """Segments differ by one element, so each rank may send slightly more or less than 2 (p-1)/p n."""
    x = np.ones(1003, np.float32)

    def main(comm, algorithm):
        collectives.all_reduce(comm, x, algorithm=algorithm)
        return comm.bytes_sent

    for ranks in RANKS:
        for algorithm in ("ring", "canonical"):
            assert sum(run_ranks(ranks, main, algorithm)) == 2 * (ranks - 1) * x.nbytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_elements_that_a_rank_sends_are_known_before_for_every_number_of_ranks(algorithm):
    def main(comm, n):
        sent = []
        for call, x in ((collectives.all_reduce, n), (collectives.reduce_scatter, n * comm.size)):
            before = comm.bytes_sent
            call(comm, np.ones(x, np.float32), algorithm=algorithm)
            sent.append((comm.bytes_sent - before) // 4)
        return sent

    for ranks in range(2, 9):
        for n in (0, 1, 13, 1003):
            for rank, (reduced, scattered) in enumerate(run_ranks(ranks, main, n)):
                assert reduced == collectives.all_reduce_elements(algorithm, n, ranks, rank)
                assert scattered == collectives.reduce_scatter_elements(algorithm, n * ranks, ranks, rank)


# -- invalid arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda comm: collectives.all_reduce(comm, np.ones(3), algorithm="rings"), "'rings': choose one of root, ring"),
        (lambda comm: collectives.reduce_scatter(comm, np.ones(4), algorithm="x"), "unknown algorithm 'x'"),
        (lambda comm: collectives.all_reduce(comm, np.ones(3), "mean"), "unknown reduction 'mean'"),
        (lambda comm: collectives.all_reduce(comm, np.ones(3), out=np.ones(6)[::2]), "non-contiguous"),
        (lambda comm: collectives.reduce_scatter(comm, np.ones(3)), "length 3 is not divisible by 2 ranks"),
        (lambda comm: collectives.all_to_all(comm, np.ones(3)), "length 3 is not divisible by 2 ranks"),
        (lambda comm: collectives.all_gather(comm, np.float32(1)), "no axis 0"),
        (lambda comm: collectives.broadcast(comm, np.ones(3), root=2), "root 2 is not a rank of a group of 2"),
    ],
)
def test_bad_arguments_are_config_errors(call, message):
    with pytest.raises(ConfigError, match=message):
        run_ranks(2, call)
