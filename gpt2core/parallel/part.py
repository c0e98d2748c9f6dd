"""A part of a model: consecutive units that are computed as one graph, from an array to an array.

The units of a model are the embedding, each block, and the head. By default, the whole model is one part. A model that
is divided into several parts has the same bits (docs/LIMITS.md has one exception): between two parts there is only the
array of the residual stream, and its gradient.
"""

import functools

from gpt2core.forward_arguments import FIRST_TOKENS
from gpt2core.parallel.parameter import call, deliver
from gpt2core.stream import Branch, Stream
from gpt2core.tensor import Tensor


def nothing(name):
    """The default of the hooks of a Part."""


class Part:
    """Consecutive units, a slice of GPT2.units.

    before(name) is called before the forward pass of a unit, also of one that is computed again. Before the backward
    pass of a part, before_backward(name) is called for each of its units, the last one first. completed(name) is called
    in backward when all gradients of a unit are computed. `name`: that of the unit, such as "h.0".
    """

    def __init__(self, units, backend, before=nothing, before_backward=nothing, completed=nothing):
        self.units, self.backend, self.before, self.completed = units, backend, before, completed
        self.before_backward = before_backward

    def forward(self, x, arguments=FIRST_TOKENS):
        """x -> the Graph of one micro-batch, or of merged ones. A part can have several graphs at the same time.

        x: token ids (B, T) if the first unit is the embedding, otherwise the array (B, T, C) of the residual stream
        that enters. arguments: ForwardArguments.
        """
        graph, first = Graph(self), self.units[0]
        # A list, because a unit frees its input as soon as it has computed the sum: pop() leaves no reference here.
        xs = [x if first.name == "embedding" else Stream(boundary(x, self.backend, graph.keep_gradient))]
        for unit in self.units:
            self.before(unit.name)
            if unit is not first:
                xs.append(mark_stream(xs.pop(), functools.partial(graph.report, unit.name)))
            xs.append(unit.__call__(xs.pop(), arguments))  # unit(...) would keep a reference until it returns
        y = xs.pop()
        graph.y = y.tensor() if isinstance(y, Stream) else y
        return graph

    def skip(self):
        """Call the hooks of forward() for an empty micro-batch: other ranks may gather parameters there."""
        for unit in self.units:
            self.before(unit.name)


class Graph:
    """What Part.forward() has recorded. y: the Tensor (B, T, C) of the stream that leaves, or the loss, of shape ()."""

    def __init__(self, part):
        self.part, self.y, self.dx, self.when = part, None, None, call

    def backward(self, dy, when=call):
        """dy, the gradient of y -> the gradient of x; None for token ids.

        when(function) is called for each gradient of a parameter, with the function that adds it (parameter.deliver),
        and for each unit after its gradients, with the function that reports that they are complete.
        """
        self.when = when
        for unit in reversed(self.part.units):
            self.part.before_backward(unit.name)
        y, self.y = self.y, None  # the graph is freed while backward runs
        if y.requires_grad:  # false for an embedding whose only table is a copy: see TiedTable
            y.backward(dy, deliver=deliver(when))
        self.report(self.part.units[0].name)
        return self.dx

    def report(self, unit):
        """All gradients of the unit are computed, or were given to `when`."""
        self.when(functools.partial(self.part.completed, unit))

    def keep_gradient(self, dx):
        self.dx = dx


class RecomputedPart(Part):
    """A part that keeps only its input; backward computes its forward pass again (Chen et al. 2016).

    The first forward pass records too: without recording, a backend may use other kernels, with other last bits.
    """

    def forward(self, *inputs):
        return RecomputedGraph(super().forward, inputs, self.backend.runtime.join)


class RecomputedGraph:
    """A Graph without its activations. y: a Tensor with the same array as that of the Graph.

    join: Runtime.join. After it, a GPU needs no activation of the block above any more, so backward reuses its memory.
    """

    def __init__(self, forward, inputs, join):
        self.forward, self.inputs, self.join = forward, inputs, join
        graph = forward(*inputs)
        self.y, graph.y = graph.y.detach(), None  # otherwise the graph refers to itself, and is not freed here

    def backward(self, dy, when=call):
        """See Graph.backward."""
        self.y = None
        self.join()
        return self.forward(*self.inputs).backward(dy, when)


def parts_of(units, backend, recompute="none", separate=False, **hooks):
    """The parts of these consecutive units of a model. hooks: the last three arguments of Part.

    recompute: "none": one part. "block": each of the recomputed_units() is a RecomputedPart. separate: whether each
    unit is a part of its own in any case.
    """
    again, parts, rest = recomputed_units([unit.name for unit in units], recompute), [], []
    for unit in units:
        if unit.name in again:
            parts.append(RecomputedPart([unit], backend, **hooks))
        elif separate or (recompute == "block" and unit.name == "embedding"):
            parts.append(Part([unit], backend, **hooks))
        else:
            rest.append(unit)
    return [*parts, Part(rest, backend, **hooks)] if rest else parts


def recomputed_units(names, recompute):
    """Those of the names of consecutive units that backward computes again: the blocks, except the one before the head.

    The activations of that block are needed right after its forward pass, so it is one part with the head.
    """
    if recompute == "none":
        return []
    kept = names[:-2] if names[-1] == "head" else names
    return [name for name in kept if name != "embedding"]


def forward_pass(parts, x, arguments):
    """([the Graph of each of these consecutive parts], the array of the last one). Arguments: those of Part.forward."""
    graphs = []
    for part in parts:
        graphs.append(part.forward(x, arguments))
        x = graphs[-1].y.data
    return graphs, x


def backward_pass(graphs, dy):
    """The gradient of the first graph's input, from that of the last graph's output; frees each graph after its use."""
    while graphs:
        dy = graphs.pop().backward(dy)
    return dy


def mark(tensors, function):
    """The same tensors; backward calls function() when it has computed the gradients of everything after the mark.

    Operations run backward in the reverse order of their creation, so all operations that were made after the mark have
    run then.
    """

    def backward(*gradients):
        function()
        return gradients

    return Tensor.from_op(tuple(tensor.data for tensor in tensors), tensors, backward)


def mark_stream(x, function):
    """The same Stream; backward calls function() when everything after this point is done."""
    if x.branch is None:
        return Stream(*mark((x.x,), function))
    stream, output = mark((x.x, x.branch.output), function)
    return Stream(stream, Branch(output, x.branch.bias))


def boundary(array, backend, function):
    """A tensor with this array, which another graph has computed; backward calls function(its gradient)."""

    def backward(gradient):
        function(gradient)
        return (None,)

    return Tensor.from_op(array, (Tensor(array, backend, requires_grad=True),), backward)
