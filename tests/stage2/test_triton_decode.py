"""The decode kernels against NumPy in float64, and sampling against stage 0's rule; interpreted if there is no GPU."""

# B sequences, C channels, H heads, D head size, V vocabulary, K and N rows and columns of a weight

import math

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from gpt2core import plain_backend
from gpt2core.sampler import Greedy, Sampling
from stage0_serial.numpy_backend import NumpyBackend
from stage2_cuda.decoding import batched, gather, sampling, single_row
from stage2_cuda.runtime.triton_launch import array_module, interpreted

gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]  # with a GPU, the tests run on it
EPS = 1e-5
# Relative norm against float64. fp32: a few roundings of 6e-8, times the square root of the number of terms of a sum;
# 16 bits: the rounding of the result.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}
PRECISION = "tf32x3"  # of tl.dot with fp32 operands: the only one within fp32's tolerance
# in the interpreter, few programs, because each takes 10 ms; on a GPU the default tiling
FEW = batched.DecodeTiling(block_n=256, split_k=12, split_block_n=256, block_keys=64, block_vocab=256)
SINGLE, BATCHED = (FEW if interpreted() else batched.tiling_for(B) for B in (1, 2))
WIDTHS = [32, 48, 384, 768, 1600]


@pytest.fixture(params=["float32", *(pytest.param(name, marks=gpu) for name in ("float16", "bfloat16"))])
def dtype(request):
    """The type of the weights. In the interpreter only float32: bf16 is wrong there, and it is slow."""
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
    """A device array of NaN, or of -7 for integers, so that a result which is not written is noticed."""
    dtype = np.dtype(dtype)
    return array_module().full(shape, np.nan if dtype.kind not in "iu" else -7, dtype)


def near(got, want, dtype="float32"):
    """Assert norm(got - want) <= tolerance * norm(want); NaN fails."""
    got = host(got)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= TOLERANCE[np.dtype(dtype).name] * np.linalg.norm(want)


def residual_stream(rng, dtype, B, C, parts):
    """A stream (x, partials, bias) on the device, and the sum of its parts in float64."""
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
def test_layernorm_adds_the_partial_sums(rng, dtype, C, parts):
    B = 3
    stream, s64 = residual_stream(rng, dtype, B, C, parts)
    (w, w64), (b, b64) = normal(rng, dtype, C), normal(rng, dtype, C)
    h, s = poisoned(dtype, B, C), poisoned(np.float32, B, C)
    batched.layernorm(h, s, stream, w, b, EPS, BATCHED)
    near(s, s64)
    near(h, layernorm(s64, w64, b64), dtype)
    batched.layernorm(h, stream[0], stream, w, b, EPS, BATCHED)  # in place
    near(stream[0], s64)


def transposed(w):
    out = poisoned(w.dtype, *w.shape[::-1])
    single_row.transpose([(out, w)])
    return out


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_transpose_several_weights_in_one_launch(rng, dtype, count):
    weights = [normal(rng, dtype, K, N) for K, N in [(48, 144), (65, 1), (7, 300), (192, 48)][:count]]
    pairs = [(poisoned(dtype, *w.shape[::-1]), w) for w, _ in weights]
    single_row.transpose(pairs)
    for (out, _), (_, w64) in zip(pairs, weights, strict=True):
        assert_array_equal(host(out), w64.T)


def fold_layernorm(w, *ln_and_bias):
    gamma_w, beta_w = (poisoned(np.float32, len(w)) for _ in range(2))
    single_row.fold_layernorm(gamma_w, beta_w, w, *ln_and_bias)
    return gamma_w, beta_w


@pytest.mark.parametrize("K, N", [(32, 172), (48, 40), (130, 7)])
def test_a_weight_is_transposed(rng, dtype, K, N):
    matrix, m64 = normal(rng, dtype, K, N)
    assert_array_equal(host(transposed(matrix)), m64.T)


