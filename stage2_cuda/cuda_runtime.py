"""The Runtime of one GPU: CUDA graphs, a side stream, tuning by timing, memory use, and names for a profiler."""

import contextlib
import weakref
from operator import attrgetter

import numpy as np

from gpt2core.architecture import parameter_count
from gpt2core.errors import ConfigError, counted
from gpt2core.memory.gpu_sizes import CONTEXT
from gpt2core.runtime import Runtime
from stage2_cuda.gemm.products import NumpyGemm, make_gemm_and_tuner
from stage2_cuda.runtime import cupti, gpu_clock, nvtx, triton_launch
from stage2_cuda.runtime.cuda_graph import CapturedStep
from stage2_cuda.runtime.peak_flops import peak_flops
from stage2_cuda.runtime.side_stream import NoStream, SideStream
from stage2_cuda.runtime.snapshot_copy import SnapshotCopy
from stage2_cuda.tuning.tuner import Tuner

# parameters: training a larger model in Triton's interpreter prints a warning. One with more than LIMIT_INTERPRETED is
# refused; to generate, the limit is for parameters times new tokens
MAX_INTERPRETED, LIMIT_INTERPRETED = 1_000_000, 20_000_000


def make_runtime(precision, deterministic):
    """A CudaRuntime for CuPy's current device or, with TRITON_INTERPRET=1, an InterpreterRuntime."""
    return InterpreterRuntime() if triton_launch.interpreted() else CudaRuntime(precision, deterministic)


class SideStreamRuntime(Runtime):
    """A Runtime with `side`, a SideStream or a NoStream, which may postpone launches until a method here is called."""

    def on_side_stream(self, *operands, ready=None):
        """A context whose kernels run on the side stream; see SideStream.run."""
        return self.side.run(*operands, ready=ready)

    def join(self):
        self.side.join()

    def after(self, *operands):
        return self.side.run(*operands) if operands else self.side.after()


