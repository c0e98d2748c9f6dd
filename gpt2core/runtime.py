"""The Runtime protocol: what a device provides in addition to kernels. The base class is the runtime of the host."""

import contextlib
import sys
import time

import numpy as np

from gpt2core.errors import ConfigError


class Results:
    """The arrays of one call of a Compiled, valid until the next call; if can_overlap, until the call after that."""

    def __init__(self, arrays):
        self.arrays = arrays

    def wait(self):
        """Wait until the arrays are computed, and return them as host arrays."""
        return self.arrays


class HostCopy:
    """Copies of arrays of a device to arrays of the host. When it is made, the arrays may change.

    pairs: [(array, its copy)], of equal shapes and dtypes. On the host, the copies are complete at once.
    """

    def __init__(self, pairs):
        for array, out in pairs:
            np.copyto(out, array, casting="no")

    def is_complete(self):
        """Whether the copies are complete."""
        return True

    def wait(self):
        """Return when the copies are complete."""


class Compiled:
    """compiled(*args) launches function(*args) and returns its Results. On the host, it only calls `function`.

    A device may capture a call as a CUDA graph and replay it. Therefore the arguments of all calls must have the same
    structure and shapes: nested tuples and lists of NumPy arrays (copied to fixed addresses), device arrays (the same
    in each call) and constants (equal in each call). `function` returns a list of arrays.
    """

    can_overlap = False  # whether a call may be made before wait() on the Results of the previous call

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return Results(self.function(*args))


def print_notice(text):
    """Print a notice on standard error."""
    print(text, file=sys.stderr)


class Runtime:
    """The host: kernels run when they are called; nothing is captured, and nothing is chosen by timing.

    on_notice(text): notify() calls it; assign another function to receive the notices of this runtime.
    """

    on_notice = staticmethod(print_notice)

    uses_graphs = False  # whether compile_step() captures steps as CUDA graphs and replays them
    tuned_for = None  # str, the device and library versions for which `tuned` is valid; None if nothing is timed
    name = "numpy"
    library = ""  # the library of the matrix products, if it is not the default one
    environment = ""  # variables that a printed command needs to run on the same kind of device, as "NAME=value "

    @property
    def tuned(self):
        """The choices made by timing, such as tile sizes: {str: str}. They may differ between ranks."""
        return {}

    def load_tuned(self, tuned, final=False):  # noqa: B027
        """Replace all choices by `tuned`, the choices of another rank or of an earlier run.

        final: add `tuned` to the present choices instead of replacing them, and time nothing afterwards.
        """

    def retune(self):
        """Time all candidates again; raises ConfigError if nothing is timed."""
        raise ConfigError(f"`autotune`: {self.name} tunes nothing; omit the flag")

    def use_blas(self, name):
        """Select the library of matrix products on the host; raises ConfigError if there is no choice."""
        raise ConfigError(f"`blas={name}`: {self.name} has its own matrix products; omit the flag")

    def compile_step(self, function, capture=True, collectives=False):
        """The Compiled of `function`; if `capture` is true, a device may capture a call and replay it (CUDA graph).

        collectives: whether the function calls collectives of several ranks. If not, a device may call it once more, to
        compile its kernels in threads.
        """
        return Compiled(function)

    def join(self):  # noqa: B027
        """Make later work on the current stream wait until kernels have written all gradients to their destinations."""

    def after(self, *operands):
        """A context manager: work inside waits for the gradients of parameters, but the current stream does not.

        operands: arrays that the work inside reads, which stay allocated until it is done.
        """
        return contextlib.nullcontext()

    def use_threads(self, count):  # noqa: B027
        """Let a product use `count` host threads. This is for generation, where there is no batch to divide."""

    def release_cached_memory(self):
        """Return the unused blocks of the memory pool to the device; otherwise arrays of other sizes fragment them."""

    def copy_to_host(self, pairs):
        """The HostCopy of these pairs; a device may copy while later work continues."""
        return HostCopy(pairs)

    def pin(self, array):
        """A context manager: a device copies faster to `array`, an array of bytes on the host, until it ends."""
        return contextlib.nullcontext()

    def peak_memory(self):
        """The maximum number of bytes of device memory allocated so far, or None if it is not counted."""
        return None

    def explain_oom(
        self, error, config, batch_size=None, seq_len=None, micro_batches=1, ranks=1, parallel=None, in_order=False
    ):
        """A sentence that says what to change if `error` means too little device memory; None for any other error.

        The sentence is about a training step, or about generation if batch_size is None. ranks: number of data-parallel
        ranks. parallel: a ParallelConfig. in_order: whether the devices add gradients in the canonical order.
        """
        return None

    def peak_flops(self, precision):
        """Peak floating-point operations per second of this device, or None if it is not known."""
        return None

    def timestamp(self):
        """The time at which all earlier work on the current stream is done, as an argument of seconds()."""
        return time.perf_counter()

    def seconds(self, timestamps):
        """The latest values of these results of timestamp(), in seconds of time.perf_counter() on this host."""
        return timestamps

    def range(self, name):
        """A context manager: a profiler shows the work inside under this name."""
        return contextlib.nullcontext()

    def annotate(self, backend):
        """From now on, name the ranges and kernels of `backend` for a profiler. Raises ConfigError if there is none."""
        raise ConfigError(f"`nvtx`: {self.name} has no profiler timeline; omit the flag")

    def check_training(self, config):
        """Raise ConfigError if this runtime is not meant to train a model of a GPT2Config."""

    def check_generation(self, config, tokens):
        """Raise ConfigError if this runtime is not meant to generate so many tokens with a model of a GPT2Config."""

    def notes(self, config):
        """A list of warnings to print before the model of this GPT2Config is run."""
        return []

    def notify(self, text):
        """Pass `text`, the reason for a long wait, to on_notice."""
        self.on_notice(text)
