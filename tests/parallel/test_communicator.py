"""Every collective equals its NumPy oracle, sums have the canonical order, and no mistake hangs a group."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2core.communicator import CommunicatorError, Solo
from gpt2core.errors import ConfigError
from gpt2core.parallel.mesh import GROUPS, TITLES, Mesh
from gpt2core.parallel.thread_communicator import ThreadCommunicator, run_ranks
from gpt2core.tree_sum import tree_reduce, tree_sum
from tests.support.collectives import DTYPES, assert_same, check_every_collective, random_values, rank_inputs

SIZES = [1, 2, 3, 4, 5, 8]
HANG = 60.0  # seconds until a test counts as hanging; each takes milliseconds


@pytest.mark.fast
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_collective_equals_its_oracle(size, dtype):
    for rows in (0, 1, 2, 13):
        run_ranks(size, check_every_collective, size + rows, rows, dtype)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(0, 9), st.sampled_from(DTYPES))
def test_every_collective_at_any_size_and_length(size, seed, rows, dtype):
    run_ranks(size, check_every_collective, seed, rows, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [1, 7])
def test_all_reduce_needs_no_divisible_length(size, length):
    """Lengths smaller than the group, and a scalar such as the loss."""
    for shape in ((length,), ()):
        xs = rank_inputs(length, size, shape, np.float32)
        for got in run_ranks(size, lambda comm, xs=xs: comm.all_reduce(xs[comm.rank])):
            assert_same(np.asarray(got), np.asarray(tree_sum(xs)))


# The canonical order


def written_out(parts):
    """The sum as text, built level by level."""
    while len(parts) > 1:
        pairs = [f"({a}+{b})" for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


@pytest.mark.parametrize("count", range(1, 70))
def test_tree_adds_neighbours_first_and_carries_the_odd_one_up(count):
    names = [str(i) for i in range(count)]
    assert tree_reduce(iter(names), lambda a, b: f"({a}+{b})") == written_out(names)


def test_tree_of_eight_and_of_five():
    def add(a, b):
        return f"({a}+{b})"

    assert tree_reduce("01234567", add) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert tree_reduce("01234", add) == "(((0+1)+(2+3))+4)"


def test_tree_of_no_items_is_an_error():
    with pytest.raises(ValueError, match="0 items"):
        tree_sum([])


def test_tree_keeps_few_partial_sums_alive():
    alive = most = 0

    def parts():
        nonlocal alive, most
        for _ in range(64):
            alive, most = alive + 1, max(most, alive + 1)
            yield 1

    def add(a, b):
        nonlocal alive
        alive -= 1
        return a + b

    assert tree_reduce(parts(), add) == 64 and most == 7


def test_all_reduce_sums_in_the_canonical_order_bit_for_bit():
    """float32 data whose sum depends on the order: all_reduce equals the tree, not the sum from left to right."""
    xs = rank_inputs(5, 8, (1000,), np.float32)
    want = ((xs[0] + xs[1]) + (xs[2] + xs[3])) + ((xs[4] + xs[5]) + (xs[6] + xs[7]))
    assert (sum(xs) != want).any()
    for got in run_ranks(8, lambda comm: comm.all_reduce(xs[comm.rank])):
        assert_same(got, want)
    for rank, got in enumerate(run_ranks(8, lambda comm: comm.reduce_scatter(xs[comm.rank]))):
        assert_same(got, want[rank * 125 : (rank + 1) * 125])
    assert_same(
        run_ranks(5, lambda comm: comm.all_reduce(xs[comm.rank]))[3], ((xs[0] + xs[1]) + (xs[2] + xs[3])) + xs[4]
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_micro_batches_sum_to_the_same_bits_at_any_rank_count(size):
    """Each rank adds its subtree of 8 micro-batches; the all-reduce of these sums is the tree over all 8."""
    shards = rank_inputs(6, 8, (1000,), np.float32)
    each = 8 // size
    for got in run_ranks(
        size, lambda comm: comm.all_reduce(tree_sum(shards[comm.rank * each : (comm.rank + 1) * each]))
    ):
        assert_same(got, tree_sum(shards))


# Ownership and non-blocking forms


@pytest.mark.parametrize("start", ["all_reduce_start", "all_gather_start", "all_to_all_start", "broadcast_start"])
def test_start_returns_before_the_other_ranks_call(start):
    """Rank 1 calls only after rank 0's start has returned."""
    started = threading.Event()
    xs = rank_inputs(7, 2, (4,), np.float64)

    def main(comm):
        if comm.rank == 1:
            assert started.wait(HANG)
        handle = getattr(comm, start)(xs[comm.rank])
        started.set()
        return handle.wait()

    want = {"all_reduce_start": xs[0] + xs[1], "all_gather_start": np.concatenate(xs),
            "all_to_all_start": np.concatenate([xs[0][:2], xs[1][:2]]), "broadcast_start": xs[0]}[start]  # fmt: skip
    assert_same(run_ranks(2, main)[0], want)


