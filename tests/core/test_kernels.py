"""Every kernel on the CPU, forward and backward, against PyTorch in float64; fused kernels against composed ones."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows

import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core import ops, primitives
from gpt2core.communicator import SOLO, address
from gpt2core.errors import ConfigError
from gpt2core.optimizer import AdamW
from gpt2core.plain_backend import PlainBackend
from gpt2core.runtime import Runtime
from gpt2core.tensor import ShapeError, Tensor, no_grad
from stage0_serial import numpy_backend, vocabulary
from stage0_serial.buffer_pool import ALIGNMENT, SMALL, BufferPool, size_class
from stage0_serial.numpy_backend import NumpyBackend
from tests.support import torch_gpt2
from tests.support.gradients import arrays

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.fast

# Relative norm against float64: a few roundings of 6e-8 or 1e-16, grown by the square root of the terms of a sum.
TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-12}


BACKENDS = [(cls, precision) for cls in (NumpyBackend, PlainBackend) for precision in ("fp32", "fp64")]


@pytest.fixture(params=BACKENDS, ids=lambda pair: f"{pair[0].name}-{pair[1]}")
def backend(request):
    cls, precision = request.param
    return cls(precision)


def near(got, want, tolerance=None, least=0.0):
    """norm(got - want) <= tolerance * max(norm(want), least), which no NaN passes."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    error = np.linalg.norm(np.subtract(got, want, dtype=np.float64))
    assert error <= (tolerance or TOLERANCE[got.dtype]) * max(np.linalg.norm(want), least)


def sealed(array):
    """A read-only copy: a kernel that writes to its inputs raises."""
    array = np.array(array)
    array.flags.writeable = False
    return array


def normal(rng, backend, *shape, scale=1.0, shift=0.0):
    return sealed((rng.standard_normal(shape) * scale + shift).astype(backend.dtype))


def oracle(function, arrays, *dys):
    """The outputs of `function` in float64, and the gradient of every array for output gradients `dys`."""
    leaves = [torch.tensor(np.asarray(array, np.float64), requires_grad=True) for array in arrays]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.tensor(np.asarray(dy, np.float64)) for dy in dys])
    return [output.detach().numpy() for output in outputs], [leaf.grad.numpy() for leaf in leaves]


def check(backend, got, want, least=0.0):
    """got: arrays, or gradients of a backward kernel."""
    for g, w in zip(arrays(*got), want, strict=True):
        assert g.dtype == backend.dtype
        near(g, w, least=least)


def repeatable(backward, *arguments):
    """The result of backward, called twice: it must not change dy, inputs or aux."""
    first = [None if array is None else array.copy() for array in arrays(*backward(*arguments))]
    for again, array in zip(arrays(*backward(*arguments)), first, strict=True):
        assert_array_equal(again, array, strict=True)
    return first


# -- one kernel pair after another ---------------------------------------------------------------------------

LEADING = [(1,), (37,), (130,), (2, 5), (3, 1, 7)]


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("C, K", [(8, 24), (3, 5), (96, 172)])
def test_linear(backend, rng, leading, C, K):
    x, w, b = (normal(rng, backend, *shape) for shape in ((*leading, C), (C, K), (K,)))
    dy = normal(rng, backend, *leading, K)
    want, gradients = oracle(lambda x, w, b: x @ w + b, (x, w, b), dy)
    check(backend, [backend.linear_forward(x, w, b)], want)
    check(backend, repeatable(backend.linear_backward, dy, x, w), gradients)
    near(backend.linear_forward(x, w), want[0] - b)


def test_one_row_times_a_large_matrix(backend, rng):
    """Decoding uses another product than many rows: it adds 3072 terms in another order, to the same tolerance."""
    x, w, b = normal(rng, backend, 1, 1, 3072), normal(rng, backend, 3072, 96), normal(rng, backend, 96)
    want, _ = oracle(lambda x, w, b: x @ w + b, (x, w, b), np.ones((1, 1, 96)))
    check(backend, [backend.linear_forward(x, w, b)], want)


# fewer elements than a block, a number of rows that no block divides, rows longer than a block, one column
ROWS = [(3, 8), (2, 5, 48), (701, 100), (2, numpy_backend.BLOCK + 5), (70000, 1)]


@pytest.mark.parametrize("shape", [*ROWS, (9,)])
def test_gelu(backend, rng, shape):
    x, dy = normal(rng, backend, *shape, scale=2), normal(rng, backend, *shape)
    want, gradients = oracle(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), (x,), dy)
    check(backend, [backend.gelu_forward(x)], want)
    # a slope is a sum of terms of size one that cancel below zero: its error is theirs, also where all slopes are small
    check(backend, [backend.gelu_backward(dy, x)], gradients, least=np.linalg.norm(dy))
    assert_array_equal(backend.gelu_backward(dy, x), backend.gelu_backward(dy, x))


@pytest.mark.parametrize("leading, C, K", [((1,), 8, 32), ((2, 33), 16, 64), ((333,), 24, 200)])
def test_linear_gelu(backend, rng, leading, C, K):
    x, w, b = (normal(rng, backend, *shape) for shape in ((*leading, C), (C, K), (K,)))
    dy = normal(rng, backend, *leading, K)
    want, gradients = oracle(lambda x, w, b: torch.nn.functional.gelu(x @ w + b, approximate="tanh"), (x, w, b), dy)
    y, aux = backend.linear_gelu_forward(x, w, b)
    check(backend, [y], want)
    check(backend, repeatable(lambda *a: backend.linear_gelu_backward(*a, aux), dy, x, w, b), gradients)
    with no_grad():  # where nothing is recorded, a kernel may keep less, but computes the same
        unrecorded = backend.linear_gelu_forward(x, w, b)[0]
    if leading == (1,):  # a product of one row may add in another order: see row_products.py
        check(backend, [unrecorded], want)
    else:
        assert_array_equal(unrecorded, y)


