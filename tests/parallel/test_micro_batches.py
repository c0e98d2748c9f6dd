"""The bits of a gradient do not depend on threads, ranks or micro-batches; the optimizer equals PyTorch's."""

import _thread
import functools
import gc
import math
import re
import threading
import time
from itertools import product

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from gpt2core.architecture import GPT2Config, parameter_shapes, unit_of
from gpt2core.arena import PAGE, SEGMENTS
from gpt2core.communicator import Solo
from gpt2core.data import Windows, even_slices
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import ConfigError, Diverged, UserError
from gpt2core.model import GPT2, initial_parameters
from gpt2core.optimizer import AdamW, Optimizer, Schedule
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.data.strategies import BUCKET_MB, make_data_parallel
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.divided.arena_layout import ArenaLayout
from gpt2core.parallel.divided.optimizer import DividedOptimizer
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.micro_batches import merged, worker_sums
from gpt2core.parallel.micro_batches.accumulator import Workload
from gpt2core.parallel.micro_batches.count import plan_micro_batches, possible_ranks
from gpt2core.parallel.micro_batches.gradient_sums import ArenaGradients
from gpt2core.parallel.micro_batches.threaded import MicroBatches, Worker
from gpt2core.parallel.parallel_trainer import ParallelTrainer as PlainTrainer
from gpt2core.parallel.sharded.unit_shards import UnitShards
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import (
    check_finite,
    current_model,
    load,
    named_moments,
    named_parameters,
    parameter_hash,
)
from gpt2core.plain_backend import PlainBackend
from gpt2core.presets import PRESETS
from gpt2core.tensor import ShapeError, Tensor, is_recording, no_grad
from gpt2core.threads import WorkerPool
from gpt2core.trainer import Trainer as SerialTrainer
from gpt2core.training_loop import read_batch
from gpt2core.tree_sum import additions, tree_reduce, tree_sum
from stage0_serial import vocabulary
from stage0_serial.numpy_backend import NumpyBackend

torch = pytest.importorskip("torch")

CONFIG = GPT2Config(37, 16, 2, 2, 16, tied=False)
TIED = GPT2Config(37, 16, 2, 2, 16, tied=True)


@pytest.fixture(autouse=True, scope="module")
def one_blas_thread():
    """As in a run: BLAS may split a product differently for another number of its own threads."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Blocks that are smaller than some parameters of these models, so that the workers' sums are added in several."""
    monkeypatch.setattr(worker_sums, "SUM_BLOCK", 1000)


def backends(n, precision="fp32"):
    return [NumpyBackend(precision) for _ in range(n)]


def random_batch(rng, rows, T=16):
    return rng.integers(0, 37, (2, rows, T))


def micro_batches(config, count, threads, precision="fp32", seed=1, shape=None, group=None):
    """(MicroBatches over freshly initialised parameters, with its DataParallel as `data_parallel`; those parameters).

    shape: of the batches to merge; by default `count` does not divide it, so no micro-batches are merged.
    """
    workers, arena = WorkerPool(backends(threads, precision)), DividedArena(parameter_shapes(config))
    flat = np.zeros(arena.size, workers.backends[0].dtype)
    for name, value in initial_parameters(config, seed):
        arena.views(flat)[name][...] = value * 10  # large enough for gradients that differ between micro-batches
    gradients, one = np.zeros_like(flat), (Solo(), Solo(), workers.backends[0])
    reduction = make_data_parallel(ParallelConfig(), arena, gradients, *one, BUCKET_MB)
    shape = shape or (count + 1, 16)
    layout, dloss = ArenaLayout(arena, workers.backends[0]), np.array(1.0)
    work = Workload(config, layout, flat, gradients, workers.backends[0], count, shape, dloss)
    run = MicroBatches(work, workers, group or Solo(), reduction.unit_completed)
    run.data_parallel = reduction
    return run, arena.views(flat)


def backward(run, inputs, targets, scale):
    """The losses of one batch, as numbers; as ParallelTrainer.compute_gradients() calls it."""
    run.pool.wait()
    run.data_parallel.begin()
    return [float(loss) for loss in run.compute_gradients(run.deal(inputs, targets, len(inputs), run.merged), scale)]


# -- several micro-batches in one call of the kernels -----------------------------------------------------------------


@pytest.fixture
def independent_rows(monkeypatch):
    """Products whose rows are independent. BLAS has another kernel for small products, so here rows would depend."""

    def matmul(self, a, b, out=None):
        y = self.empty((a.shape[0], b.shape[1]), a.dtype) if out is None else out
        return np.einsum("nc,ck->nk", a, b, out=y)

    monkeypatch.setattr(NumpyBackend, "matmul", matmul)


