"""What a launcher tells each process that it starts, through the environment: how many they are, and which this is."""

import os
from typing import NamedTuple

VARIABLES = (  # (how many, which one)
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


class Launched(NamedTuple):
    """`count` processes, of which this is number `number`, as the environment's `variable` says; "" without one."""

    variable: str = ""
    count: int = 1
    number: int = 0


def read_launcher_env():
    """The Launched of this process."""
    for count, number in VARIABLES:
        if os.environ.get(count, "").isdigit():
            which = os.environ.get(number, "")
            return Launched(count, int(os.environ[count]), int(which) if which.isdigit() else 0)
    return Launched()
