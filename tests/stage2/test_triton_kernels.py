"""Every Triton kernel pair against NumPy in float64: on the GPU, or in the interpreter if there is none."""

# B batch, T time, C channels, V vocabulary, K columns, N = B*T rows

import math

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from gpt2core.arena import PAGE  # noqa: E402
from gpt2core.dropout import Dropout, Mask, dropout_key  # noqa: E402
from gpt2core.optimizer import AdamW  # noqa: E402
from stage0_serial.numpy_backend import NumpyBackend  # noqa: E402
from stage2_cuda.kernels import (  # noqa: E402
    adamw,
    cast,
    column_sums,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layernorm,
    rotary,
)
from stage2_cuda.runtime.triton_launch import array_module, interpreted  # noqa: E402
from tests.support.gradients import arrays  # noqa: E402

gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]  # with a GPU every test needs it
FP32 = np.dtype(np.float32)
# Relative norm against float64. float32: a few roundings of 6e-8 each, and sums whose error grows with the square root
# of their length. 16 bits: the rounding of the result and of the sum that a fused kernel stores. float64: float32 sums.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2, "float64": 1e-6}
DTYPES = ["float32", "float16", pytest.param("bfloat16", marks=gpu)]


@pytest.fixture(params=DTYPES)
def dtype(request):
    """The dtype of the activations; bf16 needs a GPU, because the interpreter computes it wrongly."""
    if request.param == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(request.param)


@pytest.fixture(scope="module")
def oracle():
    return NumpyBackend("fp64")


def device(array):
    return array_module().asarray(array)


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def normal(rng, dtype, *shape, scale=1.0, shift=0.0):
    """A random array on the device, and the same numbers in float64."""
    array = (rng.standard_normal(shape) * scale + shift).astype(dtype)
    return device(array), array.astype(np.float64)


def poisoned(shape, dtype):
    return array_module().full(shape, np.nan, dtype)


def run(function, outputs, *inputs):
    """What function(*outputs, *inputs) writes into outputs, each (shape, dtype) or None, filled with NaN before.

    Asserts that a second call writes the same bits.
    """
    results = []
    for _ in range(2):
        arrays = [output if output is None else poisoned(*output) for output in outputs]
        function(*arrays, *inputs)
        results.append([None if array is None else host(array) for array in arrays])
    for first, second in zip(*results, strict=True):
        if first is not None:
            assert_array_equal(first, second)
    return results[0]


def near(got, want, tolerance=None, least=0.0):
    """Assert norm(got - want) <= tolerance * max(norm(want), least); NaN fails.

    least: the norm of the terms of a sum that may nearly cancel. Rounding is small relative to them, not to the sum.
    """
    assert got.shape == want.shape
    error = np.linalg.norm(got.astype(np.float64) - want)
    assert error <= (tolerance or TOLERANCE[got.dtype.name]) * max(np.linalg.norm(want), least)


def sum_of_rows(partials):
    return run(lambda out: column_sums.add_partials(device(partials), out), [(partials.shape[1:], FP32)])[0]


