"""This project's trainers for the benchmarks on many GPUs. The variants of a benchmark take turns in one job."""

import functools

from benchmarks.harness.ours import GPU_OPTIMIZER, message_count, overlapped_steps, share_graph_memory
from gpt2core.communicator import Solo
from gpt2core.engine.fast_trainer import FastTrainer as Trainer
from gpt2core.model import initial_parameters
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.whole_parameters import fill
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.runtime import triton_launch
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator


def make_world(ranks):
    """The communicator of this job's ranks, one GPU each. mpiexec must have started `ranks` ranks."""
    world = NcclCommunicator()
    world.use_transport(None if triton_launch.interpreted() else "nccl")  # raises if there are fewer GPUs than ranks
    return world


def make_variants(config, world, windows, variants, precision="bf16", initial=None):
    """Return {name of the variant: train}. train(steps) trains and returns the measurements of this rank.

    variants: {name: options}. The options are ranks, batch_size (of all ranks together), deterministic, communicate and
    the arguments of ParallelConfig. Only the first `ranks` ranks of the world train the variant, with one micro-batch
    each. On the other ranks the dictionary has None instead of train. communicate=False: each rank trains its own model
    on its share of the batch. The first call of train() creates the trainer; all ranks must make their first calls in
    the same order. initial(): an iterator over the initial parameters, (name, whole array) in model order; by default
    the job keeps those of seed 0 on each GPU for all its variants, which is not possible with ZeRO-2 and ZeRO-3.
    """
    job = Job(config, windows, precision, initial)

    def variant(ranks, communicate=True, **options):
        group = world.split(0 if world.rank < ranks else None)  # a collective: all ranks of the world call it
        if group is None:
            return None
        if not communicate:
            options["batch_size"] //= ranks
            group = Solo()
        trainer_of = functools.cache(functools.partial(job.trainer, group, **options))  # created by the first call

        def train(steps):
            trainer = trainer_of()
            last = overlapped_steps(trainer, windows, steps)
            return {
                "loss": last.loss,
                "bytes_sent": last.bytes_sent or 0,
                "optimizer_bytes": trainer.optimizer.nbytes,
                "messages": message_count(trainer),
                "held_bytes": trainer.backend.runtime.peak_memory() or 0,  # as peak_memory_bytes in the log of training
            }

        return train

    return {name: variant(**options) for name, options in variants.items()}


class Job:
    """Creates the trainers of one rank. They share the initial parameters and the memory of captured steps.

    draw(): the initial parameters, see make_variants(). Then no copy of them is kept.
    """

    def __init__(self, config, windows, precision, draw):
        self.config, self.seq_len, self.precision, self.draw = config, windows.seq_len, precision, draw
        self.memory_owner = self.initial = None

    def trainer(self, group, batch_size, deterministic=False, **parallel):
        group.use_collectives("canonical" if deterministic else group.native_algorithm)
        backend = CudaBackend(self.precision, deterministic)
        trainer = Trainer(
            self.config, [backend], batch_size=batch_size, seq_len=self.seq_len, micro_batches=group.size,
            optimizer=GPU_OPTIMIZER, world=group, parallel=ParallelConfig(**parallel), seed=None,
        )  # fmt: skip
        self.fill(trainer)
        trainer.optimizer.refresh_copy(0)  # the 16-bit copy of the parameters
        self.memory_owner = share_graph_memory(self.memory_owner, backend)
        return trainer

    def fill(self, trainer):
        """Copy the initial parameters to the trainer's."""
        if self.draw:
            fill(trainer, trainer.parameters, self.draw() if trainer.world.is_root else None)
            return trainer.backend.runtime.release_cached_memory()  # as FastTrainer does after the initial parameters
        if self.initial is None:
            arrays = initial_parameters(self.config, 0)
            self.initial = {name: trainer.backend.asarray(array) for name, array in arrays}
        for name, view in trainer.arena.views(trainer.parameters).items():
            view[...] = self.initial[name]  # a copy on the GPU; to copy from the host would take seconds
