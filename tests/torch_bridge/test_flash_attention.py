"""The autograd functions of torch_bridge.flash_attention on the CPU: in PyTorch, and in Triton's interpreter."""

# T_q queries, T_k keys, D head size; q (batch..., T_q, D), k and v (batch..., T_k, D)

import warnings

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from stage2_cuda.attention.launches import AttentionTiles, TileConfig  # noqa: E402
from stage2_cuda.runtime import faster_interpreter  # noqa: E402
from tests.support.attention_oracle import assert_near, error_bounds, oracle, results  # noqa: E402
from torch_bridge import attention_ops, tiled_attention, triton_launch  # noqa: E402
from torch_bridge.flash_attention import (  # noqa: E402
    FlashAttention2Torch,
    FlashAttention2Triton,
    FlashAttention2TritonCompiled,
    flash_attention,
)

INTERPRETED = triton_launch.interpreted()
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="tests/torch_bridge/test_gpu.py runs it on the GPU")
TRITON = [pytest.param(FlashAttention2Triton, marks=needs_interpreter)]
COMPILED = [pytest.param(FlashAttention2TritonCompiled, marks=needs_interpreter)]
FUNCTIONS = [FlashAttention2Torch, *TRITON, *COMPILED]
TOLERANCE = 1e-6  # relative norm in float32: every sum is rounded

SHAPES = [  # batch..., T_q, T_k, D
    ((), 70, 41, 64),
    ((2,), 5, 3, 16),
    ((1, 2), 33, 65, 24),
    ((2, 1, 2), 1, 18, 16),
    ((1,), 19, 19, 128),
]
SQUARE, WIDE, TALL = TileConfig(16, 16, 4, 2), TileConfig(16, 32, 4, 2), TileConfig(32, 16, 4, 2)
TILES = {
    "square": AttentionTiles(SQUARE, SQUARE, SQUARE),
    "wide": AttentionTiles(WIDE, WIDE, WIDE),
    "tall": AttentionTiles(TALL, TALL, TALL),
    "both": AttentionTiles(TALL, both=SQUARE),
    "two loops, square": AttentionTiles(*[SQUARE._replace(loops=2)] * 3),
    "two loops, wide": AttentionTiles(*[WIDE._replace(loops=2)] * 3),
    "two loops, tall": AttentionTiles(*[TALL._replace(loops=2)] * 3),
    "two loops, both": AttentionTiles(TALL, both=SQUARE._replace(loops=2)),
    "two parts": AttentionTiles(SQUARE._replace(parts=2), both=SQUARE._replace(parts=2)),
    "more parts than tiles": AttentionTiles(TALL._replace(parts=8), both=SQUARE._replace(parts=8)),
    "parts, wide": AttentionTiles(WIDE._replace(parts=4), both=SQUARE._replace(parts=4)),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),  # of scores that are then masked
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),  # of a part without keys
]


@pytest.fixture(autouse=True)
def small_tiles_and_no_inductor(monkeypatch):
    """Small tiles in PyTorch, and the formula of backward without torch.compile, which takes seconds for each shape."""
    faster_interpreter.install()
    monkeypatch.setattr(tiled_attention, "TILE", 16)
    monkeypatch.setattr(tiled_attention, "compiled_formula", lambda: tiled_attention.backward_formula)


