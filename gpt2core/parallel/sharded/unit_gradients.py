"""The gradient of a unit is summed over the ranks when it is complete, and a rank keeps its shard (ZeRO-2, ZeRO-3)."""

from gpt2core.parallel.micro_batches.gradient_sums import UnitSum, buffers_of_sum, only, separate_arrays


class UnitGradients:
    """The gradients of the passes of a Workload, added in the canonical order. ArenaGradients has the same methods.

    work: its layout is a UnitShards, and its `gradients` receive this rank's shards of the sum over passes and ranks.
    tensors, reads: see UnitParameters. used_twice: the names of the parameters in UnitSum.separate.

    On a GPU, kernels write the gradients on a side stream. send() starts after all of them, on both streams. The main
    stream allocates the arrays and reuses their memory; before that, finish() lets it wait for the reduce-scatter, and
    so for everything on the side stream that came before.

    With one pass, the gradient of a unit is in memory from before_backward() until it is sent, which ends when that of
    the next unit is complete. With several, those of all units stay from the first to the last pass, in log2(count)
    arrays (rounded up): the first sums of the canonical order are those of one rank's passes.
    """

    def __init__(self, work, tensors, reads, used_twice=()):
        self.work, self.shards, self.backend, self.used_twice = work, work.layout, work.backend, used_twice
        self.tensors, self.reads = tensors, reads
        self.sums = {}  # {unit: its UnitSum, from the first to the last pass}
        self.begun = set()  # the units that have destinations in the present pass
        self.sending = []  # (Handle of a reduce-scatter, the array that it reads)

    def begin(self, batch=()):
        """Called before the passes of a step: forget a step that has failed, and wait for what it has sent."""
        self.finish()
        self.sums.clear()

    def begin_pass(self):
        self.begun = set()

    def before_backward(self, unit):
        """Set the destinations of the gradients that the backward pass of a unit computes."""
        for each in self.reads[unit]:
            if each not in self.begun:
                self.begun.add(each)
                self.set_destinations(each)

    def set_destinations(self, unit):
        unit_sum = self.sum_of(unit)
        unit_sum.set_destinations(separate_arrays(self.work, only(self.used_twice, unit_sum.tensors)))

    def sum_of(self, unit):
        """The UnitSum of a unit, a new one in the first pass."""
        if unit not in self.sums:
            buffers = [self.allocate(unit) for _ in range(buffers_of_sum(self.work.passes))]
            views = [self.shards.views(unit, array) for array in buffers]
            tensors = only(self.shards.arena.units[unit], self.tensors)
            self.sums[unit] = UnitSum(self.work, tensors, buffers, views)
        return self.sums[unit]

    def allocate(self, unit):
        """A new array for the gradients of a unit, with zeros between them."""
        array = self.shards.allocate(unit, self.backend.dtype)
        self.shards.clear_padding(unit, array)
        return array

    def completed(self, unit):
        """Complete the sum of a unit's gradients over the passes so far; after the last pass, send it."""
        unit_sum = self.sums[unit]
        last = unit_sum.complete()
        for tensor in unit_sum.tensors.values():
            tensor.forget()
        if last:
            self.send(unit, self.sums.pop(unit).buffers[0])

    def send(self, unit, array):
        """Start the reduce-scatter of a unit's gradients, after that of the unit before it has ended."""
        self.finish()
        out = self.work.gradients[self.shards.parts[unit]]
        with self.backend.runtime.after(array):  # a group of one copies the array on the side stream
            self.sending.append((self.shards.group.reduce_scatter_start(array, out=out), array))

    def finish(self):
        """Return when the shards of all units that were sent are in `work.gradients`."""
        while self.sending:
            self.sending.pop()[0].wait()
