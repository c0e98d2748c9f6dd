"""The gradient of a unit is summed over the ranks when it is complete, and a rank keeps its shard (ZeRO-2, ZeRO-3)."""

import functools

from gpt2core.parallel.tree_stack import TreeStack
from gpt2core.tensor import Destination
from gpt2core.tree_sum import tree_reduce


class UnitGradients:
    """The gradients of `count` passes, each of `merged` micro-batches, added in the canonical order.

    shards: a UnitShards. flat: the flat array that receives this rank's shards of the sum over passes and ranks.
    tensors, reads: see UnitParameters. twice: the names of the parameters that two units of a pass read. Their gradient
    of each micro-batch is computed in an array of its own, because its two parts are added first. number: of the
    current pass.

    With one pass, the gradient of a unit is in memory from before_backward() until it is sent, which ends when that of
    the next unit is complete. With several, those of all units stay from the first to the last pass, in log2(count)
    arrays (rounded up): the first sums of the canonical order are those of one rank's passes.
    """

    def __init__(self, shards, flat, tensors, reads, backend, count, merged=1, twice=()):
        self.shards, self.flat, self.tensors, self.reads = shards, flat, tensors, reads
        self.backend, self.count, self.merged, self.twice = backend, count, merged, twice
        self.sums, self.views, self.apart = {}, {}, {}  # {unit: TreeStack}, {unit: views of its buffers}, {name: array}
        self.sending = []  # (Handle of a reduce-scatter, the array that it reads)

    def begin(self):
        """Called before the passes of a step: forget a step that has failed, and wait for what it has sent."""
        self.finish()
        for arrays in (self.sums, self.views, self.apart):
            arrays.clear()

    def begin_pass(self, number):
        self.number, self.begun = number, set()

    def before_backward(self, unit):
        """Set the destinations of the gradients that the backward pass of a unit computes."""
        for each in self.reads[unit]:
            if each not in self.begun:
                self.begun.add(each)
                self.set_destinations(each)

    def set_destinations(self, unit):
        if unit not in self.sums:
            allocate = functools.partial(self.shards.allocate, unit)
            self.sums[unit] = sums = TreeStack(allocate(), self.count, allocate, self.add)
            self.views[unit] = [self.shards.views(unit, array) for array in sums.buffers]
        index, adds = self.sums[unit].place(self.number)
        for name, view in self.views[unit][index].items():
            tensor = self.tensors[name]
            tensor.buffer, tensor.grad = view, view if adds else None
            if name in self.twice:
                lead = (self.merged,) if self.merged > 1 else ()
                self.apart[name] = self.backend.empty((*lead, *tensor.shape), self.backend.dtype)
                tensor.buffer, tensor.grad = self.apart[name], None

    def completed(self, unit):
        """Complete the sum of a unit's gradients over the passes so far; after the last pass, send it."""
        index, adds = self.sums[unit].place(self.number)
        for name, view in self.views[unit][index].items():
            if name in self.apart:
                gradient = self.apart.pop(name)
                if self.merged > 1:
                    gradient = tree_reduce(gradient, lambda a, b: self.backend.xp.add(a, b, out=a))
                self.add(view, gradient, adds)
            self.tensors[name].buffer = self.tensors[name].grad = None
        if self.sums[unit].add_sums(self.number):
            self.views.pop(unit)
            self.send(unit, self.sums.pop(unit).buffers[0])

    def add(self, a, b, adds=True):
        self.backend.put(b, Destination(a, accumulate=adds))

    def send(self, unit, array):
        """Start the reduce-scatter of a unit's gradients, after that of the unit before it has ended."""
        self.finish()
        out = self.flat[self.shards.parts[unit]]
        with self.backend.runtime.after():
            self.sending.append((self.shards.group.reduce_scatter_start(array, out=out), array))

    def finish(self):
        """Return when the shards of all units that were sent are in `flat`."""
        while self.sending:
            self.sending.pop()[0].wait()