@pytest.mark.parametrize("C, N, parts", [(32, 172, 0), (48, 40, 3), (384, 96, 12), (768, 100, 12), (1600, 20, 13)])
def test_the_layernorm_and_linear_layer_of_one_row(rng, dtype, C, N, parts):
    stream, s64 = residual_stream(rng, dtype, 1, C, parts)
    (w, w64), (b, b64), (bias, bias64) = normal(rng, dtype, C), normal(rng, dtype, C), normal(rng, dtype, N)
    matrix, m64 = weight(rng, dtype, C, N)
    y, s, matrix = poisoned(dtype, 1, N), poisoned(np.float32, 1, C), transposed(matrix)
    folded = fold_layernorm(matrix, w, b, bias)
    near(folded[0], w64 @ m64)
    near(folded[1], b64 @ m64 + bias64)
    single_row.layernorm_linear(y, None, s, stream, w, matrix, *folded, None, 8, EPS, SINGLE)
    want = layernorm(s64, w64, b64) @ m64 + bias64
    near(y, NumpyBackend("fp64").gelu_forward(want), dtype)
    near(s, s64)


def test_the_layernorm_of_a_row_far_from_zero(rng):
    """The variance is a difference of squares: at a mean of 30 standard deviations it loses three digits, not all."""
    (x, x64), (matrix, m64) = normal(rng, np.float32, 1, 768), weight(rng, np.float32, 768, 16)
    x += 30
    ones, zeros = device(np.ones(768, np.float32)), device(np.zeros(768, np.float32))
    y, matrix = poisoned(np.float32, 1, 16), transposed(matrix)
    folded = fold_layernorm(matrix, ones, zeros, zeros[:16])
    single_row.layernorm_linear(y, None, None, (x, None, None), ones, matrix, *folded, None, 8, EPS, SINGLE)
    want = NumpyBackend("fp64").gelu_forward(layernorm(x64 + 30, 1, 0) @ m64)
    assert np.linalg.norm(host(y) - want) <= 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("K, N", [(128, 32), (192, 48), (3072, 20), (6400, 9)])
def test_the_linear_layer_with_residual_of_one_row(rng, dtype, K, N):
    (x, x64), (s, s64), (bias, bias64) = normal(rng, dtype, 1, K), normal(rng, np.float32, 1, N), normal(rng, dtype, N)
    matrix, m64 = weight(rng, dtype, K, N)
    out = poisoned(np.float32, 1, N)
    single_row.linear_residual(out, s, x, transposed(matrix), bias, SINGLE)
    near(out, s64 + x64 @ m64 + bias64)


@pytest.mark.parametrize("B, K, N", [(3, 32, 172), (2, 48, 40), (17, 384, 96), (5, 768, 100), (3, 1600, 20)])
def test_the_linear_layer_of_a_batch(rng, dtype, B, K, N):
    (h, h64), (matrix, m64), (bias, bias64) = normal(rng, dtype, B, K), weight(rng, dtype, K, N), normal(rng, dtype, N)
    y = poisoned(dtype, B, N)
    batched.linear(y, None, h, matrix, bias, None, 8, BATCHED, PRECISION)
    want = h64 @ m64 + bias64
    near(y, NumpyBackend("fp64").gelu_forward(want), dtype)


@pytest.mark.parametrize("columns", [24, 48], ids=["q", "q and k"])
@pytest.mark.parametrize("lengths", [[1], [7], [8], [17], [3, 1, 8, 22]])
def test_keys_and_values_are_stored_only_at_the_newest_position(rng, dtype, lengths, columns):
    B, C, block = len(lengths), 24, 8
    stream, s64 = residual_stream(rng, dtype, B, C, 0)
    (w, w64), (b, b64), (bias, bias64) = normal(rng, dtype, C), normal(rng, dtype, C), normal(rng, dtype, 3 * C)
    matrix, m64 = weight(rng, dtype, C, 3 * C)
    q, cache, h = poisoned(dtype, B, columns), poisoned(dtype, B, block, 2 * C), poisoned(dtype, B, C)
    rest = device(np.array(lengths, np.int32)), block
    if B == 1:
        matrix = transposed(matrix)
        folded = fold_layernorm(matrix, w, b, bias)
        single_row.layernorm_linear(q, cache, None, stream, w, matrix, *folded, *rest, EPS, SINGLE)
    else:
        batched.layernorm(h, None, stream, w, b, EPS, BATCHED)
        batched.linear(q, cache, h, matrix, bias, *rest, BATCHED, PRECISION)
    want = layernorm(s64, w64, b64) @ m64 + bias64
    places = (np.array(lengths) - 1) % block
    near(q, want[:, :columns], dtype)
    near(host(cache)[range(B), places, columns - C :], want[:, columns:], dtype)
    assert np.isnan(host(cache)).sum() == cache.size - B * (3 * C - columns)


