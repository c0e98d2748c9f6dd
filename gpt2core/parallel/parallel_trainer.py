"""A Trainer whose step is divided over threads and ranks. It has the same bits if their numbers are powers of two."""

import numpy as np

from gpt2core import checks
from gpt2core.architecture import parameter_shapes
from gpt2core.communicator import Solo
from gpt2core.data import even_slices
from gpt2core.dropout import check_dropout
from gpt2core.errors import ConfigError, UserError, counted, require_known
from gpt2core.model import initial_parameters
from gpt2core.optimizer import AdamW
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.data.bucket_size import measured_bucket
from gpt2core.parallel.data.sparse_embedding import tokens_read
from gpt2core.parallel.data.strategies import make_data_parallel
from gpt2core.parallel.divided.arena import DividedArena
from gpt2core.parallel.divided.arena_layout import ArenaLayout
from gpt2core.parallel.divided.async_all_gather import PIECE_MB, AsyncAllGather
from gpt2core.parallel.divided.model_pages import ModelPages
from gpt2core.parallel.divided.optimizer import DividedOptimizer
from gpt2core.parallel.divided.rounding import check_rounding
from gpt2core.parallel.mesh import Mesh
from gpt2core.parallel.micro_batches.accumulator import Workload
from gpt2core.parallel.micro_batches.threaded import MicroBatches
from gpt2core.parallel.pipeline.micro_batches import PipelineMicroBatches
from gpt2core.parallel.pipeline.placement import ranks_of_parameters
from gpt2core.parallel.sharded.micro_batches import ShardedMicroBatches
from gpt2core.parallel.sharded.unit_shards import UnitShards
from gpt2core.parallel.tensor.shards import check_tensor_parallel, shard_shapes, whole_name
from gpt2core.parallel.whole_parameters import fill
from gpt2core.threads import WorkerPool
from gpt2core.trainer import Trainer
from gpt2core.vocabulary import Vocabulary

OPTIMIZER_OPTIONS = "clip", "rounding", "seed"  # of DividedOptimizer


