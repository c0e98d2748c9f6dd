"""The environment variables by which a launcher tells a process its rank, and how the process answers it."""

import os
from pathlib import Path
from typing import NamedTuple

VARIABLES = (  # (number of processes, rank of this process)
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)

CONTINUE_FILE = "STAGED_GPT2_CONTINUE_FILE"  # the file of write_continue_command(), if the launcher reads it
STARTED_AGAIN = "STAGED_GPT2_STARTED_AGAIN"  # set if the launcher has started this job before


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


def started_again():
    """Whether the launcher has started this job before, and it failed."""
    return STARTED_AGAIN in os.environ


def write_continue_command(command):
    """Tell the launcher the command line that continues this run: it uses it if a rank fails (--max-restarts)."""
    if path := os.environ.get(CONTINUE_FILE):
        new = Path(f"{path}.new")
        new.write_text(command, encoding="utf-8")
        new.replace(path)  # the launcher reads the old command or the new one, never a part
