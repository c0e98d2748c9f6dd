"""A student's training: the formulas of PlainBackend, the plain Trainer, and nothing of the folders above."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core.data import Windows
from gpt2core.engine.fast_trainer import FastTrainer
from gpt2core.errors import ConfigError, Diverged
from gpt2core.optimizer import Schedule
from gpt2core.parallel.parallel_trainer import ParallelTrainer
from gpt2core.plain_backend import PlainBackend
from gpt2core.presets import PRESETS
from gpt2core.trainer import Trainer
from gpt2core.training_loop import run
from stage0_serial.numpy_backend import NumpyBackend

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20


def trained(trainer_class, backend, steps=STEPS, **options):
    """(the trainer after some steps of preset tiny on tokens of a short text, the Step of each)."""
    tokens = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 40, np.uint8)
    sizes = dict(batch_size=8, seq_len=32, micro_batches=4, optimizer=dict(clip=1.0, weight_decay=0.1))
    backend = backend if trainer_class is Trainer else [backend]
    trainer = trainer_class(PRESETS["tiny"], backend, **sizes | options)
    return trainer, run(trainer, Windows(tokens, 32), Schedule(peak=3e-3), steps, on_step=lambda step: None)


def test_the_formulas_train_the_curve_of_the_fast_kernels():
    curves = {}
    for precision in ("fp32", "fp64"):
        for backend in (PlainBackend, NumpyBackend):
            _, log = trained(Trainer, backend(precision))
            curves[backend, precision] = np.array([(step.loss, step.grad_norm) for step in log])
    plain, fast = curves[PlainBackend, "fp64"], curves[NumpyBackend, "fp64"]
    assert plain[-1, 0] < plain[0, 0] - 1  # it learns
    assert_allclose(plain, fast, rtol=1e-12)  # rounding errors of 1e-16 grow over 20 steps
    assert_allclose(curves[PlainBackend, "fp32"], curves[NumpyBackend, "fp32"], rtol=1e-4)  # the same, from 1e-7


@pytest.mark.parametrize("backend", [PlainBackend, NumpyBackend])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("other", [ParallelTrainer, FastTrainer])
def test_the_plain_trainer_has_the_bits_of_the_others(backend, micro_batches, other):
    (plain, plain_log), (fast, fast_log) = (
        trained(each, backend("fp32"), 5, micro_batches=micro_batches) for each in (Trainer, other)
    )
    assert [(step.loss, step.grad_norm) for step in plain_log] == [(step.loss, step.grad_norm) for step in fast_log]
    assert_array_equal(plain.parameters, fast.parameters)
    assert plain.steps == fast.steps == 5


@pytest.mark.parametrize("trainer", [ParallelTrainer, FastTrainer])
@pytest.mark.parametrize("backends", [NumpyBackend(), []], ids=["a backend", "no backend"])
def test_a_backend_that_is_not_in_a_list_is_refused(trainer, backends):
    with pytest.raises(ConfigError, match=r"^`backends=.*` must be a list, .*: use \[backend\]"):
        trainer(PRESETS["nano"], backends, batch_size=1, seq_len=8, micro_batches=1)


WITHOUT_ENGINE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(REFUSED):
            raise ImportError(f"{name} was removed")
REFUSED = tuple(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
import hashlib, numpy as np
from gpt2core.architecture import GPT2Config
from gpt2core.data import Windows
from gpt2core.optimizer import Schedule
from gpt2core.plain_backend import PlainBackend
from gpt2core.trainer import Trainer
from gpt2core.training_loop import run
if sys.argv[2] == "NumpyBackend":
    from stage0_serial.numpy_backend import NumpyBackend
sizes = dict(batch_size=4, seq_len=16, micro_batches=2)
trainer = Trainer(GPT2Config(37, 16, 2, 2, 16), globals()[sys.argv[2]](), **sizes)
log = run(trainer, Windows(np.arange(500) % 37, 16), Schedule(), 4, on_step=lambda step: None)
print(log[-1].loss, hashlib.sha256(trainer.parameters.tobytes()).hexdigest())
"""


@pytest.mark.parametrize("backend", ["PlainBackend", "NumpyBackend"])
def test_a_backend_trains_to_the_same_bits_without_the_folder_engine(backend):
    def output(refused):
        command = [sys.executable, "-c", WITHOUT_ENGINE, refused, backend]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert output("gpt2core.engine,gpt2core.app") == output("nothing")


