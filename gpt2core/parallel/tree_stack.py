"""The sum of the gradients of micro-batches in the canonical order, with few buffers."""

from gpt2core.tensor import Destination, Tensor
from gpt2core.tree_sum import additions


class GradientSums:
    """The sum of the gradients of `count` passes, in the flat array `gradients`; each unit is counted by itself.

    A pass is forward and backward of one or more micro-batches. tensors: {name: Tensor} of the flat array `parameters`.
    Call point(unit) before backward of a unit computes gradients, and complete(unit) after it.
    """

    def __init__(self, arena, parameters, gradients, backend, count):
        def add(a, b):
            backend.put(b, Destination(a, accumulate=True))

        self.arena, arrays = arena, arena.views(parameters)
        self.tensors = {name: Tensor(array, backend, requires_grad=True) for name, array in arrays.items()}
        self.stack = TreeStack(gradients, count, lambda: backend.zeros((arena.size,), backend.dtype), add)
        self.views = [arena.views(flat) for flat in self.stack.buffers]

    def begin(self):
        """Called before the passes of a step."""
        self.passes = dict.fromkeys(self.arena.units, 0)  # that have completed each unit

    def destination(self, unit, name):
        """Where the present pass puts the gradient of a parameter of this unit."""
        index, adds = self.stack.place(self.passes[unit])
        return Destination(self.views[index][name], adds)

    def point(self, unit):
        """Let the tensors of a unit receive their gradients of the present pass in destination()."""
        for name in self.arena.units[unit]:
            tensor, (array, adds) = self.tensors[name], self.destination(unit, name)
            tensor.buffer, tensor.grad = array, array if adds else None

    def complete(self, unit):
        """Add the partial sums of a unit after a pass; return whether this was the last pass."""
        number = self.passes[unit]
        self.passes[unit] += 1
        return self.stack.add_sums(number, self.arena.unit_slice(unit))


class TreeStack:
    """The sum of `count` arrays in the canonical order, with log2(count) buffers, rounded up, instead of `count`.

    The caller computes array 0, 1, ... With (i, adds) = place(number), it writes the array to buffers[i], or adds it to
    the contents of buffers[i] if `adds`. Then it calls add_sums(number), once for the whole array or once for each of
    its slices. total: a flat array. It is buffers[0], and has the sum in the end. allocate() returns another array like
    it. add(a, b): a += b.
    """

    def __init__(self, total, count, allocate, add):
        self.count, self.add = count, add
        self.buffers = [total, *(allocate() for _ in range((count - 1).bit_length() - 1))]

    def place(self, number):
        """(index of the buffer for array `number`, whether the array is added to what is there)."""
        odd = number % 2  # then its left neighbour is on top of the stack
        return number.bit_count() - odd, bool(odd)

    def add_sums(self, number, part=slice(None)):
        """Add the partial sums after array `number`, in the slice `part`; return whether this completes the sum."""
        (top, added), last = self.place(number), number == self.count - 1
        for _ in range(additions(number, last) - added):
            top -= 1
            self.add(self.buffers[top][part], self.buffers[top + 1][part])
        return last
