"""This project as one of the compared programs: functions and classes that build its trainers and generators.

Benchmarks use internals of a Trainer only in the first section of this file, in gpus/ours.py and in gpu/choices.py.
"""

import functools
import time

import numpy as np

from benchmarks.harness.rounds import GraphTimer
from gpt2core.communicator import Solo
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.errors import ConfigError
from gpt2core.model import GPT2, initial_parameters
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.micro_batches.count import plan_micro_batches
from gpt2core.parallel.tensor.loaded_model import load_model
from gpt2core.sampler import Greedy, generate_batch
from gpt2core.tensor import no_grad
from gpt2core.training_loop import read_batch
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator
from stage2_cuda.tuning import tuner as autotune

LR = 3e-4  # learning rate
GPU_OPTIMIZER = dict(clip=1.0, weight_decay=0.1, beta2=0.95)  # the recipe of GPT-2 and of nanoGPT

# -- calls into the trainer -------------------------------------------------------------------------------------------


def train_step(trainer, inputs, targets):
    """Run one training step; return its Step. inputs, targets: the global batch; every rank passes the whole batch."""
    return trainer.step(trainer.prepare(inputs[trainer.rows], targets[trainer.rows]), LR)


def overlapped_steps(trainer, windows, count):
    """Run `count` training steps; return the last Step. A step begins before the result of the previous one is read."""
    for remaining in reversed(range(count)):
        if not trainer.in_flight:
            trainer.begin(read_batch(trainer, windows), LR)
        if remaining and trainer.overlaps:
            trainer.begin(read_batch(trainer, windows, ahead=1), LR)
        last = trainer.in_flight[0].result()
    return last


def update_arguments(trainer, inputs, targets):
    """The arguments of the compiled update of a trainer for this batch."""
    return trainer.prepare(inputs, targets), trainer.optimizer.coefficients(trainer.steps + 1, LR)


def message_count(trainer):
    """The number of messages in which a rank sends its gradients in one step; with ZeRO-2 and ZeRO-3, one per unit."""
    return len(trainer.layout.parts if trainer.parallel.zero > 1 else trainer.data_parallel.parts)


def share_graph_memory(owner, backend):
    """Make the compiled steps of `backend` use the memory and the stream of the compiled step `owner`.

    The memory (GraphMemory) holds a step's intermediate arrays. Sharing it saves GPU memory if one process has several
    trainers. The steps overwrite each other's arrays, so no step may keep data there between two calls. Call this
    before the steps are captured. If `owner` is None, the first step of `backend` becomes the owner. Returns the owner.
    """
    for step in backend.runtime.compiled:
        owner = owner or step
        step.graph_memory, step.stream = owner.graph_memory, owner.stream
    return owner


class CudaSteps:
    """Training steps on one GPU: steps(inputs, targets) runs one step and returns its loss.

    inputs, targets: int64 arrays (batch_size, seq_len). captured=False: launch the kernels of every step from Python,
    without a CUDA graph. recompute: as in ParallelConfig.
    """

    def __init__(self, config, batch_size, seq_len, precision="bf16", micro_batches=1, captured=True, recompute="none"):
        from stage2_cuda.cuda_backend import CudaBackend  # here, because the CPU benchmarks run without Triton

        self.backend = CudaBackend(precision, deterministic=False)  # the default on GPUs: timing selects the algorithms
        self.backend.runtime.uses_graphs &= captured
        self.announced = []
        self.trainer = Trainer(
            config, [self.backend], batch_size=batch_size, seq_len=seq_len, micro_batches=micro_batches,
            optimizer=GPU_OPTIMIZER, parallel=ParallelConfig(recompute=recompute),
        )  # fmt: skip

    def announce(self, batches):
        """Set the batches of the next calls, a list of (inputs, targets).

        A call can then launch the next step before it reads the loss of its own step, as training does.
        """
        self.announced = list(batches)

    def __call__(self, inputs, targets):
        if not self.announced:
            self.announce([(inputs, targets)])
        if not self.trainer.in_flight:
            self.begin()
        self.announced.pop(0)
        if self.announced and self.trainer.overlaps:
            self.begin()
        return self.trainer.in_flight[0].result().loss

    def begin(self):
        """Begin the step of the first announced batch."""
        self.last_batch = self.announced[0]
        self.trainer.begin(self.trainer.prepare(*self.last_batch), LR)

    def memory(self):
        """{"held_bytes": the largest size of CuPy's memory pools so far}.

        The pools hold the training state and the intermediate arrays of the captured step.
        """
        return {"held_bytes": self.backend.runtime.peak_memory()}


