"""The attention kernels against float64 NumPy: on the GPU, or in Triton's interpreter if there is none."""

# B batch, T time, C channels, H heads, D = C // H

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytest.importorskip("triton")

from benchmarks.parity.oracle import turned  # noqa: E402
from gpt2core.errors import ConfigError  # noqa: E402
from stage2_cuda.attention import hopper_launches  # noqa: E402
from stage2_cuda.attention import launches as attention  # noqa: E402
from stage2_cuda.attention.hopper_launches import GluonTile  # noqa: E402
from stage2_cuda.attention.launches import AttentionTiles, TileConfig  # noqa: E402
from stage2_cuda.decoding.cached_attention import attention_cached  # noqa: E402
from stage2_cuda.kernels.rotary import compute_rotation  # noqa: E402
from stage2_cuda.runtime.gluon_launch import gluon_kind  # noqa: E402
from stage2_cuda.runtime.triton_launch import array_module  # noqa: E402

xp = array_module()  # cupy, or numpy under the interpreter
GPU = xp is not np
pytestmark = [pytest.mark.gpu] if GPU else []
pytestmark += [pytest.mark.filterwarnings("ignore:overflow encountered in exp2")]  # of scores that are then masked

# Relative norm against float64. fp32: every sum is rounded. 16 bits: p, ds and the results are rounded, and delta is
# computed from a rounded y.
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
TF32_TOLERANCE = 4e-3  # tl.dot truncates fp32 operands, by 2^-10 at most, and dq and dk are products of such products
DTYPES = ["fp32", "fp16", *(["bf16"] if GPU else [])]  # the interpreter computes bf16 wrongly
GUARD = 64  # elements before and after every output, which no kernel may touch

SHAPES = [(2, 1, 1, 8), (1, 7, 3, 16), (2, 16, 2, 24), (1, 33, 2, 64), (1, 65, 1, 40), (1, 20, 3, 128)]
if GPU:
    SHAPES += [(2, 200, 12, 64), (3, 256, 6, 64), (1, 1000, 25, 64), (2, 1024, 2, 128), (1, 2049, 3, 80)]
    SHAPES += [(1, 4100, 2, 64), (1, 8192, 1, 64)]


SQUARE, WIDE, TALL = TileConfig(16, 16, 4, 2), TileConfig(16, 32, 4, 2), TileConfig(32, 16, 4, 2)
TILES = {  # small, so that a short T has tiles above, on and below the diagonal
    "square": AttentionTiles(SQUARE, SQUARE, SQUARE),
    "wide": AttentionTiles(WIDE, WIDE, WIDE),
    "tall": AttentionTiles(TALL, TALL, TALL),
    "both": AttentionTiles(TALL, both=SQUARE),
    "two loops, wide": AttentionTiles(*[WIDE._replace(loops=2)] * 3),
    "two loops, tall": AttentionTiles(*[TALL._replace(loops=2)] * 3),
    "two loops, both": AttentionTiles(TALL, both=SQUARE._replace(loops=2)),
}


def array(values, precision):
    if precision == "bf16":
        import ml_dtypes

        return xp.asarray(values, np.float32).astype(ml_dtypes.bfloat16)
    return xp.asarray(values, np.float32).astype({"fp32": np.float32, "fp16": np.float16}[precision])


def host(values):
    """As float64 on the host; float32 represents every fp16 and bf16 number exactly."""
    values = values.astype(np.float32)
    return (xp.asnumpy(values) if GPU else values).astype(np.float64)


class Outputs:
    """Allocates arrays filled with NaN, with GUARD elements of NaN before and after each."""

    def __init__(self, precision):
        self.precision, self.all = precision, []

    def empty(self, *shape, precision=None):
        size = int(np.prod(shape))
        flat = array(np.full(size + 2 * GUARD, np.nan), precision or self.precision)
        self.all.append(flat)
        return flat[GUARD : GUARD + size].reshape(shape)

    def check_guards(self):
        for flat in self.all:
            assert np.isnan(host(flat[:GUARD])).all() and np.isnan(host(flat[-GUARD:])).all()


