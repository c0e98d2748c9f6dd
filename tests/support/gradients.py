"""Graphs in which leaves occur in every way, and the gradients of their leaves; gradients of kernels as arrays."""

# B batch, T time, C channels, H heads, V vocabulary

import functools
import gc
import weakref

import numpy as np

from gpt2core import ops, primitives
from gpt2core.architecture import GPT2Config, parameter_shapes
from gpt2core.model import GPT2
from gpt2core.parallel.parameter import Parameter, call, deliver
from gpt2core.parallel.part import mark, mark_stream
from gpt2core.stream import Branch, Stream
from gpt2core.tensor import Tensor

B, T, C, H, V = 4, 9, 16, 2, 20  # more rows than one program of a sum adds on the GPU
SHAPES = dict(
    x=(B, T, C), w=(C, C), w2=(C, C), scale=(C,), bias=(C,), wte=(V, C), wpe=(T + 2, C), wpe2=(T + 2, C),
    qkv=(B, T, 3 * C), table=(T, C),
)  # fmt: skip


def arrays(*gradients):
    """The gradients that a backward kernel returned as arrays: functions are called without a destination."""
    return tuple(gradient(None) if callable(gradient) else gradient for gradient in gradients)


class Leaves:
    """Leaves with fixed values by name, in float32 precision; `buffered`: each has a buffer of NaN."""

    def __init__(self, backend, buffered=False):
        rng = np.random.default_rng(5)
        self.ids, self.targets = rng.integers(0, V, (2, B, T))
        for name, shape in SHAPES.items():
            value = rng.standard_normal(shape).astype(np.float32)
            leaf = Parameter(backend.asarray(value.astype(backend.dtype)), backend)
            if buffered:
                leaf.send_to(backend.asarray(np.full(shape, np.nan, backend.dtype)))
            setattr(self, name, leaf)
        self.fixed_x, self.fixed_wte = (Tensor(leaf.data, backend) for leaf in (self.x, self.wte))

    def head(self, y):
        return ops.unembed_cross_entropy(y, self.wte, self.targets)

    def logits_loss(self, y):
        return ops.cross_entropy(ops.unembed(y, self.wte), self.targets)

    def embedding(self, wpe):
        return ops.embedding(self.ids, self.wte, wpe, position=1)

    def norms(self, x, w, b, count):
        for _ in range(count):
            x = ops.layernorm(x, w, b)
        return x


def stream(a, last):
    """A stream after two branches whose weights, biases and norms are shared; `last` reads the stream after them."""
    x = Stream(a.x)
    for _ in range(2):
        x, y = x.layernorm(a.scale, a.bias, 1e-5)
        x = mark_stream(x, lambda: None) + Branch(ops.linear(y, a.w), a.bias)
    return last(x)


