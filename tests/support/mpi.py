"""The MPI launcher and `run_mpi`, which calls a function on every rank; without MPI they skip the test.

`run_mpi` is run_ranks of thread_communicator with processes instead of threads. See testing/jobs.py.
"""

import pytest

from gpt2core.errors import ConfigError
from testing import jobs
from testing.jobs import ROOT

__all__ = ["ROOT", "mpiexec", "run_mpi"]


def mpiexec():
    """Return the launcher and its flags; skips the test with the reason if there is no MPI."""
    try:
        return jobs.launcher()
    except ConfigError as error:
        pytest.skip(str(error))


def run_mpi(size, function, *args, timeout=jobs.LIMIT):
    """Call `function(comm, *args)` on `size` ranks -> their results; skips the test if there is no MPI."""
    mpiexec()
    return jobs.run_mpi(size, function, *args, timeout=timeout)