@pytest.mark.fast
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("logits", [1 << 23, 37 * 40, 37 * 5], ids=["at once", "one micro-batch", "five rows"])
@pytest.mark.parametrize("threads", [1, 2])
def test_merged_micro_batches_have_the_bits_of_separate_ones(
    rng, monkeypatch, independent_rows, config, logits, threads
):
    monkeypatch.setattr(vocabulary, "LOGITS", logits)  # otherwise this small vocabulary is never computed in chunks
    separate, _ = micro_batches(config, 8, threads)
    merged, _ = micro_batches(config, 8, threads, shape=(16, 16))
    assert (separate.merged, merged.merged) == (1, 8 // threads)
    for _ in range(2):
        batch = random_batch(rng, 16)
        losses = [backward(run, *batch, 1 / 256) for run in (separate, merged)]
        assert tree_sum(losses[0]) == tree_sum(losses[1])
        assert_array_equal(separate.gradients, merged.gradients)
    inputs, targets = random_batch(rng, 13)  # validation is never merged
    assert separate.losses(inputs, targets, 1.0, 16) == merged.losses(inputs, targets, 1.0, 16)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_no_buffer_of_a_pass_waits_for_the_garbage_collector(rng, independent_rows, config):
    """A reference cycle would keep activations until the collector runs: the memory of a step would grow by then."""
    run, _ = micro_batches(config, 8, 1, shape=(16, 16))
    backward(run, *random_batch(rng, 16), 1 / 256)
    gc.collect()
    gc.disable()
    try:
        backward(run, *random_batch(rng, 16), 1 / 256)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_one_element_that_is_added_in_another_order_is_found(rng, monkeypatch):
    """In a product of many rows, BLAS adds the addends of a few elements in another order than in one of few rows."""
    for rows, C, K in rng.integers((2, 8, 8), (9, 40, 40), (20, 3)).tolist():

        def matmul(self, a, b, out=None, rows=rows):
            y, order = np.einsum("nc,ck->nk", a, b), -1 if len(a) > rows else 1
            y[-1, -1] = functools.reduce(np.add, (a[-1] * b[:, -1])[::order])
            return y

        monkeypatch.setattr(NumpyBackend, "matmul", matmul)
        assert not merged.rows_are_independent(NumpyBackend(), rows, 2, C, K)


def test_micro_batches_are_not_merged_if_a_product_depends_on_the_number_of_rows(monkeypatch, independent_rows):
    whole = NumpyBackend.matmul

    def dependent(self, a, b, out=None):
        return (
            np.nextafter(whole(self, a, b, out), 0) if len(a) > 64 else whole(self, a, b, out)
        )  # 64: two micro-batches

    monkeypatch.setattr(NumpyBackend, "matmul", dependent)
    assert micro_batches(CONFIG, 8, 1, shape=(16, 16))[0].merged == 2

    here = threading.local()

    def merged(group):
        here.rank = group.rank
        return micro_batches(CONFIG, 8, 1, shape=(16, 16), group=group)[0].merged

    monkeypatch.setattr(NumpyBackend, "matmul", lambda *args: (whole if here.rank else dependent)(*args))
    assert run_ranks(2, merged) == [2, 2]  # all-reduces of a tensor group need equal shapes


def test_micro_batches_are_not_merged_if_they_differ_in_size_or_are_large(monkeypatch, independent_rows):
    assert micro_batches(CONFIG, 8, 1, shape=(12, 16))[0].merged == 1
    per_token = CONFIG.n_layer * (18 * CONFIG.n_embd + CONFIG.n_head * 16)
    monkeypatch.setattr(merged, "ACTIVATIONS", 5 * 32 * 4 * per_token)  # five micro-batches of 32 tokens
    assert micro_batches(CONFIG, 8, 1, shape=(16, 16))[0].merged == 4
    assert micro_batches(CONFIG, 8, 2, shape=(16, 16))[0].merged == 2


# -- the same bits for any division ---------------------------------------------------------------------------


def train(comm, threads, tokens, config, validation, steps=3):
    """The results of a run that must not depend on the number of threads and ranks."""
    trainer = Trainer(
        config, backends(threads), batch_size=16, seq_len=16, micro_batches=8, world=comm, seed=3,
        optimizer=dict(clip=0.5, weight_decay=0.1),
    )  # fmt: skip
    windows = Windows(tokens, 16)
    reports = [trainer.step(read_batch(trainer, windows), 3e-3) for _ in range(steps)]
    curve = [(step.step, step.loss, step.lr, step.grad_norm) for step in reports]
    return curve, evaluate(trainer, Windows(validation, 16)), parameter_hash(trainer), trainer.position


@pytest.mark.fast
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_the_bits_do_not_depend_on_threads_and_ranks(rng, config):
    """Loss curve, gradient norms, validation loss and parameters of 1 thread, for every division of 8 micro-batches."""
    tokens, validation = rng.integers(0, 37, 3 * 16 * 16 - 30), rng.integers(0, 37, 16 * 29 + 5)  # 29 = 16 + 13 windows
    serial = train(Solo(), 1, tokens, config, validation)
    assert [step for step, *_ in serial[0]] == [0, 1, 2] and serial[3] == 48
    for ranks, threads in product((1, 2, 4, 8), (1, 2, 4, 8)):
        if ranks * threads <= 8:
            for result in run_ranks(ranks, train, threads, tokens, config, validation):
                assert result == serial, f"{ranks} ranks of {threads} threads"


@pytest.mark.parametrize("threads, count", [(1, n) for n in range(1, 9)] + [(2, 4), (2, 8), (4, 8), (8, 8), (2, 2)])
def test_the_gradient_is_the_explicit_tree_over_separate_gradients_bit_for_bit(rng, threads, count):
    run, parameters = micro_batches(CONFIG, count, threads)
    for _ in range(2):  # the second step starts from the sums of the first
        inputs, targets = random_batch(rng, 16)
        losses = backward(run, inputs, targets, 1 / inputs.size)
        separate = []
        for part, loss in zip(even_slices(16, count), losses, strict=True):
            backend = NumpyBackend()
            leaves = {name: Tensor(array, backend, True) for name, array in parameters.items()}
            want = GPT2(CONFIG, leaves).loss(inputs[part], targets[part], 1 / inputs.size)
            want.backward()
            assert want.item() == loss
            separate.append({name: leaf.grad for name, leaf in leaves.items()})
        for name, got in run.work.arena.views(run.gradients).items():
            assert_array_equal(got, tree_sum([gradients[name] for gradients in separate]))


def worker_of(config, count, wait=lambda unit: None, completed=lambda unit: None):
    arena, backend = DividedArena(parameter_shapes(config)), NumpyBackend()
    flats = np.zeros((2, arena.size), np.float32)  # parameters, gradients
    work = Workload(config, ArenaLayout(arena, backend), *flats, backend, count, (2 * count, 8), np.array(1.0))
    return Worker(ArenaGradients(work, completed, work.used_twice), Solo(), wait)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 13),
    st.sampled_from(["transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"]),
    st.integers(0, 2**32),
)
def test_a_worker_adds_any_number_of_micro_batches_in_the_canonical_tree(count, name, seed):
    """Kernels write the gradient of a pass; in every second one they add it. A tied wte is added after its two uses."""
    rng, completed = np.random.default_rng(seed), []
    worker = worker_of(TIED, count, completed=completed.append)
    unit = unit_of(name)
    sums = worker.unit_gradients.sums[unit]
    assert len(sums.buffers) == max(1, math.ceil(math.log2(count)))  # a counter, not one array per gradient
    for _ in range(2):
        completed.clear()
        gradients = rng.standard_normal((count, *worker.work.arena.shapes[name])).astype(np.float32)
        gradients *= (10.0 ** rng.integers(-4, 5, (count, 1, 1))).astype(np.float32)  # another order gives another sum
        sums.begin()
        for gradient in gradients:
            array, adds = (sums.separate[name], False) if name in sums.separate else sums.destination(name)
            array[...] = array + gradient if adds else gradient
            assert not completed
            worker.unit_gradients.completed(unit)
        assert completed == [unit]
        assert_array_equal(worker.work.arena.views(worker.gradients)[name], tree_reduce(list(gradients), np.add))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_kernels_write_the_gradients_of_a_worker_into_its_sums(rng, config, count):
    """Except those of a parameter with two uses, which are added to each other before another micro-batch is added."""
    worker = worker_of(config, count)
    batch = [tuple(rng.integers(0, config.vocab_size, (2, 2, 8))) for _ in range(count)]
    worker.run(batch, 1.0, None, [np.zeros(()) for _ in batch])
    for name, tensor in worker.tensors.items():
        apart = config.tied and count > 1 and name == "transformer.wte.weight"
        assert tensor.grad is tensor.buffer
        buffers = worker.unit_gradients.sums[unit_of(name)].buffers
        assert any(np.shares_memory(tensor.buffer, flat) for flat in buffers) != apart, name


