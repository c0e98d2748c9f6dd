"""What a rank needs for its share of a training step: the base class of Trainer."""

from gpt2core.architecture import parameter_shapes
from gpt2core.arena import Arena
from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError, counted, require_size
from gpt2core.parallel import tensor_parallel
from gpt2core.parallel.bucket_size import measured_bucket
from gpt2core.parallel.config import check_rounding
from gpt2core.parallel.data_parallel import gradient_reduction
from gpt2core.parallel.even_slices import even_slices
from gpt2core.parallel.mesh import Mesh
from gpt2core.parallel.micro_batches import MicroBatches
from gpt2core.parallel.sharded_adamw import ShardedAdamW
from gpt2core.parallel.threads import WorkerPool, limit_blas
from gpt2core.parallel.zero import PIECE_MB, AsyncAllGather, check_gather


class Setup:
    """A model and its optimizer, divided over threads and ranks.

    A subclass sets batch_size, seq_len and micro_batches first. mesh: the groups of ranks. pool: the worker threads,
    each with a backend. rows: the slice of the global batch that this rank reads. arena: the layout of the flat arrays
    `parameters`, `gradients`, and `compute_parameters`, which kernels read: the parameters or a copy in compute_dtype.
    accumulator: computes the gradients of this rank's micro-batches. data_parallel: sums them over the ranks.
    optimizer: AdamW. bucket_mb: the size of a message; bucket_size: its measurement, or None.
    """

    scales_loss = False  # whether backward begins with a loss scale

    def __init__(self, config, backends, world, parallel, optimizer):
        for name in ("batch_size", "seq_len", "micro_batches"):
            require_size(name, getattr(self, name))
        if self.seq_len > (longest := config.block_size):
            raise ConfigError(
                f"`seq_len={self.seq_len}` exceeds the model's block of {longest} tokens: use `seq_len={longest}`"
            )
        if backends[0].scales_loss and not self.scales_loss:
            raise ConfigError("`precision=fp16` needs a loss scale: use engine.fast_trainer.FastTrainer")
        self.config, self.world, self.parallel = config, world, parallel
        self.mesh = mesh = Mesh(world, world.size // parallel.tp, parallel.tp)
        self.pool, self.backend = WorkerPool(backends), backends[0]
        limit_blas(1)  # the worker threads use the cores
        tensor_parallel.check_tensor_parallel(config, mesh.tensor.size)
        self.backend.check_model(config)
        self.rows = own_rows(self.batch_size, self.micro_batches, mesh.data)
        owners = mesh.data if parallel.zero else Solo()  # the ranks that divide the arena
        self.arena = Arena(tensor_parallel.shard_shapes(parameter_shapes(config), mesh.tensor.size), owners.size)
        self.parameters = self.compute_parameters = self.backend.zeros((self.arena.size,), self.backend.dtype)
        if self.backend.compute_dtype != self.backend.dtype:
            self.compute_parameters = self.backend.zeros((self.arena.size,), self.backend.compute_dtype)
        self.gradients = self.backend.zeros((self.arena.size,), self.backend.dtype)
        self.bucket_mb, self.bucket_size = choose_bucket(parallel, mesh, self.gradients, self.backend)
        self.data_parallel = gradient_reduction(
            parallel, self.arena, self.gradients, mesh.data, owners, self.backend, self.bucket_mb
        )
        check_gather(parallel.zero_gather, parallel.zero)
        all_gather = None  # or the parameters are gathered during the next forward pass
        if parallel.zero_gather == "forward":
            pieces = min(PIECE_MB, self.bucket_mb)
            all_gather = AsyncAllGather(self.arena, self.compute_parameters, owners, pieces)
        count, shape = self.micro_batches // mesh.data.size, (self.rows.stop - self.rows.start, self.seq_len)
        self.accumulator = MicroBatches(
            config, self.arena, self.compute_parameters, self.gradients, self.data_parallel, self.pool, count,
            mesh.tensor, shape, all_gather,
        )  # fmt: skip
        check_rounding(optimizer.get("rounding", "nearest"), self.backend)
        self.optimizer = ShardedAdamW(
            self.arena, self.parameters, self.pool, owners=owners, tensor_group=mesh.tensor,
            compute_copy=None if self.compute_parameters is self.parameters else self.compute_parameters,
            gathers=all_gather is None, **optimizer,
        )  # fmt: skip


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


def choose_bucket(parallel, mesh, gradients, backend):
    """(bucket size in 10^6 bytes, the BucketSize that all ranks measured together, or None if it is given)."""
    if parallel.bucket_mb is not None:
        return parallel.bucket_mb, None
    measured = measured_bucket(mesh.data, gradients, backend, mesh.world.capturable)
    measured = mesh.world.broadcast_object(measured)  # rank 0's result is used
    return measured.mb, measured
