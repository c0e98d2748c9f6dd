"""A step may begin before the result of the previous one is read: the same bits, and the same number of steps."""

import math
import signal
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from benchmarks.gpu import step as gpu_step
from benchmarks.harness import ours
from gpt2core.app.stop_signals import StopSignals
from gpt2core.app.training import loop
from gpt2core.app.training.loop import run
from gpt2core.architecture import GPT2Config
from gpt2core.data import Windows
from gpt2core.engine import fast_trainer, steps_in_flight
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import Diverged
from gpt2core.model import initial_parameters
from gpt2core.optimizer import Schedule
from gpt2core.parallel.evaluation import evaluate
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import check_finite, current_model, load, named_moments, parameter_hash, verify
from gpt2core.runtime import Compiled, Results
from gpt2core.training_loop import read_batch
from stage0_serial.cpu_runtime import CpuRuntime
from stage0_serial.numpy_backend import NumpyBackend

CONFIG = GPT2Config(37, 16, 2, 2, 16, tied=False)
SCHEDULE = Schedule("linear", 3e-3, warmup=2, steps=12)  # another rate each step


class Replayed(Compiled):
    """Behaves like a captured step: from the third call two steps may overlap, and results are valid for two calls."""

    calls, unread, most_ahead, buffers = 0, 0, 0, ()

    @property
    def can_overlap(self):
        return self.calls >= 2

    def __call__(self, *args):
        results = [np.array(result) for result in self.function(*args)]
        self.buffers = [*self.buffers, results]
        if len(self.buffers) > 2:
            for buffer in self.buffers.pop(0):
                buffer[...] = np.nan
        self.calls, self.unread = self.calls + 1, self.unread + 1
        assert self.unread <= 1 + (self.calls > 2)
        self.most_ahead = max(self.most_ahead, self.unread)
        return ReplayedResults(self, results)


class ReplayedResults(Results):
    def __init__(self, owner, arrays):
        super().__init__(arrays)
        self.owner = owner

    def wait(self):
        self.owner.unread -= 1
        return self.arrays


class ReplayingRuntime(CpuRuntime):
    def compile_step(self, function, capture=True, collectives=False):
        return Replayed(function)


class ReplayingBackend(NumpyBackend):
    def __init__(self, *options):
        super().__init__(*options)
        self.runtime = ReplayingRuntime()

    def clip(self, sums, clip, guard=None):
        norm, factor = super().clip(sums, clip)
        if guard is not None:  # None: the norm of the parameters
            guard.stop[:] += 0.0 * float(norm)  # NaN if norm is not finite; a NumPy scalar would cause a warning
            factor = factor + np.float64(guard.stop[0])
        return norm, factor


def trainer_of(backend, world=None, **options):
    sizes = dict(batch_size=4, seq_len=16, micro_batches=4, optimizer=dict(clip=0.5, weight_decay=0.1))
    return Trainer(CONFIG, [backend], world=world, **sizes | options)


def windows_of(seed):
    return Windows(np.random.default_rng(seed).integers(0, 37, 700), 16)


def train(backend, seed, world=None, steps=12, interrupt=None, **intervals):
    """-> what on_step and the checkpoints saw, the last parameters, the most steps in flight at once, the signal."""
    trainer, seen = trainer_of(backend(), world), []

    def on_step(step, validation, last):
        seen.append((step.step, step.loss, step.grad_norm, step.lr, validation, last))
        if step.step == interrupt:
            signal.raise_signal(signal.SIGINT)

    def save(trainer, last):
        assert trainer.in_flight == []
        seen.append((trainer.steps, trainer.position, parameter_hash(trainer)))

    with StopSignals() as stop:
        received = run(
            trainer,
            windows_of(seed),
            SCHEDULE,
            steps,
            on_step=on_step,
            validation=windows_of(seed + 1),
            save=save,
            received_signal=lambda: stop.received or 0,
            **intervals,
        )
    return seen, trainer.parameters.tobytes(), getattr(trainer.compiled, "most_ahead", 1), received


