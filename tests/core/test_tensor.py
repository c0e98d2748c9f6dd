"""Autograd: every primitive against PyTorch in float64; gradients accumulate, marks report them, graphs are freed."""

import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core import ops, primitives
from gpt2core.parallel.parameter import call, deliver
from gpt2core.parallel.part import mark
from gpt2core.tensor import AutogradError, ShapeError, Tensor, is_recording, no_grad
from stage0_serial.numpy_backend import NumpyBackend

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.fast

DOUBLE = 1e-12  # in float64, of the size of the terms: both sides round differently, nothing else differs


@pytest.fixture
def backend():
    return NumpyBackend("fp64")


def leaf(array, backend):
    return Tensor(np.array(array, np.float64), backend, requires_grad=True)


def close(got, want, tolerance=DOUBLE):
    """norm(got - want) <= tolerance * max(norm(want), 1), and no NaN passes.

    Operands and the terms of sums are of size one. The terms may cancel: the error is relative to them, not to the sum.
    """
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), 1)


def same_as_torch(backend, rng, ours, theirs, *arrays):
    """Value and gradient of every operand, for a random gradient of the result."""
    before = [array.copy() for array in arrays]
    mine = [leaf(array, backend) for array in arrays]
    torchs = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays]
    y, want = ours(*mine), theirs(*torchs)
    close(y.numpy(), want.detach())
    dy = rng.standard_normal(y.shape)
    y.backward(dy)
    want.backward(torch.tensor(dy))
    for got, reference, array in zip(mine, torchs, before, strict=True):
        close(got.grad, torch.zeros_like(reference) if reference.grad is None else reference.grad)
        assert got.grad.dtype == np.float64
        assert_array_equal(got.data, array)  # an operation does not write into its operands


# -- primitives ----------------------------------------------------------------------------------------------