@pytest.mark.parametrize("start", ["all_reduce_start", "all_gather_start", "reduce_scatter_start", "broadcast_start"])
def test_overwriting_x_before_wait_is_an_error(start):
    def main(comm):
        x = random_values(np.random.default_rng(comm.rank), 4, np.float32)
        handle = getattr(comm, start)(x)
        x[comm.rank] += 1
        handle.wait()

    with pytest.raises(CommunicatorError, match="overwrote x before wait.*float32 \\(4,\\)"):
        run_ranks(2, main)


def test_overwriting_a_message_before_wait_is_an_error():
    def main(comm):
        x = random_values(np.random.default_rng(8), 4, np.float32)
        if comm.rank == 0:
            handle = comm.send_start(x, 1)
            x[0] += 1
            return handle.wait()
        return comm.recv(x, 0)

    with pytest.raises(CommunicatorError, match="overwrote x"):
        run_ranks(2, main)


def test_results_are_private_to_each_rank():
    xs = rank_inputs(9, 4, (8,), np.float64)

    def main(comm):
        x = xs[comm.rank]
        results = [comm.all_reduce(x), comm.all_gather(x), comm.broadcast(x), comm.reduce_scatter(x)]
        for result in results:
            assert not np.shares_memory(result, x)
            result += comm.rank  # if ranks shared an array, it would contain the other ranks' additions too
        comm.barrier()
        return results

    for rank, (reduced, gathered, sent, scattered) in enumerate(run_ranks(4, main)):
        assert_same(reduced, tree_sum(xs) + rank)
        assert_same(gathered, np.concatenate(xs) + rank)
        assert_same(sent, xs[0] + rank)
        assert_same(scattered, tree_sum(xs)[2 * rank : 2 * rank + 2] + rank)


def test_solo_returns_x_itself_and_honours_out():
    comm, x = Solo(), random_values(np.random.default_rng(10), (4, 3), np.float32)
    for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.broadcast):
        assert call(x) is x and call(x, out=x) is x
        out = np.empty_like(x)
        assert call(x, out=out) is out
        assert_same(out, x)
    assert (comm.rank, comm.size, comm.bytes_sent) == (0, 1, 0)
    assert comm.split(None) is None and isinstance(comm.split(3), Solo)


# Messages


