"""Any graph has the right gradients on the kernels of stage 2, in buffers, in new arrays and computed later."""

import contextlib
import functools

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from gpt2core import ops
from gpt2core.kernel_arguments import HeadGradient
from gpt2core.parallel.parameter import Destination, Parameter, call, deliver
from gpt2core.tensor import ShapeError, Tensor, no_grad
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda import fused_head
from stage2_cuda.cuda_backend import CudaBackend
from stage2_cuda.kernels import embedding
from stage2_cuda.runtime import triton_launch
from stage2_cuda.runtime.side_stream import NoStream
from tests.support.gradients import GRAPHS, B, Leaves, T, V, check_that_parameters_are_freed, gradients

pytestmark = [] if triton_launch.interpreted() else [pytest.mark.gpu]  # on a machine with a GPU every test uses it


@functools.cache
def float64_gradients(graph):
    return gradients(graph, NumpyBackend("fp64"))


@pytest.fixture(scope="module")
def backend():
    return CudaBackend("fp32")


def check(backend, graph, buffered):
    """Two passes, the second through the kept graph: the first writes the gradients, the second adds them.

    Gradients in buffers are also computed later.
    """
    got, want = gradients(graph, backend, buffered, times=2), float64_gradients(graph)
    assert got.keys() == want.keys()
    for name in want:  # fp32: a few roundings of 6e-8 of the terms of a sum, which may cancel
        assert np.abs(got[name] - 2 * want[name]).max() <= 3e-5 * max(1, np.abs(want[name]).max()), name
    if buffered:
        deferred = gradients(graph, backend, True, times=2, deferred=True)
        assert deferred.keys() == want.keys()
        for name in want:
            assert_array_equal(deferred[name], got[name], strict=True, err_msg=name)


@pytest.mark.parametrize("graph, buffered", [  # in make test each graph in one of both ways
    pytest.param(graph, buffered, marks=[] if (i + buffered) % 2 else pytest.mark.long)
    for i, graph in enumerate(GRAPHS) for buffered in (False, True)
])  # fmt: skip
def test_a_graph_has_the_right_gradients_in_new_arrays_in_buffers_and_later(backend, graph, buffered):
    check(backend, graph, buffered)


ONE_HEAD = (
    "embedding and head", "a head without a gradient of its matrix", "a head without a gradient of its input",
)  # fmt: skip


@pytest.mark.parametrize("graph", [
    pytest.param(name, marks=[] if name in ONE_HEAD else pytest.mark.long) for name in GRAPHS if "head" in name
])  # fmt: skip
def test_a_head_in_chunks_of_logits_has_the_right_gradients(backend, graph, monkeypatch):
    monkeypatch.setattr(fused_head, "CHUNK_LOGITS", 16 * V)
    for buffered in (False, True):
        check(backend, graph, buffered)