def near(got, want, tolerance, least=0.0):
    """Assert norm(got - want) <= tolerance * max(norm(want), least); NaN fails."""
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), least)


def oracle(qkv, dy, H):
    """y, lse in base 2, and dqkv, in float64."""
    B, T, columns = qkv.shape
    D = columns // 3 // H
    q, k, v = qkv.reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)  # (B, H, T, D)
    s = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / D**0.5, -np.inf)
    peak = s.max(-1, keepdims=True)
    lse = peak + np.log(np.exp(s - peak).sum(-1, keepdims=True))
    base_2 = lse[..., 0] / np.log(2)
    p, g = np.exp(s - lse), dy.reshape(B, T, H, D).swapaxes(1, 2)
    y, dp = p @ v, g @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dqkv = np.stack([ds @ k / D**0.5, ds.swapaxes(2, 3) @ q / D**0.5, p.swapaxes(2, 3) @ g])  # (3, B, H, T, D)
    return y.swapaxes(1, 2).reshape(B, T, H * D), base_2, dqkv.transpose(1, 3, 0, 2, 4).reshape(qkv.shape)


def run(qkv, dy, H, dtype, rotation=None, **options):
    """y, lse and dqkv on the host. Asserts that the kernels write nothing else: neither inputs nor guard elements."""
    (B, T, C), outputs, inputs = dy.shape, Outputs(dtype), (host(qkv), host(dy))
    y, dqkv = outputs.empty(B, T, C), outputs.empty(B, T, 3 * C)
    lse, delta = (outputs.empty(B, H, T, precision="fp32") for _ in range(2))
    attention.attention_forward(y, lse, qkv, H, **options)
    forward = host(y), host(lse)
    attention.attention_backward(dqkv, delta, dy, qkv, y, lse, H, rotation=rotation, **options)
    outputs.check_guards()
    for before, after in zip((*inputs, *forward), (qkv, dy, y, lse), strict=True):
        assert_array_equal(before, host(after))
    return *forward, host(dqkv)


def operands(rng, precision, B, T, H, D, scale=1.0):
    qkv = array(rng.standard_normal((B, T, 3 * H * D)) * scale, precision)
    return qkv, array(rng.standard_normal((B, T, H * D)), precision)


