"""Where the benchmarks touch our own GPT-2 on many GPUs: ways to train that take turns on the ranks of one job."""

from benchmarks.harness.ours import take_turns
from gpt2core.communicator import Solo
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.whole_parameters import initial_parameters
from gpt2core.trainer import Trainer
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.runtime import triton_launch
from stage3_mpi_cuda.nccl_communicator import NcclCommunicator

LR = 3e-4
OPTIMIZER = dict(clip=1.0, weight_decay=0.1, beta2=0.95)  # GPT-2's recipe, and nanoGPT's


def make_world(ranks):
    """The ranks of this job, each with its GPU: `ranks` are as many as mpiexec has started."""
    world = NcclCommunicator()
    world.use_transport(None if triton_launch.interpreted() else "nccl")  # refuses what is fewer GPUs than ranks
    return world


def make_variants(config, world, windows, variants, precision="bf16"):
    """{name: train(steps) -> what this rank can tell of them}; None where this rank has no part in it.

    variants: {name: dict(ranks=, batch_size= of all ranks, deterministic=False, talks=True, and those of Parallel)};
    the ranks are the first ones of the world, with a micro-batch each. With talks=False each of them trains by itself
    on its share of the batch. A trainer is made at its first turn, and all ranks call those in the same order.
    """
    job = Job(config, windows, precision)

    def variant(ranks, talks=True, **options):
        group = world.split(0 if world.rank < ranks else None)  # all ranks of the world call this
        if group is None:
            return None
        if not talks:
            options["batch_size"] //= ranks
            group = Solo()
        return job.turns(group, **options)

    return {name: variant(**options) for name, options in variants.items()}


class Job:
    """What the trainers of one rank share: the parameters that they begin with, and the memory of recorded steps."""

    def __init__(self, config, windows, precision):
        self.config, self.windows, self.precision = config, windows, precision
        self.first = self.values = None

    def turns(self, group, **options):
        """train(steps) on the ranks of `group`."""
        trainer = None

        def train(steps):
            nonlocal trainer
            trainer = trainer or self.trainer(group, **options)
            ahead = [LR] * (steps - 1) + [None]  # as in training a step is begun before the last one's numbers are read
            last = [trainer.step(self.windows, LR, then) for then in ahead][-1]
            return {
                "loss": last.loss,
                "bytes_sent": last.bytes_sent or 0,
                "optimizer_bytes": trainer.optimizer.nbytes,
                "messages": len(trainer.data_parallel.parts),
            }

        return train

    def trainer(self, group, batch_size, deterministic=False, **parallel):
        group.use_collectives("canonical" if deterministic else group.native_collectives)
        backend = CudaBackend(self.precision, deterministic)
        if self.values is None:
            self.values = {name: backend.asarray(array) for name, array in initial_parameters(self.config, 0)}
        trainer = Twin(
            self.values, self.config, [backend], batch_size=batch_size, seq_len=self.windows.seq_len,
            micro_batches=group.size, optimizer=OPTIMIZER, world=group, parallel=ParallelConfig(**parallel),
        )  # fmt: skip
        self.first = take_turns(self.first, backend)
        return trainer


class Twin(Trainer):
    """A Trainer that begins with parameters that are on its GPU already: to send them each time takes seconds."""

    def __init__(self, values, *args, **options):
        self.values = values
        super().__init__(*args, **options)

    def fill(self, flat, arrays):
        for name, view in self.arena.views(flat).items():
            view[...] = self.values[name]
