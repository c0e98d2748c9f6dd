"""Train GPT-2 on many GPUs: CuPy arrays, Triton kernels, one MPI rank per GPU."""

from gpt2core.app.cli import train
from stage2_cuda.cuda_backend import CudaBackend
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

if __name__ == "__main__":
    train(backend=CudaBackend, world=NcclCommunicator)
