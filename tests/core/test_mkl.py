"""--blas: products by MKL are those of NumPy, in every layout; a missing library is one clear error."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core.errors import ConfigError
from stage0_serial import cpu_runtime
from stage0_serial.blas import mkl, openblas
from stage0_serial.cpu_runtime import CpuRuntime
from stage0_serial.numpy_backend import NumpyBackend

needs_mkl = pytest.mark.skipif(mkl.library_path() is None, reason="MKL is not installed: pip install mkl")


def layouts(rng, n, m, dtype):
    """Arrays (n, m) in memory layouts that the kernels use, and one that MKL cannot read."""
    yield rng.standard_normal((n, m)).astype(dtype)
    yield rng.standard_normal((m, n)).astype(dtype).T
    yield rng.standard_normal((n, 2 * m + 3)).astype(dtype)[:, 3 : m + 3]
    yield rng.standard_normal((2 * m, n)).astype(dtype)[:m].T
    yield rng.standard_normal((n, 2 * m)).astype(dtype)[:, ::2]


@needs_mkl
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("M, K, N", [(1, 5, 7), (8, 1, 3), (33, 16, 1), (65, 48, 31)])
def test_a_product_in_any_layout_is_that_of_numpy(rng, dtype, M, K, N):
    for a in layouts(rng, M, K, dtype):
        for b in layouts(rng, K, N, dtype):
            for out in (np.empty((M, N), dtype), np.empty((M, 2 * N), dtype)[:, :N], np.empty((N, M), dtype).T):
                assert mkl.product(a, b, out) is out
                # the bound of a sum of K products: K rounding errors
                assert_allclose(out, a @ b, rtol=0, atol=K * np.abs(a).max() * np.abs(b).max() * 1.2e-7)


@pytest.mark.parametrize("blas", ["openblas", pytest.param("mkl", marks=needs_mkl)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("M, K, N", [(64, 48, 32), (65, 64, 131), (40, 3000, 50)])
def test_a_product_is_added_with_the_bits_of_a_product_and_an_addition(rng, monkeypatch, blas, dtype, M, K, N):
    monkeypatch.setattr(cpu_runtime, "MIN_ADDED", 0)
    backend = NumpyBackend({np.float32: "fp32", np.float64: "fp64"}[dtype])
    backend.runtime.use_blas(blas)
    for a in layouts(rng, M, K, dtype):
        for b in layouts(rng, K, N, dtype):
            out = rng.standard_normal((M, N)).astype(dtype)
            expected = out + backend.runtime.product(a, b, out=np.empty_like(out))
            backend.add_product(a, b, out)
            assert_array_equal(out, expected)


@pytest.mark.parametrize("functions", [{}, openblas.load()], ids=["none", "wrong bits"])
def test_a_blas_that_cannot_add_with_these_bits_is_not_used(rng, monkeypatch, functions):
    monkeypatch.setattr(cpu_runtime, "MIN_ADDED", 0)
    monkeypatch.setattr(openblas, "load", lambda: functions)
    monkeypatch.setattr(mkl, "call_blas", lambda functions, a, b, out, factor: functions and out.fill(1) is None)
    backend = NumpyBackend()
    backend.runtime.use_blas("openblas")
    a, b, out = (rng.standard_normal((9, 9), np.float32) for _ in range(3))
    expected = out + a @ b
    backend.add_product(a, b, out)
    assert_array_equal(out, expected)


@needs_mkl
def test_mkl_is_selected_by_name_and_on_intel_cpus(monkeypatch):
    runtime = NumpyBackend().runtime
    for processor, expected in (("Intel(R) Xeon(R)", "mkl"), ("AMD EPYC 9354", "openblas")):
        monkeypatch.setattr(cpu_runtime, "processor", lambda processor=processor: processor)
        runtime.use_blas("auto")
        assert runtime.blas == expected
    runtime.use_blas("mkl")
    assert runtime.product is mkl.product and runtime.library == "MKL"
    runtime.use_blas("openblas")
    assert runtime.product is np.matmul and runtime.library == ""


def test_several_threads_use_openblas_and_one_thread_the_selected_library(monkeypatch):
    monkeypatch.setattr(mkl, "load", dict)  # MKL may not be installed
    runtime = CpuRuntime()
    for name, product in (("mkl", mkl.product), ("openblas", np.matmul), ("mkl", mkl.product)):
        runtime.use_threads(1)
        runtime.use_blas(name)
        assert runtime.product is product
        runtime.use_threads(2)
        assert runtime.product is np.matmul
        runtime.use_blas(name)
        assert runtime.product is np.matmul
        runtime.use_threads(1)
        assert runtime.product is product


def test_without_mkl_auto_is_openblas_and_mkl_is_an_error(monkeypatch):
    monkeypatch.setattr(mkl, "library_path", lambda: None)
    mkl.load.cache_clear()
    monkeypatch.setattr(cpu_runtime, "processor", lambda: "Intel(R) Xeon(R)")
    assert CpuRuntime().blas == "openblas"
    with pytest.raises(
        ConfigError, match="^`blas=mkl`: MKL is not installed: pip install mkl, or use `blas=openblas`$"
    ):
        CpuRuntime().use_blas("mkl")
    with pytest.raises(ConfigError, match="^`blas=atlas` is unknown: choose from auto, openblas, mkl$"):
        CpuRuntime().use_blas("atlas")


def test_a_library_that_cannot_be_loaded_is_an_error(monkeypatch, tmp_path):
    broken = tmp_path / "libmkl_rt.so.3"
    broken.write_text("not a library")
    monkeypatch.setattr(mkl, "library_path", lambda: str(broken))
    mkl.load.cache_clear()
    with pytest.raises(ConfigError, match=r"libmkl_rt.so.3 cannot be loaded \(.*\): use `blas=openblas`$"):
        CpuRuntime().use_blas("mkl")
    monkeypatch.setattr(cpu_runtime, "processor", lambda: "Intel(R) Xeon(R)")
    with pytest.warns(UserWarning, match="cannot be loaded"):  # auto: the advice --blas openblas must work
        runtime = CpuRuntime()
    assert runtime.blas == "openblas"
    mkl.load.cache_clear()


PROGRAM = """
import os, pathlib, sys
cpu, home, read_text, found = sys.argv[1], os.path.expanduser("~"), pathlib.Path.read_text, []
pathlib.Path.read_text = lambda path, *a, **k: cpu if str(path) == "/proc/cpuinfo" else read_text(path, *a, **k)

def record(event, arguments):
    if event.startswith(("subprocess.", "tempfile.", "os.fork", "os.posix_spawn", "os.exec", "os.spawn", "os.system")):
        found.append((event, str(arguments)))
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if not str(arguments[0]).startswith(home):  # a choice by timing is stored in the home directory
            found.append((event, str(arguments)))

sys.dont_write_bytecode = True
sys.addaudithook(record)
import numpy as np
from gpt2core.parallel.whole_parameters import current_model
from gpt2core.sampler import generate
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.training import make_trainer
trainer = make_trainer(None, None)
tokens = np.zeros((trainer.batch_size, trainer.seq_len), int)
trainer.step(trainer.prepare(tokens, tokens), 1e-3)
next(generate(current_model(trainer), [1, 2, 3], 1))
assert not found, found
"""


@pytest.mark.parametrize("cpu", ["model name : Intel(R) Xeon(R)", "model name : AMD EPYC", "CPU part : 0xd40"])
def test_a_training_step_and_a_generated_token_run_no_program_and_write_no_temporary_file(tmp_path, cpu):
    """On any CPU, with and without gcc: the grader refuses programs, and there may be no writable temporary folder."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, cpu]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
