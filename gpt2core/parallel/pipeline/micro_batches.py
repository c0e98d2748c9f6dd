"""Pipeline parallelism: each rank has some of the units, and the micro-batches pass through the ranks.

PipelineMicroBatches has the bits of MicroBatches: kernels see one micro-batch each, as in a group
of one, and each unit's gradients are added in the canonical order (tree_sum.py).
"""

from gpt2core.parallel.micro_batches.threaded import ThreadedMicroBatches
from gpt2core.parallel.micro_batches.worker_sums import ArenaSums
from gpt2core.parallel.pipeline.placement import units_of_chunks
from gpt2core.parallel.pipeline.schedules import SCHEDULES, with_tied_embedding
from gpt2core.parallel.pipeline.worker import PipelineWorker
from gpt2core.parallel.sharded.unit_parameters import WholeParameters
from gpt2core.parallel.sharded.units import divided_units


class PipelineMicroBatches(ThreadedMicroBatches):
    """The micro-batches of one replica, of which this rank computes its own units.

    Each worker has messages, activations and an Executor of its own, and runs the same actions with its own
    micro-batches. mesh: the Mesh; its pipeline divides the layers, its tensor group each layer. parallel:
    ParallelConfig. on_complete: see ArenaSums; not called with ZeRO-2 and ZeRO-3. The other arguments are those of
    ThreadedMicroBatches. schedule: that of each worker, for all ranks. parameters: the SharedParameters, or
    WholeParameters.
    """

    def __init__(self, work, pool, mesh, parallel, on_complete):
        groups = mesh.groups_of_workers(pool.size)
        self.schedule = make_schedule(parallel, work.count // pool.size, work.config.tied)
        actions = self.schedule[mesh.pipeline.rank]
        if parallel.zero > 1:
            chunks = units_of_chunks(work.config, parallel.pp * parallel.chunks)[mesh.pipeline.rank :: parallel.pp]
            self.parameters, sums = divided_units(work, sum(chunks, []), parallel.zero, pool.size)
        else:
            self.parameters, sums = WholeParameters(), ArenaSums(work, on_complete)

        def make_worker(number, own):
            parameters = self.parameters.of_worker(own.backend)
            return PipelineWorker(parameters, sums.of_worker(own, parameters), groups[number], parallel, actions)

        super().__init__(work, pool, make_worker, sums, self.parameters.barrier)
        self.first, *others = self.workers
        self.executor = self.first.executor
        for name, table in self.first.tied.items() if mesh.pipeline.is_root else ():
            for worker in others:
                worker.tied[name].tensor.data = table.tensor.data  # one copy of the table for all workers

    def compute_gradients(self, batch, scale, key=None):
        with self.parameters.reading(self.first.reads(self.first.actions)):
            self.refresh()
            return super().compute_gradients(batch, scale, key)

    def losses(self, inputs, targets, scale, rows):
        forward = [("F", m, c) for m in range(self.first.work.count) for c in sorted(self.first.units)]
        self.pool.wait()  # after Ctrl-C, the workers of the previous pass may still read parameters
        with self.parameters.reading(self.first.reads(forward)):
            self.refresh()
            return super().losses(inputs, targets, scale, rows)

    def refresh(self):
        """Copy a tied table from the last rank to the first."""
        for table in self.first.tied.values():
            if table.last:
                self.parameters.gather("embedding")
            table.refresh()


def make_schedule(parallel, count, tied):
    """The schedule of a ParallelConfig for `count` micro-batches."""
    schedule = SCHEDULES[parallel.pp_schedule](parallel.pp, count, parallel.chunks)
    return with_tied_embedding(schedule) if tied else schedule
