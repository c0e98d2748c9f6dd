"""Generate text with a trained GPT-2 on one GPU: CuPy arrays, Triton kernels, one process."""

from gpt2core.app.cli import infer
from gpt2core.communicator import Solo
from stage2_cuda.cuda_backend import CudaBackend

if __name__ == "__main__":
    infer(backend=CudaBackend, world=Solo)