# {graph: function of Leaves -> its roots}. backward() is called for one root after another; if the roots are a
# generator, the graph of a root is made after backward() of the root before it.
GRAPHS = {
    "a linear": lambda a: [ops.linear(a.x, a.w, a.bias)],
    "a linear without a bias": lambda a: [ops.linear(a.x, a.w)],
    "one weight in two linears": lambda a: [ops.linear(ops.linear(a.x, a.w), a.w)],
    "one weight and one bias in two linears": lambda a: [
        ops.linear(a.x, a.w, a.bias) + ops.linear(a.x * 2, a.w, a.bias)
    ],
    "a linear of its weight": lambda a: [ops.linear(a.w, a.w)],
    "a linear of its bias": lambda a: [ops.linear(a.bias, a.w, a.bias)],
    "a linear and a product": lambda a: [ops.linear(a.x, a.w), a.w * a.w],
    "a product and a linear": lambda a: [(a.w * a.w).sum() + ops.linear(a.x, a.w).sum()],
    "a product": lambda a: [a.w * a.w],
    "gelu": lambda a: [ops.gelu(a.x) + ops.gelu(a.x * 2)],
    "an mlp": lambda a: [ops.mlp(a.x, a.w, a.bias, a.w2)],
    "an mlp with one weight": lambda a: [ops.mlp(a.x, a.w, a.bias, a.w)],
    "an mlp after a linear of its weight": lambda a: [ops.mlp(ops.linear(a.x, a.w, a.bias), a.w, a.bias, a.w)],
    "a layernorm": lambda a: [ops.layernorm(a.x, a.scale, a.bias)],
    "a layernorm whose scale is its bias": lambda a: [ops.layernorm(ops.linear(a.x, a.w), a.bias, a.bias)],
    "a layernorm of its scale": lambda a: [ops.layernorm(a.scale, a.scale, a.bias)],
    "three layernorms with one scale": lambda a: [a.norms(a.x, a.scale, a.bias, 3)],
    "stream_layernorm": lambda a: [sum_of(ops.stream_layernorm(a.x, a.scale, a.bias))],
    "stream_layernorm, norm only": lambda a: [ops.stream_layernorm(a.x, a.scale, a.bias)[1]],
    "stream_layernorm, sum only, then a layernorm": lambda a: [
        ops.layernorm(ops.stream_layernorm(a.x, a.scale, a.bias)[0], a.scale, a.bias)
    ],
    "residual_add": lambda a: [ops.residual_add(a.x, ops.linear(a.x, a.w), a.bias)],
    "residual_add of one tensor": lambda a: [ops.residual_add(a.x, a.x, a.bias)],
    "residual_layernorm": lambda a: [
        sum_of(ops.residual_layernorm(a.x, ops.linear(a.x, a.w), a.bias, a.scale, a.bias))
    ],
    "residual_layernorm of one tensor and one vector": lambda a: [
        sum_of(ops.residual_layernorm(a.x, a.x, a.bias, a.bias, a.bias))
    ],
    "residual_layernorm, norm only": lambda a: [ops.residual_layernorm(a.x, a.x, a.bias, a.scale, a.bias)[1]],
    "residual_layernorm, sum only": lambda a: [
        ops.residual_layernorm(ops.linear(a.x, a.w), a.x, a.bias, a.scale, a.bias)[0]
    ],
    "residual_layernorm and the weight itself": lambda a: [
        ops.residual_layernorm(ops.linear(a.x, a.w, a.bias), ops.linear(a.x, a.w), a.bias, a.bias, a.bias)[1],
        a.w * a.w,
    ],
    "a stream that a layernorm reads": lambda a: [stream(a, lambda x: x.layernorm(a.scale, a.bias, 1e-5)[1])],
    "a stream that is read as it is": lambda a: [stream(a, Stream.tensor)],
    "attention": lambda a: [ops.attention(a.qkv, H)],
    "attention of one leaf twice": lambda a: [ops.attention(a.qkv, H) + ops.attention(a.qkv * 2, H)],
    "attention of q, k and v from one weight": lambda a: [
        ops.attention(primitives.concatenate([a.x, ops.linear(a.x, a.w), ops.linear(ops.linear(a.x, a.w), a.w)], -1), H)
    ],
    "an embedding": lambda a: [a.embedding(a.wpe)],
    "two embeddings": lambda a: [a.embedding(a.wpe) + a.embedding(a.wpe2)],
    "two embeddings with one wpe": lambda a: [a.embedding(a.wpe), a.embedding(a.wpe)],
    "an embedding whose tokens are its positions": lambda a: [ops.embedding(a.ids % T, a.table, a.table)],
    "logits": lambda a: [ops.unembed(a.x, a.wte)],
    "logits of the embedding itself": lambda a: [ops.unembed(a.wte, a.wte)],
    "a loss over logits": lambda a: [a.logits_loss(a.x)],
    "a head": lambda a: [a.head(a.x)],
    "a head without a gradient of its matrix": lambda a: [ops.unembed_cross_entropy(a.x, a.fixed_wte, a.targets)],
    "a head without a gradient of its input": lambda a: [a.head(a.fixed_x)],
    "a head of the embedding's own rows": lambda a: [
        ops.unembed_cross_entropy(a.wte, a.wte, np.arange(V)[::-1].copy())
    ],
    "embedding and head": lambda a: [a.head(a.embedding(a.wpe))],
    "embedding and logits": lambda a: [a.logits_loss(a.embedding(a.wpe))],
    "two embeddings and a head": lambda a: [a.head(a.embedding(a.wpe) + a.embedding(a.wpe2))],
    "two embeddings with one wpe and a head": lambda a: [a.head(a.embedding(a.wpe) + a.embedding(a.wpe))],
    "a head, then an embedding": lambda a: [a.head(a.x) + a.embedding(a.wpe).sum()],
    "an embedding, a head, an embedding": lambda a: [
        a.head(a.embedding(a.wpe)) + a.embedding(a.wpe2).sum() + a.head(a.x)
    ],
    "two heads at the same time": lambda a: [a.head(a.x), a.head(a.x * 2)][::-1],
    "one head after another": lambda a: (a.head(y) for y in (a.x, a.x * 2)),
    "a head and a product": lambda a: [a.head(a.embedding(a.wpe)), a.wte * a.wte],
    "a leaf that is the root": lambda a: [a.w],
    "a leaf that is the root and an input": lambda a: [a.w, ops.linear(a.x, a.w), a.w],
    "a mark before a leaf": lambda a: [ops.linear(ops.linear(a.x, mark((a.w,), lambda: None)[0]), a.w)],
    "a mark on two tensors, one of them not used": lambda a: [
        ops.linear(mark((a.x, ops.linear(a.x, a.w2)), lambda: None)[0], a.w)
    ],
}


