"""Any graph has the right gradients, in buffers, in new arrays and computed later; kernels use their destinations."""

# B batch, T time, C channels, K columns, V vocabulary, N = B*T rows, M micro-batches

import functools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core import ops, primitives  # noqa: F401 - primitives defines +, *, sum
from gpt2core.communicator import SOLO
from gpt2core.kernel_arguments import HeadGradient
from gpt2core.ops import copy_to_group
from gpt2core.parallel.parameter import Destination, Parameter, call, deliver
from gpt2core.plain_backend import PlainBackend
from gpt2core.tensor import ShapeError, Tensor, no_grad
from gpt2core.tree_sum import tree_sum
from stage0_serial import vocabulary
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.gradients import (
    GRAPHS,
    SHAPES,
    B,
    C,
    Leaves,
    T,
    V,
    arrays,
    check_that_parameters_are_freed,
    gradients,
    value,
)

pytestmark = pytest.mark.fast

K = 12
BACKENDS = [(cls, precision) for cls in (NumpyBackend, PlainBackend) for precision in ("fp32", "fp64")]
# relative to the largest element, or to 1 where the terms of a sum cancel: a few roundings of 6e-8 or 1e-16
TOLERANCE = {np.dtype(np.float32): 2e-5, np.dtype(np.float64): 1e-13}


@pytest.fixture(params=BACKENDS, ids=lambda pair: f"{pair[0].name}-{pair[1]}")
def backend(request):
    cls, precision = request.param
    return cls(precision)


@pytest.fixture(params=["fp32", "fp64"])
def numpy_backend(request):
    return NumpyBackend(request.param)


@functools.cache
def float64_gradients(graph):
    return gradients(graph, NumpyBackend("fp64"))