def torch_layernorm(x, w, b):
    return torch.nn.functional.layer_norm(x, w.shape, w, b, 1e-5)


LAYERNORM_ROWS = [(1, 8), (2, 5, 48), (701, 100), (3, numpy_backend.BLOCK + 5)]


@pytest.mark.parametrize("shape", LAYERNORM_ROWS)
def test_layernorm(backend, rng, shape):
    C = shape[-1]
    x, dy = normal(rng, backend, *shape, scale=3, shift=0.5), normal(rng, backend, *shape)
    w, b = normal(rng, backend, C, shift=1), normal(rng, backend, C)
    want, gradients = oracle(torch_layernorm, (x, w, b), dy)
    y, aux = backend.layernorm_forward(x, w, b, 1e-5)
    check(backend, [y], want)
    check(backend, repeatable(lambda dy, w: backend.layernorm_backward(dy, w, aux), dy, w), gradients)


def test_layernorm_of_equal_numbers_is_its_bias(backend, rng):
    x, w, b, dy = (normal(rng, backend, 4, 16) for _ in range(4))
    x = sealed(np.full_like(x, 3.0))
    y, aux = backend.layernorm_forward(x, w[0], b[0], 1e-5)
    assert_allclose(y, np.broadcast_to(b[0], y.shape), rtol=0, atol=1e-6)
    want, gradients = oracle(torch_layernorm, (x, w[0], b[0]), dy)
    dx, _, db = backend.layernorm_backward(dy, w[0], aux)
    check(backend, [dx, db], [gradients[0], gradients[2]])  # dw is exactly zero in the one, rounding in the other


@pytest.mark.parametrize("shape", LAYERNORM_ROWS)
def test_residual_layernorm(backend, rng, shape):
    C = shape[-1]
    x, a, ds, dy = (normal(rng, backend, *shape) for _ in range(4))
    a_bias, w, b = (normal(rng, backend, C) for _ in range(3))

    def function(x, a, a_bias, w, b):
        s = x + a + a_bias
        return s, torch_layernorm(s, w, b)

    want, (dx, da, da_bias, dw, db) = oracle(function, (x, a, a_bias, w, b), ds, dy)
    s, y, aux = backend.residual_layernorm_forward(x, a, a_bias, w, b, 1e-5)
    check(backend, [s, y], want)
    got = repeatable(lambda ds, dy, w: backend.residual_layernorm_backward(ds, dy, w, aux), ds, dy, w)
    check(backend, got, [dx, da_bias, dw, db])
    assert_array_equal(dx, da)
    want, (dx, da, da_bias, dw, db) = oracle(lambda *p: function(*p)[1], (x, a, a_bias, w, b), dy)
    got = repeatable(lambda dy, w: backend.residual_layernorm_backward(None, dy, w, aux), dy, w)
    # without ds the columns of dx nearly cancel: the sum's error is that of its terms
    bias_tolerance = TOLERANCE[backend.dtype] * max(1, np.linalg.norm(dx) / np.linalg.norm(da_bias)) * 4
    near(got[1], da_bias, bias_tolerance)
    check(backend, [got[0], *got[2:]], [dx, dw, db])


ATTENTION = [(1, 1, 1, 8), (3, 2, 2, 4), (2, 7, 2, 4), (1, 63, 3, 8), (2, 64, 1, 8), (2, 65, 3, 5), (1, 130, 2, 16),
             (1, 193, 1, 1), (2, 128, 4, 8)]  # fmt: skip


@pytest.mark.parametrize("B, T, H, D", ATTENTION)
def test_attention(backend, rng, B, T, H, D):
    qkv, dy = normal(rng, backend, B, T, 3 * H * D), normal(rng, backend, B, T, H * D)
    want, gradients = oracle(lambda qkv: torch_gpt2.attention(qkv, H), (qkv,), dy)
    y, aux = backend.attention_forward(qkv, H)
    check(backend, [y], want)
    got = backend.attention_backward(dy, qkv, y, aux, H)
    check(backend, [got], gradients)
    assert_array_equal(backend.attention_backward(dy, qkv, y, aux, H), got)


@pytest.mark.parametrize(
    "B, T, H, D, position", [(1, 1, 1, 2, 0), (2, 7, 3, 4, 0), (2, 65, 2, 16, 1000), (1, 3, 2, 6, 7)]
)
def test_rotary(backend, rng, B, T, H, D, position):
    qkv, dy = (normal(rng, backend, B, T, 3 * H * D) for _ in range(2))
    want, gradients = oracle(lambda qkv: torch_gpt2.rotary(qkv, H, position), (qkv,), dy)
    y = backend.rotary_forward(qkv, H, position)
    check(backend, [y], want)
    check(backend, repeatable(lambda dy: [backend.rotary_backward(dy, H, position)], dy), gradients)
    assert_array_equal(y[..., 2 * H * D :], qkv[..., 2 * H * D :])  # v
    for t in range(T):  # a row does not depend on the other rows: cached and recomputed keys have equal bits
        assert_array_equal(backend.rotary_forward(qkv[:, t : t + 1], H, position + t), y[:, t : t + 1])
    near(backend.rotary_backward(y, H, position), qkv)  # the opposite rotation


def test_scores_of_rotated_queries_and_keys_depend_on_the_difference_of_positions_only(backend, rng):
    H, D, shift = 2, 8, 321
    q, k = normal(rng, backend, 1, 9, H * D), normal(rng, backend, 1, 9, H * D)
    qkv = np.concatenate([q, k, k], -1)

    def scores(position):
        y = backend.rotary_forward(qkv, H, position).reshape(9, 3, H, D)
        return np.einsum("mhd,nhd->hmn", y[:, 0], y[:, 1], dtype=np.float64)

    near(scores(shift).astype(backend.dtype), scores(0).astype(backend.dtype))
    assert np.linalg.norm(scores(0) - np.einsum("mhd,nhd->hmn", *(x.reshape(9, H, D) for x in (q, k)))) > 1


