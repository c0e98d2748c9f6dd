"""torch_bridge.flash_attention and torch_bridge.matmul on a GPU: 16 bits, larger shapes, streams, beside stage 2."""

# T_q queries, T_k keys, D head size; q (batch..., T_q, D), k and v (batch..., T_k, D)

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from stage2_cuda.attention.hopper_launches import GluonTile  # noqa: E402
from stage2_cuda.attention.launches import AttentionTiles  # noqa: E402
from tests.support.attention_oracle import assert_near, error_bounds, oracle, results  # noqa: E402
from torch_bridge import attention_ops  # noqa: E402
from torch_bridge.flash_attention import (  # noqa: E402
    FlashAttention2Torch,
    FlashAttention2Triton,
    FlashAttention2TritonCompiled,
)
from torch_bridge.matmul import matmul_add_relu  # noqa: E402

pytestmark = pytest.mark.gpu

# Relative norm against float64. 16 bits: p, ds and the results are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [  # batch..., T_q, T_k, D
    ((2, 12), 1024, 1024, 64),
    ((3,), 1000, 777, 64),
    ((3,), 777, 1000, 128),
    ((25,), 200, 256, 64),
    ((2,), 513, 513, 16),
    ((2,), 300, 400, 24),
    ((1, 2), 2049, 2049, 80),
    ((1,), 8448, 8448, 32),
    ((), 1, 1, 128),
]


@pytest.fixture(autouse=True)
def memory_for_other_tests():
    """Give a large unused memory back after each test, because other processes may test on the same GPU."""
    yield
    if torch.cuda.memory_reserved() > 2**32:
        torch.cuda.empty_cache()