class ProfiledSteps(CudaSteps):
    """CudaSteps on one stream. use_graph() selects whether a step launches kernels from Python or replays its graph."""

    def __init__(self, *args, **options):
        from stage2_cuda.runtime.side_stream import NoStream

        super().__init__(*args, **options)
        self.captured, self.backend.runtime.side = self.trainer.compiled, NoStream()
        self.launched = self.trainer.compile_update(capture=False)

    def use_graph(self, graph):
        """True: replay the graph. False: launch every kernel from Python."""
        self.trainer.compiled = self.captured if graph else self.launched

    def compute_update(self):
        """Launch the kernels of one update for the last batch from Python."""
        return self.launched(*update_arguments(self.trainer, *self.last_batch))

    def replay(self):
        """Replay the graph on the last batch and wait for the device."""
        self.captured(*update_arguments(self.trainer, *self.last_batch))
        self.backend.runtime.synchronize()

    @property
    def graph_and_stream(self):
        """The CUDA graph of the captured step and the stream on which it is replayed."""
        return self.captured.graph, self.captured.stream


class Passes:
    """The parts of a training step of a model with random parameters, on one batch: run(kind) waits for the device.

    Kinds: "forward", without a tape for gradients; "forward + backward"; "step", with the optimizer. backend: a
    NumpyBackend or a CudaBackend. inputs, targets: int64 arrays (B, T). On a GPU each kind is a CUDA graph after its
    second call; the graphs share their memory.
    """

    def __init__(self, config, backend, inputs, targets):
        B, T = inputs.shape
        self.backend = backend
        self.trainer = Trainer(config, [backend], batch_size=B, seq_len=T, micro_batches=1, seed=None)
        self.model = GPT2(config, self.trainer.accumulator.workers[0].tensors)
        self.batch, self.scale = self.trainer.prepare(inputs, targets), 1 / (B * T)
        rng = backend.xp.random.default_rng(0)
        for name, view in self.trainer.arena.views(self.trainer.parameters).items():
            if view.ndim > 1:
                view[...] = 0.02 * rng.standard_normal(view.shape, dtype=np.float32)
            else:
                view[...] = 1.0 if name.endswith("weight") else 0.0
        self.trainer.optimizer.refresh_copy(0)
        backend.runtime.release_cached_memory()  # of the random numbers
        self.functions = {"forward": self.forward, "forward + backward": self.forward_and_backward}
        self.compiled = {kind: backend.runtime.compile_step(function) for kind, function in self.functions.items()}
        if hasattr(backend.runtime, "compiled"):
            share_graph_memory(None, backend)

    def run(self, kind):
        if kind == "step":
            return self.trainer.step(self.batch, LR).loss
        return self.compiled[kind](self.batch).wait()

    def eager_function(self, kind):
        """A function without arguments that launches one kind from Python, without a CUDA graph."""
        if kind == "step":
            coefficients = self.trainer.optimizer.coefficients(self.trainer.steps + 1, LR)
            return functools.partial(self.trainer.compile_update(capture=False), self.batch, coefficients)
        step = self.backend.runtime.compile_step(self.functions[kind], capture=False)
        return functools.partial(step, self.batch)

    def forward(self, batch):
        with no_grad():
            return [self.model.loss(ids, targets, self.scale).data for part in batch for ids, targets in part]

    def forward_and_backward(self, batch):
        losses = self.trainer.compute_gradients(batch)
        self.backend.runtime.join()
        return losses


# -- trainers ---------------------------------------------------------------------------------------------------------


def make_world(ranks):
    """The communicator of a job of `ranks` processes: Solo for one process, else MpiCommunicator."""
    return Solo() if ranks == 1 else MpiCommunicator()