def assert_equal_bits(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()


# fewer rows than a tile, more than one tile, rows that are no multiple of a tile; the widths of GPT-2
ROWS = [(1, 8), (5, 384), (9, 172), (37, 96), (3, 768), (2, 1600)]
ROWS += [pytest.param(*shape, marks=gpu) for shape in [(4099, 768), (1031, 1600), (65536, 384)]]
rows = pytest.mark.parametrize("n, channels", ROWS)


# -- layernorm -----------------------------------------------------------------------------------------------


@rows
def test_layernorm_forward_equals_float64(rng, oracle, dtype, n, channels):
    (x, x64), (w, w64), (b, b64) = (
        normal(rng, dtype, *shape, scale=2, shift=1) for shape in ((n, channels), (channels,), (channels,))
    )
    outputs = ((n, channels), dtype), ((n,), FP32), ((n,), FP32)
    y, mean, rstd = run(
        lambda *arrays: layernorm.residual_layernorm_forward(None, *arrays, x, None, None, w, b, 1e-5), outputs
    )
    near(y, oracle.layernorm_forward(x64, w64, b64, 1e-5)[0])
    near(mean, x64.mean(1), least=np.linalg.norm(abs(x64).mean(1)))
    near(rstd, 1 / np.sqrt(x64.var(1) + 1e-5))


@rows
def test_residual_layernorm_forward_equals_float64(rng, oracle, dtype, n, channels):
    (x, x64), (a, a64) = (normal(rng, dtype, n, channels) for _ in "xa")
    (a_bias, a_bias64), (w, w64), (b, b64) = (normal(rng, dtype, channels) for _ in range(3))
    outputs = ((n, channels), dtype), ((n, channels), dtype), ((n,), FP32), ((n,), FP32)
    s, y, mean, rstd = run(layernorm.residual_layernorm_forward, outputs, x, a, a_bias, w, b, 1e-5)
    near(s, x64 + a64 + a_bias64)
    stored = s.astype(np.float64)  # the rounded sum, which the norm and backward read
    near(y, oracle.layernorm_forward(stored, w64, b64, 1e-5)[0])
    near(mean, stored.mean(1), least=np.linalg.norm(abs(stored).mean(1)))
    near(rstd, 1 / np.sqrt(stored.var(1) + 1e-5))


@pytest.mark.fast
@rows
@pytest.mark.parametrize("fused", [True, False], ids=["residual", "plain"])
def test_layernorm_backward_equals_float64(rng, oracle, dtype, n, channels, fused):
    (s, s64), (dy, dy64), (ds, ds64) = (normal(rng, dtype, n, channels) for _ in range(3))
    w, w64 = normal(rng, dtype, channels)
    mean, var = s64.mean(1), s64.var(1)
    statistics = [device(array.astype(np.float32)) for array in (mean, 1 / np.sqrt(var + 1e-5))]
    partials = layernorm.layernorm_partials_shape(n, channels, s.dtype), FP32
    outputs = ((n, channels), dtype), partials
    dx, partials = run(layernorm.residual_layernorm_backward, outputs, ds if fused else None, dy, s, w, *statistics)
    dw, db, da_bias = (sum_of_rows(part) for part in partials)
    aux = oracle.layernorm_forward(s64, w64, w64, 1e-5)[1]
    want = arrays(*oracle.residual_layernorm_backward(ds64 if fused else None, dy64, w64, aux))
    near(dx, want[0])
    near(dw, want[2])
    near(db, want[3])
    if fused:
        near(da_bias, dx.astype(np.float64).sum(0))  # the sum of dx as it is stored
        near(da_bias, want[1], TOLERANCE[dtype.name])


# fewer rows than a tile, programs with several tiles, rows that are no multiple of a tile
CUT_ROWS = [(1, 8), (5, 384), (61, 64), (131, 48)]
CUT_ROWS += [pytest.param(*shape, marks=pytest.mark.long) for shape in [(70, 384), (37, 768), (9, 172), (19, 2050)]]
CUT_ROWS += [pytest.param(*shape, marks=gpu) for shape in [(64 << 10, 768), (8191, 768), (4099, 384), (1031, 1600)]]
CUT_ROWS += [pytest.param(*shape, marks=gpu) for shape in [(8191, 256), (8191, 64), (4099, 172), (4099, 1024)]]


@pytest.mark.parametrize("last", [False, True], ids=["a block", "the last block"])  # after it nothing gives a ds
@pytest.mark.parametrize("n, channels", CUT_ROWS)
def test_a_residual_addition_apart_from_its_layernorm_has_the_bits_of_the_fused_kernel(rng, dtype, n, channels, last):
    (x, _), (a, _), (ds, _), (dy, _) = (normal(rng, dtype, n, channels) for _ in range(4))
    (a_bias, _), (w, _), (b, _) = (normal(rng, dtype, channels) for _ in range(3))
    matrix, vector, statistics = ((n, channels), dtype), ((channels,), FP32), ((n,), FP32)
    forward = [matrix, statistics, statistics]
    s, *fused = run(layernorm.residual_layernorm_forward, [matrix, *forward], x, a, a_bias, w, b, 1e-5)
    (stored,) = run(layernorm.residual_add, [matrix], x, a, a_bias)
    assert_equal_bits(stored, s)
    s = device(s)
    apart = run(lambda *out: layernorm.residual_layernorm_forward(None, *out, s, None, None, w, b, 1e-5), forward)
    for got, want in zip(apart, fused, strict=True):
        assert_equal_bits(got, want)

    mean, rstd = map(device, fused[1:])
    shape = layernorm.layernorm_partials_shape(n, channels, dtype)
    arguments = None if last else ds, dy, s, w, mean, rstd
    dx, partials = run(layernorm.residual_layernorm_backward, [matrix, (shape, FP32)], *arguments)
    da_bias, _ = run(layernorm.residual_bias_gradient, [vector, (shape[1:], FP32)], device(dx))
    assert_equal_bits(da_bias, sum_of_rows(partials[2]))


# -- gelu ----------------------------------------------------------------------------------------------------


@pytest.mark.fast
@rows
@pytest.mark.parametrize("fused", [True, False], ids=["bias", "plain"])
def test_gelu_forward_and_backward_equal_float64(rng, oracle, dtype, n, channels, fused):
    (h, h64), (dy, dy64) = (normal(rng, dtype, n, channels, scale=2) for _ in "hy")
    bias, bias64 = normal(rng, dtype, channels)
    x64 = h64 + bias64 if fused else h64
    matrix, vector, partials = ((n, channels), dtype), ((channels,), FP32), gelu.gelu_partials_shape(n, channels)
    want, size = oracle.gelu_backward(dy64, x64), np.linalg.norm(dy64)  # derivatives near zero are sums that cancel
    if fused:
        (y,) = run(gelu.bias_gelu_forward, [matrix], h, bias)
        dh, partials = run(gelu.bias_gelu_backward, [matrix, (partials, FP32)], dy, h, bias)
        (dbias,) = run(lambda sums: column_sums.add_partials(device(partials), sums), [vector])
        near(dbias, want.sum(0), least=size)
    else:
        (y,), (dh,) = run(gelu.gelu_forward, [matrix], h), run(gelu.gelu_backward, [matrix], dy, h)
    near(y, oracle.gelu_forward(x64))
    near(dh, want, least=size)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp(huge) is infinity, and 1 / (1 + infinity) is 0
def test_gelu_of_extreme_numbers_is_the_identity_or_zero():
    h = np.array([[-1e4, -90, -10, -0.0, 0.0, 10, 90, 1e4]], np.float32)
    one = device(np.ones_like(h))
    (y,) = run(gelu.gelu_forward, [(h.shape, FP32)], device(h))
    (dh,) = run(gelu.gelu_backward, [(h.shape, FP32)], one, device(h))
    np.testing.assert_allclose(y, np.maximum(h, 0), atol=1e-20)
    bound = 1e-7 if interpreted() else 4e-7  # the GPU's exp2 and rsqrt are approximate
    np.testing.assert_allclose(dh, [[0, 0, 0, 0.5, 0.5, 1, 1, 1]], rtol=bound, atol=1e-20)


# -- rotary positions ----------------------------------------------------------------------------------------

ROTARY = [(1, 1, 1, 2, 0), (2, 7, 3, 10, 5), (1, 33, 2, 64, 0), (3, 5, 2, 8, 123456)]
ROTARY += [pytest.param(*shape, marks=gpu) for shape in [(16, 1024, 12, 64, 0), (3, 1023, 2, 256, 7)]]


@pytest.mark.fast
@pytest.mark.parametrize("batch, time, heads, size, position", ROTARY)
def test_rotary_forward_and_backward_equal_float64(rng, oracle, dtype, batch, time, heads, size, position):
    shape = batch, time, 3 * heads * size
    (qkv, qkv64), (dy, dy64) = (normal(rng, dtype, *shape) for _ in "qd")
    rotation = device(run(rotary.compute_rotation, [((time, 2, size // 2), FP32)], position)[0])
    (y,) = run(rotary.rotate, [(shape, dtype)], qkv, rotation, heads, 1)
    (dqkv,) = run(rotary.rotate, [(shape, dtype)], dy, rotation, heads, -1)
    near(y, oracle.rotary_forward(qkv64, heads, position))
    near(dqkv, oracle.rotary_backward(dy64, heads, position))
    assert_array_equal(y[..., 2 * heads * size :], host(qkv)[..., 2 * heads * size :])  # v is copied
    rotary.rotate(qkv, qkv, rotation, heads, 1)  # in place
    assert_array_equal(host(qkv), y)


# -- dropout ---------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("p", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("shape, row, place", [((1, 1, 1), 0, 0), ((2, 3, 5, 300), 7, 96), ((3, 5, 64), 1 << 20, 1)])
def test_dropout_keeps_the_numbers_that_the_host_keeps(rng, dtype, p, shape, row, place):
    (x, x64), (bias, bias64) = normal(rng, dtype, *shape), normal(rng, dtype, shape[-1])
    key = dropout_key(int(rng.integers(1000)), int(rng.integers(1, 1000)))
    keeps = Mask(Dropout(p, key, row), place).keeps(shape)
    mask = Mask(Dropout(p, device(key), row), place)
    (y,) = run(dropout.dropout, [(shape, dtype)], x, bias, mask)
    (dx,) = run(dropout.dropout, [(shape, dtype)], x, None, mask)
    near(y, np.where(keeps, x64 + bias64, 0) / (1 - p))
    near(dx, np.where(keeps, x64, 0) / (1 - p))
    assert_array_equal(np.asarray(dx, np.float64) != 0, keeps & (x64 != 0))


@pytest.mark.fast
@pytest.mark.parametrize("first", [1, 4, 6])
def test_dropout_of_the_parts_of_a_divided_sequence_is_that_of_the_whole_one(rng, dtype, first):
    B, T, C = 2, 8, 70
    (x, _), (bias, _) = normal(rng, dtype, B, T, C), normal(rng, dtype, C)
    chosen = Dropout(0.3, device(dropout_key(int(rng.integers(1000)), 1)), 3)
    (whole,) = run(dropout.dropout, [((B, T, C), dtype)], x, bias, Mask(chosen, 2))
    parts = []
    for start, end in ((0, first), (first, T)):
        part = x[:, start:end].copy()
        parts += run(dropout.dropout, [(part.shape, dtype)], part, bias, Mask(chosen, 2, start))
    assert_array_equal(np.concatenate(parts, 1), whole)
    assert (np.asarray(whole, np.float64) == 0).any()


@rows
def test_column_sums_equal_float64(rng, dtype, n, channels):
    x, x64 = normal(rng, dtype, n, channels)
    partials = column_sums.partials_shape(n, channels), FP32
    near(run(column_sums.column_sums, [((channels,), FP32), partials], x)[0], x64.sum(0))


@pytest.mark.parametrize("n", [1, 127, 128, 129, 300])  # of partial sums; a tile has 128
def test_any_number_of_partial_sums_is_added(rng, n):
    partials, wide = normal(rng, FP32, n, 20)
    near(run(lambda out: column_sums.add_partials(partials, out), [((20,), FP32)])[0], wide.sum(0))


# -- embedding -----------------------------------------------------------------------------------------------

# few tokens with many rows each (chunks), few rows each, more tokens than rows, one rank's part of the vocabulary
BATCHES = [(1, 1, 8, 5, 0), (2, 5, 96, 3, 0), (3, 130, 40, 2, 0), (2, 9, 384, 172, 0), (3, 50, 300, 5, 3)]
BATCHES += [(1, 3, 1100, 4, 0)]  # more channels than a tile has columns
BATCHES += [pytest.param(*shape, marks=gpu) for shape in [(16, 256, 384, 172, 0), (9, 1023, 768, 50257, 0)]]
batches = pytest.mark.parametrize("batch, time, channels, vocab, first", BATCHES)


def tokens(rng, batch, time, vocab, first, integer):
    """Token numbers, half of them equal; those outside [first, first + vocab) belong to another rank."""
    ids = rng.integers(0, vocab + 2 * first, (batch, time))
    return np.where(rng.random(ids.shape) < 0.5, first, ids).astype(integer)


@batches
@pytest.mark.parametrize("integer", [np.int32, pytest.param(np.int64, marks=pytest.mark.long)])
def test_embedding_forward_equals_float64(rng, oracle, dtype, batch, time, channels, vocab, first, integer):
    ids, position = tokens(rng, batch, time, vocab, first, integer), 4
    (wte, wte64), (wpe, wpe64) = normal(rng, dtype, vocab, channels), normal(rng, dtype, time + 7, channels)
    output = [((batch, time, channels), dtype)]
    (y,) = run(embedding.embedding_forward, output, device(ids), wte, wpe, position, first)
    near(y, oracle.embedding_forward(ids, wte64, wpe64, position, first))
    (y,) = run(embedding.embedding_forward, output, device(ids), wte, None, 0, first)
    assert_array_equal(y, oracle.embedding_forward(ids, wte64, None, 0, first))  # copied, so equal bits


@pytest.mark.fast
@batches
def test_embedding_backward_equals_float64(rng, oracle, dtype, batch, time, channels, vocab, first):
    ids, position = tokens(rng, batch, time, vocab, first, np.int32), 4
    dy, dy64 = normal(rng, dtype, batch, time, channels)
    wte, wpe = np.empty((vocab, channels)), np.empty((time + 7, channels))
    sorted_tokens = embedding.SortedTokens(*map(device, embedding.sort_tokens(ids, vocab + 2 * first)))
    outputs = (wte.shape, FP32), (wpe.shape, FP32), (embedding.chunk_sums_shape(ids.size, channels), FP32)
    dwte, _ = run(embedding.token_gradient, outputs[::2], sorted_tokens, dy, False, first)
    (dwpe,) = run(embedding.position_gradient, outputs[1:2], dy, position)
    want_wte, want_wpe = arrays(*oracle.embedding_backward(dy64, ids, wte, wpe, position, first))
    near(dwte, want_wte)
    near(dwpe, want_wpe)
    assert_array_equal(dwte[~np.isin(np.arange(vocab) + first, ids)], 0)
    other, other64 = normal(rng, FP32, vocab, channels)
    embedding.token_gradient(other, poisoned(*outputs[2]), sorted_tokens, dy, True, first)
    near(host(other), other64 + want_wte)


def test_sort_tokens_lists_the_rows_and_the_chunks_of_each_token():
    order, starts, chunk_starts, chunk_tokens = embedding.sort_tokens(np.array([[7, 3, 9], [3, 7, 0]]), 8)
    assert_array_equal(order, [5, 1, 3, 0, 4, 2])
    assert_array_equal(starts, [0, 1, 1, 1, 3, 3, 3, 3, 5])  # token 0: row 5; 3: rows 1, 3; 7: rows 0, 4
    assert_array_equal(chunk_starts, 0)
    assert chunk_tokens.shape == (0,)
    ids = np.array([[1] * 130 + [0] * 63 + [2] * 64])
    _, _, chunk_starts, chunk_tokens = embedding.sort_tokens(ids, 3)
    assert_array_equal(chunk_starts, [0, 0, 2, 3])
    assert_array_equal(chunk_tokens, [1, 1, 2, 3])  # 257 rows have room for 4 chunks, and these have 3
    for largest in (65_535, 65_536, 70_000):  # ids of more than 16 bits
        order, starts, *_ = embedding.sort_tokens(np.array([[largest, 7, 1, largest, 0]]), largest + 1)
        assert_array_equal(order, [4, 2, 1, 0, 3])
        assert_array_equal(starts[[0, 1, 2, 7, 8, -2, -1]], [0, 1, 2, 2, 3, 3, 5])


# -- cross-entropy -------------------------------------------------------------------------------------------

# (rows, vocabulary, padded vocabulary, first): one tile, several tiles, one rank's columns
LOGITS = [(1, 5, 5, 0), (3, 172, 172, 0), (7, 172, 192, 0), (2, 9001, 9008, 0), (9, 50, 64, 30)]
LOGITS += [pytest.param(*shape, marks=gpu) for shape in [(65, 50257, 50304, 0), (33, 50257, 50257, 0)]]
logits_of = pytest.mark.parametrize("n, vocab, width, first", LOGITS)


def some_logits(rng, dtype, n, vocab, width, first, scale=3.0):
    """Logits with NaN in the padding, the same in float64 without padding, and targets, some of other ranks."""
    logits, logits64 = normal(rng, dtype, n, width, scale=scale)
    logits[:, vocab:] = np.nan
    targets = rng.integers(0, vocab + 2 * first, n)
    targets[0], targets[-1] = first, first + vocab - 1
    return logits, logits64[:, :vocab], targets


@pytest.mark.fast
@logits_of
@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_cross_entropy_forward_and_backward_equal_float64(rng, oracle, dtype, n, vocab, width, first, integer):
    logits, logits64, targets = some_logits(rng, dtype, n, vocab, width, first)
    ids, vector = device(targets.astype(integer)), ((n,), FP32)
    rows = run(cross_entropy.cross_entropy_forward, [vector] * 3, logits, ids, vocab, first)
    *want, aux = oracle.cross_entropy_forward(logits64, targets, first)
    near(rows[0], want[0])
    near(rows[1], want[1])
    near(rows[2], want[2], 1e-7)  # copied

    dy, scale = 0.3, 1 / n
    statistics = [device(array.astype(np.float32)) for array in want[:2]]
    inputs = logits, ids, *statistics, scale, vocab, first, device(np.array([dy]))
    (dlogits,) = run(cross_entropy.cross_entropy_backward, [((n, width), dtype)], *inputs)
    want = oracle.cross_entropy_backward(dy, logits64, targets, scale, *want[:2], aux, first)
    size = (
        dy * scale * math.sqrt(n)
    )  # the norm of the terms 1 in p - 1, which nearly cancel for a target of high probability
    near(dlogits[:, :vocab], want, least=size)
    assert_array_equal(dlogits[:, vocab:], 0)

    both = [((n, width), dtype), *[vector] * 3]
    dlogits2, *rows2 = run(
        cross_entropy.cross_entropy_forward_backward, both, logits, ids, scale, vocab, first, inputs[-1]
    )
    near(dlogits2[:, :vocab], want, least=size)
    for again, array in zip(rows2, rows, strict=True):
        assert_array_equal(again, array)
    cross_entropy.cross_entropy_forward_backward(
        logits, *map(device, rows), logits, ids, scale, vocab, first, inputs[-1]
    )
    assert_array_equal(host(logits), dlogits2)  # in place


@logits_of
def test_a_dy_of_one_gives_the_bits_of_none(rng, dtype, n, vocab, width, first):
    logits, _, targets = some_logits(rng, dtype, n, vocab, width, first)
    outputs, ids = [((n, width), dtype), *[((n,), FP32)] * 3], device(targets)
    results = [
        run(cross_entropy.cross_entropy_forward_backward, outputs, logits, ids, 0.1, vocab, first, dy)
        for dy in (None, device(np.ones(1, np.float32)), device(np.ones((), np.float64)))
    ]
    for wanted, *others in zip(*results, strict=True):
        for got in others:
            assert_array_equal(got, wanted)


def test_cross_entropy_backward_of_each_rank_s_columns_equals_those_of_the_whole_rows(rng, oracle):
    """Given the maxima and sums of whole rows, a rank computes its columns of the gradient."""
    n, vocab = 6, 20
    logits, logits64, targets = some_logits(rng, FP32, n, vocab, vocab, 0)
    *want, aux = oracle.cross_entropy_forward(logits64, targets)
    whole = oracle.cross_entropy_backward(1.0, logits64, targets, 0.5, *want[:2], aux)
    maxima, sums = (device(array.astype(np.float32)) for array in want[:2])
    for first in (0, 10):
        columns = array_module().ascontiguousarray(logits[:, first : first + 10])
        inputs = columns, device(targets), maxima, sums, 0.5, 10, first
        (dlogits,) = run(cross_entropy.cross_entropy_backward, [((n, 10), FP32)], *inputs)
        near(dlogits, whole[:, first : first + 10])


@pytest.mark.parametrize("vocab", [6, 5000])
def test_cross_entropy_of_extreme_logits_equals_float64(rng, oracle, vocab):
    logits64 = rng.standard_normal((5, vocab))
    logits64[0], logits64[1] = 1e4, -1e4
    logits64[2, 0], logits64[3, -1] = 1e4, -1e4  # probability 1 and 0
    logits64[4, : vocab - 1] = -np.inf
    logits64 = logits64.astype(np.float32).astype(np.float64)
    logits, targets = device(logits64.astype(np.float32)), np.array([1, 1, 0, vocab - 1, vocab - 1])
    vector = (5,), FP32
    rows = run(cross_entropy.cross_entropy_forward, [vector] * 3, logits, device(targets), vocab)
    *want, aux = oracle.cross_entropy_forward(logits64, targets)
    for got, wanted in zip(rows, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    inputs = logits, device(targets), device(rows[0]), device(rows[1]), 1.0, vocab
    (dlogits,) = run(cross_entropy.cross_entropy_backward, [((5, vocab), FP32)], *inputs)
    near(dlogits, oracle.cross_entropy_backward(1.0, logits64, targets, 1.0, *want[:2], aux))


# -- optimizer -----------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("n", [1, 1000, 3 * PAGE, pytest.param(300 * PAGE + 5, marks=gpu)])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_adamw_equals_stage_0(rng, oracle, dtype, n, factor):
    lr, beta1, beta2, eps, decay = 3e-3, 0.9, 0.95, 1e-6, 0.1
    start = (rng.standard_normal(n) * 0.02).astype(np.float32)
    p, m, v = device(start.copy()), device(np.zeros_like(start)), device(np.zeros_like(start))
    p64, m64, v64 = start.astype(np.float64), np.zeros(n), np.zeros(n)
    scale = None if factor is None else device(np.array([factor], np.float32))
    decays = (np.arange(-(-n // PAGE)) % 2 == 0).astype(np.int8)
    flags = device(decays)
    copy = None if dtype == FP32 else poisoned((n,), dtype)
    for step in range(1, 6):
        g, g64 = normal(rng, FP32, n, scale=10.0 ** rng.integers(-3, 2))
        coefficients = device(AdamW(beta1, beta2, eps, decay).coefficients(step, lr))
        adamw.adamw_step(p, m, v, copy, g, coefficients, scale, flags, beta1, beta2)
        exact = AdamW(beta1, beta2, eps, decay).coefficients(step, lr)
        oracle.adamw_step(p64, m64, v64, g64, exact, factor or 1.0, decays, (beta1, beta2))
        near(host(m), m64, least=np.linalg.norm(np.sqrt(v64)))  # the gradients of one number may cancel in m, not in v
        near(host(v), v64)
        # the update p - start: the rounding of p is relative to start, and 0.02 / 0.003 larger relative to the update;
        # the updates of one number may cancel
        near(host(p) - start, p64 - start, 1e-4, least=lr * math.sqrt(n))
        if copy is not None:
            assert_array_equal(host(copy), host(p).astype(dtype))


def test_adamw_equals_pytorch(rng):
    torch = pytest.importorskip("torch")
    options = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.3)
    start = rng.standard_normal(700).astype(np.float32)
    p, m, v = device(start.copy()), device(np.zeros_like(start)), device(np.zeros_like(start))
    reference = torch.tensor(start.astype(np.float64), requires_grad=True)
    optimizer = torch.optim.AdamW([reference], **options)
    for step in range(1, 5):
        g, g64 = normal(rng, FP32, 700)
        reference.grad = torch.tensor(g64)
        optimizer.step()
        coefficients = device(AdamW(*options["betas"], options["eps"], 0.3).coefficients(step, options["lr"]))
        adamw.adamw_step(p, m, v, None, g, coefficients, None, None, *options["betas"])
    near(host(p) - start, reference.detach().numpy() - start)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_scalars_in_float64_give_the_bits_of_float32(rng, step):
    n = 2 * PAGE + 3
    lr, beta1, beta2, eps, decay = 3e-4, 0.9, 0.95, 1e-8, 0.1
    exact = AdamW(beta1, beta2, eps, decay).coefficients(step, lr)
    start, g = [rng.random(n).astype(np.float32) for _ in "pmv"], device(rng.standard_normal(n).astype(np.float32))
    results = []
    for coefficients in (exact.astype(np.float32), exact):
        arrays = [device(array.copy()) for array in start]
        adamw.adamw_step(*arrays, None, g, device(coefficients), None, None, beta1, beta2)
        results.append([host(array) for array in arrays])
    for got, want in zip(*results, strict=True):
        assert_array_equal(got, want)


def test_adamw_in_parts_equals_adamw_at_once_bit_for_bit(rng):
    n, coefficients = 5 * PAGE, device(AdamW(0.9, 0.999, 1e-8, 0.1).coefficients(3, 1e-3))
    g, scale = normal(rng, FP32, n)[0], device(np.array([0.5], np.float32))
    whole = [device(rng.random(n).astype(np.float32)) for _ in range(3)]
    parts = [array.copy() for array in whole]
    adamw.adamw_step(*whole, None, g, coefficients, scale, None, 0.9, 0.999)
    for part in (slice(0, 2 * PAGE), slice(2 * PAGE, 3 * PAGE), slice(3 * PAGE, n)):
        adamw.adamw_step(*(array[part] for array in parts), None, g[part], coefficients, scale, None, 0.9, 0.999)
    for got, want in zip(parts, whole, strict=True):
        assert_array_equal(host(got), host(want))


def test_the_sums_of_pages_equal_float64_and_do_not_depend_on_the_other_pages(rng):
    flat, flat64 = normal(rng, FP32, 48 * PAGE, scale=1e-3)
    (got,) = run(adamw.page_sums, [((48,), FP32)], flat)
    near(got, (flat64**2).reshape(48, -1).sum(1))
    for each in (1, 5, 16):
        parts = [flat[at : at + each * PAGE] for at in range(0, flat.size, each * PAGE)]
        sums = [run(adamw.page_sums, [((part.size // PAGE,), FP32)], part)[0] for part in parts]
        assert_array_equal(np.concatenate(sums), got)
    adamw.page_sums(poisoned((0,), FP32), flat[:0])
    with pytest.raises(ValueError, match="4096 elements are not 3 pages of 1024"):
        adamw.page_sums(poisoned((3,), FP32), flat[: 4 * PAGE])


@pytest.mark.parametrize("segments", [1, 3, 64])
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_clip_scale_is_the_norm_and_its_bound(rng, segments, loss_scale):
    squares = (rng.random(segments) + 0.1) * (loss_scale or 1) ** 2
    norm = np.sqrt(squares.sum()) / (loss_scale or 1)

    def clip_scale(*arguments):
        state = None if loss_scale is None else device(np.array([loss_scale, 0], np.float32))  # clip_scale changes it
        adamw.clip_scale(*arguments, state, 2000)

    for clip, want in ((0.0, 1.0), (1e9, 1.0), (0.1, 0.1 / (norm + 1e-6))):
        outputs = ((1,), FP32), ((1,), FP32)
        scale, length = run(clip_scale, outputs, device(squares), clip)
        near(length, np.array([norm]), 1e-6)
        near(scale, np.array([want / (loss_scale or 1)]), 1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_norm_that_is_not_finite_stops_all_later_steps(rng, bad):
    stop, good, spoilt = device(np.zeros(1, np.float32)), device(np.array([4.0, 5.0])), device(np.array([1.0, bad]))
    scales = []
    for squares in (good, good, spoilt, good):
        scale, norm = run(lambda *outputs: adamw.clip_scale(*outputs, squares, 0.3, None, 0, stop), [((1,), FP32)] * 2)  # noqa: B023
        scales.append(scale.item())
        near(norm, np.array([3.0]), 1e-6) if squares is good else None
    assert scales[:2] == [np.float32(0.3 / (np.float32(3) + np.float32(1e-6)))] * 2 and np.isnan(scales[2:]).all()
    assert np.isnan(host(stop)).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(rng, bad):
    squares = device(np.array([1.0, bad]))
    scale, _ = run(lambda *outputs: adamw.clip_scale(*outputs, squares, 1.0), [((1,), FP32)] * 2)
    assert np.isnan(scale).all()
    arrays = [device(rng.random(2000).astype(np.float32)) for _ in range(4)]
    g, coefficients = normal(rng, FP32, 2000)[0], device(AdamW(0.9, 0.999, 1e-8, 0.1).coefficients(1, 1e-3))
    g[3] = bad
    before = [array.copy() for array in arrays]
    adamw.adamw_step(*arrays, g, coefficients, device(scale), None, 0.9, 0.999)
    for after, array in zip(arrays, before, strict=True):
        assert_array_equal(host(after), host(array))


# -- passes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4096, 10_001])
def test_cast_equals_numpy(rng, dtype, n):
    x, x64 = normal(rng, FP32, n)
    (narrow,) = run(cast.cast, [((n,), dtype)], x)
    assert_array_equal(narrow, host(x).astype(dtype))  # to nearest, like NumPy
    (wide,) = run(cast.cast, [((n,), FP32)], device(narrow))
    assert_array_equal(wide, narrow.astype(np.float32))