def inputs(rng, batch, T_q, T_k, D, dtype):
    """q, k, v and do, the gradient of o."""
    torch.manual_seed(int(rng.integers(2**31)))
    return [torch.randn(*batch, T, D, device="cuda").to(dtype) for T in (T_q, T_k, T_k, T_q)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch, T_q, T_k, D", SHAPES)
def test_the_kernels_equal_float64(rng, batch, T_q, T_k, D, dtype, causal):
    q, k, v, do = inputs(rng, batch, T_q, T_k, D, dtype)
    assert_near(results(FlashAttention2Triton, q, k, v, do, causal), oracle(q, k, v, do, causal), TOLERANCE[dtype])


HOPPER = torch.cuda.is_available() and attention_ops.gluon_tiles_of_device(torch.device("cuda", 0)) != {}
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and Triton 3.6")
GLUON_SHAPES = [  # batch..., T_q (a multiple of 4), T_k, dtype
    ((1,), 4, 300, torch.bfloat16),
    ((3, 1), 300, 1, torch.bfloat16),
    ((5,), 68, 513, torch.float16),
    ((2, 3), 1000, 777, torch.bfloat16),
    ((2, 12), 1024, 1024, torch.float16),
    ((1,), 4100, 200, torch.bfloat16),
]


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("design, D", [("pipelined", 64), ("specialized", 64), ("specialized", 128)])
@pytest.mark.parametrize("batch, T_q, T_k, dtype", GLUON_SHAPES)
def test_the_gluon_kernels_equal_float64(rng, monkeypatch, batch, T_q, T_k, dtype, design, D, causal):
    monkeypatch.setattr(attention_ops, "select_tiles", lambda *_: AttentionTiles(*[GluonTile(design)] * 3))
    q, k, v, do = inputs(rng, batch, T_q, T_k, D, dtype)
    first, again = (results(FlashAttention2Triton, q, k, v, do, causal) for _ in range(2))
    assert_near(first, oracle(q, k, v, do, causal), TOLERANCE[dtype])
    assert all(torch.equal(first[name], again[name]) for name in first)


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T, D", [(1024, 64), (5000, 64), (1000, 128)])
def test_large_16_bit_attention_uses_the_gluon_kernels(rng, T, D, causal):
    packed = torch.randn(3, T, 3, 7, D, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
    tiles = attention_ops.select_tiles(attention_ops.input_heads(q), attention_ops.input_heads(k), "tf32x3")
    assert isinstance(tiles.forward, GluonTile) and isinstance(tiles.dkdv, GluonTile)
    do = torch.randn(3, 7, T, D, device="cuda", dtype=torch.bfloat16)
    got, want = results(FlashAttention2Triton, q, k, v, do, causal), oracle(q, k, v, do, causal)
    assert_near(got, want, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("function", [FlashAttention2Torch, FlashAttention2TritonCompiled])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_compiled_formula_equals_float64(rng, function, dtype):
    q, k, v, do = inputs(rng, (2, 3), 200, 300, 64, dtype)
    got, want = results(function, q, k, v, do, True), oracle(q, k, v, do, True)
    assert_near(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("function", [FlashAttention2Torch, FlashAttention2TritonCompiled])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mean, std, mean_v", [(0, 0.01, 0), (0, 1, 0), (0, 6, 0), (0, 30, 0), (40, 1, 0), (0, 1, 100)])
def test_gradients_of_any_scale_are_as_good_as_those_of_pytorch(rng, function, dtype, mean, std, mean_v):
    q, k, v, do = inputs(rng, (2, 3), 200, 300, 64, torch.float32)
    q, k, v, do = ((m + s * x).to(dtype) for x, m, s in ((q, mean, std), (k, mean, std), (v, mean_v, 1), (do, 0, 1)))
    leaves, want = [x.clone().requires_grad_() for x in (q, k, v)], oracle(q, k, v, do, True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    got, peers = results(function, q, k, v, do, True), torch.autograd.grad(o, leaves, do)
    for name, peer in zip(("dq", "dk", "dv"), peers, strict=True):
        ours, theirs = ((x.double() - want[name]).norm() / want[name].norm() for x in (got[name], peer))
        # p and ds are rounded to 16 bits; with a mean of 40 the errors of the scores (some 2^-10) do not cancel
        assert ours <= 4 * theirs + TOLERANCE[dtype] / 2 + (0.2 if mean else 0), f"{name}: {ours:.1e}, {theirs:.1e}"


@pytest.mark.parametrize("batch", [(2, 3, 2), (1, 2, 1, 2)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_batch_dimensions_that_cannot_be_merged_equal_float64(rng, batch, dtype):
    x = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs(rng, batch, 100, 130, 64, dtype)]
    assert_near(results(FlashAttention2Triton, *x, True), oracle(*x, True), TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("array", ["q", "k", "v", "do"])
@pytest.mark.parametrize("batch, T, D", [((2, 3), 300, 64), ((1,), 2100, 64), ((2,), 300, 128)])
def test_a_large_row_of_float32_does_not_change_the_precision_of_other_rows(rng, array, batch, T, D, causal):
    arrays = dict(zip(("q", "k", "v", "do"), inputs(rng, batch, T, T, D, torch.float32), strict=True))
    for size in (2e3, 1e8, 1e20):
        x = {**arrays, array: arrays[array].clone()}
        x[array].flatten(0, -3)[0, int(rng.integers(T))] *= size
        x = list(x.values())
        got, want, bounds = results(FlashAttention2Triton, *x, causal), oracle(*x, causal), error_bounds(*x, causal)
        for name, bound in bounds.items():
            if name != "o" and array in "qk" and size > 2e3:
                # the rounding of such a score is larger than 1, so a gradient through its softmax is only bounded
                assert got[name].isfinite().all(), f"{size:g}, {name}"
                continue
            errors = (got[name].double() - want[name]).norm(dim=-1, keepdim=True)
            assert (errors <= 2.0**-16 * bound + 1e-30).all(), f"{size:g}, {name}: {(errors / bound).max():.1e}"


@pytest.mark.parametrize("value", [1e20, float("inf"), float("nan")])
@pytest.mark.parametrize("function", [FlashAttention2Triton, FlashAttention2Torch, FlashAttention2TritonCompiled])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_keys_and_values_that_no_query_reads_have_no_influence(rng, dtype, function, value):
    q, k, v, do = inputs(rng, (2, 3), 100, 300, 64, dtype)
    k[..., 100:, :], v[..., 100:, :] = value, value
    got, want = results(function, q, k, v, do, True), oracle(q, k[..., :100, :], v[..., :100, :], do, True)
    assert not got["dk"][..., 100:, :].any() and not got["dv"][..., 100:, :].any()
    assert_near(got | {name: got[name][..., :100, :] for name in ("dk", "dv")}, want, TOLERANCE[dtype])


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_float32_products_follow_the_precision_of_torch(rng, precision):
    before = torch.get_float32_matmul_precision()
    q, k, v, do = inputs(rng, (2,), 300, 300, 64, torch.float32)
    want = oracle(q, k, v, do, True)
    try:
        torch.set_float32_matmul_precision(precision)
        got = results(FlashAttention2Triton, q, k, v, do, True)
    finally:
        torch.set_float32_matmul_precision(before)
    tolerance = {"high": 4e-3, "highest": 1e-5}[precision]
    assert_near(got, want, tolerance, lse_tolerance=tolerance)


@pytest.mark.parametrize("heads, T, D", [(1, 16384, 64), (1, 16384, 128), (40, 4096, 64)])
def test_the_error_of_float32_does_not_grow_with_the_number_of_tiles(rng, heads, T, D):
    q, k, v, do = inputs(rng, (heads,), T, T, D, torch.float32)
    got, want = results(FlashAttention2Triton, q, k, v, do, True), oracle(q, k, v, do, True)
    assert_near(got, want, 2e-6, lse_tolerance=2e-6)  # 5e-7 was measured; sums only by tensor cores had 9e-5


@pytest.mark.parametrize("T", [256, 4096, 16384])
def test_the_same_inputs_give_the_same_bits(rng, T):
    arguments = inputs(rng, (4,), T, T, 64, torch.bfloat16)
    first, second = (results(FlashAttention2Triton, *arguments, True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("function", [FlashAttention2Triton, FlashAttention2TritonCompiled])
def test_under_torch_compile_with_an_expanded_gradient(rng, function):
    q, k, v, _ = inputs(rng, (16,), 512, 512, 64, torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = torch.compile(function.apply)(*leaves, True)
    o.sum().backward()
    want = oracle(q, k, v, torch.ones_like(o), True)
    got = {"o": o.detach(), "lse": want["lse"], "dq": q.grad, "dk": k.grad, "dv": v.grad}
    assert_near(got, want, 6e-2)  # the terms of dq and dk nearly cancel


def test_views_of_one_packed_projection_are_read_without_copies(rng):
    packed = torch.randn(2, 300, 3, 12, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = FlashAttention2Triton.apply(q, k, v, True)
    assert o.transpose(1, 2).is_contiguous()  # o.transpose(1, 2).flatten(2) is a view
    lse_bytes = 4 * 2 * 12 * 300
    assert torch.cuda.max_memory_allocated() - before <= o.nbytes + lse_bytes + 2048  # rounded to 512 bytes


# -- streams, stage 2 and inductor in one process ----------------------------------------------------------------------


def on_a_busy_stream(function):
    """function() on a new stream that is busy for some 50 ms; work of another stream would overtake it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        result = function()
    stream.synchronize()
    return result


def test_the_kernels_run_on_the_current_stream(rng):
    q, k, v, do = inputs(rng, (2, 3), 300, 300, 64, torch.float16)
    results(FlashAttention2Triton, q, k, v, do, True)  # compiles
    want, late = oracle(q, k, v, do, True), [torch.full_like(x, float("nan")) for x in (q, k, v, do)]
    torch.cuda.synchronize()

    def copy_and_attend():
        for x, source in zip(late, (q, k, v, do), strict=True):
            x.copy_(source)
        return results(FlashAttention2Triton, *late, True)

    assert_near(on_a_busy_stream(copy_and_attend), want, TOLERANCE[torch.float16])


def test_stage_2_and_a_kernel_of_inductor_run_beside_the_bridge(rng):
    cupy = pytest.importorskip("cupy")
    from stage2_cuda.attention.launches import attention_forward
    from stage2_cuda.runtime.triton_launch import array_module

    B, T, H, D = 2, 300, 3, 64
    packed = torch.randn(B, T, 3 * H * D, device="cuda", dtype=torch.float16)
    halve = torch.compile(lambda x: x * 0.5)

    def stage_2(x):
        y, lse = cupy.empty((B, T, H * D), "float16"), cupy.empty((B, H, T), "float32")
        attention_forward(y, lse, cupy.from_dlpack(x), H)
        return torch.from_dlpack(y).view(B, T, H, D).transpose(1, 2)

    def bridge(x):
        return FlashAttention2Triton.apply(*x.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(), True)

    bridge(packed)  # a kernel with descriptors that is loaded before stage 2 starts must also work after it
    assert array_module() is cupy  # makes CuPy's driver Triton's active one
    driver = triton.runtime.driver.active
    late = torch.full_like(packed, float("nan"))
    for function in (halve, stage_2):  # compiles
        function(packed)
    allocator = triton.runtime._allocation._allocator.get()  # inductor has set its own
    bridge(packed)
    assert triton.runtime._allocation._allocator.get() is allocator
    torch.cuda.synchronize()

    def all_three():
        late.copy_(packed * 2)
        x = halve(late)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return bridge(x), stage_2(x)

    q, k, v = packed.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind()
    want = oracle(q, k, v, torch.zeros_like(q), True)["o"]
    for got in on_a_busy_stream(all_three):
        assert (got.double() - want).norm() <= TOLERANCE[torch.float16] * want.norm()
    assert triton.runtime.driver.active is driver


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_gpu_that_is_not_current(rng):
    q, k, v, do = (x.to("cuda:1") for x in inputs(rng, (2,), 100, 100, 64, torch.float16))
    assert torch.cuda.current_device() == 0
    assert_near(results(FlashAttention2Triton, q, k, v, do), oracle(q, k, v, do, False), TOLERANCE[torch.float16])


# -- the fused product -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("M, N, K", [(2048, 2048, 2048), (1000, 520, 264), (999, 513, 77), (1, 8, 4096)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_fused_product_equals_float64(rng, M, N, K, dtype, transposed):
    torch.manual_seed(int(rng.integers(2**31)))
    a, c = (torch.randn(shape, device="cuda").to(dtype) for shape in ((M, K), (M, N)))
    b = torch.randn((N, K) if transposed else (K, N), device="cuda").to(dtype)
    b = b.mT if transposed else b
    want = torch.relu(a.double() @ b.double() + c.double())
    for added in (c, c.mT.contiguous().mT):
        got = matmul_add_relu(a, b, added)
        assert (got.double() - want).norm() <= (8e-3 if dtype == torch.bfloat16 else 1e-3) * want.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_fused_relu_and_its_gradient_keep_nan(dtype):
    a, b, c = (torch.randn(130, 130, device="cuda").to(dtype) for _ in range(3))
    c[3, 5] = float("nan")
    leaves = [x.requires_grad_() for x in (a, b, c)]
    d = matmul_add_relu(*leaves)
    assert d.isnan().nonzero().tolist() == [[3, 5]]
    (dc,) = torch.autograd.grad(d, leaves[2], torch.ones_like(d))
    assert dc[3, 5] == 1