MASK = np.tril(np.ones((4, 4), bool))
ROWS = np.array([[0, 2, 2], [3, 0, 0]])  # rows are named twice: their gradients add up
PRIMITIVES = {  # name: (ours, PyTorch's, shapes of the operands)
    "add": (primitives.add, torch.add, (3, 4), (3, 4)),
    "add a row": (primitives.add, torch.add, (5, 3, 4), (4,)),
    "subtract": (lambda a, b: a - b, torch.sub, (3, 1), (1, 4)),
    "multiply": (primitives.multiply, torch.mul, (2, 1, 4), (3, 1)),
    "divide": (lambda a, b: a / (b * b + 1), lambda a, b: a / (b * b + 1), (2, 3, 4), (3, 1)),
    "negate": (lambda x: -x, torch.neg, (3, 4)),
    "numbers on the left": (lambda x: 2 - 3 / (x * x + 1) + 2 * x, lambda x: 2 - 3 / (x * x + 1) + 2 * x, (3, 4)),
    "numbers on the right": (lambda x: (x - 2) / 3 + 1, lambda x: (x - 2) / 3 + 1, (3, 4)),
    "an array operand": (lambda x: x * np.arange(4.0) - np.ones((3, 1)), lambda x: x * torch.arange(4.0) - 1, (3, 4)),
    "square": (lambda x: x**2, lambda x: x**2, (3, 4)),
    "inverse root": (lambda x: (x * x + 1) ** -0.5, lambda x: (x * x + 1) ** -0.5, (3, 4)),
    "matmul": (primitives.matmul, torch.matmul, (3, 4), (4, 5)),
    "matmul, batch on the left": (primitives.matmul, torch.matmul, (2, 6, 3, 4), (4, 5)),
    "matmul, batch on the right": (primitives.matmul, torch.matmul, (3, 4), (2, 4, 5)),
    "matmul, batches broadcast": (primitives.matmul, torch.matmul, (2, 1, 3, 4), (6, 4, 1)),
    "exp": (primitives.exp, torch.exp, (3, 4)),
    "log": (lambda x: primitives.log(x * x + 1), lambda x: torch.log(x * x + 1), (3, 4)),
    "tanh": (primitives.tanh, torch.tanh, (3, 4)),
    "softmax": (primitives.softmax, lambda x: torch.softmax(x, -1), (3, 4)),
    "softmax of axis 0": (lambda x: primitives.softmax(x, 0), lambda x: torch.softmax(x, 0), (3, 4)),
    "sum": (primitives.sum, torch.sum, (3, 4)),
    "sum of axis 1": (lambda x: x.sum(1), lambda x: x.sum(1), (3, 4, 5)),
    "sum of axes, kept": (lambda x: x.sum((0, -1), keepdims=True), lambda x: x.sum((0, -1), True), (3, 4, 5)),
    "sum of axes": (lambda x: x.sum((0, 2)), lambda x: x.sum((0, 2)), (3, 4, 5)),
    "mean": (primitives.mean, torch.mean, (3, 4)),
    "mean of the last axis": (lambda x: x.mean(-1, keepdims=True), lambda x: x.mean(-1, True), (3, 4)),
    "reshape": (lambda x: x.reshape(2, -1, 3), lambda x: x.reshape(2, -1, 3), (3, 4)),
    "reshape to a tuple": (lambda x: x.reshape((6, 2)), lambda x: x.reshape((6, 2)), (3, 4)),
    "transpose": (lambda x: x.transpose(), lambda x: x.permute(2, 1, 0), (2, 3, 4)),
    "transpose by axes": (lambda x: x.transpose(1, -1, 0), lambda x: x.permute(1, 2, 0), (2, 3, 4)),
    "transpose, reshape, transpose": (
        lambda x: x.reshape(2, 3, 2, 2).transpose(0, 2, 1, 3).reshape(4, 6).transpose(1, 0),
        lambda x: x.reshape(2, 3, 2, 2).permute(0, 2, 1, 3).reshape(4, 6).permute(1, 0),
        (2, 3, 4),
    ),
    "a slice": (lambda x: x[:, -1:], lambda x: x[:, -1:], (3, 4)),
    "one row": (lambda x: x[1], lambda x: x[1], (3, 4)),
    "every other": (lambda x: x[1::2, ..., ::3], lambda x: x[1::2, ..., ::3], (5, 2, 4)),
    "rows by number": (lambda x: x[ROWS], lambda x: x[torch.tensor(ROWS)], (4, 3)),
    "elements by number": (lambda x: x[ROWS[0], ROWS[1]], lambda x: x[ROWS[0], ROWS[1]], (4, 4)),
    "where": (
        lambda a, b: primitives.where(MASK, a, b),
        lambda a, b: torch.where(torch.tensor(MASK), a, b),
        (4, 4),
        (4, 4),
    ),
    "where, broadcast": (
        lambda a, b: primitives.where(MASK, a, b),
        lambda a, b: torch.where(torch.tensor(MASK), a, b),
        (3, 1, 4),
        (),
    ),
    "where, a number": (
        lambda x: primitives.softmax(primitives.where(MASK, x, -np.inf)),
        lambda x: torch.softmax(torch.where(torch.tensor(MASK), x, -torch.inf), -1),
        (2, 4, 4),
    ),
    "concatenate": (lambda *x: primitives.concatenate(x), lambda *x: torch.cat(x), (1, 4), (3, 4), (2, 4)),
    "concatenate, last axis": (lambda *x: primitives.concatenate(x, -1), lambda *x: torch.cat(x, -1), (3, 1), (3, 5)),
    "concatenate one thing twice": (
        lambda x: primitives.concatenate([x, x], 1),
        lambda x: torch.cat([x, x], 1),
        (3, 2),
    ),
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_primitive_and_its_gradients_equal_torch(backend, rng, name):
    ours, theirs, *shapes = PRIMITIVES[name]
    for _ in range(3):
        same_as_torch(backend, rng, ours, theirs, *(rng.standard_normal(shape) for shape in shapes))


BINARY = {
    "+": primitives.add,
    "*": primitives.multiply,
    "/": primitives.divide,
    "where": lambda a, b: primitives.where(True, a, b),
}
TORCH_BINARY = {
    "+": torch.add, "*": torch.mul, "/": torch.div, "where": lambda a, b: torch.where(torch.tensor(True), a, b)
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3), st.sampled_from(list(BINARY)), st.data())
def test_any_two_shapes_that_broadcast_have_torch_s_gradients(shapes, name, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    a, b = (rng.uniform(0.5, 2, shape) for shape in shapes.input_shapes)
    same_as_torch(NumpyBackend("fp64"), rng, BINARY[name], TORCH_BINARY[name], a, b)


@settings(max_examples=40, deadline=None)
@given(mutually_broadcastable_shapes(signature="(n,k),(k,m)->(n,m)", max_dims=3, max_side=3), st.integers(0, 2**32))
def test_any_two_stacks_of_matrices_that_broadcast_have_torch_s_gradients(shapes, seed):
    rng = np.random.default_rng(seed)
    arrays = (rng.standard_normal(shape) for shape in shapes.input_shapes)
    same_as_torch(NumpyBackend("fp64"), rng, primitives.matmul, torch.matmul, *arrays)


UNARY = {
    "tanh": (primitives.tanh, torch.tanh),
    "transpose": (primitives.transpose, torch.t),
    "softmax": (primitives.softmax, lambda x: x.softmax(-1)),
}
PAIRS = {
    "+": (primitives.add, torch.add),
    "*": (primitives.multiply, torch.mul),
    "@": (primitives.matmul, torch.matmul),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([*UNARY, *PAIRS]), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12
    ),
    st.integers(0, 2**32),
)
def test_any_graph_of_shared_tensors_has_torch_s_gradients(steps, seed):
    """Graphs with diamonds, tensors used many times, leaves used early and late, and unused results."""

    def build(which, a, b):
        tensors = [a, b]
        for name, i, j in steps:
            if name in UNARY:
                tensors.append(UNARY[name][which](tensors[i % len(tensors)]))
            else:
                tensors.append(PAIRS[name][which](tensors[i % len(tensors)], tensors[j % len(tensors)] * 0.3))
        return tensors[-1] + tensors[len(tensors) // 2] + a * 0 + b * 0

    rng = np.random.default_rng(seed)
    a, b = rng.uniform(-1, 1, (2, 3, 3))
    same_as_torch(NumpyBackend("fp64"), rng, lambda a, b: build(0, a, b), lambda a, b: build(1, a, b), a, b)


def test_numbers_keep_the_precision_of_the_tensor(rng):
    x = Tensor(rng.standard_normal((3, 4)).astype(np.float32), NumpyBackend(), requires_grad=True)
    y = primitives.mean(primitives.tanh(2 * x - np.ones(4) / 3.0) ** 2 / 7)
    y.backward()
    assert y.dtype == x.grad.dtype == np.float32


def test_reshape_transpose_and_slices_are_views_of_the_same_memory(backend, rng):
    x = leaf(rng.standard_normal((4, 6)), backend)
    for view in (x.reshape(2, 2, 6), x.transpose(), x[1:3], x[:, ::2].transpose(), x.detach()):
        assert np.shares_memory(view.data, x.data)
    assert not x.detach().requires_grad and x.detach(requires_grad=True).requires_grad


# -- how gradients add up ------------------------------------------------------------------------------------


def test_a_tensor_used_twice_in_one_operation_gets_both_gradients(backend, rng):
    a = rng.standard_normal((3, 3))
    for ours, want in (
        (lambda x: x * x, 2 * a),
        (lambda x: x + x, 2 * np.ones_like(a)),
        (lambda x: x - x, np.zeros_like(a)),
        (lambda x: x / x, np.zeros_like(a)),
        (lambda x: (x + x) + (x + x), 4 * np.ones_like(a)),
        (lambda x: x @ x, np.ones_like(a) @ a.T + a.T @ np.ones_like(a)),
    ):
        x = leaf(a, backend)
        ours(x).sum().backward()
        assert_allclose(x.grad, want, rtol=DOUBLE, atol=DOUBLE)


def test_a_leaf_never_keeps_an_incoming_array_as_its_gradient(backend, rng):
    """add returns the same dy to both parents: a parent that stored it would see the other parent's sums."""
    a, b = leaf(rng.standard_normal(5), backend), leaf(rng.standard_normal(5), backend)
    seed = rng.standard_normal(5)
    given_seed = seed.copy()
    for times in (1, 2, 3):
        ((a + b) + a).backward(seed)
        assert_array_equal(seed, given_seed)
        assert_allclose(a.grad, 2 * times * seed, rtol=DOUBLE)
        assert_allclose(b.grad, times * seed, rtol=DOUBLE)
        assert not np.shares_memory(a.grad, b.grad) and not np.shares_memory(a.grad, seed)
    a.grad[...] = 7
    assert_allclose(b.grad, 3 * seed, rtol=DOUBLE)
    c = leaf(rng.standard_normal(5), backend)
    c.backward(seed)  # a leaf is a graph of its own
    assert_array_equal(c.grad, seed)
    assert not np.shares_memory(c.grad, seed)


def test_summing_gradients_does_not_change_an_array_that_another_parent_received(backend, rng):
    a = leaf(rng.standard_normal(4), backend)
    h = a * 1.0
    s = h + a  # hands one dy to h and to a
    t = h * 3.0  # then h receives another gradient, which must not be added into that dy
    (s + t).sum().backward()
    assert_array_equal(a.grad, np.full(4, 5.0))


def test_gradients_accumulate_over_backward_calls_until_they_are_cleared(backend, rng):
    a = rng.standard_normal((2, 3))
    x = leaf(a, backend)
    for times in (1, 2, 3):
        (x * x).sum().backward()
        assert_allclose(x.grad, 2 * times * a, rtol=DOUBLE)
    x.grad = None
    (x * x).sum().backward()
    assert_allclose(x.grad, 2 * a, rtol=DOUBLE)


def test_retain_graph_gives_the_same_gradient_again(backend, rng):
    x = leaf(rng.standard_normal((2, 3)), backend)
    y = primitives.tanh(x * x).sum()
    y.backward(retain_graph=True)
    first = x.grad.copy()
    y.backward()
    assert_array_equal(x.grad, first + first)


def test_only_tensors_that_require_a_gradient_get_one(backend, rng):
    x, fixed = leaf(rng.standard_normal(3), backend), Tensor(rng.standard_normal(3), backend)
    y = x * fixed
    assert y.requires_grad and not (fixed * fixed).requires_grad
    (y * y.detach()).sum().backward()
    assert fixed.grad is None and y.grad is None
    assert_allclose(x.grad, fixed.data * y.data, rtol=DOUBLE)


# -- several outputs, and gradients that are not there -------------------------------------------------------


def double_and_square(x, seen):
    def backward(d_double, d_square):
        seen.append((d_double is None, d_square is None))
        total = 0 * x.data
        for d, derivative in ((d_double, 2.0), (d_square, 2 * x.data)):
            total = total if d is None else total + d * derivative
        return (total,)

    return Tensor.from_op((2 * x.data, x.data**2), (x,), backward)


@pytest.mark.parametrize("use, absent", [((1, 0), (False, True)), ((0, 1), (True, False)), ((1, 2), (False, False))])
def test_an_unused_output_s_gradient_is_none_and_the_used_ones_are_complete(backend, rng, use, absent):
    a, seen = rng.standard_normal(4), []
    x = leaf(a, backend)
    outputs = double_and_square(x, seen)
    terms = [output.sum() for output, times in zip(outputs, use, strict=True) for _ in range(times)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    total.backward()
    assert seen == [absent]  # once, however many uses
    assert_allclose(x.grad, use[0] * 2 + use[1] * 2 * a, rtol=DOUBLE)


def test_a_gradient_of_none_ends_its_path_and_no_other(backend, rng):
    x, silent = leaf(rng.standard_normal(4), backend), leaf(rng.standard_normal(4), backend)
    stop = Tensor.from_op(x.data * 2, (x * 3.0,), lambda dy: (None,))
    ended = Tensor.from_op(x.data + silent.data, (stop, silent), lambda dy: (dy, None))
    (ended + x).sum().backward()
    assert_array_equal(x.grad, np.ones(4))
    assert silent.grad is None


# -- marks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [False, True])
def test_a_mark_reports_once_after_all_gradients_behind_it_and_before_those_in_front_of_it(backend, rng, deferred):
    """Also with a weight that is used on both sides, and with operations that were made after the mark beside it."""
    x, w1, w2, w3, shared = (leaf(rng.standard_normal((3, 3)), backend) for _ in range(5))
    leaves = dict(w1=w1, w2=w2, w3=w3, shared=shared)
    reports = []

    def report():
        reports.append({name: None if each.grad is None else each.grad.copy() for name, each in leaves.items()})

    y = primitives.tanh(x @ w1 @ shared)
    marked, passed = mark((y, y * 2), (lambda: later.append(report)) if deferred else report)
    beside = primitives.tanh(x @ w2)  # made after the mark: it is differentiated before the mark is reached
    z = (marked @ w3 + beside) @ shared + passed
    later = []
    z.backward(rng.standard_normal((3, 3)), deliver=deliver(later.append if deferred else call))
    for function in later:
        function()
    (seen,) = reports
    assert seen["w1"] is None  # in front of the mark
    assert_array_equal(seen["w2"], w2.grad)
    assert_array_equal(seen["w3"], w3.grad)
    assert seen["shared"] is not None and (seen["shared"] != shared.grad).any()  # its use behind the mark only
    assert w1.grad is not None


def test_a_mark_is_the_identity_and_reports_again_when_a_kept_graph_runs_again(backend, rng):
    a, reports = rng.standard_normal(4), []
    x = leaf(a, backend)
    (marked,) = mark((x * 3,), lambda: reports.append(x.grad is None))
    y = marked * marked
    assert np.shares_memory(marked.data, mark((marked,), print)[0].data)
    y.backward(np.ones(4), retain_graph=True)
    close(x.grad, 18 * a)
    y.backward(np.ones(4))
    close(x.grad, 36 * a)
    assert reports == [True, False]


def test_a_mark_of_which_one_tensor_is_not_used_gives_the_gradients_of_the_others(backend, rng):
    x, w, reports = leaf(rng.standard_normal(4), backend), leaf(rng.standard_normal(4), backend), []
    used, _ = mark((x * 2, w * 2), lambda: reports.append("used"))
    used.backward(np.ones(4))
    assert_array_equal(x.grad, np.full(4, 2.0))
    assert w.grad is None and reports == ["used"]
    with no_grad():
        assert not mark((x * 2,), lambda: reports.append("never"))[0].requires_grad


def test_a_gradient_is_computed_as_soon_as_its_operation_is_differentiated(backend, rng):
    """Gradients of a late layer are computed before an earlier layer is differentiated, to overlap their all-reduce."""
    events, weights = [], [leaf(rng.standard_normal(3), backend) for _ in range(5)]
    y = leaf(rng.standard_normal(3), backend)
    for i, w in enumerate(weights):

        def backward(dy, i=i, y=y, w=w):
            def dw(out):
                events.append(f"weight {i}")
                return dy * y.data

            def dx(out):
                events.append(f"layer {i}")
                return dy * w.data

            return dw, dx

        y = Tensor.from_op(y.data * w.data, (w, y), backward)
    y.backward(np.ones(3))
    # in the order of the parents; ops.py has parameters first: their kernels run on another stream of a GPU at the same
    # time as those of the next layer
    assert events == [f"{what} {i}" for i in range(4, -1, -1) for what in ("weight", "layer")]


# -- freeing -------------------------------------------------------------------------------------------------


@pytest.mark.fast("10000")
@pytest.mark.parametrize("length", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_long_chain_reaches_no_recursion_limit_in_backward_or_when_it_is_freed(backend, length):
    def chain():
        x = leaf([1.0], backend)
        y = x
        for _ in range(length):
            y = primitives.add(y, x)
        return x, y

    x, y = chain()
    y.backward()
    assert x.grad.item() == length + 1
    del y
    x, y = chain()
    del x, y  # never differentiated: the interpreter takes the chain apart by itself
    x, y = chain()
    y.backward(retain_graph=True)
    del x, y
    gc.collect()


def test_activations_are_freed_while_backward_is_still_running(backend, rng):
    """When a layer is differentiated, the activations of the layers after it are already freed."""
    depth, arrays, alive = 8, [], []

    def layer(x):
        kept = x.data * 1.5
        arrays.append(weakref.ref(kept))

        def backward(dy):
            alive.append(sum(array() is not None for array in arrays))
            return (dy * kept.mean(),)

        return Tensor.from_op(x.data + 1, (x,), backward)

    def network(x):
        for _ in range(depth):
            x = layer(primitives.tanh(x))
        return x.sum()

    x = leaf(rng.standard_normal(1000), backend)
    network(x).backward()
    assert alive == list(range(depth, 0, -1))
    alive.clear(), arrays.clear()
    y = network(x)
    y.backward(retain_graph=True)
    assert alive == [depth] * depth


def test_an_input_that_no_closure_keeps_is_freed_before_backward(backend, rng):
    """A branch of the residual stream: its gradient equals the gradient of the sum."""
    x, vectors = leaf(rng.standard_normal((3, 8)), backend), [leaf(rng.standard_normal(8), backend) for _ in "abc"]
    branch = primitives.tanh(x) * 2
    array = weakref.ref(branch.data)
    s, y = ops.residual_layernorm(x, branch, *vectors)
    del branch
    assert array() is None
    (s.sum() + y.sum()).backward()
    assert x.grad.shape == x.shape and all(vector.grad is not None for vector in vectors)


def test_no_tensor_of_a_differentiated_layer_stays_alive(backend, rng):
    """This includes the tensor that received the last gradient."""
    outputs, alive = [], []

    def layer(x):
        y = x.data + 1
        position = len(outputs)
        outputs.append(weakref.ref(y))

        def backward(dy):
            alive.append(sum(output() is not None for output in outputs[position:]))
            return (dy,)

        return Tensor.from_op(y, (x,), backward)

    x = leaf(rng.standard_normal(1000), backend)

    def network(y):
        for _ in range(6):
            y = layer(y)
        return y.sum()

    network(x).backward()
    assert alive == [0] * 6


def test_backward_recycles_the_buffers_of_forward(backend, rng):
    x = leaf(rng.standard_normal((64, 512)), backend)

    def network(depth):
        y = x
        for _ in range(depth):
            y = ops.gelu(y)
        return y.sum()

    y = network(12)
    after_forward = backend.pool.nbytes
    y.backward()
    assert backend.pool.nbytes <= after_forward + 4 * x.data.nbytes  # a few gradients in flight, not 12
    held = backend.pool.nbytes
    for _ in range(3):
        network(12).backward()
    assert backend.pool.nbytes == held  # the same step again finds all its buffers


# -- errors --------------------------------------------------------------------------------------------------


def test_backward_through_a_freed_graph_raises(backend):
    x = leaf([2.0], backend)
    shared = x * x
    y, z = shared * 2, shared * 3
    y.backward()
    for root in (y, z, shared):  # z is new, but the graph below it is freed
        with pytest.raises(AutogradError, match="retain_graph"):
            root.backward()
    assert_array_equal(x.grad, [8.0])  # and nothing was delivered


def test_a_non_scalar_needs_a_gradient_of_its_own_shape(backend, rng):
    x = leaf(rng.standard_normal((2, 3)), backend)
    with pytest.raises(AutogradError, match=r"\(2, 3\) needs an argument"):
        (x * 2).backward()
    for seed in (np.ones(3), np.ones((3, 2)), np.ones((2, 3, 1)), np.ones(())):
        with pytest.raises(ShapeError, match=rf"{seed.shape}.*\(2, 3\)".replace("()", r"\(\)")):
            (x * 2).backward(seed)
    assert x.grad is None
    (x * 2).backward(Tensor(np.ones((2, 3)), backend))
    (x[:1, :1] * 3).backward()  # one element is scalar enough
    assert_array_equal(x.grad, [[5, 2, 2], [2, 2, 2]])


def test_backward_refuses_a_gradient_that_is_not_an_array(backend):
    with pytest.raises(ShapeError, match=r"backward\(\) of shape \(2,\) needs an array of this shape, not 1.0"):
        leaf([1.0, 2.0], backend).backward(1.0)


def test_a_tensor_that_requires_nothing_cannot_be_differentiated(backend):
    x = Tensor(np.ones(()), backend)
    for y in (x, x * 2, leaf([1.0], backend).detach()):
        with pytest.raises(AutogradError, match="requires no gradient"):
            y.backward()
    with no_grad():
        y = leaf([1.0], backend) * 2
    with pytest.raises(AutogradError, match="requires no gradient"):
        y.backward()


def test_an_operation_that_returns_a_gradient_of_another_shape_or_too_few_is_caught(backend):
    x, y = leaf([1.0, 2.0], backend), leaf([3.0, 4.0], backend)
    wrong = Tensor.from_op(x.data * 2, (x,), lambda dy: (dy[:1],))
    with pytest.raises(ShapeError, match=r"\(1,\).*\(2,\)"):
        wrong.backward(np.ones(2))
    few = Tensor.from_op(x.data * y.data, (x, y), lambda dy: (dy,))
    with pytest.raises(ValueError, match="shorter"):
        few.backward(np.ones(2))


IDS = np.zeros((2, 3), np.int64)
MISFITS = {  # name: (operation, shapes of its operands, words of the message)
    "add": (primitives.add, [(2, 3), (4, 5)], ["(2, 3)", "(4, 5)"]),
    "multiply": (primitives.multiply, [(2, 3), (4, 3)], ["(2, 3)", "(4, 3)"]),
    "divide": (primitives.divide, [(2, 3), (4,)], ["(2, 3)", "(4,)"]),
    "where": (lambda a, b: primitives.where(True, a, b), [(2, 3), (4,)], ["(2, 3)", "(4,)"]),
    "matmul": (primitives.matmul, [(2, 3), (4, 5)], ["(2, 3)", "(4, 5)"]),
    "matmul of batches": (primitives.matmul, [(2, 3, 4), (5, 4, 6)], ["(2, 3, 4)", "(5, 4, 6)"]),
    "matmul of a vector": (primitives.matmul, [(3,), (3, 4)], ["(3,)", "(3, 4)"]),
    "reshape": (lambda x: x.reshape(4, 2), [(2, 3)], ["(2, 3)", "(4, 2)"]),
    "transpose": (lambda x: x.transpose(0, 0), [(2, 3)], ["(2, 3)", "(0, 0)"]),
    "concatenate": (lambda a, b: primitives.concatenate([a, b]), [(2, 3), (2, 4)], ["(2, 3)", "(2, 4)"]),
    "linear": (ops.linear, [(2, 3), (4, 5)], ["(2, 3)", "(4, 5)"]),
    "bias of linear": (ops.linear, [(2, 3), (3, 5), (4,)], ["(3, 5)", "(4,)"]),
    "layernorm": (ops.layernorm, [(2, 3), (3,), (4,)], ["(2, 3)", "(4,)"]),
    "residual_layernorm": (ops.residual_layernorm, [(2, 3), (2, 4), (3,), (3,), (3,)], ["(2, 3)", "(2, 4)"]),
    "attention": (lambda x: ops.attention(x, 2), [(2, 3, 9)], ["(2, 3, 9)", "2 heads"]),
    "rotary_attention": (
        lambda x, w, b: ops.rotary_attention(x, w, b, 2), [(2, 3, 6), (6, 18), (18,)], ["(6, 18)", "2 heads"]
    ),
    "embedding": (lambda wte, wpe: ops.embedding(IDS, wte, wpe), [(5, 4), (2, 4)], ["(2, 3)", "2 positions"]),
    "embedding widths": (lambda wte, wpe: ops.embedding(IDS, wte, wpe), [(5, 4), (3, 6)], ["(5, 4)", "(3, 6)"]),
    "unembed": (ops.unembed, [(2, 3), (5, 4)], ["(2, 3)", "(5, 4)"]),
    "cross_entropy": (lambda x: ops.cross_entropy(x, IDS), [(3, 2, 7)], ["(2, 3)", "(3, 2, 7)"]),
    "unembed_cross_entropy": (
        lambda x, w: ops.unembed_cross_entropy(x, w, IDS), [(3, 2, 4), (7, 4)], ["(2, 3)", "(3, 2, 4)"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_an_error_names_both_shapes_that_do_not_fit(backend, name):
    operation, shapes, words = MISFITS[name]
    with pytest.raises(ShapeError) as error:
        operation(*(leaf(np.ones(shape), backend) for shape in shapes))
    for word in words:
        assert word in str(error.value)


# -- no_grad -------------------------------------------------------------------------------------------------


def test_no_grad_records_nothing_and_nests(backend):
    x = leaf([1.0], backend)
    with no_grad():
        assert not (x * 2).requires_grad and not is_recording()
        with no_grad():
            pass
        assert not (x * 2).requires_grad  # the inner exit does not switch it on
        with pytest.raises(KeyError), no_grad():
            raise KeyError
        assert not is_recording()
    assert (x * 2).requires_grad and is_recording()
    y = x * 3
    with no_grad():
        y.backward()  # a graph recorded outside may be differentiated inside
    assert_array_equal(x.grad, [3.0])


def test_no_grad_as_a_decorator_may_recurse_and_be_shared_by_threads(backend):
    x = leaf([1.0], backend)
    inside = threading.Barrier(2, timeout=60)

    @no_grad()
    def countdown(n):
        assert not (x * 2).requires_grad
        return countdown(n - 1) if n else is_recording()

    assert countdown(3) is False and is_recording()

    @no_grad()
    def meet():
        inside.wait()  # both threads are inside at once
        return is_recording()

    results = []

    def call():
        results.append((meet(), is_recording()))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(False, True)] * 2


def test_no_grad_applies_to_its_own_thread_only(backend):
    x, seen = leaf([1.0], backend), []
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append((x * 2).requires_grad))
        thread.start()
        thread.join()
    assert seen == [True]


# -- more primitives and operations --------------------------------------------------------------------------


def test_a_constant_power_has_slope_zero_at_zero_too():
    x = Tensor(np.array([0.0, 2.0]), NumpyBackend(), requires_grad=True)
    (x**0).sum().backward()
    assert np.array_equal(x.grad, [0.0, 0.0])


def test_an_array_on_the_left_of_a_tensor_multiplies_as_a_matrix():
    a, b = np.random.default_rng().standard_normal((2, 3, 3))
    x = Tensor(b, NumpyBackend(), requires_grad=True)
    y = a @ x
    y.sum().backward()
    assert np.allclose(y.data, a @ b) and np.allclose(x.grad, a.T @ np.ones((3, 3)))


@pytest.mark.parametrize("target", [-1, 7])
def test_a_target_outside_the_vocabulary_is_reported(target):
    logits = Tensor(np.random.default_rng().standard_normal((2, 7)), NumpyBackend())
    with pytest.raises(ShapeError, match=f"token {target} is outside the vocabulary of 7"):
        ops.cross_entropy(logits, np.array([3, target]))
