"""The sum of the gradients of one worker's micro-batches in the canonical order, with few buffers."""

from gpt2core.tensor import Destination, Tensor
from gpt2core.tree_sum import additions


def gradient_sums(arena, parameters, gradients, backend, count):
    """What sums the gradients of `count` passes in the flat array `gradients`: (sums, views, tensors).

    sums: a TreeStack. views: for each of its buffers {name: view}, where the gradient of a pass is written or added.
    tensors: {name: Tensor} of the flat array `parameters`.
    """

    def add(a, b):
        backend.put(b, Destination(a, accumulate=True))

    sums = TreeStack(gradients, count, lambda: backend.zeros((arena.size,), backend.dtype), add)
    arrays = arena.views(parameters)
    tensors = {name: Tensor(array, backend, requires_grad=True) for name, array in arrays.items()}
    return sums, [arena.views(flat) for flat in sums.buffers], tensors


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