def inputs(rng, batch, T_q, T_k, D, dtype=torch.float32):
    """q, k, v and do, the gradient of o."""
    torch.manual_seed(int(rng.integers(2**31)))
    return [torch.randn(*batch, T, D).to(dtype) for T in (T_q, T_k, T_k, T_q)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch, T_q, T_k, D", SHAPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_and_gradients_equal_float64(rng, function, batch, T_q, T_k, D, causal):
    q, k, v, do = inputs(rng, batch, T_q, T_k, D)
    assert_near(results(function, q, k, v, do, causal), oracle(q, k, v, do, causal), TOLERANCE)


def tile_cases():
    """All combinations; in make test each way with two sizes, once causal and once not."""
    ways = [("tf32x3", name) for name in TILES] + [("fp16x3", name) for name in TILES if TILES[name].both]
    for i, way in enumerate(ways):
        for j, sizes in enumerate([(48, 48), (33, 70), (70, 33), (64, 32)]):
            for causal in (False, True):
                short = j in (i % 4, (i + 1) % 4) and (i + j) % 2 == causal
                marks = [] if short else pytest.mark.long
                yield pytest.param(*way, *sizes, causal, marks=marks)


@needs_interpreter
@pytest.mark.parametrize("precision, tiles, T_q, T_k, causal", list(tile_cases()))
def test_kernels_with_any_tiles_equal_float64(rng, monkeypatch, precision, tiles, T_q, T_k, causal):
    monkeypatch.setattr(attention_ops, "select_tiles", lambda *_: TILES[tiles])
    monkeypatch.setattr(attention_ops, "precision_of", lambda q: precision)
    q, k, v, do = inputs(rng, (1,), T_q, T_k, 16)
    assert_near(results(FlashAttention2Triton, q, k, v, do, causal), oracle(q, k, v, do, causal), TOLERANCE)


@pytest.mark.parametrize("function", [FlashAttention2Torch, *TRITON])
def test_float16_has_the_tolerance_of_its_rounding(rng, function):
    q, k, v, do = inputs(rng, (2,), 33, 40, 16, torch.float16)
    got = results(function, q, k, v, do, True)
    assert got["lse"].dtype == torch.float32 and {got[name].dtype for name in ("o", "dq", "dk", "dv")} == {q.dtype}
    assert_near(got, oracle(q, k, v, do, True), 3e-3)  # p, ds and the results are rounded to 11 bits


SCALES = [  # mean and standard deviation of q and k, of v, and of do
    *(((0, std), (0, 1), (0, 1)) for std in (0.01, 1, 6, 30)),
    *(((mean, 1), (0, 1), (0, 1)) for mean in (40, 100)),
    ((0, 1), (100, 1), (0, 1)),
    ((40, 1), (40, 1), (1, 0)),  # do of o.sum().backward()
    ((0, 1), (0, 1), (0, 1e4)),
    ((0, 1), (0, 1), (0, 1e-5)),
]


@pytest.mark.parametrize("causal, T_q, T_k", [(True, 48, 48), (True, 20, 70), (False, 70, 20)])
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_any_scale_are_as_good_as_those_of_pytorch(rng, dtype, scales, causal, T_q, T_k):
    """PyTorch's math backend computes 16-bit attention in float32."""
    *arrays, do = inputs(rng, (2, 2), T_q, T_k, 64)
    qk, *others = scales
    x = [(mean + std * x).to(dtype) for (mean, std), x in zip((qk, qk, *others), (*arrays, do), strict=True)]
    want, found = oracle(*x, causal), results(FlashAttention2Torch, *x, causal)
    leaves = [each.clone().requires_grad_() for each in x[:3]]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    peers = torch.autograd.grad(o, leaves, x[3])
    q, k, v, do = (each.double() for each in x)
    largest_score = (q @ k.mT).abs().max().item() / 8
    hidden = torch.ones(T_q, T_k, dtype=torch.bool).triu(1) if causal else torch.zeros(T_q, T_k, dtype=torch.bool)
    p, dp = (q @ k.mT / 8).masked_fill(hidden, float("-inf")).softmax(-1), do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)).abs()
    ds = (ds + p * ds.sum(-1, keepdim=True)) / 8
    terms = {"dq": ds @ k.abs(), "dk": ds.mT @ q.abs(), "dv": p.mT @ do.abs()}
    for name, peer in zip(("dq", "dk", "dv"), peers, strict=True):
        ours, theirs = ((each.double() - want[name]).norm() for each in (found[name], peer))
        # The scores are sums of 64 products in float32, with errors of some 2^-21, and differ in both implementations.
        # So do p and ds. Their errors do not cancel in the sums over ds k and ds' q, as the terms do for a large mean.
        rounding = torch.finfo(dtype).eps / 8 * want[name].norm() + 2.0**-20 * largest_score * terms[name].norm()
        # For the mean 40, few scores are near the largest one, and the error is that of few roundings, which may be
        # larger here or there by chance: in 80 random inputs, up to 3.5 times.
        assert ours <= 4 * theirs + rounding, f"{name}: {ours:.2e}, PyTorch {theirs:.2e}"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_is_causal_every_query_attends_to_every_key(rng, function):
    q, k, v, do = inputs(rng, (2,), 5, 7, 16)
    assert_near(results(function, q, k, v, do), oracle(q, k, v, do, False), TOLERANCE)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_scores_do_not_overflow(rng, function):
    q, k, v, do = inputs(rng, (1,), 40, 40, 16)
    got = results(function, 30 * q, 30 * k, v, do, True)  # scores in the thousands
    assert_near({**got, **(want := oracle(30 * q, 30 * k, v, do, True)), "o": got["o"]}, want, 1e-3)
    assert all(x.isfinite().all() for x in got.values())


