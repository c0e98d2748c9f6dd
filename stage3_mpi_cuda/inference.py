"""Generate text with a trained GPT-2 on many GPUs: CuPy arrays, Triton kernels, one MPI rank per GPU."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root of the repository, for use without installation

from gpt2core.app.cli import infer
from stage2_cuda.cuda_backend import CudaBackend
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator


def main():
    infer(stage=3, backend=CudaBackend, world=NcclCommunicator)


if __name__ == "__main__":
    main()
