"""Checks that every Communicator must pass, on threads, under mpiexec and on GPUs, and their inputs and oracles."""

import functools

import numpy as np
from numpy.testing import assert_array_equal

from gpt2core.communicator import REDUCTIONS
from gpt2core.tree_sum import tree_sum
from stage1_mpi import collectives

ALGORITHMS = list(collectives.ALL_REDUCE)
DTYPES = [np.float32, np.float64, np.int32, np.int64]
REDUCED = {"sum": tree_sum, "min": lambda xs: np.min(xs, axis=0), "max": lambda xs: np.max(xs, axis=0)}


def random_values(rng, shape, dtype):
    """Random values of mixed magnitude, so that the order of a float sum changes its bits."""
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-(10**6), 10**6, shape).astype(dtype)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 5, shape)).astype(dtype)


def rank_inputs(seed, size, shape, dtype):
    """[x of each rank], computed on every rank from the seed: an oracle needs no communication."""
    rng = np.random.default_rng(seed)
    return [random_values(rng, shape, dtype) for _ in range(size)]


def assert_same(got, want):
    assert got.dtype == want.dtype
    assert_array_equal(got, want, strict=True)


def check_every_collective(comm, seed, rows, dtype):
    """Assert that each collective equals its oracle; every Communicator must pass this."""
    p, r = comm.size, comm.rank
    xs = rank_inputs(seed, p, (rows, 3), dtype)
    longs = rank_inputs(seed + 1, p, (p * rows, 3), dtype)  # axis 0 in p equal parts
    root = seed % p
    x, long, mine = xs[r].copy(), longs[r].copy(), slice(r * rows, (r + 1) * rows)

    for op, reduced in REDUCED.items():
        assert_same(comm.all_reduce(x, op), reduced(xs))
        assert_same(comm.reduce_scatter(long, op), reduced(longs)[mine])
    assert_same(comm.all_gather(x), np.concatenate(xs))
    assert_same(comm.all_to_all(long), np.concatenate([other[mine] for other in longs]))
    assert_same(comm.broadcast(x, root), xs[root])
    assert_same(x, xs[r])  # a call without out leaves its input unchanged
    assert_same(long, longs[r])

    # non-contiguous inputs: a transpose, and every other row read backwards
    assert_same(comm.all_reduce(np.asfortranarray(x)), tree_sum(xs))
    stretched = np.repeat(long, 2, axis=0)[::2][::-1]
    assert_same(comm.reduce_scatter(stretched), tree_sum([other[::-1] for other in longs])[mine])
    assert_same(comm.all_gather(x.T), np.concatenate([other.T for other in xs]))
    assert_same(comm.all_to_all(stretched), np.concatenate([other[::-1][mine] for other in longs]))
    assert_same(comm.broadcast(x.T, root), xs[root].T)

    # out is filled and returned, also if it is x or contains x
    buffer = x.copy()
    assert comm.all_reduce(buffer, out=buffer) is buffer
    assert_same(buffer, tree_sum(xs))
    buffer = np.empty_like(long)
    buffer[mine] = x
    assert comm.all_gather(buffer[mine], out=buffer) is buffer
    assert_same(buffer, np.concatenate(xs))
    buffer = long.copy()
    comm.reduce_scatter(buffer, out=buffer[mine])
    assert_same(buffer[mine], tree_sum(longs)[mine])
    buffer = long.copy()
    assert comm.all_to_all(buffer, out=buffer) is buffer
    assert_same(buffer, np.concatenate([other[mine] for other in longs]))
    buffer = x.copy()
    assert comm.broadcast(buffer, root, out=buffer) is buffer
    assert_same(buffer, xs[root])

    # after a blocking call x belongs to the caller: overwriting it changes no result
    buffer, out = x.copy(), np.empty_like(x)
    comm.all_reduce(buffer, out=out)
    buffer[...] = r + 77
    assert_same(out, tree_sum(xs))

    # several pending operations, waited for in reverse order
    handles = [comm.all_reduce_start(x), comm.all_gather_start(x), comm.reduce_scatter_start(long, "max"),
               comm.all_to_all_start(long), comm.broadcast_start(x, root)]  # fmt: skip
    wants = [tree_sum(xs), np.concatenate(xs), np.max(longs, axis=0)[mine],
             np.concatenate([other[mine] for other in longs]), xs[root]]  # fmt: skip
    for handle, want in list(zip(handles, wants, strict=True))[::-1]:
        assert_same(handle.wait(), want)
        assert handle.wait() is handle.wait()
    comm.barrier()


def check_reduced(got, xs, op, algorithm):
    """Assert that `got` is the reduction of xs: bit for bit if the order is canonical or the result exact."""
    exact = algorithm in ("canonical", "tree") or op != "sum" or np.issubdtype(xs[0].dtype, np.integer)
    if exact:
        assert_same(got, np.asarray(tree_sum(xs) if op == "sum" else functools.reduce(REDUCTIONS[op], xs)))
        return
    assert got.dtype == xs[0].dtype and got.shape == xs[0].shape
    # p-1 roundings, each half a unit in the last place of a partial sum, which is at most the sum of all |x|
    bound = len(xs) * np.finfo(got.dtype).eps * np.sum(np.abs(xs), axis=0, dtype=np.float64)
    assert (np.abs(got - np.sum(xs, axis=0, dtype=np.float64)) <= bound).all()
