"""The environment variables by which a launcher tells a process its rank, and how the process answers it."""

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

VARIABLES = (  # (number of processes, rank of this process)
    ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)

CONTINUE_FILE = "STAGED_GPT2_CONTINUE_FILE"  # the file of tell_launcher(), if the launcher reads it
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


def environment_of_no_rank():
    """The environment variables of this process without those of VARIABLES, for a process that is not a rank."""
    launcher = {name for names in VARIABLES for name in names}
    return {name: value for name, value in os.environ.items() if name not in launcher}


def started_again():
    """Whether the launcher has started this job before, and it failed."""
    return STARTED_AGAIN in os.environ


def tell_launcher(**facts):
    """Tell the launcher facts that it uses if a rank fails (--max-restarts); those of earlier calls remain.

    command: the command line that continues this run. ranks: a list of the numbers of ranks that it can have.
    """
    if path := os.environ.get(CONTINUE_FILE):
        new = Path(f"{path}.new")
        new.write_text(json.dumps(read_facts(path) | facts), encoding="utf-8")
        new.replace(path)  # the launcher reads the old facts or the new ones, never a part


def read_facts(path):
    """The facts that tell_launcher() has written to the file `path`; {} if there are none."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(Path(path).read_text(encoding="utf-8"))
    return {}
