"""Fixtures that run the commands of stages 0 and 2 in this process, and the options that select tests."""

import atexit
import gc
import os
import secrets
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from gpt2core.app import cli
from gpt2core.app.checkpoints import run_folders
from gpt2core.communicator import Solo
from gpt2core.plain_backend import PlainBackend
from stage0_serial.cpu_runtime import blas_libraries
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.unsaved import unsaved

WORDS = "the model reads one token, then another; it learns what follows and forgets nothing of café and naïve text."


with suppress(ImportError):  # some tests run without hypothesis
    from hypothesis import HealthCheck, settings

    # No deadline: on a loaded machine an example may take any time.
    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")


def has_gpu():
    """Return whether CuPy finds a CUDA device that it can use."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, CuPy for another CUDA version, or no driver
        return False


def pytest_addoption(parser):
    parser.addoption("--mutations", type=int, default=100, help="changed input files to try (tests/app/misuse)")
    parser.addoption("--mutation-seed", type=int, help="seed of the first changed file (default: a new one)")
    parser.addoption("--fast", action="store_true", help="run only tests marked fast: each rung of the parity ladder")
    parser.addoption("--long", action="store_true", help="also run the tests marked long (make test-long)")


def pytest_configure(config):
    """Without a GPU, select Triton's interpreter before any test imports triton, as transformers does."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that a test starts compiles every module
    sys.dont_write_bytecode = False
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which has sent all results before it ends
        atexit.register(os._exit, 0)  # Python would delete a million objects one by one, in several seconds
    config.has_gpu = has_gpu()
    if not config.has_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of PyTorch, as pytest_runtest_setup() limits BLAS
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by a shell for jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # children inherit it: tests interrupt them


def pytest_sessionstart(session):
    session.config.own_runs = runs_of_the_reader()


def pytest_terminal_summary(terminalreporter, config):
    """Say if a test has saved a run in the repository, where inference.py would find it."""
    if new := runs_of_the_reader() - config.own_runs:  # or another program has done so meanwhile
        names = ", ".join(sorted(new))
        terminalreporter.write_line(f"saved by a test that trains without --out and without --no-save? {names}")


def runs_of_the_reader():
    return {str(path) for path in (run_folders.ROOT / "out").glob("stage*")}


def pytest_make_parametrize_id(val):
    """Shorten the id of a long text, because pytest-xdist sends ids between processes several times for each test."""
    if isinstance(val, str | bytes) and len(val) > 1000:
        return f"{ascii(val[:40])}... of {len(val)}"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and not config.has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and CuPy to use it"))
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="marked long: make test-long runs it"))
        if item.path.parent.name == "stage1" and starts_ranks(item.module):
            item.add_marker(pytest.mark.xdist_group("mpi"))
    if config.getoption("--fast"):
        config.hook.pytest_deselected(items=[item for item in items if not is_fast(item)])
        items[:] = filter(is_fast, items)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exclude the tests and their modules, a million objects, from each later garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures of the module
def pytest_runtest_teardown(item, nextitem):
    """After a module, exclude what stays, such as modules that it imported, from each later garbage collection."""
    if nextitem is None or nextitem.module is not item.module:
        gc.collect()
        gc.freeze()


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        gc.unfreeze()  # otherwise extension modules report at exit that their objects were not freed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let pytest-xdist run a module without xdist_group in one process too: its fixtures are computed once.

    With one unit of work per test, xdist would also take 1 ms of a CPU for each test.
    """
    from xdist.scheduler import LoadGroupScheduling

    class ByModule(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            return super()._split_scope(nodeid).split("::")[0]

    return ByModule(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)  # before fixtures compute anything
def pytest_runtest_setup(item):
    """Without a GPU, start each test with one BLAS thread: those of two xdist workers would wait in busy loops."""
    if not item.config.has_gpu:
        for library in blas_libraries():
            library.set_num_threads(1)


def starts_ranks(module):
    """Return whether a test module starts mpiexec. Stage 1's jobs fill the cores: under xdist they run one by one."""
    return any(name in vars(module) for name in ("mpiexec", "run_mpi"))


def is_fast(item):
    """Return whether --fast selects a test: marked fast(), or fast(ids...) with the id of its parameters."""
    marker = item.get_closest_marker("fast")
    return marker is not None and (not marker.args or item.callspec.id in marker.args)


@pytest.fixture
def rng():
    """A generator with a new seed each time. pytest shows the printed seed if the test fails."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@dataclass(frozen=True)
class Result:
    """The exit code of a command, its standard output and its standard error."""

    code: int
    out: str
    err: str

    @property
    def words(self):
        """The words of standard output on one line, because the notes of a training are broken between words."""
        return " ".join(self.out.split())


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The directory in which the commands of this process look for runs that were trained without --out."""
    monkeypatch.setattr(run_folders, "runs_folder", lambda: tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def command(capsys, runs):
    """command(cli.train or cli.infer, *argv) -> Result of a stage's script, by default of stage 0; see unsaved().

    backend: a class, of stage 0 if its arrays are those of NumPy, otherwise of stage 2.
    """

    def run(entry, *argv, backend=NumpyBackend):
        capsys.readouterr()
        words, number = [str(word) for word in argv], 0 if issubclass(backend, PlainBackend) else 2
        with pytest.raises(SystemExit) as exit:
            entry(number, backend, Solo, unsaved(words) if entry is cli.train else words)
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
    """The Backend class of stage 2. Skips the test if Triton is not installed."""
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
def servers():
    """Ranks of stage 1 that stay, for the tests of the xdist_group "mpi". Skips the test without MPI."""
    from tests.support.mpi import mpiexec
    from tests.support.rank_server import RankServers

    mpiexec()  # or skip
    with RankServers() as servers:
        yield servers


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The path of a text of a thousand words that is learned in seconds; some characters have two bytes."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    words = WORDS.split()
    lines = (" ".join(words[i % 7 :] + words[: i % 5]) for i in range(60))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
