"""The stage of a model or a run: its number, the class of its Backend, and the Communicator of its ranks."""

import functools
import importlib.util
import os
import sys

from gpt2core.app import missing_package
from gpt2core.app.command import crash
from gpt2core.app.stage import Stage
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError
from gpt2core.parallel.launcher_env import read_launcher_env
from gpt2core.threads import cores_of_process

STAGES = "auto", 0, 1, 2, 3


def chosen_stage(stage):
    """The number of the stage: `stage` itself or, for "auto", the stage for this machine and its launcher.

    That is stage 0, or 2 if CuPy finds a GPU; of several processes of a launcher (mpiexec), stage 1 or 3.
    """
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigError(f"`stage={stage!r}` is unknown: choose from {', '.join(map(str, STAGES))}")
    return 2 * has_gpu() + (read_launcher_env().size > 1) if stage == "auto" else stage


def has_gpu():
    """Whether CuPy finds a GPU, and Triton's interpreter is not selected."""
    interpreter = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")
    if interpreter or importlib.util.find_spec("cupy") is None:
        return False
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # CuPy for another version of CUDA, or no driver
        return False


def stage_of(number):
    """The Stage of this number; raises ConfigError if a package that its Backend needs is not installed.

    All ranks call its world(), which raises ConfigError if there is no MPI.
    """
    try:
        if number >= 2:
            from stage2_cuda.cuda_backend import CudaBackend as Backend
        else:
            from stage0_serial.numpy_backend import NumpyBackend as Backend
    except ModuleNotFoundError as error:
        if line := missing_package(error):
            raise ConfigError(f"stage={number}: {line.removeprefix('error: ')}") from error
        raise
    return Stage(number, Backend, (Solo, mpi_world, Solo, nccl_world)[number])


def nccl_world():
    """The NcclCommunicator of all ranks."""
    from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

    return NcclCommunicator(mpi_world())


@functools.cache  # a process has one world, and one watchdog of it
def mpi_world():
    """The MpiCommunicator of all ranks.

    From here on, an error that a rank does not catch ends all ranks: the others would wait for this rank forever.
    """
    from stage1_mpi.mpi_communicator import MpiCommunicator

    world = MpiCommunicator()
    if world.size > 1:
        sys.excepthook = lambda _, error, traceback: crash(world, error.with_traceback(traceback))
    return world


def own_cores():
    """The number of cores that this process may use: those of its host, divided by the processes of its launcher."""
    cores = len(cores_of_process())
    return max(1, cores // read_launcher_env().size)
