"""The sum of the gradients of a unit over several passes, in the canonical order, with few buffers."""

from gpt2core.parallel.parameter import Destination, Parameter
from gpt2core.tree_sum import additions, tree_reduce


def buffers_of_sum(count):
    """The buffers that UnitSum needs for `count` passes: log2(count), rounded up, but at least 1."""
    return max(1, (count - 1).bit_length())


class UnitSum:
    """The sum of the gradients of one unit over the passes of a Workload.

    Call set_destinations() before backward of a pass computes gradients of the unit, and complete() after it. tensors:
    {name: Parameter} of the unit's parameters. buffers: flat arrays, see buffers_of_sum(); the first one receives the
    sum. views: for each of them {name: view}. separate: {name: array} of parameters that two units of a pass read, in
    the shape of the parameter, or (merged, *shape). Their gradient of each micro-batch is computed in this array,
    because its two parts are added first.
    """

    def __init__(self, work, tensors, buffers, views, separate=None):
        self.tensors, self.buffers, self.views, self.kept = tensors, buffers, views, separate or {}
        self.separate = self.kept  # of the present pass
        self.backend, self.count, self.merged = work.backend, work.passes, work.merged
        self.begin()

    def begin(self):
        """Called before the passes of a step."""
        self.passes = 0  # that are complete

    def buffer_slot(self):
        """(index of the buffer for the gradient of the present pass, whether it is added to what is there)."""
        odd = self.passes % 2  # then its left neighbour is on top of the stack
        return self.passes.bit_count() - odd, bool(odd)

    def destination(self, name):
        """Where the gradient of a parameter of the present pass enters the sum."""
        index, accumulate = self.buffer_slot()
        return Destination(self.views[index][name], accumulate)

    def set_destinations(self, separate=None):
        """Set the destinations of the gradients of the present pass. separate: arrays for this pass only."""
        self.separate = separate or self.kept
        index, accumulate = self.buffer_slot()
        for name, tensor in self.tensors.items():
            if name in self.separate:
                tensor.send_to(self.separate[name])
            else:
                tensor.send_to(self.views[index][name], accumulate)

    def complete(self):
        """Add the partial sums after a pass; return whether this was the last pass."""
        for name, gradient in self.separate.items():
            if self.merged > 1:
                gradient = tree_reduce(gradient, self.add_in_place)
            self.backend.put(gradient, self.destination(name))
        self.separate = self.kept
        (top, accumulate), last = self.buffer_slot(), self.passes == self.count - 1
        for _ in range(additions(self.passes, last) - accumulate):
            top -= 1
            self.add_in_place(self.buffers[top], self.buffers[top + 1])
        self.passes += 1
        return last

    def add_in_place(self, a, b):
        self.backend.put(b, Destination(a, accumulate=True))
        return a


class ArenaGradients:
    """The gradients of all units of a Workload with the layout of an arena. UnitGradients has the same methods.

    The buffers are kept for all steps; work.gradients receives the sums. tensors: {name: Parameter} of all parameters,
    in the order of the arena: views of work.parameters. sums: {unit: its UnitSum}. on_complete(unit) is called when the
    sum of a unit is complete. used_twice: the names of the parameters in UnitSum.separate.
    """

    def __init__(self, work, on_complete, used_twice=()):
        arena, backend = work.arena, work.backend
        self.work, self.on_complete, self.sums = work, on_complete, {}
        self.tensors = {name: Parameter(array, backend) for name, array in arena.views(work.parameters).items()}
        zeros = (backend.zeros((arena.size,), backend.dtype) for _ in range(buffers_of_sum(work.passes) - 1))
        flats = [work.gradients, *zeros]
        views, separate = [arena.views(flat) for flat in flats], separate_arrays(work, only(used_twice, self.tensors))
        for unit, names in arena.units.items():
            buffers = [flat[arena.unit_slice(unit)] for flat in flats]
            self.sums[unit] = UnitSum(work, only(names, self.tensors), buffers, views, only(names, separate))

    def begin(self):
        """Called before the passes of a step."""
        for each in self.sums.values():
            each.begin()

    def begin_pass(self):
        """Set the destinations of all gradients of the next pass."""
        for unit in self.sums:
            self.set_destinations(unit)

    def set_destinations(self, unit):
        """Set the destinations of the gradients of a unit in the next pass."""
        self.sums[unit].set_destinations()

    def sum_of(self, unit):
        return self.sums[unit]

    def completed(self, unit):
        """Complete the sum of a unit's gradients over the passes so far, when backward of a pass has computed them."""
        if self.sums[unit].complete():
            self.on_complete(unit)


def separate_arrays(work, tensors):
    """New arrays for UnitSum.separate; tensors: {name: Parameter}."""
    lead, backend = (work.merged,) if work.merged > 1 else (), work.backend
    return {name: backend.empty((*lead, *tensor.shape), backend.dtype) for name, tensor in tensors.items()}


def only(names, arrays):
    """The items of the dictionary `arrays` with these names; names that it does not have are omitted."""
    return {name: arrays[name] for name in names if name in arrays}
