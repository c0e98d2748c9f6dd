"""The naive collectives equal NumPy, and Megatron's division of the weight gives the same numbers with fewer bytes."""

import itertools
import threading

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from stage1_mpi.naive_tensor_parallel import (
    get_info,
    naive_collect_backward_output,
    naive_collect_backward_x,
    naive_collect_forward_input,
    naive_collect_forward_output,
    naive_collect_forward_output_gather,
    naive_collect_forward_output_sum,
    split_data,
)
from tests.support.mpi import run_mpi

# p = mp_size ranks form a replica; B batch, T time, C channels, H heads; n = B*T*C * itemsize, one activation

GRIDS = [(p, d) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8) if p * d in (2, 4, 8)]


# -- communicators without MPI, with only the methods that the functions may use ---------------------------------------


class Fake:
    """A communicator whose ranks are threads: Split and four buffer methods."""

    class Group:
        def __init__(self, size):
            self.size, self.slots, self.barrier = size, [None] * size, threading.Barrier(size, timeout=30)

    def __init__(self, rank, group):
        self.rank, self.group = rank, group

    def Get_size(self):
        return self.group.size

    def exchange(self, value):
        self.group.slots[self.rank] = value
        self.group.barrier.wait()
        everyones = list(self.group.slots)
        self.group.barrier.wait()
        return everyones

    def Split(self, color=0, key=0):
        everyones = self.exchange((color, key, self.rank))
        members = [rank for c, _, rank in sorted(everyones) if c == color]
        group = self.exchange(Fake.Group(len(members)))[members[0]]
        return Fake(members.index(self.rank), group)

    def Allgather(self, send, receive):
        receive[...] = np.stack(self.exchange(send.copy()))

    def Alltoall(self, send, receive):
        receive[...] = np.stack([parts[self.rank] for parts in self.exchange(send.copy())])

    def Reduce_scatter_block(self, send, receive):
        receive[...] = sum(parts[self.rank] for parts in self.exchange(send.copy()))

    def Allreduce(self, send, receive):
        receive[...] = sum(self.exchange(send.copy()))


class Old(Fake):
    """A communicator that has Reduce_scatter but not Reduce_scatter_block."""

    Reduce_scatter = Fake.Reduce_scatter_block
    Reduce_scatter_block = property(lambda self: self.nothing)  # hasattr is False


class Bare(Fake):
    """A communicator without a reduce-scatter."""

    Reduce_scatter_block = property(lambda self: self.nothing)


def on_threads(size, function, *args, kind=Fake):
    group, results = Fake.Group(size), [None] * size

    def rank(i):
        try:
            results[i] = function(kind(i, group), *args)
        except BaseException as error:
            results[i] = error
            group.barrier.abort()

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in sorted(results, key=lambda result: isinstance(result, threading.BrokenBarrierError)):
        if isinstance(result, BaseException):
            raise result
    return results