def test_a_worker_waits_for_each_unit_and_completes_it_once_after_its_last_micro_batch(rng):
    events = []
    hooks = dict(wait=lambda unit: events.append(f"wait {unit}"), completed=lambda unit: events.append(f"done {unit}"))
    worker = worker_of(CONFIG, 2, **hooks)
    batch = [tuple(rng.integers(0, CONFIG.vocab_size, (2, 2, 8))) for _ in range(2)]
    worker.run(batch, 1.0, None, [np.zeros(()) for _ in batch])
    units = list(worker.work.arena.units)
    assert units == ["embedding", *(f"h.{layer}" for layer in range(CONFIG.n_layer)), "head"]
    waits, done = [f"wait {unit}" for unit in units], [f"done {unit}" for unit in reversed(units)]
    assert events == [*waits, *waits, *done]


def test_the_additions_after_an_item_are_the_carries_of_a_binary_counter():
    assert [additions(number, number == 7) for number in range(8)] == [0, 1, 0, 2, 0, 1, 0, 3]
    assert [additions(number, number == 4) for number in range(5)] == [0, 1, 0, 2, 1]
    assert [additions(number, number == 6) for number in range(7)] == [0, 1, 0, 2, 0, 1, 2]
    assert additions(0, last=True) == 0


@pytest.mark.parametrize("count", range(1, 40))
def test_a_stack_with_these_additions_is_the_canonical_tree(count):
    stack, deepest = [], 0
    for number in range(count):
        stack.append(str(number))
        deepest = max(deepest, len(stack))
        for _ in range(additions(number, number == count - 1)):
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
    assert stack == [tree_reduce(map(str, range(count)), lambda a, b: f"({a}+{b})")]
    assert deepest <= math.log2(count) + 1


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("count, threads, rows", [(8, 1, 16), (8, 4, 16), (3, 3, 16), (5, 1, 16), (7, 7, 9), (6, 2, 7)])
def test_the_sum_over_micro_batches_is_the_gradient_of_one_big_batch(rng, config, count, threads, rows):
    """Also for rows that do not divide evenly, as without determinism: only float64 rounding differs.

    Weights, and therefore activations, are ten times as large as at initialisation: hence 1e-11.
    """
    inputs, targets = random_batch(rng, rows)
    whole, _ = micro_batches(config, 1, 1, "fp64")
    parts, _ = micro_batches(config, count, threads, "fp64")
    (loss,), losses = (backward(run, inputs, targets, 1 / inputs.size) for run in (whole, parts))
    assert len(losses) == count and abs(sum(losses) / loss - 1) <= 1e-11
    got, want = parts.gradients, whole.gradients
    assert np.linalg.norm(got - want) <= 1e-11 * np.linalg.norm(want) and np.linalg.norm(want) > 0.01
    for name, gradient in parts.work.arena.views(got).items():
        want_here = whole.work.arena.views(want)[name]
        # key biases have a gradient of rounding only: hence the second term
        assert np.linalg.norm(gradient - want_here) <= 1e-11 * (np.linalg.norm(want_here) + 0.1 * np.linalg.norm(want))


def test_micro_batches_that_threads_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="8 micro-batches .* 3 threads: use `threads=1`"):
        micro_batches(CONFIG, 8, 3)


def test_padding_of_the_arena_stays_zero(rng):
    run, _ = micro_batches(CONFIG, 4, 2)
    backward(run, *random_batch(rng, 8), 1.0)
    used = np.zeros(run.work.arena.size, bool)
    for part in run.work.arena.slices.values():
        used[part] = True
    assert not run.gradients[~used].any() and run.gradients[used].any()


@given(st.integers(0, 100), st.integers(1, 20))
def test_even_slices_tile_the_rows(n, parts):
    slices = even_slices(n, parts)
    assert [i for part in slices for i in range(n)[part]] == list(range(n)) and len(slices) == parts
    lengths = {part.stop - part.start for part in slices}
    assert max(lengths) - min(lengths) <= 1


def test_evaluate_is_the_mean_over_every_whole_window(rng):
    tokens = rng.integers(0, 37, 16 * 11 + 9)
    trainer = Trainer(CONFIG, backends(2, "fp64"), batch_size=8, seq_len=16, micro_batches=4)
    before = parameter_hash(trainer)
    inputs, targets = tokens[:-1][: 16 * 11].reshape(11, 16), tokens[1:][: 16 * 11].reshape(11, 16)
    with no_grad():
        want = np.mean(
            [current_model(trainer).loss(x[None], y[None]).item() for x, y in zip(inputs, targets, strict=True)]
        )
    assert evaluate(trainer, Windows(tokens, 16)) == pytest.approx(want, rel=1e-12)
    assert parameter_hash(trainer) == before and trainer.steps == trainer.position == 0


