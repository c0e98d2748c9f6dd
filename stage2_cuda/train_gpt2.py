"""Train GPT-2 on one GPU: CuPy arrays, Triton kernels, one process."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root of the repository, for use without installation

from gpt2core.app.cli import train
from gpt2core.communicator import Solo
from stage2_cuda.cuda_backend import CudaBackend


def main():
    train(stage=2, backend=CudaBackend, world=Solo)


if __name__ == "__main__":
    main()
