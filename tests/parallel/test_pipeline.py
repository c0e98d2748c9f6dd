"""A pipeline has the bits of one rank: for every schedule, number of ranks and replicas, and across checkpoints."""

import contextlib
import functools
import re

import numpy as np
import pytest

from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.errors import ConfigError, Diverged
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.pipeline.measured import measured, message_seconds, pictures
from gpt2core.parallel.pipeline.messages import Messages
from gpt2core.parallel.pipeline.micro_batches import make_schedule
from gpt2core.parallel.pipeline.placement import describe_ranks
from gpt2core.parallel.pipeline.schedules import SCHEDULES
from gpt2core.parallel.pipeline.simulator import needs, simulate
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
from tests.support.training import assert_same, make_trainer, train

TOKENS = np.random.default_rng(7).integers(0, 36, 1000)


def model(layers=4, tied=False):
    return GPT2Config(vocab_size=37, block_size=16, n_layer=layers, n_head=2, n_embd=8, tied=tied)


@functools.cache
def serial(**options):
    return train(Solo(), ParallelConfig(), TOKENS, steps=2, **options)


def assert_serial_bits(ranks, parallel, **options):
    for got in run_ranks(ranks, lambda comm: train(comm, parallel, TOKENS, steps=2, **options)):
        assert_same(got, serial(**options))


# -- the serial bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp, dp", [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_serial_bits(schedule, tied, pp, dp):
    layers = 8 if schedule == "interleaved" and pp == 4 else 4
    assert_serial_bits(pp * dp, ParallelConfig(pp=pp, pp_schedule=schedule), config=model(layers, tied))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_without_clipping_too(schedule, tied):
    assert_serial_bits(2, ParallelConfig(pp=2, pp_schedule=schedule), config=model(tied=tied), clip=0.0)


@pytest.mark.parametrize("layers, pp, chunks", [(3, 2, 1), (5, 4, 1), (7, 2, 3)])
def test_ranks_that_do_not_divide_the_layers_give_the_serial_bits(layers, pp, chunks):
    schedule = "1f1b" if chunks == 1 else "interleaved"
    parallel = ParallelConfig(pp=pp, pp_schedule=schedule, chunks=chunks)
    assert_serial_bits(pp, parallel, config=model(layers, tied=True))