def test_the_validation_loss_is_the_same_bits_for_any_threads_and_ranks(rng):
    """In float64, where another grouping of a short last batch changes bits; 29 windows are batches of 16 and 13."""
    several = rng.integers(0, 37, (8, 16 * 29 + 5))  # one sum in another order is often equal by chance

    def validation_losses(comm, threads):
        options = dict(batch_size=16, seq_len=16, micro_batches=8, world=comm)
        trainer = Trainer(CONFIG, backends(threads, "fp64"), **options)
        trainer.parameters *= 20
        return [evaluate(trainer, Windows(tokens, 16)) for tokens in several]

    want = validation_losses(Solo(), 1)
    for ranks, threads in ((1, 2), (1, 8), (2, 1), (2, 4), (4, 1), (8, 1)):
        assert run_ranks(ranks, validation_losses, threads) == [want] * ranks


# -- the trainer ---------------------------------------------------------------------------------------------


def test_training_learns_and_continues_from_what_it_loads_bit_for_bit(rng):
    windows = Windows(np.tile(rng.integers(0, 37, 50), 20), 16)

    def fresh():
        options = dict(optimizer=dict(weight_decay=0.1, clip=1.0))
        return Trainer(CONFIG, backends(1), batch_size=8, seq_len=16, micro_batches=8, **options)

    straight, first, second = fresh(), fresh(), fresh()
    curve = [straight.step(read_batch(straight, windows), 1e-2).loss for _ in range(12)]
    assert curve[0] == pytest.approx(math.log(37), rel=0.02) and curve[-1] < 0.8 * curve[0]
    for _ in range(5):
        first.step(read_batch(first, windows), 1e-2)
    moments = {name: tuple(m.copy() for m in pair) for name, pair in named_moments(first).items()}
    parameters = {name: array.copy() for name, array in named_parameters(first).items()}
    load(second, parameters, moments, first.steps, first.position)
    assert parameter_hash(second) == parameter_hash(first)
    assert [second.step(read_batch(second, windows), 1e-2).loss for _ in range(7)] == curve[5:]
    assert parameter_hash(second) == parameter_hash(straight) != parameter_hash(first)


def test_the_model_of_a_trainer_shares_its_parameters(rng):
    trainer = Trainer(CONFIG, backends(1), batch_size=4, seq_len=16, micro_batches=4, seed=2)
    for name, value in initial_parameters(CONFIG, 2):
        assert_array_equal(current_model(trainer).parameters[name].numpy(), value)
        assert np.shares_memory(current_model(trainer).parameters[name].data, trainer.parameters)


def test_a_sequence_longer_than_the_block_is_refused():
    with pytest.raises(ConfigError, match="`seq_len=17` .* block of 16"):
        Trainer(CONFIG, backends(1), batch_size=4, seq_len=17, micro_batches=4)


@pytest.mark.parametrize("token", [-1, 37])
@pytest.mark.parametrize("where", [0, 1], ids=["inputs", "targets"])
def test_a_batch_with_a_token_outside_the_vocabulary_is_refused(rng, token, where):
    trainer = Trainer(CONFIG, backends(1), batch_size=4, seq_len=16, micro_batches=4)
    batch = random_batch(rng, 4)
    batch[where, 3, 15] = token
    with pytest.raises(ShapeError, match=f"token {token} is outside the vocabulary of 37"):
        trainer.prepare(*batch)


@pytest.mark.parametrize("dtype", [float, np.float32, bool, object, complex, "U2"], ids=str)
@pytest.mark.parametrize("where", [0, 1], ids=["inputs", "targets"])
def test_a_batch_of_another_dtype_than_integers_is_refused(rng, dtype, where):
    """A backend would truncate 1.5 to the token 1 without a word."""
    trainer = Trainer(CONFIG, backends(1), batch_size=4, seq_len=16, micro_batches=4)
    batch = list(random_batch(rng, 4))
    batch[where] = batch[where].astype(dtype)
    message = f"batch: tokens have dtype {batch[where].dtype}, but they must be integers"
    with pytest.raises(ShapeError, match=re.escape(message)):
        trainer.prepare(*batch)


@pytest.mark.parametrize("convert", [np.ndarray.tolist, np.uint16, np.int64, torch.tensor])
def test_a_batch_of_lists_or_of_any_integers_is_accepted(rng, convert):
    losses = []
    batch = random_batch(rng, 4)
    for inputs, targets in (batch, map(convert, batch)):
        trainer = Trainer(CONFIG, backends(1), batch_size=np.int64(4), seq_len=16, micro_batches=4)
        losses.append(trainer.step(trainer.prepare(inputs, targets), 1e-3).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "micro_batches"])
@pytest.mark.parametrize("size", [4.0, "4", None, True, 0, -4], ids=repr)
def test_a_trainer_with_a_size_that_is_not_a_positive_whole_number_is_refused(name, size):
    sizes = {"batch_size": 4, "seq_len": 4, "micro_batches": 4, name: size}
    with pytest.raises(ConfigError, match=re.escape(f"`{name}={size!r}` must be a positive whole number")):
        Trainer(CONFIG, backends(1), **sizes)


@pytest.mark.parametrize("batch_size, micro_batches", [(3, 8), (4, 5)])
def test_a_trainer_with_an_empty_micro_batch_is_refused(batch_size, micro_batches):
    with pytest.raises(ConfigError, match=f"`micro_batches={micro_batches}`: .* of `batch_size={batch_size}`$"):
        Trainer(CONFIG, backends(1), batch_size=batch_size, seq_len=16, micro_batches=micro_batches)


@pytest.mark.parametrize("micro_batches, ranks, advice", [(3, 2, 2), (7, 4, 4), (8, 3, 6)])
def test_micro_batches_that_ranks_do_not_divide_are_refused(micro_batches, ranks, advice):
    def refused(comm):
        words = f"`micro_batches={micro_batches}` is not divisible by {ranks} ranks: use `micro_batches={advice}`"
        with pytest.raises(ConfigError, match=words):
            Trainer(CONFIG, backends(1), batch_size=8, seq_len=16, micro_batches=micro_batches, world=comm)
        return True

    assert all(run_ranks(ranks, refused))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", [(8, 16), (1, 16), (4, 15), (4, 17), (64,), (4, 16, 1)], ids=str)
