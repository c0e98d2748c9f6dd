"""Oracles of the collectives: inputs that every rank can compute, and checks that any communicator must pass."""

import functools

import numpy as np
from numpy.testing import assert_array_equal

from gpt2core.communicator import REDUCTIONS
from gpt2core.parallel.tree_sum import tree_sum

DTYPES = [np.float32, np.float64, np.int32, np.int64]
REDUCED = {"sum": tree_sum, "min": lambda xs: np.min(xs, axis=0), "max": lambda xs: np.max(xs, axis=0)}


def fresh(rng, shape, dtype):
    """Random values of mixed magnitude, so that the order of a float sum shows in its bits."""
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-(10**6), 10**6, shape).astype(dtype)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 5, shape)).astype(dtype)


def everyones(seed, size, shape, dtype):
    """-> the inputs of all `size` ranks, equal on every rank for one seed, so that an oracle needs no communication."""
    rng = np.random.default_rng(seed)
    return [fresh(rng, shape, dtype) for _ in range(size)]


def same(got, want):
    assert got.dtype == want.dtype
    assert_array_equal(got, want, strict=True)


def check_every_collective(comm, seed, rows, dtype):
    """Compare each collective of `comm` with its oracle. Every communicator must pass, under every launcher."""
    p, r = comm.size, comm.rank
    xs = everyones(seed, p, (rows, 3), dtype)
    longs = everyones(seed + 1, p, (p * rows, 3), dtype)  # axis 0 in p equal parts
    root = seed % p
    x, long, mine = xs[r].copy(), longs[r].copy(), slice(r * rows, (r + 1) * rows)

    for op, reduced in REDUCED.items():
        same(comm.all_reduce(x, op), reduced(xs))
        same(comm.reduce_scatter(long, op), reduced(longs)[mine])
    same(comm.all_gather(x), np.concatenate(xs))
    same(comm.all_to_all(long), np.concatenate([other[mine] for other in longs]))
    same(comm.broadcast(x, root), xs[root])
    same(x, xs[r])  # out of place leaves the input intact
    same(long, longs[r])

    # non-contiguous inputs: a transpose, and every other row read backwards
    same(comm.all_reduce(np.asfortranarray(x)), tree_sum(xs))
    stretched = np.repeat(long, 2, axis=0)[::2][::-1]
    same(comm.reduce_scatter(stretched), tree_sum([other[::-1] for other in longs])[mine])
    same(comm.all_gather(x.T), np.concatenate([other.T for other in xs]))
    same(comm.all_to_all(stretched), np.concatenate([other[::-1][mine] for other in longs]))
    same(comm.broadcast(x.T, root), xs[root].T)

    # out is filled and returned, also if it is x or if x is a part of it
    buffer = x.copy()
    assert comm.all_reduce(buffer, out=buffer) is buffer
    same(buffer, tree_sum(xs))
    buffer = np.empty_like(long)
    buffer[mine] = x
    assert comm.all_gather(buffer[mine], out=buffer) is buffer
    same(buffer, np.concatenate(xs))
    buffer = long.copy()
    comm.reduce_scatter(buffer, out=buffer[mine])
    same(buffer[mine], tree_sum(longs)[mine])
    buffer = long.copy()
    assert comm.all_to_all(buffer, out=buffer) is buffer
    same(buffer, np.concatenate([other[mine] for other in longs]))
    buffer = x.copy()
    assert comm.broadcast(buffer, root, out=buffer) is buffer
    same(buffer, xs[root])

    # after the call returns, overwriting x changes the result on no rank
    buffer, out = x.copy(), np.empty_like(x)
    comm.all_reduce(buffer, out=out)
    buffer[...] = r + 77
    same(out, tree_sum(xs))

    # several pending collectives, waited for in the reverse order of their start
    handles = [comm.all_reduce_start(x), comm.all_gather_start(x), comm.reduce_scatter_start(long, "max"),
               comm.all_to_all_start(long), comm.broadcast_start(x, root)]  # fmt: skip
    wants = [tree_sum(xs), np.concatenate(xs), np.max(longs, axis=0)[mine],
             np.concatenate([other[mine] for other in longs]), xs[root]]  # fmt: skip
    for handle, want in list(zip(handles, wants, strict=True))[::-1]:
        same(handle.wait(), want)
        assert handle.wait() is handle.wait()
    comm.barrier()


def check_reduced(got, xs, op, algorithm):
    """Assert that `got` is the reduction of xs: equal bits if the order is canonical or exact, else close."""
    exact = algorithm in ("canonical", "tree") or op != "sum" or np.issubdtype(xs[0].dtype, np.integer)
    if exact:
        same(got, np.asarray(tree_sum(xs) if op == "sum" else functools.reduce(REDUCTIONS[op], xs)))
        return
    assert got.dtype == xs[0].dtype and got.shape == xs[0].shape
    # p-1 roundings, each half a unit in the last place of a partial sum, which is at most the sum of all |x|
    bound = len(xs) * np.finfo(got.dtype).eps * np.sum(np.abs(xs), axis=0, dtype=np.float64)
    assert (np.abs(got - np.sum(xs, axis=0, dtype=np.float64)) <= bound).all()