@pytest.mark.parametrize("now", [0, 1, 62, 63, 64, 100])
def test_attention_never_sees_the_future(backend, rng, now):
    """Later positions change no bit of the output, and get no gradient from earlier ones."""
    qkv, other = (normal(rng, backend, 2, 130, 3 * 12, scale=2) for _ in range(2))
    changed = qkv.copy()
    changed[:, now + 1 :] = other[:, now + 1 :] * 50
    y, aux = backend.attention_forward(qkv, 3)
    assert_array_equal(backend.attention_forward(changed, 3)[0][:, : now + 1], y[:, : now + 1])
    dy = np.zeros_like(y)
    dy[:, : now + 1] = normal(rng, backend, 2, now + 1, 12)
    dqkv = backend.attention_backward(dy, qkv, y, aux, 3)
    assert not dqkv[:, now + 1 :].any() and np.isfinite(dqkv).all()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["fp32", "fp64"]), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 2**32))
def test_cached_attention_equals_attention_for_any_pieces(precision, pieces, seed):
    backend, rng = NumpyBackend(precision), np.random.default_rng(seed)
    B, H, D, T = 2, 3, 4, sum(pieces)
    qkv = normal(rng, backend, B, T, 3 * H * D)
    keys = np.full((B, H, D, T + 3), np.nan, backend.dtype)  # caches must be read only where they were written
    values = np.full((B, H, T + 3, D), np.nan, backend.dtype)
    edges = np.cumsum([0, *pieces])
    got = [backend.attention_cached(qkv[:, i:j], keys, values, i, H) for i, j in zip(edges, edges[1:], strict=False)]
    near(np.concatenate(got, 1), backend.attention_forward(qkv, H)[0])


def test_cached_attention_of_a_prompt_and_then_one_token_at_a_time(backend, rng):
    B, T, H, D, prompt = 1, 90, 2, 8, 70
    qkv = normal(rng, backend, B, T, 3 * H * D)
    keys, values = np.empty((B, H, D, T), backend.dtype), np.empty((B, H, T, D), backend.dtype)
    want = backend.attention_forward(qkv, H)[0]
    near(backend.attention_cached(qkv[:, :prompt], keys, values, 0, H), want[:, :prompt])
    for t in range(prompt, T):
        near(backend.attention_cached(qkv[:, t : t + 1], keys, values, t, H), want[:, t : t + 1])


EMBEDDING = [(1, 1, 8, 5, 0), (3, 7, 8, 4, 0), (2, 64, 33, 172, 0), (2, 5, 8, 30, 3)]


@pytest.mark.parametrize("B, T, C, V, position", EMBEDDING)
def test_embedding(backend, rng, B, T, C, V, position):
    ids = rng.integers(0, V, (B, T))  # far more rows than tokens: most appear several times, some never
    wte, wpe = normal(rng, backend, V, C), normal(rng, backend, T + position + 2, C)
    dy = normal(rng, backend, B, T, C)
    want, gradients = oracle(lambda wte, wpe: wte[torch.tensor(ids)] + wpe[position : position + T], (wte, wpe), dy)
    for kind in (np.int64, np.int32, np.uint16):
        check(backend, [backend.embedding_forward(ids.astype(kind), wte, wpe, position)], want)
        check(backend, repeatable(backend.embedding_backward, dy, ids.astype(kind), wte, wpe, position), gradients)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
def test_rows_of_an_embedding_give_what_all_rows_give_bit_for_bit(backend, rng, kind):
    V, edges = 30, [0, 11, 12, 25, 30]  # the vocabulary in pieces; no token is in the second
    ids = rng.choice(np.delete(np.arange(V), 11), (2, 70)).astype(kind)
    wte, wpe, dy = normal(rng, backend, V, 8), normal(rng, backend, 80, 8), normal(rng, backend, 2, 70, 8)
    y, (dwte, dwpe) = (
        backend.embedding_forward(ids, wte, wpe, 3),
        arrays(*backend.embedding_backward(dy, ids, wte, wpe, 3)),
    )
    total = np.zeros_like(y)
    for first, end in zip(edges, edges[1:], strict=False):
        own = sealed(wte[first:end])
        piece = backend.embedding_forward(ids, own, wpe if first == 0 else None, 3, first)
        total += piece
        got = repeatable(backend.embedding_backward, dy, ids, own, wpe, 3, first)
        for gradient, want in zip(got, (dwte[first:end], dwpe), strict=True):
            assert_array_equal(gradient, want, strict=True)
        assert first == 0 or not piece[(ids < first) | (ids >= end)].any()
    assert_array_equal(total, y, strict=True)  # all but one of the terms are zero


@pytest.mark.parametrize("token", [-1, 7, 2**40])
def test_a_token_outside_the_vocabulary_is_reported(backend, rng, token):
    ids = np.array([[1, token, 6]])
    wte, wpe = (Tensor(normal(rng, backend, n, 4), backend, True) for n in (7, 3))
    with pytest.raises(ShapeError, match=f"token {token} is outside the vocabulary of 7"):
        ops.embedding(ids, wte, wpe)


@pytest.mark.parametrize("leading", LEADING)
def test_unembed(backend, rng, leading):
    C, V = 24, 172
    x, w, dy = (normal(rng, backend, *shape) for shape in ((*leading, C), (V, C), (*leading, V)))
    want, gradients = oracle(lambda x, w: x @ w.T, (x, w), dy)
    check(backend, [backend.unembed_forward(x, w)], want)
    check(backend, repeatable(backend.unembed_backward, dy, x, w), gradients)


def torch_cross_entropy(logits, targets, scale):
    return torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum") * scale


