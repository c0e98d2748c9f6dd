"""Recomputation of blocks: less memory, and the bits of a run that keeps all activations."""

import functools
import gc

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.architecture import GPT2Config
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.errors import ConfigError
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.model import GPT2, initial_parameters
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.parameter import call
from gpt2core.parallel.part import parts_of
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.plain_backend import PlainBackend
from gpt2core.tensor import Tensor
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.training import CONFIG, TIED, assert_same, train

FOUR_LAYERS = GPT2Config(vocab_size=36, block_size=16, n_layer=4, n_head=4, n_embd=16, tied=True)
BLOCK = ParallelConfig(recompute="block")


@pytest.fixture
def tokens(rng):
    return rng.integers(0, 36, 1000)


@pytest.mark.parametrize("backend", [NumpyBackend, PlainBackend])
@pytest.mark.parametrize("config", [CONFIG, TIED, FOUR_LAYERS], ids=["two layers", "one layer, tied", "four, tied"])
@pytest.mark.parametrize("micro_batches", [1, 8])
def test_recomputed_blocks_give_the_same_bits(tokens, backend, config, micro_batches):
    sizes = dict(config=config, micro_batches=micro_batches, backend=backend)
    assert_same(train(Solo(), BLOCK, tokens, **sizes), train(Solo(), ParallelConfig(), tokens, **sizes))


@pytest.mark.parametrize("options", [
    dict(dp="overlap"), dict(dp="bucket", bucket_mb=0.005), dict(zero=1), dict(zero=1, zero_gather="forward"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("ranks, threads", [(1, 4), (2, 2), (4, 1)])
def test_recomputed_blocks_on_threads_and_ranks_give_the_serial_bits(tokens, ranks, threads, options):
    want = train(Solo(), ParallelConfig(), tokens, config=FOUR_LAYERS)
    parallel = ParallelConfig(recompute="block", **options)
    for got in run_ranks(ranks, lambda comm: train(comm, parallel, tokens, config=FOUR_LAYERS, threads=threads)):
        assert_same(got, want)


def test_recomputed_blocks_with_tensor_parallel_ranks_give_the_bits_of_these_ranks(tokens):
    options = dict(tokens=tokens, config=FOUR_LAYERS)
    got, want = (
        run_ranks(2, functools.partial(train, parallel=ParallelConfig(tp=2, recompute=recompute), **options))
        for recompute in ("block", "none")
    )
    for mine, theirs in zip(got, want, strict=True):
        assert_same(mine, theirs)


def test_the_activations_of_only_one_block_are_in_memory():
    """Without garbage collection, which a device turns off while it captures a step."""
    config, peaks = GPT2Config(36, 64, n_layer=12, n_head=2, n_embd=32), {}
    gc.disable()
    try:
        for recompute in ("none", "block"):
            backend, parallel = NumpyBackend(), ParallelConfig(recompute=recompute)
            sizes = dict(batch_size=8, seq_len=64, micro_batches=1, parallel=parallel)
            trainer = FastTrainer(config, [backend], **sizes)
            for _ in range(2):
                trainer.step(read_batch(trainer, Windows(np.arange(2000) % 36, 64)), 1e-3)
            peaks[recompute] = backend.pool.nbytes - trainer.parameters.nbytes - trainer.gradients.nbytes
    finally:
        gc.enable()
    assert peaks["block"] < 0.3 * peaks["none"]


def test_with_later_the_gradients_of_recomputed_blocks_are_deferred(rng):
    backend, dloss = NumpyBackend(), np.array(1.0)
    ids, targets = rng.integers(0, 36, (2, 3, 16))
    gradients = []
    for recompute, later in (("none", []), ("block", [])):
        leaves = {name: Tensor(array, backend, True) for name, array in initial_parameters(FOUR_LAYERS, 1)}
        model, order, graphs, x, dx = GPT2(FOUR_LAYERS, leaves), [], [], ids, dloss
        for part in parts_of(model.units, backend, recompute, completed=order.append):
            graphs.append(part.forward(x, ForwardArguments(targets=targets)))
            x = graphs[-1].y.data
        while graphs:
            dx = graphs.pop().backward(dx, later.append if recompute == "block" else call)
        assert not later or all(leaf.grad is None for leaf in leaves.values())
        for function in later:
            function()
        assert order == ["head", "h.3", "h.2", "h.1", "h.0", "embedding"]
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    for name, want in gradients[0].items():
        assert_array_equal(gradients[1][name], want, err_msg=name)


def test_an_unknown_word_is_refused(tokens):
    with pytest.raises(ConfigError, match="`recompute=layers` is unknown: choose from none, block"):
        train(Solo(), ParallelConfig(recompute="layers"), tokens)