@pytest.mark.parametrize("where", [0, 1], ids=["inputs", "targets"])
def test_a_batch_of_another_shape_than_the_part_of_this_rank_is_refused(rng, ranks, shape, where):
    """The gradient is divided by the number of tokens of the global batch, so it would be that of another loss."""

    def prepare(world):
        trainer = Trainer(CONFIG, backends(1), batch_size=4 * ranks, seq_len=16, micro_batches=4, world=world)
        batch = list(random_batch(rng, 4))
        trainer.prepare(*batch)
        batch[where] = np.zeros(shape, int)
        with pytest.raises(
            ShapeError, match=re.escape(f"batch: tokens {shape}, but the rows of this rank are")
        ) as found:
            trainer.prepare(*batch)
        return str(found.value).endswith("(rows, T) = (4, 16)")

    assert all(run_ranks(ranks, prepare))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_diverges_changes_nothing(rng, ranks, what):
    windows = Windows(rng.integers(0, 37, 500), 16)

    def run(comm):
        trainer = Trainer(CONFIG, backends(2), batch_size=8, seq_len=16, micro_batches=8, world=comm)
        trainer.step(read_batch(trainer, windows), 1e-3)
        if what == "loss":
            named_parameters(trainer)["transformer.ln_f.bias"][3] = np.nan
        else:
            trainer.optimizer.norm_and_factor = lambda *_: (np.float64(math.inf), np.float64(math.nan))

        def state():
            moments = named_moments(trainer).values()
            return trainer.parameters.tobytes(), [[m.tobytes() for m in pair] for pair in moments]

        before = state()
        with pytest.raises(Diverged, match=r"step 1: .*(nan|inf).*`lr` \(now 0.5\).* after 1 step$"):
            trainer.step(read_batch(trainer, windows), 0.5)
        assert state() == before and trainer.steps == 1 and trainer.position == 8
        return True

    assert all(run_ranks(ranks, run))


# -- workers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_workers_run_concurrently_and_return_results_in_order(size):
    workers, together = WorkerPool([f"backend {i}" for i in range(size)]), threading.Barrier(size, timeout=60)

    def work(backend, item):
        together.wait()
        return backend, item, is_recording()

    want = [(f"backend {i}", i, True) for i in range(size)]
    assert workers.map(work, workers.backends, range(size)) == want
    with no_grad():  # of the caller, and so of its workers
        assert workers.map(work, workers.backends, range(size)) == [(*w[:2], False) for w in want]
    assert workers.map(work, workers.backends, range(size)) == want
    workers.close()


@pytest.mark.parametrize("size", [1, 3])
def test_a_failure_in_any_worker_is_raised_when_all_have_stopped(size):
    workers, running = WorkerPool(range(size)), set()

    def work(worker, failing):
        running.add(worker)
        if worker == failing:
            running.remove(worker)
            raise ZeroDivisionError(f"worker {worker}")
        time.sleep(0.05)  # the others take longer than the failure
        running.remove(worker)
        return worker

    for failing in range(size):
        with pytest.raises(ZeroDivisionError, match=f"worker {failing}"):
            workers.map(work, workers.backends, [failing] * size)
        assert not running
    assert workers.map(work, workers.backends, [-1] * size) == list(range(size))  # the pool still works


@pytest.mark.parametrize("failing", range(3))
def test_a_failure_lets_the_workers_leave_the_barrier_at_which_they_wait(failing):
    workers, barrier = WorkerPool(range(3)), threading.Barrier(3)

    def work(worker, failing):
        if worker == failing:
            raise ZeroDivisionError(f"worker {worker}")
        barrier.wait()
        return worker

    with pytest.raises(ZeroDivisionError, match=f"worker {failing}"):
        workers.map(work, workers.backends, [failing] * 3, barrier=barrier)
    workers.wait()
    barrier.reset()
    assert workers.map(work, workers.backends, [-1] * 3, barrier=barrier) == [0, 1, 2]


@pytest.mark.parametrize("failing", range(2))
def test_map_does_not_wait_for_a_call_that_waits_for_something_else_than_the_barrier(failing):
    workers, barrier, message, ended = WorkerPool(range(2)), threading.Barrier(2), threading.Event(), []

    def work(worker):
        if worker == failing:
            raise ZeroDivisionError
        message.wait()
        ended.append(worker)

    with pytest.raises(ZeroDivisionError):
        workers.map(work, workers.backends, barrier=barrier)
    assert not ended
    message.set()
    assert workers.map(str, workers.backends) == ["0", "1"] and ended == [1 - failing]  # the next map() waits for it


def test_a_failure_in_a_kernel_surfaces_from_a_step(rng):
    trainer = Trainer(CONFIG, backends(4), batch_size=8, seq_len=16, micro_batches=8)
    windows = Windows(np.full(500, 36), 16)
    trainer.step(read_batch(trainer, windows), 1e-3)
    before = parameter_hash(trainer)

    def out_of_memory(*arguments):
        raise MemoryError("no room for logits")

    trainer.pool.backends[2].unembed_cross_entropy_backward = out_of_memory
    with pytest.raises(MemoryError, match="no room"):
        trainer.step(read_batch(trainer, windows), 1e-3)
    assert parameter_hash(trainer) == before and trainer.steps == 1


def steps_of(trainer, windows, count):
    steps = [trainer.step(read_batch(trainer, windows), 1e-3) for _ in range(count)]
    return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("kernel", ["embedding_forward", "mlp_backward", "attention_backward", "embedding_backward"])
@pytest.mark.parametrize("threads, zero", [(1, 0), (2, 0), (2, 3)])
def test_the_steps_after_a_pass_that_has_failed_are_right(rng, monkeypatch, threads, zero, kernel, error):
    """In any call of a kernel by one of the workers. After Ctrl-C the workers continue, while step() has returned."""
    windows, call = Windows(rng.integers(0, 37, 500), 16), int(rng.integers(1, 4))
    monkeypatch.setattr(merged, "ACTIVATIONS", 0)  # a call of the kernels for each micro-batch
    sizes = dict(batch_size=8, seq_len=16, micro_batches=8)
    want = steps_of(PlainTrainer(CONFIG, backends(threads), **sizes), windows, 4)
    trainer = PlainTrainer(CONFIG, backends(threads), **sizes, parallel=ParallelConfig(zero=zero))
    got, calls, compute = steps_of(trainer, windows, 1), [], getattr(trainer.backend, kernel)

    def fail(*arguments, **options):
        calls.append(kernel)
        if len(calls) != call:
            return compute(*arguments, **options)
        if error is MemoryError:
            raise error
        interrupt()
        return compute(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.backend, kernel, fail)
        with pytest.raises(error):
            trainer.step(read_batch(trainer, windows), 1e-3)
    assert got + steps_of(trainer, windows, 3) == want


