"""The kernels in CUDA C of layernorm.py and cross_entropy.py: in the emulator and on a GPU; the oracle is float64."""

import ctypes
import functools

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from stage2_cuda.kernels import column_sums, cross_entropy, layernorm
from stage2_cuda.runtime import cuda_launch, triton_launch
from tests.support.cuda_sources import aligned, on_cpu, pointers, spills

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
ROUNDING = {"bf16": 2**-8, "fp16": 2**-10}  # the largest relative error of a number that is rounded to 16 bits
EPS = 1e-5


def float64(array):
    return (array if isinstance(array, np.ndarray) else array.get()).astype(np.float64)


def assert_close(got, want, tolerance):
    """`tolerance` is relative to each element, and to the root mean square of all elements."""
    want = np.asarray(want)
    size = np.sqrt(np.mean(want**2)) if want.size else 0
    np.testing.assert_array_less(np.abs(float64(got) - want), tolerance * (np.abs(want) + size) + 1e-30)


class LayerNorm:
    """Random inputs of the backward pass in 16 bits, and the expected results in float64. residual: with ds."""

    def __init__(self, rng, n, C, name, residual):
        normal = lambda *shape: rng.standard_normal(shape).astype(DTYPES[name])  # noqa: E731
        self.n, self.C, self.dtype = n, C, DTYPES[name]
        self.s, self.dy, self.ds, self.w = normal(n, C), normal(n, C), normal(n, C) if residual else None, normal(C)
        s = float64(self.s)
        self.mean = s.mean(1).astype(np.float32)
        self.rstd = (1 / np.sqrt(s.var(1) + EPS)).astype(np.float32)

    def expected(self):
        """dx, dw, db"""
        h = (float64(self.s) - float64(self.mean)[:, None]) * float64(self.rstd)[:, None]
        g = float64(self.dy) * float64(self.w)
        mean, mean_h = g.mean(1, keepdims=True), (g * h).mean(1, keepdims=True)
        dx = (g - mean - h * mean_h) * float64(self.rstd)[:, None]
        if self.ds is not None:
            dx = dx + float64(self.ds)
        return dx, (float64(self.dy) * h).sum(0), float64(self.dy).sum(0)

    def check(self, name, dx, *sums):
        """sums: dw, db, da_bias; the last one is the sum of the rows of dx as they are stored."""
        want = self.expected()
        assert_close(dx, want[0], ROUNDING[name])
        for got, sum_of_rows in zip(sums, (*want[1:], float64(dx).sum(0)), strict=True):
            assert_close(got, sum_of_rows, 1e-5)
        error = float64(sums[2]) - want[0].sum(0)  # that of the rounding of each row, which is random
        assert np.linalg.norm(error) <= ROUNDING[name] * np.linalg.norm(want[0].sum(0))


