"""Train GPT-2 on many CPUs: NumPy arrays, MPI ranks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root of the repository, for use without installation

from gpt2core.app.cli import train
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator


def main():
    train(stage=1, backend=NumpyBackend, world=MpiCommunicator)


if __name__ == "__main__":
    main()
