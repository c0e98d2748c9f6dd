"""The differentiable operations of a rank that has several slices of each layer: see sliced_units.py.

A slice is computed as if it was that of a rank. These operations add the slices of all ranks: the canonical tree
(tree_sum.py) first adds the slices of a rank, and then the sums of the ranks.
"""

# V vocabulary, C channels, N rows, S slices of all ranks

from gpt2core import checks
from gpt2core.communicator import Solo
from gpt2core.tensor import Tensor
from gpt2core.tree_sum import tree_reduce
from gpt2core.vocabulary import Vocabulary


class Slice(Solo):
    """Number `rank` of the `size` slices of a layer. The unit that computes it has it in the place of its group.

    Its collectives return their input, as those of Solo do: the caller adds the slices.
    """

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def own_parts(group, count):
    """[the Slice of each of the `count` slices of this rank]; group: the ranks that divide each layer."""
    return [Slice(group.rank * count + i, group.size * count) for i in range(count)]


def copies(x, count, group):
    """`count` tensors with the array of x. Backward: the gradients of those of all ranks, added: sum_of_slices()."""
    backend = x.backend
    return Tensor.from_op((x.data,) * count, (x,), lambda *dys: (sum_of_slices(dys, group, backend),))


def total(parts, group):
    """Forward: sum_of_slices() of the tensors of this rank's slices. Backward: the gradient, for each of them."""
    y, count = sum_of_slices([part.data for part in parts], group, parts[0].backend), len(parts)
    return Tensor.from_op(y, parts, lambda dy: (dy,) * count)  # backward keeps no array of the parts


def sum_of_slices(arrays, group, backend):
    """The sum over the slices of all ranks of the group, in the canonical order; `arrays`: those of this rank's slices.

    Arrays of 16 bits are added, and sent, in float32. The sum is rounded once, as in an all-reduce of S ranks.
    """
    own = tree_reduce(arrays, lambda a, b: backend.xp.add(a, b, dtype=backend.dtype))
    return group.all_reduce(own).astype(arrays[0].dtype, copy=False)


def sliced_cross_entropy(xs, ws, targets, scale, vocabulary, gradient):
    """ops.unembed_cross_entropy of a rank with several slices of the vocabulary.

    ws: their matrices (V/S, C). xs: for each of them a tensor (..., C) with the same values: see copies(). vocabulary:
    that of the rank, a Vocabulary. gradient: see ForwardArguments.
    """
    backend, rows = xs[0].backend, targets.reshape(-1)
    scale = 1 / targets.size if scale is None else scale
    group, statistics, slices = vocabulary.group, [], []
    for x, w, part in zip(xs, ws, own_parts(group, len(ws)), strict=True):
        own = Vocabulary(vocabulary.size, part)
        checks.unembed_cross_entropy(x, w, targets, own)
        *each, aux = backend.unembed_cross_entropy_forward(x.data, w.data, rows, own.first, gradient)
        statistics.append(each)
        slices.append((x.data, w, aux, own.first))
    loss, maxima, sums = loss_of_slices(statistics, scale, group, backend)

    def backward(dy):
        gradients = []
        for x, w, aux, first in slices:
            gradients += backend.unembed_cross_entropy_backward(dy, x, w.data, rows, scale, maxima, sums, aux, first)
        return gradients

    return Tensor.from_op(loss, [tensor for pair in zip(xs, ws, strict=True) for tensor in pair], backward)


def loss_of_slices(statistics, scale, group, backend):
    """ops.loss_of_rows; statistics: for each slice of this rank [maxima, sums, target_logits], arrays (N)."""
    row_maxima = group.all_reduce(tree_reduce([maxima for maxima, _, _ in statistics], backend.xp.maximum), "max")
    rescaled = tree_reduce([backend.loss_rows(*each, row_maxima) for each in statistics], backend.add)
    sums, target_logits = group.all_reduce(rescaled)
    return backend.loss(row_maxima, sums, target_logits, scale), row_maxima, sums
