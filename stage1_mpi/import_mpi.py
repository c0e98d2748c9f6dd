"""Import mpi4py.MPI, which initializes the MPI library, and report a missing library or one of another launcher."""

import atexit
import os
import time
import warnings

from gpt2core.errors import ConfigError
from gpt2core.parallel.launcher_env import read_launcher_env

OPEN_MPI = "Open MPI"
FLUSH_TIME = 0.2  # seconds for the launcher to forward this rank's output before the launcher kills the job


def import_mpi():
    """mpi4py.MPI, initialized; raises ConfigError if it or an MPI library is missing, or if it is not the launcher's.

    With the library of another launcher each rank would be alone in its world, or MPI_Init would end the process.
    """
    variable, ranks, rank = read_launcher_env()
    try:
        import mpi4py

        if ranks > 1:
            mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # mpi4py warns if the launcher is another MPI's
            from mpi4py import MPI
    except KeyboardInterrupt:
        abort_job(130)
        raise
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is installed, but no MPI library
        reason = str(error).splitlines()[0]
        abort_job_at_exit(rank)
        raise ConfigError(f"stage 1 needs mpi4py and an MPI library: pip install mpi4py mpich ({reason})") from error
    vendor, version = MPI.get_vendor()
    differs = ranks > 1 and is_of_another_mpi(variable, vendor)
    if not differs and not MPI.Is_initialized():
        MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
    if ranks > 1 and (differs or MPI.COMM_WORLD.size == 1):
        abort_job_at_exit(rank)
        raise ConfigError(
            f"the launcher started {ranks} processes ({variable}), but mpi4py uses {vendor} "
            f"{'.'.join(map(str, version))}: launcher and library are different MPI implementations; use the mpiexec "
            f"of {vendor}, or pip install mpich for both"
        )
    return MPI


def is_of_another_mpi(variable, vendor):
    """Whether the launcher that sets this variable is known to belong to another MPI than this vendor's."""
    if variable == "PMI_SIZE":  # MPICH's launcher; Slurm sets this variable too, and can start Open MPI
        return vendor == OPEN_MPI and "SLURM_PROCID" not in os.environ
    return variable.startswith("OMPI_") and vendor in ("MPICH", "MVAPICH", "MVAPICH2", "Intel MPI")


def abort_job_at_exit(rank):
    """At the exit of this process, abort_job().

    The launcher does not detect a rank that exits before MPI_Init; the other ranks would wait for that rank forever.
    """
    time.sleep(2 * FLUSH_TIME * min(rank, 8))  # the lowest rank ends first: only its message is printed
    atexit.register(abort_job, 2)
    atexit.register(time.sleep, FLUSH_TIME)  # atexit runs this first, so the message is forwarded before the abort


def abort_job(exit_code):
    """Request from MPICH's launcher, if it has started this process, that it aborts the job (PMI-1 protocol)."""
    fd = os.environ.get("PMI_FD", "")
    if fd.isdigit():
        os.write(int(fd), f"cmd=abort exitcode={exit_code}\n".encode())
