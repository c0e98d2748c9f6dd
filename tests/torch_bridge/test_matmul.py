"""torch_bridge.matmul against float64, in Triton's interpreter."""

# a (M, K), b (K, N), c (M, N)

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from stage2_cuda.runtime import faster_interpreter  # noqa: E402
from torch_bridge import triton_launch  # noqa: E402
from torch_bridge.matmul import MatmulTile, matmul_add_relu  # noqa: E402

pytestmark = pytest.mark.skipif(
    not triton_launch.interpreted(), reason="tests/torch_bridge/test_gpu.py runs it on the GPU"
)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}  # relative norm: float32 sums, and the rounding of the result
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: torch.stack([x, x], -1).flatten(-2)[:, ::2],
    "unaligned": lambda x: torch.cat([x[:, :1], x], 1)[:, 1:],
}


@pytest.fixture(autouse=True)
def fast_interpreter():
    faster_interpreter.install()


def inputs(rng, M, N, K, dtype=torch.float32):
    torch.manual_seed(int(rng.integers(2**31)))
    return [torch.randn(shape).to(dtype) for shape in ((M, K), (K, N), (M, N))]


def assert_near(got, want, tolerance):
    assert got.shape == want.shape and (got.double() - want).norm() <= tolerance * want.norm()


def expected(a, b, c):
    return torch.relu(a.double() @ b.double() + c.double())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("M, N, K", [(70, 80, 72), (33, 17, 9), (1, 1, 1), (5, 8, 0)])
def test_the_product_of_any_shape_equals_float64(rng, M, N, K, dtype):
    a, b, c = inputs(rng, M, N, K, dtype)
    got = matmul_add_relu(a, b, c)
    assert got.dtype == dtype
    assert_near(got, expected(a, b, c), TOLERANCE[dtype])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("operand", range(3))
def test_operands_of_any_strides_equal_float64(rng, operand, name):
    matrices = inputs(rng, 24, 40, 32)
    matrices[operand] = LAYOUTS[name](matrices[operand])
    assert_near(matmul_add_relu(*matrices), expected(*matrices), TOLERANCE[torch.float32])


@pytest.mark.parametrize("size", [(1, 40), (24, 1), (1, 1)])
def test_c_may_be_expanded(rng, size):
    a, b, c = inputs(rng, 24, 40, 32)
    c = c[: size[0], : size[1]].expand(24, 40)
    assert_near(matmul_add_relu(a, b, c), expected(a, b, c), TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_results_and_gradients_that_are_not_finite_are_those_of_torch_relu(rng):
    a, b, c = inputs(rng, 24, 40, 32)
    a[3, 5], b[4, 7], c[1, 2], c[9, 9], c[2, 2] = float("nan"), float("inf"), float("nan"), float("inf"), -float("inf")
    leaves, dd = [x.requires_grad_() for x in (a, b, c)], torch.randn(24, 40)
    got, want = matmul_add_relu(*leaves), torch.relu(a @ b + c)
    torch.testing.assert_close(got, want, equal_nan=True)
    for x, expected in zip(torch.autograd.grad(got, leaves, dd), torch.autograd.grad(want, leaves, dd), strict=True):
        torch.testing.assert_close(x, expected, equal_nan=True)


@pytest.mark.parametrize("c_at", ["start", "early", "end"])
def test_c_may_be_read_at_any_time(rng, c_at):
    a, b, c = inputs(rng, 40, 50, 70)
    assert_near(matmul_add_relu(a, b, c, MatmulTile(32, 32, 32, 4, 2, c_at)), expected(a, b, c), 1e-6)


def test_gradients_equal_float64_and_torch_compile_has_one_graph(rng):
    leaves = [x.requires_grad_() for x in inputs(rng, 20, 24, 16)]
    wanted = torch.autograd.grad(expected(*leaves).square().sum(), leaves)
    for function in (matmul_add_relu, torch.compile(matmul_add_relu, backend="aot_eager", fullgraph=True)):
        gradients = torch.autograd.grad(function(*leaves).square().sum(), leaves)
        for got, want in zip(gradients, wanted, strict=True):
            assert_near(got, want.double(), 1e-6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda a, b, c: (a, b.half(), c), TypeError, "a has dtype torch.float32, b has torch.float16"),
        (lambda a, b, c: (a, b, c.double()), TypeError, "a has dtype torch.float32, c has torch.float64"),
        (lambda a, b, c: (a.int(), b.int(), c.int()), TypeError, "a has dtype torch.int32: .* takes torch.float32"),
        (lambda a, b, c: (a, b[1:], c), ValueError, r"a has shape \(4, 6\), b has \(5, 5\)"),
        (lambda a, b, c: (a[None], b, c), ValueError, r"a has shape \(1, 4, 6\), b has \(6, 5\)"),
        (lambda a, b, c: (a, b, c[0]), ValueError, r"c has shape \(5,\), a b has \(4, 5\)"),
        (lambda a, b, c: (a, b.to("meta"), c), ValueError, "a is on cpu, b is on meta"),
        (lambda *x: [each.bfloat16() for each in x], TypeError, "torch.bfloat16 is silently wrong in .* interpreter"),
    ],
)
def test_inputs_that_do_not_match_are_an_error_that_names_both_values(rng, change, error, message):
    with pytest.raises(error, match=message):
        matmul_add_relu(*change(*inputs(rng, 4, 5, 6)))


def test_a_cpu_tensor_without_the_interpreter_is_an_error(rng, monkeypatch):
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="matmul_add_relu needs a CUDA tensor, the first one is on cpu"):
        matmul_add_relu(*inputs(rng, 4, 5, 6))
