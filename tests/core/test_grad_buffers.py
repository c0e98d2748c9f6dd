"""Backward kernels write parameter gradients to the given arrays, with the bits of gradients in new arrays."""

# B batch, T time, C channels, K columns, V vocabulary, N = B*T rows

import functools

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core import ops, primitives  # noqa: F401 - primitives defines +, *, sum
from gpt2core.model import GPT2, GPT2Config, parameter_shapes
from gpt2core.parallel.whole_parameters import initial_parameters
from gpt2core.tensor import AutogradError, Tensor
from stage0_serial import vocabulary
from stage0_serial.numpy_backend import NumpyBackend
from tests.support.training import make_trainer

pytestmark = pytest.mark.fast

B, T, C, K, V = 2, 9, 8, 12, 20


@pytest.fixture(params=["fp32", "fp64"])
def backend(request):
    return NumpyBackend(request.param)


def normal(rng, backend, *shape):
    return rng.standard_normal(shape).astype(backend.dtype)


# -- the model --------------------------------------------------------------------------------------------------------


def leaves_of(config, backend, buffered):
    """{name: leaf}, with a grad_buffer of NaN for each leaf where `buffered`."""
    leaves = {}
    for name, value in initial_parameters(config, seed=1):
        leaves[name] = Tensor((value * 10).astype(backend.dtype), backend, requires_grad=True)
        if buffered:
            leaves[name].grad_buffer = np.full(value.shape, np.nan, backend.dtype)
    return leaves


def gradients_of(config, leaves, ids, targets):
    """{name: the array that backward() delivers to the leaf}."""
    delivered = {}
    for name, leaf in leaves.items():
        leaf.on_gradient = functools.partial(delivered.__setitem__, name)
    GPT2(config, leaves).loss(ids, targets).backward()
    return delivered