def interrupt(*arguments):
    _thread.interrupt_main()  # what Ctrl-C does: KeyboardInterrupt in the main thread
    time.sleep(0.2)


def out_of_memory(*arguments):
    raise MemoryError


@pytest.mark.parametrize("trainer_class, threads, what, failure", [
    *product([PlainTrainer, Trainer], [1, 2], ["adamw_step"], [interrupt, out_of_memory]),
    (PlainTrainer, 1, "total_loss", interrupt),  # the update is complete, but not counted
])  # fmt: skip
def test_a_step_that_is_interrupted_while_it_writes_is_not_continued(
    rng, monkeypatch, trainer_class, threads, what, failure
):
    """The next step, or a checkpoint, would have some parameters of one step and some of another."""
    windows, sizes = Windows(rng.integers(0, 37, 500), 16), dict(batch_size=4, seq_len=16, micro_batches=4)
    want = steps_of(trainer_class(CONFIG, backends(threads), **sizes), windows, 3)
    trainer = trainer_class(CONFIG, backends(threads), **sizes)
    assert steps_of(trainer, windows, 1) == want[:1]
    saved = [{name: np.copy(x) for name, x in of(trainer).items()} for of in (named_parameters, named_moments)]
    owner = trainer.pool.backends[-1] if what == "adamw_step" else trainer.mesh
    compute = getattr(owner, what)
    with monkeypatch.context() as patch:
        patch.setattr(owner, what, lambda *arguments: (failure(), compute(*arguments))[1])
        with pytest.raises((MemoryError, KeyboardInterrupt)):
            trainer.step(read_batch(trainer, windows), 1e-3)
    for proceed in (lambda: trainer.step(read_batch(trainer, windows), 1e-3), lambda: check_finite(trainer)):
        with pytest.raises(UserError, match="^step 1 was interrupted while it changed the parameters: load a checkp"):
            proceed()
    load(trainer, *saved, steps=1, position=4)
    assert steps_of(trainer, windows, 2) == want[1:]


# -- the number of micro-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, count, threads, ranks, deterministic, want",
    [
        (16, None, 1, 1, True, (8, 1)),
        (16, None, 2, 1, True, (8, 2)),
        (16, None, 3, 1, True, (8, 2)),  # a thread owns a whole subtree
        (16, None, 64, 1, True, (8, 8)),
        (16, None, 2, 8, True, (8, 1)),
        (16, None, 4, 4, True, (8, 2)),
        (4, None, 2, 1, True, (4, 2)),
        (12, None, 8, 1, True, (4, 4)),
        (7, None, 8, 1, True, (1, 1)),
        (64, 32, 16, 2, True, (32, 16)),
        (16, None, 3, 1, False, (3, 3)),
        (16, None, 2, 4, False, (8, 2)),
        (2, None, 8, 1, False, (2, 2)),
        (15, None, 2, 5, False, (10, 2)),
        (16, 6, 4, 1, False, (6, 3)),
        (16, 5, 4, 1, False, (5, 1)),
    ],
)
def test_the_planned_micro_batches_and_threads(batch, count, threads, ranks, deterministic, want):
    assert plan_micro_batches(batch, count, threads, ranks, deterministic) == want


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0, None, 1, 1, True), "`batch_size=0`"),
        ((-4, None, 1, 2, False), "`batch_size=-4`"),
        ((16, None, 1, 3, True), "`batch_size=16` .* by 3 ranks: use `batch_size=15` and `deterministic=False`$"),
        ((16, None, 1, 3, False), "`batch_size=16` .* by 3 ranks: use `batch_size=15`$"),
        ((13, None, 1, 4, True), "`batch_size=13` .* by 4 ranks: use `batch_size=12`$"),
        ((1, None, 1, 2, True), "`batch_size=1` .* by 2 ranks: use `batch_size=2`$"),
        ((16, None, 1, 16, True), "8 micro-batches, not .* 16 ranks: use `micro_batches=16`, or `deter.*$"),
        ((16, None, 0, 1, True), "`threads=0` must be at least 1"),
        ((6, None, 1, 3, True), "2 micro-batches, not .* 3 ranks: use a number of ranks that is 2.n, or `determ.*$"),
        ((16, 6, 1, 1, True), "`micro_batches=6` is not a power of two: use 4 or 8"),
        ((16, 0, 1, 1, True), "`micro_batches=0` "),
        ((16, -2, 1, 1, True), "`micro_batches=-2` "),
        ((12, 8, 1, 1, True), "`batch_size=12` is not divisible by `micro_batches=8`: use `micro_batches=4`"),
        ((16, 2, 1, 4, True), "`micro_batches=2` is not divisible by 4 ranks"),
        ((16, 17, 1, 1, False), "`micro_batches=17` must be from 1 to `batch_size=16`"),
        ((16, 0, 1, 1, False), "`micro_batches=0` must be"),
        ((16, 6, 1, 4, False), "`micro_batches=6` .* divisible by 4 ranks"),
    ],
)
def test_an_impossible_plan_names_a_possible_one(arguments, words):
    with pytest.raises(ConfigError, match=words):
        plan_micro_batches(*arguments)


@settings(max_examples=300)
@given(st.integers(-1, 40), st.none() | st.integers(-1, 40), st.integers(0, 20), st.integers(1, 9), st.booleans())
def test_any_plan_is_an_even_division_or_a_message_whose_advice_works(batch, count, threads, ranks, deterministic):
    try:
        M, each = plan_micro_batches(batch, count, threads, ranks, deterministic)
    except ConfigError as error:
        advice = re.search(r"by \d+ ranks: use `batch_size=(\d+)`( and `deterministic=False`)?$", str(error))
        if advice:
            assert int(advice[1]) % ranks == 0 and int(advice[1]) > 0
            assert bool(advice[2]) == (deterministic and ranks.bit_count() > 1)  # the tree sum needs 2^n ranks
            if count is None and threads > 0:
                plan_micro_batches(int(advice[1]), count, threads, ranks, deterministic and not advice[2])
        advice = re.search(r": use `micro_batches=(\d+)` or `batch_size=(\d+)`$", str(error))
        if advice:
            assert batch % int(advice[1]) == 0 and int(advice[2]) % count == 0 and int(advice[2]) > 0
        return
    assert M % ranks == 0 and M // ranks % each == 0 and 1 <= each <= threads and ranks <= M <= batch
    assert count in (None, M)
    if deterministic:
        assert batch % M == 0 and M & (M - 1) == 0 and M // ranks // each & (M // ranks // each - 1) == 0


