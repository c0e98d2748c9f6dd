"""Ranks divide any vocabulary: training is that of one rank, and a checkpoint has the whole arrays of any layout."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core.architecture import parameter_shapes
from gpt2core.communicator import Solo
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import load, named_moments, named_parameters
from gpt2core.plain_backend import PlainBackend
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.mpi import run_mpi
from tests.support.training import CONFIG, make_trainer, train

V = 37  # 2 ranks have 19 and 18 tokens; 4 ranks have 10, 10, 10 and 7
TOKENS = np.random.default_rng(7).integers(0, V, 1000)
LAYOUTS = [
    (2, dict(tp=2)), (4, dict(tp=4)), (4, dict(tp=2, zero=1)), (4, dict(tp=2, dp="bucket", bucket_mb=0.002)),
    (4, dict(tp=2, pp=2)), (4, dict(tp=2, pp=2, pp_schedule="zero-bubble", recompute="block")),
    (8, dict(tp=4, pp=2, zero=1)),
]  # fmt: skip


@functools.cache
def serial(tied, backend=NumpyBackend):
    return trained(Solo(), {}, tied, backend)


def trained(comm, layout, tied, backend=NumpyBackend):
    config = replace(CONFIG, vocab_size=V, tied=tied)
    return train(comm, ParallelConfig(**layout), TOKENS, config=config, precision="fp64", backend=backend)[:3]


def assert_serial_values(got, want):
    """float64: only the order of sums differs; AdamW divides by the root of small gradients, so not by 1e-14."""
    assert_allclose(got[0], want[0], rtol=1e-9)
    for name, array in want[1].items():
        assert_allclose(got[1][name], array, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("ranks, layout, tied", [
    pytest.param(*layout, tied, marks=[] if (i + tied) % 2 else pytest.mark.long, id=f"{layout}-{tied}")
    for i, layout in enumerate(LAYOUTS) for tied in (False, True)
])  # fmt: skip
def test_training_is_that_of_one_rank(ranks, layout, tied):
    results = run_ranks(ranks, trained, layout, tied)
    for got in results:
        assert_serial_values(got, serial(tied))
        for name, array in results[0][1].items():
            assert_array_equal(got[1][name], array)


def test_training_with_the_plain_backend_and_over_mpi():
    for got in run_ranks(2, trained, dict(tp=2), True, PlainBackend):
        assert_serial_values(got, serial(True, PlainBackend))
    run_mpi(2, equals, serial(True))


def equals(comm, want):
    assert_serial_values(trained(comm, dict(tp=2), True), want)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_loads_at_every_layout(tied):
    """A training state goes through layouts with 1, 2 and 4 parts: no bit and no shape changes."""
    config, rng = replace(CONFIG, vocab_size=V, tied=tied), np.random.default_rng(0)
    shapes = dict(parameter_shapes(config))
    saved = [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(3)]

    def through(comm, layout):
        trainer, (parameters, *moments) = make_trainer(comm, ParallelConfig(**layout), config=config), saved
        load(trainer, parameters, {name: [each[name] for each in moments] for name in shapes}, 5, 80)
        pairs = named_moments(trainer)
        return [named_parameters(trainer), *({name: pairs[name][i] for name in shapes} for i in range(2))]

    for ranks, layout in LAYOUTS:
        for state in run_ranks(ranks, through, layout):
            for got, want in zip(state, saved, strict=True):
                assert list(got) == list(want)
                for name, array in want.items():
                    assert_array_equal(got[name], array, strict=True)