def test_several_micro_batches_are_refused(backend):
    """The kernel of the embedding reads T from the second axis: positions would be wrong without an error."""
    leaves = Leaves(backend)
    with no_grad(), pytest.raises(ShapeError, match=r"embedding: .* one micro-batch .*\(2, 2, 9\)"):
        ops.embedding(leaves.ids.reshape(2, B // 2, T), leaves.wte, leaves.wpe)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "untied"])
def test_gradients_that_are_computed_later_keep_no_parameter_alive(backend, tied):
    check_that_parameters_are_freed(backend, tied)


# -- the padding rows of the head ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("whole", [True, False], ids=["whole vocabulary", "a part of the vocabulary"])
def test_the_bits_of_the_head_do_not_depend_on_the_memory_after_its_matrix(rng, precision, whole):
    """An arena has other parameters there, or no memory at all; it depends on the layout of the ranks.

    Small numbers in the matrix lose bits if the numbers after it are in their block (fp16x3), and a sum over 10,000 or
    10,048 logits is divided in different ways (bf16).
    """
    backend, (N, V, C) = CudaBackend(precision), (512, 10_000, 768) if precision == "bf16" else (64, 100, 64)
    w = (rng.standard_normal((V, C)) * 10.0 ** rng.integers(-8, -1, (V, C))).astype(np.float32)
    x, targets, dy = rng.standard_normal((N, C), np.float32), rng.integers(0, V, N), backend.ones((), np.float64)
    x, found = backend.asarray(x, backend.compute_dtype), []
    for after in (np.empty((0, C)), np.zeros((64, C)), np.full((64, C), 1e4)):
        flat = backend.asarray(np.concatenate([w, after]).reshape(-1).astype(np.float32), backend.compute_dtype)
        arguments = x, flat[: w.size].reshape(w.shape), targets
        gradient = HeadGradient(1 / N, V if whole else V + 1, dy)
        *rows, aux = backend.unembed_cross_entropy_forward(*arguments, 0, gradient)
        gradients = backend.unembed_cross_entropy_backward(dy, *arguments, 1 / N, *rows[:2], aux)
        found.append([backend.to_host(array).copy() for array in (*rows, *gradients)])
    for name, *arrays in zip(("maxima", "sums", "target logits", "dx", "dw"), *found, strict=True):
        for array in arrays[1:]:
            assert_array_equal(array, arrays[0], strict=True, err_msg=name)


# -- the side stream -------------------------------------------------------------------------------------------------


class Recorded(NoStream):
    """A side stream that keeps a list of the products, by shape, and of its own contexts, by the event they wait for.

    An event is the number of earlier products on both streams.
    """

    def __init__(self):
        super().__init__()
        self.list, self.products = [], 0

    def multiply(self, shape):
        self.products += 1
        self.list.append(shape)

    def record(self):
        return self.products

    @contextlib.contextmanager
    def run(self, *operands, ready=None):
        self.flush()
        self.list.append(self.record() if ready is None else ready)
        yield


def test_a_gradient_on_the_side_stream_waits_for_no_kernel_that_is_launched_after_its_operands(rng, monkeypatch):
    """Backward of an MLP and of the LayerNorm after it, whose sums have a postponed launch."""
    backend, side = CudaBackend("fp32"), Recorded()
    backend.runtime.side, multiply = side, backend.products.multiply
    monkeypatch.setattr(
        backend.products, "multiply", lambda out, *a, **k: (side.multiply(out.shape), multiply(out, *a, **k))
    )
    shapes = (24, 16), (16, 64), (64,), (64, 16), (16,), (16,), (16,)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    leaves = [Parameter(backend.asarray(array), backend, requires_grad=i > 0) for i, array in enumerate(arrays)]
    for leaf in leaves[1:]:
        leaf.send_to(backend.empty(leaf.shape, np.float32))
    x, *mlp, a_bias, w, b = leaves
    _, y = ops.residual_layernorm(x, ops.mlp(x, *mlp), a_bias, w, b)
    side.list, side.products = [], 0
    y.backward(backend.asarray(rng.standard_normal((24, 16)).astype(np.float32)))
    backend.runtime.join()
    hidden, first, second = (24, 64), (16, 64), (64, 16)
    # The sums of the LayerNorm and the gradient of the second weight wait for no product, the others only for `hidden`.
    assert side.list == [hidden, 0, 0, second, 1, first, 1], side.list


class Ordered(NoStream):
    """A side stream that knows for each launch which earlier launches have ended before it begins.

    An event, and `main` and `side`, the state of a stream, are sets of launches, which are numbers.
    """

    def __init__(self):
        super().__init__()
        self.main, self.side, self.on_side, self.count = set(), set(), False, 0

    def launch(self):
        """The launches before a new one on the stream that is current, and the number of the new one."""
        stream, number = self.side if self.on_side else self.main, self.count
        before, self.count = set(stream), self.count + 1
        stream.add(number)
        return before, number

    def record(self):
        return frozenset(self.main)

    @contextlib.contextmanager
    def run(self, *operands, ready=None):
        self.flush()
        self.side |= self.record() if ready is None else ready
        self.on_side = True
        yield
        self.on_side = False

    @contextlib.contextmanager
    def ahead(self):
        self.flush()
        yield
        self.side |= self.record()


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "later"])
def test_a_gradient_is_added_after_the_kernel_that_writes_the_first_one_has_ended(rng, monkeypatch, deferred):
    """Two embeddings from one table, whose first gradient is written on the main stream."""
    backend, side, writes = CudaBackend("fp32"), Ordered(), []
    backend.runtime.side, token_gradient = side, embedding.token_gradient

    def record(dwte, chunk_sums, tokens, dy, accumulate, first):
        writes.append((*side.launch(), accumulate))
        token_gradient(dwte, chunk_sums, tokens, dy, accumulate, first)

    monkeypatch.setattr(embedding, "token_gradient", record)
    leaves, later = Leaves(backend, True), []
    for table in (leaves.wte, leaves.wpe):
        table.send_to(backend.empty(table.shape, np.float32))
    y = ops.embedding(leaves.ids, leaves.wte, leaves.wpe) + ops.embedding(leaves.ids, leaves.wte, leaves.wpe)
    y.backward(
        backend.asarray(rng.standard_normal(y.shape).astype(np.float32)),
        deliver=deliver(later.append if deferred else call),
    )
    for function in later:
        function()
    (_, first, adds), (before, _, adds_too) = writes
    assert (adds, adds_too) == (False, True) and first in before


