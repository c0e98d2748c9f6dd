"""--precision bf16 on a CPU: products of rounded operands against float64, a whole step, equal bits, and errors."""

import ctypes
import json

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from gpt2core.architecture import GPT2Config
from gpt2core.communicator import Solo
from gpt2core.data import Windows
from gpt2core.errors import ConfigError
from gpt2core.parallel.config import ParallelConfig
from gpt2core.parallel.thread_communicator import run_ranks
from gpt2core.training_loop import read_batch
from stage0_serial import cpu_runtime
from stage0_serial.blas import mkl
from stage0_serial.blas.bf16_products import MIN_ROWS, Bf16Products
from stage0_serial.numpy_backend import NumpyBackend
from stage0_serial.rows import BLOCK
from tests.support.training import assert_same, make_trainer
from tests.support.training import train as train_model

SIZES = GPT2Config(vocab_size=67, block_size=16, n_layer=2, n_head=4, n_embd=40, tied=False)


def gemm(order, a_form, b_form, M, N, K, alpha, a, lda, b, ldb, beta, c, ldc):
    """cblas_gemm_bf16bf16f32 with sums in float64. They are added in the same order for any number of rows."""

    def matrix(address, form, rows, columns, step):
        rows, columns = (rows, columns) if form == mkl.NO_TRANSPOSE else (columns, rows)
        assert step >= columns
        x = np.empty((rows, columns), np.uint16)
        for row in range(rows):
            ctypes.memmove(x[row].ctypes.data, address + 2 * step * row, 2 * columns)
        return as_float64(x) if form == mkl.NO_TRANSPOSE else as_float64(x).T

    assert (order, alpha, beta) == (mkl.ROW_MAJOR, 1, 0) and ldc >= N
    operands = matrix(a, a_form, M, K, lda), matrix(b, b_form, K, N, ldb)
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.einsum("mk,kn->mn", *operands).astype(np.float32, order="C")
    for row in range(M):
        ctypes.memmove(c + 4 * ldc * row, product[row].ctypes.data, 4 * N)


@pytest.fixture(params=["formula", "mkl"])
def library(request, monkeypatch):
    """Products in bf16 by a formula or, if it is installed, by MKL, whatever the CPU of this machine."""
    monkeypatch.setattr(cpu_runtime, "has_amx", lambda: True)
    if request.param == "formula":
        monkeypatch.setattr(mkl, "load", lambda: {mkl.BF16: gemm})
    elif mkl.library_path() is None:
        pytest.skip("MKL is not installed: pip install mkl")


