"""The fused product of torch_bridge against float64 NumPy: on the GPU, or in Triton's interpreter."""

import numpy as np
import pytest

pytest.importorskip("triton")

from stage2_cuda.runtime.triton_launch import array_module  # noqa: E402
from torch_bridge.kernels.fused_matmul import TILES, MatmulTile, matmul, select_tile  # noqa: E402

xp = array_module()  # cupy, or numpy under the interpreter
GPU = xp is not np
pytestmark = [pytest.mark.gpu] if GPU else []
pytestmark += [pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]  # gelu of a large negative number

# Relative norm: sums are float32; with fp16 the result is rounded to 11 bits.
TOLERANCE = {np.float32: 1e-6, np.float16: 1e-3}
SHAPES = [(33, 48, 40), (65, 17, 9), (5, 8, 200)] + [(1000, 520, 264)] * GPU  # M, N, K; 17 and 9: read by pointers
SMALL = [MatmulTile(32, 32, 32, 4, 2, c_at) for c_at in ("start", "early", "end")]


def expected(a, b, c, activation):
    h = np.matmul(*(x.astype(np.float64) for x in (a, b))) + (0 if c is None else c.astype(np.float64))
    gelu = h * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return {None: h, "relu": np.maximum(h, 0), "gelu": gelu}[activation], h


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tile", [None, *SMALL], ids=str)
@pytest.mark.parametrize("M, N, K", SHAPES)
@pytest.mark.parametrize("activation, added", [(None, None), (None, "bias"), ("relu", "matrix"), ("gelu", "bias")])
def test_each_epilogue_equals_float64(rng, activation, added, M, N, K, tile, dtype):
    a, b, c = (rng.standard_normal(shape).astype(dtype) for shape in ((M, K), (K, N), (M, N)))
    c = {None: None, "bias": c[0].copy(), "matrix": c}[added]
    d, h = (xp.full((M, N), np.nan, dtype) for _ in range(2))
    matmul(d, *(x if x is None else xp.asarray(x) for x in (a, b, c)), activation, h, tile, "tf32x3")
    for got, want in zip((d, h), expected(a, b, c, activation), strict=True):
        got = (xp.asnumpy(got) if GPU else got).astype(np.float64)
        assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)


def test_a_result_has_at_least_one_tile_per_multiprocessor_if_it_is_large_enough():
    assert [select_tile(size, size) for size in (4096, 2048, 1536, 64)] == [TILES[0], TILES[0], TILES[1], TILES[-1]]