@pytest.mark.parametrize("intervals", [{}, dict(eval_every=3), dict(save_every=4, verify_every=5), dict(eval_every=1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_curve_is_the_same(rng, ranks, intervals):
    seed = int(rng.integers(1 << 30))
    *plain, most, _ = run_ranks(ranks, lambda comm: train(NumpyBackend, seed, comm, **intervals))[0]
    for *ahead, most_ahead, received in run_ranks(ranks, lambda comm: train(ReplayingBackend, seed, comm, **intervals)):
        assert ahead == plain and received is None
        assert (most, most_ahead) == (1, 1 if intervals.get("eval_every") == 1 else 2)


class OwnClock(threading.local):
    """A clock of each thread: each call of monotonic() is one second later, and those of other threads do not count."""

    now = -1

    def monotonic(self):
        self.now += 1
        return self.now


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_by_the_clock_of_the_root_is_after_the_same_step_on_all_ranks(rng, ranks, monkeypatch):
    """The clock counts the start, each step and each save; with save_every, a save restarts the seconds."""
    seed = int(rng.integers(1 << 30))

    def saved(backend, **intervals):
        monkeypatch.setattr(loop, "time", OwnClock())
        found = run_ranks(ranks, lambda comm: train(backend, seed, comm, **intervals))
        assert all(each[:2] == found[0][:2] for each in found) and found[0][1] == plain
        return [line[0] for line in found[0][0] if len(line) == 3]

    plain = run_ranks(ranks, lambda comm: train(NumpyBackend, seed, comm))[0][1]
    assert saved(NumpyBackend, save_seconds=3) == [3, 6, 9, 12]
    assert saved(NumpyBackend, save_seconds=3, save_every=4) == [3, 4, 7, 8, 11, 12]
    assert saved(NumpyBackend, save_seconds=50) == [12]
    assert saved(ReplayingBackend, save_seconds=3) == [4, 8, 12]  # one step was in flight


def test_a_signal_and_a_save_that_is_due_are_sent_together(rng, monkeypatch):
    monkeypatch.setattr(loop, "time", OwnClock())
    seen, _, _, received = train(NumpyBackend, 1, interrupt=5, save_seconds=1)
    assert received == signal.SIGINT and [line[0] for line in seen if len(line) == 3] == list(range(1, 8))


def test_a_signal_ends_the_run_after_the_steps_in_flight(rng):
    seed = int(rng.integers(1 << 30))
    seen, parameters, _, received = train(ReplayingBackend, seed, interrupt=5)
    steps = [line[0] for line in seen if len(line) == 6]
    assert received == signal.SIGINT and steps == list(range(8))  # 6 was in flight when 5 was reported, and then 7
    assert [line[-1] for line in seen if len(line) == 6] == [False] * 7 + [True]
    plain, windows = trainer_of(NumpyBackend()), windows_of(seed)
    losses = [plain.step(read_batch(plain, windows), SCHEDULE(step)).loss for step in steps]
    assert losses == [line[1] for line in seen if len(line) == 6] and plain.parameters.tobytes() == parameters


def test_a_signal_during_the_garbage_collection_is_no_warning_of_the_suite():
    """Python reports it, because hypothesis measures the time of the collection in a callback; see pyproject.toml."""
    report = "Exception ignored in: <function gc_cumulative_time.<locals>.gc_callback at 0x7f>\nTraceback\n{error}: "
    with warnings.catch_warnings(record=True) as seen:
        for error in ("KeyboardInterrupt", "ValueError"):
            warnings.warn(pytest.PytestUnraisableExceptionWarning(report.format(error=error)), stacklevel=1)
    assert len(seen) == 1 and "ValueError" in str(seen[0].message)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_diverges_and_the_next_one_in_flight_change_nothing(rng, ranks, bad):
    windows = windows_of(int(rng.integers(1 << 30)))

    def steps(comm):
        trainer, plain = trainer_of(ReplayingBackend(), comm), trainer_of(NumpyBackend(), comm)
        for _ in range(3):
            for each in (trainer, plain):
                each.step(read_batch(each, windows), 1e-3)
        compute, spoil = trainer.accumulator.compute_gradients, [bad, 0.0]  # the first of two gradients

        def spoilt(*arguments):
            losses = compute(*arguments)
            trainer.accumulator.gradients[7] += spoil.pop(0)
            return losses

        trainer.accumulator.compute_gradients = spoilt
        pending = trainer.begin(read_batch(trainer, windows), 0.5)
        trainer.begin(read_batch(trainer, windows, ahead=1), 0.25)
        with pytest.raises(Diverged, match=r"step 3: .*(nan|inf).*`lr` \(now 0.5\).*those after 3 steps"):
            pending.result()
        assert spoil == [] and trainer.in_flight == []  # both were computed
        assert trainer.parameters.tobytes() == plain.parameters.tobytes()
        assert trainer.optimizer.states["exp_avg"].tobytes() == plain.optimizer.states["exp_avg"].tobytes()
        assert (trainer.steps, trainer.position) == (3, 12)
        trainer.accumulator.compute_gradients = compute
        got, want = (each.step(read_batch(each, windows), 1e-3).loss for each in (trainer, plain))
        assert got == want  # the flag of the divergence is reset
        assert trainer.parameters.tobytes() == plain.parameters.tobytes()
        return True

    assert all(run_ranks(ranks, steps))


class CapturingBackend(ReplayingBackend):
    """From the third call of clip, its guard is that of the second, in which a device captures a step."""

    calls, captured = 0, None

    def clip(self, sums, bound, guard=None):
        self.calls += 1
        self.captured = guard if self.calls <= 2 else self.captured
        return super().clip(sums, bound, self.captured)


def test_a_captured_step_changes_nothing_after_a_norm_that_is_not_finite():
    """A replay repeats what Python decided when the step was captured: it must contain the array `stop`."""
    trainer = trainer_of(CapturingBackend())
    windows = windows_of(0)
    for _ in range(3):
        trainer.begin(read_batch(trainer, windows), 1e-3).result()
    before = trainer.parameters.copy()
    scale, trainer.scale = trainer.scale, np.inf
    first = trainer.begin(read_batch(trainer, windows), 1e-3)
    trainer.scale = scale
    trainer.begin(read_batch(trainer, windows, ahead=1), 1e-3)  # finite again, and in flight
    with pytest.raises(Diverged):
        first.result()
    assert_array_equal(trainer.parameters, before)
    assert trainer.in_flight == [] and trainer.steps == 3


def test_results_are_read_in_order_and_no_step_begins_too_early(rng):
    windows, trainer = windows_of(int(rng.integers(1 << 30))), trainer_of(ReplayingBackend())
    first = trainer.begin(read_batch(trainer, windows), 2e-3)
    with pytest.raises(ValueError, match="1 step in flight, and this device can overlap none: read"):
        trainer.begin(read_batch(trainer, windows, ahead=1), 2e-3)
    assert first.result().step == 0
    with pytest.raises(ValueError, match="of each step once"):
        first.result()
    trainer.step(read_batch(trainer, windows), 2e-3)  # from the next call on one step may be ahead
    pending = [trainer.begin(read_batch(trainer, windows, ahead), 2e-3) for ahead in (0, 1)]
    with pytest.raises(ValueError, match="2 steps in flight, and this device can overlap two steps: read"):
        trainer.begin(read_batch(trainer, windows, 2), 2e-3)
    with pytest.raises(ValueError, match="of the earlier step first"):
        pending[1].result()
    assert [each.result().step for each in pending] == [2, 3] and trainer.in_flight == []


@pytest.mark.parametrize(
    "function",
    [parameter_hash, named_moments, current_model, verify, check_finite,
     lambda trainer: evaluate(trainer, windows_of(1)),
     lambda trainer: load(trainer, dict(initial_parameters(CONFIG, 1)))],
)  # fmt: skip
def test_the_parameters_are_not_used_while_a_step_is_in_flight(function):
    trainer = trainer_of(ReplayingBackend())
    step = trainer.begin(read_batch(trainer, windows_of(0)), 1e-3)
    before = trainer.parameters.tobytes()
    with pytest.raises(ValueError, match="1 step in flight: read the result"):
        function(trainer)
    assert trainer.parameters.tobytes() == before
    step.result()
    function(trainer)


def test_the_seconds_of_steps_are_the_elapsed_time_of_which_no_part_counts_twice(rng, monkeypatch):
    """A step counts from its beginning or, if it began before the previous result was read, from that moment."""
    windows, trainer, now = windows_of(int(rng.integers(1 << 30))), trainer_of(ReplayingBackend()), [100.0]
    for module in (steps_in_flight, fast_trainer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def begin(at, ahead=0):
        now[0] = at
        return trainer.begin(read_batch(trainer, windows, ahead), 1e-3)

    def result(pending, at):
        now[0] = at
        step = pending.result()
        assert step.tokens_per_second == pytest.approx(4 * 16 / step.seconds)
        return step.seconds

    assert [result(begin(at), at + 2) for at in (100, 110)] == [2, 2]  # the 8 seconds between them are of no step
    first, second = begin(120), begin(121, ahead=1)
    assert [result(first, 125), result(second, 126.5)] == [5, 1.5]
    assert result(begin(130), 131) == 1


def test_a_round_of_a_benchmark_leaves_no_step_in_flight():
    trainers = []

    class Steps(ours.CudaSteps):
        def __init__(self, config, batch_size, seq_len):
            self.backend, self.announced = ReplayingBackend(), []
            trainers.append(Trainer(config, [self.backend], batch_size=batch_size, seq_len=seq_len, micro_batches=1))
            (self.trainer,) = trainers

    turn = gpu_step.prepare(SimpleNamespace(CudaSteps=Steps), "nano", 37, 4, 16, unread=False)
    for steps in (1, 3, 3):
        assert len(turn(steps)["seconds"]) == steps and trainers[0].in_flight == []
    assert trainers[0].compiled.most_ahead == 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_computes_the_same_bits(rng, cuda_backend, precision):
    seed, results = int(rng.integers(1 << 30)), []
    for ahead in (False, True):
        trainer, windows, numbers, most = trainer_of(cuda_backend(precision)), windows_of(seed), [], 0
        while trainer.steps < 12:
            if not trainer.in_flight:
                trainer.begin(read_batch(trainer, windows), SCHEDULE(trainer.steps))
            if ahead and trainer.overlaps and trainer.steps < 11:
                trainer.begin(read_batch(trainer, windows, ahead=1), SCHEDULE(trainer.steps + 1))
            most = max(most, len(trainer.in_flight))
            step = trainer.in_flight[0].result()
            numbers.append((step.loss, step.grad_norm))
        assert most == (2 if ahead and precision != "fp16" else 1)
        results.append((numbers, parameter_hash(trainer)))
    assert results[0] == results[1]
