"""A Tensor is an array that records the operation that made it. backward() applies the chain rule in reverse order.

dy is the gradient of the loss with respect to y. For y = f(x) the chain rule is dx = (dy/dx)' dy, where ' transposes.
Each operation has a function backward(dy) that computes this product. If x is used several times, its gradient is the
sum of the results. Operations are visited in the reverse order of their creation, so dy is complete when it is used.
At first reading, a gradient is an array, and `when` is `call`: the other cases make a device faster (see Destination).
"""

import contextlib
import contextvars
import functools
import itertools
from typing import NamedTuple

_recording = contextvars.ContextVar("recording", default=True)  # a context variable: each thread has its own value
_creation_order = itertools.count()


class AutogradError(RuntimeError):
    """The gradients cannot be computed, for example because the graph was freed or never recorded."""


class ShapeError(ValueError):
    """Shapes that do not fit together; the message names them."""


def call(function):
    function()


class Tensor:
    """An array, its backend, and the node that made it. A leaf is a tensor that no node made, such as a parameter.

    `data` is an array of the backend (NumPy, CuPy) of any shape and dtype. A leaf with `requires_grad` collects its
    gradients, over all its uses and all backward passes, in `grad`; set grad = None to begin again. buffer: the array
    in which `grad` is kept, or None for a new array. Importing primitives.py defines arithmetic (+, *, ...).
    """

    __array_priority__ = 1000  # makes NumPy call the tensor's __radd__ for array + tensor

    def __init__(self, data, backend, requires_grad=False):
        self.data, self.backend, self.requires_grad = data, backend, requires_grad
        self.grad, self.buffer, self.node, self.index = None, None, None, 0

    @classmethod
    def from_op(cls, data, parents, backward, report=None):
        """The result of an operation on `parents`; backward(dy) returns one gradient (or None) for each parent.

        data: an array, or a tuple of arrays. For a tuple, the result is a tuple of tensors, and backward takes one
        gradient for each of them: None for a tensor that was not used. A gradient is an array, or a function of a
        Destination or None that computes it there or in a new array, and returns that array. Such functions of leaves
        are called first; they may also be called after the whole pass: see backward(). report: see Node.
        """
        outputs = data if isinstance(data, tuple) else (data,)
        tensors = tuple(cls(array, parents[0].backend) for array in outputs)
        if _recording.get() and any(parent.requires_grad for parent in parents):
            node = Node(parents, backward, len(tensors), report)
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

    def receiver(self):
        """The object whose receive() takes the gradients of this tensor; None if it requires none."""
        return None if not self.requires_grad else self if self.node is None else Edge(self)

    def destination(self):
        """The Destination of the next gradient of this leaf; None: a new array."""
        if self.buffer is None or not (self.grad is None or self.grad is self.buffer):
            return None
        return Destination(self.buffer, accumulate=self.grad is not None)

    def receive(self, gradient):
        """Add a gradient, an array or a function of its destination, to `grad` of this leaf."""
        out = self.destination()
        if callable(gradient):
            gradient = gradient(out)
            if out is not None and gradient is out.array:  # the function has put it there
                self.grad = out.array
                return
        check_shape(gradient, self.shape if out is None else out.array.shape)
        if out is not None:
            self.backend.put(gradient, out)
            self.grad = out.array
        elif self.grad is not None:
            self.grad += gradient
        else:
            self.grad = gradient.copy()  # another tensor may get the same array: see primitives.add()

    def backward(self, gradient=None, retain_graph=False, when=call):
        """Compute the gradients of all leaves of the graph that require gradients.

        gradient: this tensor's gradient, of the same shape; the default for a tensor of one element is 1. The graph is
        freed during the pass unless `retain_graph`. when(function) is called for each leaf that receives a gradient: by
        default it calls the function, which computes the gradient, if that is a function, and adds it to the leaf. With
        when=list.append of a list, calling the functions of the list in order completes the pass. The contents of
        gradients in a `buffer` are complete after backend.runtime.join(). Arrays of the graph must not be changed
        before backward(). Raises AutogradError for a graph that was freed or never recorded, or if `gradient` is
        missing for several elements; ShapeError if a gradient has another shape than its tensor.
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
        nodes = reachable(self)
        pass_on(gradient, self.receiver(), when)
        while nodes:
            nodes.pop().run(retain_graph, when)  # the newest: all operations that use its outputs have run


class Node:
    """One application of an operation: where its inputs' gradients go, and the closure that computes them.

    report: a function that is called when backward has come to this node, or None (parallel/part.py: mark).
    """

    __slots__ = ("order", "parents", "backward", "dys", "report")

    def __init__(self, parents, backward, n_outputs, report):
        self.order = next(_creation_order)  # larger than in its inputs' nodes: descending order is reverse topological
        self.parents = [parent.receiver() for parent in parents]
        self.backward, self.report = backward, report
        self.dys = [None] * n_outputs  # the gradients of the outputs, summed so far

    def run(self, retain, when):
        """Compute the gradients of the inputs and pass them on; free the activations unless `retain`."""
        dys, self.dys = self.dys, [None] * len(self.dys)
        if any(dy is not None for dy in dys):
            pairs = zip(self.parents, self.backward(*dys), strict=True)
            pairs = [(parent, gradient) for parent, gradient in pairs if not (parent is None or gradient is None)]
            # Leaves first: a device can compute their gradients while it computes those that the next node needs.
            for parent, gradient in sorted(pairs, key=lambda pair: pair[0].node is not None):
                pass_on(gradient, parent, when)
            if self.report:
                when(self.report)
        if not retain:
            self.parents, self.backward = (), None


class Edge:
    """A tensor as the nodes after it know it: without its array, so that the array can be freed before the graph."""

    __slots__ = ("shape", "node", "index", "add")  # the tensor is output number `index` of `node`

    def __init__(self, tensor):
        self.shape, self.node, self.index, self.add = tensor.shape, tensor.node, tensor.index, tensor.backend.add

    def receive(self, gradient):
        gradient = gradient(None) if callable(gradient) else gradient
        check_shape(gradient, self.shape)
        dys, i = self.node.dys, self.index
        dys[i] = gradient if dys[i] is None else self.add(dys[i], gradient)


class Destination(NamedTuple):
    """Where the gradient of a parameter belongs: it is written to `array`, or added to it if `accumulate`.

    A fast backend computes a gradient where it belongs, in a flat buffer, so it returns a function of a Destination.
    PlainBackend returns arrays.
    """

    array: object
    accumulate: bool


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
        node.dys = [None] * len(node.dys)  # an earlier pass may have failed before it used them
        stack.extend(parent.node for parent in node.parents if parent is not None and parent.node is not None)
    return sorted(found, key=lambda node: node.order)


def pass_on(gradient, receiver, when):
    """Add a gradient to a receiver. If that is a leaf, `when` decides when the function is called that does it."""
    add = functools.partial(receiver.receive, gradient)
    when(add) if receiver.node is None else add()


def check_shape(gradient, shape):
    if gradient.shape != shape:
        raise ShapeError(f"a gradient of shape {gradient.shape} reached a tensor of shape {shape}")


@contextlib.contextmanager
def no_grad():
    """Disable recording: `with no_grad(): ...`, or `@no_grad()` on a function."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording():
    """Whether operations are recorded in this thread. If not, kernels need not save data for backward."""
    return _recording.get()