@needs_interpreter
def test_float32_of_any_magnitude_keeps_its_precision(rng):
    q, k, v, do = inputs(rng, (2,), 40, 70, 16)
    q, k, v, do = 1e-18 * q, 1e18 * k, 1e12 * v, 1e-25 * do
    q[0, 3], v[1] = 0.0, 0.0  # one query of head 0, and all values of head 1: its scale must be finite
    k[:, ::2] *= 1e-4  # rows that are small beside the largest one
    got, want = results(FlashAttention2Triton, q, k, v, do, True), oracle(q, k, v, do, True)
    for name, x in want.items():
        assert (got[name].double() - x).norm() <= TOLERANCE * x.norm(), name


@needs_interpreter
@pytest.mark.parametrize("array, size", [  # each of both in make test
    pytest.param(array, size, marks=[] if (i + j) % 3 == 0 else pytest.mark.long)
    for i, array in enumerate(["q", "k", "v", "do", "k and v"]) for j, size in enumerate([2e3, 1e20, "any"])
])  # fmt: skip
def test_a_large_row_does_not_change_the_precision_of_other_rows(rng, monkeypatch, array, size):
    causal, in_parts = rng.random(2) < 0.5
    if in_parts:
        parts = AttentionTiles(SQUARE._replace(parts=2), both=SQUARE._replace(parts=2))
        monkeypatch.setattr(attention_ops, "select_tiles", lambda *_: parts)
    arrays = dict(zip(("q", "k", "v", "do"), inputs(rng, (1, 2), 80, 70, 16), strict=True))
    for name in array.split(" and "):
        if size == "any":  # each row has its own magnitude
            arrays[name] *= torch.from_numpy(10.0 ** rng.uniform(-12, 12, (*arrays[name].shape[:-1], 1))).float()
        else:
            arrays[name][:, 0, int(rng.integers(70))] *= size
    x, causal = list(arrays.values()), bool(causal)
    got, want, bounds = results(FlashAttention2Triton, *x, causal), oracle(*x, causal), error_bounds(*x, causal)
    for name, bound in bounds.items():
        errors = (got[name].double() - want[name]).norm(dim=-1, keepdim=True)
        # 2^-16: tens of roundings; a large error of a score changes p by more than the first order. Results below 1e-30
        # may be rounded to 0 in float32.
        assert (errors <= 2.0**-16 * bound + 1e-30).all(), f"{name}: {(errors / bound).max():.1e}"