def check(rng, dtype, B, T, H, D, tolerance=None, position=None, **options):
    """position: of the first row, if q and k are rotated: then dqkv is the gradient of the array before."""
    (qkv, dy), rotation = operands(rng, dtype, B, T, H, D), None
    if position is not None:
        qkv, rotation = array(turned(host(qkv), H, position, 1), dtype), xp.empty((T, 2, D // 2), np.float32)
        compute_rotation(rotation, position)
    y, lse, dqkv = run(qkv, dy, H, dtype, rotation, **options)
    want_y, want_lse, want_dqkv = oracle(host(qkv), host(dy), H)
    want_dqkv = want_dqkv if position is None else turned(want_dqkv, H, position, -1)
    near(lse, want_lse, tolerance or 1e-5, least=1.0)  # float32, whatever the inputs
    tolerance = tolerance or TOLERANCE[dtype]
    near(y, want_y, tolerance)
    least = (
        np.linalg.norm(want_dqkv) / 2
    )  # dq and dk of few positions nearly cancel; of one position they are rounding errors
    for part, want in zip(np.split(dqkv, 3, 2), np.split(want_dqkv, 3, 2), strict=True):
        near(part, want, tolerance, least)


# -- forward and backward ----------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("B, T, H, D", SHAPES)
def test_attention_equals_float64(rng, precision, B, T, H, D):
    check(rng, precision, B, T, H, D)


@pytest.mark.parametrize("precision", DTYPES)
def test_attention_of_a_random_shape_equals_float64(rng, precision):
    B, T, H, D = rng.integers(1, 3), rng.integers(1, 90), rng.integers(1, 4), 8 * rng.integers(1, 17)
    print("shape", B, T, H, D)
    check(rng, precision, *(int(n) for n in (B, T, H, D)))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("precision, T, H, D", [("fp32", 48, 2, 16), ("fp32", 65, 1, 24), ("fp16", 33, 1, 8)])
def test_attention_with_any_tiles_equals_float64(rng, precision, T, H, D, tiles):
    check(rng, precision, 1, T, H, D, tiles=TILES[tiles])


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("B, T, H, D", SHAPES)
def test_the_gradient_of_rotated_queries_and_keys_is_rotated_back(rng, precision, B, T, H, D):
    check(rng, precision, B, T, H, D, position=1000)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("precision, T, H, D", [("fp32", 48, 2, 16), ("fp32", 65, 1, 24), ("fp16", 33, 1, 8)])
def test_the_gradient_is_rotated_back_with_any_tiles(rng, precision, T, H, D, tiles):
    check(rng, precision, 2, T, H, D, position=7, tiles=TILES[tiles])


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("B, T, H, D", [(2, 33, 2, 24), (1, 20, 1, 64), *([(2, 1024, 3, 64)] if GPU else [])])
def test_rotary_attention_of_the_backend_equals_float64(rng, precision, B, T, H, D):
    from stage2_cuda.cuda_backend import CudaBackend

    backend, position = CudaBackend(precision, deterministic=True), 5
    qkv, dy = operands(rng, precision, B, T, H, D)
    want_y, _, want_dqkv = oracle(turned(host(qkv), H, position, 1), host(dy), H)
    y, aux = backend.rotary_attention_forward(qkv, H, position)
    near(host(y), want_y, TOLERANCE[precision])
    dqkv = host(backend.rotary_attention_backward(dy, y, aux, H, position))
    near(dqkv, turned(want_dqkv, H, position, -1), TOLERANCE[precision])


@pytest.mark.skipif(not GPU, reason="the interpreter ignores the input precision")
@pytest.mark.parametrize("name, tolerance", [("tf32", TF32_TOLERANCE), ("tf32x3", 1e-5)])
@pytest.mark.parametrize("D", [16, 64, 128])
def test_attention_of_fp32_on_tensor_cores_has_the_tolerance_of_its_precision(rng, name, tolerance, D):
    check(rng, "fp32", 2, 300, 3, D, tolerance=tolerance, precision=name)


@pytest.mark.skipif(not GPU, reason="the interpreter would take minutes")
@pytest.mark.parametrize("T", [1024, 1000])
def test_attention_with_all_default_tiles_equals_float64(rng, T):
    for kind, entries in attention.DEFAULT_TILES.items():
        for (D, _), tiles in entries.items():
            precision, name = ("bf16", "ieee") if kind == "16 bits" else ("fp32", kind)
            tolerance = TF32_TOLERANCE if kind == "tf32" else None
            check(rng, precision, 1, T, 2, D, tolerance=tolerance, precision=name, tiles=tiles)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("tiles", [None, "square", "both"])
def test_attention_twice_gives_the_same_bits(rng, precision, tiles):
    qkv, dy = operands(rng, precision, 1, 40, 2, 16)
    first, again = (run(qkv, dy, 2, precision, tiles=TILES.get(tiles)) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("precision", DTYPES[1:])
@pytest.mark.parametrize("tile", [(64, 64, 4, 3), (32, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3, 2)], ids=str)
def test_rows_read_through_descriptors_and_through_pointers_give_equal_bits(rng, monkeypatch, precision, tile):
    (qkv, dy), results = operands(rng, precision, 2, 256, 2, 64), []
    tiles = AttentionTiles(*[TileConfig(64, 64, 4, 3)] * 2, TileConfig(*tile))
    for sizes in ((64,), ()):
        monkeypatch.setattr(attention, "DESCRIPTOR_HEAD_SIZES", sizes)
        results.append(run(qkv, dy, 2, precision, tiles=tiles))
    for a, b in zip(*results, strict=True):
        assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("tiles", ["square", "both"])
def test_large_scores_do_not_overflow(rng, precision, tiles):
    qkv, dy = operands(rng, precision, 1, 40, 2, 16, scale=30)  # scores in the thousands
    y, lse, dqkv = run(qkv, dy, 2, precision, tiles=TILES[tiles])
    want_y, want_lse, _ = oracle(host(qkv), host(dy), 2)
    near(y, want_y, max(1e-3, TOLERANCE[precision]))  # a score of 1e3 has a rounding error of 1e-4, and so has p
    near(lse, want_lse, 1e-5)
    assert np.isfinite(dqkv).all()


@pytest.mark.parametrize("now", [0, 15, 16, 31])
@pytest.mark.parametrize("tiles", ["wide", "both"])
def test_attention_never_sees_the_future(rng, now, tiles):
    """Changing later positions changes no bit of y, lse or the gradients, and their gradients are 0."""
    (qkv, dy), tiles = operands(rng, "fp32", 1, 37, 1, 8), TILES[tiles]
    changed = qkv.copy()
    changed[:, now + 1 :] *= -50
    dy[:, now + 1 :] = 0
    y, lse, dqkv = run(qkv, dy, 1, "fp32", tiles=tiles)
    other_y, other_lse, other_dqkv = run(changed, dy, 1, "fp32", tiles=tiles)
    assert_array_equal(other_y[:, : now + 1], y[:, : now + 1])
    assert_array_equal(other_lse[:, :, : now + 1], lse[:, :, : now + 1])
    assert_array_equal(other_dqkv[:, : now + 1], dqkv[:, : now + 1])
    assert not dqkv[:, now + 1 :].any()


@pytest.mark.parametrize("C, H", [(36, 3), (136, 1), (20, 3)])
def test_an_unsupported_head_size_is_an_error_that_names_it(C, H):
    with pytest.raises(ConfigError, match=f"multiples of 8 up to 128, not {C} / {H}"):
        attention.attention_forward(None, None, xp.empty((1, 2, 3 * C), np.float32), H)


def test_the_text_of_tuned_tiles_is_that_of_earlier_versions():
    tiles = AttentionTiles(dq=TileConfig(128, 64, 4, 3), dkdv=TileConfig(64, 64, 4, 2, loops=2))
    assert str(tiles) == "dq 128 x 64, 4 warps, 3 stages, 1 loops; dkdv 64 x 64, 4 warps, 2 stages, 2 loops"
    assert str(AttentionTiles(TileConfig(64, 64, 4, 3))) == "forward 64 x 64, 4 warps, 3 stages, 1 loops"
    assert str(AttentionTiles(both=TileConfig(64, 64, 8, 2))) == "both 64 x 64, 8 warps, 2 stages, 1 loops"


# -- Gluon kernels -----------------------------------------------------------------------------------------------------

HOPPER = attention.gluon_table(2, 1, 300, 64) != {}
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and Triton 3.6")
DESIGNS = [("pipelined", 64), ("specialized", 64), ("specialized", 128)]  # design, D
# B, T, H: few positions, whole tiles, T not a multiple of a tile, an odd B*H, a few rows more than a program computes
GLUON_SHAPES = [(1, 4, 1), (1, 64, 3), (3, 68, 1), (2, 196, 3), (2, 384, 2), (3, 1000, 5), (1, 2100, 3)]


@on_hopper
@pytest.mark.parametrize("design, D", DESIGNS)
@pytest.mark.parametrize("B, T, H", GLUON_SHAPES)
def test_the_gluon_kernels_equal_float64(rng, B, T, H, design, D):
    check(rng, "bf16", B, T, H, D, tiles=AttentionTiles(*[GluonTile(design)] * 3))


@on_hopper
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("design, D", DESIGNS)
def test_the_gluon_kernels_of_a_random_shape_equal_float64(rng, precision, design, D):
    B, T, H = int(rng.integers(1, 4)), 4 * int(rng.integers(1, 375)), int(rng.integers(1, 5))
    print("shape", B, T, H, D)
    check(rng, precision, B, T, H, D, tiles=AttentionTiles(*[GluonTile(design)] * 3))


@on_hopper
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("design, D", DESIGNS)
@pytest.mark.parametrize("B, T, H", GLUON_SHAPES)
def test_the_gluon_kernels_rotate_the_gradient_back(rng, precision, B, T, H, design, D):
    check(rng, precision, B, T, H, D, position=1000, tiles=AttentionTiles(*[GluonTile(design)] * 3))


@on_hopper
@pytest.mark.parametrize("design, D", DESIGNS)
def test_a_rotation_by_nothing_changes_no_bit_of_the_gluon_kernels(rng, design, D):
    (qkv, dy), tiles = operands(rng, "bf16", 2, 1000, 3, D), AttentionTiles(*[GluonTile(design)] * 3)
    rotation = xp.zeros((1000, 2, D // 2), np.float32)
    rotation[:, 0] = 1
    for a, b in zip(*(run(qkv, dy, 3, "bf16", each, tiles=tiles) for each in (None, rotation)), strict=True):
        assert_array_equal(a, b)


@on_hopper
@pytest.mark.parametrize("part", ["forward", "dq", "dkdv"])
def test_a_gluon_kernel_works_beside_plain_ones(rng, part):
    tiles = attention.default_tiles(2, 1000, 64, "ieee")._replace(**{part: GluonTile("specialized")})
    check(rng, "bf16", 2, 1000, 3, 64, tiles=tiles)


@on_hopper
@pytest.mark.parametrize("design, D", DESIGNS)
def test_the_gluon_kernels_twice_give_the_same_bits(rng, design, D):
    (qkv, dy), tiles = operands(rng, "bf16", 4, 1000, 12, D), AttentionTiles(*[GluonTile(design)] * 3)
    first = run(qkv, dy, 12, "bf16", tiles=tiles)
    for _ in range(9):
        for a, b in zip(first, run(qkv, dy, 12, "bf16", tiles=tiles), strict=True):
            assert_array_equal(a, b, strict=True)


@on_hopper
@pytest.mark.parametrize("design, D", DESIGNS)
def test_the_gluon_kernels_never_see_the_future(rng, design, D):
    (qkv, dy), tiles, now = operands(rng, "bf16", 1, 300, 2, D), AttentionTiles(*[GluonTile(design)] * 3), 130
    changed = qkv.copy()
    changed[:, now + 1 :] *= -50
    dy[:, now + 1 :] = 0
    y, lse, dqkv = run(qkv, dy, 2, "bf16", tiles=tiles)
    other_y, other_lse, other_dqkv = run(changed, dy, 2, "bf16", tiles=tiles)
    assert_array_equal(other_y[:, : now + 1], y[:, : now + 1])
    assert_array_equal(other_lse[:, :, : now + 1], lse[:, :, : now + 1])
    assert_array_equal(other_dqkv[:, : now + 1], dqkv[:, : now + 1])
    assert not dqkv[:, now + 1 :].any()


@on_hopper
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("T, D", [(1024, 64), (5000, 64), (1500, 128)])
def test_the_backend_uses_the_gluon_kernels_and_equals_float64(rng, monkeypatch, precision, T, D):
    from stage2_cuda.cuda_backend import CudaBackend

    launched, original = [], hopper_launches.kernel_launch
    monkeypatch.setattr(
        hopper_launches,
        "kernel_launch",
        lambda kernel, *rest, **options: launched.append(kernel) or original(kernel, *rest, **options),
    )
    backend, H = CudaBackend(precision, deterministic=True), 1
    qkv, dy = operands(rng, precision, 1, T, H, D)
    y, aux = backend.attention_forward(qkv, H)
    dqkv = backend.attention_backward(dy, qkv, y, aux, H)
    assert launched == ["forward", "dq", "dkdv"]
    want_y, _, want_dqkv = oracle(host(qkv), host(dy), H)
    near(host(y), want_y, TOLERANCE[precision])
    near(host(dqkv), want_dqkv, TOLERANCE[precision])


def test_the_table_of_gluon_kernels_serves_hopper_and_16_bits_only():
    assert (gluon_kind((9, 0), "NVIDIA H100 80GB HBM3"), gluon_kind((9, 0), "NVIDIA H200")) == ("H100", "H200")
    assert [gluon_kind(capability, "a GPU") for capability in ((8, 0), (8, 9), (10, 0), (12, 0))] == [None] * 4
    serves = hopper_launches.serves
    assert [serves(2, 768, 1024, 1024, D) for D in (16, 64, 80, 128)] == [False, True, False, True]
    assert not serves(4, 768, 1024, 1024, 64)  # fp32
    assert [serves(2, heads, T, T, 64) for heads, T in ((768, 256), (96, 256), (96, 260), (768, 252))] == [
        True, False, True, False,
    ]  # fmt: skip
    assert [serves(2, 768, T_q, T_k, 64) for T_q, T_k in ((777, 777), (777, 776), (776, 777))] == [False, False, True]
    assert not serves(2, 2**16, 300, 300, 64)  # the limit of a grid
    assert not serves(2, 2**12, 2**19, 2**19, 64)  # the limit of 32-bit coordinates
    for table in attention.GLUON_TILES.values():
        for T, D in ((300, 64), (1024, 64), (16384, 64), (300, 128), (4096, 128)):
            tiles = attention.default_tiles(2, T, D, "ieee", table)._asdict()
            for part in ("forward", "dq", "dkdv"):  # each kernel of the table exists
                assert tiles[part].design in hopper_launches.designs(part, D)


@pytest.mark.skipif(HOPPER, reason="needs a GPU without Gluon kernels, or the interpreter")
def test_without_a_hopper_gpu_the_plain_kernels_serve_all_shapes():
    for T, D in ((1, 64), (1024, 64), (16384, 64), (4096, 128)):
        qkv = np.empty((1, T, 3 * D), np.float16)
        tiles = attention.select_tiles(qkv, 1, "ieee")
        assert not any(isinstance(tile, GluonTile) for tile in tiles)


def test_the_text_of_a_gluon_tile():
    tiles = AttentionTiles(dq=GluonTile("pipelined"), dkdv=TileConfig(64, 64, 4, 2))
    assert str(tiles) == "dq Gluon pipelined; dkdv 64 x 64, 4 warps, 2 stages, 1 loops"


@pytest.mark.parametrize(
    "heads, T, D, group",
    [(768, 1024, 64, 64), (16, 16384, 64, 4), (64, 4096, 128, 8), (25, 64, 64, 25), (769, 1024, 64, 1)],
)
def test_the_heads_of_a_group_fit_the_l2_cache(heads, T, D, group):
    assert hopper_launches.grid_of(heads, T, D, 192, T) == (group, -(-T // 192), heads // group)


# -- the KV cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("B, H, D, pieces", [(2, 2, 16, [1, 1, 5, 1]), (1, 3, 24, [19, 1]), (1, 1, 64, [70, 3, 1, 17])])
def test_cached_attention_of_any_pieces_equals_attention_of_the_whole_sequence(rng, precision, B, H, D, pieces):
    T, spare, C = sum(pieces), 3, H * D
    qkv, dy = operands(rng, precision, B, T, H, D)
    outputs = Outputs(precision)
    keys, values = outputs.empty(B, H, D, T + spare), outputs.empty(B, H, T + spare, D)  # NaN before the kernel writes
    parts, position = [], 0
    for t in pieces:
        y, piece = outputs.empty(B, t, C), xp.ascontiguousarray(qkv[:, position : position + t])
        attention_cached(y, piece, keys, values, position, H)
        parts.append(host(y))
        position += t
    outputs.check_guards()
    near(np.concatenate(parts, 1), oracle(host(qkv), host(dy), H)[0], TOLERANCE[precision])
    _, k, v = host(qkv).reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)
    assert_array_equal(host(keys)[..., :T], k.swapaxes(2, 3))
    assert_array_equal(host(values)[:, :, :T], v)
    assert np.isnan(host(keys)[..., T:]).all() and np.isnan(host(values)[:, :, T:]).all()


def test_a_full_cache_is_an_error_that_names_its_size():
    qkv, cache = xp.empty((1, 3, 24), np.float32), xp.empty((1, 1, 8, 8), np.float32)
    with pytest.raises(ConfigError, match="a cache of 8 positions has no room for 3 more after 6"):
        attention_cached(None, qkv, cache, cache, 6, 1)