@pytest.mark.parametrize("logits", [None, 7 * 37], ids=["all logits", "chunks"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_in_buffers_equal_gradients_in_new_arrays_bit_for_bit(backend, rng, tied, logits, monkeypatch):
    """Tied, the logits' backward writes the gradient of the embedding, and the embedding's backward adds to it."""
    if logits:
        monkeypatch.setattr(vocabulary, "LOGITS", logits)
    config = GPT2Config(37, 16, 2, 2, 16, tied=tied)
    ids, targets = rng.integers(0, 37, (2, 3, 16))
    plain, buffered = (leaves_of(config, backend, given) for given in (False, True))
    for _ in range(2):  # the second backward overwrites the gradients of the first
        got, want = (gradients_of(config, leaves, ids, targets) for leaves in (buffered, plain))
        assert set(got) == set(want) == set(buffered)
        for name, leaf in buffered.items():
            assert np.shares_memory(got[name], leaf.grad_buffer), name
            assert_array_equal(leaf.grad_buffer, want[name], strict=True, err_msg=name)


@pytest.mark.parametrize("micro_batches, direct", [(1, True), (4, False)])
def test_only_a_worker_with_one_micro_batch_has_gradients_written_to_its_sum(monkeypatch, micro_batches, direct):
    monkeypatch.setattr(NumpyBackend, "merges_micro_batches", False)
    trainer = make_trainer(None, None, micro_batches=micro_batches)
    views = trainer.arena.views(trainer.accumulator.gradients)
    for name, tensor in trainer.accumulator.workers[0].tensors.items():
        assert (tensor.grad_buffer is not None) == direct
        assert not direct or np.shares_memory(tensor.grad_buffer, views[name])
    assert list(views) == [name for name, _ in parameter_shapes(trainer.config)]


# -- leaves that several operations use --------------------------------------------------------------------------------


class Leaves:
    """Leaves with fixed random values, by name; `buffered`: each has a grad_buffer of NaN. ids, targets: (B, T)."""

    shapes = dict(x=(B, T, C), w=(C, C), w2=(C, C), scale=(C,), bias=(C,), wte=(V, C), wpe=(T, C), wpe2=(T, C))

    def __init__(self, backend, buffered):
        rng = np.random.default_rng(5)
        self.ids, self.targets = rng.integers(0, V, (2, B, T))
        for name, shape in self.shapes.items():
            leaf = Tensor(normal(rng, backend, *shape), backend, True)
            leaf.grad_buffer = np.full(shape, np.nan, backend.dtype) if buffered and name != "x" else None
            setattr(self, name, leaf)

    def head(self, y):
        return ops.unembed_cross_entropy(y, self.wte, self.targets)

    def embedding(self, wpe, tied):
        return ops.embedding(self.ids, self.wte, wpe, tied=tied)

    def logits_loss(self, y):
        return ops.cross_entropy(ops.unembed(y, self.wte), self.targets)


def two_losses(a):
    first, second = a.head(a.x), a.head(a.x * 2)
    second.backward()
    first.backward()


def residual(a):
    return ops.residual_layernorm(a.x, a.x, a.bias, a.scale, a.bias)


def norms(a, x):
    return ops.layernorm(ops.layernorm(x, a.scale, a.bias), a.scale, a.bias)


RIGHT = {  # a graph whose leaves have grad_buffers: it gives the gradients that it gives without them
    "one linear": lambda a: ops.linear(a.x, a.w, a.bias).sum().backward(),
    "tied embedding and head": lambda a: a.head(a.embedding(a.wpe, True)).backward(),
    "tied embedding and logits": lambda a: a.logits_loss(a.embedding(a.wpe, True)).backward(),
    "two tied embeddings and head": lambda a: a.head(a.embedding(a.wpe, True) + a.embedding(a.wpe2, True)).backward(),
    "a linear in two recomputed parts": lambda a: ops.recompute(
        lambda x: ops.linear(x, a.w), ops.recompute(lambda x: ops.linear(x, a.w), a.x)
    ).sum().backward(),
    "a linear in a recomputed part and before it": lambda a: ops.linear(
        ops.recompute(lambda x: ops.linear(x, a.w), ops.linear(a.x, a.w)), a.w2
    ).sum().backward(),
    "a norm, and one whose result is not used": lambda a: ops.layernorm(
        ops.stream_layernorm(a.x, a.scale, a.bias)[0], a.scale, a.bias
    ).sum().backward(),
    "one head after another": lambda a: (a.head(a.x).backward(), a.head(a.x * 2).backward()),
}  # fmt: skip
REFUSED = {  # a kernel would overwrite a gradient, or an operation without such a kernel uses the leaf
    "two linears": lambda a: ops.linear(ops.linear(a.x, a.w), a.w).sum().backward(),
    "a linear of its weight": lambda a: ops.linear(a.w, a.w).sum().backward(),
    "a residual layernorm with a bias twice": lambda a: residual(a)[1].sum().backward(),
    "two layernorms": lambda a: norms(a, a.x).sum().backward(),
    "an mlp with one weight": lambda a: ops.mlp(a.x, a.w, a.bias, a.w).sum().backward(),
    "two embeddings": lambda a: (a.embedding(a.wpe, False) + a.embedding(a.wpe2, False)).sum().backward(),
    "untied embedding and head": lambda a: a.head(a.embedding(a.wpe, False)).backward(),
    "tied embedding without a head": lambda a: a.embedding(a.wpe, True).sum().backward(),
    "head before the tied embedding": lambda a: (a.head(a.x) + a.embedding(a.wpe, True).sum()).backward(),
    "tied embeddings with one wpe": lambda a: a.head(a.embedding(a.wpe, True) + a.embedding(a.wpe, True)).backward(),
    "a linear and a product": lambda a: (ops.linear(a.x, a.w).sum() + (a.w * a.w).sum()).backward(),
    "a product and a linear": lambda a: ((a.w * a.w).sum() + ops.linear(a.x, a.w).sum()).backward(),
    "a product": lambda a: (a.w * a.w).sum().backward(),
    "two heads at the same time": two_losses,
    "a tied model with a recomputed use of wte": lambda a: a.head(
        ops.recompute(lambda x: ops.unembed(x, a.wte) @ a.wte.data, a.embedding(a.wpe, True))
    ).backward(),
}  # fmt: skip


@pytest.mark.parametrize("graph", RIGHT)
def test_a_graph_with_grad_buffers_gives_the_gradients_that_it_gives_without(backend, graph):
    plain, buffered = Leaves(backend, False), Leaves(backend, True)
    for leaves in (plain, buffered):
        for _ in range(2):
            RIGHT[graph](leaves)
    for name in Leaves.shapes:
        got, want = getattr(buffered, name).grad, getattr(plain, name).grad
        assert (got is None) == (want is None), name
        # two passes are added, and a sum of two embeddings may be added in another order: rounding errors only
        assert want is None or np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), name


@pytest.mark.parametrize("graph", REFUSED)
def test_a_graph_that_would_lose_a_gradient_of_a_grad_buffer_is_refused(backend, graph):
    REFUSED[graph](Leaves(backend, False))  # right without grad_buffers
    leaves = Leaves(backend, True)
    for _ in range(2):
        with pytest.raises(AutogradError, match="buffer"):
            REFUSED[graph](leaves)
    leaves.wte.grad = leaves.w.grad = None
    RIGHT["one linear"](leaves)  # after an error, the leaves can be used again
    RIGHT["tied embedding and head"](leaves)
    plain = Leaves(backend, False)
    RIGHT["one linear"](plain)
    RIGHT["tied embedding and head"](plain)
    for name in ("w", "wte"):
        assert_array_equal(getattr(leaves, name).grad, getattr(plain, name).grad, strict=True)


def test_a_second_backward_through_a_kept_graph_is_right_or_refused(backend):
    kept = {
        "linear": lambda a: ops.linear(a.x, a.w).sum(),
        "tied logits": lambda a: a.logits_loss(a.embedding(a.wpe, True)),
        "head": lambda a: a.head(a.embedding(a.wpe, True)),
    }
    for name, graph in kept.items():
        plain, buffered = Leaves(backend, False), Leaves(backend, True)
        losses = [graph(leaves) for leaves in (plain, buffered)]
        for loss in losses:
            loss.backward(retain_graph=True)
        losses[0].backward()
        if name == "head":  # on a GPU, forward has written the gradient, to which the embedding's was added
            with pytest.raises(AutogradError, match="call backward.. once"):
                losses[1].backward()
            continue
        losses[1].backward()
        for each in ("w", "wte"):
            got, want = getattr(buffered, each).grad, getattr(plain, each).grad
            assert want is None or np.array_equal(got, want), (name, each)


# -- one kernel after another -----------------------------------------------------------------------------------------


def backwards(backend, rng):
    """{kernel: (function of out, for each result the index of its array in out, or None)}."""
    x, dy, ds = (normal(rng, backend, B, T, C) for _ in range(3))
    bias, w, b = (normal(rng, backend, C) for _ in range(3))
    wide, wb, w2, d_wide = (normal(rng, backend, *shape) for shape in ((C, K), (K,), (K, C), (B, T, K)))
    wte, wpe, ids = normal(rng, backend, V, C), normal(rng, backend, T + 2, C), rng.integers(0, V, (B, T))
    x2, targets, d_logits = x.reshape(-1, C), rng.integers(0, V, B * T), normal(rng, backend, B, T, V)
    aux_gelu, aux_mlp = backend.linear_gelu_forward(x, wide, wb)[1], backend.mlp_forward(x, wide, wb, w2)[1]
    aux_norm = backend.layernorm_forward(x, w, b, 1e-5)[1]
    aux_residual = backend.residual_layernorm_forward(x, ds, bias, w, b, 1e-5)[2]
    maxima, sums, _, aux_head = backend.unembed_cross_entropy_forward(x2, wte, targets)
    rows = np.asarray(1.3), x2, wte, targets, 0.1, maxima, sums
    return {
        "linear": (lambda out: backend.linear_backward(d_wide, x, wide, True, out), [None, 0, 1]),
        "linear_gelu": (lambda out: backend.linear_gelu_backward(d_wide, x, wide, aux_gelu, out), [None, 0, 1]),
        "mlp": (lambda out: backend.mlp_backward(dy, x, wide, w2, aux_mlp, out), [None, 0, 1, 2]),
        "layernorm": (lambda out: backend.layernorm_backward(dy, w, aux_norm, out), [None, 0, 1]),
        "residual_layernorm": (
            lambda out: backend.residual_layernorm_backward(ds, dy, w, aux_residual, out), [None, 0, 1, 2],
        ),
        "embedding": (lambda out: backend.embedding_backward(dy, ids, wte, wpe, 1, 0, out), [0, 1]),
        "unembed": (lambda out: backend.unembed_backward(d_logits, x, wte, *out), [None, 0]),
        "unembed_cross_entropy": (
            lambda out: backend.unembed_cross_entropy_backward(*rows, aux_head, 0, *out), [None, 0],
        ),
        "unembed_cross_entropy in chunks": (
            lambda out: backend.unembed_cross_entropy_backward(*rows, None, 0, *out), [None, 0],
        ),
    }  # fmt: skip


KERNELS = list(backwards(NumpyBackend("fp64"), np.random.default_rng(0)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_backward_kernel_fills_and_returns_the_arrays_of_out(backend, rng, kernel):
    backward, places = backwards(backend, rng)[kernel]
    count = sum(place is not None for place in places)
    want = [np.array(array) for array in backward((None,) * count)]
    out = tuple(np.full_like(array, np.nan) for array, place in zip(want, places, strict=True) if place is not None)
    got = backward(out)
    backend.runtime.join()
    for array, wanted, place in zip(got, want, places, strict=True):
        assert_array_equal(array, wanted, strict=True)
        assert place is None or np.shares_memory(array, out[place])
        assert place is None or np.array_equal(out[place], wanted)


def test_the_embedding_adds_its_gradient_to_what_the_buffer_holds(backend, rng):
    ids, dy = rng.integers(0, V, (B, T)), normal(rng, backend, B, T, C)
    wte, wpe, held = normal(rng, backend, V, C), normal(rng, backend, T, C), normal(rng, backend, V, C)
    dwte, dwpe = backend.embedding_backward(dy, ids, wte, wpe)
    out = held.copy(), np.full_like(wpe, np.nan)
    got = backend.embedding_backward(dy, ids, wte, wpe, 0, 0, out, accumulate=True)
    assert_array_equal(got[0], held + dwte, strict=True)
    assert_array_equal(got[1], dwpe, strict=True)
    assert all(np.shares_memory(a, b) for a, b in zip(got, out, strict=True))


def test_a_residual_layernorm_without_a_gradient_of_its_norm_fills_no_buffer(backend, rng):
    x, a = (Tensor(normal(rng, backend, B, T, C), backend, True) for _ in range(2))
    a_bias, w, b = (Tensor(normal(rng, backend, C), backend, True) for _ in range(3))
    a_bias.grad_buffer = np.zeros(C, backend.dtype)
    s, _ = ops.residual_layernorm(x, a, a_bias, w, b)
    with pytest.raises(AutogradError, match="contains 0 of its 1 gradients"):
        s.backward(np.ones_like(s.data))


# -- dloss of the fused loss -------------------------------------------------------------------------------------------


def head_of(rng, backend):
    """x, w and targets of ops.unembed_cross_entropy."""
    x, w = (Tensor(normal(rng, backend, *shape), backend, True) for shape in ((B, T, C), (V, C)))
    return x, w, rng.integers(0, V, (B, T))


def test_backward_with_another_array_than_the_seed_is_refused(backend, rng):
    x, w, targets = head_of(rng, backend)
    dloss = backend.ones((), np.float64)
    with pytest.raises(AutogradError, match="with the dloss array that forward was given"):
        ops.unembed_cross_entropy(x, w, targets, dloss=dloss).backward(dloss.copy())
    ops.unembed_cross_entropy(x, w, targets, dloss=dloss).backward(dloss)
    assert x.grad is not None


def test_a_seeded_gradient_is_the_seed_times_the_gradient_without_one(backend, rng):
    x, w, targets = head_of(rng, backend)
    ops.unembed_cross_entropy(x, w, targets).backward()
    want, x.grad, w.grad = (8.0 * x.grad, 8.0 * w.grad), None, None
    dloss = backend.asarray(np.array(8.0))
    ops.unembed_cross_entropy(x, w, targets, dloss=dloss).backward(dloss)
    for got, wanted in zip((x.grad, w.grad), want, strict=True):
        assert_allclose(got, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())  # a power of two rounds nothing
