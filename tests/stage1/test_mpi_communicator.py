"""MpiCommunicator under mpiexec: the same oracles as on threads, waits that use no core, and jobs that end whole."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gpt2core.communicator import CommunicatorError, Solo
from gpt2core.errors import ConfigError
from gpt2core.parallel.launcher_env import read_launcher_env
from gpt2core.parallel.mesh import Mesh
from gpt2core.tree_sum import tree_sum
from stage1_mpi import collectives, mpi_communicator
from stage1_mpi.import_mpi import is_of_another_mpi
from stage1_mpi.mpi_communicator import CHOICES, MpiCommunicator
from tests.support.collectives import (
    DTYPES,
    assert_same,
    check_every_collective,
    check_reduced,
    rank_inputs,
)
from tests.support.mpi import ROOT, mpiexec, run_mpi

# -- checks on every rank; one job runs all of them --------------------------------------------------------------------


def everything(comm):
    """Run every check below on the ranks of one job."""
    assert isinstance(comm, MpiCommunicator)
    assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)  # all ranks are on one host
    for check in (oracles, algorithms, other_dtypes, small_messages, in_any_order, groups, messages, objects,
                  bytes_sent, mistakes, failures):  # fmt: skip
        check(comm)
        comm.barrier()
    return comm.rank


def oracles(comm):
    for dtype in DTYPES:
        for rows in (0, 1, 13):
            check_every_collective(comm, comm.size + rows, rows, dtype)
    for shape in ((), (1,), (7,)):
        xs = rank_inputs(1, comm.size, shape, np.float32)
        assert_same(np.asarray(comm.all_reduce(np.asarray(xs[comm.rank]))), np.asarray(tree_sum(xs)))


def algorithms(comm):
    """Every algorithm gives the right sum, in place and out of place; reduce-scatter is a part of the same sum."""
    for name in CHOICES:
        comm.use_collectives(name)
        for op in ("sum", "min", "max"):
            for dtype in DTYPES:
                xs = rank_inputs(2, comm.size, (comm.size * 5, 3), dtype)
                x, mine = xs[comm.rank].copy(), slice(comm.rank * 5, comm.rank * 5 + 5)
                check_reduced(comm.all_reduce(x, op), xs, op, name)
                check_reduced(comm.all_reduce_start(x[::-1], op).wait(), [x[::-1] for x in xs], op, name)
                check_reduced(comm.reduce_scatter(x, op), [x[mine] for x in xs], op, name)
                assert_same(x, xs[comm.rank])
                assert comm.all_reduce(x, op, out=x) is x
                check_reduced(x, xs, op, name)
    comm.use_collectives("mpi")
    assert comm.split(0)._algorithm == "mpi"  # inherited
    comm.use_collectives("canonical")


def other_dtypes(comm):
    """Collectives that only move data accept every dtype."""
    for dtype in (np.uint8, np.uint16, np.float16, np.bool_):
        xs = [(x % 2).astype(dtype) for x in rank_inputs(3, comm.size, (comm.size, 3), np.int64)]
        assert_same(comm.all_gather(xs[comm.rank]), np.concatenate(xs))
        assert_same(comm.all_to_all(xs[comm.rank]), np.stack([x[comm.rank] for x in xs]))
        assert_same(comm.broadcast(xs[comm.rank], comm.size - 1), xs[-1])


def small_messages(comm):
    """With small size limits, so that arrays are sent in many pieces, the results are the same."""
    defaults = mpi_communicator.MAX_CALL_BYTES, mpi_communicator.OURS_MIN_BYTES, collectives.CHUNK
    try:
        for limits in ((24, 1 << 20, 1 << 20), (1 << 20, 1, 40), (40, 1, 100)):
            mpi_communicator.MAX_CALL_BYTES, mpi_communicator.OURS_MIN_BYTES, collectives.CHUNK = limits
            check_every_collective(comm, 4, 13, np.float32)
            messages(comm, 20, 50)
            comm.use_collectives("mpi")
            xs = rank_inputs(5, comm.size, (comm.size * 7,), np.int32)
            assert_same(comm.all_reduce(xs[comm.rank]), tree_sum(xs))
            assert_same(comm.reduce_scatter(xs[comm.rank]), tree_sum(xs).reshape(comm.size, -1)[comm.rank])
            comm.use_collectives("canonical")
    finally:
        mpi_communicator.MAX_CALL_BYTES, mpi_communicator.OURS_MIN_BYTES, collectives.CHUNK = defaults


def in_any_order(comm):
    """Many pending operations in the world and in a group, with blocking calls and messages between them."""
    p, r = comm.size, comm.rank
    group = comm.split(r % 2)  # with 2 or 3 ranks, one of the groups is Solo
    xs = rank_inputs(6, p, (1000 * p,), np.float32)
    x, members = xs[r].copy(), [rank for rank in range(p) if rank % 2 == r % 2]
    wants, handles = [], []
    for k in range(4):
        handles.append(comm.all_reduce_start(x))
        wants.append(tree_sum(xs))
        handles.append(group.all_reduce_start(x[:k]))
        wants.append(tree_sum([xs[rank][:k] for rank in members]))
        handles.append(comm.recv_start(np.empty(1, np.int64), (r - 1) % p, tag=k))
        wants.append(np.array([k + (r - 1) % p]))
        comm.send(np.array([k + r]), (r + 1) % p, tag=k)
        assert_same(comm.all_gather(np.array([r])), np.arange(p))  # blocking, after the pending operations
        handles.append(group.all_gather_start(np.array([r])))
        wants.append(np.array(members))
        handles.append(comm.reduce_scatter_start(x, "max"))
        wants.append(np.max(xs, axis=0).reshape(p, -1)[r])
    for handle, want in reversed(list(zip(handles, wants, strict=True))):
        assert_same(handle.wait(), want)
        assert handle.wait() is handle.wait()


def groups(comm):
    p, r = comm.size, comm.rank
    assert comm.split(None if r == 0 else 1) is None or r
    assert isinstance(comm.split(r), Solo)
    group = comm.split(3, key=-r)
    assert (group.rank, group.size, group.local_size, group.bytes_sent) == (p - 1 - r, p, p, 0)
    assert_same(group.all_gather(np.array([r])), np.arange(p)[::-1])
    check_every_collective(group, 7, 2, np.float64)
    half = comm.split(r * 2 // p)
    assert_same(half.all_gather(np.array([r])), np.array([rank for rank in range(p) if rank * 2 // p == r * 2 // p]))
    if p == 8:
        mesh = Mesh(comm, dp=2, tp=2, pp=2)
        assert_same(mesh.pipeline.all_gather(np.array([r])), np.array([r % 4, r % 4 + 4]))


def messages(comm, length=500, long=300_000):
    """A ring of messages with several tags; messages of one tag keep their order, long and non-contiguous ones too."""
    p, r = comm.size, comm.rank
    right, left = (r + 1) % p, (r - 1) % p
    xs = rank_inputs(8, p, (6, length, 3), np.float64)
    sends = [comm.send_start(xs[r][i].T, right, tag=i % 2) for i in range(6)]
    outs = [np.empty((3, length)) for _ in range(6)]
    receives = [comm.recv_start(outs[i], left, tag=i % 2) for i in (1, 0, 3, 2, 5, 4)]
    for handle in receives[::-1] + sends:
        assert handle.wait() is handle.wait()
    for i in range(6):
        assert_same(outs[i], xs[left][i].T)
    large = np.full(long, r)
    handle = comm.send_start(large, right, tag=1000)
    assert_same(comm.recv(np.empty_like(large), left, tag=1000), np.full_like(large, left))
    assert handle.wait() is None
    out, want = np.full_like(large, -1), np.full_like(large, left)
    handle, arriving = comm.send_start(large, right, tag=1001), comm.recv_start(out, left, tag=1001)
    for _ in range(100_000):  # without a wait
        handle.progress()
        arriving.progress()
        if np.array_equal(out, want):
            break
    assert_same(out, want)
    assert handle.wait() is None and arriving.wait() is out


def objects(comm):
    mine = {"rank": comm.rank, "words": ["é" * (10 * comm.rank), None]}
    gathered = comm.all_gather_object(mine)
    assert gathered == [{"rank": k, "words": ["é" * (10 * k), None]} for k in range(comm.size)]
    assert comm.broadcast_object(mine if comm.rank == comm.size - 1 else None, comm.size - 1) == gathered[-1]


def bytes_sent(comm):
    p, x = comm.size, np.ones(120, np.float32)
    n = x.nbytes

    def sent(call, *args, **options):
        before = comm.bytes_sent
        call(*args, **options)
        return comm.bytes_sent - before

    for name in ("mpi", "ring", "canonical"):
        comm.use_collectives(name)
        assert sent(comm.all_reduce, x) == 2 * (p - 1) * n // p
        assert sent(comm.reduce_scatter, x) == (p - 1) * n // p
    assert sent(comm.all_gather, x) == (p - 1) * n
    assert sent(comm.all_to_all, x) == (p - 1) * n // p
    assert sent(comm.broadcast, x, p - 1) == ((p - 1) * n if comm.rank == p - 1 else 0)
    handle = comm.recv_start(x.copy(), (comm.rank - 1) % p)
    assert sent(comm.send, x, (comm.rank + 1) % p) == n
    handle.wait()
    assert sent(comm.barrier) == sent(comm.split, 0) == 0


def mistakes(comm):
    """Invalid arguments raise at once, in the `_start` forms too, and the group stays usable."""
    x, me = np.ones(comm.size * 2), comm.rank
    for call, message in (
        (lambda: comm.all_reduce_start(x, "mean"), "unknown reduction 'mean'"),
        (lambda: comm.reduce_scatter_start(x, "mean"), "unknown reduction 'mean'"),
        (lambda: comm.all_reduce(x, out=x[1:]), "out is float64"),
        (lambda: comm.all_reduce(x, out=np.ones((len(x), 2))[:, 0]), "non-contiguous"),
        (lambda: comm.reduce_scatter(x[1:]), "is not divisible by"),
        (lambda: comm.all_to_all(x[1:]), "is not divisible by"),
        (lambda: comm.all_gather(np.float32(1)), "no axis 0"),
        (lambda: comm.broadcast(x, root=comm.size), "is not a rank of a group"),
        (lambda: comm.send(x, me), "is rank . itself"),
        (lambda: comm.recv(x, -1), "source -1 is not a rank"),
        (lambda: comm.use_collectives("rings"), "`collectives=rings`: unknown algorithm; choose one of mpi, root, "),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    comm.use_collectives("mpi")
    with pytest.raises(ConfigError, match="`collectives=mpi`: cannot reduce float16; use canonical"):
        comm.all_reduce(x.astype(np.float16))
    comm.use_collectives("canonical")
    assert_same(comm.all_reduce(x.astype(np.float16)), (x * comm.size).astype(np.float16))
    check_every_collective(comm, 9, 1, np.float32)


def failures(comm):
    """An error in MPI or in the background thread is raised by every wait()."""

    def fail():
        raise KeyError("in the background")

    handle = comm._start(fail)
    for _ in range(2):
        with pytest.raises(KeyError, match="in the background"):
            handle.wait()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    send = comm.send_start(np.ones(4), right, tag=3)
    with pytest.raises(CommunicatorError, match="truncated"):
        comm.recv(np.ones(2), left, tag=3)  # shorter than the message
    send.wait()


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4, 5, 8))])
def test_everything_under_mpiexec(size):
    assert run_mpi(size, everything) == list(range(size))


# -- waiting -----------------------------------------------------------------------------------------------------------


def waits(comm):
    """[CPU time / wall time of this rank] for each way to wait for rank 0."""
    shares, one = [], np.ones(1)
    for wait in (
        comm.barrier,
        lambda: comm.all_reduce(one),
        lambda: comm.all_gather(one),
        lambda: comm.all_reduce_start(one).wait(),
        lambda: comm.recv(one, 0) if comm.rank else [comm.send(one, to) for to in range(1, comm.size)],
    ):
        comm.barrier()
        wall, cpu = time.monotonic(), time.process_time()
        if comm.is_root:
            time.sleep(0.5)
        wait()
        shares.append((time.process_time() - cpu) / (time.monotonic() - wall))
    return shares


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_no_call_of_the_library_has_more_bytes_than_its_limit(monkeypatch, dtype):
    monkeypatch.setattr(mpi_communicator, "MAX_CALL_BYTES", 24)
    for size in (0, 1, 3, 6, 7, 25):
        x = np.arange(size, dtype=dtype)
        pieces = mpi_communicator._pieces(x)
        assert all(piece.nbytes <= 24 for piece in pieces) and len(pieces) == max(1, -(-x.nbytes // 24))
        np.testing.assert_array_equal(np.concatenate(pieces), x)


def test_a_waiting_rank_uses_little_cpu_time():
    for shares in run_mpi(4, waits):
        assert max(shares) < 0.3, shares  # a spin loop would give 1 on a free core


def completes_in_the_background(comm):
    """A started all-reduce completes while the caller sleeps outside MPI."""
    x = np.full(1_000_000, comm.rank, np.float32)
    handle = comm.all_reduce_start(x)
    deadline = time.monotonic() + 30
    while not handle.future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert handle.future.done()
    return handle.wait()[0]


def test_a_started_collective_completes_without_calls_from_the_caller():
    assert run_mpi(2, completes_in_the_background) == [1, 1]


# -- how a job starts and ends -----------------------------------------------------------------------------------------


def one_aborts(comm):
    print(f"rank {comm.rank} is here\n", end="", flush=True)
    if comm.rank == 1:
        print("the cause", end="", file=sys.stderr)
        comm.abort(7)
    comm.barrier()


def test_abort_ends_every_rank_and_keeps_what_was_written():
    with pytest.raises(AssertionError, match="ended with status 7(.|\n)*the cause"):
        run_mpi(3, one_aborts)


def one_aborts_and_cannot_exit(comm):
    """exit() of the aborting process hangs, as with CUDA, which waits there for a kernel that waits for a rank."""
    libc = ctypes.CDLL(None)
    getattr(libc, "__cxa_atexit")(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)
    group = comm.split(0)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.abort(7)


def test_abort_ends_the_job_even_if_the_aborting_process_cannot_exit():
    with pytest.raises(AssertionError, match="ended with status 7"):
        run_mpi(2, one_aborts_and_cannot_exit, timeout=30)


def one_raises(comm):
    if comm.rank == 1:
        raise KeyError("the cause")
    comm.recv(np.ones(1), 1)


def test_an_exception_ends_the_job_and_is_printed():
    with pytest.raises(AssertionError, match="one_raises on 3 ranks(.|\n)*rank 1:(.|\n)*KeyError: 'the cause'"):
        run_mpi(3, one_raises)


def hangs(comm):
    if comm.rank == 1:
        comm.barrier()
    time.sleep(60)


def test_a_job_that_hangs_is_ended_with_the_stack_of_each_rank():
    with pytest.raises(AssertionError, match="was ended after 4 s(.|\n)*most recent call first"):
        run_mpi(2, hangs, timeout=4)


def alone(comm):
    x = np.arange(6.0)
    assert (comm.rank, comm.size, comm.local_size, comm.is_root) == (0, 1, 1, True)
    for call in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.broadcast):
        assert call(x) is x and call(x, out=x) is x
        out = np.empty_like(x)
        assert call(x, out=out) is out
        assert_same(out, x)
    assert comm.all_reduce_start(x).wait() is x
    comm.barrier()
    assert comm.all_gather_object("x") == ["x"] and comm.broadcast_object("x") == "x"
    assert isinstance(comm.split(0), Solo) and comm.split(None) is None and comm.bytes_sent == 0
    with pytest.raises(ConfigError, match="is rank 0 itself"):
        comm.send(x, 0)
    return "alone"


def test_a_world_of_one_rank_is_the_identity():
    assert run_mpi(1, alone) == ["alone"]


def started(script, **environment):
    """Output of a Python process started without a launcher."""
    mpiexec()  # or skip
    environment = dict(os.environ, PYTHONPATH=str(ROOT), **environment)
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    return ended.stdout + ended.stderr


MAKE = "from stage1_mpi.mpi_communicator import MpiCommunicator; comm = MpiCommunicator(); "


def test_without_a_launcher_there_is_one_rank():
    assert started(MAKE + "print(comm.rank, comm.size)") == "0 1\n"


def test_without_mpi4py_or_a_library_the_message_says_what_to_install():
    missing = "import sys; sys.modules['mpi4py'] = None; "
    assert "stage 1 needs mpi4py and an MPI library: pip install mpi4py mpich" in started(missing + MAKE)
    broken = "import sys, types; sys.modules['mpi4py'] = types.ModuleType('mpi4py'); "  # no MPI library
    assert "ConfigError: stage 1 needs mpi4py and an MPI library: pip install mpi4py mpich" in started(broken + MAKE)


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_the_launcher_of_another_mpi_is_named(variable, monkeypatch):
    monkeypatch.setenv(variable, "4")
    assert read_launcher_env() == (variable, 4, 0)
    answer = started(
        "from mpi4py import MPI; import os; os.environ['" + variable + "'] = '4'; " + MAKE
    )  # set after MPI_Init, so that the library does not try to contact that launcher
    assert f"the launcher started 4 processes ({variable}), but" in answer and "different MPI implementations" in answer


@pytest.mark.parametrize(
    "variable, vendor, slurm, other",
    [
        ("PMI_SIZE", "Open MPI", False, True),
        ("PMI_SIZE", "Open MPI", True, False),
        ("PMI_SIZE", "Intel MPI", False, False),
        ("OMPI_COMM_WORLD_SIZE", "MPICH", False, True),
        ("OMPI_COMM_WORLD_SIZE", "Open MPI", False, False),
        ("SLURM_STEP_NUM_TASKS", "MPICH", True, False),
    ],
)
def test_which_library_is_not_the_launcher_s(monkeypatch, variable, vendor, slurm, other):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_PROCID", "0")
    assert is_of_another_mpi(variable, vendor) is other


def test_the_launcher_of_another_mpi_is_named_before_mpi_init():
    variable = "OMPI_COMM_WORLD_SIZE" if "--oversubscribe" not in mpiexec() else "PMI_SIZE"
    answer = started(MAKE, **{variable: "4", "PMIX_NAMESPACE": "another launcher's"})
    assert "different MPI implementations" in answer and "Abort" not in answer


def test_a_non_blocking_collective_needs_thread_multiple():
    lowered = "import mpi4py, numpy; mpi4py.rc.thread_level = 'funneled'; x = numpy.ones(1); "
    answer = started(lowered + MAKE + "print(comm.all_reduce(x)); comm.all_reduce_start(x)")
    assert answer.startswith("[1.]")
    assert "ConfigError: a non-blocking collective needs MPI.THREAD_MULTIPLE" in answer


def test_mpi4py_is_imported_with_the_first_communicator():
    script = "import sys; import stage1_mpi.collectives, stage1_mpi.mpi_communicator; print('mpi4py' in sys.modules)"
    assert started(script) == "False\n"
