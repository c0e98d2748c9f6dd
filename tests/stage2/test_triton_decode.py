"""The kernels of generation against NumPy in float64, and draws against stage 0's rule; interpreted without a GPU."""

# B sequences, C channels, H heads, D head size, V vocabulary, K and N rows and columns of a weight

import math

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from gpt2core.sampler import Greedy, Sampling
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda.decoding import batched as decode
from stage2_cuda.decoding import last_token as ends
from stage2_cuda.decoding import sampling
from stage2_cuda.decoding import single_row as decode_row
from stage2_cuda.runtime.triton_launch import array_module, interpreted

gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]  # where there is a GPU, all of this is about it
EPS = 1e-5
# Relative norm against float64. fp32: a few roundings of 6e-8, grown by the square root of the terms of a sum; 16 bits:
# the rounding of the result.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
PRECISION = "tf32x3"  # of fp32 products: the one that keeps their bound
# few programs, as the interpreter takes 10 ms for each; on a GPU what is used there
FEW = decode.Tiles(columns=256, parts=12, part_columns=256, keys=64, vocabulary=256)
ONE_ROW, MANY_ROWS = (FEW if interpreted() else decode.tiles_for(B) for B in (1, 2))
WIDTHS = [32, 48, 384, 768, 1600]


@pytest.fixture(params=["float32", *(pytest.param(name, marks=gpu) for name in ("float16", "bfloat16"))])
def dtype(request):
    """The weights' type; the interpreter gets bf16 wrong, and is too slow for all of this twice."""
    if request.param == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(request.param)


def device(array):
    return array_module().asarray(array)


def host(array):
    array = array if isinstance(array, np.ndarray) else array.get()
    return array.astype(np.float64) if array.dtype.kind not in "iu" else array


def normal(rng, dtype, *shape, scale=1.0):
    """A random array on the device, and the same numbers in float64."""
    array = (rng.standard_normal(shape) * scale).astype(dtype)
    return device(array), array.astype(np.float64)


def poisoned(dtype, *shape):
    dtype = np.dtype(dtype)
    return array_module().full(shape, np.nan if dtype.kind not in "iu" else -7, dtype)


def near(got, want, dtype="float32"):
    """norm(got - want) <= tolerance * norm(want), which no NaN passes."""
    got = host(got)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= TOLERANCE[np.dtype(dtype).name] * np.linalg.norm(want)


def residual_stream(rng, dtype, B, C, parts):
    """(x, partial sums, their bias) on the device, and their sum in float64."""
    x, x64 = normal(rng, np.float32, B, C)
    if not parts:
        return (x, None, None), x64
    (partials, p64), (bias, b64) = normal(rng, np.float32, parts, B, C, scale=0.3), normal(rng, dtype, C)
    return (x, partials, bias), x64 + p64.sum(0) + b64


def layernorm(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS) * w + b


def weight(rng, dtype, K, N):
    return normal(rng, dtype, K, N, scale=K**-0.5)


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [0, 5, 12])
@pytest.mark.parametrize("C", WIDTHS)
def test_norm_and_the_sum_of_partial_sums(rng, dtype, C, parts):
    B = 3
    stream, s64 = residual_stream(rng, dtype, B, C, parts)
    (w, w64), (b, b64) = normal(rng, dtype, C), normal(rng, dtype, C)
    h, s = poisoned(dtype, B, C), poisoned(np.float32, B, C)
    decode.norm(h, s, stream, w, b, EPS, MANY_ROWS)
    near(s, s64)
    near(h, layernorm(s64, w64, b64), dtype)
    decode.norm(h, stream[0], stream, w, b, EPS, MANY_ROWS)  # in place
    near(stream[0], s64)


def transposed(w):
    out = poisoned(w.dtype, *w.shape[::-1])
    decode_row.transpose(out, w)
    return out


def sums_of_columns(w, *ln_and_bias):
    slopes, shifts = (poisoned(np.float32, len(w)) for _ in range(2))
    decode_row.sums_of_columns(slopes, shifts, w, *ln_and_bias)
    return slopes, shifts


