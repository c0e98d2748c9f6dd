"""Generate text with a trained GPT-2 on many CPUs: NumPy arrays, MPI ranks."""

from gpt2core.app.cli import infer
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator

if __name__ == "__main__":
    infer(backend=NumpyBackend, world=MpiCommunicator)
