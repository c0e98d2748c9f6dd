"""A step may be begun before the numbers of the one before it are read: the same bits, and no step too many."""

import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.gpu import step as gpu_step
from benchmarks.harness import ours
from gpt2core.app.stop_signals import StopSignals
from gpt2core.backend import Immediate
from gpt2core.data import Windows
from gpt2core.model import GPT2Config
from gpt2core.optimizer import Schedule
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.trainer import Diverged, Trainer
from gpt2core.training_loop import run
from stage0_serial.numpy_backend import NumpyBackend

CONFIG = GPT2Config(37, 16, 2, 2, 16, tied=False)
SCHEDULE = Schedule("linear", 3e-3, warmup=2, steps=12)  # another rate each step


class Recording(Immediate):
    """As a recorded step is called: from the second call on one may be ahead, and results last for two calls."""

    calls, unread, most_ahead, places = 0, 0, 0, ()

    @property
    def ahead(self):
        return self.calls >= 2

    def __call__(self):
        results = [np.array(result) for result in self.function()]
        self.places = [*self.places, results]
        if len(self.places) > 2:
            for place in self.places.pop(0):
                place[...] = np.nan
        self.calls, self.unread = self.calls + 1, self.unread + 1
        assert self.unread <= 1 + (self.calls > 2)
        self.most_ahead = max(self.most_ahead, self.unread)

        def finish():
            self.unread -= 1
            return results

        return finish


class RecordingBackend(NumpyBackend):
    def compile_step(self, function, record=True):
        return Recording(function)


def trainer_of(backend, world=None, **options):
    sizes = dict(batch_size=4, seq_len=16, micro_batches=4, optimizer=dict(clip=0.5, weight_decay=0.1))
    return Trainer(CONFIG, [backend], world=world, **sizes | options)


def windows_of(seed):
    return Windows(np.random.default_rng(seed).integers(0, 37, 700), 16)


def train(backend, seed, world=None, steps=12, interrupt=None, **intervals):
    """-> what on_step and the checkpoints saw, the last parameters, how many were under way at once, the signal."""
    trainer, seen = trainer_of(backend(), world), []

    def on_step(step, validation, last):
        seen.append((step.step, step.loss, step.grad_norm, step.lr, validation, last))
        if step.step == interrupt:
            signal.raise_signal(signal.SIGINT)

    def save(trainer):
        assert trainer.under_way is None
        seen.append((trainer.steps, trainer.position, trainer.parameter_hash()))

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
    return seen, trainer.parameters.tobytes(), getattr(trainer.update, "most_ahead", 1), received


@pytest.mark.parametrize("intervals", [{}, dict(eval_every=3), dict(save_every=4, verify_every=5), dict(eval_every=1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_curve_is_the_same(rng, ranks, intervals):
    seed = int(rng.integers(1 << 30))
    *plain, most, _ = run_ranks(ranks, lambda comm: train(NumpyBackend, seed, comm, **intervals))[0]
    for *ahead, most_ahead, received in run_ranks(ranks, lambda comm: train(RecordingBackend, seed, comm, **intervals)):
        assert ahead == plain and received is None
        assert (most, most_ahead) == (1, 1 if intervals.get("eval_every") == 1 else 2)


def test_a_signal_ends_it_with_the_step_that_is_under_way(rng):
    seed = int(rng.integers(1 << 30))
    seen, parameters, _, received = train(RecordingBackend, seed, interrupt=5)
    steps = [line[0] for line in seen if len(line) == 6]
    assert received == signal.SIGINT and steps == list(range(8))  # 6 was under way as 5 was told of, and 7 behind it
    assert [line[-1] for line in seen if len(line) == 6] == [False] * 7 + [True]
    plain = trainer_of(NumpyBackend())
    losses = [plain.step(windows_of(seed), SCHEDULE(step)).loss for step in steps]
    assert losses == [line[1] for line in seen if len(line) == 6] and plain.parameters.tobytes() == parameters


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_diverges_leaves_everything_as_it_was_though_another_was_begun(rng, ranks, bad):
    windows = windows_of(int(rng.integers(1 << 30)))

    def steps(comm):
        trainer, plain = trainer_of(RecordingBackend(), comm), trainer_of(NumpyBackend(), comm)
        for _ in range(3):
            trainer.step(windows, 1e-3), plain.step(windows, 1e-3)
        backward, spoil = trainer.shards.backward, [bad, 0.0]  # the first of two gradients

        def spoilt(*arguments):
            losses = backward(*arguments)
            trainer.shards.gradients[7] += spoil.pop(0)
            return losses

        trainer.shards.backward = spoilt
        with pytest.raises(Diverged, match=r"step 3: .*(nan|inf).*--lr \(now 0.5\).*those of step 3"):
            trainer.step(windows, 0.5, then=0.25)
        assert spoil == [] and trainer.under_way is None  # both were computed
        assert trainer.parameters.tobytes() == plain.parameters.tobytes()
        assert trainer.optimizer.exp_avg.tobytes() == plain.optimizer.exp_avg.tobytes()
        assert (trainer.steps, trainer.position) == (3, 12)
        trainer.shards.backward = backward
        assert trainer.step(windows, 1e-3).loss == plain.step(windows, 1e-3).loss  # nothing of it is left
        assert trainer.parameters.tobytes() == plain.parameters.tobytes()
        return True

    assert all(run_ranks(ranks, steps))


def test_what_was_announced_must_be_asked_for_next(rng):
    windows, trainer = windows_of(int(rng.integers(1 << 30))), trainer_of(RecordingBackend())
    for _ in range(2):  # the second is the first that another may be begun behind
        assert not trainer.under_way
        trainer.step(windows, 2e-3, then=2e-3)
    assert trainer.under_way
    with pytest.raises(ValueError, match="under way already, at rate 0.002 and not 0.001"):
        trainer.step(windows, 1e-3)
    with pytest.raises(ValueError, match="under way already"):
        trainer.step(windows_of(1), 2e-3)
    assert trainer.step(windows, 2e-3).step == 2 and trainer.under_way is None


def test_a_turn_of_a_benchmark_leaves_no_step_under_way():
    trainers = []

    class Steps(ours.CudaSteps):
        def __init__(self, config, batch_size, seq_len):
            self.backend, self.windows = RecordingBackend(), ours.Announced({})
            trainers.append(Trainer(config, [self.backend], batch_size=batch_size, seq_len=seq_len, micro_batches=1))
            (self.trainer,) = trainers

    turn = gpu_step.prepare(SimpleNamespace(CudaSteps=Steps), "nano", 37, 4, 16, unread=False)
    for steps in (1, 3, 3):
        assert len(turn(steps)["seconds"]) == steps and trainers[0].under_way is None
    assert trainers[0].update.most_ahead == 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_computes_the_same_bits(rng, cuda_backend, precision):
    seed, results = int(rng.integers(1 << 30)), []
    for ahead in (False, True):
        trainer, windows = trainer_of(cuda_backend(precision)), windows_of(seed)
        rates = [SCHEDULE(step) for step in range(12)]
        numbers = []
        for rate, then in zip(rates, [*rates[1:], None], strict=True):
            step = trainer.step(windows, rate, then if ahead else None)
            numbers.append((step.loss, step.grad_norm))
            assert (trainer.under_way is not None) == (ahead and precision != "fp16" and 1 <= step.step < 11)
        results.append((numbers, trainer.parameter_hash()))
    assert results[0] == results[1]
