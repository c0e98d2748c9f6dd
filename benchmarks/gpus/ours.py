"""This project's trainers for the benchmarks on many GPUs. The variants of a benchmark take turns in one job."""

from benchmarks.harness.ours import GPU_OPTIMIZER, message_count, overlapped_steps, share_graph_memory
from gpt2core.communicator import Solo
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.model import initial_parameters
from gpt2core.parallel.config import ParallelConfig
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.runtime import triton_launch
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator


def make_world(ranks):
    """The communicator of this job's ranks, one GPU each. mpiexec must have started `ranks` ranks."""
    world = NcclCommunicator()
    world.use_transport(None if triton_launch.interpreted() else "nccl")  # raises if there are fewer GPUs than ranks
    return world


def make_variants(config, world, windows, variants, precision="bf16"):
    """Return {name of the variant: train}. train(steps) trains and returns the measurements of this rank.

    variants: {name: options}. The options are ranks, batch_size (of all ranks together), deterministic, communicate and
    the arguments of ParallelConfig. Only the first `ranks` ranks of the world train the variant, with one micro-batch
    each. On the other ranks the dictionary has None instead of train. communicate=False: each rank trains its own model
    on its share of the batch. The first call of train() creates the trainer; all ranks must make their first calls in
    the same order.
    """
    job = Job(config, windows, precision)

    def variant(ranks, communicate=True, **options):
        group = world.split(0 if world.rank < ranks else None)  # a collective: all ranks of the world call it
        if group is None:
            return None
        if not communicate:
            options["batch_size"] //= ranks
            group = Solo()
        return job.train_function(group, **options)

    return {name: variant(**options) for name, options in variants.items()}


class Job:
    """Creates the trainers of one rank. They share the initial parameters and the memory of captured steps."""

    def __init__(self, config, windows, precision):
        self.config, self.windows, self.precision = config, windows, precision
        self.memory_owner = self.initial = None

    def train_function(self, group, **options):
        """Return train(steps) for the ranks of `group`; train() returns the measurements of this rank."""
        trainer = None

        def train(steps):
            nonlocal trainer
            trainer = trainer or self.trainer(group, **options)
            last = overlapped_steps(trainer, self.windows, steps)
            return {
                "loss": last.loss,
                "bytes_sent": last.bytes_sent or 0,
                "optimizer_bytes": trainer.optimizer.nbytes,
                "messages": message_count(trainer),
            }

        return train

    def trainer(self, group, batch_size, deterministic=False, **parallel):
        group.use_collectives("canonical" if deterministic else group.native_algorithm)
        backend = CudaBackend(self.precision, deterministic)
        if self.initial is None:
            self.initial = {name: backend.asarray(array) for name, array in initial_parameters(self.config, 0)}
        trainer = Trainer(
            self.config, [backend], batch_size=batch_size, seq_len=self.windows.seq_len, micro_batches=group.size,
            optimizer=GPU_OPTIMIZER, world=group, parallel=ParallelConfig(**parallel), seed=None,
        )  # fmt: skip
        for name, view in trainer.arena.views(trainer.parameters).items():
            view[...] = self.initial[name]  # a copy on the GPU; to copy from the host would take seconds
        trainer.optimizer.refresh_copy(0)  # the 16-bit copy of the parameters
        self.memory_owner = share_graph_memory(self.memory_owner, backend)
        return trainer