def sums_of_blocks(dx, blocks):
    """The float32 sums (blocks, C) of the rows of dx, in the order of layernorm_backward.cu.

    Warp w of block b adds the rows 4 b + w, 4 (b + blocks) + w, ...; then the warps' sums are added in their order.
    """
    rows = np.zeros((-(-len(dx) // (4 * blocks)) * 4 * blocks, dx.shape[1]), np.float32)
    rows[: len(dx)] = dx
    rows = rows.reshape(-1, blocks, 4, dx.shape[1])
    first, second, third, fourth = np.moveaxis(functools.reduce(np.add, rows, np.zeros_like(rows[0])), 1, 0)
    return ((first + second) + third) + fourth


class CrossEntropy:
    """Random logits in 16 bits with NaN in the padding, and the expected results in float64."""

    def __init__(self, rng, n, vocab, width, name, scale=0.25):
        self.n, self.vocab, self.width, self.scale = n, vocab, width, scale
        self.logits = (3 * rng.standard_normal((n, width))).astype(DTYPES[name])
        self.logits[:, vocab:] = np.nan
        self.first = 5
        self.targets = rng.integers(0, vocab + 2 * self.first, n).astype(np.int32)  # some are tokens of other ranks
        self.targets[:3] = self.first, self.first + vocab - 1, 0

    def check(self, name, dlogits, maxima, sums, target_logits, dy=1.0):
        logits, column = float64(self.logits)[:, : self.vocab], self.targets - self.first
        own = (column >= 0) & (column < self.vocab)
        rows, column = np.arange(self.n), np.where(own, column, 0)
        assert (float64(maxima) == logits.max(1)).all()
        exp = np.exp(logits - logits.max(1, keepdims=True))
        assert_close(sums, exp.sum(1), 1e-5)
        assert (float64(target_logits) == np.where(own, logits[rows, column], 0)).all()
        if dlogits is None:
            return
        p = exp / exp.sum(1, keepdims=True)
        p[rows, column] -= own
        assert_close(float64(dlogits)[:, : self.vocab], p * self.scale * dy, ROUNDING[name])
        assert (float64(dlogits)[:, self.vocab :] == 0).all()


@pytest.fixture
def hopper(monkeypatch):
    """Imagine an H200."""
    monkeypatch.setattr(cuda_launch, "gpu_model", lambda: ((9, 0), "NVIDIA H200"))


# -- in the emulator ---------------------------------------------------------------------------------------------------


def layernorm_macros(C, name):
    return ("C", C), ("BF16", int(name == "bf16")), ("BLOCK_THREADS", layernorm.CUDA_THREADS)


def cross_entropy_macros(name):
    return ("BF16", int(name == "bf16")), ("BLOCK_THREADS", cross_entropy.CUDA_THREADS)


@pytest.mark.parametrize(
    "n, C, name, residual", [(75, 768, "bf16", True), (3, 256, "fp16", False), (64, 512, "fp16", True)]
)
def test_layernorm_backward_in_the_emulator(rng, tmp_path, n, C, name, residual):
    case, blocks = LayerNorm(rng, n, C, name, residual), 8
    dx, partials = np.full((n, C), np.nan, DTYPES[name]), np.full((3, blocks, C), np.nan, np.float32)
    arrays = [
        None if array is None else aligned(array)
        for array in (dx, partials, case.ds, case.dy, case.s, case.w, case.mean, case.rstd)
    ]
    on_cpu("rows_on_cpu.cpp", layernorm_macros(C, name), tmp_path / "rows.so").run(blocks, pointers(*arrays), n)
    case.check(name, arrays[0], *float64(arrays[1]).sum(1))
    assert_array_equal(arrays[1][2], sums_of_blocks(arrays[0], blocks))


@pytest.mark.parametrize("n, C", [(301, 768), (75, 512), (8, 256), (3, 256)])
def test_residual_bias_gradient_adds_in_the_order_of_the_kernel_in_cuda_c(rng, hopper, n, C):
    xp = triton_launch.array_module()
    ds = rng.standard_normal((n, C)).astype(np.float16)
    shape = layernorm.layernorm_partials_shape(n, C, ds.dtype)[1:]
    da_bias, partials = xp.empty(C, np.float32), xp.full(shape, np.nan, np.float32)
    layernorm.residual_bias_gradient(da_bias, partials, xp.asarray(ds))
    assert_array_equal(partials if xp is np else partials.get(), sums_of_blocks(ds, len(partials)))
    assert_close(da_bias, float64(ds).sum(0), 1e-5)


@pytest.mark.parametrize("vocab, width, name, dy", [
    (1003, 1024, "bf16", None), (1003, 1024, "bf16", 0.5), (20000, 20000, "fp16", 0.5),
    pytest.param(20000, 20000, "fp16", None, marks=pytest.mark.long),
    *(pytest.param(50257, 50304, "bf16", dy, marks=pytest.mark.long) for dy in (None, 0.5)),
])  # fmt: skip
def test_cross_entropy_in_the_emulator(rng, tmp_path, vocab, width, name, dy):
    case = CrossEntropy(rng, 8, vocab, width, name)
    logits, targets = aligned(case.logits), aligned(case.targets)
    rows = [aligned(np.full(case.n, np.nan, np.float32)) for _ in range(3)]
    factor = None if dy is None else aligned(np.full(1, dy, np.float32))
    library = on_cpu("rows_on_cpu.cpp", cross_entropy_macros(name), tmp_path / "rows.so")
    numbers = ctypes.c_float(case.scale), vocab, width, case.first
    library.run(case.n, pointers(None, *rows, logits, targets, None), *numbers)
    case.check(name, None, *rows)
    for row in rows:
        row[...] = np.nan
    library.run(case.n, pointers(logits, *rows, logits, targets, factor), *numbers)  # in place
    case.check(name, logits, *rows, dy=1.0 if dy is None else dy)


@pytest.mark.parametrize("name", DTYPES)
def test_the_kernels_compile_without_spills(tmp_path, name):
    for C in layernorm.CUDA_CHANNELS:
        assert spills((*cuda_launch.HEADERS, layernorm.CUDA_FILE), layernorm_macros(C, name), tmp_path) == [0]
    assert spills((*cuda_launch.HEADERS, cross_entropy.CUDA_FILE), cross_entropy_macros(name), tmp_path) == [0]


# -- which kernel is used ----------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch, hopper):
    """On an imagined H200: the names of the kernels in CUDA C, and "Triton", in the order of the launches."""
    names = []
    monkeypatch.setattr(cuda_launch, "launch", lambda source, name, *rest, **options: names.append(name))
    for module in (layernorm, cross_entropy):
        monkeypatch.setattr(module, "launch", lambda *rest, **options: names.append("Triton"))
    return names


@pytest.mark.parametrize(
    "C, dtype, expected",
    [(768, "float16", "layernorm_backward"), (768, "float32", "Triton"), (1024, "float16", "Triton")],
)
def test_layernorm_backward_uses_cuda_c_for_some_sizes(launched, C, dtype, expected):
    n, dtype = 4096, np.dtype(dtype)
    x, w, vector = aligned(np.zeros((n, C), dtype)), aligned(np.zeros(C, dtype)), np.zeros(n, np.float32)
    partials = np.zeros(layernorm.layernorm_partials_shape(n, C, dtype), np.float32)
    layernorm.residual_layernorm_backward(x, partials, None, x, x, w, vector, vector)
    assert launched == [expected]
    assert partials.shape[1] == (264 if expected == "layernorm_backward" else 512)


def test_layernorm_backward_of_arrays_that_are_not_aligned(launched):
    x, w = aligned(np.zeros((9, 768), np.float16)), aligned(np.zeros(769, np.float16))[1:]
    partials, vector = np.zeros((3, 2, 768), np.float32), np.zeros(9, np.float32)
    layernorm.residual_layernorm_backward(x, partials, x, x, x, w, vector, vector)
    assert launched == ["Triton"]


@pytest.mark.parametrize(
    "width, dtype, expected",
    [
        (50304, "float16", "cross_entropy_rows"),
        (50304, "float32", "Triton"),
        (16384, "float16", "Triton"),
        (57376, "float16", "Triton"),  # more than half of the shared memory of a multiprocessor
        (50296, "float16", "Triton"),  # not a multiple of 32
    ],
)
def test_cross_entropy_uses_cuda_c_for_some_widths(launched, width, dtype, expected):
    logits, rows = aligned(np.zeros((2, width), dtype)), [np.zeros(2, np.float32)] * 3
    targets = np.zeros(2, np.int64)
    cross_entropy.cross_entropy_forward(*rows, logits, targets, width - 7)
    cross_entropy.cross_entropy_forward_backward(logits, *rows, logits, targets, 0.1, width - 7)
    assert launched == [expected] * 2


# -- on a GPU ----------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@pytest.fixture
def cupy():
    if triton_launch.interpreted() or triton_launch.gpu_model()[0] != cuda_launch.HOPPER:
        pytest.skip("these kernels need a Hopper GPU")
    return triton_launch.array_module()


@gpu
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("C", layernorm.CUDA_CHANNELS)
@pytest.mark.parametrize("n", [1, 7, 1000, 8192])
def test_layernorm_backward_equals_float64(cupy, rng, n, C, name, residual):
    case = LayerNorm(rng, n, C, name, residual)
    inputs = [None if a is None else cupy.asarray(a) for a in (case.ds, case.dy, case.s, case.w, case.mean, case.rstd)]
    results = []
    for _ in range(2):
        dx, shape = cupy.empty((n, C), case.dtype), layernorm.layernorm_partials_shape(n, C, case.dtype)
        partials, sums = cupy.full(shape, np.nan, np.float32), cupy.empty((3, C), np.float32)
        apart = cupy.empty(C, np.float32)
        layernorm.residual_layernorm_backward(dx, partials, *inputs)
        for each in zip(partials, sums, strict=True):
            column_sums.add_partials(*each)
        results.append((dx, sums))
        layernorm.residual_bias_gradient(apart, cupy.empty(shape[1:], np.float32), dx)
        assert (apart.get() == sums[2].get()).all()  # equal bits
    case.check(name, dx, *sums)
    for first, second in zip(*results, strict=True):
        assert (first.get() == second.get()).all()  # equal bits


@gpu
@pytest.mark.parametrize("n", [3, 700])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("vocab, width", [(50257, 50304), (17000, 17024), (57344, 57344)])
def test_cross_entropy_equals_float64(cupy, rng, n, vocab, width, name):
    case = CrossEntropy(rng, n, vocab, width, name)
    logits, targets = cupy.asarray(case.logits), cupy.asarray(case.targets)
    assert cross_entropy.uses_cuda(None, logits)
    rows, only = cupy.full((3, n), np.nan, np.float32), cupy.full((3, n), np.nan, np.float32)
    cross_entropy.cross_entropy_forward(*only, logits, targets, vocab, case.first)
    dlogits, dy = cupy.empty_like(logits), cupy.full(1, 0.5, np.float32)
    arguments = logits, targets, case.scale, vocab, case.first
    cross_entropy.cross_entropy_forward_backward(dlogits, *rows, *arguments, dy)
    case.check(name, dlogits, *rows, dy=0.5)
    assert (rows.get() == only.get()).all()
    cross_entropy.cross_entropy_forward_backward(logits, *rows, *arguments, dy)  # in place
    assert (logits.view(np.uint16) == dlogits.view(np.uint16)).all()