@pytest.mark.parametrize("N, V", [(1, 172), (37, 172), (130, 2), (5, 50257)])
def test_cross_entropy(backend, rng, N, V):
    logits, targets, scale = normal(rng, backend, N, V, scale=3), rng.integers(0, V, N), float(rng.uniform(0.1, 2))
    dy = np.asarray(rng.uniform(0.5, 2))
    want, gradients = oracle(lambda x: torch_cross_entropy(x, targets, scale), (logits,), dy)
    *whole, aux = backend.cross_entropy_forward(logits, targets)
    loss, maxima, sums = ops.loss_of_rows(*whole, scale, SOLO, backend)
    assert loss.shape == () and loss.dtype == np.float64  # summed in float64 whatever the precision
    assert abs(loss - want[0]) <= TOLERANCE[backend.dtype] * scale * N  # a row's loss: a difference of numbers near 1
    rows = targets, scale, maxima, sums
    got = repeatable(lambda dy, logits: (backend.cross_entropy_backward(dy, logits, *rows, aux),), dy, logits)
    check(backend, got, gradients)


@pytest.mark.parametrize("shift", [0, 300])  # exp(300) overflows in fp32: a piece far below the maximum must not matter
def test_columns_of_the_logits_give_the_cross_entropy_of_all(backend, rng, shift):
    N, V, edges, scale, dy = 37, 172, [0, 60, 61, 172], 0.7, np.asarray(1.3)
    logits = np.array(normal(rng, backend, N, V, scale=3))
    logits[::2, :60] -= shift
    logits[::3, 61:] += shift
    targets, maxima = rng.integers(0, V, N), logits.max(1)
    want, gradients = oracle(lambda x: torch_cross_entropy(x, targets, scale), (logits,), dy)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        pieces = []
        for first, end in zip(edges, edges[1:], strict=False):
            own = sealed(logits[:, first:end])
            highest, sums, picked, aux = backend.cross_entropy_forward(own, targets, first)
            assert_array_equal(highest, own.max(1), strict=True)
            assert_array_equal(picked != 0, (targets >= first) & (targets < end))
            pieces.append((own, first, sums * np.exp(highest - maxima), picked, aux))
        sums, picked = (sum(piece[i] for piece in pieces) for i in (2, 3))
        rows = targets, scale, maxima, sums
        got = [backend.cross_entropy_backward(dy, own, *rows, aux, first) for own, first, _, _, aux in pieces]
        loss = ops.loss_of_rows(maxima, sums, picked, scale, SOLO, backend)[0]
    near(loss, want[0], TOLERANCE[backend.dtype])
    check(backend, [np.concatenate(got, 1)], gradients)


@pytest.mark.parametrize("N, C, V", [(1, 8, 172), (37, 8, 172), (6, 16, 50257)])
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_unembed_cross_entropy_with_all_logits_at_once_and_in_chunks(backend, rng, monkeypatch, N, C, V, chunk):
    if chunk:
        monkeypatch.setattr(vocabulary, "LOGITS", chunk * V)  # so many rows at once
    # logits near 1: no target is so likely that its loss and gradient are differences of numbers that are nearly equal
    x, w, targets = normal(rng, backend, N, C), normal(rng, backend, V, C, scale=C**-0.5), rng.integers(0, V, N)
    dy, scale = np.asarray(1.5), 1 / N
    want, gradients = oracle(lambda x, w: torch_cross_entropy(x @ w.T, targets, scale), (x, w), dy)
    *whole, aux = backend.unembed_cross_entropy_forward(x, w, targets)
    loss, maxima, sums = ops.loss_of_rows(*whole, scale, SOLO, backend)
    if isinstance(backend, NumpyBackend):
        assert (aux is None) == (chunk is not None and chunk < N)  # in chunks, no logits are kept
    near(loss, want[0], TOLERANCE[backend.dtype])
    rows = targets, scale, maxima, sums, aux
    got = repeatable(lambda *a: backend.unembed_cross_entropy_backward(*a, *rows), dy, x, w)
    check(backend, got, gradients)


def test_logits_that_do_not_fit_even_one_row_are_taken_row_by_row(rng, monkeypatch):
    monkeypatch.setattr(vocabulary, "LOGITS", 10)
    backend = NumpyBackend("fp64")
    x, w, targets = normal(rng, backend, 4, 8), normal(rng, backend, 172, 8), rng.integers(0, 172, 4)
    *whole, aux = backend.unembed_cross_entropy_forward(x, w, targets)
    assert aux is None
    loss = ops.loss_of_rows(*whole, 1.0, SOLO, backend)[0]
    assert_allclose(loss, oracle(lambda x: torch_cross_entropy(x, targets, 1.0), (x @ w.T,), 1.0)[0][0], rtol=1e-12)


# -- extremes ------------------------------------------------------------------------------------------------


def test_extreme_logits_neither_overflow_nor_lose_the_loss(backend, rng):
    N, V = 9, 172
    logits, targets = rng.standard_normal((N, V)), rng.integers(0, V, N)
    for scale in (1e4, 1e30):
        extreme = sealed((logits * scale).astype(backend.dtype))
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            *whole, aux = backend.cross_entropy_forward(extreme, targets)
            loss, maxima, sums = ops.loss_of_rows(*whole, 1 / N, SOLO, backend)
            dlogits = backend.cross_entropy_backward(np.asarray(1.0), extreme, targets, 1 / N, maxima, sums, aux)
        want, gradients = oracle(lambda x: torch_cross_entropy(x, targets, 1 / N), (extreme,), 1.0)
        near(loss, want[0], TOLERANCE[backend.dtype])
        check(backend, [dlogits], gradients)
        y = primitives.softmax(Tensor(extreme, backend)).numpy()
        near(y, torch.softmax(torch.tensor(extreme, dtype=torch.float64), -1))


