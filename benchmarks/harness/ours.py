"""All calls of the benchmarks into this project's trainer, sampler and decoders, apart from gpus/ours.py.

The functions under "calls into the trainer" are the only lines of both files that use the internals of a Trainer.
"""

import functools
import time
from dataclasses import dataclass

import numpy as np

from gpt2core.communicator import Solo
from gpt2core.model import GPT2, initial_parameters
from gpt2core.parallel.config import ParallelConfig, plan_micro_batches
from gpt2core.sampler import Greedy, generate_together
from gpt2core.sampler import generate as continuation
from gpt2core.trainer import Trainer
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator
from stage2_cuda.tuning import tuner as autotune

LR = 3e-4
GPU_OPTIMIZER = dict(clip=1.0, weight_decay=0.1, beta2=0.95)  # the recipe of GPT-2 and of nanoGPT

# -- calls into the trainer -------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """One global batch with the interface of Windows; each rank reads its rows of it."""

    inputs: np.ndarray
    targets: np.ndarray

    def batch(self, position, count):
        rows = slice(position % len(self.inputs), position % len(self.inputs) + count)
        return self.inputs[rows], self.targets[rows]


class Announced:
    """Batches with the interface of Windows that are known in advance: {position: (inputs, targets)}."""

    def __init__(self, batches):
        self.batches = batches

    def batch(self, position, count):
        inputs, targets = self.batches.get(position) or next(iter(self.batches.values()))  # after the last: any batch
        return inputs[:count], targets[:count]


def train_step(trainer, inputs, targets):
    """One training step on a global batch; returns gpt2core.trainer.Step. Every rank passes the whole batch."""
    return trainer.step(Batch(inputs, targets), LR)


def overlapped_steps(trainer, windows, count):
    """`count` training steps, each begun before the result of the previous one is read; returns the last Step."""
    return [trainer.step(windows, LR, following) for following in [LR] * (count - 1) + [None]][-1]


def update_function(trainer, inputs, targets):
    """A function that computes one update of this batch on the device: what a graph would record."""
    trainer.shards.feed(inputs, targets)
    trainer.optimizer.begin(LR)
    return trainer.compute_update


def gradients(trainer):
    """The flat gradient buffer."""
    return trainer.shards.gradients


def message_count(trainer):
    """The number of messages in which a rank sends its gradients."""
    return len(trainer.data_parallel.parts)


def release_cached_memory(trainer):
    """Free the cached blocks of the backend's memory pool."""
    trainer.backend.trim()


def share_workspace(first, backend):
    """Let the steps of `backend`, not yet recorded, use the memory and the stream of the recorded step `first`.

    `first` may be None; returns it, or the first step of `backend`. Steps that share a workspace overwrite each other's
    intermediate arrays, so no step may keep data in it between two calls.
    """
    for step in backend.recorded:
        first = first or step
        step.workspace, step.stream = first.workspace, first.stream
    return first


class CudaSteps:
    """Training steps on one GPU: `steps(inputs, targets) -> loss`; int64 arrays (batch_size, seq_len)."""

    def __init__(self, config, batch_size, seq_len, precision="bf16", micro_batches=1, recorded=True):
        from stage2_cuda.cuda_backend import CudaBackend  # here, because the CPU benchmarks run without Triton

        self.backend = CudaBackend(precision, deterministic=False)  # as train_gpt2.py: algorithms chosen by timing
        self.backend.records &= recorded
        self.windows = Announced({})
        self.trainer = Trainer(
            config, [self.backend], batch_size=batch_size, seq_len=seq_len, micro_batches=micro_batches,
            optimizer=GPU_OPTIMIZER,
        )  # fmt: skip

    def announce(self, batches):
        """Set the (inputs, targets) of the next calls, so that each call can begin the following step.

        As in training, the next step is given to the device before the loss of the current one is read.
        """
        position, size = self.trainer.position, self.trainer.batch_size
        self.windows = Announced({position + i * size: batch for i, batch in enumerate(batches)})

    def __call__(self, inputs, targets):
        if self.trainer.position not in self.windows.batches:
            self.announce([(inputs, targets)])
        follows = self.trainer.position + self.trainer.batch_size in self.windows.batches
        return self.trainer.step(self.windows, LR, LR if follows else None).loss

    def memory(self):
        """{"held_bytes": the peak of CuPy's pools}: the training state and the workspace of the recorded step."""
        return {"held_bytes": self.backend.peak_memory()}


class ProfiledSteps(CudaSteps):
    """CudaSteps on one stream, which can switch between launching from Python and the recorded graph."""

    def __init__(self, *args, **options):
        from stage2_cuda.runtime.side_stream import NoStream

        super().__init__(*args, **options)
        self.recorded_update = self.trainer.update
        self.backend.side = NoStream()

    def use_graph(self, graph):
        """True: replay the graph. False: launch every kernel from Python."""
        eager = functools.partial(self.backend.compile_step, self.trainer.compute_update, record=False)
        self.trainer.update = self.recorded_update if graph else eager()

    def compute_update(self):
        """Launch one update of the last batch from Python."""
        return self.trainer.compute_update()

    def replay(self):
        """Replay the graph on the last batch and wait for the device."""
        self.recorded_update()
        self.backend.wait()

    @property
    def graph(self):
        """(graph, stream) of the recorded step."""
        return self.recorded_update.graph, self.recorded_update.stream


# -- trainers ---------------------------------------------------------------------------------------------------------


def make_world(ranks):
    """The communicator of this job: Solo for one process, else that of the ranks that mpiexec started."""
    return Solo() if ranks == 1 else MpiCommunicator()