@pytest.mark.parametrize("dp, zero", [("naive", 0), ("overlap", 0), ("bucket", 0), ("flat", 1), ("bucket", 1)])
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_every_strategy_of_data_parallelism_gives_the_serial_bits(schedule, dp, zero):
    parallel = ParallelConfig(pp=2, pp_schedule=schedule, dp=dp, bucket_mb=0.002, zero=zero)
    assert_serial_bits(4, parallel, config=model(tied=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recomputed_blocks_give_the_serial_bits(schedule):
    parallel = ParallelConfig(pp=2, pp_schedule=schedule, recompute="block")
    assert_serial_bits(2, parallel, config=model(tied=True))


# -- worker threads: each runs the schedule with its own micro-batches -------------------------------------------------


@pytest.mark.parametrize("pp, threads", [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_worker_threads_give_the_serial_bits(schedule, tied, pp, threads):
    layers, chosen = 8 if schedule == "interleaved" and pp == 4 else 4, ParallelConfig(pp=pp, pp_schedule=schedule)
    assert_serial_bits(pp, chosen, config=model(layers, tied), threads=threads)


@pytest.mark.parametrize("options", [dict(zero=1), dict(dp="bucket", bucket_mb=0.002, recompute="block")], ids=str)
def test_worker_threads_of_replicas_give_the_serial_bits(options):
    parallel = ParallelConfig(pp=2, pp_schedule="zero-bubble", **options)
    assert_serial_bits(4, parallel, config=model(tied=True), threads=2)


def test_worker_threads_have_one_copy_of_a_tied_table():
    def copies(comm):
        workers = make_trainer(comm, ParallelConfig(pp=2), config=model(tied=True), threads=4).accumulator.workers
        tensors = [table.tensor for worker in workers for table in worker.tied.values()]
        assert all(np.shares_memory(tensor.data, tensors[0].data) for tensor in tensors)
        return len({id(tensor) for tensor in tensors})

    assert run_ranks(2, copies) == [4, 4]


def test_worker_threads_over_mpi():
    run_mpi(2, assert_bits_over_mpi, serial(config=model(tied=True))[:3])


def assert_bits_over_mpi(comm, want):
    assert_same(train(comm, ParallelConfig(pp=2), TOKENS, steps=2, config=model(tied=True), threads=2), want)


# -- with tensor parallelism: the bits of the same `tp` without a pipeline ---------------------------------------------


def tensor_parallel(**options):
    return run_ranks(2, lambda comm: train(comm, ParallelConfig(tp=2), TOKENS, steps=2, **options))[0]


@pytest.mark.parametrize("schedule, tied, clip", [
    pytest.param(schedule, tied, clip, marks=[] if (i + tied + (clip > 0)) % 2 else pytest.mark.long)
    for i, schedule in enumerate(SCHEDULES) for tied in (False, True) for clip in (1.0, 0.0)
])  # fmt: skip
def test_every_schedule_gives_the_bits_of_tensor_parallelism(schedule, tied, clip):
    options = dict(config=model(tied=tied), clip=clip)
    want = tensor_parallel(**options)
    for dp, more in ((1, dict(recompute="block")), (2, dict(zero=1))):
        parallel = ParallelConfig(pp=2, tp=2, pp_schedule=schedule, **more)
        for got in run_ranks(4 * dp, lambda comm, p=parallel: train(comm, p, TOKENS, steps=2, **options)):
            assert_same(got, want)


@pytest.mark.parametrize("tied", [False, True])
def test_evaluation_and_checkpoints_with_tensor_parallelism(tied):
    config, windows, validation = model(tied=tied), Windows(TOKENS, 16), Windows(TOKENS[:500], 16)

    def continued(comm, layout, saved):
        trainer = make_trainer(comm, ParallelConfig(**layout), config=config)
        if saved:
            parameters, moments, steps, position = saved
            load(trainer, *((parameters, moments) if comm.is_root else (None, None)), steps, position)
        loss = trainer.step(read_batch(trainer, windows), 3e-3).loss
        check_finite(trainer)
        verify(trainer)
        copies = ({name: np.array(array) for name, array in named_parameters(trainer).items()},
                  {name: [np.array(m) for m in pair] for name, pair in named_moments(trainer).items()})  # fmt: skip
        logits = current_model(trainer).logits(TOKENS[None, :16]).numpy()
        result = loss, evaluate(trainer, validation), parameter_hash(trainer), logits.tobytes()
        return result, (*copies, trainer.steps, trainer.position)

    def after_steps(layouts):
        results, saved = [], None
        for ranks, layout in layouts:
            each = run_ranks(ranks, continued, layout, saved)
            assert len({result for result, _ in each}) == 1
            results.append(each[0][0])
            saved = each[0][1]
        return results

    want = after_steps([(2, dict(tp=2))] * 3)
    interleaved = dict(tp=2, pp=2, pp_schedule="interleaved", zero=1)
    assert after_steps([(4, dict(tp=2, pp=2)), (2, dict(tp=2)), (8, interleaved)]) == want
    sharded = dict(tp=2, pp=2, pp_schedule="zero-bubble", zero=3)
    assert after_steps([(4, dict(tp=2, zero=3)), (8, sharded), (4, dict(tp=2, zero=2))]) == want


@pytest.mark.parametrize(
    "options", [dict(backend=PlainBackend), dict(micro_batches=2), dict(micro_batches=16)], ids=str
)
@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble"])
def test_another_backend_or_number_of_micro_batches_gives_the_serial_bits(schedule, options):
    assert_serial_bits(2, ParallelConfig(pp=2, pp_schedule=schedule), config=model(tied=True), **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_another_order_of_backward_gives_other_bits(schedule, monkeypatch):
    """A control: the canonical order of the sums depends on the schedule."""

    original = SCHEDULES[schedule]

    def reordered(P, M, V=1):
        order = {m: m for m in range(M)} | {1: 2, 2: 1}
        return [[(kind, order[m], c) for kind, m, c in actions] for actions in original(P, M, V)]

    monkeypatch.setitem(SCHEDULES, schedule, reordered)
    parallel = ParallelConfig(pp=2, pp_schedule=schedule)
    for got in run_ranks(2, lambda comm: train(comm, parallel, TOKENS, steps=2, config=model())):
        assert got[0] != serial(config=model())[0]
        np.testing.assert_allclose(got[0], serial(config=model())[0], rtol=1e-4)  # float32: only rounding errors


# -- what a rank has ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_is_stored_by_one_rank(tied):
    config = model(5, tied)
    names = run_ranks(4, lambda comm: list(make_trainer(comm, ParallelConfig(pp=4), config=config).arena.slices))
    assert sorted(sum(names, [])) == sorted(name for name, _ in parameter_shapes(config))
    assert config.head in names[-1] and "transformer.wpe.weight" in names[0]
    text = (
        "pipeline rank 0: embedding, h.0; pipeline rank 1: h.1; pipeline rank 2: h.2; pipeline rank 3: h.3 to h.4, head"
    )
    assert describe_ranks(config, 4, 1) == text


def test_the_ranks_of_an_interleaved_schedule_are_described():
    text = "pipeline rank 0: embedding, h.0 and h.3 to h.4; pipeline rank 1: h.1 to h.2 and h.5 to h.6, head"
    assert describe_ranks(model(7), 2, 2) == text


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_progress_before_each_unit_forward_and_after_each_unit_backward(schedule, monkeypatch):
    counts, progress = [], Messages.progress
    monkeypatch.setattr(Messages, "progress", lambda messages: (counts.append(1), progress(messages)))
    parallel = ParallelConfig(pp=2, pp_schedule=schedule)
    run_ranks(2, lambda comm: train(comm, parallel, TOKENS, steps=1, config=model()))
    assert len(counts) == 2 * 8 * 6  # 8 micro-batches, 4 blocks, embedding and head


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_live_activations_are_those_of_the_simulation(schedule):
    parallel, config = ParallelConfig(pp=4, pp_schedule=schedule), model(8)
    results = run_ranks(4, lambda comm: train(comm, parallel, TOKENS, steps=1, config=config))
    stages = [trainer.accumulator for *_, trainer in results]
    assert [stage.executor.peak for stage in stages] == simulate(stages[0].schedule).peaks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("P", "M"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (8, 16)])
def test_messages_from_one_rank_to_another_are_received_in_the_order_in_which_they_are_sent(schedule, tied, P, M):
    """So a group without tags, such as that of NCCL, can send them. Those of E have a group of their own."""
    for V in (2, 3) if schedule == "interleaved" else (1,):
        actions = make_schedule(ParallelConfig(pp=P, pp_schedule=schedule, chunks=V), M, tied)
        sent, received, last = {}, {}, P * V - 1
        for rank, own in enumerate(actions):
            for kind, m, c in own:
                to = {"F": c + 1, "B": c - 1}.get(kind, -1)
                if 0 <= to <= last:
                    sent.setdefault((rank, to % P), []).append((kind, m, c))
                source = {"F": c - 1, "B": c + 1}.get(kind, -1)
                if 0 <= source <= last:
                    received.setdefault((source % P, rank), []).append((kind, m, source))
        assert sent == received and len(sent) == (2 * P if schedule == "interleaved" and P > 2 else 2 * (P - 1))
        embeddings = [m for rank in actions for kind, m, _ in rank if kind == "E"]
        assert embeddings == [m for kind, m, c in actions[0] if (kind, c) == ("B", 0)] * tied


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_measured_actions_run_after_those_that_they_need(schedule):
    parallel = ParallelConfig(pp=2, pp_schedule=schedule)

    def result(comm):
        trainer, windows = make_trainer(comm, parallel, config=model(tied=True)), Windows(TOKENS, 16)
        trainer.accumulator.executor.record_times()
        for _ in range(2):
            trainer.step(read_batch(trainer, windows), 3e-3)
        evaluate(trainer, Windows(TOKENS[:100], 16))  # the times stay those of the last step
        micro_batches = trainer.accumulator
        return *measured(micro_batches, comm), list(pictures(micro_batches, comm, 60))

    for real, simulated, lines in run_ranks(2, result):
        assert real.times.keys() == simulated.times.keys() and real.peaks == simulated.peaks
        split, last = schedule == "zero-bubble", max(c for *_, c in real.times)
        for action, (start, end) in real.times.items():
            assert 0 <= start <= end <= real.seconds
            assert all(real.times[each][0] <= start for each in needs(*action, last, split))
        assert 0 <= real.bubble < 1 and 0 <= simulated.bubble < 1
        assert re.fullmatch(r"pipeline measured, the last step: [\d.]+ ms, bubble [\d.]+%", lines[0])
        assert [line[:8] for line in lines if "|" in line] == ["rank 0 |", "rank 1 |"] * 2
        assert all(len(line) <= 60 for line in lines if "|" in line)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("P", [2, 4])
def test_the_time_of_a_message_is_found_in_the_times_of_the_actions(schedule, P):
    actions = make_schedule(ParallelConfig(pp=P, pp_schedule=schedule), 2 * P, tied=False)
    for message in (0.0, 0.25):
        times = simulate(actions, lambda kind, chunk: dict(F=1.0, B=1.5, W=1.25)[kind], message).times
        assert message_seconds(actions, times) == pytest.approx(message)
    assert message_seconds(make_schedule(ParallelConfig(), 2, tied=False), {}) == 0


# -- evaluation, checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_validation_loss_is_that_of_one_rank(tied):
    windows = Windows(TOKENS[:500], 16)  # the last batch has empty micro-batches

    def validated(comm, **layout):
        return evaluate(make_trainer(comm, ParallelConfig(**layout), config=model(tied=tied)), windows)

    want = validated(Solo())
    for pp, schedule, zero in ((2, "interleaved", 0), (4, "1f1b", 0), (2, "1f1b", 2), (2, "interleaved", 3)):
        layout = dict(pp=pp, pp_schedule=schedule, zero=zero)
        assert set(run_ranks(4, functools.partial(validated, **layout))) == {want}


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_continues_at_another_layout(tied):
    layouts = [(1, {}), (2, dict(pp=2)), (4, dict(pp=2, pp_schedule="interleaved")), (2, dict(zero=1)), (1, {}),
               (4, dict(pp=2, pp_schedule="zero-bubble", zero=1)), (4, dict(pp=4, pp_schedule="gpipe"))]  # fmt: skip
    config = model(tied=tied)
    want, windows = make_trainer(Solo(), ParallelConfig(), config=config), Windows(TOKENS, 16)

    def continued(comm, layout, saved):
        trainer = make_trainer(comm, ParallelConfig(**layout), config=config)
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
    for ranks, layout in layouts:
        loss = want.step(read_batch(want, windows), 3e-3).loss
        results = run_ranks(ranks, continued, layout, saved)
        assert {result[:2] for result in results} == {(loss, parameter_hash(want))}
        saved = results[0][2]


@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_gets_the_whole_model_to_generate(tied):
    def logits(comm):
        trainer = train(comm, ParallelConfig(pp=comm.size), TOKENS, steps=2, config=model(tied=tied))[3]
        return current_model(trainer).logits(TOKENS[None, :16]).numpy()

    want = logits(Solo())
    for got in run_ranks(2, logits):
        np.testing.assert_array_equal(got, want)


def test_a_parameter_that_is_not_finite_on_one_rank_is_found_by_all():
    def check(comm):
        trainer = make_trainer(comm, ParallelConfig(pp=2), config=model())
        if comm.rank == 1:
            trainer.parameters[0] = np.inf
        with pytest.raises(Diverged, match="the norm of the parameters is inf"):
            check_finite(trainer)

    run_ranks(2, check)


# -- two streams of a GPU ----------------------------------------------------------------------------------------------


class TwoStreams(NumpyBackend):
    """A backend that notes whether there is work on the side stream for which the main stream has not waited."""

    def __init__(self, precision):
        super().__init__(precision)
        self.unfinished, self.runtime.after, self.runtime.join = False, self.after, self.join

    def after(self, *operands):
        self.unfinished = True
        return contextlib.nullcontext()

    def join(self):
        self.unfinished = False


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks, pp", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_an_update_begins_after_the_work_of_the_side_stream(ranks, pp, zero, tied):
    """Also if the last action of a rank adds to a tied table, and if one rank has all shards of its parameters."""

    def unfinished(comm, schedule):
        """Whether there was such work when the update read the gradients."""
        parallel = ParallelConfig(pp=pp, zero=zero, dp="flat", pp_schedule=schedule)
        trainer, found = make_trainer(comm, parallel, config=model(tied=tied), backend=TwoStreams), []
        norm_and_factor = trainer.optimizer.norm_and_factor

        def noted(gradients):
            found.append(trainer.backend.unfinished)
            return norm_and_factor(gradients)

        trainer.optimizer.norm_and_factor = noted
        trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 1e-3)
        return found

    def check(comm):
        for schedule in SCHEDULES if pp > 1 else ["1f1b"]:
            assert unfinished(comm, schedule) == [False], schedule

    run_ranks(ranks, check)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_gradients_that_are_computed_later_wait_for_the_memory_of_their_destinations(zero, tied):
    """The events for which these gradients wait were recorded before their destinations were allocated."""

    def check(comm):
        parallel, calls = ParallelConfig(pp=2, zero=zero, dp="flat", pp_schedule="zero-bubble"), []
        trainer = make_trainer(comm, parallel, config=model(tied=tied), backend=TwoStreams)
        executor, backend = trainer.accumulator.executor, trainer.backend
        set_destinations, compute, after = executor.gradients.set_destinations, executor.actions["W"], backend.after

        def noted(name, function):
            def call(*arguments):
                calls.append(name)
                return function(*arguments)

            return call

        def parameter_gradients(m, c):
            executor.later[m, c] = [noted("gradient", function) for function in executor.later[m, c]]
            calls.clear()
            compute(m, c)
            first = calls.index("gradient")
            assert "after" in calls[calls.index("destinations") : first], calls[: first + 1]

        executor.gradients.set_destinations = noted("destinations", set_destinations)
        backend.runtime.after = noted("after", after)
        executor.actions["W"] = parameter_gradients
        trainer.step(read_batch(trainer, Windows(TOKENS, 16)), 1e-3)
        assert calls

    run_ranks(2, check)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, parallel, options, message", [
    (2, dict(pp=2, pp_schedule="2f2b"), {},
     "`pp_schedule=2f2b` is unknown: choose from gpipe, 1f1b, interleaved, zero-bubble"),
    (2, dict(pp=2, chunks=2), {},
     "`chunks=2` and `pp_schedule=1f1b`: use `chunks=1`, or `pp_schedule=interleaved`"),
    (4, dict(pp=2, zero=1, zero_gather="forward"), {},
     "`pp=2` and `zero_gather=forward` exclude each other: use `zero_gather=end` or `pp=1`"),
    (4, dict(pp=2, compress="int8"), {},
     "`pp=2` and `compress=int8` exclude each other: use `compress=none` or `pp=1`"),
    (2, dict(pp=2), dict(threads=4, micro_batches=4),
     "each thread of a replica has 1 micro-batch, fewer than `pp=2`: use `micro_batches=8` or more"),
    (4, dict(pp=2, pp_schedule="interleaved"), dict(threads=2, micro_batches=12, batch_size=12),
     "`pp_schedule=interleaved`: each thread of a replica has 3 micro-batches, not divisible by `pp=2` ranks: use "
     "`micro_batches=8`"),
    (4, dict(pp=4), dict(config=model(3)),
     "`n_layer=3` is less than 4, the number of chunks on `pp=4` ranks with 1 chunk each"),
    (2, dict(pp=2, pp_schedule="interleaved"), dict(config=model(3)),
     "`n_layer=3` is less than 4, the number of chunks on `pp=2` ranks with 2 chunks each: use fewer ranks"),
    (4, dict(pp=2), dict(micro_batches=2),
     "each replica has 1 micro-batch, fewer than `pp=2`: use `micro_batches=4` or more"),
    (2, dict(pp=2, pp_schedule="interleaved"), dict(micro_batches=5, batch_size=10),
     "`pp_schedule=interleaved`: each replica has 5 micro-batches, not divisible by `pp=2` ranks: use "
     "`micro_batches=4`"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(ranks, parallel, options, message):
    def refused(comm):
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_trainer(comm, ParallelConfig(**parallel), **dict(config=model()) | options)

    run_ranks(ranks, refused)


@pytest.mark.parametrize("name", ["tp", "pp", "chunks"])
def test_a_size_below_one_is_refused(name):
    with pytest.raises(ConfigError, match=f"`{name}=0` must be a positive whole number"):
        ParallelConfig(**{name: 0})


@pytest.mark.parametrize("pp, noted", [(1, True), (2, False)])
def test_flags_of_a_pipeline_without_one_are_noted(pp, noted):
    _, notes = chosen(4, dict(dp="flat", pp=pp, pp_schedule="gpipe", chunks=2, schedule_picture=True))
    flags = "--pp-schedule gpipe", "--chunks 2", "--schedule-picture"
    want = [f"note: {flag}: no effect, because --pp is 1" for flag in flags]
    assert notes == (want if noted else [])
