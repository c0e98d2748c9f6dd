"""Checkpoints that another process saves: the same files, and no damage by a kill, a full disk or a dead writer."""

import contextlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.app.checkpoints.directory import HIDDEN, load_checkpoint
from gpt2core.app.training.background_writer import BackgroundWriter
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.runtime import HostCopy, Runtime
from gpt2core.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
CONFIG = GPT2Config(37, 16, 2, 2, 16, tied=True)


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def save(writer, directory, step, value, config=CONFIG):
    """Begin to save a checkpoint in which all numbers are `value`."""
    parameters = {name: np.full(shape, value, np.float32) for name, shape in parameter_shapes(config)}
    moments = {name: (array + 1, array + 2) for name, array in parameters.items()}
    state, tokenizer = {"step": step, "position": step}, Tokenizer.byte_level()
    options = dict(parameters=parameters, moments=moments, tokenizer=tokenizer, state=state)
    writer.save(directory, step, config=config, settings_text="", command="", **options)
    for array in parameters.values():
        array.fill(np.nan)  # as training goes on


def value_of(directory):
    """(step, value) of the newest checkpoint of save()."""
    found = load_checkpoint(directory, with_optimizer=True)
    (value,) = set(np.concatenate([array.ravel() for array in found.parameters.values()]).tolist())
    for first, second in found.moments.values():
        assert (first == value + 1).all() and (second == value + 2).all()
    return found.state["step"], value


def test_the_files_are_those_of_a_run_whose_training_waits(train, tmp_path):
    flags = "--preset nano --steps 8 --sample 0 --keep 0 --checkpoint-every 3".split()
    for name, more in (("waits", []), ("async", ["--async-checkpoints"])):
        done = train(*flags, *more, "--out", tmp_path / name)
        assert done.code == 0 and done.err == ""
    steps = [path.name for path in sorted((tmp_path / "async").glob("step-*"))]
    assert steps == ["step-00000003", "step-00000006", "step-00000008"]
    different = {Path("settings.toml")}  # has the flag
    found, wanted = contents(tmp_path / "async"), contents(tmp_path / "waits")
    assert {path for path in found.keys() | wanted.keys() if found.get(path) != wanted.get(path)} <= different


def test_a_flag_without_an_interval_is_noted(train, tmp_path):
    done = train("--preset", "nano", "--steps", 1, "--sample", 0, "--out", tmp_path / "run", "--async-checkpoints")
    assert done.code == 0 and "note: --async-checkpoints: no effect without --checkpoint-every" in done.out


def test_an_array_may_change_while_its_checkpoint_is_saved_and_the_context_waits(tmp_path):
    errors = []
    with BackgroundWriter(errors.append, Runtime()) as writer:
        save(writer, tmp_path, 1, 1.0)
        save(writer, tmp_path, 2, 2.0)
        process = writer.process
    assert value_of(tmp_path) == (2, 2.0) and errors == [] and process.poll() is not None
    assert (tmp_path / "step-00000001").is_dir() and not list(tmp_path.glob(".step*"))


class SlowCopy(HostCopy):
    """As on a GPU: the arrays may change at once, but the host has their copies only after `complete` is set."""

    def __init__(self, pairs):
        self.pairs, self.complete = [(array.copy(), out) for array, out in pairs], False

    def is_complete(self):
        return self.complete

    def wait(self):
        super().__init__(self.pairs)
        self.pairs = []  # the memory of the host arrays is freed later


class SlowRuntime(Runtime):
    def copy_to_host(self, pairs):
        self.copy = SlowCopy(pairs)
        return self.copy