def build_trainer(
    config, batch_size, seq_len, threads, deterministic, world=None, collectives=None, backends=None, **parallel
):
    """A Trainer with the command line's defaults. parallel: arguments of ParallelConfig; threads: per rank."""
    world, parallel = world or Solo(), ParallelConfig(**parallel)
    world.use_collectives(collectives or ("canonical" if deterministic else "mpi"))
    micro_batches, threads = plan_micro_batches(batch_size, None, threads, world.size // parallel.tp, deterministic)
    backends = backends or [NumpyBackend() for _ in range(threads)]
    return Trainer(
        config, backends, batch_size=batch_size, seq_len=seq_len, micro_batches=micro_batches, world=world,
        parallel=parallel,
    )  # fmt: skip


def make_trainer(*args, **options):
    """Return `step(inputs, targets) -> loss`: a full training step with AdamW; int64 arrays (batch_size, seq_len).

    The arguments are those of build_trainer; every rank passes the whole batch.
    """
    trainer = build_trainer(*args, **options)
    return lambda inputs, targets: train_step(trainer, inputs, targets).loss


def make_variants(config, batch_size, seq_len, world, variants):
    """{name: Variant} on the ranks of one job. variants: {name: options of build_trainer}.

    The variants share one backend, so only one of them may run at a time.
    """
    backends = [NumpyBackend()]

    def variant(options):
        return Variant(
            build_trainer(config, batch_size, seq_len, 1, deterministic=True, world=world, backends=backends, **options)
        )

    return {name: variant(options) for name, options in variants.items()}


class Variant:
    """A trainer as `variant(inputs, targets) -> loss`, with the bytes that this rank sends and holds."""

    def __init__(self, trainer):
        self.trainer, self.bytes_sent = trainer, None
        self.optimizer_bytes, self.messages = trainer.optimizer.nbytes, message_count(trainer)

    def __call__(self, inputs, targets):
        step = train_step(self.trainer, inputs, targets)
        self.bytes_sent = step.bytes_sent
        return step.loss


# -- generation -------------------------------------------------------------------------------------------------------


def make_generator(config, threads):
    """Return `generate(prompt_ids, n, use_cache) -> (ids, seconds_to_first, seconds_total)`: n greedy new tokens.

    Without the cache each token is a separate call.
    """
    backend = NumpyBackend()
    backend.use_threads(threads)
    model = GPT2.of_arrays(config, dict(initial_parameters(config, 0)), backend)

    def generate(prompt_ids, n, use_cache):
        started, ids = time.perf_counter(), []
        if use_cache:
            tokens = continuation(model, prompt_ids, n)
        else:
            tokens = (next(continuation(model, [*prompt_ids, *ids], 1)) for _ in range(n))
        for token in tokens:
            ids.append(token)
            if len(ids) == 1:
                first = time.perf_counter() - started
        return ids, first, time.perf_counter() - started

    return generate


class CudaGenerator:
    """Greedy decoding on one GPU: `generate(prompts (B, T), new) -> (ids (B, new), seconds to the first, seconds)`."""

    def __init__(self, config, batch, precision="bf16"):
        from stage2_cuda.cuda_backend import CudaBackend

        self.backend = CudaBackend(precision)
        self.model = GPT2.of_arrays(config, dict(initial_parameters(config, 0)), self.backend)

    def __call__(self, prompts, new):
        started, ids, first = time.perf_counter(), [], None
        for tokens in generate_together(self.model, prompts, new, [Greedy()] * len(prompts)):
            ids.append(tokens)
            first = first or time.perf_counter() - started
        return np.transpose(ids), first, time.perf_counter() - started

    def decoder(self, batch, recorded=True, **constants):
        """A new decoder with some of the kernels' constants replaced; recorded=False: no CUDA graph."""
        from stage2_cuda.decoding.decoder import Engine, Queue

        class Unrecorded(Queue):
            def record(self, function):
                return function

        queue = self.backend.queue if recorded else Unrecorded(self.backend.xp)
        return Engine(self.model, batch, queue, self.backend.tiles(batch)._replace(**constants))


def seconds_per_step(decoder, prompts, steps):
    """Seconds of one recorded decoding step, without the time of a consumer of its tokens."""
    decoder.begin(prompts, [Greedy()] * len(prompts))
    for _ in range(4):  # the prompt, then a step that compiles, one that is recorded and one that is replayed
        decoder.step()
        decoder.tokens()
    started = time.perf_counter()
    for _ in range(steps):
        decoder.step()
    for _ in range(steps):
        decoder.tokens()
    return (time.perf_counter() - started) / steps


# -- calls in CUDA graphs ---------------------------------------------------------------------------------------------


class Graphs:
    """GPU calls recorded several times in one CUDA graph. A subclass fills calls: {kind: function}."""

    def __init__(self):
        from stage2_cuda.runtime.triton_launch import array_module

        self.cupy = array_module()
        self.stream, self.calls, self.graphs = self.cupy.cuda.Stream(non_blocking=True), {}, {}

    def record(self, kind, length):
        """Record a graph of about `length` milliseconds once; return the number of calls in it."""
        if kind not in self.graphs:
            call = self.calls[kind]
            with self.stream:
                call()  # compiles
                once = min(autotune.milliseconds(self.cupy, self.stream, call) for _ in range(3))
                calls = max(1, round(length / once))
                self.graphs[kind] = autotune.recorded(self.stream, call, calls), calls
        return self.graphs[kind][1]

    def replay(self, kind):
        """Milliseconds of one replay; an untimed replay before it raises the GPU's clock."""
        graph, _ = self.graphs[kind]
        with self.stream:
            graph.launch(self.stream)
            return autotune.milliseconds(self.cupy, self.stream, functools.partial(graph.launch, self.stream))

    def norm(self, array):
        """The Euclidean norm of the array, computed in fp32."""
        return float(self.cupy.linalg.norm(array.astype(np.float32).ravel()))