def near(got, want, times=1):
    """The gradients are near `times` the wanted ones; no NaN is."""
    assert got.keys() == want.keys()
    for name, gradient in got.items():
        error = np.abs(gradient - times * want[name]).max()
        assert error <= TOLERANCE[gradient.dtype] * times * max(1, np.abs(want[name]).max()), name


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [NumpyBackend, PlainBackend], ids=lambda cls: cls.name)
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_gradients_of_a_graph_are_its_finite_differences(rng, graph, cls):
    backend = cls("fp64")
    got = gradients(graph, backend)
    for name, shape in SHAPES.items():
        direction, values = rng.standard_normal(shape), []  # a random direction shows an error of any element
        for step in (1e-6, -1e-6):
            leaves = Leaves(backend)
            leaf = getattr(leaves, name)
            leaf.data = leaf.data + step * direction
            with no_grad():
                values.append(value(graph, leaves))
        want = (values[0] - values[1]) / 2e-6
        found = float((got[name] * direction).sum()) if name in got else 0.0
        # the differences have errors of 1e-16 / 1e-6 of the value, and of 1e-12 times third derivatives
        assert found == pytest.approx(want, rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("buffered", [False, True], ids=["new arrays", "buffers"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_has_the_right_gradients(backend, graph, buffered):
    near(gradients(graph, backend, buffered), float64_gradients(graph))


@pytest.mark.parametrize("buffered", [False, True], ids=["new arrays", "buffers"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_kept_graph_gives_its_gradients_twice(backend, graph, buffered):
    near(gradients(graph, backend, buffered, times=2), float64_gradients(graph), times=2)


@pytest.mark.parametrize("buffered", [False, True], ids=["new arrays", "buffers"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_gradients_that_are_computed_later_have_equal_bits(backend, graph, buffered):
    """gradients() asserts that none is written before its function is called."""
    got, want = (gradients(graph, backend, buffered, deferred=deferred) for deferred in (True, False))
    assert got.keys() == want.keys()
    for name in want:
        assert_array_equal(got[name], want[name], strict=True, err_msg=name)


@pytest.mark.parametrize("buffered", [False, True], ids=["new arrays", "buffers"])
@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("graph", [name for name in GRAPHS if "head" in name])
def test_a_head_in_chunks_of_logits_has_the_right_gradients(numpy_backend, graph, buffered, deferred, monkeypatch):
    want = float64_gradients(graph)
    monkeypatch.setattr(vocabulary, "LOGITS", 3 * V)
    near(gradients(graph, numpy_backend, buffered, 2, deferred), want, times=2)


def test_a_pass_adds_to_the_gradients_of_the_pass_before_unless_they_are_cleared(backend):
    for buffered in (False, True):
        leaves = Leaves(backend, buffered)
        for times in (1, 2, 3):
            ops.linear(leaves.x, leaves.w, leaves.bias).sum().backward()
            assert_allclose(leaves.bias.grad, np.full(C, times * B * T), rtol=1e-6)
        leaves.bias.grad = None  # the next pass overwrites the buffer
        ops.linear(leaves.x, leaves.w, leaves.bias).sum().backward()
        assert_allclose(leaves.bias.grad, np.full(C, B * T), rtol=1e-6)
        assert_allclose(leaves.w.grad.sum(0), 4 * leaves.x.data.sum((0, 1)).sum(), rtol=1e-3)
        assert not buffered or leaves.bias.grad is leaves.bias.buffer


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_parameter_writes_its_next_gradient_to_a_new_buffer_or_adds_it(backend, accumulate):
    leaves = Leaves(backend)
    buffers = [np.full(C, 7, backend.dtype) for _ in range(2)]
    for buffer in buffers:
        leaves.bias.send_to(buffer, accumulate)
        assert leaves.bias.grad is (buffer if accumulate else None)
        ops.linear(leaves.x, leaves.w, leaves.bias).sum().backward()
        assert leaves.bias.grad is buffer
    for buffer in buffers:
        assert_allclose(buffer, np.full(C, 7 * accumulate + B * T), rtol=1e-6)
    leaves.bias.forget()
    ops.linear(leaves.x, leaves.w, leaves.bias).sum().backward()
    assert_allclose(leaves.bias.grad, np.full(C, B * T), rtol=1e-6)
    assert all(leaves.bias.grad is not buffer for buffer in buffers)


def test_a_gradient_that_was_set_by_hand_is_added_to_and_no_buffer_is_written(backend):
    leaves = Leaves(backend, buffered=True)
    leaves.bias.grad = held = np.full(C, 7, backend.dtype)
    ops.linear(leaves.x, leaves.w, leaves.bias).sum().backward()
    assert leaves.bias.grad is held and np.isnan(leaves.bias.buffer).all()
    assert_allclose(held, np.full(C, 7 + B * T), rtol=1e-6)


@pytest.mark.parametrize("later", [None, []], ids=["at once", "later"])
@pytest.mark.parametrize("buffered", [False, True], ids=["new arrays", "buffers"])
@pytest.mark.parametrize("deferred", [False, True], ids=["an array", "a function"])
def test_a_gradient_of_a_wrong_shape_is_refused(backend, buffered, deferred, later):
    leaves = Leaves(backend, buffered)
    for parent, shape in ((leaves.w, (C,)), (leaves.bias, (1, C)), (leaves.w * 2, (1, C, C)), (leaves.x, ())):
        wrong = np.ones(shape, backend.dtype)
        y = Tensor.from_op(np.ones(3), (parent,), lambda dy, g=wrong: ((lambda out: g) if deferred else g,))
        with pytest.raises(ShapeError, match=r"gradient of shape .* reached a tensor of shape"):
            y.backward(np.ones(3), deliver=deliver(call if later is None else later.append))
            while later:
                later.pop()()
    with pytest.raises(ShapeError, match=r"\(3,\) reached a tensor of shape \(16,\)"):
        leaves.bias.backward(np.ones(3))


# -- one kernel after another -----------------------------------------------------------------------------------------


def normal(rng, backend, *shape):
    return rng.standard_normal(shape).astype(backend.dtype)


def backwards(backend, rng, M=None):
    """{kernel: function of a slice of the micro-batches -> what its backward kernel returns}.

    M: the number of micro-batches, the leading axis of activations (M, B, T, C); None: there is no such axis.
    """
    lead = () if M is None else (M,)
    x, dy, ds = (normal(rng, backend, *lead, B, T, C) for _ in range(3))
    bias, w, b = (normal(rng, backend, C) for _ in range(3))
    wide, wb, w2, d_wide = (normal(rng, backend, *shape) for shape in ((C, K), (K,), (K, C), (*lead, B, T, K)))
    wte, wpe, ids = normal(rng, backend, V, C), normal(rng, backend, T + 2, C), rng.integers(0, V, (*lead, B, T))
    targets, d_logits = rng.integers(0, V, (*lead, B * T)), normal(rng, backend, *lead, B, T, V)

    def linear_gelu(i):
        return backend.linear_gelu_backward(d_wide[i], x[i], wide, wb, backend.linear_gelu_forward(x[i], wide, wb)[1])

    def mlp(i):
        return backend.mlp_backward(dy[i], x[i], wide, wb, w2, backend.mlp_forward(x[i], wide, wb, w2)[1])

    def layernorm(i):
        return backend.layernorm_backward(dy[i], w, backend.layernorm_forward(x[i], w, b, 1e-5)[1])

    def residual_layernorm(i):
        aux = backend.residual_layernorm_forward(x[i], ds[i], bias, w, b, 1e-5)[2]
        return backend.residual_layernorm_backward(ds[i], dy[i], w, aux)

    def head(i):
        maxima, sums, _, aux = backend.unembed_cross_entropy_forward(x[i], wte, targets[i].reshape(-1))
        rows = np.asarray(1.3), x[i], wte, targets[i].reshape(-1), 0.1, maxima, sums, aux
        return backend.unembed_cross_entropy_backward(*rows)

    return {
        "linear": lambda i: backend.linear_backward(d_wide[i], x[i], wide),
        "linear_gelu": linear_gelu,
        "mlp": mlp,
        "bias": lambda i: (backend.bias_backward(dy[i]),),
        "layernorm": layernorm,
        "residual_layernorm": residual_layernorm,
        "embedding": lambda i: backend.embedding_backward(dy[i], ids[i], wte, wpe, 1, 0),
        "unembed": lambda i: backend.unembed_backward(d_logits[i], x[i], wte),
        "unembed_cross_entropy": head,
    }


KERNELS = list(backwards(NumpyBackend("fp64"), np.random.default_rng(0)))
ALL = slice(None)
LOGITS = pytest.mark.parametrize("logits", [None, 3 * V], ids=["all logits", "chunks"])


def weights(gradients):
    """The gradients that are functions, but for that of the head's input: their numbers in the tuple."""
    return [i for i, gradient in enumerate(gradients) if callable(gradient) and gradient.__name__ != "dx_of_chunks"]


@LOGITS
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_writes_or_adds_a_gradient_to_its_destination_and_returns_the_array(
    numpy_backend, rng, kernel, logits, monkeypatch
):
    if logits:
        monkeypatch.setattr(vocabulary, "LOGITS", logits)
    run = backwards(numpy_backend, rng)[kernel]
    want = arrays(*run(ALL))
    assert weights(run(ALL))
    for i in weights(run(ALL)):
        held = normal(rng, numpy_backend, *want[i].shape)
        for array, accumulate, expected in (
            (np.full_like(held, np.nan), False, want[i]),
            (held.copy(), True, held + want[i]),
        ):
            assert run(ALL)[i](Destination(array, accumulate)) is array
            if accumulate:  # a kernel may add one term after another to the array
                assert_allclose(array, expected, rtol=0, atol=TOLERANCE[array.dtype] * np.abs(expected).max())
            else:
                assert_array_equal(array, expected, strict=True)


@LOGITS
@pytest.mark.parametrize("M", [1, 2, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_call_for_several_micro_batches_has_the_bits_of_a_call_for_each(
    numpy_backend, rng, kernel, M, logits, monkeypatch
):
    """The gradient of a weight is their canonical sum; in a destination (M, ...) each has its own."""
    if logits:
        monkeypatch.setattr(vocabulary, "LOGITS", logits)
    run = backwards(numpy_backend, rng, M)[kernel]
    each = [arrays(*run(m)) for m in range(M)]
    merged = arrays(*run(ALL))
    for i in range(len(merged)):
        one = [gradients[i] for gradients in each]
        if i not in weights(run(ALL)):
            assert_array_equal(merged[i], np.stack(one), strict=True)
            continue
        assert_array_equal(merged[i], tree_sum(one), strict=True)
        out = np.full((M, *one[0].shape), np.nan, one[0].dtype)
        assert run(ALL)[i](Destination(out, accumulate=False)) is out
        assert_array_equal(out, np.stack(one), strict=True)
        run(ALL)[i](Destination(out, accumulate=True))
        assert_allclose(out, 2 * np.stack(one), rtol=0, atol=TOLERANCE[out.dtype] * np.abs(out).max())


# -- passes that fail, and gradients that are arrays -----------------------------------------------------------------


def test_a_pass_after_one_that_failed_has_the_gradients_of_its_own(backend):
    leaves, fails = Leaves(backend), [True]

    def backward(dy):
        if fails:
            raise MemoryError
        return (dy,)

    early = leaves.x * 2
    y = (Tensor.from_op(early.data.copy(), (early,), backward) + early).sum()
    with pytest.raises(MemoryError):
        y.backward(retain_graph=True)
    fails.clear()
    y.backward()
    assert_array_equal(leaves.x.grad, np.full_like(leaves.x.data, 4))


def test_the_array_of_a_buffer_can_be_a_gradient_itself(backend):
    leaves = Leaves(backend, buffered=True)
    leaves.x.send_to(leaves.x.buffer, accumulate=True)
    leaves.x.grad[...] = 1
    copy_to_group(leaves.x, SOLO).backward(leaves.x.grad)
    assert_array_equal(leaves.x.grad, np.full_like(leaves.x.data, 2))


@LOGITS
@pytest.mark.parametrize("M", [2, 3])
@pytest.mark.parametrize("apart", [False, True], ids=["their sum", "each micro-batch"])
def test_the_gradient_of_the_head_of_several_micro_batches_may_be_computed_after_that_of_its_input(
    numpy_backend, rng, M, apart, logits, monkeypatch
):
    """As with backward(deliver=...): in a new array or a destination, also in one for each micro-batch."""
    if logits:
        monkeypatch.setattr(vocabulary, "LOGITS", logits)
    run = backwards(numpy_backend, rng, M)["unembed_cross_entropy"]
    each = [arrays(*run(m)) for m in range(M)]
    want = np.stack([dw for _, dw in each]) if apart else tree_sum([dw for _, dw in each])
    dx, dw = run(ALL)
    (dx,) = arrays(dx)
    assert_array_equal(dx, np.stack([dx for dx, _ in each]), strict=True)
    held = normal(rng, numpy_backend, *want.shape)
    for array, accumulate, expected in ((np.full_like(held, np.nan), False, want), (held.copy(), True, held + want)):
        assert dw(Destination(array, accumulate)) is array
        assert_array_equal(array, expected, strict=True)
    assert_array_equal(dw(None), tree_sum([dw for _, dw in each]), strict=True)


# -- the weights after backward(deliver=...) --------------------------------------------------------------------------


@LOGITS
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "untied"])
def test_gradients_that_are_computed_later_keep_no_parameter_alive(backend, logits, tied, monkeypatch):
    if logits:
        monkeypatch.setattr(vocabulary, "LOGITS", logits)
    check_that_parameters_are_freed(backend, tied)


NOT_READ = {  # operation on leaves by name: the leaves whose arrays NumPy's backward kernels do not read
    "linear": (lambda a: ops.linear(a.x, a.w, a.bias), "bias"),
    "mlp": (lambda a: ops.mlp(a.x, a.w, a.bias, a.w2), "bias"),
    "layernorm": (lambda a: ops.layernorm(a.x, a.scale, a.bias), "x bias"),
    "residual_add": (lambda a: ops.residual_add(a.x, a.y, a.bias), "x y bias"),
    "residual_layernorm": (lambda a: ops.residual_layernorm(a.x, a.y, a.bias, a.scale, a.bias2)[1], "x y bias bias2"),
}


@pytest.mark.parametrize("operation", NOT_READ)
def test_the_graph_keeps_no_array_that_backward_does_not_read(numpy_backend, rng, operation):
    function, names = NOT_READ[operation]
    shapes = dict(x=(B, T, C), y=(B, T, C), w=(C, C), w2=(C, C), bias=(C,), bias2=(C,), scale=(C,))
    values, found = {name: normal(rng, numpy_backend, *shape) for name, shape in shapes.items()}, []
    for freed in ((), names.split()):
        leaves = SimpleNamespace(**{name: Parameter(v.copy(), numpy_backend) for name, v in values.items()})
        for name, leaf in vars(leaves).items():
            leaf.send_to(np.empty(shapes[name], numpy_backend.dtype))
        y = function(leaves)
        alive = {name: weakref.ref(getattr(leaves, name).data) for name in freed}
        for name in freed:
            getattr(leaves, name).data = None
        assert [name for name, array in alive.items() if array() is not None] == []
        y.backward(np.ones(y.shape, numpy_backend.dtype))
        found.append({name: leaf.grad for name, leaf in vars(leaves).items() if leaf.grad is not None})
    for name, gradient in found[0].items():
        assert_array_equal(found[1][name], gradient, strict=True)


# -- operations on the axis of micro-batches ---------------------------------------------------------------------------


def merged_operations(leaves):
    """{operation: function that calls it with leaves of M = 2 micro-batches}."""
    two = (2, B // 2, T)
    x, qkv = (ops.linear(leaf, w).reshape(*two, -1) for leaf, w in ((leaves.x, leaves.w), (leaves.x, leaves.qkv_w)))
    ids, targets = leaves.ids.reshape(two), leaves.targets.reshape(two)
    return {
        "embedding": lambda: ops.embedding(ids, leaves.wte, leaves.wpe),
        "attention": lambda: ops.attention(qkv, 2),
        "unembed_cross_entropy": lambda: ops.unembed_cross_entropy(x, leaves.wte, targets),
    }


@pytest.mark.parametrize("operation", ["embedding", "attention", "unembed_cross_entropy"])
def test_several_micro_batches_are_refused_by_a_backend_that_does_not_merge_them(backend, operation):
    leaves = Leaves(backend)
    leaves.qkv_w = Tensor(np.ones((C, 3 * C), backend.dtype), backend)
    call = merged_operations(leaves)[operation]
    if backend.merges_micro_batches:
        call()
    else:
        with pytest.raises(ShapeError, match=rf"{operation}: the plain backend .* one micro-batch .*\(2, 2, 9"):
            call()


def test_a_loss_over_logits_with_any_leading_axes_is_the_loss_of_their_rows(backend):
    losses, gradients = [], []
    for shape in ((B * T,), (B, T), (2, B // 2, T)):
        leaves = Leaves(backend)
        logits = ops.unembed(leaves.x, leaves.wte).reshape(*shape, V)
        loss = ops.cross_entropy(logits, leaves.targets.reshape(shape))
        loss.backward()
        losses.append(loss.item())
        gradients.append(leaves.x.grad)
    assert len(set(losses)) == 1
    for gradient in gradients[1:]:
        assert_array_equal(gradient, gradients[0], strict=True)


@pytest.mark.parametrize("position", [-1, -3, 3, 12])
def test_positions_outside_the_block_are_refused(backend, position):
    leaves = Leaves(backend)
    with pytest.raises(ShapeError, match=rf"from position {position} do not fit 11 positions"):
        ops.embedding(leaves.ids, leaves.wte, leaves.wpe, position)


# -- dloss of the fused loss -------------------------------------------------------------------------------------------


def test_a_known_gradient_is_its_dloss_times_the_gradient_without_one(backend):
    leaves = Leaves(backend)
    operands = leaves.x, leaves.wte, leaves.targets
    ops.unembed_cross_entropy(*operands).backward()
    want = [8.0 * leaf.grad for leaf in operands[:2]]
    leaves.x.grad = leaves.wte.grad = None
    dloss = backend.asarray(np.array(8.0))
    gradient = HeadGradient(1 / leaves.targets.size, leaves.wte.shape[0], dloss)
    ops.unembed_cross_entropy(*operands, gradient=gradient).backward(dloss)
    for leaf, wanted in zip(operands[:2], want, strict=True):
        assert_allclose(leaf.grad, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())  # a power of two rounds nothing