@pytest.mark.parametrize("value", [1e20, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_keys_and_values_that_no_query_reads_have_no_influence(rng, function, dtype, value):
    q, k, v, do = inputs(rng, (2,), 19, 40, 16, dtype)
    k[:, 19:], v[:, 19:] = value, value
    got, want = results(function, q, k, v, do, True), oracle(q, k[:, :19], v[:, :19], do, True)
    assert not got["dk"][:, 19:].any() and not got["dv"][:, 19:].any()
    got |= {name: got[name][:, :19] for name in ("dk", "dv")}
    assert_near(got, want, TOLERANCE if dtype == torch.float32 else 3e-3)


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice", "ignore:overflow encountered")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_row_that_is_not_finite_gives_nan_where_it_is_read_and_changes_no_other_row(rng, function, dtype, value):
    q, k, v, do = inputs(rng, (2,), 40, 40, 16, dtype)
    tolerance = TOLERANCE if dtype == torch.float32 else 3e-3
    want = oracle(q, k, v, do, True)["o"]
    for x, changed in ((q, slice(20, 21)), (k, slice(20, None))):  # the rows of o that depend on row 20
        kept, x[0, 20, 5] = x[0, 20, 5].clone(), value
        got, x[0, 20, 5] = function.apply(q, k, v, True), kept
        assert got[0, changed].isnan().any()
        got[0, changed] = want[0, changed].to(dtype)
        assert (got.double() - want).norm() <= tolerance * want.norm()


@needs_interpreter
@pytest.mark.parametrize("parts", [1, 4])
def test_a_head_of_zeros_gives_the_mean_of_the_values(rng, monkeypatch, parts):
    tiles = AttentionTiles(SQUARE._replace(parts=parts), both=SQUARE._replace(parts=parts))
    monkeypatch.setattr(attention_ops, "select_tiles", lambda *_: tiles)
    q, k, v, do = inputs(rng, (2,), 40, 70, 16)
    q[0], k[0] = 0.0, 0.0  # the product of the scales is so large that 1 / it would be 0
    assert_near(results(FlashAttention2Triton, q, k, v, do, True), oracle(q, k, v, do, True), TOLERANCE)


# -- strides -----------------------------------------------------------------------------------------------------------


def transposed(x):
    return x.mT.contiguous().mT


def shifted(x):
    """x at an address that is not a multiple of 16 bytes."""
    storage = x.new_empty(x.numel() + 1)
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def last_of_two(x):
    return torch.stack([x, x], -1)[..., 1]


@pytest.mark.parametrize("layout", [transposed, shifted, last_of_two])
@pytest.mark.parametrize("function", [FlashAttention2Torch, *TRITON])
def test_any_strides_of_inputs_and_gradient_give_the_same_results(rng, function, layout):
    q, k, v, do = inputs(rng, (2, 3), 17, 9, 16)
    want = results(function, q, k, v, do, True)
    got = results(function, *map(layout, (q, k, v, do)), True)
    assert_near(got, want, TOLERANCE)


def batch_cases():
    """Each function with each shape of the batch; in make test with half of the shapes."""
    shapes = (), (3,), (3, 2), (2, 3, 2), (2, 1, 3, 2), (1, 2, 1, 2, 2)
    for i, each in enumerate(FUNCTIONS):
        (function,), marks = getattr(each, "values", (each,)), getattr(each, "marks", ())
        for j, batch in enumerate(shapes):
            yield pytest.param(function, batch, marks=[*marks, *[pytest.mark.long] * ((i + j) % 2)])


@pytest.mark.parametrize("function, batch", batch_cases())
def test_dimensions_in_any_order_and_any_number_of_batch_dimensions_equal_float64(rng, function, batch):
    """q, k, v and do have their dimensions in four different orders, of which most cannot be merged without a copy."""
    arrays = []
    for x in inputs(rng, batch, 17, 9, 16):
        order = [int(axis) for axis in rng.permutation(len(batch))] + [len(batch), len(batch) + 1]
        back = sorted(range(x.ndim), key=order.__getitem__)
        arrays.append(x.permute(order).contiguous().permute(back))
    assert_near(results(function, *arrays, True), oracle(*arrays, True), TOLERANCE)


@pytest.mark.parametrize("function", [FlashAttention2Torch, *TRITON])
def test_an_expanded_gradient_and_expanded_keys_are_read_as_their_copies(rng, function):
    q, k, v, _ = inputs(rng, (2, 3), 17, 9, 16)
    k, v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    do = torch.ones(()).expand(q.shape)  # all strides are zero, as in o.sum().backward()
    got = results(function, q, k, v, do, True)
    assert_near(got, oracle(q, k, v, do, True), TOLERANCE)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_views_of_one_packed_projection_give_one_gradient(rng, function):
    B, T, H, D = 2, 19, 3, 16
    torch.manual_seed(int(rng.integers(2**31)))
    packed = torch.randn(B, T, 3, H, D, requires_grad=True)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind()  # (B, H, T, D)
    o = function.apply(q, k, v, True)
    do = torch.randn(B, T, H, D).transpose(1, 2)
    o.backward(do)
    want = oracle(q, k, v, do, True)
    gradients = packed.grad.permute(2, 0, 3, 1, 4)
    assert_near({"o": o, "lse": want["lse"], **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}, want, TOLERANCE)


@pytest.mark.parametrize("batch, T_q", [((0,), 4), ((2,), 0)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_queries_give_an_empty_output_and_zero_gradients(rng, function, batch, T_q):
    got = results(function, *inputs(rng, batch, T_q, 3, 16), True)
    assert got["o"].shape == (*batch, T_q, 16)
    assert not got["dk"].any() and not got["dv"].any()


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_torch_compile_has_one_graph_and_the_same_bits(rng, function):
    q, k, v, do = inputs(rng, (2, 2), 19, 17, 16)
    compiled = torch.compile(lambda *x: torch.tanh(function.apply(*x, True)), backend="aot_eager", fullgraph=True)
    found = []
    for call in (compiled, lambda *x: torch.tanh(function.apply(*x, True))):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = call(*leaves)
        found.append([o.detach(), *torch.autograd.grad(o, leaves, do)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()


@pytest.mark.parametrize(
    "operator", [tiled_attention.tiled_forward, pytest.param(attention_ops.triton_forward, marks=needs_interpreter)]
)
@pytest.mark.parametrize("batch", [(2, 2), (3, 2, 2)])
def test_fake_kernels_have_the_shapes_and_strides_of_the_operators(rng, operator, batch):
    q, k, v, do = inputs(rng, batch, 5, 3, 16)
    q, do = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, do))
    backward, saved = tiled_attention.compiled_backward, ()
    if operator is attention_ops.triton_forward:
        backward, saved = attention_ops.triton_backward, operator(q, k, v, True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (q, k, v, True), test_utils=tests)
    torch.library.opcheck(backward, (do, q, k, v, *saved, True), test_utils=tests)


def test_a_failed_compilation_falls_back_to_eager_with_one_note(rng, monkeypatch):
    def without_compiler(function):
        def call(*_):
            raise torch._dynamo.exc.BackendCompilerFailed(None, RuntimeError("no C++ compiler"), None)

        return call

    monkeypatch.undo()  # the real compiled_formula()
    monkeypatch.setattr(torch, "compile", without_compiler)
    tiled_attention.compiled_formula.cache_clear()
    q, k, v, do = inputs(rng, (2,), 5, 7, 16)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_near(results(FlashAttention2Torch, q, k, v, do), oracle(q, k, v, do, False), TOLERANCE)
    tiled_attention.compiled_formula.cache_clear()
    assert ["eager mode" in str(note.message) for note in notes] == [True]


# -- flash_attention() and errors --------------------------------------------------------------------------------------


def test_flash_attention_runs_the_kernels_if_they_can_run(rng):
    q, k, v, do = inputs(rng, (2,), 5, 7, 16)
    assert_near({**(want := oracle(q, k, v, do, True)), "o": flash_attention(q, k, v, causal=True)}, want, TOLERANCE)
    name = type(flash_attention(q.requires_grad_(), k, v).grad_fn).__name__
    assert name == ("FlashAttention2TritonBackward" if INTERPRETED else "FlashAttention2TorchBackward")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda q, k, v: (q, k.half(), v), TypeError, "q has dtype torch.float32, k has torch.float16"),
        (lambda q, k, v: (q, k, v.double()), TypeError, "q has dtype torch.float32, v has torch.float64"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), TypeError, "q has dtype torch.int64: attention takes torch.f"),
        (lambda q, k, v: (q, k[:1], v[:1]), ValueError, r"q has shape \(2, 5, 16\), k has \(1, 7, 16\)"),
        (lambda q, k, v: (q, k[..., :8], v[..., :8]), ValueError, r"q has shape \(2, 5, 16\), k has \(2, 7, 8\)"),
        (lambda q, k, v: (q, k, v[:, :6]), ValueError, r"k has shape \(2, 7, 16\), v has \(2, 6, 16\)"),
        (lambda q, k, v: (q[0, 0], k[0, 0], v[0, 0]), ValueError, r"q has shape \(16,\), k has \(16,\)"),
        (
            lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]),
            ValueError,
            "head size D of q .* is 8: it must be",
        ),
        (lambda q, k, v: (q, k.to("meta"), v), ValueError, "q is on cpu, k is on meta"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), ValueError, r"k has shape \(2, 0, 16\): .* at least one key"),
    ],
)
def test_inputs_that_do_not_match_are_an_error_that_names_both_values(rng, function, change, error, message):
    with pytest.raises(error, match=message):
        function.apply(*change(*inputs(rng, (2,), 5, 7, 16)[:3]))


@pytest.mark.parametrize("D", [12, 136])
def test_an_unsupported_head_size_is_an_error_that_names_it(rng, D):
    with pytest.raises(ValueError, match=f"is {D}: it must be a multiple of 8, 16 to 128"):
        FlashAttention2Torch.apply(*inputs(rng, (2,), 5, 7, D)[:3])


@needs_interpreter
def test_bf16_in_the_interpreter_is_an_error(rng):
    with pytest.raises(TypeError, match="torch.bfloat16 is silently wrong in Triton's interpreter"):
        FlashAttention2Triton.apply(*inputs(rng, (2,), 5, 7, 16, torch.bfloat16)[:3])


def test_a_cpu_tensor_without_the_interpreter_is_an_error(rng, monkeypatch):
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="FlashAttention2Triton needs a CUDA tensor, the first one is on cpu"):
        FlashAttention2Triton.apply(*inputs(rng, (2,), 5, 7, 16)[:3])
