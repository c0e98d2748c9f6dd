"""What tests ask of MPI: a launcher and functions on every rank, or a test that is skipped with the reason.

The mpiexec twin of thread_communicator.run_ranks; benchmarks/harness/jobs.py does the work.
"""

import pytest

from benchmarks.harness import jobs
from benchmarks.harness.jobs import ROOT
from gpt2core.errors import ConfigError

__all__ = ["ROOT", "mpiexec", "run_mpi"]


def mpiexec():
    """The launcher and the flags it needs here; skips the test where there is no MPI to test."""
    try:
        return jobs.launcher()
    except ConfigError as error:
        pytest.skip(str(error))


def run_mpi(size, function, *args, timeout=jobs.LIMIT):
    """jobs.run_mpi, skipped in the same way."""
    mpiexec()
    return jobs.run_mpi(size, function, *args, timeout=timeout)