def build_trainer(
    config,
    batch_size,
    seq_len,
    threads,
    deterministic,
    world=None,
    collectives=None,
    backends=None,
    blas="auto",
    precision="fp32",
    **parallel,
):
    """A Trainer for NumPy with the defaults of train_gpt2.py.

    threads: per rank. backends: NumpyBackends to use instead of new ones, which have this `precision` and use the
    library `blas`. parallel: arguments of ParallelConfig.
    """
    world, parallel = world or Solo(), ParallelConfig(**parallel)
    world.use_collectives(collectives or ("canonical" if deterministic else "mpi"))
    micro_batches, threads = plan_micro_batches(batch_size, None, threads, world.size // parallel.tp, deterministic)
    if not backends:
        backends = [NumpyBackend(precision) for _ in range(threads)]
        for backend in backends:
            backend.runtime.use_blas(blas)
    return Trainer(
        config, backends, batch_size=batch_size, seq_len=seq_len, micro_batches=micro_batches, world=world,
        parallel=parallel,
    )  # fmt: skip


def make_trainer(*args, **options):
    """Return a function step(inputs, targets), which runs one training step with AdamW and returns the loss.

    inputs, targets: int64 arrays (batch_size, seq_len); every rank passes the whole batch. The arguments of
    make_trainer() are those of build_trainer().
    """
    trainer = build_trainer(*args, **options)
    return lambda inputs, targets: train_step(trainer, inputs, targets).loss


def make_variants(config, batch_size, seq_len, world, variants):
    """Return {name: Variant}, the variants of one job, on this rank. variants: {name: options of build_trainer()}.

    The variants share one backend, so only one variant may run at a time.
    """
    build = functools.partial(build_trainer, config, batch_size, seq_len, 1, deterministic=True, world=world)
    backends = [NumpyBackend()]
    return {name: Variant(build(backends=backends, **options)) for name, options in variants.items()}


class Variant:
    """A trainer that is called like a function: variant(inputs, targets) runs one step and returns the loss.

    The attributes say how much this rank sends in a step (messages, bytes_sent), and how much it stores
    (optimizer_bytes).
    """

    def __init__(self, trainer):
        self.trainer, self.bytes_sent = trainer, None  # bytes_sent: in the last step
        self.optimizer_bytes, self.messages = trainer.optimizer.nbytes, message_count(trainer)

    def __call__(self, inputs, targets):
        step = train_step(self.trainer, inputs, targets)
        self.bytes_sent = step.bytes_sent
        return step.loss


# -- generation -------------------------------------------------------------------------------------------------------


class Generator:
    """Greedy decoding of a model with random parameters: generator(prompts, new) returns timed_tokens().

    prompts: (B, T) token ids. new: the number of tokens for each prompt.
    """

    def __init__(self, config, backend):
        self.backend, self.model = backend, load_model(config, dict(initial_parameters(config, 0)), backend)
        self.decoders = {}  # kept between calls, so that captured steps are replayed

    def steps(self, prompts, new):
        return generate_batch(self.model, prompts, new, [Greedy()] * len(prompts), self.decoders)

    def __call__(self, prompts, new):
        return timed_tokens(self.steps(prompts, new))


def timed_tokens(tokens):
    """(ids (B, n), seconds to the first token, total seconds) of an iterator over n tokens of each prompt, (B)."""
    started, ids, first_seconds = time.perf_counter(), [], None
    for chosen in tokens:
        ids.append(chosen)
        first_seconds = first_seconds or time.perf_counter() - started
    return np.transpose(ids), first_seconds, time.perf_counter() - started


def make_generator(config, threads):
    """Return a function generate(prompts, n, use_cache), which generates n tokens for each prompt; see Generator.

    With use_cache=False each token is generated by a separate call of the sampler, which processes all previous tokens
    again.
    """
    backend = NumpyBackend()
    backend.runtime.use_threads(threads)
    generator = Generator(config, backend)

    def recomputed(texts, n):
        for _ in range(n):
            chosen = next(generator.steps(texts, 1))
            texts = [[*text, token] for text, token in zip(texts, chosen, strict=True)]
            yield chosen

    def generate(prompts, n, use_cache):
        return generator(prompts, n) if use_cache else timed_tokens(recomputed(prompts.tolist(), n))

    return generate


class CudaGenerator(Generator):
    """A Generator on one GPU."""

    def __init__(self, config, batch, precision="bf16"):
        from stage2_cuda.cuda_backend import CudaBackend

        super().__init__(config, CudaBackend(precision))

    def decoder(self, batch, captured=True, **constants):
        """A new GpuDecoder for `batch` sequences. captured=False: launch kernels from Python, without a CUDA graph.

        constants: fields of DecodeTiling, the constants of the kernels, with values to use instead of the defaults.
        """
        from stage2_cuda.decoding.decode_stream import DecodeStream
        from stage2_cuda.decoding.decoder import GpuDecoder

        class Uncaptured(DecodeStream):
            def capture(self, function):
                return function

        stream = self.backend.decode_stream if captured else Uncaptured(self.backend.xp)
        return GpuDecoder(self.model, batch, stream, self.backend.decode_tiling(batch)._replace(**constants))


def seconds_per_step(decoder, prompts, steps):
    """The mean seconds of `steps` replayed decoding steps. The tokens are read after all steps were launched."""
    decoder.start(prompts, [Greedy()] * len(prompts))
    # The prompt, then three steps: the first compiles, the second is captured, the third is replayed.
    for _ in range(4):
        decoder.step()
        decoder.read_tokens()
    started = time.perf_counter()
    for _ in range(steps):
        decoder.step()
    for _ in range(steps):
        decoder.read_tokens()
    return (time.perf_counter() - started) / steps


# -- calls in CUDA graphs ---------------------------------------------------------------------------------------------


def check_gpu():
    """Return CuPy; raises ConfigError in Triton's interpreter, whose times are not those of a GPU."""
    from stage2_cuda.runtime.triton_launch import array_module

    xp = array_module()
    if xp is np:
        raise ConfigError("TRITON_INTERPRET is set; unset it, because this benchmark needs a GPU")
    return xp


class Graphs(GraphTimer):
    """A GraphTimer of CuPy."""

    def __init__(self):
        from stage2_cuda.runtime.triton_launch import array_module

        super().__init__()
        self.cupy = array_module()
        self.stream = self.cupy.cuda.Stream(non_blocking=True)

    def milliseconds(self, call):
        with self.stream:
            return autotune.milliseconds(self.cupy, self.stream, call)

    def captured(self, kind, count):
        with self.stream:
            graph = autotune.capture_calls(self.stream, self.calls[kind], count)
        return functools.partial(graph.launch, self.stream)

    def norm(self, array):
        """The Euclidean norm of the array, computed in fp32."""
        return float(self.cupy.linalg.norm(array.astype(np.float32).ravel()))