# -- the sums of a LayerNorm, which one launch writes ----------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("buffered", [(), (0,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2), (1,), (0, 1), (2,), (1, 2)], ids=str)
def test_sums_of_partials_are_right_in_any_order_and_number(backend, rng, order, buffered, times):
    """In new arrays, written to and added to destinations, some of them never; again with the destinations filled."""
    partials = rng.standard_normal((3, 5, 24)).astype(np.float32)
    arrays = [backend.asarray(np.full(24, np.nan, np.float32)) for _ in range(3)]
    found = {}
    for number in range(times):
        functions = backend.sums_of_partials(backend.asarray(partials))
        for i in order:
            out = Destination(arrays[i], accumulate=number > 0) if i in buffered else None
            found[i] = functions[i](out)
            assert out is None or found[i] is arrays[i]
    backend.runtime.join()
    for i in order:  # a few roundings of 6e-8
        np.testing.assert_allclose(
            backend.to_host(found[i]), partials[i].sum(0) * (times if i in buffered else 1), rtol=0, atol=1e-5
        )
    for i in set(range(3)) - set(order):
        assert np.isnan(backend.to_host(arrays[i])).all()


def test_a_sum_is_written_to_each_of_two_destinations(backend, rng):
    partials = rng.standard_normal((3, 5, 24)).astype(np.float32)
    arrays = [backend.asarray(np.full(24, np.nan, np.float32)) for _ in range(2)]
    function = backend.sums_of_partials(backend.asarray(partials))[0]
    for array in arrays:
        function(Destination(array, accumulate=False))
    backend.runtime.join()
    for array in arrays:
        np.testing.assert_allclose(backend.to_host(array), partials[0].sum(0), rtol=0, atol=1e-5)


def test_a_postponed_launch_runs_before_the_gradient_is_read_added_to_or_joined(backend, rng):
    """Two LayerNorms one after another, the second adds to the destinations of the first: all sums are there."""
    first, second = (rng.standard_normal((3, 5, 24)).astype(np.float32) for _ in range(2))
    arrays = [backend.asarray(np.full(24, np.nan, np.float32)) for _ in range(3)]
    for function, array in zip(backend.sums_of_partials(backend.asarray(first)), arrays, strict=True):
        function(Destination(array, accumulate=False))
    functions = backend.sums_of_partials(backend.asarray(second))
    functions[1](Destination(arrays[1], accumulate=True))
    backend.put(backend.asarray(second[0].sum(0)), Destination(arrays[0], accumulate=True))
    with backend.runtime.after():
        found = [np.array(backend.to_host(array)) for array in arrays]
    for got, want in zip(found, (first[0] + second[0], first[1] + second[1], first[2]), strict=True):
        np.testing.assert_allclose(got, want.sum(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("without", [None, "bias", "scale", "a_bias"])
def test_a_layernorm_has_its_gradients_whichever_are_asked_for_through_a_kept_graph(backend, rng, without, deferred):
    values = {name: rng.standard_normal(16) for name in ("a_bias", "scale", "bias")}
    x, branch, ds, dy = rng.standard_normal((4, B, T, 16))
    found = []
    for each in (backend, NumpyBackend("fp64")):
        leaves = {
            name: Parameter(each.asarray(v.astype(each.dtype)), each, name != without) for name, v in values.items()
        }
        for leaf in leaves.values():
            leaf.send_to(each.empty((16,), each.dtype))
        fixed = (Tensor(each.asarray(v.astype(each.dtype)), each) for v in (x, branch))
        s, y = ops.residual_layernorm(*fixed, *leaves.values())
        roots, later = ((s, ds), (y, dy)), []
        when = later.append if deferred else call
        for root, gradient in roots + roots[1:]:  # the graph of y twice, so its gradients are added
            root.backward(each.asarray(gradient.astype(each.dtype)), retain_graph=True, deliver=deliver(when))
        for function in later:
            function()
        each.runtime.join()
        found.append({name: each.to_host(leaf.grad) for name, leaf in leaves.items() if leaf.requires_grad})
    for name, want in found[1].items():  # fp32: a few roundings of 6e-8 of the terms of a sum, which may cancel
        np.testing.assert_allclose(found[0][name], want, rtol=0, atol=3e-5 * max(1, np.abs(want).max()))
