"""ZeRO-2 and ZeRO-3: a rank keeps its shards of gradients, and of parameters (Rajbhandari et al. 2020).

Each unit of the model is a part of its own. The parameters of a unit are gathered while the unit before it is computed,
and its gradients are sent while those of the next unit are computed. With ZeRO-3 the parameters of a unit are freed
after its forward pass and again after its backward pass; with ZeRO-2 they stay until the update.
"""

from dataclasses import replace

from gpt2core.architecture import unit_names
from gpt2core.communicator import SOLO
from gpt2core.parallel.accumulator import Accumulator, compute_passes
from gpt2core.parallel.merged_micro_batches import merged_micro_batches
from gpt2core.parallel.parameter import Parameter
from gpt2core.parallel.part import parts_of
from gpt2core.parallel.sharded.unit_gradients import UnitGradients
from gpt2core.parallel.sharded.unit_parameters import NotInMemory, UnitParameters
from gpt2core.parallel.sharded.units import units_read
from gpt2core.parallel.sliced_units import make_units
from gpt2core.tensor import no_grad


class ShardedMicroBatches(Accumulator):
    """This rank's micro-batches, of which several may be merged in one pass; it has the bits of MicroBatches.

    work: a Workload whose layout is a UnitShards. zero: 2 or 3.
    """

    group = SOLO

    def __init__(self, work, zero):
        # All ranks need the same number of passes, because they send after each of them.
        super().__init__(replace(work, merged=merged_micro_batches(work, 1, work.layout.group)))
        work, config, backend = self.work, self.work.config, self.backend
        self.shards, self.units = work.layout, list(work.layout.parts)
        self.tensors = {
            name: Parameter(NotInMemory(shape, backend.compute_dtype), backend)
            for name, shape in work.arena.shapes.items()
        }
        reads = units_read(config, self.units)
        self.parameters = UnitParameters(self.shards, work.parameters, self.tensors, reads, keeps=zero == 2)
        self.unit_gradients = UnitGradients(work, self.tensors, reads)
        self.parts = parts_of(
            make_units(unit_names(config), work, self.tensors, SOLO), backend, work.recompute, separate=True,
            before=self.parameters.need, before_backward=self.before_backward, completed=self.unit_gradients.completed,
        )  # fmt: skip

    def compute_gradients(self, batch, scale):
        with self.parameters.reading([*self.units, *reversed(self.units)] * self.work.passes):
            begin_pass = self.unit_gradients.begin_pass
            compute_passes(self.work, self.parts, batch[0], scale, self.loss_arrays, begin_pass)
        return self.loss_arrays

    def before_backward(self, unit):
        self.parameters.need(unit)
        self.unit_gradients.before_backward(unit)

    def memory(self):
        """(bytes of shards, largest number of bytes of whole parameters, the same of whole gradients) of this rank."""
        units = [self.shards.whole_size(unit) for unit in self.units]
        # One unit is computed, another is sent; and the gradient of a tied table waits for its second part.
        few = (3 if self.work.config.tied else 2) * max(units)
        stacked = (self.work.passes - 1).bit_length() * sum(units)  # 0: one pass
        whole = sum(units) if self.parameters.keeps else few
        number, read = self.gradients.itemsize, self.parameters.flat.itemsize  # bytes; of what kernels read
        copy = 0 if self.parameters.flat.dtype == self.gradients.dtype else read
        return (4 * number + copy) * self.shards.size, read * whole, number * (stacked or few)

    @no_grad()
    def losses(self, inputs, targets, scale, rows):
        """See Accumulator.losses. Each unit is gathered once, and computes all micro-batches."""
        (passes,) = self.deal(inputs, targets, rows)
        streams = [ids for ids, _ in passes]
        with self.parameters.reading(self.units):
            for part in self.parts:
                for unit in part.units:
                    self.parameters.need(unit.name)  # also if all micro-batches of this rank are empty
                streams = [
                    part.forward(x, self.work.arguments(targets, scale)).y.data if len(x) else x
                    for x, (_, targets) in zip(streams, passes, strict=True)
                ]
        return [loss.item() if len(ids) else 0.0 for loss, (ids, _) in zip(streams, passes, strict=True)]
