"""A Tensor is an array that records the operation that made it. backward() applies the chain rule in reverse order."""

import contextlib
import contextvars
import itertools
from collections import Counter

_recording = contextvars.ContextVar("recording", default=True)  # a context variable: each thread has its own value
_creation_order = itertools.count()


class AutogradError(RuntimeError):
    """The gradients cannot be computed, for example because the graph was freed or never recorded."""


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
    """Whether operations are recorded in this thread. If not, kernels need not save data for backward."""
    return _recording.get()


class Edge:
    """A reference to a tensor that a node made, without its array. The closure Node.backward may keep the array."""

    __slots__ = ("shape", "requires_grad", "node", "index")  # the tensor is output number `index` of `node`
    grad_buffer = None  # only a leaf may have a buffer

    def __init__(self, tensor):
        self.shape, self.requires_grad = tensor.shape, tensor.requires_grad
        self.node, self.index = tensor.node, tensor.index


class Node:
    """One application of an operation: its inputs, and the closure that computes their gradients."""

    __slots__ = ("order", "parents", "backward", "n_outputs")

    def __init__(self, parents, backward, n_outputs):
        self.order = next(_creation_order)  # larger than in its inputs' nodes: descending order is reverse topological
        self.parents = [parent if parent.node is None else Edge(parent) for parent in parents]
        self.backward, self.n_outputs = backward, n_outputs

    def free(self):
        """Drop the closure and the activations that it holds; backward() frees each node after its use."""
        self.parents, self.backward = (), None


class Tensor:
    """An array, its backend, and the node that made it. A leaf is a tensor that no node made, such as a parameter.

    `data` is an array of the backend (NumPy, CuPy) of any shape and dtype. A leaf with `requires_grad` collects its
    gradient, an array of the same shape, in `grad`. Importing primitives.py defines arithmetic (+, *, ...).

    grad_buffer: an array to which backward kernels write the gradient of a leaf (see destination), or None. If two
    operations use the leaf, the second kernel must add to the buffer; backward() does not add the two results again.
    """

    __array_priority__ = 1000  # makes NumPy call the tensor's __radd__ for array + tensor

    def __init__(self, data, backend, requires_grad=False):
        self.data, self.backend, self.requires_grad = data, backend, requires_grad
        self.grad, self.node, self.index, self.grad_buffer = None, None, 0, None
        self.in_buffer = ()  # the writers of the gradients whose sum is in grad_buffer, until on_gradient() gets it

    @classmethod
    def from_op(cls, data, parents, backward):
        """The result of an operation on `parents`; backward(dy) returns one gradient (or None) for each parent.

        data: an array, or a tuple of arrays. For a tuple, the result is a tuple of tensors, and backward takes one
        gradient for each of them: None for a tensor that was not used.
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
        """A new leaf with the same array, outside the graph."""
        return Tensor(self.data, self.backend, requires_grad)

    def __repr__(self):
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, requires_grad={self.requires_grad})"

    def destination(self, adds=False, writer=None):
        """grad_buffer of a leaf, to which a kernel now writes a gradient or, if `adds`, adds one to those in it."""
        if self.grad_buffer is not None:
            if adds and not self.in_buffer:
                raise AutogradError(
                    "a kernel would add to a grad_buffer to which no other kernel has written a gradient"
                )
            self.in_buffer = (*self.in_buffer, writer) if adds else (writer,)
        return self.grad_buffer

    def on_gradient(self, gradient):
        """Called once in each backward pass, when it has computed the whole gradient of this leaf.

        This default adds the gradient to `grad`. To add in another order, or to send gradients during the rest of
        backward, assign another function to `leaf.on_gradient`. It must copy the array: backward() may overwrite it.
        """
        if self.grad is None:
            self.grad = gradient.copy()  # another tensor may get the same array: see primitives.add()
        else:
            self.grad += gradient

    def backward(self, gradient=None, retain_graph=False):
        """Compute the gradients of all leaves of the graph that require gradients.

        gradient: this tensor's gradient, of the same shape; the default for a tensor of one element is 1. The graph is
        freed during the pass unless `retain_graph`. Raises AutogradError for a graph that was freed or never recorded,
        or if `gradient` is missing for several elements, or for a leaf whose grad_buffer does not contain the sum of
        its gradients; ShapeError if a gradient has another shape than its tensor.
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
        nodes, uses_left = reachable(self)
        sums = {}  # {node or leaf: for each of its outputs the sum of the gradients so far, or None}
        received = Counter()  # {leaf: number of its gradients so far}

        def add_gradient(tensor, gradient):
            if gradient is not None:
                if gradient.shape != tensor.shape:
                    raise ShapeError(f"a gradient of shape {gradient.shape} reached a tensor of shape {tensor.shape}")
                n_outputs = tensor.node.n_outputs if tensor.node else 1
                output_sums = sums.setdefault(tensor.node or tensor, [None] * n_outputs)
                previous = output_sums[tensor.index]
                if previous is not None and tensor.grad_buffer is None:
                    gradient = self.backend.add(previous, gradient)
                output_sums[tensor.index] = gradient
            if tensor.node is None:
                uses_left[tensor] -= 1
                received[tensor] += gradient is not None
                if uses_left[tensor] == 0 and tensor in sums:
                    if tensor.grad_buffer is not None and len(tensor.in_buffer) != received[tensor]:
                        raise AutogradError(
                            f"the grad_buffer of a leaf {tensor.shape} contains {len(tensor.in_buffer)} of its "
                            f"{received[tensor]} gradients: use the leaf once, by a kernel, or without a grad_buffer"
                        )
                    tensor.in_buffer = ()
                    tensor.on_gradient(sums.pop(tensor)[0])

        add_gradient(self, gradient)
        while nodes:
            node = nodes.pop()  # the newest: all operations that use its outputs have been processed
            gradients = sums.pop(node, None)
            if gradients is None:  # no gradient reached this node
                parent_gradients = (None,) * len(node.parents)
            else:
                parent_gradients = node.backward(*gradients)
            for parent, gradient in zip(node.parents, parent_gradients, strict=True):
                if parent.requires_grad:
                    add_gradient(parent, gradient)
            gradients = parent_gradients = parent = gradient = None  # otherwise these names keep arrays in memory
            if not retain_graph:
                node.free()


def reachable(root):
    """The graph that computed `root`: (list of nodes, oldest first; {leaf: number of its uses in the graph})."""
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
