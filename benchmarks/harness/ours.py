"""The one place where the benchmarks touch our own GPT-2."""

import functools
import time
from dataclasses import dataclass

import numpy as np

from gpt2core.communicator import Solo
from gpt2core.model import GPT2
from gpt2core.parallel.config import ParallelConfig, plan_micro_batches
from gpt2core.parallel.whole_parameters import initial_parameters
from gpt2core.sampler import Greedy, generate_batch
from gpt2core.sampler import generate as continuation
from gpt2core.trainer import Trainer
from stage0_serial.numpy_backend import NumpyBackend
from stage1_mpi.mpi_communicator import MpiCommunicator
from stage2_cuda.tuning import tuner as autotune

LR = 3e-4
GPU_OPTIMIZER = dict(clip=1.0, weight_decay=0.1, beta2=0.95)  # GPT-2's recipe, and nanoGPT's


@dataclass
class Batch:
    """One global batch in the place of a data set; every rank reads its rows of it."""

    inputs: np.ndarray
    targets: np.ndarray

    def batch(self, position, count):
        rows = slice(position % len(self.inputs), position % len(self.inputs) + count)
        return self.inputs[rows], self.targets[rows]


class Announced:
    """Batches that are known ahead, as those of a data set are: {position: (inputs, targets)}."""

    def __init__(self, batches):
        self.batches = batches

    def batch(self, position, count):
        inputs, targets = self.batches.get(position) or next(iter(self.batches.values()))  # behind the last: any
        return inputs[:count], targets[:count]


def make_world(ranks):
    """The ranks of this job: one process, or as many as mpiexec has started."""
    return Solo() if ranks == 1 else MpiCommunicator()


def build_trainer(
    config, batch_size, seq_len, threads, deterministic, world=None, collectives=None, backends=None, **parallel
):
    """A Trainer with the command line's defaults; `parallel`: arguments of Parallel, `threads` of each rank."""
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
    return lambda inputs, targets: trainer.step(Batch(inputs, targets), LR).loss


def make_variants(config, batch_size, seq_len, world, variants):
    """{name: (trainer, step(inputs, targets) -> gpt2core.trainer.Step)}, which take turns on the ranks of one job.

    variants: {name: options of build_trainer}. They share one backend: its buffers belong to whose turn it is.
    """
    backends = [NumpyBackend()]

    def variant(options):
        trainer = build_trainer(
            config, batch_size, seq_len, 1, deterministic=True, world=world, backends=backends, **options
        )
        return trainer, lambda inputs, targets: trainer.step(Batch(inputs, targets), LR)

    return {name: variant(options) for name, options in variants.items()}


class CudaSteps:
    """Training steps on one GPU: `steps(inputs, targets) -> loss`; int64 arrays (batch_size, seq_len).

    `trainer.update()` is what the device does by itself, as a graph; `trainer.compute_update()` is the same without.
    """

    def __init__(self, config, batch_size, seq_len, precision="bf16", micro_batches=1, recorded=True):
        from stage2_cuda.cuda_backend import CudaBackend  # the other benchmarks do without Triton

        self.backend = CudaBackend(precision, deterministic=False)  # as train_gpt2.py has it: products chosen by timing
        self.backend.records &= recorded
        self.windows = Announced({})
        self.trainer = Trainer(
            config, [self.backend], batch_size=batch_size, seq_len=seq_len, micro_batches=micro_batches,
            optimizer=GPU_OPTIMIZER,
        )  # fmt: skip

    def announce(self, batches):
        """Say which (inputs, targets) the next calls will have, so that each is begun while the one before is at work.

        As in training, the loss of a step is read before the call ends, and by then the next step has been given to
        the device.
        """
        position, size = self.trainer.position, self.trainer.batch_size
        self.windows = Announced({position + i * size: batch for i, batch in enumerate(batches)})

    def __call__(self, inputs, targets):
        if self.trainer.position not in self.windows.batches:
            self.announce([(inputs, targets)])
        follows = self.trainer.position + self.trainer.batch_size in self.windows.batches
        return self.trainer.step(self.windows, LR, LR if follows else None).loss

    def memory(self):
        """{"held_bytes": what CuPy's pools held at most}: the state, and what the recorded step works in."""
        return {"held_bytes": self.backend.peak_memory()}


def take_turns(first, backend):
    """Let the steps of `backend`, still to be recorded, work where `first` does, another's or None; -> the first.

    What one leaves there the next one may write over, and so none may leave anything for its next call.
    """
    for step in backend.recorded:
        first = first or step
        step.workspace, step.stream = first.workspace, first.stream
    return first


class CudaTexts:
    """Greedy texts on one GPU: `texts(prompts (B, T), new) -> (ids (B, new), seconds to the first, seconds)`."""

    def __init__(self, config, batch, precision="bf16"):
        from stage2_cuda.cuda_backend import CudaBackend

        self.backend = CudaBackend(precision)
        self.model = GPT2.of_arrays(config, dict(initial_parameters(config, 0)), self.backend)
        self.decoders = {}  # kept between calls, with the steps that they have recorded

    def __call__(self, prompts, new):
        started, ids, first = time.perf_counter(), [], None
        for tokens in generate_batch(self.model, prompts, new, [Greedy()] * len(prompts), self.decoders):
            ids.append(tokens)
            first = first or time.perf_counter() - started
        return np.transpose(ids), first, time.perf_counter() - started

    def engine(self, batch, **constants):
        """A decoder of its own, with other constants than batched.tiling_for(batch) has."""
        from stage2_cuda.decoding.decoder import GpuDecoder

        tiling = self.backend.decode_tiling(batch)._replace(**constants)
        return GpuDecoder(self.model, batch, self.backend.decode_stream, tiling)


class Graphs:
    """Calls of one GPU, several of a kind in a CUDA graph. calls: {kind: function}, which a subclass fills."""

    def __init__(self):
        from stage2_cuda.runtime.triton_launch import array_module

        self.cupy = array_module()
        self.stream, self.calls, self.graphs = self.cupy.cuda.Stream(non_blocking=True), {}, {}

    def record(self, kind, length):
        """Make a graph of about as many milliseconds; returns how many calls it has."""
        if kind not in self.graphs:
            call = self.calls[kind]
            with self.stream:
                call()  # compiles
                once = min(autotune.milliseconds(self.cupy, self.stream, call) for _ in range(3))
                calls = max(1, round(length / once))
                self.graphs[kind] = autotune.recorded(self.stream, call, calls), calls
        return self.graphs[kind][1]

    def replay(self, kind):
        """Milliseconds of one replay, after another that wakes the GPU up."""
        graph, _ = self.graphs[kind]
        with self.stream:
            graph.launch(self.stream)
            return autotune.milliseconds(self.cupy, self.stream, functools.partial(graph.launch, self.stream))

    def norm(self, array):
        return float(self.cupy.linalg.norm(array.astype(np.float32).ravel()))


def make_generator(config, threads):
    """Return `generate(prompt_ids, n, use_cache) -> (ids, seconds_to_first, seconds_total)`: n greedy new tokens.

    Without the cache every token is a call of its own.
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
