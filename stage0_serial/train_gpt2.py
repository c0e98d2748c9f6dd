"""Train GPT-2 on one CPU: NumPy arrays, one process."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root of the repository, for use without installation

from gpt2core.app.cli import train
from gpt2core.communicator import Solo
from stage0_serial.numpy_backend import NumpyBackend


def main():
    train(stage=0, backend=NumpyBackend, world=Solo)


if __name__ == "__main__":
    main()