# -- the arena -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, TIED, PRESETS["nano"], PRESETS["tiny"]])
def test_the_arena_holds_every_parameter_once_on_its_own_blocks(config):
    arena = DividedArena(parameter_shapes(config))
    flat, seen = np.zeros(arena.size, np.float32), np.zeros(arena.size, int)
    assert arena.size % (SEGMENTS * PAGE) == 0
    assert list(arena.views(flat)) == [name for name, _ in parameter_shapes(config)]
    for (name, view), (_, shape) in zip(arena.views(flat).items(), parameter_shapes(config), strict=True):
        assert view.shape == shape and np.shares_memory(view, flat)
        assert arena.slices[name].start % PAGE == 0
        seen[arena.slices[name]] += 1
        view += 1
    assert_array_equal(seen, flat)
    assert seen.max() == 1 and seen.sum() == sum(math.prod(shape) for _, shape in parameter_shapes(config))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 7, 8, 16, 32, 63, 64, 65, 100])
def test_parts_tile_the_arena_and_decay_exactly_the_matrices(parts):
    arena = DividedArena(parameter_shapes(CONFIG))
    slices = [arena.share(i, parts) for i in range(parts)]
    assert [edge for part in slices for edge in (part.start, part.stop)] == sorted(
        edge for part in slices for edge in (part.start, part.stop)
    )
    assert slices[0].start == 0 and slices[-1].stop == arena.size
    assert all(a.stop == b.start for a, b in zip(slices, slices[1:], strict=False))
    segment = arena.size // SEGMENTS
    assert all(part.start % segment == 0 for part in slices)
    if SEGMENTS % parts == 0:
        assert {part.stop - part.start for part in slices} == {arena.size // parts}
    got, decays = np.full(arena.size, -1), arena.decays()
    assert decays.shape == (arena.size // PAGE,) and decays.dtype == np.int32
    for part in slices:
        pages = arena.pages(part)
        assert (pages.start * PAGE, pages.stop * PAGE) == (part.start, part.stop)
        assert (got[part] == -1).all()  # no element is updated twice
        got[part] = np.repeat(decays[pages], PAGE)
    for name, shape in arena.shapes.items():
        assert (got[arena.slices[name]] == (len(shape) == 2)).all(), name


# -- optimizer and schedule ----------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("clip, weight_decay", [(0.0, 0.0), (1.0, 0.1), (1e9, 0.01)])
def test_adamw_with_clipping_equals_torch(rng, threads, clip, weight_decay):
    """clip_grad_norm_ and AdamW with two groups, for five steps, gradients both above and below the clipping norm."""
    arena = DividedArena(parameter_shapes(CONFIG))
    flat, gradients = np.zeros((2, arena.size))
    views, gradient_views = arena.views(flat), arena.views(gradients)
    for name, value in initial_parameters(CONFIG, 4):
        views[name][...] = value
    theirs = {name: torch.tensor(value.copy(), requires_grad=True) for name, value in views.items()}
    groups = [
        dict(params=[p for p in theirs.values() if p.ndim > 1], weight_decay=weight_decay),
        dict(params=[p for p in theirs.values() if p.ndim == 1], weight_decay=0.0),
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    workers = WorkerPool(backends(threads, "fp64"))
    rule = AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=weight_decay)
    ours = DividedOptimizer(ArenaLayout(arena, workers.backends[0]), flat, workers, rule, clip=clip)
    for step in range(5):
        lr = 1e-2 / (step + 1)
        for name, parameter in theirs.items():
            gradient_views[name][...] = rng.standard_normal(parameter.shape) * 10.0 ** (step - 4)
            parameter.grad = torch.tensor(gradient_views[name].copy())
        untouched = gradients.copy()
        norm = ours.norm(gradients)
        want = torch.nn.utils.clip_grad_norm_(theirs.values(), clip or math.inf)
        assert norm == pytest.approx(want.item(), rel=1e-12)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        again, scale = ours.norm_and_factor(gradients)
        ours.update(gradients, scale, ours.coefficients(step + 1, lr))
        assert again == norm
        assert_array_equal(gradients, untouched)
        for name, parameter in theirs.items():
            got, want = views[name], parameter.detach().numpy()
            assert np.linalg.norm(got - want) <= 1e-12 * np.linalg.norm(want), name  # float64 on both sides
    used = sum(part.stop - part.start for part in arena.slices.values())
    assert np.count_nonzero(flat) <= used


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_norm_and_the_update_are_the_same_bits_for_any_number_of_threads(rng, precision):
    arena = DividedArena(parameter_shapes(PRESETS["nano"]))
    start, gradients = rng.standard_normal((2, arena.size)).astype(NumpyBackend(precision).dtype)
    last = list(arena.slices)[-1]
    gradients[arena.padded(last).stop :] = 0  # the padding at the end counts in no norm
    results = []
    for threads in (1, 2, 3, 5, 8, 64, 65):
        flat = start.copy()
        workers = WorkerPool(backends(threads, precision))
        layout = ArenaLayout(arena, workers.backends[0])
        optimizer = DividedOptimizer(layout, flat, workers, AdamW(weight_decay=0.1), clip=1.0)
        norm, scale = optimizer.norm_and_factor(gradients)
        optimizer.update(gradients, scale, optimizer.coefficients(1, 1e-2))
        assert optimizer.norm(gradients) == norm
        results.append((norm.item(), flat.tobytes()))
    assert len(set(results)) == 1
    assert results[0][0] == pytest.approx(np.linalg.norm(gradients.astype(np.float64)), rel=1e-6)


class Momentum:
    """Another rule than AdamW."""

    STATES, keeps_zeros = ("momentum_buffer",), True

    def __init__(self, momentum):
        self.momentum = momentum

    def coefficients(self, step, lr):
        return np.array([lr])

    def update(self, backend, p, g, states, coefficients, factor, decays, copy=None):
        (m,) = states.values()
        m[...] = self.momentum * m + factor * g
        p -= coefficients[0] * m


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("units", [False, True])
def test_another_rule_is_divided_over_threads_and_ranks(rng, ranks, units):
    arena = DividedArena(parameter_shapes(CONFIG), ranks)
    start, gradients = rng.standard_normal((2, arena.size))
    for gap in arena.padding():
        start[gap] = gradients[gap] = 0

    def run(comm):
        workers = WorkerPool(backends(2, "fp64"))
        backend = workers.backends[0]
        layout = UnitShards(arena, comm, backend) if units else ArenaLayout(arena, backend, comm)
        p, g = np.zeros((2, layout.size))
        for flat, whole in ((p, start), (g, gradients)):
            for name, array in arena.views(whole).items():
                layout.put(flat, name, array)
        rule = Momentum(0.5)
        optimizer = DividedOptimizer(layout, p, workers, rule, clip=1.0)
        plain = Optimizer(arena, start.copy(), backend, rule, clip=1.0)
        for step in (1, 2):
            for each, gradient in ((optimizer, g), (plain, gradients)):
                norm, factor = each.norm_and_factor(gradient)
                each.update(gradient, factor, each.coefficients(step, 0.1))
        assert norm > 1  # so that the gradient is clipped
        assert_array_equal(layout.whole(p), plain.parameters)
        (state,) = optimizer.gathered_states()
        assert_array_equal(layout.whole(state), plain.states["momentum_buffer"])
        return True

    assert all(run_ranks(ranks, run))


@pytest.mark.parametrize(
    "option, value",
    [("beta1", 1.0), ("beta1", -0.1), ("beta2", math.nan), ("eps", -1), ("weight_decay", math.nan), ("clip", math.inf)],
)
def test_options_of_an_optimizer_outside_their_range_are_refused_by_name(option, value):
    sizes = dict(batch_size=2, seq_len=8, micro_batches=1, optimizer={option: value})
    with pytest.raises(ConfigError, match=f"`{option}={value}` must be"):
        SerialTrainer(CONFIG, NumpyBackend(), **sizes)
    with pytest.raises(ConfigError, match=f"`{option}={value}` must be"):
        PlainTrainer(CONFIG, backends(1), **sizes)


@pytest.mark.parametrize("ranks, zero", [(1, 0), (2, 1)])
@pytest.mark.parametrize("backend", [NumpyBackend, PlainBackend])
def test_with_epsilon_0_the_padding_of_the_arena_stays_zero(rng, backend, ranks, zero):
    """It would be 0 / 0. Then no checkpoint could be saved, although all parameters are finite."""
    windows = Windows(rng.integers(0, 37, 500), 16)

    def run(comm):
        trainer = PlainTrainer(
            TIED, [backend("fp64")], batch_size=8, seq_len=16, micro_batches=4, optimizer=dict(eps=0.0), world=comm,
            parallel=ParallelConfig(zero=zero),
        )  # fmt: skip
        with np.errstate(invalid="ignore"):
            steps_of(trainer, windows, 1)
        covered = np.zeros(trainer.arena.size, bool)
        for own in trainer.arena.slices.values():
            covered[own] = True
        assert (~covered).any() and not trainer.parameters[~covered].any()
        # A key bias has no gradient except rounding errors; if one of them is 0, the bias is NaN, as in PyTorch.
        trainer.parameters[np.isnan(trainer.parameters) & covered] = 0
        check_finite(trainer)
        return True

    assert all(run_ranks(ranks, run))


def test_schedules_equal_their_formulas():
    peak, floor, warmup, steps = 3e-3, 3e-4, 10, 110
    rates = {
        kind: [Schedule(kind, peak, floor, warmup, steps)(step) for step in range(200)]
        for kind in ("constant", "linear", "cosine")
    }
    for rate in rates.values():
        assert rate[:10] == pytest.approx([peak * n / 10 for n in range(1, 11)])  # the first rate is not 0
        assert rate[10] == pytest.approx(peak)
    assert rates["constant"][10:] == [peak] * 190
    assert rates["linear"][60] == pytest.approx((peak + floor) / 2)
    assert rates["linear"][35] == pytest.approx(0.75 * peak + 0.25 * floor)
    assert rates["cosine"][60] == pytest.approx((peak + floor) / 2)
    assert rates["cosine"][35] == pytest.approx(floor + (peak - floor) * (1 + math.sqrt(0.5)) / 2)
    for kind in ("linear", "cosine"):
        assert rates[kind][110:] == pytest.approx([floor] * 90)  # constant after the end of the decay
        assert all(a > b for a, b in zip(rates[kind][10:110], rates[kind][11:111], strict=True))
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak), T_max=100, eta_min=floor
    )
    for step in range(10, 100):
        assert rates["cosine"][step] == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        theirs.optimizer.step(), theirs.step()


