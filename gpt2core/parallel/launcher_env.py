"""The environment variables in which an MPI launcher gives each process its rank and the number of processes."""

import os
from typing import NamedTuple

VARIABLES = (  # (number of processes, rank of this process)
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


class LauncherEnv(NamedTuple):
    """The launcher started `size` processes, and this process has number `rank`.

    variable: the name of the environment variable that contains the size; "" if no launcher was used.
    """

    variable: str = ""
    size: int = 1
    rank: int = 0


def read_launcher_env():
    """The LauncherEnv of this process."""
    for size_name, rank_name in VARIABLES:
        if os.environ.get(size_name, "").isdigit():
            rank = os.environ.get(rank_name, "")
            return LauncherEnv(size_name, int(os.environ[size_name]), int(rank) if rank.isdigit() else 0)
    return LauncherEnv()
