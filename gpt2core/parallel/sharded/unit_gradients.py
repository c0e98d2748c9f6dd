"""The gradients of a unit are in memory from its backward pass until all passes of a worker have added theirs."""

from gpt2core.parallel.micro_batches.gradient_sums import UnitSum, buffers_of_sum, only, separate_arrays


class UnitGradients:
    """The gradients of the passes of a Workload, added in the canonical order. ArenaGradients has the same methods.

    work: that of a worker; its layout is a UnitShards. tensors, reads: see UnitParameters. on_complete(unit) is called
    when the sum of a unit is complete: then take(unit) removes it. used_twice: the names of the parameters in
    UnitSum.separate.

    With one pass, the gradient of a unit is in memory from before_backward() until it is sent, which ends when that of
    the next unit is complete. With several, those of all units stay from the first to the last pass, in log2(count)
    arrays (rounded up): the first sums of the canonical order are those of one worker's passes.
    """

    def __init__(self, work, tensors, reads, on_complete, used_twice=()):
        self.work, self.shards, self.backend, self.used_twice = work, work.layout, work.backend, used_twice
        self.tensors, self.reads, self.on_complete = tensors, reads, on_complete
        self.sums = {}  # {unit: its UnitSum, from the first to the last pass}
        self.begun = set()  # the units that have destinations in the present pass

    def begin(self):
        """Called before the passes of a step: forget a step that has failed."""
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
        array = self.backend.empty((self.shards.whole_size(unit),), self.backend.dtype)
        self.shards.clear_padding(unit, array)
        return array

    def completed(self, unit):
        """Complete the sum of a unit's gradients over the passes so far, when backward of a pass has computed them."""
        unit_sum = self.sums[unit]
        last = unit_sum.complete()
        for tensor in unit_sum.tensors.values():
            tensor.forget()
        if last:
            self.on_complete(unit)

    def take(self, unit):
        """The flat array of the complete sum of a unit; it is not kept."""
        return self.sums.pop(unit).buffers[0]
