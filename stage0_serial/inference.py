"""Generate text with a trained GPT-2 on one CPU: NumPy arrays, one process."""

from gpt2core.app.cli import infer
from gpt2core.communicator import Solo
from stage0_serial.numpy_backend import NumpyBackend

if __name__ == "__main__":
    infer(backend=NumpyBackend, world=Solo)
