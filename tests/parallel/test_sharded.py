"""ZeRO-2 and ZeRO-3 have the bits of one rank, and a rank stores what the layout says."""

import functools
import itertools
import re
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.app.backend_setup import usable_cores
from gpt2core.app.host_memory import needed_memory
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.arena import PAGE
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import ConfigError, Diverged
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.micro_batches import merged
from gpt2core.parallel.micro_batches.merged import rows_are_independent
from gpt2core.parallel.sharded.unit_gradients import UnitGradients
from gpt2core.parallel.sharded.unit_parameters import NotInMemory
from gpt2core.parallel.sharded.unit_shards import UnitShards
from gpt2core.parallel.sharded.units import memory
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import (
    check_finite,
    current_model,
    load,
    named_moments,
    named_parameters,
    parameter_hash,
    verify,
)
from gpt2core.plain_backend import PlainBackend
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.collective_choice import chosen
from tests.support.mpi import run_mpi
from tests.support.rounding import Rounding
from tests.support.training import assert_same, make_trainer, train

TOKENS = np.random.default_rng(7).integers(0, 36, 1000)
ONE_EACH = dict(micro_batches=4)  # one for each of four ranks


def model(tied=False, layers=3):
    return GPT2Config(vocab_size=36, block_size=16, n_layer=layers, n_head=2, n_embd=32, tied=tied)


@functools.cache
def serial(tied=False, **options):
    return train(Solo(), ParallelConfig(), TOKENS, steps=2, config=model(tied), **options)


def assert_serial_bits(ranks, tied=False, how=None, **options):
    parallel = ParallelConfig(**how)
    for got in run_ranks(ranks, lambda comm: train(comm, parallel, TOKENS, steps=2, config=model(tied), **options)):
        assert_same(got, serial(tied, **options))


# -- the serial bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_number_of_ranks_gives_the_serial_bits(ranks, zero, recompute, tied):
    assert_serial_bits(ranks, tied, dict(zero=zero, recompute=recompute))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("ranks, threads", [(1, 2), (1, 8), (2, 2), (2, 4), (4, 2)])
def test_every_number_of_worker_threads_gives_the_serial_bits(ranks, threads, zero, recompute, tied):
    """One, two or four micro-batches for each thread."""
    assert_serial_bits(ranks, tied, dict(zero=zero, recompute=recompute), threads=threads)