class CudaRuntime(SideStreamRuntime):
    """The Runtime of CuPy's current device. gpt2core/runtime.py documents the methods.

    deterministic: time nothing, and use the default tiles and algorithms.
    """

    uses_graphs = True

    def __init__(self, precision, deterministic):
        super().__init__()
        self.precision = precision
        self.xp = triton_launch.array_module()
        triton_launch.open_gpu(self.xp, self.xp.cuda.runtime.getDevice())
        self.name, self.side = gpu_name(self.xp), SideStream(self.xp)
        self.compiled = []  # the CapturedSteps of training
        self.decoding_memories = []  # the GraphMemory of each decode stream
        reference = weakref.ref(self)  # the launcher lives longer than this runtime, and must not keep its arrays alive

        def notify(text):
            if runtime := reference():
                runtime.notify(text)

        triton_launch.launcher().threads.notify = notify
        self.gemm, self.tuner = make_gemm_and_tuner(self.xp, self.name, deterministic, self.side.stream, notify)

    # -- tuning by timing --------------------------------------------------------------------------------------------

    tuned, tuned_for = property(attrgetter("tuner.tuned")), property(attrgetter("tuner.tuned_for"))

    def load_tuned(self, tuned, final=False):
        if self.tuner.load_tuned(tuned, final):
            self.gemm.clear_plans()

    def retune(self):
        if self.tuned_for is None:
            raise ConfigError("`autotune` and `deterministic` exclude each other: `deterministic` times nothing")
        self.tuner.retune()

    # -- a step, and its streams -------------------------------------------------------------------------------------

    def compile_step(self, function, capture=True, collectives=False):
        self.compiled.append(CapturedStep(function, capture and self.uses_graphs, collectives=collectives))
        return self.compiled[-1]

    def synchronize(self):
        """Block the host until the device has completed all work."""
        self.xp.cuda.runtime.deviceSynchronize()

    # -- memory ------------------------------------------------------------------------------------------------------

    def release_cached_memory(self):
        self.xp.get_default_memory_pool().free_all_blocks()

    def held_memory(self):
        """The bytes of CuPy's pools, including unused blocks; the memory of the CUDA context is not included."""
        graph_memories = [*(step.graph_memory for step in self.compiled), *self.decoding_memories]
        pools = [self.xp.get_default_memory_pool(), *(memory.pool for memory in graph_memories)]
        return sum(pool.total_bytes() for pool in pools)

    def copy_to_host(self, pairs):
        return SnapshotCopy(self.xp, pairs)

    @contextlib.contextmanager
    def pin(self, array):
        address, size, runtime = array.ctypes.data, array.nbytes, self.xp.cuda.runtime
        del array  # the caller may free its memory after this context
        try:
            runtime.hostRegister(address, size, 0)
        except runtime.CUDARuntimeError:  # the system limits locked memory: the copies are slower, and training waits
            yield
            return
        try:
            yield
        finally:
            runtime.hostUnregister(address)

    def peak_memory(self):
        return max([self.held_memory(), *(step.held_before for step in self.compiled)])

    def explain_oom(
        self, error, config, batch_size=None, seq_len=None, micro_batches=1, ranks=1, parallel=None, in_order=False
    ):
        from stage2_cuda import memory_advice  # here, because it imports the code of training

        if not memory_advice.is_out_of_memory(error):
            return None
        # the memory that would be free if this process held none
        free = self.xp.cuda.runtime.memGetInfo()[0] + self.held_memory() + CONTEXT
        if batch_size is None:
            text = memory_advice.explain_generation_oom(config, self.precision, free, parallel.tp if parallel else 1)
        else:
            sizes = batch_size, seq_len, self.precision, micro_batches, ranks
            text = memory_advice.explain_training_oom(config, *sizes, free, parallel, in_order)
        return f"out of memory on the {self.name}: {text}"

    # -- profiling ---------------------------------------------------------------------------------------------------

    def timestamp(self):
        return gpu_clock.timestamp(self.xp)

    def seconds(self, timestamps):
        return gpu_clock.seconds(self.xp, timestamps)

    def annotate(self, backend):
        nvtx.annotate(backend, self.xp.cuda.nvtx)

    def record_kernels(self):
        """Prepare the recording of this GPU's kernels; returns a function that starts a KernelRecorder.

        Call this method before a step is captured. Raises ConfigError if PyTorch, whose CUPTI records, is missing.
        """
        try:
            cupti.open_cupti(self.xp.cuda.runtime.getDevice())
        except ConfigError as error:
            raise ConfigError(f"`trace`: {error}") from error
        return lambda: cupti.KernelRecorder(self.synchronize)

    def peak_flops(self, precision):
        return peak_flops(self.name, precision)


class PlannedRuntime(Runtime):
    """The Runtime of a GPU that is not there, for a plan of training."""

    name, uses_graphs = "a GPU", True


class InterpreterRuntime(SideStreamRuntime):
    """The Runtime for Triton's interpreter: NumPy arrays and products; a launch returns when the kernel is done."""

    name = "the Triton interpreter"
    environment = "TRITON_INTERPRET=1 "

    def __init__(self):
        super().__init__()
        self.xp, self.side, self.compiled = np, NoStream(), []
        self.gemm, self.tuner = NumpyGemm(), Tuner(np)

    def synchronize(self):
        pass

    def check_training(self, config):
        if (count := parameter_count(config)) > LIMIT_INTERPRETED:
            raise ConfigError(
                f"Triton's interpreter is far too slow to train a model of {count:,} parameters: use `preset=nano`, or "
                f"a machine with a GPU"
            )

    def check_generation(self, config, tokens):
        if (count := parameter_count(config)) > MAX_INTERPRETED and count * tokens > LIMIT_INTERPRETED:
            raise ConfigError(
                f"Triton's interpreter is far too slow to generate {counted(tokens, 'token')} with a model of "
                f"{count:,} parameters: use `max_new_tokens=1`, `weights` of a model of preset nano, or a machine with "
                f"a GPU"
            )

    def notes(self, config):
        if parameter_count(config) < MAX_INTERPRETED:
            return []
        return [
            "note: Triton's interpreter needs minutes for a step of a model of this size: use it with --preset nano"
        ]


def gpu_name(cupy):
    """The name of CuPy's current device, such as "NVIDIA H200"."""
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
