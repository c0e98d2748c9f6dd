"""The residual stream computes a sum when it is read, and a sum that is computed first has the same bits."""

# B batch, T time, C channels

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core import ops, primitives  # noqa: F401 - primitives defines * and sum of tensors
from gpt2core.parallel.part import mark_stream
from gpt2core.plain_backend import PlainBackend
from gpt2core.stream import Branch, Stream
from gpt2core.tensor import Tensor
from stage0_serial.numpy_backend import NumpyBackend

pytestmark = pytest.mark.fast

B, T, C, EPS = 2, 9, 8, 1e-5
SHAPES = dict(x=(B, T, C), a=(B, T, C), a2=(B, T, C), bias=(C,), bias2=(C,), w=(C,), b=(C,))
BACKENDS = [(cls, precision) for cls in (NumpyBackend, PlainBackend) for precision in ("fp32", "fp64")]


@pytest.fixture(params=BACKENDS, ids=lambda pair: f"{pair[0].name}-{pair[1]}")
def backend(request):
    cls, precision = request.param
    return cls(precision)


class Leaves:
    def __init__(self, backend, seed=3):
        rng = np.random.default_rng(seed)
        for name, shape in SHAPES.items():
            setattr(self, name, Tensor(rng.standard_normal(shape).astype(backend.dtype), backend, requires_grad=True))

    def branches(self):
        return Branch(self.a, self.bias), Branch(self.a2, self.bias2)

    def gradients(self):
        return {name: getattr(self, name).grad for name in SHAPES if getattr(self, name).grad is not None}


def results(backend, read):
    """(arrays of the outputs, gradients) of read(Leaves) -> tensors."""
    leaves = Leaves(backend)
    outputs, rng = read(leaves), np.random.default_rng(4)
    for output in outputs:
        output.backward(rng.standard_normal(output.shape).astype(backend.dtype), retain_graph=True)
    return [output.data for output in outputs], leaves.gradients()


def assert_equal(got, want):
    assert_array_equal(got[0], want[0], strict=True)
    assert got[1].keys() == want[1].keys()
    for name in want[1]:
        assert_array_equal(got[1][name], want[1][name], strict=True, err_msg=name)


def calls(backend, monkeypatch):
    """The names of the forward kernels that are called from now on."""
    names = []
    for name in ("layernorm_forward", "residual_layernorm_forward", "residual_add_forward"):
        original = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, n=name, f=original: (names.append(n), f(*a))[1])
    return names


def test_the_layernorm_that_reads_a_sum_computes_it_with_one_fused_kernel(monkeypatch):
    backend = NumpyBackend("fp32")
    leaves, names = Leaves(backend), calls(backend, monkeypatch)
    first, second = leaves.branches()
    x = Stream(leaves.x) + first
    assert names == []  # the sum is not computed yet
    y = x.layernorm(leaves.w, leaves.b, EPS)
    assert names == ["residual_layernorm_forward"]
    assert_array_equal(x.tensor().data, leaves.x.data + (leaves.a.data + leaves.bias.data))
    assert names == ["residual_layernorm_forward"]  # it is stored
    x = x + second
    assert names == ["residual_layernorm_forward"]
    x.tensor(), x.tensor()
    assert names == ["residual_layernorm_forward", "residual_add_forward"]  # no LayerNorm read it: computed once
    x.layernorm(leaves.w, leaves.b, EPS)
    assert names[2] == "layernorm_forward"
    assert y.shape == (B, T, C)


def test_adding_a_branch_changes_no_stream(backend):
    leaves = Leaves(backend)
    first, second = leaves.branches()
    x = Stream(leaves.x)
    y = x + first
    z = y + second
    assert x.tensor() is leaves.x
    assert_array_equal(y.tensor().data, leaves.x.data + (leaves.a.data + leaves.bias.data))
    assert_array_equal(z.tensor().data, y.tensor().data + (leaves.a2.data + leaves.bias2.data))


@pytest.mark.parametrize("marked", [False, True])
def test_a_sum_that_is_computed_before_a_layernorm_reads_it_has_the_same_bits(backend, marked):
    """A model that is cut between two blocks computes the sum at the end of the first one."""

    def read(leaves, cut):
        x, reports = Stream(leaves.x), []
        for branch in leaves.branches():
            y = x.layernorm(leaves.w, leaves.b, EPS)
            x = x + Branch(ops.gelu(y) * branch.output, branch.bias)
            if marked:
                x = mark_stream(x, lambda: reports.append(len(reports)))
            if cut:
                x = Stream(x.tensor())
        return [x.layernorm(leaves.w, leaves.b, EPS), x.tensor()]

    assert_equal(
        results(backend, lambda leaves: read(leaves, True)), results(backend, lambda leaves: read(leaves, False))
    )


def test_a_mark_on_a_stream_reports_between_the_gradients_of_its_two_sides(backend):
    leaves, seen = Leaves(backend), []
    first, _ = leaves.branches()
    front = Branch(ops.gelu(leaves.a), leaves.bias)
    x = mark_stream(Stream(leaves.x * 2) + front, lambda: seen.append(set(leaves.gradients())))
    x.layernorm(leaves.w, leaves.b, EPS).sum().backward()
    # the branch's bias is added by the LayerNorm after the mark
    assert seen == [{"w", "b", "bias"}]
    assert set(leaves.gradients()) == {"x", "a", "w", "b", "bias"}
    plain = Leaves(backend)
    (Stream(plain.x * 2) + Branch(ops.gelu(plain.a), plain.bias)).layernorm(plain.w, plain.b, EPS).sum().backward()
    for name, gradient in plain.gradients().items():
        assert_array_equal(leaves.gradients()[name], gradient, strict=True, err_msg=name)