WITHOUT_LINUX = """
import errno, os, sys
import fcntl, threadpoolctl
def unsupported(*arguments):
    raise OSError(errno.ENOTSUP, "Operation not supported")
fcntl.flock = unsupported
threadpoolctl.ThreadpoolController._load_libraries = lambda self: None  # no BLAS library that can be controlled
def hook(event, arguments):
    paths = [each for each in arguments[:1] if isinstance(each, (str, bytes, os.PathLike))]
    system = any(os.fsdecode(path).startswith(("/proc", "/sys")) for path in paths)
    if event in ("open", "os.listdir", "os.scandir") and system:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", *paths)
sys.addaudithook(hook)
sys.path.insert(0, os.getcwd())
"""


def test_stage_0_runs_without_proc_file_locks_and_control_of_blas(tmp_path):
    def output(program, *arguments):
        command = [sys.executable, "-c", WITHOUT_LINUX + program, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "Error" not in output(WITHOUT_ENGINE, "nothing", "PlainBackend")
    out = str(tmp_path / "run")
    train = "from stage0_serial.train_gpt2 import main; main()"
    assert "saved" in output(train, "--preset", "nano", "--steps", "3", "--sample", "0", "--out", out)
    infer = "from stage0_serial.inference import main; main()"
    assert output(infer, "--weights", out, "--max-new-tokens", "5")


def test_a_batch_of_another_shape_is_refused():
    trainer, _ = trained(Trainer, PlainBackend(), 0)
    with pytest.raises(ValueError, match=r"tokens \(7, 32\), but the rows of this rank are \(rows, T\) = \(8, 32\)"):
        trainer.prepare(np.zeros((7, 32), int), np.zeros((7, 32), int))


def test_a_backend_that_needs_a_loss_scale_is_refused_without_the_engine():
    class Narrow(NumpyBackend):
        scales_loss = True

    with pytest.raises(ConfigError, match=r"`precision=fp16` needs a loss scale: use engine.fast_trainer.FastTrainer"):
        trained(ParallelTrainer, Narrow(), 0)


def test_a_backend_whose_kernels_read_rounded_parameters_needs_the_parallel_trainer():
    class Rounded(NumpyBackend):
        def __init__(self):
            super().__init__()
            self.precision, self.compute_dtype = "bf16", np.dtype(np.float16)

    with pytest.raises(ConfigError, match="`precision=bf16` needs a copy of the parameters: use ParallelTrainer"):
        trained(Trainer, Rounded(), 0)


@pytest.mark.parametrize("sizes, message", [
    (dict(micro_batches=9), "`micro_batches=9`: a micro-batch needs at least 1 sequence of `batch_size=8`"),
    (dict(seq_len=65), "`seq_len=65` exceeds the model's block of 64 tokens: use `seq_len=64`"),
    (dict(batch_size=0), "`batch_size=0` must be a positive whole number"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        trained(Trainer, PlainBackend(), 0, **sizes)


@pytest.mark.parametrize("trainer, name, known", [
    (Trainer, "rounding", "beta1, beta2, eps, weight_decay, clip"),
    (ParallelTrainer, "betas", "beta1, beta2, eps, weight_decay, clip, rounding, seed"),
])  # fmt: skip
def test_an_unknown_option_of_the_optimizer_is_refused(trainer, name, known):
    with pytest.raises(ConfigError, match=f"`optimizer` has the name '{name}', but it may have only {known}: omit it"):
        trained(trainer, PlainBackend(), 0, optimizer={name: "nearest"})


def test_a_step_that_diverges_changes_nothing(monkeypatch):
    trainer, _ = trained(Trainer, PlainBackend(), 2)
    before, tokens = trainer.parameters.copy(), np.zeros((8, 32), int)
    monkeypatch.setattr(trainer, "scale", np.inf)
    with pytest.raises(Diverged, match="step 2: the loss is .* and the gradient norm is .*after 2 steps"):
        trainer.step(trainer.prepare(tokens, tokens), 1e-3)
    assert_array_equal(trainer.parameters, before)
    assert trainer.steps == 2


@pytest.mark.parametrize("kind", [Trainer, ParallelTrainer, FastTrainer])
def test_a_loss_that_is_infinite_with_a_finite_gradient_is_reported_after_the_update(kind):
    """As of a logit -inf of a target: its gradient, softmax - 1, is finite. AdamW does not read the loss."""

    class Infinite(PlainBackend):
        def loss(self, *arguments):
            return np.asarray(np.inf)

    trainer, _ = trained(kind, Infinite(), 0)
    before, tokens = trainer.parameters.copy(), np.zeros((8, 32), int)
    with pytest.raises(Diverged, match="the loss is inf .*the parameters have been updated: continue from an earlier"):
        trainer.step(trainer.prepare(tokens, tokens), 1e-3)
    assert (trainer.parameters != before).any() and np.isfinite(trainer.parameters).all()