class ParallelTrainer(Trainer):
    """A Trainer whose model and optimizer are divided; the workers of its accumulator have the tensors.

    backends: a list, one for each worker thread of this rank (WorkerPool limits BLAS to one thread). batch_size,
    seq_len, micro_batches: of the global batch. optimizer: a dict of AdamW.OPTIONS and OPTIMIZER_OPTIONS.
    world: the Communicator of all ranks. parallel: ParallelConfig. seed: of the initial parameters; None leaves them
    zero. dloss: the array of shape () with which backward begins, if it is not 1 (fp16). guard: that of Backend.clip
    for the gradients. dropout: the probability with which a step drops a number (dropout.py); dropout_seed: of its
    random bits. Raises ConfigError for sizes that do not fit.

    mesh: the groups of ranks. pool: the worker threads. rows: the slice of the global batch that this rank reads.
    placement: {name of a parameter: the pipeline rank that has it}, in model order; 0 without a pipeline.
    arena: the layout of the parameters of this pipeline rank. layout: that of the flat arrays `parameters` and
    `gradients`, and of `compute_parameters`, which kernels read: the parameters, or a copy in compute_dtype. It is the
    arena, or with ZeRO-2 and ZeRO-3 this rank's shards. accumulator: computes the gradients of this rank's
    micro-batches. data_parallel: sums them over the ranks (with ZeRO-2 and ZeRO-3, a ShardSums). bucket_mb: the
    size of a message; bucket_size: its measurement, or None.
    """

    def __init__(
        self, config, backends, *, batch_size, seq_len, micro_batches, optimizer=None, world=None, parallel=None,
        seed=0, dloss=None, guard=None, dropout=0.0, dropout_seed=0,
    ):  # fmt: skip
        self.set_sizes(config, batch_size, seq_len, micro_batches)
        self.world, self.parallel, self.seed = world or Solo(), parallel or ParallelConfig(), seed
        self.pool = WorkerPool(list_of_backends(backends), blas_threads=1)
        self.backend = backends[0]
        if self.backend.scales_loss and dloss is None:
            raise ConfigError("`precision=fp16` needs a loss scale: use engine.fast_trainer.FastTrainer")
        world, parallel, backend = self.world, self.parallel, self.backend
        self.mesh = mesh = Mesh(world, world.size // (parallel.tp * parallel.pp), parallel.tp, parallel.pp)
        check_tensor_parallel(config, mesh.tensor.size)
        check_tensor_parallel(config, parallel.canonical_tp, "`canonical_tp`", parallel.tp)
        backend.check_model(config)
        self.rows = own_rows(batch_size, micro_batches, mesh.data)
        count = micro_batches // mesh.data.size  # of this rank
        parallel.check_run(config, len(backends), count, mesh.data.size)

        owners = mesh.gradients if parallel.zero == 1 else Solo()  # the ranks that divide the arena
        self.placement = ranks_of_parameters(config, parallel.pp, parallel.chunks)
        arenas = arenas_of_replica(config, self.placement, parallel, owners.size)
        self.arena = arena = arenas[mesh.replica.rank]
        pages = ModelPages(arenas, list(self.placement), mesh.replica, backend)
        if parallel.zero > 1:
            self.layout = layout = UnitShards(arena, mesh.gradients, backend, pages)
        else:
            self.layout = layout = ArenaLayout(arena, backend, owners, pages)
        self.parameters, self.gradients = (backend.zeros((layout.size,), backend.dtype) for _ in range(2))
        self.compute_parameters, copy = self.parameters, None
        if backend.compute_dtype != backend.dtype:
            self.compute_parameters = copy = backend.zeros((layout.size,), backend.compute_dtype)

        self.bucket_mb, self.bucket_size = choose_bucket(parallel, mesh, self.gradients, backend)
        options = dict(optimizer or {})
        require_known("optimizer", options, (*AdamW.OPTIONS, *OPTIMIZER_OPTIONS))
        others = {name: options.pop(name) for name in OPTIMIZER_OPTIONS if name in options}
        check_rounding(others.get("rounding", "nearest"), backend)
        work = Workload(
            config, layout, self.compute_parameters, self.gradients, backend, count, self.batch_shape,
            dloss=backend.ones((), np.float64) if dloss is None else dloss, recompute=parallel.recompute,
            slices=parallel.slices, dropout=check_dropout(dropout),
            first_rows=tuple(self.rows.start + part.start for part in even_slices(self.batch_shape[0], count)),
        )  # fmt: skip
        self.accumulator, self.data_parallel = self.make_accumulator(work, owners)
        self.optimizer = DividedOptimizer(
            layout, self.parameters, self.pool, AdamW(**options), compute_copy=copy, guard=guard,
            gathers=parallel.zero_gather == "end", dropout_seed=dropout_seed if dropout else None, **others,
        )  # fmt: skip
        if seed is not None:
            fill(self, self.parameters, initial_parameters(config, seed) if world.is_root else None)
        self.optimizer.refresh_copy(self.steps)

    def make_accumulator(self, work, owners):
        """(the Accumulator of this rank's Workload, the object that sums its gradients over the ranks).

        owners: the ranks that divide the arena.
        """
        parallel, mesh, bucket_mb = self.parallel, self.mesh, self.bucket_mb
        if parallel.zero > 1:  # a ShardSums sums over the ranks what is complete
            if parallel.pp > 1:
                accumulator = PipelineMicroBatches(work, self.pool, mesh, parallel, None)
            else:
                accumulator = ShardedMicroBatches(work, self.pool, mesh, parallel.zero)
            return accumulator, accumulator.sums
        data_parallel = make_data_parallel(
            parallel, self.arena, self.gradients, mesh.gradients, owners, self.backend, bucket_mb,
            tokens_read(self.batch_size, self.seq_len, mesh.gradients.size),
            Vocabulary(self.config.vocab_size, mesh.tensor).first,
        )  # fmt: skip
        on_complete, all_gather = data_parallel.unit_completed, None
        if parallel.pp > 1:
            return PipelineMicroBatches(work, self.pool, mesh, parallel, on_complete), data_parallel
        if parallel.zero_gather == "forward":
            all_gather = AsyncAllGather(self.arena, self.compute_parameters, owners, min(PIECE_MB, bucket_mb))
        return MicroBatches(work, self.pool, mesh.tensor, on_complete, all_gather), data_parallel

    def step(self, batch, lr):
        self.check_interrupted()
        return super().step(batch, lr)

    def update(self, batch, coefficients):
        losses = self.compute_gradients(batch, coefficients.dropout)
        norm, factor = self.optimizer.norm_and_factor(self.gradients)
        self.optimizer.update(self.gradients, factor, coefficients)
        return losses, norm

    def compute_gradients(self, batch, key=None):
        """The losses of this rank's micro-batches; self.gradients becomes the sum over all micro-batches and ranks.

        key: of the Dropout of the step, a device or host array; None drops nothing.
        """
        key = None if key is None else self.backend.asarray(key)
        self.pool.wait()  # after Ctrl-C, the workers of the previous pass may still count units
        self.data_parallel.begin(batch)
        losses = self.accumulator.compute_gradients(batch, self.scale, key)
        self.data_parallel.finish()
        return losses

    def total_loss(self, losses):
        return self.mesh.total_loss(losses)[0]

    def count_step(self, *arguments):
        self.optimizer.end_update()
        return super().count_step(*arguments)

    @property
    def batch_shape(self):
        """(B, T) of this rank's part of the batch."""
        return self.rows.stop - self.rows.start, self.seq_len

    def check_interrupted(self):
        """Raise UserError if an update was interrupted: then some parameters are those before it, others after it."""
        if self.optimizer.updating:
            raise UserError(
                f"step {self.steps} was interrupted while it changed the parameters: load a checkpoint, or make a new "
                f"{type(self).__name__}"
            )

    def check_idle(self):
        """Raise ValueError if a step is in flight: the device may still read and write the parameters. Here none is."""

    def prepare(self, inputs, targets):
        """The argument `batch` of step(), from this rank's rows of the global batch: see Trainer.prepare."""
        inputs, targets = checks.batch((inputs, targets), self.batch_shape, self.config.vocab_size)
        prepare, vocabulary = self.backend.prepare_tokens, self.config.vocab_size
        return [
            [(prepare(x, vocabulary), prepare(y)) for x, y in worker_batch]
            for worker_batch in self.accumulator.deal(inputs, targets, len(inputs), self.accumulator.merged)
        ]


def list_of_backends(backends):
    """`backends`; raises ConfigError unless it is a list, or a tuple, with at least one backend."""
    if not isinstance(backends, list | tuple) or not backends:
        raise ConfigError(f"`backends={backends!r:.60}` must be a list, one for each worker thread: use [backend]")
    return backends


def own_rows(batch_size, micro_batches, group):
    """The slice of the global batch that this rank of a data-parallel group reads.

    Raises ConfigError if the ranks would have different numbers of micro-batches, or a micro-batch no sequence.
    """
    if not 0 < micro_batches // group.size <= batch_size // group.size:
        raise ConfigError(
            f"`micro_batches={micro_batches}`: each of {counted(group.size, 'rank')} needs at least 1, and a "
            f"micro-batch needs at least 1 sequence of `batch_size={batch_size}`"
        )
    if micro_batches % group.size:
        below = micro_batches // group.size * group.size
        raise ConfigError(
            f"`micro_batches={micro_batches}` is not divisible by {counted(group.size, 'rank')}: "
            f"use `micro_batches={below}`"
        )
    return even_slices(batch_size, group.size)[group.rank]


def arenas_of_replica(config, placement, parallel, owners):
    """The DividedArena of each rank of a replica (Mesh.replica). placement: see ParallelTrainer."""
    shapes = [shard_shapes(parameter_shapes(config), rank, parallel.tp, parallel.slices) for rank in range(parallel.tp)]
    return [
        DividedArena({name: shape for name, shape in shards.items() if placement[whole_name(name)] == rank}, owners)
        for rank in range(max(placement.values()) + 1)  # of the pipeline
        for shards in shapes
    ]


def choose_bucket(parallel, mesh, gradients, backend):
    """(bucket size in 10^6 bytes, the BucketSize that all ranks measured together, or None if it is given)."""
    if parallel.bucket_mb is not None:
        return parallel.bucket_mb, None
    measured = measured_bucket(mesh.gradients, gradients, backend, mesh.world.capturable)
    measured = mesh.world.broadcast_object(measured)  # rank 0's result is used
    return measured.mb, measured