def test_extreme_attention_scores_do_not_overflow(backend, rng):
    qkv, dy = normal(rng, backend, 1, 70, 3 * 8, scale=100), normal(rng, backend, 1, 70, 8)  # scores of 1e4
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        y, aux = backend.attention_forward(qkv, 2)
        dqkv = backend.attention_backward(dy, qkv, y, aux, 2)
    assert np.isfinite(y).all() and np.isfinite(dqkv).all()
    want, gradients = oracle(lambda x: torch_gpt2.attention(x, 2), (qkv,), dy)
    # a score of 1e4 is known to 1e-3 in fp32 and to 1e-11 in fp64, and so is its exponential
    for got, reference in ((y, want[0]), (dqkv, gradients[0])):
        near(got, reference, 0.1 if backend.dtype == np.float32 else 1e-8)


# exp(200) and exp(-200) are infinite and 0 in fp32; exp(70) and exp(-70) are not, but 1e12 times or by them would be
@pytest.mark.parametrize("score, size", [(-200, 1), (200, 1), (-70, 1e12), (70, 1e12)])
def test_a_row_of_extreme_attention_scores_is_exact_and_changes_no_other_row(backend, rng, score, size):
    T, D, now = 70, 4, 66
    qkv = np.array(normal(rng, backend, 1, T, 3 * D))
    qkv[:, :, D : 2 * D] = 1  # all keys are equal: a query has equal scores, and its output is the mean of the values
    qkv[:, :, 2 * D :] *= size
    before = backend.attention_forward(qkv, 1)[0].copy()
    qkv[0, now, :D] = score / D**0.5
    with np.errstate(all="raise", under="ignore"):
        y, aux = backend.attention_forward(qkv, 1)
        backend.attention_backward(y, qkv, y, aux, 1)
    near(y[0, now], qkv[0, : now + 1, 2 * D :].mean(0))
    assert_array_equal(np.delete(y, now, 1), np.delete(before, now, 1))


def test_gelu_of_large_numbers_is_the_identity_or_zero(backend):
    x = sealed(np.array([[-1e8, -1e4, -50, 0, 50, 1e4, 1e8]], backend.dtype))
    with np.errstate(over="raise", invalid="raise"):
        y, dx = backend.gelu_forward(x), backend.gelu_backward(np.ones_like(x), x)
    assert_array_equal(y, np.maximum(x, 0))
    assert_array_equal(dx, [[0, 0, 0, 0.5, 1, 1, 1]])


@pytest.mark.parametrize("C", [8, 48])
def test_a_gradient_may_be_a_broadcast_or_a_transposed_view(backend, rng, C):
    """sum() sends a broadcast gradient, transpose() a strided one: kernels must accept both."""
    B, T, H, K, V = 2, 9, 2, 4 * C, 12
    x, w, b = normal(rng, backend, B, T, C), normal(rng, backend, C), normal(rng, backend, C)
    wide, wb, head = normal(rng, backend, C, K), normal(rng, backend, K), normal(rng, backend, V, C)
    qkv, ids = normal(rng, backend, B, T, 3 * C), rng.integers(0, V, (B, T))
    wpe = normal(rng, backend, T, C)
    aux_norm = backend.layernorm_forward(x, w, b, 1e-5)[1]
    y_attention, aux_attention = backend.attention_forward(qkv, H)
    aux_gelu = backend.linear_gelu_forward(x, wide, wb)[1]
    aux_residual = backend.residual_layernorm_forward(x, x, b, w, b, 1e-5)[2]
    backwards = {
        "linear": (K, lambda dy: backend.linear_backward(dy, x, wide)),
        "gelu": (C, lambda dy: (backend.gelu_backward(dy, x),)),
        "linear_gelu": (K, lambda dy: backend.linear_gelu_backward(dy, x, wide, wb, aux_gelu)),
        "layernorm": (C, lambda dy: backend.layernorm_backward(dy, w, aux_norm)),
        "residual_layernorm": (C, lambda dy: backend.residual_layernorm_backward(dy, dy, w, aux_residual)),
        "attention": (C, lambda dy: (backend.attention_backward(dy, qkv, y_attention, aux_attention, H),)),
        "rotary": (3 * C, lambda dy: (backend.rotary_backward(dy, H, 5),)),
        "embedding": (C, lambda dy: backend.embedding_backward(dy, ids, head, wpe)),
        "unembed": (V, lambda dy: backend.unembed_backward(dy, x, head)),
    }
    for width, backward in backwards.values():
        broadcast = np.broadcast_to(normal(rng, backend, 1, T, 1), (B, T, width))
        strided = normal(rng, backend, width, T, B).transpose(2, 1, 0)
        for dy in (broadcast, strided):
            for got, want in zip(arrays(*backward(dy)), arrays(*backward(np.ascontiguousarray(dy))), strict=True):
                # a BLAS may add in another order for another layout; some results are sums that nearly cancel
                assert_allclose(got, want, rtol=0, atol=200 * TOLERANCE[backend.dtype])


def test_strided_inputs_give_the_same_result(backend, rng):
    qkv = normal(rng, backend, 2, 9, 2, 24)[:, :, 0]
    x = normal(rng, backend, 8, 9, 2).transpose(2, 1, 0)  # (2, 9, 8)
    w, b, wide = normal(rng, backend, 8), normal(rng, backend, 8), normal(rng, backend, 12, 8).T
    copy = np.ascontiguousarray
    for got, want in (
        (backend.attention_forward(qkv, 2)[0], backend.attention_forward(copy(qkv), 2)[0]),
        (backend.rotary_forward(qkv, 2), backend.rotary_forward(copy(qkv), 2)),
        (backend.gelu_forward(x), backend.gelu_forward(copy(x))),
        (backend.layernorm_forward(x, w, b, 1e-5)[0], backend.layernorm_forward(copy(x), w, b, 1e-5)[0]),
        (backend.linear_forward(x, wide), backend.linear_forward(copy(x), copy(wide))),
    ):
        near(got, want)


# -- fused equals composed, gradients included ---------------------------------------------------------------


