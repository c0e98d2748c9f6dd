"""The LayerNorm that reads the residual stream computes its sum; a sum that is computed before has the same bits."""

# B batch, T time, C channels

import dataclasses
import functools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core import ops, primitives  # noqa: F401 - primitives defines * and sum of tensors
from gpt2core.architecture import GPT2Config, unit_names
from gpt2core.communicator import Solo
from gpt2core.dropout import Dropout, dropout_key
from gpt2core.forward_arguments import ForwardArguments
from gpt2core.model import initial_parameters
from gpt2core.parallel.part import Part, mark_stream
from gpt2core.parallel.tensor.sliced_units import make_units
from gpt2core.plain_backend import PlainBackend
from gpt2core.stream import Branch, Stream
from gpt2core.tensor import Tensor
from stage0_serial.numpy_backend import NumpyBackend

pytestmark = pytest.mark.fast

B, T, C, EPS = 2, 9, 8, 1e-5
SIZES = GPT2Config(vocab_size=11, block_size=T, n_layer=2, n_head=2, n_embd=C, tied=False)
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
    s, y = x.layernorm(leaves.w, leaves.b, EPS)
    assert names == ["residual_layernorm_forward"] and y.shape == (B, T, C)
    assert_array_equal(s.tensor().data, leaves.x.data + (leaves.a.data + leaves.bias.data))
    x = s + second
    assert names == ["residual_layernorm_forward"]  # the new stream has the sum
    x = Stream(x.tensor())
    assert names == ["residual_layernorm_forward", "residual_add_forward"]  # no LayerNorm read it
    x.layernorm(leaves.w, leaves.b, EPS)
    assert names[2] == "layernorm_forward"


def test_nothing_changes_a_stream(backend):
    leaves = Leaves(backend)
    first, second = leaves.branches()
    x = Stream(leaves.x)
    y = x + first
    z = y + second
    y.layernorm(leaves.w, leaves.b, EPS)
    assert x.tensor() is leaves.x and (y.x, y.branch) == (leaves.x, first)
    with pytest.raises(dataclasses.FrozenInstanceError):
        y.branch = None
    assert_array_equal(y.tensor().data, leaves.x.data + (leaves.a.data + leaves.bias.data))
    assert_array_equal(z.tensor().data, y.tensor().data + (leaves.a2.data + leaves.bias2.data))


@pytest.mark.parametrize("marked", [False, True])
def test_a_sum_that_is_computed_before_a_layernorm_reads_it_has_the_same_bits(backend, marked):
    """A model that is cut between two blocks computes the sum at the end of the first one."""

    def read(leaves, cut):
        x, reports = Stream(leaves.x), []
        for branch in leaves.branches():
            x, y = x.layernorm(leaves.w, leaves.b, EPS)
            x = x + Branch(ops.gelu(y) * branch.output, branch.bias)
            if marked:
                x = mark_stream(x, lambda: reports.append(len(reports)))
            if cut:
                x = Stream(x.tensor())
        x, y = x.layernorm(leaves.w, leaves.b, EPS)
        return [y, x.tensor()]

    assert_equal(
        results(backend, lambda leaves: read(leaves, True)), results(backend, lambda leaves: read(leaves, False))
    )


def test_a_mark_on_a_stream_reports_between_the_gradients_of_its_two_sides(backend):
    leaves, seen = Leaves(backend), []
    first, _ = leaves.branches()
    front = Branch(ops.gelu(leaves.a), leaves.bias)
    x = mark_stream(Stream(leaves.x * 2) + front, lambda: seen.append(set(leaves.gradients())))
    x.layernorm(leaves.w, leaves.b, EPS)[1].sum().backward()
    # the branch's bias is added by the LayerNorm after the mark
    assert seen == [{"w", "b", "bias"}]
    assert set(leaves.gradients()) == {"x", "a", "w", "b", "bias"}
    plain = Leaves(backend)
    x = Stream(plain.x * 2) + Branch(ops.gelu(plain.a), plain.bias)
    x.layernorm(plain.w, plain.b, EPS)[1].sum().backward()
    for name, gradient in plain.gradients().items():
        assert_array_equal(leaves.gradients()[name], gradient, strict=True, err_msg=name)


@pytest.mark.parametrize("p", [0.0, 0.1], ids=["plain", "dropout"])
def test_the_input_of_a_unit_is_freed_when_its_sum_is_computed(monkeypatch, p):
    """Before the attention and the MLP of a block, and before the logits, no array of the sum is in memory."""
    work = SimpleNamespace(config=SIZES, slices=1, dropout=p)
    backend, alive, checked = PlainBackend(), [], []
    tensors = {name: Tensor(array, backend, requires_grad=True) for name, array in initial_parameters(SIZES, 1)}
    part = Part(make_units(unit_names(SIZES), work, tensors, Solo()), backend)
    add = backend.residual_layernorm_forward

    def recorded(x, a, *others):
        alive.extend([weakref.ref(x), weakref.ref(a)])
        return add(x, a, *others)

    def check(compute, *arguments):
        checked.append([reference() for reference in alive])
        return compute(*arguments)

    monkeypatch.setattr(backend, "residual_layernorm_forward", recorded)
    for name in ("attention_forward", "mlp_forward", "unembed_cross_entropy_forward"):
        monkeypatch.setattr(backend, name, functools.partial(check, getattr(backend, name)))
    ids, targets = np.random.default_rng().integers(0, SIZES.vocab_size, (2, B, T))
    dropout = Dropout(p, dropout_key(0, 1)) if p else None
    graph = part.forward(ids, ForwardArguments(targets=targets, dropout=dropout))
    assert [len(arrays) for arrays in checked] == [0, 2, 4, 6, 8]
    assert all(array is None for arrays in checked for array in arrays)
    graph.backward(np.ones(()))
