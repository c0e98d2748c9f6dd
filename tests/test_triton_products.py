"""fp32 products in three passes of tf32, and the loss from its rows, against NumPy in float64."""

# N rows, C summed over, K columns

import os
import secrets

import numpy as np
import pytest

try:
    import cupy

    HAS_GPU = cupy.cuda.runtime.getDeviceCount() > 0
except Exception:  # no CuPy, or no driver
    HAS_GPU = False
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
pytest.importorskip("triton")

from stage2_cuda.cuda_backend import CudaBackend  # noqa: E402
from stage2_cuda.kernels import losses, tf32x3  # noqa: E402
from stage2_cuda.triton_driver import array_module, interpreted  # noqa: E402

gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]


@pytest.fixture
def rng():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def device(array):
    return array_module().asarray(array)


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


def near(got, want, tolerance):
    """norm(got - want) <= tolerance * norm(want), which no NaN passes."""
    assert np.linalg.norm(host(got).astype(np.float64) - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("shape", [(1, 8), (5, 384), (70, 172), pytest.param((4096, 1536), marks=gpu)])
def test_halves_are_tf32_and_add_up_to_22_bits(rng, shape, turned):
    x = rng.standard_normal(shape, np.float32) * 10.0 ** rng.integers(-3, 4, shape).astype(np.float32)
    out = device(np.full(tf32x3.halves_shape(x, turned), np.nan, np.float32))
    tf32x3.halves(out, device(x), turned)
    x = x.T if turned else x
    high, low = host(out)[:, :, : x.shape[1]]
    assert not host(out)[:, :, x.shape[1] :].any()
    for part in (high, low):
        assert not (np.ascontiguousarray(part).view(np.int32) & 0x1FFF).any()  # bits that tensor cores do not see
    # high is within half of its last bit, 2^-11 of x; low within half of its own, another 2^-11
    assert (abs(high.astype(np.float64) + low - x) <= 2.0**-22 * abs(x)).all()


@pytest.mark.parametrize("n, c, k", [(5, 48, 24), (64, 96, 40), (8, 600, 9), pytest.param(4096, 1536, 384, marks=gpu)])
@pytest.mark.parametrize("trans_a, trans_b", [(False, False), (False, True), (True, False)])
def test_a_product_of_fp32_has_its_precision(rng, n, c, k, trans_a, trans_b):
    # 1e-5: the ladder's bound of an fp32 kernel; one pass of tf32 would miss it by far, at 5e-4
    a, b = rng.standard_normal((c, n) if trans_a else (n, c)), rng.standard_normal((k, c) if trans_b else (c, k))
    a, b = a.astype(np.float32), b.astype(np.float32)
    backend = CudaBackend()
    got = backend.product(device(a), device(b), trans_a=trans_a, trans_b=trans_b)
    want = (a.T if trans_a else a).astype(np.float64) @ (b.T if trans_b else b)
    near(got, want, 1e-5)

    wide = device(np.full((n, k + 3), 1, np.float32))  # what lies behind the first k columns is another's
    bias = rng.standard_normal(k).astype(np.float32)
    backend.products.multiply(wide[:, :k], device(a), device(b), trans_a=trans_a, trans_b=trans_b, accumulate=True)
    near(wide[:, :k], 1 + want, 1e-5)
    backend.products.multiply(wide[:, :k], device(a), device(b), trans_a=trans_a, trans_b=trans_b, bias=device(bias))
    near(wide[:, :k], bias + want, 1e-5)
    assert (host(wide)[:, k:] == 1).all()


@pytest.mark.parametrize("n", [1, 100, 5000, pytest.param(65536, marks=gpu)])
def test_the_loss_of_rows(rng, n):
    maxima, sums, picked, higher = (rng.standard_normal(n).astype(np.float32) for _ in range(4))
    sums, highest = 1 + abs(sums), maxima + abs(higher)
    backend = CudaBackend()
    rows = backend.loss_rows(*map(device, (maxima, sums, picked, highest)))
    want = sums * np.exp(maxima.astype(np.float64) - highest)
    near(rows[0], want, 1e-6)
    assert np.array_equal(host(rows[1]), picked)
    loss = backend.loss(device(highest), *rows, 1 / n)
    assert loss.shape == () and loss.dtype == np.float64
    # each row's loss is one of fp32, summed in float64
    assert float(host(loss)) == pytest.approx(np.mean(np.log(want) - (picked - highest)), rel=1e-6, abs=1e-6)


def test_scratch_of_the_loss_grows_with_its_rows():
    assert losses.partials_shape(4096) == (1,) and losses.partials_shape(4097) == (2,)
