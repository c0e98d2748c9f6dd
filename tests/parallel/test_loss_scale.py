"""fp16's loss scale: a step that overflows is repeated, so the curve and the checkpoints are those without overflow."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from gpt2core.app import cli
from gpt2core.architecture import GPT2Config
from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.engine.loss_scale import LossScale
from gpt2core.errors import ConfigError, Diverged
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.parallel.whole_parameters import named_parameters, parameter_hash
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.checkpoints import edit_json

torch = pytest.importorskip("torch")
CONFIG = GPT2Config(37, 16, 2, 2, 16, tied=False)


class Narrow(NumpyBackend):
    """Stage 0 with gradients that overflow if their scaled norm is above `largest`; otherwise they are exact.

    A scale is a power of two, so that multiplying by it and dividing again changes no bit.
    """

    scales_loss, largest = True, 2.0**14

    def clip(self, squares, bound, guard=None):
        loss_scale = None if guard is None else guard.loss_scale
        factor = 1.0 if loss_scale is None else float(loss_scale[0])
        overflow = loss_scale is not None and math.sqrt(squares.sum()) > self.largest
        norm, scale = super().clip(np.full_like(squares, np.inf) if overflow else squares / factor**2, bound)
        if loss_scale is not None:
            loss_scale[:] = gradscaler(*loss_scale, not math.isfinite(norm), guard.interval)
        return norm, scale / factor


def gradscaler(factor, finite, overflow, interval):
    """The update of the loss scale by PyTorch."""
    state = torch.tensor([float(factor)]), torch.tensor([int(finite)], dtype=torch.int32)
    torch._amp_update_scale_(*state, torch.tensor([float(overflow)]), 2.0, 0.5, int(interval))
    return [part.item() for part in state]


def windows(seed=0):
    return Windows(np.random.default_rng(seed).integers(0, 37, 500), 16)


def trainer_of(backend, **options):
    sizes = dict(batch_size=4, seq_len=16, micro_batches=4, optimizer=dict(clip=0.5, weight_decay=0.1))
    return Trainer(CONFIG, [backend], **sizes | options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_skipped_steps_do_not_change_the_curve(ranks):
    plain = trainer_of(NumpyBackend())
    wanted = [plain.step(read_batch(plain, windows()), 1e-3) for _ in range(5)]

    def run(comm):
        trainer = trainer_of(Narrow(), world=comm, loss_scale=dict(factor=2.0**20, interval=2))
        steps = [trainer.step(read_batch(trainer, windows()), 1e-3) for _ in range(5)]
        return steps, parameter_hash(trainer), trainer.steps, trainer.position, trainer.loss_scale.skipped

    for steps, digest, done, position, skipped in run_ranks(ranks, run):
        assert [(step.loss, step.grad_norm) for step in steps] == [(step.loss, step.grad_norm) for step in wanted]
        assert digest == parameter_hash(plain) and (done, position) == (5, 20)
        assert steps[0].skipped > 2 and steps[0].loss_scale == 2.0 ** (20 - steps[0].skipped)
        assert steps[1].loss_scale == 2 * steps[0].loss_scale  # after two finite gradients
        assert skipped == sum(step.skipped for step in steps) > steps[0].skipped  # the doubled scale overflowed again


def test_a_precision_with_the_range_of_fp32_has_no_scale():
    trainer = trainer_of(NumpyBackend())
    step = trainer.step(read_batch(trainer, windows()), 1e-3)
    assert (step.loss_scale, step.skipped) == (None, None)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_compression_is_refused_with_a_loss_scale(codec):
    with pytest.raises(ConfigError, match=f"`compress={codec}` would keep an overflow of fp16 .*use `precision=bf16`"):
        Trainer(CONFIG, [Narrow()], batch_size=2, seq_len=16, micro_batches=1, parallel=ParallelConfig(compress=codec))


def test_a_scale_that_collapses_is_one_sentence_and_changes_nothing():
    trainer = trainer_of(Narrow(), loss_scale=dict(factor=8.0))
    trainer.step(read_batch(trainer, windows()), 1e-3)
    trainer.backend.largest, before = 0, parameter_hash(trainer)
    with pytest.raises(Diverged, match=r"step 1: .* been reduced to 0.5, .*bf16`, or lower `lr` \(now 0.5"):
        trainer.step(read_batch(trainer, windows()), 0.5)
    assert parameter_hash(trainer) == before and (trainer.steps, trainer.position) == (1, 4)


def test_a_loss_that_is_not_finite_does_not_change_the_scale():
    trainer = trainer_of(Narrow())
    named_parameters(trainer)["transformer.ln_f.bias"][3] = np.nan
    with pytest.raises(Diverged, match="step 0: the loss is nan"):
        trainer.step(read_batch(trainer, windows()), 1e-3)
    assert trainer.loss_scale.skipped == 0


def rows_of(log):
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


def test_a_run_logs_its_scale_and_a_resumed_run_continues_with_it(command, corpus, tmp_path):
    def train(*flags):
        flags = ("--preset", "nano", "--data", corpus, "--sample", 0, *flags)
        return command(cli.train, *flags, backend=Narrow)

    log, out = tmp_path / "log", tmp_path / "run"
    first = train("--steps", 2, "--log", log, "--out", out)
    rows = rows_of(log)
    assert (first.code, first.err) == (0, "") and rows[0]["skipped"] > 0 == rows[1]["skipped"]
    factor, skipped = rows[1]["loss_scale"], rows[0]["skipped"]
    lines = first.out.splitlines()
    of_step, of_run = (
        f"loss scale {factor:g}; repetitions of {what} because of overflow: " for what in ("this step", "steps")
    )
    assert f"{of_step}{skipped}" in lines and f"loss scale {factor:g}" in lines
    assert f"{of_run}{skipped}\n" in first.out
    state = out / "latest" / "state.json"
    assert json.loads(state.read_text())["loss_scale"] == {"factor": factor, "finite": 2, "skipped": skipped}
    again = train("--steps", 4, "--log", log, "--out", out, "--resume", out)
    assert [row["loss_scale"] for row in rows_of(log)[1:]] == [factor] * 3
    assert f"{of_run}{skipped}\n" in again.out
    # one of another precision, or of before there was a scale, begins with the initial one
    edit_json(state, loss_scale=None)
    assert f"{of_step}{skipped}\n" in train("--steps", 5, "--resume", out).out
    for broken in (3, {}, {"factor": "1", "finite": 0, "skipped": 0}, {"factor": 0.5, "finite": 0, "skipped": 0}):
        edit_json(state, loss_scale=broken)
        result = train("--steps", 5, "--resume", out)
        assert result.code == 2 and re.fullmatch(r"error: .*state.json: loss_scale .*cannot be resumed\n", result.err)


def test_the_saved_state_is_loaded():
    saved = LossScale(Narrow(), factor=4.0, interval=7)
    saved.state[1], saved.skipped = 3, 5
    loaded = LossScale(Narrow())
    loaded.load(saved.to_json())
    assert (loaded.value, loaded.skipped, loaded.to_json()) == (4.0, 5, saved.to_json())
    for state in ({"factor": math.inf, "finite": 0, "skipped": 0}, {"factor": 2.0, "finite": -1, "skipped": 0}):
        with pytest.raises(ConfigError, match="loss_scale"):
            loaded.load(state)
    LossScale(NumpyBackend()).load(saved.to_json())  # stage 0 goes on with it


# -- the kernels, and fp16 itself -------------------------------------------------------------------------------------


def test_the_scale_on_the_device_is_pytorch_s():
    pytest.importorskip("triton")
    from stage2_cuda.kernels.adamw import clip_scale
    from stage2_cuda.runtime.triton_launch import array_module

    xp, rng = array_module(), np.random.default_rng()
    state, want = xp.asarray(np.array([1024, 0], np.float32)), (1024.0, 0)
    norm, scale = xp.empty(1, np.float32), xp.empty(1, np.float32)
    for overflow in rng.random(40) < 0.3:
        factor, square = want[0], rng.random() * 100
        squares = xp.asarray(np.array([square, rng.choice([np.inf, np.nan]) if overflow else square]))
        clip_scale(scale, norm, squares, 1.0, state, 3)
        want = gradscaler(*want, overflow, 3)
        assert [float(number) for number in state] == want
        if not overflow:
            length = math.sqrt(2 * square) / factor
            assert float(norm[0]) == pytest.approx(length, rel=1e-6)
            assert float(scale[0]) == pytest.approx(min(1, 1 / (length + 1e-6)) / factor, rel=1e-6)
        assert math.isnan(float(scale[0])) == overflow
    for factor, grown in ((0.75e38, 1.5e38), (1.5e38, 1.5e38), (3e38, 3e38)):  # twice 3e38 is infinite in fp32
        state = xp.asarray(np.array([factor, 2], np.float32))
        with np.errstate(over="ignore"):  # the interpreter computes both sides of a choice
            clip_scale(scale, norm, xp.asarray(np.array([1.0])), 1.0, state, 3)
        assert [float(number) for number in state] == [np.float32(grown), 0]