def test_messages_keep_their_order_within_a_tag_only():
    xs = rank_inputs(11, 6, (5,), np.float64)

    def main(comm):
        if comm.rank == 0:
            handles = [comm.send_start(x, 1, tag=i % 2) for i, x in enumerate(xs)]
            return [handle.wait() for handle in handles]
        out = [np.empty(5) for _ in xs]
        handles = [comm.recv_start(out[i], 0, tag=i % 2) for i in (1, 0, 3, 2, 5, 4)]
        for handle in handles[::-1]:
            handle.wait()
        return out

    sent, received = run_ranks(2, main)
    assert sent == [None] * 6
    for got, want in zip(received, xs, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_a_ring_of_messages_and_its_bytes(size):
    xs = rank_inputs(12, size, (6,), np.float32)

    def main(comm):
        handle = comm.send_start(xs[comm.rank][::2], (comm.rank + 1) % size)  # non-contiguous
        got = comm.recv(np.empty(3, np.float32), source=(comm.rank - 1) % size)
        handle.wait()
        assert comm.bytes_sent == 12
        return got

    for rank, got in enumerate(run_ranks(size, main)):
        assert_same(got, xs[rank - 1][::2])


# Objects, bytes


@pytest.mark.parametrize("size", SIZES)
def test_objects_reach_every_rank_as_copies(size):
    def main(comm):
        mine = {"rank": comm.rank, "words": ["é" * (10 * comm.rank), None]}
        gathered = comm.all_gather_object(mine)
        # only root pickles its argument; on other ranks it is ignored
        sent = comm.broadcast_object(mine if comm.rank == size - 1 else threading.Lock(), root=size - 1)
        sent["words"].append(comm.rank)
        return gathered, sent

    def mine(rank):
        return {"rank": rank, "words": ["é" * (10 * rank), None]}

    for rank, (gathered, sent) in enumerate(run_ranks(size, main)):
        assert gathered == [mine(other) for other in range(size)]
        assert sent["words"] == mine(size - 1)["words"] + [rank]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_sent_is_the_textbook_volume(size):
    n, p = 120 * 4, size  # 120 float32, divisible by every size
    x = random_values(np.random.default_rng(13), 120, np.float32)

    def main(comm):
        def sent(call):
            before = comm.bytes_sent
            call()
            return comm.bytes_sent - before

        assert sent(lambda: comm.all_reduce(x)) == 2 * (p - 1) * n // p
        assert sent(lambda: comm.all_reduce(x, out=x.copy())) == 2 * (p - 1) * n // p
        assert sent(lambda: comm.reduce_scatter(x)) == (p - 1) * n // p
        assert sent(lambda: comm.all_to_all(x)) == (p - 1) * n // p
        assert sent(lambda: comm.all_gather(x)) == (p - 1) * n
        assert sent(lambda: comm.broadcast(x, root=p - 1)) == ((p - 1) * n if comm.rank == p - 1 else 0)
        assert sent(comm.barrier) == sent(lambda: comm.split(0)) == 0

    run_ranks(size, main)


# Groups


def test_split_orders_by_key_then_rank_and_excludes_color_none():
    def main(comm):
        group = comm.split(None if comm.rank == 5 else comm.rank % 2, key=-(comm.rank // 4))
        return group and (group.rank, group.all_gather(np.array([comm.rank])).tolist())

    assert run_ranks(8, main) == [
        (2, [4, 6, 0, 2]), (1, [7, 1, 3]), (3, [4, 6, 0, 2]), (2, [7, 1, 3]),
        (0, [4, 6, 0, 2]), None, (1, [4, 6, 0, 2]), (0, [7, 1, 3]),
    ]  # fmt: skip


def test_repeated_split_gives_independent_groups_and_ends_in_solo():
    """Halve the group until it has one rank; groups run concurrently and make different numbers of calls."""

    def main(comm):
        world, sums, x = comm, [], np.array([10**comm.rank])
        while comm.size > 1:
            comm = comm.split(comm.rank * 2 // comm.size)
            for _ in range(1 + world.rank // 4):
                total = comm.all_reduce(x).item()
            sums.append(total)
        assert isinstance(comm, Solo)
        assert world.all_reduce(x).item() == 11111111
        return sums

    sums = run_ranks(8, main)
    assert sums[0] == [1111, 11, 1] and sums[6] == [11110000, 11000000, 1000000]


@pytest.mark.parametrize("dp, tp, pp", [(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 2, 2), (1, 3, 2), (2, 1, 3)])
def test_mesh_gives_tensor_groups_consecutive_ranks(dp, tp, pp):
    grid = np.arange(dp * tp * pp).reshape(pp, dp, tp)  # pipeline outermost, tensor innermost

    def main(world):
        mesh, me = Mesh(world, dp, tp, pp), np.array([world.rank])
        return [(group.rank, group.all_gather(me).tolist()) for group in (mesh.data, mesh.tensor, mesh.pipeline)]

    for rank, (data, tensor, pipeline) in enumerate(run_ranks(dp * tp * pp, main)):
        (k, i, j) = np.argwhere(grid == rank)[0]
        assert data == (i, grid[k, :, j].tolist())
        assert tensor == (j, grid[k, i, :].tolist())
        assert pipeline == (k, grid[:, i, j].tolist())


def test_the_groups_of_a_mesh_are_each_once_and_have_the_one_that_adds_the_norm():
    def main(world):
        mesh = Mesh(world, dp=1, tp=2, pp=2)
        groups = mesh.groups()
        assert len({id(group) for group in groups.values()}) == len(groups)
        assert {id(mesh.replica), id(mesh.pipeline), id(mesh.ends)} <= {id(group) for group in groups.values()}
        return list(groups)

    titles = run_ranks(4, main)[0]
    assert "ranks of one replica" in titles and "ends of the pipeline" in titles


def test_each_group_has_a_title():
    assert TITLES.keys() == GROUPS.keys() | {"ends"}


@pytest.mark.parametrize("dp, tp, pp", [(1, 1, 1), (2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 2, 2), (1, 3, 2), (2, 1, 3)])
def test_the_loss_is_added_over_the_ranks_whose_gradients_are_added(dp, tp, pp, monkeypatch):
    """Of a pipeline the last rank has losses; the ranks of a tensor group have equal ones, unless GROUPS says other."""
    losses = np.random.default_rng().standard_normal((pp, dp, tp, 2))

    def main(world):
        return Mesh(world, dp, tp, pp).total_loss(losses.reshape(-1, 2)[world.rank], request=world.rank)

    want = tree_sum(losses[-1, :, 0].ravel().tolist()), dp * tp * pp - 1
    assert run_ranks(dp * tp * pp, main) == [want] * (dp * tp * pp)
    monkeypatch.setitem(GROUPS, "gradients", ("data", "tensor"))
    want = tree_sum(losses[-1].ravel().tolist()), dp * tp * pp - 1
    assert run_ranks(dp * tp * pp, main) == [want] * (dp * tp * pp)


def test_mesh_of_two_by_two():
    def main(world):
        mesh, me = Mesh(world, dp=2, tp=2), np.array([world.rank])
        return mesh.tensor.all_gather(me).tolist(), mesh.data.all_gather(me).tolist(), mesh.pipeline.size

    assert run_ranks(4, main) == [([0, 1], [0, 2], 1), ([0, 1], [1, 3], 1), ([2, 3], [0, 2], 1), ([2, 3], [1, 3], 1)]


@pytest.mark.parametrize("dp, tp, pp", [(2, 3, 1), (1, 1, 1), (-2, -2, 1)])
def test_mesh_that_does_not_fit_names_all_sizes(dp, tp, pp):
    with pytest.raises(ConfigError, match=f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp} .* 4"):
        run_ranks(4, lambda comm: Mesh(comm, dp, tp, pp))


# A failed group ends at once on every rank


BLOCKING = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(4)),
    "all_gather": lambda comm: comm.all_gather(np.ones(4)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.ones(comm.size)),
    "all_to_all": lambda comm: comm.all_to_all(np.ones(comm.size)),
    "broadcast": lambda comm: comm.broadcast(np.ones(4), root=1),
    "send": lambda comm: comm.send(np.ones(4), to=1),
    "recv": lambda comm: comm.recv(np.ones(4), source=1),
    "wait": lambda comm: comm.all_reduce_start(np.ones(4)).wait(),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
    "objects": lambda comm: comm.all_gather_object("x"),
}


@pytest.mark.parametrize("name", BLOCKING)
@pytest.mark.parametrize("grouped", [False, True], ids=["world", "sub-group"])
def test_a_rank_that_fails_ends_every_wait(name, grouped):
    """Rank 1 fails while the others wait, in the world or in sub-groups with and without rank 1."""
    ended = []

    def main(comm):
        group = comm.split(comm.rank < 2) if grouped else comm
        if comm.rank == 1:
            time.sleep(0.02)  # the others are probably waiting then; the test is valid in any case
            raise KeyError("the cause")
        try:
            while True:  # ranks of the group without rank 1 see the failure at a later call
                BLOCKING[name](group) if comm.rank == 0 or not grouped else group.barrier()
        except CommunicatorError as error:
            ended.append(comm.rank)
            assert "rank 1 ended with KeyError" in str(error)
            raise

    start = time.monotonic()
    with pytest.raises(KeyError, match="the cause") as caught:
        run_ranks(4, main)
    assert sorted(ended) == [0, 2, 3]
    assert caught.value.__notes__ == ["raised on rank 1 of 4"]
    assert time.monotonic() - start < HANG


def test_a_failure_ends_a_wait_for_a_third_rank_that_computes():
    ended, noticed = threading.Event(), []

    def main(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        if comm.rank == 2:
            return noticed.append(ended.wait(HANG))  # computes until rank 0 has ended
        try:
            comm.recv(np.ones(3), source=2)
        finally:
            ended.set()

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(3, main)
    assert noticed == [True]


def test_run_ranks_does_not_wait_forever_for_a_rank_that_computes():
    release = threading.Event()
    with pytest.raises(KeyError, match="the cause"):
        run_ranks(2, lambda comm: release.wait(HANG) if comm.rank else {}["the cause"], timeout=0.05)
    release.set()


def test_skip_on_a_rank_is_raised_by_run_ranks():
    """pytest's skip and fail are BaseExceptions, not Exceptions."""
    with pytest.raises(pytest.skip.Exception):
        run_ranks(2, lambda comm: comm.barrier() if comm.rank else pytest.skip("not here"))


@pytest.mark.parametrize(
    "calls, first, second",
    [
        (("all_reduce", "all_gather"), "all_reduce(sum) of float64 (4,)", "all_gather of float64 (4,)"),
        (("all_reduce", "barrier"), "all_reduce(sum) of float64 (4,)", "barrier"),
        (("split", "barrier"), "split", "barrier"),
    ],
)
def test_ranks_that_make_different_calls_are_named(calls, first, second):
    assert_mismatch([BLOCKING[call] for call in calls], [first, second])


@pytest.mark.parametrize(
    "xs, options, texts",
    [
        ((np.ones(3), np.ones(4)), ({}, {}), ("(3,)", "(4,)")),
        ((np.ones(3), np.ones(3, np.float32)), ({}, {}), ("float64", "float32")),
        ((np.ones(3), np.ones(3)), ({"op": "sum"}, {"op": "max"}), ("all_reduce(sum)", "all_reduce(max)")),
    ],
)
def test_ranks_with_different_arrays_are_named(xs, options, texts):
    assert_mismatch([lambda comm: comm.all_reduce(xs[comm.rank], **options[comm.rank])] * 2, texts)


def test_ranks_with_different_roots_or_messages_are_named():
    assert_mismatch([lambda comm: comm.broadcast(np.ones(3), root=comm.rank)] * 2, ("root 0", "root 1"))
    calls = [lambda comm: comm.send(np.ones(3), 1), lambda comm: comm.recv(np.ones(4), 0)]
    assert_mismatch(calls, ("message from rank 0 to 1, tag 0, of float64 (3,)", "float64 (4,)"))


def assert_mismatch(calls, texts):
    """Assert that all ranks, also those of other groups, raise an error with both ranks and both calls of 0 and 1."""

    def main(comm):
        group = comm.split(comm.rank // 2)
        try:
            while True:
                calls[comm.rank](group) if comm.rank < 2 else group.barrier()
        except CommunicatorError as error:
            return str(error)

    for message in run_ranks(4, main, timeout=HANG):
        assert "rank 0 called" in message and "rank 1 called" in message
        assert all(text in message for text in texts), message


def test_timeout_lists_what_each_rank_waits_for():
    done = threading.Event()

    def main(comm):
        comm.barrier()  # so that a late start of a thread does not shorten the waits below
        if comm.rank == 2:
            return done.wait(HANG)
        try:
            comm.recv(np.ones(3), source=2, tag=7) if comm.rank else comm.barrier()
        finally:
            done.set()

    with pytest.raises(CommunicatorError) as caught:
        run_ranks(3, main, timeout=1)
    message = str(caught.value)
    assert "waited for 1 s" in message and "rank 2 computes" in message
    assert "rank 0 waits in barrier for ranks [1, 2]" in message
    assert "rank 1 waits in message from rank 2 to 1, tag 7, of float64 (3,) for ranks [2]" in message


def test_waiting_for_a_rank_that_has_returned_ends_at_once():
    with pytest.raises(CommunicatorError, match="has returned.*rank 0 waits in barrier for ranks \\[1\\]") as caught:
        run_ranks(2, lambda comm: comm.barrier() if comm.rank == 0 else None, timeout=3600)
    assert caught.value.__notes__ == ["raised on rank 0 of 2"]


def test_an_operation_completes_after_a_rank_that_posted_it_has_returned():
    """Rank 1 starts an all-reduce and returns without wait(): rank 0 gets its result."""
    xs = rank_inputs(14, 2, (3,), np.float32)
    results = run_ranks(2, lambda comm: comm.all_reduce_start(xs[1]) and None if comm.rank else comm.all_reduce(xs[0]))
    assert_same(results[0], xs[0] + xs[1])


# Invalid arguments: the error names both values and what to do


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda comm: comm.all_reduce(np.ones(3), "mean"), "unknown reduction 'mean'.*sum, min, max"),
        (lambda comm: comm.reduce_scatter(np.ones(4), "mean"), "unknown reduction 'mean'"),
        (lambda comm: comm.broadcast(np.ones(3), root=9), "root 9 is not a rank of a group of"),
        (lambda comm: comm.send(np.ones(3), to=comm.rank), "to . is rank . itself"),
        (lambda comm: comm.recv(np.ones(3), source=comm.rank), "source . is rank . itself"),
        (lambda comm: comm.recv(np.ones(3), source=-1), "source -1 is not a rank"),
        (lambda comm: comm.all_gather(np.float32(1)), "no axis 0"),
        (lambda comm: comm.reduce_scatter(np.float32(1)), "no axis 0"),
        (lambda comm: comm.all_reduce(np.ones(3), out=np.ones(4)), r"float64 \(4,\).*float64 \(3,\)"),
        (lambda comm: comm.all_reduce(np.ones(3), out=np.ones(3, np.int32)), "int32.*float64"),
        (lambda comm: comm.all_reduce(np.ones(3), out=np.ones(6)[::2]), "non-contiguous"),
    ],
)
def test_bad_arguments_are_config_errors_in_any_group(size, call, message):
    with pytest.raises(ConfigError, match=message):
        run_ranks(size, call)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all"])
def test_an_axis_that_does_not_divide_names_both_numbers(name):
    with pytest.raises(ConfigError, match="length 7 is not divisible by 4 ranks: pad it to 8"):
        run_ranks(4, lambda comm: getattr(comm, name)(np.ones(7)))


def test_run_ranks_gives_each_rank_its_number_and_its_arguments():
    results = run_ranks(5, lambda comm, a, b: (comm.rank, comm.size, a + b, type(comm)), 3, 4)
    assert results == [(rank, 5, 7, ThreadCommunicator) for rank in range(5)]
    assert run_ranks(1, type) == [Solo]
    with pytest.raises(ConfigError, match="0 ranks"):
        run_ranks(0, type)
