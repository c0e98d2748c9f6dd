"""One worker thread of a rank of a pipeline: its units, the sums of their gradients, and its Executor."""

from gpt2core.parallel.part import parts_of
from gpt2core.parallel.pipeline.executor import Executor
from gpt2core.parallel.pipeline.placement import units_of_chunks
from gpt2core.parallel.pipeline.tied_table import TiedTable
from gpt2core.parallel.tensor.shards import own_slices
from gpt2core.parallel.tensor.sliced_ops import Slice
from gpt2core.parallel.tensor.sliced_units import make_units


class PipelineWorker:
    """Computes consecutive micro-batches of a replica together with the workers of the same number on other ranks.

    parameters: the WorkerParameters, or WholeParameters. unit_gradients: the UnitGradients, or ArenaGradients. Its
    `work` is the Workload of this worker, whose arena has the parameters that this rank stores (placement.py). groups:
    the WorkerGroups. parallel: ParallelConfig. actions: those of this rank in the schedule. tensors: {name: Tensor} of
    the parameters that this rank reads: those that it stores, and on the first rank of a tied model the table. tied:
    {name of a slice of a tied table: its TiedTable}.
    """

    def __init__(self, parameters, unit_gradients, groups, parallel, actions):
        work = unit_gradients.work
        self.work, self.backend, self.gradients, self.groups = work, work.backend, work.gradients, groups.all()
        self.parameters, self.unit_gradients = parameters, unit_gradients
        self.tensor_group, self.actions = groups.tensor, actions
        config, pipeline = work.config, groups.pipeline
        all_units = units_of_chunks(config, pipeline.size * parallel.chunks)
        self.units = {c: units for c, units in enumerate(all_units) if c % pipeline.size == pipeline.rank}
        self.divides_units = parallel.zero > 1
        self.tensors, self.tied = dict(unit_gradients.tensors), {}
        for name, number in own_slices(config.head, groups.tensor.rank, work.slices) if config.tied else ():
            part, stored = Slice(number, groups.tensor.size * work.slices), self.tensors.get(name)
            self.tied[name] = TiedTable(config, groups.ends, part, stored, self.backend)
        self.tensors |= {name: table.tensor for name, table in self.tied.items() if table.first}
        chunks = {c: self.parts(units) for c, units in self.units.items()}
        senders = {"F": pipeline, "B": pipeline} | ({"E": groups.ends} if config.tied else {})
        self.executor = Executor(work, chunks, len(all_units), senders, self)

    def parts(self, names):
        """The parts of a chunk. The embedding is one of its own, because a tied model sends the gradient before it."""
        units = make_units(names, self.work, self.tensors, self.tensor_group)
        first = units[:1] if names[0] == "embedding" else []
        hooks = dict(before=self.need, before_backward=self.parameters.need, completed=self.unit_completed)
        options = self.backend, self.work.recompute, self.divides_units
        return [part for group in (first, units[len(first) :]) if group for part in parts_of(group, *options, **hooks)]

    def need(self, unit):
        """Called before the forward pass of a unit."""
        self.executor.messages.progress()
        self.parameters.need(unit)

    def reads(self, actions):
        """The units whose parameters these actions read, in order: the argument of UnitParameters.reading()."""
        orders = {"F": lambda units: units, "B": reversed}
        return [unit for kind, _, c in actions if kind in orders for unit in orders[kind](self.units[c])]

    def run(self, batch, scale, key, losses):
        """See Worker.run."""
        self.unit_gradients.begin()
        for table in self.tied.values():
            table.waiting.clear()  # of a step that has failed
        for m, loss in self.executor.run(self.actions, batch, scale, key).items():
            losses[m][...] = loss

    def losses(self, batch, scale):
        """See Worker.losses."""
        losses = self.executor.evaluate(batch, scale)
        return [losses[m].item() if m in losses else 0.0 for m in range(self.work.count)]

    # -- gradients: called by the Executor -----------------------------------------------------------------------------

    def set_destinations(self, c):
        """Set the destinations of the gradients of a chunk's next micro-batch."""
        for unit in self.units[c]:
            if unit in self.work.arena.units:  # the embedding is not, if it is a tied table without learned positions
                self.unit_gradients.set_destinations(unit)
        if "head" in self.units[c]:
            for table in self.tied.values():
                table.set_destination()

    def add_embedding(self, ids, dy):
        """Add the gradient of a tied table for a micro-batch; dy: the gradient of the embedding's output."""
        unit_sum = self.unit_gradients.sum_of("embedding")
        for name, table in self.tied.items():
            self.backend.put(table.add_embedding(ids, dy), unit_sum.destination(name))
        self.unit_completed("embedding")

    def unit_completed(self, unit):
        """Complete the sum of a unit's gradients over the micro-batches so far."""
        self.executor.messages.progress()
        if unit in self.work.arena.units:
            self.unit_gradients.completed(unit)