# -- each function against NumPy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mp_size, dp_size", GRIDS)
def test_split_data_gives_a_replica_its_block_of_the_samples(mp_size, dp_size):
    x, y = np.arange(16 * 3).reshape(16, 3), np.arange(16)
    for rank in range(mp_size * dp_size):
        mine, labels = split_data(x, y, mp_size, dp_size, rank)
        rows = np.split(np.arange(16), dp_size)[rank // mp_size]
        assert_array_equal(mine, x[rows])
        assert_array_equal(labels, rows)
        assert mine.flags.c_contiguous and mine.dtype == x.dtype


def grid(comm, rank, mp_size, dp_size, layer):
    mp_idx, dp_idx, mp_comm, dp_comm, part_in, part_out = get_info(comm, rank, mp_size, dp_size, layer, 64, 128)
    assert (mp_comm.Get_size(), dp_comm.Get_size()) == (mp_size, dp_size)
    mine = np.array([rank])
    replica, twins = np.empty((mp_size, 1), int), np.empty((dp_size, 1), int)
    mp_comm.Allgather(mine, replica)
    dp_comm.Allgather(mine, twins)
    return mp_idx, dp_idx, replica.ravel().tolist(), twins.ravel().tolist(), part_in, part_out


def threads_grid(comm, *args):
    return grid(comm, comm.rank, *args)


@pytest.mark.parametrize("layer", ["fc_q", "fc_k", "fc_v", "fc_o"])
@pytest.mark.parametrize("mp_size, dp_size", GRIDS)
def test_get_info_makes_rows_and_columns_of_the_ranks(mp_size, dp_size, layer):
    dims = (64 // mp_size, 128) if layer == "fc_o" else (64, 128 // mp_size)
    for rank, found in enumerate(on_threads(mp_size * dp_size, threads_grid, mp_size, dp_size, layer)):
        i, j = rank % mp_size, rank // mp_size
        replica = [j * mp_size + k for k in range(mp_size)]
        twins = [k * mp_size + i for k in range(dp_size)]
        assert found == (i, j, replica, twins, *dims)


SHAPES = [(2, 3, 8), (8,), (4, 8), (2, 1, 3, 8), (2, 0, 8)]
TYPES = ["float32", "float64", "float16", "int64", "uint8", ">f8", "longdouble", "complex64"]


def values(shape, dtype, rank):
    """Integers, whose sums are exact in every dtype, as every second column of a wider array."""
    wide = np.random.default_rng(rank).integers(0, 9, (*shape[:-1], 2 * shape[-1])).astype(dtype)
    return wide[..., ::2]


def collect(comm, rank, p, shape, dtype):
    """The results of the five functions on this rank; asserts that their input is unchanged."""
    results = []
    for function, argument in [
        (naive_collect_forward_input, comm),
        (naive_collect_forward_output_gather, comm),
        (naive_collect_forward_output_sum, comm),
        (naive_collect_backward_output, rank),
        (naive_collect_backward_x, comm),
    ]:
        x = values(shape, dtype, rank)
        before = x.copy()
        results.append(function(x, argument, p))
        assert_array_equal(x, before)
        assert not np.shares_memory(results[-1], x)
    return results


def threads_collect(comm, *args):
    return collect(comm, comm.rank, *args)


def mpi_collect(communicator, cases):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    return [collect(comm, comm.rank, comm.size, shape, dtype) for shape, dtype in cases]


def check_collected(results, shape, dtype):
    p = len(results)
    everyones = [values(shape, dtype, rank) for rank in range(p)]
    whole = np.concatenate(everyones, axis=-1, dtype=dtype)
    total = sum(x.astype("complex128") for x in everyones).astype(dtype, casting="unsafe")
    for rank, found in enumerate(results):
        mine = slice(rank * shape[-1] // p, (rank + 1) * shape[-1] // p)
        for array, wanted in zip(
            found, (whole, whole, total, everyones[rank][..., mine], total[..., mine]), strict=True
        ):
            assert array.dtype == np.dtype(dtype) and array.flags.c_contiguous
            assert_array_equal(array, wanted, strict=True)


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("kind", [Fake, Old, Bare])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_the_five_functions_on_threads(p, dtype, kind):
    for shape in SHAPES:
        check_collected(on_threads(p, threads_collect, p, shape, dtype, kind=kind), shape, dtype)


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("p", [2, *(pytest.param(p, marks=pytest.mark.long) for p in (1, 4))])
def test_the_five_functions_under_mpi(p):
    cases = list(
        itertools.product(SHAPES, [dtype for dtype in TYPES if dtype[0] != ">"])
    )  # pickle changes the byte order of ">"
    for case, *results in zip(cases, *run_mpi(p, mpi_collect, cases), strict=True):
        check_collected(results, *case)


def test_halves_are_added_in_single_precision_and_rounded_once():
    # 2048 + 1 is 2048 in float16: adding the ranks one after another in float16 would give 2048.
    rows = [np.full((1, 4), 2048.0 if rank == 0 else 1.0, np.float16) for rank in range(4)]
    found = on_threads(4, lambda comm: naive_collect_backward_x(rows[comm.rank], comm, 4))
    assert [array.tolist() for array in found] == [[[2052.0]]] * 4  # 2051 rounds to even


# -- invalid arguments -------------------------------------------------------------------------------------------------

ALONE = Fake(0, Fake.Group(1))
PAIR = Fake(0, Fake.Group(2))  # every error is raised before a message is sent
X, Y = np.zeros((6, 3)), np.zeros(6)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: split_data(X, Y, 1, 4, 0), "6.*dp_size 4"),
        (lambda: split_data(X, Y[:5], 1, 1, 0), "6 samples.* 5"),
        (lambda: split_data(X, Y, 2, 2, 4), "rank 4.*mp_size 2 x dp_size 2"),
        (lambda: split_data(X, Y, 2, 2, -1), "rank -1.*mp_size 2 x dp_size 2"),
        (lambda: split_data(X, Y, 0, 2, 0), "mp_size 0"),
        (lambda: split_data(3.0, Y, 1, 1, 0), "x has shape"),
        (lambda: get_info(PAIR, 0, 2, 2, "fc_q", 8, 8), "2 x dp_size 2 .* size 2"),
        (lambda: get_info(PAIR, 0, 1, 1, "fc_q", 8, 8), "1 x dp_size 1 .* size 2"),
        (lambda: get_info(PAIR, 0, -1, -2, "fc_q", 8, 8), "mp_size -1"),
        (lambda: get_info(PAIR, 2, 2, 1, "fc_q", 8, 8), "rank 2"),
        (lambda: get_info(PAIR, 0, 2, 1, "fc_q", 8, 7), "fc_q, 7,.*mp_size 2"),
        (lambda: get_info(PAIR, 0, 2, 1, "fc_o", 7, 8), "fc_o, 7,.*mp_size 2"),
        (lambda: get_info(PAIR, 0, 2, 1, "fc_p", 8, 8), "'fc_p'.*fc_q, fc_k, fc_v, fc_o"),
        (lambda: naive_collect_forward_input(X, PAIR, 4), "mp_size 4.*size 2"),
        (lambda: naive_collect_forward_output(X, PAIR, 1), "mp_size 1.*size 2"),
        (lambda: naive_collect_forward_output_sum(X, PAIR, 3), "mp_size 3.*size 2"),
        (lambda: naive_collect_forward_output_sum(X > 0, ALONE, 1), "bool"),
        (lambda: naive_collect_backward_output(X, 0, 2), "3.*mp_size 2"),
        (lambda: naive_collect_backward_output(X, 3, 3), "mp_group_idx 3.*3"),
        (lambda: naive_collect_backward_output(X, -1, 3), "mp_group_idx -1.*3"),
        (lambda: naive_collect_backward_x(X, PAIR, 2), "3.*mp_size 2"),
        (lambda: naive_collect_backward_x(X, PAIR, 3), "mp_size 3.*size 2"),
        (lambda: naive_collect_backward_x(X > 0, ALONE, 1), "bool"),
        (lambda: naive_collect_forward_input(X.astype(object), ALONE, 1), "object"),
    ],
)
def test_a_mistake_is_a_value_error_that_names_both_numbers(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# -- one attention block, trained with both divisions ------------------------------------------------------------------

B, T, C, H, STEPS, RATE = 4, 6, 16, 8, 4, 1.0  # B: the global batch
LAYERS = ("fc_q", "fc_k", "fc_v", "fc_o")


def task():
    """Samples, targets and the weights of the first layer and of a block; float64."""
    rng = np.random.default_rng(7)
    weights = {name: rng.normal(0, C**-0.5, (C, C)) for name in ("first", *LAYERS)}
    return rng.normal(size=(B, T, C)), rng.normal(size=(B, T, C)), weights


def attention(q, k, v, heads):
    """Causal attention over (B, T, heads * D); returns y and its backward, dy -> dq, dk, dv."""

    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)  # (B, heads, T, D)

    def join(x):
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    q, k, v = split(q), split(k), split(v)
    scale = q.shape[-1] ** -0.5
    scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)

    def backward(dy):
        dy = split(dy)
        dp = dy @ v.swapaxes(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
        return join(ds @ k), join(ds.swapaxes(-1, -2) @ q), join(p.swapaxes(-1, -2) @ dy)

    return join(p @ v), backward


def product(x, dy):
    """The gradient of w in x @ w."""
    return np.einsum("bti,btj->ij", x, dy)


class Naive:
    """fc_o divided by columns: all-gather its input and its output; reduce-scatter d x."""

    def __init__(self, comm, index, size):
        self.comm, self.index, self.size = comm, index, size

    def cut(self, w):
        return naive_collect_backward_output(w, self.index, self.size)  # the same columns

    def forward(self, x, w):
        self.x, self.kept = naive_collect_forward_input(x, self.comm, self.size), x.nbytes * self.size
        return naive_collect_forward_output(self.x @ w, self.comm, self.size)

    def backward(self, dy, w):
        dy = naive_collect_backward_output(dy, self.index, self.size)
        return naive_collect_backward_x(dy @ w.T, self.comm, self.size), product(self.x, dy)

    def sum(self, dx):  # a reduce-scatter and an all-gather are an all-reduce
        part = naive_collect_backward_x(dx, self.comm, self.size)
        return naive_collect_forward_input(part, self.comm, self.size)


class Megatron(Naive):
    """fc_o divided by rows: its input is local, and one all-reduce gives its output (Megatron's g; its dual is f)."""

    def cut(self, w):
        return np.split(w, self.size, axis=0)[self.index]

    def forward(self, x, w):
        self.x, self.kept = x, x.nbytes
        return naive_collect_forward_output_sum(x @ w, self.comm, self.size)

    def backward(self, dy, w):
        return dy @ w.T, product(self.x, dy)

    def sum(self, x):
        return naive_collect_forward_output_sum(x, self.comm, self.size)


class Counting:
    """A communicator that counts the fewest bytes that a rank must send, for each collective."""

    def __init__(self, comm):
        self.comm, self.bytes = comm, {}

    def count(self, name, volume):
        self.bytes.setdefault(name, []).append(volume)

    def Get_size(self):
        return self.comm.Get_size()

    def Allgather(self, send, receive):
        self.count("all-gather", receive.nbytes - send.nbytes)  # (p - 1) / p n of the n that are gathered
        self.comm.Allgather(send, receive)

    def Reduce_scatter_block(self, send, receive):
        self.count("reduce-scatter", send.nbytes - receive.nbytes)  # (p - 1) / p n
        self.comm.Reduce_scatter_block(send, receive)

    def Allreduce(self, send, receive):
        self.count("all-reduce", 2 * (send.nbytes - send.nbytes // self.Get_size()))  # the sum of both
        self.comm.Allreduce(send, receive)


def train(comm, rank, mp_size, dp_size, way):
    """(losses, this rank's weights, bytes of one step by collective, bytes of fc_o's input kept for backward)."""
    x, y, weights = task()
    x, y = split_data(x, y, mp_size, dp_size, rank)
    for layer in LAYERS:
        mp_idx, _, mp_comm, dp_comm, _, _ = get_info(comm, rank, mp_size, dp_size, layer, C, C)
    mp_comm = Counting(mp_comm)
    output = way(mp_comm, mp_idx, mp_size)
    w = {name: naive_collect_backward_output(weights[name], mp_idx, mp_size) for name in LAYERS[:3]}
    w |= {"first": weights["first"], "fc_o": output.cut(weights["fc_o"])}
    losses = []
    for _ in range(STEPS):
        mp_comm.bytes = {}
        h = x @ w["first"]
        heads, attention_backward = attention(*(h @ w[name] for name in LAYERS[:3]), H // mp_size)
        error = h + output.forward(heads, w["fc_o"]) - y
        dout = error / (B * T * C)
        dheads, dfc_o = output.backward(dout, w["fc_o"])
        dqkv = attention_backward(dheads)
        dh = dout + output.sum(sum(d @ w[name].T for d, name in zip(dqkv, LAYERS[:3], strict=True)))
        gradients = {name: product(h, d) for d, name in zip(dqkv, LAYERS[:3], strict=True)}
        gradients |= {"first": product(x, dh), "fc_o": dfc_o, "loss": np.sum(error**2, keepdims=True) / (2 * B * T * C)}
        for name, gradient in gradients.items():
            total = np.empty_like(gradient)
            dp_comm.Allreduce(np.ascontiguousarray(gradient), total)  # data parallelism
            if name == "loss":
                losses.append(total.item())
            else:
                w[name] = w[name] - RATE * total
    return losses, w, mp_comm.bytes, output.kept


def threads_train(comm, *args):
    return train(comm, comm.rank, *args)


def mpi_train(communicator, grids):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    return [[train(comm, comm.rank, *grid, way) for way in (Naive, Megatron)] for grid in grids]


def check_lesson(naive, megatron, mp_size, dp_size):
    [(losses, weights, _, _)] = on_threads(1, threads_train, 1, 1, Naive)  # serial
    assert losses[-1] < 0.9 * losses[0]
    n = B // dp_size * T * C * 8
    part = (mp_size - 1) * n // mp_size
    for rank, (one, other) in enumerate(zip(naive, megatron, strict=True)):
        # float64: only the order of the sums differs
        assert_allclose(one[0], losses, rtol=1e-12)
        assert_allclose(other[0], losses, rtol=1e-12)
        columns = {name: np.split(weights[name], mp_size, axis=1)[rank % mp_size] for name in LAYERS}
        rows = np.split(weights["fc_o"], mp_size, axis=0)[rank % mp_size]
        for found, wanted in ((one[1], columns), (other[1], columns | {"fc_o": rows})):
            for name, array in (wanted | {"first": weights["first"]}).items():
                assert_allclose(found[name], array, atol=1e-12, rtol=0)
        # Naive: input and output forward; backward d x of fc_o and, as two collectives, of the block. Five parts of n.
        assert one[2] == {"all-gather": [part, part, part], "reduce-scatter": [part, part]}
        # Megatron: one all-reduce forward, one backward. Four parts, in two collectives instead of five.
        assert other[2] == {"all-reduce": [2 * part, 2 * part]}
        # fc_o's input, kept for backward, is the whole of it in the naive form and one part in Megatron's.
        assert (one[3], other[3]) == (n, n // mp_size)


@pytest.mark.parametrize("mp_size, dp_size", [grid for grid in GRIDS if B % grid[1] == 0])
def test_megatron_trains_the_same_block_with_fewer_bytes(mp_size, dp_size):
    size = mp_size * dp_size
    ways = [on_threads(size, threads_train, mp_size, dp_size, way) for way in (Naive, Megatron)]
    check_lesson(*ways, mp_size, dp_size)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_megatron_trains_the_same_block_with_fewer_bytes_under_mpi(size):
    grids = [(p, d) for p, d in GRIDS if p * d == size]
    results = run_mpi(size, mpi_train, grids)
    for i, (mp_size, dp_size) in enumerate(grids):
        check_lesson([rank[i][0] for rank in results], [rank[i][1] for rank in results], mp_size, dp_size)
