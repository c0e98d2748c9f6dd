"""ZeRO-1 with the all-gather during the next forward pass gives the bits of an all-gather at the end of the step."""

from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.architecture import parameter_shapes
from gpt2core.communicator import Handle, Solo
from gpt2core.data import Windows
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.data.strategies import STRATEGIES
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.divided.async_all_gather import AsyncAllGather
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import (
    check_finite,
    current_model,
    load,
    named_parameters,
    parameter_hash,
    verify,
)
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.collective_choice import chosen
from tests.support.training import BUCKET_MB, CONFIG, TIED, assert_same, make_trainer, train

FORWARD = dict(zero=1, zero_gather="forward", bucket_mb=BUCKET_MB)


@pytest.fixture
def tokens():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    return np.random.default_rng(seed).integers(0, 36, 1000)


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("dp", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_strategy_gives_the_serial_bits(tokens, ranks, dp):
    want = train(Solo(), None, tokens)
    for got in run_ranks(ranks, train, ParallelConfig(dp=dp, **FORWARD), tokens):
        assert_same(got, want)


class Unequal:
    """A dtype of the same bits as float32 that is not equal to it."""

    dtype = np.dtype(np.float32)
    __hash__ = None

    def __eq__(self, other):
        return False


class Copied(NumpyBackend):
    """Kernels read a copy of the parameters, as with bf16 on a GPU; here the copy has the same bits."""

    compute_dtype = Unequal()

    def __init__(self, precision):
        super().__init__(precision)
        self.compute_dtype = Copied.compute_dtype

    def adamw_step(self, p, *arguments):
        *arguments, copy = arguments
        super().adamw_step(p, *arguments)
        copy.array[...] = p


@pytest.mark.parametrize("dp, when", [("flat", "end"), ("flat", "forward"), ("bucket", "forward")])
def test_the_copy_that_kernels_read_is_gathered_instead_of_the_parameters(tokens, dp, when):
    want = train(Solo(), None, tokens)
    parallel = ParallelConfig(dp=dp, **FORWARD | dict(zero_gather=when))
    for got in run_ranks(4, lambda comm: train(comm, parallel, tokens, backend=Copied)):
        assert_same(got, want)


def test_a_tied_head_two_threads_and_many_pieces_change_nothing(tokens):
    """Two workers wait for the same pieces at the same time; a piece is a parameter, and some have two owners."""
    want = train(Solo(), None, tokens, config=TIED)
    parallel = ParallelConfig(**FORWARD | dict(bucket_mb=1e-6))
    for got in run_ranks(4, lambda comm: train(comm, parallel, tokens, config=TIED, threads=2)):
        assert_same(got, want)


def test_three_ranks_and_tensor_parallel_ranks_differ_only_by_rounding(tokens):
    for ranks, sizes, how in ((3, dict(batch_size=12, micro_batches=12), {}), (4, {}, dict(tp=2))):
        options = dict(precision="fp64", **sizes)
        want = train(Solo(), None, tokens, **options)[0]
        parallel = ParallelConfig(**FORWARD, **how)
        for curve, *_ in run_ranks(ranks, partial(train, parallel=parallel, tokens=tokens, **options)):
            assert np.allclose(curve, want, rtol=1e-11, atol=0)


def test_parameters_of_other_owners_are_gathered_before_every_read(tokens):
    """NaN replaces the parts of other owners before every step and every read between steps."""

    def main(comm, when, poison):
        trainer = make_trainer(comm, ParallelConfig(dp="bucket", **FORWARD | dict(zero_gather=when)))
        windows = Windows(tokens, 16)

        def overwrite():
            if poison:
                own = trainer.parameters[trainer.optimizer.own].copy()
                trainer.parameters[...] = np.nan
                trainer.parameters[trainer.optimizer.own] = own

        seen = []
        for _ in range(3):
            for read in (
                lambda: trainer.step(read_batch(trainer, windows), 3e-3).loss,
                lambda: evaluate(trainer, Windows(tokens[:160], 16)),
                lambda: current_model(trainer).logits(np.arange(8)[None]).data.tobytes(),
                lambda: parameter_hash(trainer),
                lambda: verify(trainer),
                lambda: check_finite(trainer),
                lambda: {name: np.array(value) for name, value in named_parameters(trainer).items()},
            ):
                overwrite()
                seen.append(read())
        return seen

    want = run_ranks(4, main, "end", False)[0]
    for got in run_ranks(4, main, "forward", True):
        np.testing.assert_equal(got, want)


def test_a_run_resumed_with_another_gather_is_the_serial_run(tokens):
    want = train(Solo(), None, tokens)

    def first(comm):
        return train(comm, ParallelConfig(**FORWARD), tokens, steps=2)

    def second(comm, parameters, moments, position, when):
        trainer = make_trainer(comm, ParallelConfig(**FORWARD | dict(zero_gather=when)))
        load(trainer, parameters if comm.is_root else None, moments if comm.is_root else None, 2, position)
        return [
            (step.loss, step.grad_norm)
            for step in (trainer.step(read_batch(trainer, Windows(tokens, 16)), 3e-3) for _ in range(2))
        ]

    _, parameters, moments, trainer = run_ranks(4, first)[3]
    for when in ("end", "forward"):
        for curve in run_ranks(2, second, parameters, moments, trainer.position, when):
            assert curve == want[0][2:]


def test_no_more_is_sent_than_by_an_all_gather(tokens):
    """Over all ranks: a broadcast of each part to p - 1 others, without the padding at the end."""

    def sent(comm, when):
        trainer = make_trainer(comm, ParallelConfig(**FORWARD | dict(zero_gather=when)))
        return trainer.step(read_batch(trainer, Windows(tokens, 16)), 1e-3).bytes_sent, trainer.arena

    at_end, overlapped = run_ranks(4, sent, "end"), run_ranks(4, sent, "forward")
    arena = at_end[0][1]
    padding = 3 * 4 * (arena.size - max(arena.padded(name).stop for name in arena.slices))
    assert sum(count for count, _ in at_end) - sum(count for count, _ in overlapped) == padding


# -- the pieces -------------------------------------------------------------------------------------------------------


class Owners:
    """A group of `size` that records which arrays are broadcast, and when they are waited for."""

    def __init__(self, size):
        self.rank, self.size, self.sent, self.waited = 0, size, [], []

    def broadcast_start(self, x, root, out):
        assert out is x
        self.sent.append((x, root))
        handle = Handle(x)
        handle.wait = lambda: self.waited.append((x, root))
        return handle


@pytest.mark.parametrize("mb", [1e-6, BUCKET_MB, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_owner_sends_its_elements_once_in_the_order_of_forward(size, mb):
    arena, owners = DividedArena(parameter_shapes(CONFIG), size), Owners(size)
    flat = np.arange(arena.size)
    gather = AsyncAllGather(arena, flat, owners, mb)
    views = arena.views(flat)
    for _ in range(2):  # a second step starts new broadcasts
        owners.sent.clear(), owners.waited.clear()
        with gather:
            assert_array_equal(np.concatenate([x for x, _ in owners.sent]), flat[: arena.padded(list(views)[-1]).stop])
            for x, root in owners.sent:
                own = arena.share(root, size)
                assert own.start <= x[0] and x[-1] < own.stop
            assert not owners.waited
            for unit, names in arena.units.items():
                gather.wait_for_unit(unit)
                arrived = np.concatenate([x for x, _ in owners.waited])
                assert arrived[0] <= views[names[0]].ravel()[0] and views[names[-1]].ravel()[-1] <= arrived[-1], unit
                assert mb == 1.0 or unit == "head" or len(arrived) < len(flat)  # not all pieces are waited for
        assert owners.waited == owners.sent
        owners.waited.clear()
        gather.wait_for_unit("embedding")
        assert not owners.waited  # no piece is pending outside the context


def test_after_a_failure_no_piece_is_waited_for():
    owners = Owners(2)
    arena = DividedArena(parameter_shapes(CONFIG), 2)
    with pytest.raises(ZeroDivisionError), AsyncAllGather(arena, np.zeros(arena.size), owners, 1.0):
        raise ZeroDivisionError
    assert owners.sent and not owners.waited


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(zero=1, zero_gather="later"), "`zero_gather=later` is unknown: choose from end, forward"),
        (
            dict(zero_gather="forward"),
            "`zero_gather=forward` needs `zero=1`, and this is `zero=0`: add `zero=1`",
        ),
    ],
)
def test_an_invalid_zero_gather_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**options)


