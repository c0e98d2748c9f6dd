"""A Tensor is an array that records the operation that made it. backward() applies the chain rule in reverse order.

dy is the gradient of the loss with respect to y. For y = f(x) with the Jacobian J the chain rule is dx = J' dy, where '
transposes. Each operation has a function backward(dy) that computes this product. If x is used several times, its
gradient is the sum of the results. Operations are visited in the reverse order of their creation, so dy is complete
when it is used.
"""

import itertools

from gpt2core.errors import ShapeError
from gpt2core.recording import AutogradError, is_recording, no_grad

__all__ = ["AutogradError", "ShapeError", "Tensor", "check_shape", "is_recording", "no_grad"]
_creation_order = itertools.count()


class Tensor:
    """An array, its backend, and the node that made it. A leaf is a tensor that no node made, such as a parameter.

    `data` is an array of the backend (NumPy, CuPy) of any shape and dtype. A leaf with `requires_grad` collects its
    gradients, over all its uses and all backward passes, in `grad`; set grad = None to begin again. Importing
    primitives.py defines arithmetic (+, *, ...).
    """

    __array_priority__ = 1000  # makes NumPy call the tensor's __radd__ for array + tensor

    def __init__(self, data, backend, requires_grad=False):
        self.data, self.backend, self.requires_grad = data, backend, requires_grad
        self.grad, self.node, self.index = None, None, 0  # the tensor is output number `index` of `node`

    @staticmethod
    def from_op(data, parents, backward):
        """The result of an operation on `parents`; backward(dy) returns one gradient for each of them.

        parents: tensors, or None for an argument that was not given; the first one is a tensor. data: an array, or a
        tuple of arrays. For a tuple, the result is a tuple of tensors, and backward takes one gradient for each of
        them: None for a tensor that was not used. A gradient that backward returns is an array, a function that
        computes it, or None: function(None) returns a new array (for other arguments see parallel/parameter.py).
        """
        outputs = data if isinstance(data, tuple) else (data,)
        tensors = tuple(Tensor(array, parents[0].backend) for array in outputs)
        if is_recording() and any(parent is not None and parent.requires_grad for parent in parents):
            node = Node(parents, backward, len(tensors))
            for index, tensor in enumerate(tensors):
                tensor.requires_grad, tensor.node, tensor.index = True, node, index
        return tensors if isinstance(data, tuple) else tensors[0]

    @property
    def shape(self):
        return self.data.shape

    @property
    def dtype(self):
        return self.data.dtype

    @property
    def ndim(self):
        return self.data.ndim

    def item(self):
        """The value of a tensor of one element, as a Python number."""
        return self.data.item()

    def numpy(self):
        """The data as a NumPy array on the host."""
        return self.backend.to_host(self.data)

    def detach(self, requires_grad=False):
        """A new leaf with the same array, outside the graph."""
        return Tensor(self.data, self.backend, requires_grad)

    def __repr__(self):
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, requires_grad={self.requires_grad})"

    def receive(self, gradient):
        """Add a gradient to `grad` of this leaf."""
        gradient = computed(gradient, self.shape)
        if self.grad is None:
            self.grad = gradient.copy()  # another tensor may get the same array: see primitives.add()
        else:
            self.grad += gradient

    def backward(self, gradient=None, retain_graph=False, deliver=lambda leaf, gradient: leaf.receive(gradient)):
        """Compute the gradients of all leaves of the graph that require gradients.

        gradient: this tensor's gradient, of the same shape; the default for a tensor of one element is 1. The graph is
        freed during the pass unless `retain_graph`. deliver(leaf, gradient) is called for each gradient of a leaf; by
        default leaf.receive(gradient) adds it to leaf.grad. Arrays of the graph must not be changed before backward().
        Raises AutogradError for a graph that was freed or never recorded, or if `gradient` is missing for several
        elements; ShapeError if a gradient has another shape than its tensor.
        """
        if not self.requires_grad:
            raise AutogradError(
                "backward() on a tensor that requires no gradient: made under no_grad(), or no leaf has requires_grad"
            )
        if gradient is None:
            if self.data.size != 1:
                raise AutogradError(f"backward() on shape {self.shape} needs an argument: a gradient of that shape")
            gradient = self.backend.ones(self.shape, self.dtype)
        gradient = gradient.data if isinstance(gradient, Tensor) else gradient
        if not hasattr(gradient, "shape"):
            raise ShapeError(f"backward() of shape {self.shape} needs an array of this shape, not {gradient!r:.60}")
        nodes, dys = reachable(self), {}  # dys: {(node, index of its output): the sum of its gradients so far}
        if self.node is None:
            deliver(self, gradient)
        else:
            Edge(self).receive(gradient, dys)
        while nodes:
            nodes.pop().run(dys, retain_graph, deliver)  # the newest: all operations that use its outputs have run


class Node:
    """One application of an operation: where its inputs' gradients go, and the closure that computes them."""

    __slots__ = ("order", "parents", "backward", "n_outputs")

    def __init__(self, parents, backward, n_outputs):
        self.order = next(_creation_order)  # larger than in its inputs' nodes: descending order is reverse topological
        self.parents = [
            None if parent is None or not parent.requires_grad else Edge(parent) if parent.node else parent
            for parent in parents
        ]
        self.backward, self.n_outputs = backward, n_outputs

    def run(self, dys, retain, deliver):
        """Compute the gradients of the inputs and pass them on; free the activations unless `retain`."""
        own = [dys.pop((self, index), None) for index in range(self.n_outputs)]
        if any(dy is not None for dy in own):
            pairs = zip(self.parents, self.backward(*own), strict=True)
            for parent, gradient in pairs:
                if parent is None or gradient is None:
                    continue
                if parent.node is None:
                    deliver(parent, gradient)
                else:
                    parent.receive(gradient, dys)
        if not retain:
            self.parents, self.backward = (), None


class Edge:
    """A tensor as the nodes after it know it: without its array, so that the array can be freed before the graph."""

    __slots__ = ("shape", "node", "index", "add")

    def __init__(self, tensor):
        self.shape, self.node, self.index, self.add = tensor.shape, tensor.node, tensor.index, tensor.backend.add

    def receive(self, gradient, dys):
        """Add a gradient to the one of this output in `dys`: see Tensor.backward."""
        gradient, key = computed(gradient, self.shape), (self.node, self.index)
        dys[key] = self.add(dys[key], gradient) if key in dys else gradient


def computed(gradient, shape):
    """A gradient as an array, which must have this shape."""
    gradient = gradient(None) if callable(gradient) else gradient
    check_shape(gradient, shape)
    return gradient


def check_shape(gradient, shape):
    if gradient.shape != shape:
        raise ShapeError(f"a gradient of shape {gradient.shape} reached a tensor of shape {shape}")


def reachable(root):
    """The nodes of the graph that computed `root`, oldest first."""
    found, stack = set(), [root.node] if root.node else []
    while stack:
        node = stack.pop()
        if node in found:
            continue
        if node.backward is None:
            raise AutogradError(
                "backward() through a graph that an earlier backward() freed: run the forward pass again, "
                "or keep the graph with backward(retain_graph=True)"
            )
        found.add(node)
        stack.extend(parent.node for parent in node.parents if parent is not None and parent.node is not None)
    return sorted(found, key=lambda node: node.order)