def as_float64(bits):
    """bf16 numbers, as uint16 or BF16 -> float64."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def nearest(x):
    """x, finite float32 -> the nearest bf16 numbers, ties away from zero, in float64: 8 significant bits."""
    x = x.astype(np.float64)
    unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1], -125) - 8)  # the smallest normal number is 0.5 * 2^-125
    return np.copysign(np.floor(np.abs(x) / unit + 0.5) * unit, x)


def layouts(rng, n, m):
    """Random float32 arrays (n, m) in memory by rows, by columns, and with gaps between rows or elements."""
    yield rng.standard_normal((n, m), np.float32)
    yield rng.standard_normal((m, n), np.float32).T
    yield rng.standard_normal((n, 2 * m + 3), np.float32)[:, 3 : m + 3]
    yield rng.standard_normal((n, 2 * m), np.float32)[:, ::2]


def test_rounding_is_to_nearest_with_ties_away_from_zero_in_any_layout(rng):
    products = Bf16Products(np.matmul)
    bits = rng.integers(0, 0x7F7F0000, (3, 2 * BLOCK + 5), np.uint32)  # the largest ones would become infinite
    bits[:, ::7] &= 0xFFFF0000  # exact numbers
    bits[:, 1::7] = bits[:, 1::7] & 0xFFFF0000 | 0x8000  # ties
    bits[:, 2::7] &= 0x00FFFFFF  # denormal numbers, and small ones
    signs = rng.integers(0, 2, bits.shape, np.uint32) << 31
    wide = (bits | signs).view(np.float32)
    for x in (wide, wide.T, wide[:, :1000].copy(), wide[:, 5:300:3], wide[1:, :1], wide[:1], wide[:0]):
        got = products.rounded(x)
        assert_array_equal(as_float64(np.ascontiguousarray(got)), nearest(x))
        assert products.rounded(got) is got  # an operand of two products


def test_infinity_and_nan_are_rounded_to_themselves():
    with np.errstate(invalid="ignore"):
        x = np.array([[np.inf, -np.inf, np.nan, -np.nan, 0, -0.0, 3.4028235e38]], np.float32)
        x = np.append(x, x[:, :1] - x[:, :1], axis=1)  # the NaN of an operation on this CPU
    got = as_float64(Bf16Products(np.matmul).rounded(x))
    assert_array_equal(got, [[np.inf, -np.inf, np.nan, np.nan, 0, 0, np.inf, np.nan]])
    assert_array_equal(np.signbit(got[0, 4:6]), [False, True])


@pytest.mark.parametrize("M, K, N", [(MIN_ROWS, 5, 7), (33, 1, 1), (65, 48, 31), (40, 129, 130)])
def test_a_product_in_any_layout_is_that_of_the_rounded_operands(rng, library, M, K, N):
    products = Bf16Products(np.matmul)
    for a in layouts(rng, M, K):
        for b in layouts(rng, K, N):
            exact = nearest(a) @ nearest(b)
            for out in (np.full((M, N), np.nan, np.float32), np.full((M, 2 * N), np.nan, np.float32)[:, :N]):
                for operand in (a, products.rounded(a)):
                    assert products(operand, b, out) is out
                    # the bound of a sum of K products in float32: K rounding errors
                    assert_allclose(out, exact, rtol=0, atol=K * np.abs(a).max() * np.abs(b).max() * 1.2e-7)


def test_special_operands_give_special_results(rng, library):
    a, b = rng.standard_normal((40, 33), np.float32), rng.standard_normal((33, 5), np.float32)
    a[0, 0], a[1, 0], b[1, 2] = np.nan, np.inf, -np.inf
    a[4:, 1] = 1e-39  # AMX reads a denormal number as 0, other CPUs do not: inf * 0 is NaN
    out = Bf16Products(np.matmul)(a, b, np.empty((40, 5), np.float32))
    assert np.isnan(out[0]).all() and not np.isfinite(out[1]).any() and not np.isfinite(out[:, 2]).any()
    assert np.isfinite(np.delete(out[2:], 2, axis=1)).all()
    tiny = np.full((40, 40), 1e-39, np.float32)
    out = Bf16Products(np.matmul)(tiny, np.full((40, 3), 1e30, np.float32), np.empty((40, 3), np.float32))
    assert (out == 0).all() or np.allclose(out, 40e-9, rtol=0.01)


def test_a_product_of_few_rows_is_that_of_fp32(rng, library):
    runtime, x, w = (
        NumpyBackend("bf16").runtime,
        rng.standard_normal((33, 40), np.float32),
        np.eye(40, dtype=np.float32),
    )
    assert_array_equal(runtime.product(x[: MIN_ROWS - 1], w, out=np.empty((31, 40), np.float32)), x[:31])
    assert not (runtime.product(x, w, out=np.empty((33, 40), np.float32)) == x).all()
    runtime.use_threads(2)  # generation: OpenBLAS divides products of few rows over threads
    assert runtime.product.few_rows is np.matmul and isinstance(runtime.product, Bf16Products)
    runtime.use_threads(1)
    assert runtime.product.few_rows is mkl.product and isinstance(runtime.product, Bf16Products)
    assert NumpyBackend().runtime.rounded(x) is x


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_a_step_are_close_to_those_of_fp32(rng, library, tied):
    windows = Windows(rng.integers(0, 67, 1000), 16)
    config = GPT2Config(67, 16, 2, 4, 40, tied)
    trainers = [make_trainer(Solo(), None, config, precision=precision) for precision in ("fp32", "bf16")]
    losses = [each.step(read_batch(each, windows), 1e-3).loss for each in trainers]
    assert losses[0] != losses[1] and abs(losses[1] / losses[0] - 1) < 1e-3
    want, got = (each.accumulator.gradients for each in trainers)
    assert got.dtype == np.float32
    assert 0 < np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)  # 8 significant bits: errors up to 2^-9


@pytest.mark.parametrize(
    "ranks, threads", [(1, 2), (2, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in [(1, 4), (4, 2)])]
)
def test_threads_and_ranks_change_no_bit(rng, library, ranks, threads):
    tokens = rng.integers(0, 67, 1000)
    options = dict(steps=3, config=SIZES, precision="bf16", batch_size=32)
    want = train_model(Solo(), None, tokens, **options)
    for got in run_ranks(ranks, lambda comm: train_model(comm, ParallelConfig(), tokens, threads=threads, **options)):
        assert_same(got, want)


def losses_in(log):
    return [row["loss"] for row in map(json.loads, log.read_text().splitlines()) if "loss" in row]


def test_a_run_is_logged_resumed_and_validated_and_its_model_generates(
    library, train, infer, corpus, tmp_path, monkeypatch
):
    out, log, whole = tmp_path / "out", tmp_path / "log.jsonl", tmp_path / "whole.jsonl"
    new = "--preset tiny --n-layer 1 --batch-size 4 --precision bf16 --sample 5 --val-fraction 0.2 --data".split()
    for flags in (
        [*new, corpus, "--threads", 2, "--steps", 2, "--out", out, "--log", log],
        ["--resume", out, "--out", out, "--threads", 1, "--steps", 3, "--log", log],
        [*new, corpus, "--threads", 1, "--steps", 3, "--log", whole],
    ):
        result = train(*flags)
        assert result.code == 0 and "bf16 on numpy with MKL" in result.words
    assert losses_in(log) == losses_in(whole) and len(losses_in(log)) == 3
    assert json.loads((out / "latest" / "state.json").read_text())["arguments"]["precision"] == "bf16"
    rounded, calls = Bf16Products.rounded, []
    monkeypatch.setattr(Bf16Products, "rounded", lambda *arguments: calls.append(1) or rounded(*arguments))
    prompt = " ".join(corpus.read_text().split()[:40])  # at least MIN_ROWS tokens
    for flags in (["--threads", 1], ["--threads", 2, "--blas", "mkl"]):
        calls.clear()
        assert infer("--weights", out, "--precision", "bf16", "--prompt", prompt, *flags).code == 0 and calls


def test_openblas_is_an_error_that_names_both_flags(library, train):
    result = train("--precision", "bf16", "--blas", "openblas")
    text = "--blas openblas cannot multiply in --precision bf16: use --blas mkl or --precision fp32"
    assert result.code == 2 and text in result.err


def test_without_mkl_or_amx_bf16_is_an_error(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "has_amx", lambda: True)
    monkeypatch.setattr(mkl, "library_path", lambda: None)
    mkl.load.cache_clear()
    text = "^`precision=bf16`: MKL is not installed: pip install mkl, or use `blas=openblas` and `precision=fp32`$"
    with pytest.raises(ConfigError, match=text):
        NumpyBackend("bf16")
    monkeypatch.setattr(cpu_runtime, "has_amx", lambda: False)
    monkeypatch.setattr(cpu_runtime, "processor", lambda: "AMD EPYC 9354")
    text = (
        "^`precision=bf16` needs amx_bf16 in the flags of /proc/cpuinfo, and AMD EPYC 9354 does not list it: use `pre"
    )
    with pytest.raises(ConfigError, match=text):
        NumpyBackend("bf16")


def test_amx_is_read_from_the_flags_of_the_cpu(monkeypatch):
    for text, found in (
        ("flags\t\t: fpu amx_bf16 avx512_bf16\n", True),
        ("flags\t: fpu avx512_bf16 amx_tile\n", False),
    ):
        monkeypatch.setattr(cpu_runtime.Path, "read_text", lambda path, text=text, **options: text)
        assert cpu_runtime.has_amx() is found

    def missing(path, **options):
        raise FileNotFoundError(path)

    monkeypatch.setattr(cpu_runtime.Path, "read_text", missing)
    assert not cpu_runtime.has_amx()