@pytest.mark.parametrize("K, N", [(32, 32), (48, 48), (384, 96), (1600, 40), (3072, 48)])
def test_partial_sums_add_up_to_the_product(rng, dtype, K, N):
    B = 3
    (x, x64), (w, w64) = normal(rng, dtype, B, K), weight(rng, dtype, K, N)
    partials = poisoned(np.float32, batched.split_k(K, BATCHED).parts, B, N)
    batched.split_k_product(partials, x, w, BATCHED, PRECISION)
    near(host(partials).sum(0), x64 @ w64, dtype)


# -- attention over the cache ------------------------------------------------------------------------------------------


def attention(q, cache, lengths, H):
    """The reference: attention of q (B, C) over the first lengths (B) positions of cache (B, block, 2C), in float64."""
    C, y = q.shape[1], np.empty_like(q)
    for b, length in enumerate(lengths):
        k, v = (cache[b, :length, part].reshape(length, H, -1) for part in (slice(0, C), slice(C, 2 * C)))
        s = np.einsum("hd,thd->ht", q[b].reshape(H, -1), k) / math.sqrt(C // H)
        p = np.exp(s - s.max(1, keepdims=True))
        y[b] = np.einsum("ht,thd->hd", p / p.sum(1, keepdims=True), v).reshape(-1)
    return y


@pytest.mark.parametrize("H, D", [(2, 16), (2, 24), (1, 64)])
@pytest.mark.parametrize("lengths", [[1, 2, 150], [149, 64, 65], [1, 1]])
def test_attention_of_a_batch_with_different_lengths(rng, dtype, lengths, H, D):
    B, block, C = len(lengths), 150, H * D
    (q, q64), (cache, c64) = normal(rng, dtype, B, C), normal(rng, dtype, B, block, 2 * C)
    for b, length in enumerate(lengths):
        cache[b, length:] = np.nan  # positions that are not written must not affect the result
    y = poisoned(dtype, B, C)
    batched.attention(y, q, cache, device(np.array(lengths, np.int32)), H, BATCHED)
    near(y, attention(q64, c64, lengths, H), dtype)


def rotary_case(rng, dtype, lengths, block, H, D):
    """(q, cache, lengths, H, rotation) on the device; the result of attention(); (places, k) of the newest positions.

    The cache of a sequence has the keys and values of its last positions, except the k of the newest position.
    """
    B, C, lengths = len(lengths), H * D, np.array(lengths)
    (q, q64), (cache, c64), places = normal(rng, dtype, B, 2 * C), normal(rng, dtype, B, block, 2 * C), lengths - 1
    rotation = np.stack(plain_backend.rotation(places, D, np.float32), 1)
    rotated = [
        plain_backend.rotate(np.concatenate([row, 0 * row[:C]])[None], H, *plain_backend.rotation([place], D, float))
        for row, place in zip(q64, places, strict=True)
    ]
    q64, k64, _ = np.split(np.concatenate(rotated), 3, 1)
    for b, length in enumerate(lengths):
        cache[b, length:] = np.nan
    rows = range(B), places % block
    cache[*rows, :C], c64[*rows, :C] = np.nan, k64
    want = attention(q64, c64, np.minimum(lengths, block), H)
    return (q, cache, device(lengths.astype(np.int32)), H), device(rotation), want, (rows, k64)


@pytest.mark.parametrize("H, D", [(2, 16), (2, 24), (1, 64)])
@pytest.mark.parametrize("lengths", [[1, 2, 150], [151, 64, 1_000_000], [1, 1]])
def test_rotary_attention_of_a_batch(rng, dtype, lengths, H, D):
    arguments, rotation, want, (rows, k) = rotary_case(rng, dtype, lengths, 150, H, D)
    y = poisoned(dtype, *want.shape)
    batched.attention(y, *arguments, BATCHED, rotation)
    near(y, want, dtype)
    near(host(arguments[1])[*rows, : H * D], k, dtype)


@pytest.mark.parametrize("H, D", [(2, 16), (7, 24), (2, 64), (3, 128)])
@pytest.mark.parametrize("block, length", [(150, 1), (150, 65), (150, 150), (150, 216), (1, 5), (33, 1_000_000)])
def test_rotary_attention_of_one_row(rng, dtype, block, length, H, D):
    (q, cache, lengths, _), rotation, want, (rows, k) = rotary_case(rng, dtype, [length], block, H, D)
    w, w64 = normal(rng, dtype, H * D, 40)
    y, maxima, sums = (poisoned(np.float32, H, single_row.key_splits(block, SINGLE), *rest) for rest in ((D,), (), ()))
    single_row.split_keys_attention(y, maxima, sums, q, cache, lengths, H, SINGLE, rotation)
    near(host(cache)[*rows, : H * D], k, dtype)
    partials = poisoned(np.float32, single_row.split_heads(H, D, SINGLE)[0], 1, 40)
    single_row.combine_product(partials, y, maxima, sums, lengths, w, block, SINGLE)
    near(host(partials).sum(0), want @ w64, dtype)  # the new key is rounded to the dtype of the cache


@pytest.mark.parametrize("H, D", [(2, 16), (7, 24), (2, 64), (3, 128)])
@pytest.mark.parametrize(
    "block, length", [*((150, length) for length in (1, 2, 64, 65, 149, 150)), (33, 33), (1500, 1100)]
)
def test_split_attention_of_one_row_is_combined_by_the_projection(rng, dtype, block, length, H, D):
    C, N = H * D, 40
    (q, q64), (cache, c64), (w, w64) = (normal(rng, dtype, *shape) for shape in ((1, C), (1, block, 2 * C), (C, N)))
    cache[0, length:] = np.nan  # positions that are not written must not affect the result
    lengths = device(np.array([length], np.int32))
    y, maxima, sums = (poisoned(np.float32, H, single_row.key_splits(block, SINGLE), *rest) for rest in ((D,), (), ()))
    single_row.split_keys_attention(y, maxima, sums, q, cache, lengths, H, SINGLE)
    partials = poisoned(np.float32, single_row.split_heads(H, D, SINGLE)[0], 1, N)
    single_row.combine_product(partials, y, maxima, sums, lengths, w, block, SINGLE)
    near(host(partials).sum(0), attention(q64, c64, [length], H) @ w64)


@pytest.mark.parametrize("block", [8, 256, 1024, 8192, 10000])
def test_key_splits_cover_the_block_and_are_few(block):
    splits = single_row.key_splits(block, batched.SINGLE)
    assert splits <= single_row.MAX_KEY_SPLITS and splits * single_row.keys_per_split(block, batched.SINGLE) >= block


@pytest.mark.parametrize("H, D, want", [(12, 64, (3, 4)), (25, 64, (7, 4)), (16, 128, (8, 2)), (1, 8, (1, 1))])
def test_the_heads_are_split_into_equal_parts(H, D, want):
    assert single_row.split_heads(H, D, batched.SINGLE) == want


# -- logits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("V, C", [(172, 384), (37, 48), (300, 1600), pytest.param(50257, 32, marks=gpu)])
@pytest.mark.parametrize("B", [1, 3])
def test_logits_and_the_largest_logit_of_each_tile(rng, dtype, V, C, B):
    (h, h64), (w, w64) = normal(rng, dtype, B, C), normal(rng, dtype, V, C)
    tiling = SINGLE if B == 1 else BATCHED
    tiles = batched.vocab_tiles(V, tiling)
    logits = poisoned(np.float32, B, V)
    maxima, indices = poisoned(np.float32, B, tiles), poisoned(np.int32, B, tiles)
    batched.unembed(logits, maxima, indices, h, w, tiling, PRECISION)
    near(logits, h64 @ w64.T, np.float32 if B == 1 else dtype)
    logits, indices = host(logits), host(indices)
    assert_array_equal(host(maxima), np.take_along_axis(logits, indices, 1))
    assert_array_equal(indices[range(B), host(maxima).argmax(1)], logits.argmax(1))


def test_last_rows_and_windows_follow_each_sequence_s_length(rng):
    lengths = np.array([1, 5, 12, 29], np.int32)
    y, y64 = normal(rng, np.float32, 4, 12, 48)
    h = poisoned(np.float32, 4, 48)
    gather.gather_last_rows(h, y, device(lengths))
    assert_array_equal(host(h), y64[range(4), np.minimum(lengths, 12) - 1])
    sequences = [rng.integers(0, 100, length) for length in lengths]
    ids, out = np.zeros((4, 12), np.int32), poisoned(np.int32, 4, 12)
    for row, tokens in zip(ids, sequences, strict=True):
        row[np.arange(len(tokens))[-12:] % 12] = tokens[-12:]
    gather.gather_windows(out, device(ids), device(lengths))
    for row, tokens in zip(host(out), sequences, strict=True):
        assert_array_equal(row[: len(tokens)], tokens[-12:])


# -- the next token ----------------------------------------------------------------------------------------------------


def empty(shape, dtype):
    return array_module().empty(shape, dtype)


def sequences_of(rng, B, V, lengths):
    wte, wpe = normal(rng, np.float32, V, 24)[0], normal(rng, np.float32, 8, 24)[0]
    sequences = sampling.Sequences(empty, B, 24, 8, wte, wpe, poisoned(np.int32, B, sampling.READBACK))
    sequences.lengths[...] = device(np.array(lengths, np.int32))
    return sequences


def tiles_of(logits, tile=16):
    """(maxima, indices) of tiles of the logits, as batched.unembed computes them."""
    B, V = logits.shape
    padded = np.full((B, -(-V // tile) * tile), -np.inf, np.float32)
    padded[:, :V] = logits
    padded = padded.reshape(B, -1, tile)
    index = padded.argmax(2).astype(np.int32)
    return device(padded.max(2)), device(index + tile * np.arange(padded.shape[1], dtype=np.int32))


@pytest.mark.parametrize("V", [5, 172, pytest.param(50257, marks=gpu)])
def test_append_greedy_appends_the_first_of_the_largest_logits_and_its_embedding(rng, V):
    lengths = [1, 7, 8, sampling.READBACK + 5]
    logits = rng.integers(0, 6, (4, V)).astype(np.float32)
    sequences = sequences_of(rng, 4, V, lengths)
    sampling.append_greedy(sequences, *tiles_of(logits))
    want = [Greedy()(row) for row in logits]
    assert_array_equal(host(sequences.tokens), want)
    assert_array_equal(host(sequences.lengths), np.array(lengths) + 1)
    assert_array_equal(host(sequences.ids)[range(4), np.array(lengths) % 8], want)
    assert_array_equal(host(sequences.readback)[range(4), np.array(lengths) % sampling.READBACK], want)
    near(sequences.x, host(sequences.wte)[want] + host(sequences.wpe)[np.minimum(lengths, 7)])


@pytest.mark.parametrize("C, pairs", [(24, 12), (80, 40)])
def test_append_stores_the_cosines_and_sines_of_the_token_s_position(rng, C, pairs):
    lengths, wte = [1, 8, 5000, 999_999], normal(rng, np.float32, 5, C)[0]
    sequences = sampling.Sequences(empty, 4, C, 8, wte, None, poisoned(np.int32, 4, sampling.READBACK), pairs)
    sequences.lengths[...], sequences.tokens[...] = (device(np.array(each, np.int32)) for each in (lengths, range(4)))
    sampling.append_given(sequences)
    assert_array_equal(host(sequences.x), host(wte)[:4])
    want = np.stack(plain_backend.rotation(lengths, 2 * pairs, float), 1)
    assert np.abs(host(sequences.rotation) - want).max() <= 1e-6  # the angle, below pi, and its cosine are rounded


@pytest.mark.parametrize("V", [5, 1030])
def test_excluded_ids_get_the_logit_minus_infinity_and_the_maxima_are_those_of_the_others(rng, V):
    valid = rng.random(V) < 0.3
    valid[rng.integers(V)] = True
    logits = rng.choice([-np.inf, np.nan, -1, 0, 3], (4, V)).astype(np.float32)
    mask, array = sampling.TokenMask(empty, 4, V), device(logits)
    mask.valid[...] = device(valid.astype(np.int8))
    maxima, indices = map(host, mask.exclude(array))
    lowest = np.finfo(np.float32).min  # of a token whose logit is not finite: it is above that of an excluded id
    want = np.where(valid, np.where(logits > -np.inf, logits, lowest), -np.inf)
    assert_array_equal(host(array), want)
    best = maxima.argmax(1)
    assert_array_equal(maxima[range(4), best], want.max(1))
    assert_array_equal(indices[range(4), best], want.argmax(1))


def test_append_given_appends_a_token_and_clips_it_to_the_vocabulary(rng):
    sequences = sequences_of(rng, 3, 9, [1, 2, 3])
    sequences.tokens[...] = device(np.array([4, 9, -1], np.int32))
    sampling.append_given(sequences)
    assert_array_equal(host(sequences.tokens), [4, 8, 0])
    assert_array_equal(host(sequences.lengths), [2, 3, 4])


class Numbers:
    """Replaces the random generator of a rule: returns the given numbers."""

    def __init__(self, values):
        self.values = iter(values)

    def random(self):
        return next(self.values)


RULES = [(0.7, 0, 1.0), (1.3, 0, 0.8), (2.0, 9, 0.6)]
EXTREMES = [(0.7, 5, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-9), (1e-8, 0, 1.0)]
DRAWS = [(7, "normal", rule) for rule in EXTREMES] + [(700, "ties", rule) for rule in RULES]
DRAWS += [pytest.param(50257, kind, rule, marks=gpu) for kind in ("normal", "ties") for rule in RULES + EXTREMES]


@pytest.mark.parametrize("V, kind, rule", DRAWS)
def test_sampled_tokens_equal_those_of_stage_0_s_rule(rng, V, kind, rule):
    B = 3  # draws, each from its own logits, with numbers at both ends of [0, 1) and between
    temperature, top_k, top_p = rule
    logits = (rng.standard_normal((B, V)) * 3).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
        logits[logits == 0] *= rng.choice([-1, 1], (logits == 0).sum())  # -0.0 equals 0.0
    numbers = np.array([0, np.nextafter(1, 0), *rng.random(B - 2)])
    sequences, sampler = (
        sequences_of(rng, B, V, range(1, B + 1)),
        sampling.DeviceSampler(empty, B, V, (B, 3), 0 < top_k < V, top_p < 1),
    )
    sampler.top_p_and_temperature[...], sampler.top_k[...] = device(np.array([top_p, temperature])), top_k
    uniforms = np.full((B, 3), np.nan)
    uniforms[range(B), np.arange(1, B + 1) % 3] = numbers
    sampler.uniforms[...] = device(uniforms)
    sampler.append_sampled(sequences, device(logits), tiles_of(logits)[0])
    for token, row, u in zip(host(sequences.tokens), logits, numbers, strict=True):
        rule = Sampling(temperature, top_k, top_p)
        # Masses are rounded to 2^-44 of the largest one, which shifts a cumulative sum by at most V / 2^45 < 1e-8. This
        # affects the draw of the largest number below 1: the masses of the least probable tokens are rounded to 0.
        near_u = np.clip([u - 1e-8, u + 1e-8], 0, np.nextafter(1, 0))
        rule.random = Numbers(near_u)
        with np.errstate(over="ignore"):
            place = np.argsort(np.argsort(-row, kind="stable"))  # each token's index in the rule's order
            first, last = (place[rule(row)] for _ in near_u)
            if u + 1e-8 > 1 and top_k in (0, V) and top_p == 1:  # below the error of the float64 sum
                last = np.count_nonzero(np.exp((row.astype(np.float64) - row.max()) / temperature)) - 1
        assert first <= place[token] <= last