@pytest.mark.parametrize("K, N", [(32, 172), (48, 40), (130, 7)])
def test_a_weight_is_transposed(rng, dtype, K, N):
    matrix, m64 = normal(rng, dtype, K, N)
    assert_array_equal(host(transposed(matrix)), m64.T)


@pytest.mark.parametrize("C, N, parts", [(32, 172, 0), (48, 40, 3), (384, 96, 12), (768, 100, 12), (1600, 20, 13)])
def test_a_normed_product_of_one_row(rng, dtype, C, N, parts):
    stream, s64 = residual_stream(rng, dtype, 1, C, parts)
    (w, w64), (b, b64), (bias, bias64) = normal(rng, dtype, C), normal(rng, dtype, C), normal(rng, dtype, N)
    matrix, m64 = weight(rng, dtype, C, N)
    y, s, matrix = poisoned(dtype, 1, N), poisoned(np.float32, 1, C), transposed(matrix)
    sums = sums_of_columns(matrix, w, b, bias)
    near(sums[0], w64 @ m64)
    near(sums[1], b64 @ m64 + bias64)
    decode_row.normed_row(y, None, s, stream, w, matrix, *sums, None, 8, EPS, ONE_ROW)
    want = layernorm(s64, w64, b64) @ m64 + bias64
    near(y, NumpyBackend("fp64").gelu_forward(want), dtype)
    near(s, s64)


def test_the_layernorm_of_a_row_far_from_zero(rng):
    """Its variance is a difference of squares: with a mean of 30 deviations it loses three digits, not all of them."""
    (x, x64), (matrix, m64) = normal(rng, np.float32, 1, 768), weight(rng, np.float32, 768, 16)
    x += 30
    ones, zeros = device(np.ones(768, np.float32)), device(np.zeros(768, np.float32))
    y, matrix = poisoned(np.float32, 1, 16), transposed(matrix)
    sums = sums_of_columns(matrix, ones, zeros, zeros[:16])
    decode_row.normed_row(y, None, None, (x, None, None), ones, matrix, *sums, None, 8, EPS, ONE_ROW)
    want = NumpyBackend("fp64").gelu_forward(layernorm(x64 + 30, 1, 0) @ m64)
    assert np.linalg.norm(host(y) - want) <= 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("K, N", [(128, 32), (192, 48), (3072, 20), (6400, 9)])
def test_a_product_that_is_added_to_the_row(rng, dtype, K, N):
    (x, x64), (s, s64), (bias, bias64) = normal(rng, dtype, 1, K), normal(rng, np.float32, 1, N), normal(rng, dtype, N)
    matrix, m64 = weight(rng, dtype, K, N)
    out = poisoned(np.float32, 1, N)
    decode_row.added_row(out, s, x, transposed(matrix), bias, ONE_ROW)
    near(out, s64 + x64 @ m64 + bias64)


@pytest.mark.parametrize("B, K, N", [(3, 32, 172), (2, 48, 40), (17, 384, 96), (5, 768, 100), (3, 1600, 20)])
def test_a_product_of_many_rows(rng, dtype, B, K, N):
    (h, h64), (matrix, m64), (bias, bias64) = normal(rng, dtype, B, K), weight(rng, dtype, K, N), normal(rng, dtype, N)
    y = poisoned(dtype, B, N)
    decode.columns(y, None, h, matrix, bias, None, 8, MANY_ROWS, PRECISION)
    want = h64 @ m64 + bias64
    near(y, NumpyBackend("fp64").gelu_forward(want), dtype)


