"""Pipeline parallelism: each rank has some of the units, and the micro-batches pass through the ranks.

PipelineMicroBatches has the bits of MicroBatches: kernels see one micro-batch each, as in a group
of one, and each unit's gradients are added in the canonical order (tree_sum.py).
"""

from gpt2core.parallel.accumulator import Accumulator
from gpt2core.parallel.gradient_sums import arena_sums, tensors_of
from gpt2core.parallel.part import parts_of
from gpt2core.parallel.pipeline.executor import Executor
from gpt2core.parallel.pipeline.placement import units_of_chunks
from gpt2core.parallel.pipeline.schedules import SCHEDULES, with_tied_embedding
from gpt2core.parallel.pipeline.tied_table import TiedTable
from gpt2core.parallel.sliced_ops import Slice
from gpt2core.parallel.sliced_units import make_units
from gpt2core.parallel.tensor_parallel import own_slices


class PipelineMicroBatches(Accumulator):
    """The micro-batches of one replica, of which this rank computes its own units.

    work: a Workload; its arena has the parameters that this rank stores (placement.py). mesh: the Mesh; its pipeline
    divides the layers, its tensor group each layer. parallel: ParallelConfig. on_complete(unit) is called during
    backward when this rank's gradient of a unit is complete. tensors: {name: Tensor} of the parameters that this rank
    reads: those that it stores, and on the first rank of a tied model the table. schedule: that of all ranks.
    """

    def __init__(self, work, mesh, parallel, on_complete):
        super().__init__(work)
        config, backend, pipeline = work.config, work.backend, mesh.pipeline
        self.group, self.on_complete = mesh.tensor, on_complete
        self.sums = arena_sums(work)
        self.tensors, self.tied = tensors_of(self.sums), {}  # {name of a slice of a tied table: its TiedTable}
        if config.tied:
            for name, number in own_slices(config.head, self.group.rank, work.slices):
                part, stored = Slice(number, self.group.size * work.slices), self.tensors.get(name)
                self.tied[name] = TiedTable(config, mesh.ends, part, stored, backend)
            self.tensors |= {name: table.tensor for name, table in self.tied.items() if table.first}

        all_units = units_of_chunks(config, pipeline.size * parallel.chunks)
        self.units = {c: units for c, units in enumerate(all_units) if c % pipeline.size == pipeline.rank}
        chunks = {c: self.parts(units) for c, units in self.units.items()}
        groups = {"F": pipeline, "B": pipeline} | ({"E": mesh.ends} if config.tied else {})
        self.executor = Executor(work, chunks, len(all_units), groups, self)
        self.schedule = make_schedule(parallel, work.count, config.tied)
        self.actions = self.schedule[pipeline.rank]

    def parts(self, names):
        """The parts of a chunk. The embedding is one of its own, because a tied model sends the gradient before it."""
        units = make_units(names, self.work, self.tensors, self.group)
        first = units[:1] if names[0] == "embedding" else []
        groups = [group for group in (first, units[len(first) :]) if group]
        options = self.backend, self.work.recompute
        return [part for group in groups for part in parts_of(group, *options, completed=self.unit_completed)]

    def compute_gradients(self, batch, scale):
        for each in self.sums.values():
            each.begin()
        self.refresh()
        for m, loss in self.executor.run(self.actions, batch[0], scale).items():
            self.loss_arrays[m][...] = loss
        return self.loss_arrays

    def losses(self, inputs, targets, scale, rows):
        self.refresh()
        losses = self.executor.evaluate(self.deal(inputs, targets, rows)[0], scale)
        return [losses[m].item() if m in losses else 0.0 for m in range(self.work.count)]

    def refresh(self):
        for table in self.tied.values():
            table.refresh()

    # -- gradients: called by the Executor -----------------------------------------------------------------------------

    def set_destinations(self, c):
        """Set the destinations of the gradients of a chunk's next micro-batch."""
        for unit in self.units[c]:
            if unit in self.sums:  # the embedding is not, if it is a tied table without learned positions
                self.sums[unit].set_destinations()
        if "head" in self.units[c]:
            for table in self.tied.values():
                table.set_destination()

    def add_embedding(self, ids, dy):
        """Add the gradient of a tied table for a micro-batch; dy: the gradient of the embedding's output."""
        for name, table in self.tied.items():
            self.backend.put(table.add_embedding(ids, dy), self.sums["embedding"].destination(name))
        self.unit_completed("embedding")

    def unit_completed(self, unit):
        """Complete the sum of a unit's gradients over the micro-batches so far."""
        if unit in self.sums and self.sums[unit].complete():
            self.on_complete(unit)


def make_schedule(parallel, count, tied):
    """The schedule of a ParallelConfig for `count` micro-batches."""
    schedule = SCHEDULES[parallel.pp_schedule](parallel.pp, count, parallel.chunks)
    return with_tied_embedding(schedule) if tied else schedule