def test_a_checkpoint_is_saved_when_its_copies_are_complete_and_training_does_not_wait_for_them(tmp_path):
    errors, runtime = [], SlowRuntime()
    with BackgroundWriter(errors.append, runtime) as writer:
        save(writer, tmp_path, 1, 1.0)
        writer.poll()
        assert not writer.busy and not list(tmp_path.iterdir())
        runtime.copy.complete = True
        writer.poll()
        assert writer.busy
        save(writer, tmp_path, 2, 2.0)  # waits for the first
        assert value_of(tmp_path) == (1, 1.0)
        save(writer, tmp_path, 3, 3.0)  # waits for the copies of the second, too
        assert value_of(tmp_path) == (2, 2.0)
    assert value_of(tmp_path) == (3, 3.0) and errors == []


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_a_full_disk_and_a_killed_writer_are_one_message_each_and_the_next_checkpoint_is_saved(tmp_path):
    errors = []
    with BackgroundWriter(errors.append, Runtime()) as writer:
        save(writer, tmp_path, 1, 1.0)
        writer.poll(wait=True)
        limits = resource.prlimit(writer.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(writer.process.pid, resource.RLIMIT_FSIZE, (1000, limits[1]))  # bytes of a file
        save(writer, tmp_path, 2, 2.0)
        writer.poll(wait=True)
        assert len(errors) == 1 and value_of(tmp_path) == (1, 1.0)
        assert "step-00000002: cannot save this checkpoint (File too large): free space" in errors[0]
        assert errors[0].startswith("note: ") and errors[0].endswith("are unchanged; training continues")
        resource.prlimit(writer.process.pid, resource.RLIMIT_FSIZE, limits)
        os.kill(writer.process.pid, signal.SIGSTOP)
        save(writer, tmp_path, 3, 3.0)
        os.kill(writer.process.pid, signal.SIGKILL)
        writer.poll(wait=True)
        assert len(errors) == 2 and "ended with exit code -9; training continues" in errors[1]
        assert value_of(tmp_path) == (1, 1.0)
        save(writer, tmp_path, 4, 4.0)
    assert len(errors) == 2 and value_of(tmp_path) == (4, 4.0)


KILLED = """
import os, pathlib, signal, sys
from gpt2core.app.training.background_writer import BackgroundWriter
from gpt2core.architecture import GPT2Config
from gpt2core.runtime import Runtime
from test_async_checkpoints import save

folder, wide = pathlib.Path(sys.argv[1]), GPT2Config(37, 16, 1, 2, 300, tied=True)
writer = BackgroundWriter(print, Runtime())
save(writer, folder, 1, 1.0, wide)
writer.poll(wait=True)
save(writer, folder, 2, 2.0, wide)
print(writer.process.pid, flush=True)
while not list(folder.glob(".step-*/optimizer.safetensors")):
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_killed_trainer_leaves_the_checkpoint_before_and_no_process(tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    writer, deadline = Path("/proc") / done.stdout.strip(), time.monotonic() + 10
    while writer.exists() and "Z" not in (writer / "stat").read_text().split()[2] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not writer.exists() or "Z" in (writer / "stat").read_text().split()[2]  # its new parent may never wait
    assert value_of(tmp_path) in ((1, 1.0), (2, 2.0))  # 2: it was complete before the kill
    with BackgroundWriter(print, Runtime()) as following:
        save(following, tmp_path, 3, 3.0, GPT2Config(37, 16, 1, 2, 300, tied=True))
    assert value_of(tmp_path) == (3, 3.0) and not [path for path in tmp_path.iterdir() if HIDDEN.fullmatch(path.name)]


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_arrays_of_a_gpu_may_change_while_they_are_copied_to_the_host(pinned):
    from stage2_cuda.cuda_backend import CudaBackend

    backend = CudaBackend("fp32")
    rng, memory = np.random.default_rng(), mmap.mmap(-1, 1 << 26)
    wanted = [rng.standard_normal((1000, 8000), np.float32), rng.standard_normal(77, np.float32)]
    arrays = [backend.asarray(array) for array in wanted]
    outs = [
        np.ndarray(array.shape, np.float32, memory, offset) for array, offset in zip(wanted, (0, 1 << 25), strict=True)
    ]
    with backend.runtime.pin(np.frombuffer(memory, np.uint8)) if pinned else contextlib.nullcontext():
        copy = backend.runtime.copy_to_host(list(zip(arrays, outs, strict=True)))
        for array in arrays:
            array.fill(np.nan)  # as the next step does
        copy.wait()
        assert copy.is_complete()
        for out, array in zip(outs, wanted, strict=True):
            assert_array_equal(out, array)