def composed_attention(qkv, H):
    B, T, C = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    packed = qkv.reshape(B, T, 3, H, C // H).transpose(2, 0, 3, 1, 4)  # (3, B, H, T, D)
    q, k, v = packed[0], packed[1], packed[2]
    s = q @ k.transpose(0, 1, 3, 2) * (C // H) ** -0.5  # (B, H, T, T)
    p = primitives.softmax(primitives.where(np.tril(np.ones((T, T), bool)), s, -np.inf))
    return (p @ v).transpose(0, 2, 1, 3).reshape(B, T, C)


def composed_rotary(qkv, H, position):
    B, T, C3 = qkv.shape
    halves = qkv.reshape(B, T, 3, H, 2, -1)
    a, b = halves[:, :, :2, :, 0], halves[:, :, :2, :, 1]  # (B, T, 2, H, D / 2)
    D = 2 * a.shape[-1]
    angles = (position + np.arange(T))[:, None] * 10000.0 ** (-2 * np.arange(D // 2) / D)
    cos, sin = (f(angles)[:, None, None].astype(qkv.data.dtype) for f in (np.cos, np.sin))
    turned = primitives.concatenate([a * cos - b * sin, b * cos + a * sin], -1).reshape(B, T, 2 * C3 // 3)
    return primitives.concatenate([turned, qkv[:, :, 2 * C3 // 3 :]], -1)


def composed_gelu(x):
    return x * (primitives.tanh((x + x * x * x * 0.044715) * (2 / np.pi) ** 0.5) + 1) * 0.5


def composed_layernorm(x, w, b):
    centred = x - x.mean(-1, keepdims=True)
    return centred * ((centred**2).mean(-1, keepdims=True) + 1e-5) ** -0.5 * w + b


def composed_residual_layernorm(x, a, a_bias, w, b):
    s = x + a + a_bias
    return primitives.concatenate([s, composed_layernorm(s, w, b)], -1)


def composed_cross_entropy(logits, targets):
    rows = logits.reshape(-1, logits.shape[-1])
    return -primitives.log(primitives.softmax(rows))[np.arange(targets.size), targets.reshape(-1)].mean()


TARGETS = np.array([[3, 0, 11, 3, 7], [5, 5, 1, 0, 2]])
FUSED = {  # name: (fused, composed, shapes of the operands)
    "attention": (lambda x: ops.attention(x, 3), lambda x: composed_attention(x, 3), (2, 67, 36)),
    "rotary_attention": (
        lambda x, w, b: ops.rotary_attention(x, w, b, 3, 4),
        lambda x, w, b: composed_attention(composed_rotary(x @ w + b, 3, 4), 3), (2, 5, 12), (12, 36), (36,),
    ),
    "gelu": (ops.gelu, composed_gelu, (5, 24)),
    "layernorm": (ops.layernorm, composed_layernorm, (2, 5, 24), (24,), (24,)),
    "residual_layernorm": (
        lambda *p: primitives.concatenate(ops.residual_layernorm(*p), -1), composed_residual_layernorm,
        (2, 5, 24), (2, 5, 24), (24,), (24,), (24,),
    ),
    "residual_layernorm, sum only": (
        lambda *p: ops.residual_layernorm(*p)[0] * 2, lambda x, a, a_bias, w, b: (x + a + a_bias) * 2 + (w + b) * 0,
        (2, 5, 24), (2, 5, 24), (24,), (24,), (24,),
    ),
    "residual_layernorm, norm only": (
        lambda *p: ops.residual_layernorm(*p)[1], lambda x, a, a_bias, w, b: composed_layernorm(x + a + a_bias, w, b),
        (2, 5, 24), (2, 5, 24), (24,), (24,), (24,),
    ),
    "residual_add": (ops.residual_add, lambda x, a, b: x + (a + b), (2, 5, 24), (2, 5, 24), (24,)),
    "stream_layernorm": (
        lambda *p: primitives.concatenate(ops.stream_layernorm(*p), -1),
        lambda x, w, b: primitives.concatenate([x, composed_layernorm(x, w, b)], -1), (2, 5, 24), (24,), (24,),
    ),
    "mlp": (ops.mlp, lambda x, w, b, w2: composed_gelu(x @ w + b) @ w2, (2, 5, 8), (8, 12), (12,), (12, 8)),
    "linear": (ops.linear, lambda x, w, b: x @ w + b, (2, 5, 8), (8, 12), (12,)),
    "linear without bias": (ops.linear, lambda x, w: x @ w, (2, 5, 8), (8, 12)),
    "embedding without positions": (lambda wte: ops.embedding(TARGETS, wte), lambda wte: wte[TARGETS], (12, 8)),
    "embedding": (
        lambda wte, wpe: ops.embedding(TARGETS, wte, wpe, 2), lambda wte, wpe: wte[TARGETS] + wpe[2:7], (12, 8), (9, 8)
    ),
    "unembed": (ops.unembed, lambda x, w: x @ w.transpose(), (2, 5, 8), (12, 8)),
    "cross_entropy": (
        lambda x: ops.cross_entropy(x, TARGETS), lambda x: composed_cross_entropy(x, TARGETS), (2, 5, 12)
    ),
    "unembed_cross_entropy": (
        lambda x, w: ops.unembed_cross_entropy(x, w, TARGETS),
        lambda x, w: composed_cross_entropy(x @ w.transpose(), TARGETS), (2, 5, 8), (12, 8),
    ),
    "unembed_cross_entropy of two": (
        lambda x, w: ops.unembed_cross_entropy(x, w, TARGETS),
        lambda x, w: ops.cross_entropy(ops.unembed(x, w), TARGETS, 1 / TARGETS.size), (2, 5, 8), (12, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_operation_equals_the_composed_one(backend, rng, name):
    fused, composed, *shapes = FUSED[name]
    arrays = [normal(rng, backend, *shape) for shape in shapes]
    results, dy = [], None
    for function in (fused, composed):
        leaves = [Tensor(array, backend, requires_grad=True) for array in arrays]
        y = function(*leaves)
        dy = np.asarray(rng.standard_normal(y.shape), backend.dtype) if dy is None else dy
        y.backward(dy)
        results.append([y.numpy(), *(leaf.grad for leaf in leaves)])
    size = max(np.linalg.norm(dy), 1.0)
    for got, want in zip(*results, strict=True):
        if got is None:  # "sum only": nothing flows to the LayerNorm
            assert not want.any()
            continue
        # norm only: the columns of dx cancel in the bias's gradient, so its error is that of the terms
        error = np.linalg.norm(np.asarray(got, np.float64) - want)
        assert error <= TOLERANCE[backend.dtype] * max(np.linalg.norm(want), size)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_fused_kernels_equal_the_composed_defaults(rng, precision):
    """NumpyBackend overrides the compositions of Backend, which PlainBackend keeps."""
    plain = PlainBackend(precision)
    x, a, ds, dy = (normal(rng, plain, 3, 5, 8) for _ in range(4))
    a_bias, w, b, wide, wb, w2 = (normal(rng, plain, *shape) for shape in ((8,), (8,), (8,), (8, 12), (12,), (12, 8)))
    d_wide, head, targets = normal(rng, plain, 3, 5, 12), normal(rng, plain, 20, 8), rng.integers(0, 20, 15)
    x2, one, results = sealed(x.reshape(15, 8)), np.asarray(1.0), []
    for backend in (plain, NumpyBackend(precision)):
        h, aux_gelu = backend.linear_gelu_forward(x, wide, wb)
        z, aux_mlp = backend.mlp_forward(x, wide, wb, w2)
        s, y, aux_norm = backend.residual_layernorm_forward(x, a, a_bias, w, b, 1e-5)
        maxima, sums, picked, aux_loss = backend.unembed_cross_entropy_forward(x2, head, targets, 5)
        rows = targets, 0.1, maxima, sums, aux_loss, 5
        results.append([
            h, z, s, y, maxima, sums, picked, backend.residual_add_forward(x, a, a_bias), backend.bias_backward(ds),
            *backend.linear_gelu_backward(d_wide, x, wide, wb, aux_gelu),
            *backend.mlp_backward(dy, x, wide, wb, w2, aux_mlp),
            *backend.residual_layernorm_backward(ds, dy, w, aux_norm),
            *backend.unembed_cross_entropy_backward(one, x2, head, *rows),
        ])  # fmt: skip
        assert backend.residual_layernorm_backward(None, dy, w, aux_norm)[0].shape == x.shape
    check(plain, results[1], arrays(*results[0]))


# -- flat buffers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip_scale", [1.0, 0.37])
def test_adamw_step_equals_torch_over_several_steps(backend, rng, weight_decay, clip_scale):
    n = 69 * 1024  # more than two blocks of the kernel, and not a multiple of one
    decays = np.ones(n // 1024, np.int32)
    options = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=weight_decay)
    start = rng.standard_normal(n).astype(backend.dtype) * backend.dtype.type(0.02)
    p, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    reference = torch.tensor(start.astype(np.float64), requires_grad=True)
    optimizer = torch.optim.AdamW([reference], **options)
    for step in range(1, 8):
        g = normal(rng, backend, n, scale=10.0 ** rng.integers(-3, 2))
        reference.grad = torch.tensor(g.astype(np.float64) * clip_scale)
        optimizer.step()
        coefficients = AdamW(*options["betas"], options["eps"], weight_decay).coefficients(step, options["lr"])
        backend.adamw_step(p, m, v, g, coefficients, clip_scale, decays, options["betas"])
        state = optimizer.state[reference]
        near(m, state["exp_avg"])
        near(v, state["exp_avg_sq"])
        near(p - start, reference.detach().numpy() - start)  # the update, not the initial values


def test_adamw_in_parts_equals_adamw_at_once_bit_for_bit(backend, rng):
    n, betas = 69 * 1024, (0.9, 0.999)
    coefficients, decays = AdamW(*betas, 1e-8, 0.1).coefficients(3, 1e-3), np.zeros(n // 1024, np.int32)
    decays[:4] = 1
    g = normal(rng, backend, n)
    whole = [rng.random(n).astype(backend.dtype) for _ in range(3)]
    parts = [array.copy() for array in whole]
    backend.adamw_step(*whole, g, coefficients, 0.5, decays, betas)
    for edges in ((0, 1), (1, 4), (4, 50), (50, 69)):
        part, own_decays = slice(edges[0] * 1024, edges[1] * 1024), decays[slice(*edges)]
        own = [array[part] for array in parts]
        backend.adamw_step(*own, g[part], coefficients, 0.5, own_decays, betas)
    for got, want in zip(parts, whole, strict=True):
        assert_array_equal(got, want)


def test_page_sums(backend, rng):
    flat = normal(rng, backend, 48 * 1024, scale=1e-3)
    got = backend.page_sums(flat)
    assert got.dtype == backend.dtype and got.shape == (48,)
    near(got, (flat.astype(np.float64) ** 2).reshape(48, -1).sum(1))
    for part in (slice(0, 1), slice(7, 19), slice(48, 48)):  # the bits of a sum depend only on its block
        assert_array_equal(backend.page_sums(flat[part.start * 1024 : part.stop * 1024]), got[part], strict=True)


def test_page_sums_of_large_elements_are_infinite_above_the_documented_bound(backend):
    """sqrt(largest float32 / 1024) = 5.76e17; the second page is below it, the first above."""
    flat = backend.asarray(np.repeat(np.float32([5.8e17, 5.7e17]), 1024))
    with np.errstate(over="ignore"):
        sums = backend.to_host(backend.page_sums(flat))
    assert np.isinf(sums[0]) and np.isfinite(sums[1])


@pytest.mark.parametrize("bound", [0.0, 0.25, 1e3])
def test_clip(backend, rng, bound):
    sums = np.square(normal(rng, backend, 192))
    norm, factor = backend.clip(sums, bound)
    want = np.sqrt(sums.sum(dtype=np.float64))
    assert norm == pytest.approx(want, rel=1e-12)
    assert factor == pytest.approx(min(1, bound / (want + 1e-6)) if bound else 1, rel=1e-12)
    for number in (np.inf, np.nan):
        broken = np.array(sums)
        broken[rng.integers(192)] = number
        norm, factor = backend.clip(broken, bound)
        assert not np.isfinite(norm) and np.isnan(factor)


# -- arrays --------------------------------------------------------------------------------------------------


def test_arrays_are_made_on_the_backend_in_its_precision(backend):
    assert_array_equal(backend.zeros((200, 300), backend.dtype), np.zeros((200, 300), backend.dtype), strict=True)
    assert_array_equal(backend.ones((200, 300), np.float32), np.ones((200, 300), np.float32), strict=True)
    assert backend.ones((), backend.dtype).shape == ()
    assert_array_equal(backend.to_host(backend.asarray([1, 2], backend.dtype)), [1, 2])
    assert backend.runtime.peak_flops(backend.precision) is None
    assert backend.precision in ("fp32", "fp64")
    for precision in ("fp16", "tf32", "float32"):
        with pytest.raises(ConfigError, match=f"`precision={precision}`"):
            NumpyBackend(precision)


def test_the_host_calls_a_step_directly_and_tunes_nothing():
    runtime = Runtime()
    batch, step = [(np.arange(3), np.arange(3))], runtime.compile_step(lambda *args: list(args))
    assert step(batch, "constant").wait()[0] is batch and not step.can_overlap
    assert runtime.compile_step(list)().wait() == []
    with pytest.raises(ConfigError, match="`autotune`: numpy tunes nothing; omit the flag"):
        runtime.retune()
    with pytest.raises(ConfigError, match="`nvtx`: numpy has no profiler timeline; omit the flag"):
        runtime.annotate(None)
    assert runtime.tuned == {} and runtime.load_tuned({"kernel": "choice"}) is None and runtime.tuned == {}


def test_a_notice_goes_to_standard_error_or_to_the_function_that_receives_them(capsys):
    runtime, received = Runtime(), []
    runtime.notify("timing kernels")
    assert capsys.readouterr() == ("", "timing kernels\n")
    runtime.on_notice = received.append
    runtime.notify("compiling kernels")
    Runtime().notify("another runtime")
    assert received == ["compiling kernels"] and capsys.readouterr().err == "another runtime\n"


@pytest.mark.parametrize("shape", [(SMALL,), (100, 333), (3, 5, 7, 111), (1, 1 << 20)])
def test_a_buffer_is_aligned_contiguous_and_reused_after_it_is_freed(shape):
    pool = BufferPool()
    first = pool.empty(shape, np.float32)
    assert first.shape == shape and first.dtype == np.float32 and first.flags.c_contiguous and first.flags.writeable
    assert address(first) % ALIGNMENT == 0
    where = address(first)
    second = pool.empty(shape, np.float32)
    assert not np.shares_memory(first, second)
    held = pool.nbytes
    del first
    assert address(pool.empty(shape, np.float32)) == where and pool.nbytes == held
    third = pool.empty((2 * second.size,), np.float16)  # the same number of bytes in another shape and type
    assert address(third) == where and address(third) % ALIGNMENT == 0 and pool.nbytes == held


def test_a_view_of_a_view_keeps_its_memory():
    pool = BufferPool()
    array = pool.empty((100, 200), np.float64)
    array[...] = 7
    view = array.reshape(200, 100).T[5:50].reshape(-1, 10)[::2][3:]
    memory = memoryview(array)[10:]
    flat, tensor = array.ravel(), torch.from_numpy(array)
    gone = weakref.ref(array)
    del array, flat
    for keeper in ("view", "memory", "tensor"):
        fresh = [pool.empty((100, 200), np.float64) for _ in range(3)]
        for other in fresh:
            other[...] = -1
        del fresh
        if keeper == "view":
            assert (view == 7).all()
            del view
        elif keeper == "memory":
            assert memory[0, 0] == 7
            memory.release()
            del memory
        else:
            assert (tensor == 7).all()
            del tensor
    assert gone() is None
    held = pool.nbytes
    kept = [pool.empty((100, 200), np.float64) for _ in range(4)]
    assert pool.nbytes == held and len(kept) == 4  # all of them free again, none leaked


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("new"), st.integers(1, 12), st.sampled_from([np.float32, np.float64, np.int8])),
            st.tuples(st.just("view"), st.integers(0, 99), st.integers(0, 3)),
            st.tuples(st.just("drop"), st.integers(0, 99), st.just(0)),
        ),
        max_size=60,
    )
)
def test_no_two_live_arrays_ever_share_memory(actions):
    pool, live = BufferPool(), []  # live: (array or a view of it, the number it is filled with)
    for number, (action, which, how) in enumerate(actions):
        if action == "new":
            array = pool.empty((which, 4096), how)
            array[...] = number
            live.append((array, number))
        elif live and action == "view":
            array, value = live[which % len(live)]
            live.append(([array[:, ::3], array.T, array.reshape(-1), array[: len(array) // 2 + 1]][how], value))
            live[-1] = (live[-1][0].reshape(-1, 1), value)
        elif live:
            live.pop(which % len(live))
        for array, value in live:
            assert (array == value).all()


@given(st.integers(SMALL, 1 << 40))
def test_a_size_class_wastes_little(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size <= max(nbytes * 9 // 8 + 1, nbytes + SMALL) and size % SMALL == 0 and size_class(size) == size


def test_products_divided_over_threads_are_the_same_products():
    backend, rng = NumpyBackend("fp64"), np.random.default_rng()
    backend.runtime.use_threads(3)
    for n in (1, 63, 64, 65, 200):
        x, w, b = rng.standard_normal((n, 24)), rng.standard_normal((24, 40)), rng.standard_normal(40)
        assert_allclose(backend.linear_forward(x, w, b), x @ w + b, rtol=1e-12, atol=1e-12)  # only the order of a sum
