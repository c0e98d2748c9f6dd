"""What importing the library and the commands changes in the process: nothing, and what a command needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
OTHER = "OMP_NUM_THREADS"  # OpenBLAS reads it too, and tests/conftest.py sets it
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "gpt2core").rglob("*.py"))
CORE = [".".join(path.with_suffix("").parts) for path in FILES if path.parts[1] not in ("app", "__init__.py")]

BLAS_THREADS = """
import threadpoolctl

def blas_threads():
    return {library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"}
"""


def python(program, **environment):
    """What a fresh Python without BLAS variables prints while it runs `program`."""
    inherited = {name: value for name, value in os.environ.items() if name not in (*BLAS, OTHER)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=inherited | environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_importing_the_library_changes_neither_the_excepthook_nor_the_environment():
    program = f"""
import os, sys
hook, environment = sys.excepthook, dict(os.environ)
import gpt2core, {", ".join(CORE)}
assert sys.excepthook is hook is sys.__excepthook__
assert dict(os.environ) == environment
assert not [name for name in sys.modules if name.startswith("gpt2core.app")]
print({len(CORE)})
"""
    assert int(*python(program)) > 20


def test_a_command_limits_blas_to_one_thread_before_numpy_is_loaded():
    variables = f"[os.environ.get(name) for name in {BLAS}]"
    assert python(f"import os, gpt2core.app.cli; print(*{variables})") == ["1", "1", "1"]
    assert python(BLAS_THREADS + "import gpt2core.app.cli; print(*blas_threads())") in ([], ["1"])


def test_a_command_keeps_the_blas_threads_that_the_user_sets():
    program = "import os, gpt2core.app.cli; print(os.environ['OPENBLAS_NUM_THREADS'])"
    assert python(program, OPENBLAS_NUM_THREADS="2") == ["2"]


def test_a_command_prints_no_traceback_of_an_interrupt_and_one_of_any_other_error():
    for error, printed in (("KeyboardInterrupt()", False), ("ValueError(3)", True)):
        program = f"import gpt2core.app; raise {error}"
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0 and ("Traceback" in done.stderr) == printed


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores, or BLAS has one thread anyway")
def test_a_trainer_of_the_library_limits_a_blas_that_is_loaded_already():
    program = f"""
{BLAS_THREADS}
import numpy as np
before = blas_threads()
from gpt2core.architecture import GPT2Config
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from stage0_serial.numpy_backend import NumpyBackend
Trainer(GPT2Config(36, 8, 1, 2, 8), [NumpyBackend()], batch_size=2, seq_len=8, micro_batches=1)
print(*before, *blas_threads())
"""
    threads = python(program)
    if not threads:
        pytest.skip("threadpoolctl finds no BLAS here")
    *before, after = threads
    assert before and "1" not in before and after == "1"


def test_a_run_sends_each_line_to_a_pipe_at_once():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "stage0_serial.train_gpt2", "--preset", "nano", "--steps", "100000", "--no-save"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as run:
        try:
            assert any(line.startswith("step     1 |") for line in run.stdout)
            assert run.poll() is None  # it has 99,998 more steps
        finally:
            run.kill()