def sum_of(tensors):
    return functools.reduce(primitives.add, tensors)


def gradient_of(root):
    """A fixed gradient (numpy, float64) with which backward() of a root begins; 1 for a loss."""
    return (
        np.random.default_rng(6).standard_normal(root.shape).astype(np.float32).astype(np.float64) if root.ndim else 1.0
    )


def backward(graph, leaves, times=1, later=None):
    """Call backward() of all roots of a graph, `times` times for each."""
    for root in GRAPHS[graph](leaves):
        for left in reversed(range(times)):
            gradient = leaves.x.backend.asarray(np.asarray(gradient_of(root), root.dtype))
            root.backward(gradient, retain_graph=left > 0, deliver=deliver(call if later is None else later.append))


def gradients(graph, backend, buffered=False, times=1, deferred=False):
    """{name: the gradient on the host of each leaf that has one}. deferred: backward(deliver=...), then the functions.

    Asserts that a buffered leaf has its gradient in its buffer, and that a deferred one is not written too early.
    """
    leaves, later = Leaves(backend, buffered), [] if deferred else None
    backward(graph, leaves, times, later)
    if deferred:
        backend.runtime.join()
        for name in SHAPES:
            leaf = getattr(leaves, name)
            assert leaf.grad is None and (leaf.buffer is None or np.isnan(backend.to_host(leaf.buffer)).all()), name
        for function in later:
            function()
    backend.runtime.join()
    found = {name: getattr(leaves, name) for name in SHAPES if getattr(leaves, name).grad is not None}
    assert all(leaf.buffer is None or leaf.grad is leaf.buffer for leaf in found.values())
    return {name: np.array(backend.to_host(leaf.grad)) for name, leaf in found.items()}


def check_that_parameters_are_freed(backend, tied):
    """A model's gradients with backward(deliver=...) have the bits of backward(), after the parameters were freed."""
    config, rng = GPT2Config(V, T, 2, H, C, tied=tied), np.random.default_rng(7)
    ids, targets = rng.integers(0, V, (2, B, T))
    parameters = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in parameter_shapes(config)}
    found = []
    for later in (None, []):
        leaves = {}
        for name, value in parameters.items():
            leaf = leaves[name] = Parameter(backend.asarray(value.astype(backend.dtype)), backend)
            leaf.data = leaf.data.copy()  # an array that nothing else refers to
            leaf.send_to(backend.empty(value.shape, backend.dtype))
        GPT2(config, leaves).loss(ids, targets).backward(deliver=deliver(call if later is None else later.append))
        if later is not None:
            alive = {name: weakref.ref(leaf.data) for name, leaf in leaves.items()}
            for leaf in leaves.values():
                leaf.data = None
            gc.collect()
            assert [name for name, array in alive.items() if array() is not None] == []
            for function in later:
                function()
        backend.runtime.join()
        found.append({name: np.array(backend.to_host(leaf.grad)) for name, leaf in leaves.items()})
    for name, gradient in found[0].items():
        np.testing.assert_array_equal(found[1][name], gradient, strict=True, err_msg=name)


def value(graph, leaves):
    """The number whose gradients gradients() computes: the sum over the roots of root * gradient_of(root)."""
    return sum(float((root.numpy() * gradient_of(root)).sum()) for root in GRAPHS[graph](leaves))
