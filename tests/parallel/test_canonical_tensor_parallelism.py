"""`canonical_tp` S: every layout computes the bits of tp = S, with 1, 2, ... or S ranks that divide a layer."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.errors import ConfigError
from gpt2core.model import Block, Embedding, Head
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.tensor import sliced_ops
from gpt2core.parallel.tensor.sliced_units import SlicedBlock, SlicedEmbedding, SlicedHead
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import current_model, load, named_moments, named_parameters, parameter_hash
from gpt2core.plain_backend import PlainBackend
from gpt2core.tree_sum import tree_sum
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.mpi import run_mpi
from tests.support.training import make_trainer, train

S, V = 4, 37  # slices of 10, 10, 10 and 7 tokens
TOKENS = np.random.default_rng(7).integers(0, V, 1000)
CONFIG = GPT2Config(vocab_size=V, block_size=16, n_layer=2, n_head=4, n_embd=16, tied=False)
CLIP = 0.1  # below the norm of every step


def trained(comm, layout, tied=False, clip=CLIP, steps=3, slices=S, threads=1, config=CONFIG, **options):
    """((loss, gradient norm) of each step, the hash of the parameters)."""
    parallel = ParallelConfig(canonical_tp=slices, **layout)
    options |= dict(config=replace(config, tied=tied), clip=clip, threads=threads)
    reports, _, _, trainer = train(comm, parallel, TOKENS, steps, **options)
    return reports, parameter_hash(trainer)


def on_ranks(ranks, layout, *arguments, **options):
    return run_ranks(ranks, lambda comm: trained(comm, layout, *arguments, **options))


@functools.cache
def plain(ranks, tied=False, clip=CLIP, **options):
    """The result of `tp` = `ranks` without `canonical_tp`."""
    first, *others = on_ranks(ranks, dict(tp=ranks), tied, clip, slices=None, **options)
    assert all(other == first for other in others)
    return first


LAYOUTS = [  # (ranks, layout), all with the bits of tp = 4
    (1, {}), (2, dict(tp=2)), (1, dict(recompute="block")), (2, dict(zero=1)), (2, dict(zero=2)), (2, dict(zero=3)),
    (2, dict(pp=2)), (4, dict(tp=2, zero=1, dp="bucket", bucket_mb=0.002)), (4, dict(tp=2, pp=2)),
    (4, dict(tp=2, pp=2, pp_schedule="zero-bubble", recompute="block")), (8, dict(tp=2, pp=2, zero=1)),
    (8, dict(tp=4, pp=2)), (4, dict(tp=2, zero=3)), (8, dict(tp=2, pp=2, zero=2)),
]  # fmt: skip
# of LAYOUTS, with `tied`: those that are not only in test-long
SHORT = [(0, False), (1, True), (5, False), (8, True), (12, True)]


@pytest.mark.parametrize("ranks, layout, tied, clip", [
    pytest.param(
        *layout, tied, clip, marks=[] if (i, tied) in SHORT and clip else pytest.mark.long, id=f"{layout}-{tied}-{clip}"
    )
    for i, layout in enumerate(LAYOUTS) for tied in (False, True) for clip in (CLIP, 0.0)
])  # fmt: skip
def test_every_layout_has_the_bits_of_tp_4(ranks, layout, tied, clip):
    for got in on_ranks(ranks, layout, tied, clip):
        assert got == plain(S, tied, clip)


def test_clipping_and_the_vocabulary_change_the_bits():
    assert min(norm for _, norm in plain(S)[0]) > CLIP and plain(S) != plain(S, clip=0.0)
    assert plain(S) != plain(2) != plain(1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("threads", [2, pytest.param(4, marks=pytest.mark.long)])
def test_worker_threads_have_the_bits_of_tp_4(threads, tied):
    for got in on_ranks(2, dict(tp=2), tied, threads=threads):
        assert got == plain(S, tied)


@pytest.mark.parametrize("options", [
    dict(backend=PlainBackend), dict(config=replace(CONFIG, positions="rotary", n_embd=24)), dict(micro_batches=16)
], ids=str)  # fmt: skip
@pytest.mark.parametrize("layout", [dict(tp=1), dict(tp=2)], ids=str)
def test_other_backends_models_and_micro_batches(layout, options):
    first, *others = on_ranks(S, dict(tp=S), slices=None, **options)
    for got in [*others, *on_ranks(layout["tp"], layout, **options)]:
        assert got == first


@pytest.mark.parametrize("slices, tp", [(1, 1), (2, 1), (3, 1), (6, 1), (6, 3)])
def test_another_number_of_slices_has_the_bits_of_that_tp(slices, tp):
    config = replace(CONFIG, n_head=6, n_embd=24)
    want = on_ranks(slices, dict(tp=slices), slices=None, config=config)
    assert on_ranks(tp, dict(tp=tp), slices=slices, config=config) == want[:tp]


def test_one_slice_is_the_model_that_is_not_divided():
    assert trained(Solo(), {}, slices=1) == plain(1)


@pytest.mark.parametrize("slices, classes", [
    (1, {Embedding, Block, Head}), (2, {SlicedEmbedding, SlicedBlock, SlicedHead})
])  # fmt: skip
def test_only_several_slices_have_units_of_their_own(slices, classes):
    trainer = make_trainer(Solo(), ParallelConfig(canonical_tp=slices), config=CONFIG)
    (part,) = trainer.accumulator.workers[0].parts
    assert {type(unit) for unit in part.units} == classes


def test_over_mpi():
    assert_mpi_bits(2, dict(tp=2), plain(S))


@pytest.mark.long
@pytest.mark.parametrize("ranks, layout", [(4, dict(tp=2, pp=2)), (4, dict(tp=4)), (4, dict(tp=2, zero=1))], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_over_mpi_in_other_layouts(ranks, layout, tied):
    assert_mpi_bits(ranks, layout, plain(S, tied), tied=tied)


def assert_mpi_bits(ranks, layout, want, **options):
    run_mpi(ranks, has_bits, layout, want, options)


def has_bits(comm, layout, want, options):
    assert trained(comm, layout, **options) == want


def test_the_values_are_those_of_one_rank():
    options = dict(steps=3, config=CONFIG, precision="fp64", clip=CLIP)
    got, want = (train(Solo(), ParallelConfig(canonical_tp=count), TOKENS, **options) for count in (S, 1))
    assert_allclose(got[0], want[0], rtol=1e-12)  # float64: only the order of sums differs
    for name, array in want[1].items():
        assert_allclose(got[1][name], array, atol=1e-9, err_msg=name)


def test_another_order_of_the_slices_has_other_bits(monkeypatch):
    def one_after_another(items, add):
        return functools.reduce(add, items)

    monkeypatch.setattr(sliced_ops, "tree_reduce", one_after_another)
    assert trained(Solo(), {}) != plain(S)


@pytest.mark.parametrize("ranks", [1, 2])
def test_slices_of_16_bits_are_added_in_float32_and_rounded_once(ranks):
    arrays, own = np.random.default_rng().standard_normal((S, 1000)).astype(np.float16), S // ranks

    def summed(comm):
        slices = list(arrays[comm.rank * own : (comm.rank + 1) * own])
        return sliced_ops.sum_of_slices(slices, comm, NumpyBackend()).tobytes()

    want = tree_sum(arrays.astype(np.float32)).astype(np.float16).tobytes()
    assert set(run_ranks(ranks, summed)) == {want} != {tree_sum(arrays).tobytes()}


def test_evaluations_and_generated_logits_are_equal():
    validation = Windows(TOKENS[:500], 16)

    def result(comm, layout, slices=S):
        trainer = make_trainer(comm, ParallelConfig(canonical_tp=slices, **layout), config=CONFIG)
        return evaluate(trainer, validation), current_model(trainer).logits(TOKENS[None, :16]).numpy().tobytes()

    want = run_ranks(S, result, dict(tp=S), None)[0]
    for ranks, layout in [LAYOUTS[i] for i in (0, 1, 5, 8)]:
        assert set(run_ranks(ranks, result, layout)) == {want}


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_does_not_depend_on_the_number_of_slices(tied):
    config, rng = replace(CONFIG, tied=tied), np.random.default_rng(0)
    shapes = dict(parameter_shapes(config))
    saved = [{name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(3)]
    moments = {name: [each[name] for each in saved[1:]] for name in shapes}

    def through(comm, slices, layout):
        trainer = make_trainer(comm, ParallelConfig(canonical_tp=slices, **layout), config=config)
        load(trainer, saved[0], moments, 5, 80)
        pairs = named_moments(trainer)
        return [named_parameters(trainer), *({name: pairs[name][i] for name in shapes} for i in range(2))]

    for slices, ranks, layout in [(2, 1, {}), *((S, *LAYOUTS[i]) for i in (1, 5, 8))]:
        for state in run_ranks(ranks, through, slices, layout):
            for got, want in zip(state, saved, strict=True):
                assert {name: array.tobytes() for name, array in got.items()} == {
                    name: array.tobytes() for name, array in want.items()
                }


@pytest.mark.parametrize("options, message", [
    (dict(tp=2, canonical_tp=3), "`canonical_tp=3` is not a multiple of `tp=2`: use `canonical_tp=4` or another "
     "multiple"),
    (dict(tp=2, canonical_tp=6), "`canonical_tp=6` makes 3 slices on each rank of `tp=2`, but their number must be a "
     "power of two: use `canonical_tp=4` or `tp=6`"),
    (dict(canonical_tp=3), "n_head 4 is not divisible by `canonical_tp` 3: use `canonical_tp` 1, 2 or 4"),
    (dict(tp=2, canonical_tp=8), "n_head 4 is not divisible by `canonical_tp` 8: use `canonical_tp` 2 or 4"),
])  # fmt: skip
def test_what_is_not_possible_is_refused_with_both_values(options, message):
    tp = options.get("tp", 1)

    def refused(comm):
        with pytest.raises(ConfigError) as error:
            make_trainer(comm, ParallelConfig(**options), config=CONFIG)
        return str(error.value)

    assert set(run_ranks(tp, refused)) == {message}