# -- the default of --zero --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, transport, asked, zero",
    [
        (4, "nccl", {}, 1),
        (4, "nccl", dict(deterministic=True), 1),
        (4, "nccl", dict(zero=0), 0),
        (4, "nccl", dict(dp="bucket"), 0),
        (4, "nccl", dict(compress="bf16"), 0),
        (4, "nccl", dict(tp=4), 0),
        (4, "nccl", dict(tp=2), 1),
        (1, "nccl", {}, 0),
        (4, "mpi", {}, 0),
        (4, "mpi", dict(zero=1), 1),
    ],
)
def test_zero_is_the_default_where_it_is_the_fastest(size, transport, asked, zero):
    args, notes = chosen(size, dict(dp="flat", zero=None) | asked, transport)
    assert args.zero == zero and not notes


@pytest.mark.parametrize("size, tp, noted", [(1, 1, True), (2, 2, True), (2, 1, False)])
def test_compression_on_one_data_parallel_rank_has_an_effect_and_the_note_says_which(size, tp, noted):
    asked = dict(dp="flat", zero=None, compress="int8", tp=tp)
    args, notes = chosen(size, asked)
    note = "--compress int8: one data-parallel rank sends nothing, but its gradients are rounded to int8"
    assert args.compress == "int8" and [note in note_ and "no effect" not in note_ for note_ in notes] == [True] * noted


@pytest.mark.parametrize("size, zero, gather", [(4, 1, "forward"), (1, 0, "end")])
def test_zero_gather_forward_has_no_effect_without_owners(size, zero, gather):
    asked = dict(dp="flat", zero=None, zero_gather="forward", bucket_mb=5.0)
    args, notes = chosen(size, asked)
    assert (args.zero, args.zero_gather) == (zero, gather)
    assert ["--zero-gather forward: no effect" in note for note in notes] == [True] * (size == 1)
