"""ZeRO-2 and ZeRO-3: a rank keeps its shards of gradients, and of parameters (Rajbhandari et al. 2020).

Each unit of the model is a part of its own. The parameters of a unit are gathered while the unit before it is computed,
and its gradients are sent while those of the next unit are computed. With ZeRO-3 the parameters of a unit are freed
after its forward pass and again after its backward pass; with ZeRO-2 they stay until the update. The worker threads of
a rank compute the same unit at the same time, each with its own micro-batches.
"""

from dataclasses import replace

from gpt2core.architecture import unit_names
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.parallel.micro_batches.accumulator import compute_passes
from gpt2core.parallel.micro_batches.merged import merged_micro_batches
from gpt2core.parallel.micro_batches.threaded import ThreadedMicroBatches
from gpt2core.parallel.part import parts_of
from gpt2core.parallel.sharded.units import divided_units
from gpt2core.parallel.tensor.sliced_units import make_units


class ShardedMicroBatches(ThreadedMicroBatches):
    """This rank's micro-batches, of which several may be merged in one pass; it has the bits of MicroBatches.

    work: a Workload whose layout is a UnitShards. mesh: the Mesh; its tensor group divides each layer. zero: 2 or 3.
    parameters: the SharedParameters. The other arguments are those of ThreadedMicroBatches.
    """

    def __init__(self, work, pool, mesh, zero):
        # All ranks need the same number of passes, because each pass gathers parameters.
        work = replace(work, merged=merged_micro_batches(work, pool.size, mesh.world))
        self.units, groups = unit_names(work.config), mesh.groups_of_workers(pool.size)
        self.parameters, sums = divided_units(work, self.units, zero, pool.size)

        def make_worker(number, own):
            parameters = self.parameters.of_worker(own.backend)
            return ShardedWorker(parameters, sums.of_worker(own, parameters, own.used_twice), groups[number].tensor)

        super().__init__(work, pool, make_worker, sums, self.parameters.barrier)

    def compute_gradients(self, batch, scale, key=None):
        with self.parameters.reading([*self.units, *reversed(self.units)] * self.workers[0].work.passes):
            return super().compute_gradients(batch, scale, key)

    def losses(self, inputs, targets, scale, rows):
        """See Accumulator.losses. Each unit is gathered once, and computes all micro-batches."""
        self.pool.wait()  # after Ctrl-C, the workers of the previous pass may still read parameters
        with self.parameters.reading(self.units):
            return super().losses(inputs, targets, scale, rows)


class ShardedWorker:
    """One thread's model: see Worker. parameters: its WorkerParameters. unit_gradients: its UnitGradients."""

    def __init__(self, parameters, unit_gradients, group):
        work = unit_gradients.work
        self.work, self.backend, self.groups = work, work.backend, [group]
        self.parameters, self.unit_gradients, self.tensors = parameters, unit_gradients, parameters.tensors
        self.parts = parts_of(
            make_units(unit_names(work.config), work, self.tensors, group), work.backend, work.recompute, separate=True,
            before=parameters.need, before_backward=self.before_backward, completed=unit_gradients.completed,
        )  # fmt: skip

    def run(self, batch, scale, key, losses):
        """See Worker.run."""
        self.unit_gradients.begin()
        compute_passes(self.work, self.parts, batch, scale, key, losses, self.unit_gradients.begin_pass)

    def before_backward(self, unit):
        self.parameters.need(unit)
        self.unit_gradients.before_backward(unit)

    def losses(self, batch, scale):
        """See Worker.losses."""
        streams = [ids for ids, _ in batch]
        for part in self.parts:
            part.skip()  # gathers, also if all micro-batches of this worker are empty
            streams = [
                part.forward(x, ForwardArguments(targets=targets, scale=scale)).y.data if len(x) else x
                for x, (_, targets) in zip(streams, batch, strict=True)
            ]
        return [loss.item() if len(ids) else 0.0 for loss, (ids, _) in zip(streams, batch, strict=True)]
