"""fp32 products as three fp16 products, and the loss from its per-row numbers, against NumPy in float64."""

# N rows, C the summed dimension, K columns

import numpy as np
import pytest

pytest.importorskip("triton")

from stage2_cuda.cuda_backend import CudaBackend  # noqa: E402
from stage2_cuda.gemm import fp16x3  # noqa: E402
from stage2_cuda.kernels import column_sums, losses  # noqa: E402
from stage2_cuda.runtime.triton_launch import array_module, interpreted  # noqa: E402

gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]


def device(array):
    return array_module().asarray(array)


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def near(got, want, tolerance):
    """Assert norm(got - want) <= tolerance * norm(want); NaN fails."""
    assert np.linalg.norm(host(got).astype(np.float64) - want) <= tolerance * np.linalg.norm(want)


def split(x):
    halves, scales = (array_module().full(shape, np.nan, dtype) for shape, dtype in
                      zip(fp16x3.split_shapes(x), ("float16", "float32"), strict=True))  # fmt: skip
    return fp16x3.split(halves, scales, device(x))


@pytest.mark.parametrize("shape", [(1, 8), (5, 384), (150, 172), pytest.param((4096, 1536), marks=gpu)])
def test_the_two_halves_hold_22_bits_of_a_number(rng, shape):
    x = rng.standard_normal(shape, np.float32) * 10.0 ** rng.integers(-6, 4, shape).astype(np.float32)
    x *= np.float32(10.0 ** rng.integers(-25, 25))
    halves, scales = (host(array) for array in split(x)[:2])
    scale_of = np.kron(scales, np.ones((fp16x3.SCALE_BLOCK, fp16x3.SCALE_BLOCK)))[: shape[0], : shape[1]]
    assert (np.log2(scales) % 1 == 0).all()
    assert not halves[:, :, shape[1] :].any()
    high, low = halves[:, :, : shape[1]].astype(np.float64) * scale_of
    # high has an error of half its last bit, 2^-11 of x; low of half its own last bit, 2^-11 of that error, or, for
    # small numbers, of half the smallest fp16 step, 2^-24, in units in which the largest number of the block is 2^14
    assert (abs(high + low - x) <= np.maximum(2.0**-22 * abs(x), 2.0**-25 * scale_of)).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by NumPy in the interpreter
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_product_with_an_infinite_or_nan_operand_is_not_finite_where_it_depends_on_it(rng, bad):
    a, b = rng.standard_normal((70, 70), np.float32), rng.standard_normal((70, 9), np.float32)
    (want, want_t), a[3, 5] = (a.astype(float) @ b, b.T @ a.astype(float)), bad
    backend = CudaBackend()
    got, got_t = host(backend.product(device(a), device(b))), host(backend.product(device(b), device(a), trans_a=True))
    assert not np.isfinite(got[3]).any() and not np.isfinite(got_t[:, 5]).any()
    near(np.delete(got, 3, 0), np.delete(want, 3, 0), 1e-6)
    near(np.delete(got_t, 5, 1), np.delete(want_t, 5, 1), 1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-36, 1e-15, 1e36])
def test_a_product_of_very_small_or_very_large_numbers_equals_float64(rng, size):
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 40), (40, 70)))
    a *= np.float32(size)
    want = a.astype(np.float64) @ b
    got = CudaBackend().product(device(a), device(b))
    assert np.linalg.norm(host(got).astype(np.float64) - want) <= 1e-5 * np.linalg.norm(want) + 1e-42 * want.size


@pytest.mark.parametrize("n, c, k", [(5, 48, 24), (64, 96, 40), (8, 600, 9), pytest.param(4096, 1536, 384, marks=gpu)])
@pytest.mark.parametrize("trans_a, trans_b", [(False, False), (False, True), (True, False)])
def test_a_product_of_fp32_has_the_precision_of_fp32(rng, n, c, k, trans_a, trans_b):
    # 1e-5: the tolerance of an fp32 kernel; one pass of tf32 has an error of 5e-4
    a, b = rng.standard_normal((c, n) if trans_a else (n, c)), rng.standard_normal((k, c) if trans_b else (c, k))
    a, b = a.astype(np.float32), b.astype(np.float32)
    backend = CudaBackend()
    got = backend.product(device(a), device(b), trans_a=trans_a, trans_b=trans_b)
    want = (a.T if trans_a else a).astype(np.float64) @ (b.T if trans_b else b)
    near(got, want, 1e-5)

    wide = device(np.full((n, k + 3), 1, np.float32))  # the columns after the first k must not be written
    bias = rng.standard_normal(k).astype(np.float32)
    backend.products.multiply(wide[:, :k], device(a), device(b), trans_a=trans_a, trans_b=trans_b, accumulate=True)
    near(wide[:, :k], 1 + want, 1e-5)
    backend.products.multiply(wide[:, :k], device(a), device(b), trans_a=trans_a, trans_b=trans_b, bias=device(bias))
    near(wide[:, :k], bias + want, 1e-5)
    assert (host(wide)[:, k:] == 1).all()


@pytest.mark.parametrize("parts", [2, 4, 8, 16])
@pytest.mark.parametrize("size", [5, 1600, pytest.param(256 * 384, marks=gpu)])
def test_the_parts_of_a_product_are_added_in_the_order_of_a_tree(rng, parts, size):
    partials = rng.standard_normal((parts, size), np.float32)
    out = array_module().full(size, np.nan, np.float32)
    fp16x3.add_parts(out, device(partials))
    near(out, partials.astype(np.float64).sum(0), 1e-6)
    if parts <= 8:
        rows = partials
        while len(rows) > 1:
            rows = rows[: len(rows) // 2] + rows[len(rows) // 2 :]
        assert np.array_equal(host(out), rows[0])
    if parts <= 8 and size % 16 == 0 and not interpreted():  # the bits of the kernel that is used for more parts
        other = array_module().full(size, np.nan, np.float32)
        column_sums.add_partials(device(partials), other)
        assert np.array_equal(host(out), host(other))


@pytest.mark.parametrize("n", [1, 100, 5000, pytest.param(65536, marks=gpu)])
def test_the_loss_of_rows_equals_float64(rng, n):
    maxima, sums, picked, higher = (rng.standard_normal(n).astype(np.float32) for _ in range(4))
    sums, highest = 1 + abs(sums), maxima + abs(higher)
    backend = CudaBackend()
    rows = backend.loss_rows(*map(device, (maxima, sums, picked, highest)))
    want = sums * np.exp(maxima.astype(np.float64) - highest)
    near(rows[0], want, 1e-6)
    assert np.array_equal(host(rows[1]), picked)
    loss = backend.loss(device(highest), *rows, 1 / n)
    assert loss.shape == () and loss.dtype == np.float64
    # each row's loss is computed in fp32; the sum is in float64
    assert float(host(loss)) == pytest.approx(np.mean(np.log(want) - (picked - highest)), rel=1e-6, abs=1e-6)


def test_the_scratch_of_the_loss_grows_with_the_number_of_rows():
    assert losses.partials_shape(4096) == (1,) and losses.partials_shape(4097) == (2,)
