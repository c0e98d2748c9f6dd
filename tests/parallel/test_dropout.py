"""Dropout: its random bits, its gradients, and that they depend only on seed, step and place in the global batch."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.dropout import Dropout, Mask, dropout_key
from gpt2core.dropout_units import DropoutBlock, DropoutEmbedding
from gpt2core.errors import ConfigError
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.model import Block, Embedding, Head
from gpt2core.ops import dropout
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.part import forward_pass
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import load, named_moments, named_parameters
from gpt2core.plain_backend import PlainBackend
from gpt2core.tensor import Tensor, no_grad
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.training import CONFIG, TIED, assert_same, make_trainer
from tests.support.training import train as train_any

TOKENS = np.random.default_rng(5).integers(0, 36, 1000)
TWO_TIED = replace(TIED, n_layer=2)


def mask_of(p=0.25, seed=0, step=1, row=0, place=0):
    return Mask(Dropout(p, dropout_key(seed, step), row), place)


# -- the random bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_a_share_p_of_all_rows_positions_and_channels_is_dropped(p):
    """2^20 numbers: the share of one line of 4,096 to 2^14 is within 6 standard deviations, in all 240 lines."""
    keeps = mask_of(p, seed=int(np.random.SeedSequence().entropy % 2**32)).keeps((64, 64, 256))
    for axis in range(3):
        lines = np.moveaxis(keeps, axis, 0).reshape(keeps.shape[axis], -1)
        bound = 6 * np.sqrt(p * (1 - p) / lines.shape[1])
        assert (abs(1 - lines.mean(1) - p) <= bound).all()


def test_numbers_that_differ_in_one_part_of_the_counter_are_independent():
    """Of each pair half are equal: 2^18 numbers, within 6 standard deviations."""
    shape, first = (16, 64, 256), mask_of(0.5)
    keeps = first.keeps(shape)
    others = [
        mask_of(0.5, seed=1).keeps(shape), mask_of(0.5, step=2).keeps(shape), mask_of(0.5, place=1).keeps(shape),
        *(np.roll(keeps, 1, axis) for axis in range(3)), mask_of(0.5, row=1).keeps(shape),
    ]  # fmt: skip
    for other in others:
        assert abs((keeps == other).mean() - 0.5) < 3 / np.sqrt(keeps.size)


def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it():
    whole = mask_of().keeps((2, 8, 4, 6))  # two merged micro-batches of 8 sequences
    for row in range(16):
        assert_array_equal(mask_of(row=row).keeps((1, 4, 6))[0], whole.reshape(16, 4, 6)[row])
    assert_array_equal(mask_of().keeps((16, 3, 5)), whole.reshape(16, 4, 6)[:, :3, :5])  # of shorter arrays too


@pytest.mark.parametrize("first", [1, 2, 4, 7])
def test_the_parts_of_a_divided_sequence_drop_the_numbers_of_the_whole_one(first):
    rng, backend = np.random.default_rng(), PlainBackend("fp64")
    x, bias, dropout = rng.standard_normal((3, 8, 6)), rng.standard_normal(6), mask_of(0.5, row=5).dropout
    whole = backend.dropout(x, ForwardArguments(dropout=dropout).mask(2), bias)
    parts = [
        backend.dropout(x[:, part], ForwardArguments(position=part.start, dropout=dropout).mask(2), bias)
        for part in (slice(0, first), slice(first, 8))
    ]
    assert_array_equal(np.concatenate(parts, 1), whole, strict=True)
    assert (whole == 0).any() and (whole != 0).any()


# -- the operation, and the units -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [PlainBackend("fp64"), NumpyBackend("fp64")], ids=["plain", "numpy"])
def test_gradients_are_those_of_a_product_with_the_mask(backend):
    """float64: the products are rounded in another order."""
    rng, mask = np.random.default_rng(), mask_of(0.25)
    x, dy = rng.standard_normal((2, 2, 4, 6))
    bias, factor = rng.standard_normal(6), mask.keeps((2, 4, 6)) / 0.75
    for added in (bias, None):
        leaf, *biases = (Tensor(each, backend, requires_grad=True) for each in (x, added) if each is not None)
        y = dropout(leaf, mask, *biases)
        assert_allclose(y.data, (x if added is None else x + bias) * factor, rtol=1e-14)
        y.backward(dy)
        assert_allclose(leaf.grad, dy * factor, rtol=1e-14)
        for each in biases:
            assert_allclose(each.grad, (dy * factor).sum((0, 1)), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("config, slices", [(CONFIG, 1), (TWO_TIED, 1), (CONFIG, 2)], ids=["untied", "tied", "slices"])
def test_gradients_of_a_model_are_finite_differences_of_its_loss(config, slices):
    """Along a random direction, in float64. Of 120 errors, h^2 times a third derivative, the largest was 3e-8 norms."""
    parallel = ParallelConfig(canonical_tp=slices)
    trainer = make_trainer(Solo(), parallel, config=config, precision="fp64", dropout=0.3, clip=0.0)
    rng = np.random.default_rng()
    direction, values = rng.standard_normal(trainer.arena.size), trainer.parameters.copy()
    batch, coefficients = read_batch(trainer, Windows(TOKENS, 16)), trainer.optimizer.coefficients(1, 0.0)

    def loss(step):
        trainer.parameters[...] = values + step * direction
        losses, _ = trainer.update(batch, coefficients)
        return sum(each.item() for each in losses)

    h = 1e-6
    difference = (loss(h) - loss(-h)) / (2 * h)
    loss(0.0)
    tolerance = 1e-6 * np.linalg.norm(trainer.gradients)
    assert_allclose(difference, trainer.gradients @ direction, rtol=0, atol=tolerance)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_model_drops_after_the_embedding_and_in_each_branch(slices):
    """2 layers: places 0 to 4, each once in forward and once in backward."""
    trainer, places = make_trainer(Solo(), ParallelConfig(canonical_tp=slices), micro_batches=1, dropout=0.5), []
    backend, compute = trainer.backend, trainer.backend.dropout
    backend.dropout = lambda x, mask, bias=None: (places.append(mask.place), compute(x, mask, bias))[1]
    trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 0.0)
    assert places == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


def test_without_dropout_the_units_are_those_of_the_model():
    units = {
        p: [unit for part in make_trainer(Solo(), ParallelConfig(), dropout=p).accumulator.workers[0].parts
            for unit in part.units] for p in (0.0, 0.1)
    }  # fmt: skip
    assert [type(unit) for unit in units[0.0]] == [Embedding, Block, Block, Head]
    assert [type(unit) for unit in units[0.1]] == [DropoutEmbedding, DropoutBlock, DropoutBlock, Head]
    trainer = make_trainer(Solo(), ParallelConfig())
    assert trainer.optimizer.coefficients(1, 0.1).dropout is None
    assert ForwardArguments().mask(1) is None


# -- training ----------------------------------------------------------------------------------------------------------


def train(comm, parallel=None, steps=3, **options):
    return train_any(comm, parallel or ParallelConfig(), TOKENS, steps, dropout=0.2, **options)


@pytest.mark.fast
@pytest.mark.parametrize("ranks, options, more", [
    (1, {}, dict(threads=2)), (2, {}, dict(threads=2)), (4, dict(dp="bucket"), {}), (8, dict(zero=1), {}),
    (2, dict(zero=1, zero_gather="forward"), {}), (2, dict(zero=2), {}), (4, dict(zero=3, recompute="block"), {}),
    (2, dict(recompute="block"), {}), (2, dict(pp=2), {}), (2, dict(pp=2), dict(threads=2)),
    (4, dict(pp=2, pp_schedule="zero-bubble", zero=1), {}), (4, dict(pp=2, zero=3), {}),
    (4, dict(pp=2, pp_schedule="gpipe", recompute="block", zero=2), {}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("config", [CONFIG, TWO_TIED], ids=["untied", "tied"])
def test_losses_norms_and_parameters_do_not_depend_on_the_layout(ranks, options, more, config):
    want = train(Solo(), config=config)
    for got in run_ranks(ranks, lambda comm: train(comm, ParallelConfig(**options), config=config, **more)):
        assert_same(got, want)


@pytest.mark.parametrize("batch_size, micro_batches", [(16, 1), (16, 16), (13, 4)])
def test_the_numbers_that_are_dropped_do_not_depend_on_the_micro_batches(batch_size, micro_batches):
    """float64: the gradients are added in another order. AdamW divides them, and enlarges the difference."""
    options = dict(precision="fp64", batch_size=batch_size)
    want = train(Solo(), micro_batches=2, **options)
    got = train(Solo(), micro_batches=micro_batches, **options)
    assert_allclose(got[0], want[0], rtol=1e-9)


@pytest.mark.parametrize("options, config", [
    (dict(tp=2), CONFIG), (dict(tp=2), TWO_TIED), (dict(tp=2, pp=2), CONFIG), (dict(tp=2, pp=2), TWO_TIED),
    (dict(pp=2, canonical_tp=2), TWO_TIED), (dict(tp=2, zero=3), TWO_TIED),
], ids=str)  # fmt: skip
def test_the_ranks_of_a_tensor_group_drop_the_same_numbers(options, config):
    """canonical_tp 2 and tp 2 have the same bits; and the loss of one rank, up to the order of float64 sums."""
    want = train(Solo(), ParallelConfig(canonical_tp=2), precision="fp64", config=config)
    ranks = options.get("tp", 1) * options.get("pp", 1)
    for got in run_ranks(ranks, lambda comm: train(comm, ParallelConfig(**options), precision="fp64", config=config)):
        assert_same(got, want)
    serial = train(Solo(), precision="fp64", config=config)
    assert_allclose([loss for loss, _ in want[0]], [loss for loss, _ in serial[0]], rtol=1e-11)


def test_a_resumed_run_drops_the_numbers_of_the_whole_run():
    want, first = train(Solo(), steps=4), train(Solo(), steps=2)[-1]
    trainer, windows = make_trainer(Solo(), ParallelConfig(), dropout=0.2, threads=2), Windows(TOKENS, 16)
    load(trainer, named_parameters(first), named_moments(first), first.steps, first.position)
    reports = [trainer.step(read_batch(trainer, windows), 3e-3) for _ in range(2)]
    assert [(step.loss, step.grad_norm) for step in reports] == want[0][2:]
    for name, array in named_parameters(trainer).items():
        assert_array_equal(array, want[1][name], strict=True)


def test_each_step_and_seed_drops_other_numbers_and_evaluation_none():
    trainer, windows = make_trainer(Solo(), ParallelConfig(), dropout=0.5), Windows(TOKENS, 16)
    batch = read_batch(trainer, windows)
    first = trainer.step(batch, 0.0).loss
    assert trainer.step(batch, 0.0).loss != first != make_trainer(Solo(), ParallelConfig()).step(batch, 0.0).loss
    rows = windows.batch(0, 16)
    plain = make_trainer(Solo(), ParallelConfig())
    for each in (trainer, plain):
        each.losses_of_rows = each.accumulator.losses(*rows, each.scale, 16)
    assert trainer.losses_of_rows == plain.losses_of_rows


def test_the_forward_pass_of_training_drops_numbers_also_where_nothing_is_recorded():
    trainer = make_trainer(Solo(), ParallelConfig(), micro_batches=1, dropout=0.5)
    inputs, targets = Windows(TOKENS, 16).batch(0, 16)
    want = trainer.step(trainer.prepare(inputs, targets), 0.0).loss
    (worker,) = trainer.accumulator.workers
    with no_grad():
        arguments = worker.work.training_arguments(0, targets, trainer.scale, dropout_key(0, 1))
        _, loss = forward_pass(worker.parts, inputs, arguments)
    assert loss.item() == want != trainer.accumulator.losses(inputs, targets, trainer.scale, 16)[0]


@pytest.mark.parametrize("options", [{}, dict(pp=2), dict(zero=3), dict(tp=2)], ids=str)
def test_gradients_depend_on_the_key_that_is_passed_and_not_on_an_earlier_one(options):
    keys = [dropout_key(0, 1), dropout_key(0, 2), dropout_key(0, 1), None]

    def gradients(comm, dropout):
        trainer = make_trainer(comm, ParallelConfig(**options), dropout=dropout)
        batch, found = read_batch(trainer, Windows(TOKENS, 16)), []
        for key in keys if dropout else [None]:
            trainer.compute_gradients(batch, key)
            found.append(trainer.gradients.copy())
        return found

    ranks = 2 if options else 1
    for (first, other, again, none), (plain,) in zip(
        run_ranks(ranks, gradients, 0.5), run_ranks(ranks, gradients, 0.0), strict=True
    ):
        assert_array_equal(again, first, strict=True)
        assert_array_equal(none, plain, strict=True)
        assert (other != first).any() and (none != first).any()


@pytest.mark.parametrize("options", [dict(pp=2), dict(zero=3), dict(tp=2)], ids=str)
def test_evaluation_of_a_divided_model_drops_nothing(options):
    def losses(comm, dropout):
        trainer, rows = make_trainer(comm, ParallelConfig(**options), dropout=dropout), Windows(TOKENS, 16).batch(0, 8)
        return trainer.accumulator.losses(*rows, trainer.scale, 8)

    assert run_ranks(2, losses, 0.5) == run_ranks(2, losses, 0.0)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_probability_that_is_not_possible_is_refused(p):
    with pytest.raises(ConfigError, match="`dropout=.*` must be at least 0 and below 1: use `dropout=0.1`, or omit"):
        make_trainer(Solo(), ParallelConfig(), dropout=p)
