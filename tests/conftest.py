"""The commands of stages 0 and 2, in this process: `train("--steps", 3)` returns exit code and what was written."""

import os
import secrets
import signal
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from gpt2core.app import cli
from gpt2core.communicator import Solo
from stage0_serial.numpy_backend import NumpyBackend

WORDS = "the model reads one token, then another; it learns what follows and forgets nothing of café and naïve text."


with suppress(ImportError):  # not every test needs it
    from hypothesis import HealthCheck, settings

    # An example takes as long as the machine lets it: no test may fail because others were at work.
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")


def has_gpu():
    """Whether CuPy finds a CUDA device that it can use."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, or one for another CUDA, or no driver
        return False


def pytest_configure(config):
    """Without a GPU stage 2 runs in Triton's interpreter; it asks when triton is imported, which transformers does."""
    config.has_gpu = has_gpu()
    if not config.has_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or no child of the tests could be interrupted


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and not config.has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and CuPy to use it"))


@pytest.fixture
def rng():
    """Fresh random numbers; a test that fails shows their seed."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    """command(cli.train or cli.infer, *argv) -> Result, as the stage's script would give it: stage 0's by default."""

    def run(entry, *argv, backend=NumpyBackend):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            entry(backend=backend, world=Solo, argv=[str(word) for word in argv])
        return Result(exit.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def train(command):
    """train(*argv) -> Result of train_gpt2.py."""
    return lambda *argv: command(cli.train, *argv)


@pytest.fixture
def infer(command):
    """infer(*argv) -> Result of inference.py."""
    return lambda *argv: command(cli.infer, *argv)


@pytest.fixture
def cuda_backend():
    """Stage 2's Backend; the test is skipped where there is no Triton, which it cannot do without."""
    pytest.importorskip("triton")
    from stage2_cuda.cuda_backend import CudaBackend

    return CudaBackend


@pytest.fixture
def train2(command, cuda_backend):
    """train2(*argv) -> Result of stage 2's train_gpt2.py, on the GPU or else in the interpreter."""
    return lambda *argv: command(cli.train, *argv, backend=cuda_backend)


@pytest.fixture
def infer2(command, cuda_backend):
    """infer2(*argv) -> Result of stage 2's inference.py."""
    return lambda *argv: command(cli.infer, *argv, backend=cuda_backend)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text of a thousand words that is learnt in seconds; some of its letters are two bytes long."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    words = WORDS.split()
    lines = (" ".join(words[i % 7 :] + words[: i % 5]) for i in range(60))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
