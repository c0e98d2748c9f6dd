"""The environment variables by which a launcher gives each process its rank and the number of processes."""

import os
from typing import NamedTuple

VARIABLES = (  # (number of processes, rank of this one)
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


class LauncherEnv(NamedTuple):
    """`size` processes were started, and this one is number `rank`.

    variable: the name of the environment variable that holds the size; "" without a launcher.
    """

    variable: str = ""
    size: int = 1
    rank: int = 0


def read_launcher_env():
    """The LauncherEnv of this process."""
    for size, rank in VARIABLES:
        if os.environ.get(size, "").isdigit():
            value = os.environ.get(rank, "")
            return LauncherEnv(size, int(os.environ[size]), int(value) if value.isdigit() else 0)
    return LauncherEnv()
