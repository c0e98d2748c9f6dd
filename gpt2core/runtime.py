"""The Runtime protocol: what a device provides in addition to kernels. The base class is the runtime of the host."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

from gpt2core.errors import ConfigError


class Results:
    """The results of one call of a Compiled. The next call (if can_overlap, the one after it) may overwrite them."""

    def __init__(self, arrays):
        self.arrays = arrays

    def wait(self):
        return self.arrays


class Compiled:
    """Calls `function` and returns Results. All calls have arguments of the same structure and shapes.

    The arguments are nested tuples and lists. They contain NumPy arrays, which a device copies to fixed addresses,
    device arrays, and constants. The function returns a list of arrays. This class, for the host, only calls it.
    """

    can_overlap = False  # whether a call may be made before wait() on the Results of the previous call

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return Results(self.function(*args))


class Runtime:
    """The host: kernels run when they are called; nothing is captured, and nothing is chosen by timing."""

    uses_graphs = False  # whether compile_step() captures steps as CUDA graphs and replays them
    tuned_for = None  # text: the device and library versions for which `tuned` is valid; None: nothing is timed
    name = "numpy"
    environment = ""  # variables to write before a command, so that it runs on the same kind of device

    def __init__(self):
        self.executor, self.threads = None, 1

    @property
    def tuned(self):
        """The choices made by timing, which may differ between ranks: {what: choice}, both text."""
        return {}

    def load_tuned(self, tuned, final=False):  # noqa: B027
        """Replace all choices by `tuned`, the choices of another rank or of an earlier run.

        final: add `tuned` to the present choices instead, and time nothing from now on.
        """

    def retune(self):
        """Time all candidates again; raises ConfigError if nothing is timed."""
        raise ConfigError(f"--autotune: {self.name} tunes nothing; omit the flag")

    def compile_step(self, function, capture=True):
        """A Compiled of `function`; with `capture` a device may capture a call and replay it (CUDA graph)."""
        return Compiled(function)

    def join(self):  # noqa: B027
        """Make later work on the current stream wait until kernels have written all gradients to their `out` arrays."""

    def after(self):
        """A context manager whose work waits for the gradients in `out` arrays, while the current stream continues."""
        return contextlib.nullcontext()

    def use_threads(self, count):
        """Let one kernel use `count` host threads: for generation, where there is no batch to divide."""
        # not BLAS's own threads: they busy-wait, and are slow while another program uses the cores
        self.threads, self.executor = count, ThreadPoolExecutor(count - 1) if count > 1 else None

    def release_cached_memory(self):
        """Release cached blocks of the memory pool that would otherwise be split for other sizes."""

    def peak_memory(self):
        """The most bytes of device memory held so far, or None if they are not counted."""
        return None

    def explain_oom(
        self, error, config, batch_size=None, seq_len=None, micro_batches=1, ranks=1, parallel=None, in_order=False
    ):
        """If `error` means too little device memory, a sentence that says what to change; None for any other error.

        The sentence is for a training step, or without batch_size for generation. ranks: the data-parallel ranks;
        parallel: a ParallelConfig; in_order: whether the devices sum gradients in the canonical order.
        """
        return None

    def peak_flops(self, precision):
        """Peak floating-point operations per second of this device, or None if it is not known."""
        return None

    def range(self, name):
        """A context manager that names a part of the step in a profiler."""
        return contextlib.nullcontext()

    def annotate(self, backend):
        """Name the ranges and kernels of `backend` in a profiler from now on; raises ConfigError without a profiler."""
        raise ConfigError(f"--nvtx: {self.name} has no profiler timeline; omit the flag")

    def notes(self, config):
        """Warnings to print before this model is run."""
        return []

    def notify(self, text):
        """Print the reason for a long wait."""
        print(text, file=sys.stderr)