def test_schedules_without_warmup_or_decay():
    assert Schedule("cosine", 1.0, 0.0, 0, 10)(0) == 1.0 and Schedule("linear", 1.0, 0.5, 0, 10)(10) == 0.5
    assert Schedule("linear", 1.0, 0.0, 5, 5)(4) == 1.0  # a warm-up as long as the run
    assert Schedule("constant", 0.0)(3) == 0.0


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(kind="step"), "`schedule=step` is unknown: use constant, linear or cosine"),
        (dict(peak=-1e-3), "`lr=-0.001"),
        (dict(peak=math.nan), "`lr=nan"),
        (dict(peak=math.inf), "`lr=inf"),
        (dict(floor=-1.0), "`min_lr=-1"),
        (dict(warmup=-1), "`warmup=-1"),
    ],
)
def test_an_invalid_schedule_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        Schedule(**options)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("given", [None, 2, 4, 12])
@pytest.mark.parametrize("batch", [1, 12, 16])
def test_the_possible_numbers_of_ranks_are_those_for_which_a_step_can_be_planned(batch, given, deterministic):
    def plan(ranks):
        try:
            return plan_micro_batches(batch, given, 1, ranks, deterministic)[0]
        except ConfigError:
            return None

    possible = [ranks for ranks in range(1, batch + 1) if plan(ranks)]
    micro_batches = plan(1) if deterministic else given
    if possible:
        assert possible_ranks(batch, micro_batches, deterministic) == possible