@pytest.mark.parametrize("lengths", [[1], [7], [8], [3, 1, 8]])
def test_keys_and_values_go_to_the_newest_position_alone(rng, dtype, lengths):
    B, C, block = len(lengths), 24, 8
    stream, s64 = residual_stream(rng, dtype, B, C, 0)
    (w, w64), (b, b64), (bias, bias64) = normal(rng, dtype, C), normal(rng, dtype, C), normal(rng, dtype, 3 * C)
    matrix, m64 = weight(rng, dtype, C, 3 * C)
    q, cache, h = poisoned(dtype, B, C), poisoned(dtype, B, block, 2 * C), poisoned(dtype, B, C)
    rest = device(np.array(lengths, np.int32)), block
    if B == 1:
        matrix = transposed(matrix)
        sums = sums_of_columns(matrix, w, b, bias)
        decode_row.normed_row(q, cache, None, stream, w, matrix, *sums, *rest, EPS, ONE_ROW)
    else:
        decode.norm(h, None, stream, w, b, EPS, MANY_ROWS)
        decode.columns(q, cache, h, matrix, bias, *rest, MANY_ROWS, PRECISION)
    want = layernorm(s64, w64, b64) @ m64 + bias64
    positions = np.array(lengths) - 1
    near(q, want[:, :C], dtype)
    near(host(cache)[range(B), positions], want[:, C:], dtype)
    assert np.isnan(host(cache)).sum() == cache.size - B * 2 * C


@pytest.mark.parametrize("K, N", [(32, 32), (48, 48), (384, 96), (1600, 40), (3072, 48)])
def test_partial_sums_add_up_to_the_product(rng, dtype, K, N):
    B = 3
    (x, x64), (w, w64) = normal(rng, dtype, B, K), weight(rng, dtype, K, N)
    partials = poisoned(np.float32, decode.split(K, MANY_ROWS).parts, B, N)
    decode.partial_product(partials, x, w, MANY_ROWS, PRECISION)
    near(host(partials).sum(0), x64 @ w64, dtype)


# -- attention over the cache ------------------------------------------------------------------------------------------


