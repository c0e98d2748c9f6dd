"""A Tensor is an array that records the operation that made it; backward() applies the chain rule in reverse order."""

import contextlib
import contextvars
import itertools

_recording = contextvars.ContextVar("recording", default=True)  # no_grad() affects only its thread
_creation_order = itertools.count()


class AutogradError(RuntimeError):
    """The graph cannot be differentiated as requested, for example because it was freed or never recorded."""


class ShapeError(ValueError):
    """Shapes that do not fit together; the message names them."""


@contextlib.contextmanager
def no_grad():
    """Disable recording: `with no_grad(): ...`, or `@no_grad()` on a function."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


def is_recording():
    """Whether operations are recorded in this thread; if not, a kernel may skip what only backward needs."""
    return _recording.get()


class Edge:
    """An input of a node that another node computed, stored without its array: only closures keep arrays alive."""

    __slots__ = ("shape", "requires_grad", "node", "index")
    grad_buffer = None  # only leaves have one

    def __init__(self, tensor):
        self.shape, self.requires_grad = tensor.shape, tensor.requires_grad
        self.node, self.index = tensor.node, tensor.index


class Node:
    """One application of an operation: its inputs, and the closure that computes their gradients."""

    __slots__ = ("order", "parents", "backward", "n_outputs")

    def __init__(self, parents, backward, n_outputs):
        self.order = next(_creation_order)  # parents have smaller numbers, so descending order is reverse topological
        self.parents = [parent if parent.node is None else Edge(parent) for parent in parents]
        self.backward, self.n_outputs = backward, n_outputs

    def free(self):
        """Drop the closure and the activations that it holds; backward() frees each node after its use."""
        self.parents, self.backward = (), None


class Tensor:
    """An array, its backend, and the node that made it (None for a leaf).

    `data` is an array of the backend (NumPy, CuPy) of any shape and dtype. A leaf with `requires_grad` collects its
    gradient, an array of the same shape, in `grad`. Importing primitives.py defines arithmetic (+, *, ...).

    grad_buffer: for a leaf, an array to which backward kernels write its gradient (see ops.buffers), or None. With a
    buffer, the gradient returned last is complete: the kernel of a second operation on the leaf adds to the buffer.
    """

    __array_priority__ = 1000  # makes NumPy call the tensor's __radd__ for array + tensor

    def __init__(self, data, backend, requires_grad=False):
        self.data, self.backend, self.requires_grad = data, backend, requires_grad
        self.grad, self.node, self.index, self.grad_buffer = None, None, 0, None

    @classmethod
    def from_op(cls, data, parents, backward):
        """The result of an operation: `backward(dy)` returns one gradient (or None) for each parent.

        A tuple of arrays gives a tuple of tensors; backward then takes one gradient for each of them, None for an
        output that was not used.
        """
        outputs = data if isinstance(data, tuple) else (data,)
        tensors = tuple(cls(array, parents[0].backend) for array in outputs)
        if _recording.get() and any(parent.requires_grad for parent in parents):
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
        """The same array as a new leaf, outside the graph."""
        return Tensor(self.data, self.backend, requires_grad)

    def __repr__(self):
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, requires_grad={self.requires_grad})"

    def on_gradient(self, gradient):
        """Called once per backward pass (recompute() starts nested passes) when the gradient of this leaf is complete.

        The default adds it to `grad`. To sum in another order, or to communicate during the rest of backward, assign
        another function of one array to this attribute of the leaf. Copy the array, because backward() may reuse it.
        """
        if self.grad is None:
            self.grad = gradient.copy()  # primitives.add() returns the same array for both parents
        else:
            self.grad += gradient

    def backward(self, gradient=None, retain_graph=False):
        """Compute the gradients of all leaves that require them.

        gradient: of this tensor, in its shape; by default 1 for a tensor of one element. The graph is freed during the
        pass unless `retain_graph`. Raises AutogradError for a graph that was freed or never recorded, and for a tensor
        of several elements without `gradient`; ShapeError if a gradient and its tensor differ in shape.
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
        nodes, uses = reachable(self)
        arrived = {}  # node or leaf -> the gradients of its outputs, summed so far

        def deliver(tensor, gradient):
            if gradient is not None:
                if gradient.shape != tensor.shape:
                    raise ShapeError(f"a gradient of shape {gradient.shape} reached a tensor of shape {tensor.shape}")
                outputs = tensor.node.n_outputs if tensor.node else 1
                slots = arrived.setdefault(tensor.node or tensor, [None] * outputs)
                held = slots[tensor.index]
                if held is not None and tensor.grad_buffer is None:
                    gradient = self.backend.add(held, gradient)
                slots[tensor.index] = gradient
            if tensor.node is None:
                uses[tensor] -= 1
                if uses[tensor] == 0 and tensor in arrived:
                    tensor.on_gradient(arrived.pop(tensor)[0])

        deliver(self, gradient)
        while nodes:
            node = nodes.pop()
            gradients = arrived.pop(node, None)
            if gradients is None:  # no gradient reached this node
                parent_gradients = (None,) * len(node.parents)
            else:
                parent_gradients = node.backward(*gradients)
            for parent, gradient in zip(node.parents, parent_gradients, strict=True):
                if parent.requires_grad:
                    deliver(parent, gradient)
            del gradients, parent_gradients
            parent = gradient = None  # otherwise these names keep the last of them alive
            if not retain_graph:
                node.free()


def reachable(root):
    """The graph that computed `root`: (nodes, oldest first; {leaf: number of uses})."""
    nodes, uses, stack = set(), {}, [root]
    while stack:
        tensor = stack.pop()
        node = tensor.node
        if node is None:
            uses[tensor] = uses.get(tensor, 0) + 1
        elif node not in nodes:
            if node.backward is None:
                raise AutogradError(
                    "backward() through a graph that an earlier backward() freed: run the forward pass again, "
                    "or keep the graph with backward(retain_graph=True)"
                )
            nodes.add(node)
            stack.extend(parent for parent in node.parents if parent.requires_grad)
    return sorted(nodes, key=lambda node: node.order), uses
