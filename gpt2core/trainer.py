"""The training step of every stage: batch, gradient, norm, update, for any number of threads, ranks and devices."""

# The global batch: B sequences of T tokens. A data-parallel rank reads B / (number of data-parallel ranks) of them.

import contextlib

import numpy as np

from gpt2core.arena import Arena
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, counted
from gpt2core.model import parameter_shapes
from gpt2core.ops import require_size, require_tokens
from gpt2core.optimizer import AdamW
from gpt2core.parallel import tensor_parallel
from gpt2core.parallel.bucket_size import measured_bucket
from gpt2core.parallel.config import ParallelConfig, check_rounding
from gpt2core.parallel.data_parallel import gradient_reduction
from gpt2core.parallel.even_slices import even_slices
from gpt2core.parallel.loss_scale import LossScale
from gpt2core.parallel.mesh import Mesh
from gpt2core.parallel.micro_batches import MicroBatches
from gpt2core.parallel.steps_in_flight import PendingStep
from gpt2core.parallel.threads import WorkerPool, limit_blas
from gpt2core.parallel.whole_parameters import fill, initial_parameters
from gpt2core.parallel.zero import PIECE_MB, AsyncAllGather, check_gather
from gpt2core.tensor import ShapeError


class Trainer:
    """A model, its optimizer, and the threads and ranks that share the work.

    config: GPT2Config. backends: a list, one for each worker thread of this rank. world: the Communicator of all ranks.
    parallel: ParallelConfig. optimizer, loss_scale: dicts of keyword arguments of AdamW and LossScale. capture: whether
    the device may capture a step and replay it. seed: seed of the initial parameters; None leaves them zero.
    micro_batches: number of parts of the global batch, which has batch_size (B) sequences of seq_len (T) tokens.
    """

    def __init__(
        self, config, backends, *, batch_size, seq_len, micro_batches, optimizer=None, world=None, parallel=None,
        seed=0, capture=True, loss_scale=None,
    ):  # fmt: skip
        for name, size in (("batch_size", batch_size), ("seq_len", seq_len), ("micro_batches", micro_batches)):
            require_size(name, size)
        if seq_len > (block := config.block_size):
            raise ConfigError(f"--seq-len {seq_len} exceeds the model's block of {block} tokens: use --seq-len {block}")
        self.config, self.world, self.parallel, self.seed = config, world or Solo(), parallel or ParallelConfig(), seed
        self.batch_size, self.seq_len, self.micro_batches = batch_size, seq_len, micro_batches
        self.mesh = Mesh(self.world, self.world.size // self.parallel.tp, self.parallel.tp)
        self.pool, self.backend = WorkerPool(backends), backends[0]
        limit_blas(1)  # the worker threads use the cores
        tensor_parallel.check_tensor_parallel(config, self.mesh.tensor.size)
        self.backend.check_model(config)
        data, owners = self.mesh.data, self.mesh.data if self.parallel.zero else Solo()  # owners divide the arena
        self.rows = even_slices(batch_size, data.size)[data.rank]  # slice of the global batch that this rank reads
        if not 0 < micro_batches // data.size <= batch_size // data.size:
            raise ConfigError(
                f"--micro-batches {micro_batches}: each of {counted(data.size, 'rank')} needs at least 1, and a "
                f"micro-batch needs at least 1 sequence of --batch-size {batch_size}"
            )
        self.loss_scale = LossScale(self.backend, **(loss_scale or {}))
        capture = capture and self.world.capturable
        self.allocate(micro_batches // data.size, data, owners, capture)
        self.optimizer = self.make_optimizer(owners, optimizer or {})
        self.compiled = self.backend.runtime.compile_step(self.compute_update, capture)
        self.steps, self.position = 0, 0  # updates made; windows read by all ranks since the start of training
        self.in_flight, self.finished = [], 0.0  # PendingSteps, oldest first; time when the last result was read
        self.stopped_by = 0  # the largest signal number that a rank reported with the last step, or 0
        self.tuned = None  # rank 0's choices by timing (of tiles, for example); set after the first step
        if seed is not None:
            fill(self, self.parameters, initial_parameters(config, seed) if self.world.is_root else None)
        self.optimizer.refresh_copy(self.steps)
        self.backend.runtime.release_cached_memory()
        self.load_tuned(self.world.broadcast_object(self.backend.runtime.tuned))  # rank 0's choices of an earlier run

    def allocate(self, rank_micro_batches, data, owners, capture):
        """Allocate the flat buffers (parameters, the copy that kernels read, gradients); set up their collectives."""
        shapes, backend, parallel = parameter_shapes(self.config), self.backend, self.parallel
        self.arena = Arena(tensor_parallel.shard_shapes(shapes, self.mesh.tensor.size), owners.size)
        self.parameters = self.compute_parameters = backend.zeros((self.arena.size,), backend.dtype)
        if backend.compute_dtype != backend.dtype:  # kernels read a copy of the fp32 parameters
            self.compute_parameters = backend.zeros((self.arena.size,), backend.compute_dtype)
        division = rank_micro_batches, self.mesh.tensor, (self.rows.stop - self.rows.start, self.seq_len)
        self.accumulator = MicroBatches(self.config, self.arena, self.compute_parameters, self.pool, *division)
        gradients, self.bucket_mb, self.bucket_size = self.accumulator.gradients, parallel.bucket_mb, None
        if parallel.bucket_mb is None:  # all ranks measure together; rank 0's result is used
            self.bucket_size = self.world.broadcast_object(measured_bucket(data, gradients, backend, capture))
            self.bucket_mb = self.bucket_size.mb
        self.data_parallel = gradient_reduction(parallel, self.arena, gradients, data, owners, backend, self.bucket_mb)
        self.accumulator.on_complete = self.data_parallel.completed
        check_gather(parallel.zero_gather, parallel.zero)
        self.all_gather = contextlib.nullcontext()
        if parallel.zero_gather == "forward":
            self.all_gather = AsyncAllGather(self.arena, self.compute_parameters, owners, min(PIECE_MB, self.bucket_mb))
            for worker in self.accumulator.workers:
                worker.model.wait_on_read = self.all_gather.wait_on_read

    def make_optimizer(self, owners, options):
        """AdamW over the arena. A parameter that a whole tensor group holds is added to the norm only by the root."""
        check_rounding(options.get("rounding", "nearest"), self.backend)
        tensor = self.mesh.tensor
        replicated = filter(tensor_parallel.is_replicated, self.arena.slices)
        repeated = [] if tensor.is_root else [self.arena.padded(name) for name in replicated]
        return AdamW(
            self.arena, self.parameters, self.pool, owners=owners, tensor_group=tensor, repeated=repeated,
            compute_copy=None if self.compute_parameters is self.parameters else self.compute_parameters,
            gathers=self.parallel.zero_gather == "end", **options,
        )  # fmt: skip

    def prepare(self, inputs, targets):
        """The argument `batch` of step(): inputs and targets, (rows, T) integers on the host, in micro-batches.

        The rows are this rank's part of the global batch, self.rows. Raises ShapeError for another shape, for another
        dtype than integers, and for a token outside the vocabulary.
        """
        inputs, targets = np.asarray(inputs), np.asarray(targets)
        for tokens in (inputs, targets):
            if tokens.shape != (shape := (self.rows.stop - self.rows.start, self.seq_len)):
                raise ShapeError(f"batch: tokens {tokens.shape}, but the part of this rank is (rows, T) = {shape}")
            require_tokens("batch", tokens, self.config.vocab_size)
        tensor, prepare = self.mesh.tensor, self.backend.prepare_tokens
        wte_rows = self.config.vocab_size // tensor.size  # rows of the token embedding on each rank
        return [
            [(prepare(x, wte_rows, tensor.rank * wte_rows), prepare(y)) for x, y in worker_batch]
            for worker_batch in self.accumulator.deal(inputs, targets, len(inputs), self.accumulator.merged)
        ]

    def step(self, batch, lr):
        """Make one update from the result of prepare(); return a Step. Raises Diverged: see PendingStep.result."""
        return self.begin(batch, lr).result()

    def begin(self, batch, lr):
        """Start the update from the result of prepare(), and return its PendingStep (steps_in_flight.py).

        PendingStep launches self.compiled, and its result() counts the step. If `overlaps`, the next step may begin
        before this result is read. Results are read in the order in which the steps began.
        """
        if self.in_flight and not self.overlaps:
            raise ValueError("this device cannot overlap steps: read the result() of the previous step first")
        self.in_flight.append(PendingStep(self, batch, lr, self.steps + len(self.in_flight) + 1))
        return self.in_flight[-1]

    @property
    def overlaps(self):
        """Whether a step may begin before the previous result is read: not in fp16, where a step may be repeated."""
        return self.compiled.can_overlap and self.loss_scale.state is None

    def compute_update(self, batch, hyper):
        """Compute one step; returns [*this rank's losses, norm]. If the norm is not finite, no parameter changes.

        The host reads no device value here, so that a device can capture the step once and replay it.
        """
        runtime, sent_before = self.backend.runtime, self.bytes_sent()
        with self.all_gather:
            losses = self.accumulator.backward(batch, 1 / (self.batch_size * self.seq_len), self.loss_scale.factor)
        self.data_parallel.finish()
        runtime.join()
        with runtime.range("optimizer"):
            gradients = self.accumulator.gradients
            stop = self.optimizer.stop if self.loss_scale.state is None else None  # fp16 repeats the step instead
            norm, grad_scale = self.optimizer.norm_and_scale(gradients, self.loss_scale, stop)
            self.optimizer.update(gradients, grad_scale, hyper)
        self.sent_by_update = self.bytes_sent() - sent_before  # a replay sends the same, but Python counts no bytes
        return [*losses, norm]

    def load_tuned(self, tuned, final=False):
        """Call Runtime.load_tuned(tuned, final) for all backends of this rank."""
        for backend in self.pool.backends:
            backend.runtime.load_tuned(tuned, final)

    def bytes_sent(self):
        """The bytes that this rank has sent so far, in all groups."""
        worker_groups = (worker.model.group for worker in self.accumulator.workers)
        return sum(group.bytes_sent for group in (self.world, self.mesh.data, self.mesh.tensor, *worker_groups))