@pytest.mark.parametrize("options", [dict(micro_batches=16), dict(clip=0.0), dict(backend=PlainBackend)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_other_options_give_the_serial_bits_with_threads(tied, options):
    want = train(Solo(), ParallelConfig(), TOKENS, steps=2, config=model(tied), **options)
    for got in run_ranks(2, lambda comm: train(comm, ParallelConfig(zero=3), TOKENS, steps=2, config=model(tied),
                                               threads=2, **options)):  # fmt: skip
        assert_same(got, want)


@pytest.mark.parametrize("options", [
    dict(ONE_EACH), dict(micro_batches=16), dict(clip=0.0), dict(backend=PlainBackend), dict(precision="fp64"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("tied", [False, True])
def test_other_options_give_the_serial_bits(tied, options):
    assert_serial_bits(4, tied, dict(zero=3), **options)


def test_merged_micro_batches_give_the_serial_bits(monkeypatch):
    """Four micro-batches of a rank in one or two passes."""
    rows, shapes = 32 // 8 * 16, {name: shape for name, shape in parameter_shapes(model()) if len(shape) == 2}
    matrices = {shape for name, shape in shapes.items() if not name.endswith("wpe.weight")}
    if not all(rows_are_independent(NumpyBackend(), rows, 4, *shape) for shape in matrices):
        pytest.skip("with this BLAS, the bits of a row depend on the number of rows")
    module = "gpt2core.parallel.sharded.micro_batches"
    for together, threads in ((2, 1), (4, 1), (2, 2)):
        monkeypatch.setattr(f"{module}.merged_micro_batches", lambda *arguments, together=together: together)
        assert_serial_bits(2, True, dict(zero=3, recompute="block"), batch_size=32, threads=threads)


def test_three_ranks_differ_only_by_rounding():
    sizes = dict(batch_size=12, micro_batches=12, precision="fp64")
    want = train(Solo(), ParallelConfig(), TOKENS, **sizes)[0]
    for zero in (2, 3):
        for curve, *_ in run_ranks(3, lambda comm, zero=zero: train(comm, ParallelConfig(zero=zero), TOKENS, **sizes)):
            np.testing.assert_allclose(curve, want, rtol=1e-11)


def test_two_gradients_of_a_tied_table_in_one_sum_give_other_bits(monkeypatch):
    """A control: the two gradients of a micro-batch are added first."""

    class InOneSum(UnitGradients):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.used_twice = []

    monkeypatch.setattr("gpt2core.parallel.sharded.shard_sums.UnitGradients", InOneSum)
    for got in run_ranks(2, lambda comm: train(comm, ParallelConfig(zero=3), TOKENS, steps=2, config=model(True))):
        assert got[0] != serial(True)[0]
        np.testing.assert_allclose(got[0], serial(True)[0], rtol=1e-4)  # float32: only rounding errors


def test_a_step_that_was_interrupted_can_be_repeated():
    def interrupted(comm):
        trainer, windows = make_trainer(comm, ParallelConfig(zero=3), config=model()), Windows(TOKENS, 16)
        part = trainer.accumulator.workers[0].parts[2]
        before, part.before_backward = part.before_backward, lambda name: 1 / 0
        with pytest.raises(ZeroDivisionError):
            trainer.step(read_batch(trainer, windows), 3e-3)
        part.before_backward = before
        return [trainer.step(read_batch(trainer, windows), 3e-3).loss for _ in range(2)]

    for losses in run_ranks(2, interrupted):
        assert losses == [loss for loss, _ in serial()[0]]


# -- errors of one worker thread ---------------------------------------------------------------------------------------

KERNELS = "embedding_forward", "mlp_backward", "attention_backward", "embedding_backward"


def fail_once(trainer, worker, kernel, call):
    """Let this worker raise ZeroDivisionError in call number `call` of a kernel, and in no later one."""
    backend, calls = trainer.pool.backends[worker], itertools.count(1)
    compute = getattr(backend, kernel)

    def fail(*arguments, **options):
        return 1 / 0 if next(calls) == call else compute(*arguments, **options)

    setattr(backend, kernel, fail)


@pytest.mark.parametrize("zero, worker", [(2, 1), (3, 0), (3, 1)])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("call", [1, 2])
def test_the_steps_after_an_error_of_one_thread_are_right(monkeypatch, zero, worker, kernel, call):
    """On all ranks, so that their next collectives match."""
    monkeypatch.setattr(merged, "ACTIVATIONS", 0)  # several passes

    def run(comm, fails):
        trainer, windows = make_trainer(comm, ParallelConfig(zero=zero), model(), threads=2), Windows(TOKENS, 16)
        reports = [trainer.step(read_batch(trainer, windows), 3e-3)]
        if fails:
            fail_once(trainer, worker, kernel, call)
            with pytest.raises(ZeroDivisionError):
                trainer.step(read_batch(trainer, windows), 3e-3)
        reports += [trainer.step(read_batch(trainer, windows), 3e-3) for _ in range(2)]
        return [(report.loss, report.grad_norm) for report in reports], parameter_hash(trainer)

    assert run_ranks(2, run, True) == run_ranks(2, run, False)


@pytest.mark.parametrize("how, kernel, call", [
    *((how, kernel, 2) for how in ({}, dict(pp=2), dict(tp=2)) for kernel in ("mlp_backward", "attention_backward")),
    (dict(pp=2, pp_schedule="gpipe"), "mlp_forward", 4),
], ids=str)  # fmt: skip
def test_an_error_of_one_thread_of_one_rank_ends_all_ranks(how, kernel, call):
    """In the last forward pass of gpipe, the other thread waits for a message of the next rank.

    There its partner waits, at the barrier, for a thread that waits for a message of the one that has failed.
    """
    started = []

    def run(comm):
        trainer, windows = (
            make_trainer(comm, ParallelConfig(zero=3, **how), model(layers=4), threads=2),
            Windows(TOKENS, 16),
        )
        trainer.step(read_batch(trainer, windows), 3e-3)
        if comm.rank == 1:
            fail_once(trainer, 1, kernel, call)
        started.append(comm.rank)
        trainer.step(read_batch(trainer, windows), 3e-3)

    with pytest.raises(ZeroDivisionError) as found:
        run_ranks(4, run)
    assert found.value.__notes__ == ["raised on rank 1 of 4"] and sorted(started) == [0, 1, 2, 3]


@pytest.mark.parametrize("worker", [0, 1])
def test_an_error_of_one_thread_in_an_evaluation_is_raised_and_the_next_one_is_right(worker):
    windows = Windows(TOKENS[:500], 16)

    def run(comm):
        trainer = make_trainer(comm, ParallelConfig(zero=3), model(), threads=2)
        want = evaluate(trainer, windows)
        fail_once(trainer, worker, "mlp_forward", 2)
        with pytest.raises(ZeroDivisionError):
            evaluate(trainer, windows)
        return evaluate(trainer, windows) == want

    assert run_ranks(2, run) == [True, True]


def test_workers_that_read_different_units_are_an_error():
    trainer = make_trainer(Solo(), ParallelConfig(zero=3), model(), threads=2)
    for number, worker in enumerate(trainer.accumulator.workers):
        worker.run = lambda *arguments, worker=worker, number=number: worker.parameters.need(f"h.{number}")
    with pytest.raises(ValueError, match="the workers of a rank must read the same unit, not h.. and h.."):
        trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 3e-3)


# -- with tensor parallelism and in a pipeline: the bits of the same `tp` without ZeRO ---------------------------------

UNEVEN = 37  # tokens, so that tensor-parallel ranks have vocabularies of different sizes


def on_ranks(comm, how, tied, clip, threads=1):
    config = replace(model(tied, layers=4), vocab_size=UNEVEN, n_head=4)
    reports, _, _, trainer = train(comm, ParallelConfig(**how), TOKENS, 2, config=config, clip=clip, threads=threads)
    return reports, parameter_hash(trainer)


@functools.cache
def without_zero(tp, tied, clip):
    first, *others = run_ranks(tp, on_ranks, dict(tp=tp), tied, clip)
    assert all(other == first for other in others)
    return first


GRIDS = [  # (ranks, options)
    (4, dict(tp=2, zero=2)), (4, dict(tp=2, zero=3)), (2, dict(tp=2, zero=3)), (8, dict(tp=2, zero=3)),
    (8, dict(tp=4, zero=3)), (4, dict(tp=1, canonical_tp=2, zero=3)),
    (4, dict(pp=2, zero=2)), (4, dict(pp=2, zero=3)), (2, dict(pp=2, zero=3)), (8, dict(pp=4, zero=3)),
    (4, dict(pp=2, zero=3, pp_schedule="gpipe")), (4, dict(pp=2, zero=3, pp_schedule="interleaved")),
    (4, dict(pp=2, zero=2, pp_schedule="zero-bubble")), (4, dict(pp=2, zero=3, pp_schedule="zero-bubble")),
    (8, dict(tp=2, pp=2, zero=2)), (8, dict(tp=2, pp=2, zero=3, pp_schedule="zero-bubble")),
    (8, dict(tp=2, pp=2, zero=3, pp_schedule="interleaved")),
]  # fmt: skip


SLOW = 3, 4  # of GRIDS: many sums inside layers


@pytest.mark.parametrize("ranks, how, tied, clip, recompute, threads", [
    pytest.param(
        *grid, tied, clip, recompute, threads, id=f"{grid}-{tied}-{clip}-{recompute}-{threads}",
        marks=[] if (i % 2, i // 2 % 2, i // 4 % 2) == (tied, clip > 0, recompute == "block") and i not in SLOW
        else pytest.mark.long,
    )
    for i, grid in enumerate(GRIDS) for tied in (False, True) for clip in (0.0, 0.1) for recompute in ("none", "block")
    for threads in (1, 2) if 8 >= threads * max(2 * grid[1].get("pp", 1), grid[0] // grid[1].get("tp", 1))
])  # fmt: skip
def test_with_tensor_and_pipeline_parallelism_zero_changes_no_bit(ranks, how, tied, clip, recompute, threads):
    want = without_zero(how.get("canonical_tp", how.get("tp", 1)), tied, clip)
    options = how | dict(recompute=recompute)
    assert run_ranks(ranks, on_ranks, options, tied, clip, threads) == [want] * ranks
    assert clip == 0 or min(norm for _, norm in want[0]) > clip


def test_page_sums_of_another_rank_of_the_replica_are_needed(monkeypatch):
    """A control: without them, the norm is another one."""
    want = without_zero(2, False, 0.1)
    monkeypatch.setattr("gpt2core.parallel.divided.model_pages.ModelPages.join", lambda self, sums: sums)
    for reports, _ in run_ranks(4, on_ranks, dict(tp=2, zero=3), False, 0.1):
        assert reports[0][0] == want[0][0][0] and reports[0][1] != want[0][0][1]


def test_over_mpi():
    """Four processes: tensor-parallel, and a pipeline of two ranks; one and two threads."""
    layouts = [dict(tp=2, zero=3), dict(pp=2, zero=3, pp_schedule="zero-bubble")]
    want = [without_zero(how.get("tp", 1), True, 0.1) for how in layouts]
    run_mpi(4, assert_bits, layouts, want)


def assert_bits(comm, layouts, want):
    for threads in (1, 2):
        assert [on_ranks(comm, how, True, 0.1, threads) for how in layouts] == want


# -- a copy of the parameters in 16 bits -------------------------------------------------------------------------------


def rounded_copies(comm, zero, rounding, steps, saved=None, tied=False, eps=1e-8, recompute="none", **how):
    """-> what must not depend on the ranks: losses, norms, the hash, the copy; then the state to resume from."""
    sizes = dict(batch_size=8, seq_len=16, micro_batches=4)
    optimizer = dict(clip=0.5, weight_decay=0.1, rounding=rounding, seed=11, eps=eps)
    parallel = ParallelConfig(zero=zero, recompute=recompute, **how)
    trainer = Trainer(model(tied), [Rounding()], **sizes, optimizer=optimizer, world=comm, parallel=parallel)
    if saved:
        load(trainer, *(saved[:2] if comm.is_root else (None, None)), *saved[2:])
    reports = [trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 1e-2) for _ in range(steps)]
    verify(trainer)
    copy = {name: tensor.numpy().tobytes() for name, tensor in current_model(trainer).parameters.items()}
    state = ({name: np.array(array) for name, array in named_parameters(trainer).items()},
             {name: [np.array(m) for m in pair] for name, pair in named_moments(trainer).items()})  # fmt: skip
    result = [(step.loss, step.grad_norm) for step in reports], parameter_hash(trainer), copy
    return result, (*state, trainer.steps, trainer.position)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_rounded_copy_has_the_serial_bits_and_the_rounding_makes_a_difference(rounding, tied):
    want = rounded_copies(Solo(), 0, rounding, 2, tied=tied)[0]
    for ranks, zero, recompute in ((2, 1, "none"), (2, 2, "none"), (2, 3, "block"), (4, 3, "none")):
        for got in run_ranks(ranks, rounded_copies, zero, rounding, 2, None, tied, 1e-8, recompute):
            assert got[0] == want
    other = rounded_copies(Solo(), 0, "nearest" if rounding == "stochastic" else "stochastic", 2, tied=tied)[0]
    assert other[1] != want[1] and other[2] != want[2]


@pytest.mark.parametrize("how", [dict(tp=2), dict(pp=2), dict(pp=2, pp_schedule="zero-bubble")], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_rounded_copy_does_not_depend_on_zero_with_tensor_and_pipeline_parallelism(how, tied):
    """The random numbers depend on the index in the arena, which a rank of a grid has for its part of the model."""

    def copies(comm, zero):
        return rounded_copies(comm, zero, "stochastic", 2, tied=tied, **how)[0]

    want = run_ranks(2, copies, 0)[0]
    for zero in (2, 3):
        assert run_ranks(4, copies, zero) == [want] * 4


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_rounded_copy_is_restored_with_another_zero(rounding):
    want, saved, layouts = rounded_copies(Solo(), 0, rounding, 4)[0], None, [(2, 3), (1, 0), (4, 2), (2, 1)]
    rows = []
    for ranks, zero in layouts:
        (result, saved), *others = run_ranks(ranks, rounded_copies, zero, rounding, 1, saved)
        assert all(other[0] == result for other in others)
        rows += result[0]
    assert (rows, *result[1:]) == want


def test_padding_that_adamw_changes_is_cleared_in_the_copy_too():
    """With eps 0 the formula is 0 / 0 in the padding."""
    with np.errstate(all="ignore"):
        want = rounded_copies(Solo(), 0, "nearest", 2, eps=0.0)[0]
        for got in run_ranks(2, rounded_copies, 3, "nearest", 2, None, False, 0.0):
            assert got[0] == want and np.isfinite(got[0][0]).all()


# -- what a rank stores and sends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_element_is_in_the_shards_of_one_rank(size, tied):
    arena, backend = DividedArena(parameter_shapes(model(tied))), NumpyBackend()
    arrays = {name: np.random.default_rng(1).standard_normal(shape) for name, shape in arena.shapes.items()}

    def check(comm):
        shards = UnitShards(arena, comm, backend)
        flat = np.zeros(shards.size)
        for name, array in arrays.items():
            shards.put(flat, name, array)
        for name, view in arena.views(shards.whole(flat)).items():
            assert_array_equal(view, arrays[name])
        assert_array_equal(shards.join(flat.reshape(-1, PAGE).sum(1))[: arena.size // PAGE],
                           shards.whole(flat).reshape(-1, PAGE).sum(1))  # fmt: skip
        assert_array_equal(shards.whole(np.repeat(shards.decays(), PAGE)), np.repeat(arena.decays(), PAGE))
        padding = np.ones(shards.size, bool)
        for own, _ in shards.pieces.values():
            padding[own] = False
        assert sum(gap.stop - gap.start for gap in shards.padding()) == padding.sum()
        assert all(padding[gap].all() for gap in shards.padding())
        for unit in arena.units:
            array, part = shards.allocate(unit, np.float32), shards.parts[unit]
            assert len(array) == size * (part.stop - part.start)
            for view in shards.views(unit, array).values():
                view[...] = 0
            shards.clear_padding(unit, array)
            assert not array.any()
        return sum(elements.stop - elements.start for _, elements in shards.pieces.values())

    assert sum(run_ranks(size, check)) == sum(array.size for array in arrays.values())


@pytest.mark.parametrize("zero, tied, passes, threads", [
    (0, False, 1, 1), (1, False, 1, 1), (2, False, 1, 1), (2, True, 1, 1), (3, False, 1, 1), (3, True, 1, 1),
    (3, False, 4, 1), (3, True, 2, 1), (2, False, 1, 2), (3, False, 1, 4), (3, True, 1, 2), (3, False, 4, 2),
])  # fmt: skip
def test_a_rank_stores_its_shards_and_the_units_that_are_computed(zero, tied, passes, threads):
    """Sizes of flat arrays, in numbers of float32: those that stay, and the peak of those of units."""
    live, peak, lock = [0], [0], threading.RLock()  # a finalizer may run inside of add()

    def add(size):
        with lock:
            live[0] += size
            peak[0] = max(peak[0], live[0])

    def count(array):
        add(array.size)
        weakref.finalize(array, add, -array.size)
        return array

    def main(comm):
        config = model(tied, layers=6)
        sizes = dict(micro_batches=4 * passes * threads, batch_size=16 * threads, threads=threads)
        trainer = make_trainer(comm, ParallelConfig(zero=zero), config, **sizes)
        if zero > 1 and comm.is_root:
            for each in (trainer.layout, *trainer.accumulator.sums.workers):
                each.allocate = lambda *unit, allocate=each.allocate: count(allocate(*unit))
        trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 3e-3)
        arrays = trainer.parameters, trainer.gradients, *trainer.optimizer.states.values()
        return [array.size for array in arrays], trainer

    for rank, (sizes, trainer) in enumerate(run_ranks(4, main)):
        if zero < 2:
            size = trainer.arena.size
            assert sizes == [size] * 2 + [size // (4 if zero else 1)] * 2
            continue
        units = {unit: trainer.layout.whole_size(unit) for unit in trainer.arena.units}
        whole, block = sum(units.values()), units["h.0"]
        assert sizes == [whole / 4] * 4
        shards, parameters, gradients = (count / 4 for count in memory(trainer.accumulator.work, zero, threads))
        work = trainer.accumulator.workers[0].work
        assert (passes > 1) == (work.passes > 1)  # some micro-batches may be merged
        passes = work.passes
        assert shards == sum(sizes) and parameters == (whole if zero == 2 else (3 if tied else 2) * block)
        few = (1 + (2 if tied else 1) * threads) * block
        assert gradients == (threads * whole * (passes - 1).bit_length() if passes > 1 else few)
        if rank == 0:
            assert peak[0] <= parameters + gradients
            assert tied or passes > 1 or peak[0] == parameters + gradients
            needed = needed_memory(trainer.config, ParallelConfig(zero=zero), threads, 1, 4) / 4
            assert passes > 1 or needed <= shards + peak[0]
    del trainer
    assert live[0] == 0


def test_after_a_step_no_tensor_has_memory_and_the_next_unit_is_known():
    def main(comm):
        trainer = train(comm, ParallelConfig(zero=3), TOKENS, steps=1, config=model())[3]
        parameters = trainer.accumulator.parameters.whole
        tensors = trainer.accumulator.workers[0].tensors
        assert all(isinstance(tensor.data, NotInMemory) for tensor in tensors.values())
        with parameters.reading(["embedding", "h.0"]), pytest.raises(ValueError, match="h.1 is read before embedding"):
            parameters.need("h.1")
        parameters.free(list(parameters.gathered))

    run_ranks(2, main)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", [dict(tp=2), dict(pp=2, pp_schedule="gpipe"), dict(pp=2)], ids=str)
def test_in_a_grid_too_a_rank_keeps_shards_and_few_whole_units(how, tied):
    """With several passes, the gradients of all units are whole until the last one; the parameters never are."""
    units = []

    def main(comm):
        trainer = make_trainer(comm, ParallelConfig(zero=3, **how), model(tied, layers=8))
        parameters, gathered = trainer.accumulator.parameters.whole, []
        start = parameters.start

        def counted(unit):
            start(unit)
            gathered.append(len(parameters.gathered))

        parameters.start = counted
        trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 3e-3)
        units.extend(gathered)
        shards = sum(trainer.layout.whole_size(unit) for unit in trainer.arena.units) / trainer.mesh.data.size
        arrays = trainer.parameters, trainer.gradients, *trainer.optimizer.states.values()
        assert [array.size for array in arrays] == [shards] * 4 and not parameters.gathered
        tensors = trainer.accumulator.workers[0].tensors
        assert all(isinstance(tensors[name].data, NotInMemory) for name in trainer.arena.slices)

    run_ranks(4, main)
    assert max(units) == (3 if tied else 2)


@pytest.mark.parametrize("tied", [False, True])
def test_the_threads_of_a_rank_read_the_same_arrays_and_gather_once(tied):
    def gathered(comm, threads):
        trainer = make_trainer(comm, ParallelConfig(zero=3), model(tied), threads=threads, micro_batches=2 * threads)
        calls, parameters = [], trainer.accumulator.parameters
        start, workers = trainer.mesh.gradients.all_gather_start, trainer.accumulator.workers

        def count(x, out=None):
            calls.append(x.size)
            return start(x, out=out)

        trainer.mesh.gradients.all_gather_start = count
        trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 3e-3)
        with parameters.reading(["embedding"]):
            trainer.pool.map(lambda worker: worker.parameters.need("embedding"), workers, barrier=parameters.barrier)
            arrays = [worker.tensors["transformer.wte.weight"].data for worker in workers]
            assert all(np.shares_memory(array, arrays[0]) for array in arrays) and len(arrays) == threads
        return calls

    assert run_ranks(2, gathered, 1) == run_ranks(2, gathered, 4)


def test_zero_3_gathers_a_second_time_before_backward_and_sends_as_many_gradients():
    def sent(comm, zero):
        trainer = make_trainer(comm, ParallelConfig(zero=zero), config=model(), **ONE_EACH)
        units = {unit: 4 * (part.stop - part.start) for unit, part in trainer.layout.parts.items()}
        return trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 3e-3).bytes_sent, units

    (second, units), (third, _) = run_ranks(4, sent, 2)[0], run_ranks(4, sent, 3)[0]
    once = 3 * sum(units.values())  # bytes of an all-gather or a reduce-scatter of float32: (p - 1) / p of 4 bytes each
    losses, sums = 3 * 8 * 2, 3 * 4 * (sum(units.values()) // 4 // PAGE)  # of one micro-batch and a signal; page sums
    assert second == 2 * once + losses + sums
    assert third == second + once - 3 * (units["head"] + units["h.2"])  # backward begins before these are freed


# -- evaluation, checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_validation_loss_and_the_model_to_generate_are_those_of_one_rank(tied):
    windows = Windows(TOKENS[:500], 16)  # the last batch has empty micro-batches

    def read(comm, threads=1, **how):
        trainer = train(comm, ParallelConfig(**how), TOKENS, steps=2, config=model(tied), threads=threads)[3]
        return evaluate(trainer, windows), current_model(trainer).logits(TOKENS[None, :16]).numpy().tobytes()

    want = read(Solo())
    for how in (dict(zero=2), dict(zero=3, recompute="block"), dict(zero=3, threads=2)):
        assert run_ranks(4, functools.partial(read, **how)) == [want] * 4


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_continues_at_another_layout(tied):
    layouts = [(2, 3), (1, 0), (4, 3), (2, 1), (2, 2), (1, 0), (2, 3)]
    want, windows = make_trainer(Solo(), ParallelConfig(), config=model(tied)), Windows(TOKENS, 16)

    def continued(comm, zero, saved):
        trainer = make_trainer(comm, ParallelConfig(zero=zero), config=model(tied))
        if saved:
            parameters, moments, steps, position = saved
            load(trainer, *((parameters, moments) if comm.is_root else (None, None)), steps, position)
        report = trainer.step(read_batch(trainer, windows), 3e-3)
        check_finite(trainer)
        verify(trainer)
        copies = ({name: np.array(array) for name, array in named_parameters(trainer).items()},
                  {name: [np.array(m) for m in pair] for name, pair in named_moments(trainer).items()})  # fmt: skip
        return report.loss, parameter_hash(trainer), (*copies, trainer.steps, trainer.position)

    saved = None
    for ranks, zero in layouts:
        loss = want.step(read_batch(want, windows), 3e-3).loss
        results = run_ranks(ranks, continued, zero, saved)
        assert {result[:2] for result in results} == {(loss, parameter_hash(want))}
        saved = results[0][2]
    for name, pair in named_moments(want).items():
        assert_array_equal(saved[1][name], pair)
    assert saved[2:] == (want.steps, want.position)


def test_a_parameter_that_is_not_finite_on_one_rank_is_found_by_all():
    def check(comm):
        trainer = make_trainer(comm, ParallelConfig(zero=3), config=model())
        if comm.rank == 1:
            trainer.parameters[0] = np.inf
        with pytest.raises(Diverged, match="the norm of the parameters is inf"):
            check_finite(trainer)

    run_ranks(2, check)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, message", [
    (dict(zero=3, dp="bucket"), "`zero=3` and `dp=bucket` exclude each other: use `dp=flat` or `zero=1`"),
    (dict(zero=3, compress="int8"), "`zero=3` and `compress=int8` exclude each other: use `compress=none`"),
    (dict(zero=2, zero_gather="forward"),
     "`zero=2` and `zero_gather=forward` exclude each other: use `zero_gather=end` or `zero=1`"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(how, message):
    def refused(comm):
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_trainer(comm, ParallelConfig(**how))

    run_ranks(4, refused)


def test_an_unknown_zero_is_refused():
    with pytest.raises(ConfigError, match="`zero=4` is unknown: choose from 0, 1, 2, 3"):
        ParallelConfig(zero=4)


def test_zero_3_on_one_rank_is_noted():
    _, notes = chosen(1, dict(dp="flat", zero=3))
    assert "note: --zero 3: no effect, because there is only one data-parallel rank" in notes


@pytest.mark.parametrize("pp, zero, cores", [(1, 0, 8), (1, 1, 8), (2, 0, 1), (1, 2, 1), (1, 3, 1)])
def test_the_default_number_of_threads_fits_the_way_a_step_is_divided(pp, zero, cores):
    assert usable_cores(SimpleNamespace(pp=pp, zero=zero), 8) == cores
