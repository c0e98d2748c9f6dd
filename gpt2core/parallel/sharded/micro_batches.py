"""ZeRO-2 and ZeRO-3: a rank keeps its shards of gradients, and of parameters (Rajbhandari et al. 2020).

Each unit of the model is a part of its own. The parameters of a unit are gathered while the unit before it is computed,
and its gradients are sent while those of the next unit are computed. With ZeRO-3 the parameters of a unit are freed
after its forward pass and again after its backward pass; with ZeRO-2 they stay until the update.
"""

from dataclasses import replace

from gpt2core.architecture import unit_names
from gpt2core.parallel.micro_batches.accumulator import Accumulator, compute_passes
from gpt2core.parallel.micro_batches.merged import merged_micro_batches
from gpt2core.parallel.part import parts_of
from gpt2core.parallel.sharded.units import divided_units
from gpt2core.parallel.tensor.sliced_units import make_units
from gpt2core.tensor import no_grad


class ShardedMicroBatches(Accumulator):
    """This rank's micro-batches, of which several may be merged in one pass; it has the bits of MicroBatches.

    work: a Workload whose layout is a UnitShards. mesh: the Mesh; its tensor group divides each layer. zero: 2 or 3.
    """

    def __init__(self, work, mesh, zero):
        # All ranks need the same number of passes, because they send after each of them.
        super().__init__(replace(work, merged=merged_micro_batches(work, 1, mesh.world)))
        work, self.units = self.work, unit_names(work.config)
        self.groups = [mesh.tensor]
        self.parameters, self.unit_gradients = divided_units(work, self.units, zero, work.used_twice)
        self.tensors = self.parameters.tensors
        self.parts = parts_of(
            make_units(self.units, work, self.tensors, mesh.tensor), work.backend, work.recompute, separate=True,
            before=self.parameters.need, before_backward=self.before_backward, completed=self.unit_gradients.completed,
        )  # fmt: skip

    def compute_gradients(self, batch, scale, key=None):
        with self.parameters.reading([*self.units, *reversed(self.units)] * self.work.passes):
            begin_pass = self.unit_gradients.begin_pass
            compute_passes(self.work, self.parts, batch[0], scale, key, self.loss_arrays, begin_pass)
        return self.loss_arrays

    def before_backward(self, unit):
        self.parameters.need(unit)
        self.unit_gradients.before_backward(unit)

    @no_grad()
    def losses(self, inputs, targets, scale, rows):
        """See Accumulator.losses. Each unit is gathered once, and computes all micro-batches."""
        (passes,) = self.deal(inputs, targets, rows)
        streams = [ids for ids, _ in passes]
        with self.parameters.reading(self.units):
            for part in self.parts:
                part.skip()  # gathers, also if all micro-batches of this rank are empty
                streams = [
                    part.forward(x, self.work.evaluation_arguments(targets, scale)).y.data if len(x) else x
                    for x, (_, targets) in zip(streams, passes, strict=True)
                ]
        return [loss.item() if len(ids) else 0.0 for loss, (ids, _) in zip(streams, passes, strict=True)]