def attention(q, cache, lengths, H):
    """q (B, C) over the first positions of cache (B, block, 2C), in float64."""
    C, y = q.shape[1], np.empty_like(q)
    for b, length in enumerate(lengths):
        k, v = (cache[b, :length, part].reshape(length, H, -1) for part in (slice(0, C), slice(C, 2 * C)))
        s = np.einsum("hd,thd->ht", q[b].reshape(H, -1), k) / math.sqrt(C // H)
        p = np.exp(s - s.max(1, keepdims=True))
        y[b] = np.einsum("ht,thd->hd", p / p.sum(1, keepdims=True), v).reshape(-1)
    return y


@pytest.mark.parametrize("H, D", [(2, 16), (2, 24), (1, 64)])
@pytest.mark.parametrize("lengths", [[1, 2, 150], [149, 64, 65], [1, 1]])
def test_attention_of_many_rows_over_caches_of_different_lengths(rng, dtype, lengths, H, D):
    B, block, C = len(lengths), 150, H * D
    (q, q64), (cache, c64) = normal(rng, dtype, B, C), normal(rng, dtype, B, block, 2 * C)
    for b, length in enumerate(lengths):
        cache[b, length:] = np.nan  # what was never written must not be looked at
    y = poisoned(dtype, B, C)
    decode.attend(y, q, cache, device(np.array(lengths, np.int32)), H, MANY_ROWS)
    near(y, attention(q64, c64, lengths, H), dtype)


@pytest.mark.parametrize("H, D", [(2, 16), (7, 24), (2, 64), (3, 128)])
@pytest.mark.parametrize(
    "block, length", [*((150, length) for length in (1, 2, 64, 65, 149, 150)), (33, 33), (1500, 1100)]
)
def test_attention_of_one_row_is_added_up_by_the_product_behind_it(rng, dtype, block, length, H, D):
    C, N = H * D, 40
    (q, q64), (cache, c64), (w, w64) = (normal(rng, dtype, *shape) for shape in ((1, C), (1, block, 2 * C), (C, N)))
    cache[0, length:] = np.nan  # what was never written must not be looked at
    lengths = device(np.array([length], np.int32))
    y, peaks, totals = (poisoned(np.float32, H, decode_row.spans(block, ONE_ROW), *rest) for rest in ((D,), (), ()))
    decode_row.attend_spans(y, peaks, totals, q, cache, lengths, H, ONE_ROW)
    partials = poisoned(np.float32, decode_row.heads_of(H, D, ONE_ROW)[0], 1, N)
    decode_row.joined_product(partials, y, peaks, totals, lengths, w, block, ONE_ROW)
    near(host(partials).sum(0), attention(q64, c64, [length], H) @ w64)


@pytest.mark.parametrize("block", [8, 256, 1024, 8192, 10000])
def test_spans_cover_the_block_and_are_few(block):
    spans = decode_row.spans(block, decode.ONE_ROW)
    assert spans <= decode_row.SPANS and spans * decode_row.keys_of(block, decode.ONE_ROW) >= block


@pytest.mark.parametrize("H, D, want", [(12, 64, (3, 4)), (25, 64, (7, 4)), (16, 128, (8, 2)), (1, 8, (1, 1))])
def test_heads_are_divided_into_shares(H, D, want):
    assert decode_row.heads_of(H, D, decode.ONE_ROW) == want


# -- logits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("V, C", [(172, 384), (37, 48), (300, 1600), pytest.param(50257, 32, marks=gpu)])
@pytest.mark.parametrize("B", [1, 3])
def test_logits_and_the_largest_of_each_tile(rng, dtype, V, C, B):
    (h, h64), (w, w64) = normal(rng, dtype, B, C), normal(rng, dtype, V, C)
    tiles = ONE_ROW if B == 1 else MANY_ROWS
    count = decode.logits_tiles(V, tiles)
    logits, best, index = poisoned(np.float32, B, V), poisoned(np.float32, B, count), poisoned(np.int32, B, count)
    decode.unembed(logits, best, index, h, w, tiles, PRECISION)
    near(logits, h64 @ w64.T, np.float32 if B == 1 else dtype)
    logits, index = host(logits), host(index)
    assert_array_equal(host(best), np.take_along_axis(logits, index, 1))
    assert_array_equal(index[range(B), host(best).argmax(1)], logits.argmax(1))


def test_rows_and_windows_end_at_each_sequence_s_own_length(rng):
    lengths = np.array([1, 5, 12, 29], np.int32)
    y, y64 = normal(rng, np.float32, 4, 12, 48)
    h = poisoned(np.float32, 4, 48)
    ends.last_rows(h, y, device(lengths))
    assert_array_equal(host(h), y64[range(4), np.minimum(lengths, 12) - 1])
    texts = [rng.integers(0, 100, length) for length in lengths]
    ids, out = np.zeros((4, 12), np.int32), poisoned(np.int32, 4, 12)
    for row, text in zip(ids, texts, strict=True):
        row[np.arange(len(text))[-12:] % 12] = text[-12:]
    ends.windows(out, device(ids), device(lengths))
    for row, text in zip(host(out), texts, strict=True):
        assert_array_equal(row[: len(text)], text[-12:])


# -- the next token ----------------------------------------------------------------------------------------------------


def empty(shape, dtype):
    return array_module().empty(shape, dtype)


def sequences_of(rng, B, V, lengths):
    wte, wpe = normal(rng, np.float32, V, 24)[0], normal(rng, np.float32, 8, 24)[0]
    sequences = sampling.Sequences(empty, B, 24, 8, wte, wpe, poisoned(np.int32, B, sampling.SENT))
    sequences.lengths[...] = device(np.array(lengths, np.int32))
    return sequences


def tiles_of(logits, tile=16):
    """(best, index) as unembed leaves them."""
    B, V = logits.shape
    padded = np.full((B, -(-V // tile) * tile), -np.inf, np.float32)
    padded[:, :V] = logits
    padded = padded.reshape(B, -1, tile)
    index = padded.argmax(2).astype(np.int32)
    return device(padded.max(2)), device(index + tile * np.arange(padded.shape[1], dtype=np.int32))


@pytest.mark.parametrize("V", [5, 172, pytest.param(50257, marks=gpu)])
def test_the_likeliest_token_the_first_of_equals_is_taken_and_embedded(rng, V):
    lengths = [1, 7, 8, sampling.SENT + 5]
    logits = rng.integers(0, 6, (4, V)).astype(np.float32)
    sequences = sequences_of(rng, 4, V, lengths)
    sampling.take_likeliest(sequences, *tiles_of(logits))
    want = [Greedy()(row) for row in logits]
    assert_array_equal(host(sequences.tokens), want)
    assert_array_equal(host(sequences.lengths), np.array(lengths) + 1)
    assert_array_equal(host(sequences.ids)[range(4), np.array(lengths) % 8], want)
    assert_array_equal(host(sequences.sent)[range(4), np.array(lengths) % sampling.SENT], want)
    near(sequences.x, host(sequences.wte)[want] + host(sequences.wpe)[np.minimum(lengths, 7)])


def test_a_given_token_is_taken_and_one_outside_the_vocabulary_cut_to_it(rng):
    sequences = sequences_of(rng, 3, 9, [1, 2, 3])
    sequences.tokens[...] = device(np.array([4, 9, -1], np.int32))
    sampling.take_given(sequences)
    assert_array_equal(host(sequences.tokens), [4, 8, 0])
    assert_array_equal(host(sequences.lengths), [2, 3, 4])


class Numbers:
    """In place of a rule's generator."""

    def __init__(self, values):
        self.values = iter(values)

    def random(self):
        return next(self.values)


RULES = [(0.7, 0, 1.0), (1.3, 0, 0.8), (2.0, 9, 0.6)]
EXTREMES = [(0.7, 5, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-9), (1e-8, 0, 1.0)]
DRAWS = [(7, "normal", rule) for rule in EXTREMES] + [(700, "ties", rule) for rule in RULES]
DRAWS += [pytest.param(50257, kind, rule, marks=gpu) for kind in ("normal", "ties") for rule in RULES + EXTREMES]


@pytest.mark.parametrize("V, kind, rule", DRAWS)
def test_draws_are_those_of_stage_0_s_rule(rng, V, kind, rule):
    B = 3  # draws, from other logits each, with numbers at both ends of [0, 1) and anywhere
    temperature, top_k, top_p = rule
    logits = (rng.standard_normal((B, V)) * 3).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
        logits[logits == 0] *= rng.choice([-1, 1], (logits == 0).sum())  # -0.0 equals 0.0
    numbers = np.array([0, np.nextafter(1, 0), *rng.random(B - 2)])
    sequences, draw = (
        sequences_of(rng, B, V, range(1, B + 1)),
        sampling.Draw(empty, B, V, (B, 3), 0 < top_k < V, top_p < 1),
    )
    draw.numbers[...], draw.top_k[...] = device(np.array([top_p, temperature])), top_k
    uniforms = np.full((B, 3), np.nan)
    uniforms[range(B), np.arange(1, B + 1) % 3] = numbers
    draw.uniforms[...] = device(uniforms)
    draw.take(sequences, device(logits), tiles_of(logits)[0])
    for token, row, u in zip(host(sequences.tokens), logits, numbers, strict=True):
        rule = Sampling(temperature, top_k, top_p)
        # Masses are rounded to 2^-44 of the largest, which moves a border by at most V / 2^45 < 1e-8. The draw of the
        # last number below 1 notices: of the rarest tokens the mass is rounded to 0.
        near_u = np.clip([u - 1e-8, u + 1e-8], 0, np.nextafter(1, 0))
        rule.random = Numbers(near_u)
        with np.errstate(over="ignore"):
            place = np.argsort(np.argsort(-row, kind="stable"))  # in the order of the rule
            first, last = (place[rule(row)] for _ in near_u)
            if u + 1e-8 > 1 and top_k in (0, V) and top_p == 1:  # float64's sum is off by more than these weigh
                last = np.count_nonzero(np.exp((row.astype(np.float64) - row.max()) / temperature)) - 1
        assert first <= place[token] <= last
