"""cublasLt products against float64: on the GPU, or with a column-major fake of cublasLt in NumPy."""

# N, K rows and columns of the result, C the summed dimension, V vocabulary

import ctypes
import json
import math
import secrets
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from gpt2core.errors import ConfigError
from gpt2core.tensor import ShapeError
from stage2_cuda.gemm import cublaslt
from stage2_cuda.gemm.cublaslt import CublasLt, load_library
from stage2_cuda.tuning.tuner import Tuner
from tests.support.fake_cupy import FakeCupy

# Relative norm against float64 with the same operands. The result is rounded to its type: half a unit in the last place
# is at most 2^-9 of a bf16 number and 2^-12 of an fp16 number. The error of fp32 grows with the root of the length.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}
TF32 = 1e-3  # operands are rounded to 10 bits, an error of at most 2^-11 each
# The GELU epilogue may use the hardware's tanh approximation, with an error of about 2^-11.
GELU = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def gelu(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def gelu_slope(x):
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return (1 + t) / 2 + x * (1 - t * t) / 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


# -- a fake of cublasLt in NumPy ---------------------------------------------------------------------------------------


ONE, THREE = ((7, 3.0),), ((7, 3.0), (8, 1.0), (9, 2.0))  # algorithms: id, milliseconds


class FakeLibrary:
    """cublasLt as its manual describes it, with column-major matrices and the C types of the real library.

    algorithms: what the heuristic proposes; refused: ids of algorithms that cannot run; statuses {function: status}:
    functions that fail. asked: the preferences of each heuristic call; ran: the ids of the algorithms that ran.
    """

    def __init__(self, cupy, algorithms):
        self.cupy, self.algorithms, self.needs = cupy, algorithms, 0
        self.objects, self.refused, self.statuses, self.asked, self.ran = {}, set(), {}, [], []
        for name, types in cublaslt.SIGNATURES.items():
            body = getattr(self, "create" if name.endswith("Create") else name.removeprefix("cublasLt"))
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(self.guarded(name, body)))

    def guarded(self, name, body):
        return lambda *arguments: self.statuses.get(name) or body(*arguments) or 0

    def cublasLtGetVersion(self):
        return 130000

    def cublasLtGetStatusName(self, status):
        return {7: b"CUBLAS_STATUS_INVALID_VALUE", 15: b"CUBLAS_STATUS_NOT_SUPPORTED"}[status]

    def create(self, handle, *arguments):
        self.objects[number := len(self.objects) + 1] = SimpleNamespace(made_of=arguments, attributes={})
        ctypes.c_void_p.from_address(handle).value = number

    def MatmulDescSetAttribute(self, target, number, value, size):
        self.objects[target].attributes[number] = int.from_bytes(ctypes.string_at(value, size), "little")

    MatmulPreferenceSetAttribute = MatmulDescSetAttribute

    def MatmulPreferenceDestroy(self, target):
        del self.objects[target].attributes

    def MatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, count, results, found):
        self.asked.append(dict(self.objects[preference].attributes))
        results = (cublaslt.HeuristicResult * count).from_address(results)
        for result, (number, _) in zip(results, self.algorithms, strict=False):
            result.algorithm[0], result.workspace_bytes, result.state = number, 0, 0
        ctypes.c_int.from_address(found).value = min(count, len(self.algorithms))

    def MatmulAlgoCheck(self, handle, operation, a, b, c, d, algorithm, result):
        cublaslt.HeuristicResult.from_address(result).workspace_bytes = self.needs
        return 0 if ctypes.c_uint64.from_address(algorithm).value in dict(self.algorithms) else 7

    def Matmul(self, handle, operation, alpha, a, la, b, lb, beta, c, lc, d, ld, algorithm, workspace, size, stream):
        number = ctypes.c_uint64.from_address(algorithm).value
        if number in self.refused:
            return 15
        attributes, beta = dict(self.objects[operation].attributes), ctypes.c_float.from_address(beta).value
        assert (c, lc) == (d, ld) and size == 32 << 20 and ctypes.c_float.from_address(alpha).value == 1
        self.cupy.current.submit(lambda: self.run(number, attributes, (a, la), (b, lb), (d, ld), beta))

    def run(self, number, attributes, a, b, d, beta):
        self.ran.append(number)
        self.cupy.clock += dict(self.algorithms)[number]
        a, b, d = (self.by_columns(*operand) for operand in (a, b, d))
        kind, address = attributes[7], attributes.get(11)
        product = (a.T if attributes[3] else a).astype(np.float64) @ (b.T if attributes[4] else b).astype(np.float64)
        if beta:
            product += beta * d
        if kind & 4:
            assert {0: np.float32, 2: np.float16}[attributes[26]] == d.dtype
            product += self.memory(attributes[8], d.dtype, d.shape[:1], (d.itemsize,))[:, None]
        if kind & 128:
            aux = self.memory(address, d.dtype, d.shape, (d.itemsize, attributes[12] * d.itemsize))
        if kind & 32:
            if kind & 128:
                aux[...] = product
            product = gelu(product)
        if kind & 2:
            product = np.maximum(product, 0)
        if kind & 64:
            product *= gelu_slope(aux.astype(np.float64))
        d[...] = product

    def by_columns(self, address, layout):
        kind, rows, columns, ld = self.objects[layout].made_of
        dtype = np.dtype({0: np.float32, 2: np.float16}[kind])
        return self.memory(address, dtype, (rows, columns), (dtype.itemsize, ld * dtype.itemsize))

    def memory(self, address, dtype, shape, strides):
        size = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
        return np.ndarray(shape, dtype, (ctypes.c_byte * size).from_address(address), strides=strides)


# -- where the tests run -----------------------------------------------------------------------------------------------


class Machine:
    """A CuPy and a cublasLt, both real or both fake, and arrays whose unused elements are NaN."""

    def __init__(self, cupy, library):
        self.cupy, self.library = cupy, library
        seed = secrets.randbits(32)
        print(f"seed {seed}")
        self.rng = np.random.default_rng(seed)

    def gemm(self, cache_dir=None, deterministic=False):
        made_for = f"Fake GPU, cublasLt {self.library.cublasLtGetVersion()}"
        return CublasLt(self.cupy, self.library, Tuner(self.cupy, None if deterministic else made_for, cache_dir))

    def normal(self, shape, dtype, ld=None):
        return self.put(self.rng.standard_normal(shape, dtype=np.float32).astype(dtype), ld)

    def poisoned(self, shape, dtype, ld=None):
        return self.put(np.full(shape, np.nan, dtype), ld)

    def put(self, array, ld=None):
        """A copy on the device; with `ld`, the first columns of an array of ld columns whose others are NaN."""
        wide = array if ld is None else np.full((len(array), ld), np.nan, array.dtype)
        wide[..., : array.shape[-1]] = array
        if array.dtype.name == "bfloat16":  # converted on the device
            wide = self.cupy.asarray(wide.astype(np.float32)).astype(array.dtype)
        return self.cupy.asarray(wide)[..., : array.shape[-1]]

    def host(self, array):
        return self.cupy.asnumpy(array.astype(np.float32)).astype(np.float64)


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request):
    if request.param == "fake":
        cupy = FakeCupy()
        return Machine(cupy, FakeLibrary(cupy, ONE))
    return Machine(pytest.importorskip("cupy"), load_library())


@pytest.fixture
def fake():
    cupy = FakeCupy()
    return Machine(cupy, FakeLibrary(cupy, THREE))


def type_of(name, machine):
    """The dtype of this name. bfloat16 is that of ml_dtypes, and the fake library does not support it."""
    if name != "bfloat16":
        return np.dtype(name)
    if isinstance(machine.cupy, FakeCupy):
        pytest.skip("the fake library has no bf16")
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


def near(got, want, tolerance):
    """Assert norm(got - want) <= tolerance * norm(want); NaN fails."""
    assert got.shape == want.shape
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"


# -- every product of GPT-2 --------------------------------------------------------------------------------------------

LAYOUTS = {"forward": (False, False), "input gradient, head": (False, True), "weight gradient": (True, False)}
SHAPES = [
    (136, 200, 264),
    (1, 384, 1152),
    (256, 8, 16),
]  # N, C, K; with 16 bits cublasLt needs rows that are a multiple of 16 bytes


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("trans_a, trans_b", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("n, c, k", SHAPES)
@pytest.mark.parametrize("out_type", ["same", "float32"])
def test_a_product_equals_float64(machine, name, trans_a, trans_b, n, c, k, out_type):
    dtype = type_of(name, machine)
    a = machine.normal((c, n) if trans_a else (n, c), dtype)
    b = machine.normal((k, c) if trans_b else (c, k), dtype)
    out = machine.poisoned((n, k), dtype if out_type == "same" else np.float32)
    machine.gemm().matmul(out, a, b, trans_a=trans_a, trans_b=trans_b)
    left, right = machine.host(a), machine.host(b)
    near(machine.host(out), (left.T if trans_a else left) @ (right.T if trans_b else right), TOLERANCE[out.dtype.name])


@pytest.mark.parametrize("trans_a, trans_b", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("compute, tolerance", [("fp32", TOLERANCE["float32"]), ("tf32", TF32)])
def test_fp32_takes_any_size_and_is_not_silently_tf32(machine, trans_a, trans_b, compute, tolerance):
    n, c, k = 37, 511, 29
    a = machine.normal((c, n) if trans_a else (n, c), np.float32)
    b = machine.normal((k, c) if trans_b else (c, k), np.float32)
    out = machine.poisoned((n, k), np.float32)
    machine.gemm().matmul(out, a, b, trans_a=trans_a, trans_b=trans_b, compute=compute)
    left, right = machine.host(a), machine.host(b)
    near(machine.host(out), (left.T if trans_a else left) @ (right.T if trans_b else right), tolerance)


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("out_type", ["same", "float32"])
def test_views_into_wider_arrays_are_read_and_written_in_place(machine, name, out_type):
    dtype = type_of(name, machine)
    out_dtype = dtype if out_type == "same" else np.dtype(np.float32)
    x, w = machine.normal((72, 64), dtype, ld=192), machine.normal((64, 128), dtype, ld=256)
    wide = machine.poisoned((72, 384), out_dtype)
    out = wide[:, 128:256]
    machine.gemm().matmul(out, x, w)
    near(machine.host(out), machine.host(x) @ machine.host(w), TOLERANCE[out_dtype.name])
    assert np.isnan(machine.host(wide)[:, :128]).all() and np.isnan(machine.host(wide)[:, 256:]).all()


@pytest.mark.parametrize("name", TOLERANCE)
def test_products_of_an_odd_vocabulary_with_padded_rows_equal_float64(machine, name):
    dtype, n, c, v, padded = type_of(name, machine), 24, 64, 50257, 50304
    gemm, x, w = machine.gemm(), machine.normal((n, c), dtype), machine.normal((v, c), dtype)
    logits = machine.poisoned((n, v), dtype, ld=padded)
    gemm.matmul(logits, x, w, trans_b=True)
    near(machine.host(logits), machine.host(x) @ machine.host(w).T, TOLERANCE[name])
    dx, dw, dy = (
        machine.poisoned((n, c), dtype),
        machine.poisoned((v, c), np.float32),
        machine.normal((n, v), dtype, padded),
    )
    gemm.matmul(dx, dy, w)
    gemm.matmul(dw, dy, x, trans_a=True)
    near(machine.host(dx), machine.host(dy) @ machine.host(w), TOLERANCE[name])
    near(machine.host(dw), machine.host(dy).T @ machine.host(x), TOLERANCE["float32"])


@pytest.mark.parametrize("name", TOLERANCE)
def test_accumulate_adds_a_weight_gradient_to_the_old_values(machine, name):
    dtype, gemm = type_of(name, machine), machine.gemm()
    x, dy, dw = machine.normal((256, 64), dtype), machine.normal((256, 96), dtype), machine.normal((64, 96), np.float32)
    before, product = machine.host(dw), machine.host(x).T @ machine.host(dy)
    for times in (1, 2):  # the first call times candidates, which must not write to dw
        gemm.matmul(dw, x, dy, trans_a=True, accumulate=True)
        near(machine.host(dw), before + times * product, TOLERANCE["float32"])


# -- epilogues ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("n", [136, 1])
def test_a_bias_is_added_to_every_row(machine, name, n):
    dtype = type_of(name, machine)
    x, w, b = machine.normal((n, 64), dtype), machine.normal((64, 200), dtype), machine.normal((200,), dtype)
    y = machine.poisoned((n, 200), dtype)
    gemm = machine.gemm()
    gemm.matmul(y, x, w, bias=b)
    near(machine.host(y), machine.host(x) @ machine.host(w) + machine.host(b), TOLERANCE[name])
    b2 = machine.normal((200,), dtype)  # the same plan with another address
    gemm.matmul(y, x, w, bias=b2)
    near(machine.host(y), machine.host(x) @ machine.host(w) + machine.host(b2), TOLERANCE[name])


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("with_aux", [True, False])
def test_gelu_is_the_tanh_approximation_and_stores_its_input(machine, name, with_bias, with_aux):
    dtype = type_of(name, machine)
    x, w = machine.normal((136, 64), dtype), machine.put((machine.rng.standard_normal((64, 200)) / 8).astype(dtype))
    bias = machine.normal((200,), dtype) if with_bias else None
    y, aux = machine.poisoned((136, 200), dtype), machine.poisoned((136, 200), dtype, ld=208) if with_aux else None
    machine.gemm().matmul(y, x, w, bias=bias, activation="gelu", aux=aux)
    h = machine.host(x) @ machine.host(w) + (machine.host(bias) if with_bias else 0)
    near(machine.host(y), gelu(h), GELU[name])
    if with_aux:
        near(machine.host(aux), h, TOLERANCE[name])


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_relu_follows_the_addition_to_out(machine, name, accumulate):
    dtype = type_of(name, machine)
    x, w, y = machine.normal((40, 24), dtype), machine.normal((24, 56), dtype), machine.normal((40, 56), dtype)
    h = machine.host(x) @ machine.host(w) + (machine.host(y) if accumulate else 0)
    machine.gemm().matmul(y, x, w, activation="relu", accumulate=accumulate)
    near(machine.host(y), np.maximum(h, 0), GELU[name])


@pytest.mark.parametrize("name", TOLERANCE)
def test_dgelu_multiplies_by_the_slope_at_aux(machine, name):
    dtype = type_of(name, machine)
    dy, w, h = machine.normal((136, 64), dtype), machine.normal((200, 64), dtype), machine.normal((136, 200), dtype)
    dh = machine.poisoned((136, 200), dtype)
    machine.gemm().matmul(dh, dy, w, trans_b=True, activation="dgelu", aux=h)
    near(machine.host(dh), (machine.host(dy) @ machine.host(w).T) * gelu_slope(machine.host(h)), GELU[name])


# -- capture, determinism, choices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_captured_product_is_replayed_on_new_values(machine, deterministic):
    cupy, gemm = machine.cupy, machine.gemm(deterministic=deterministic)
    x, w, b = (machine.normal(shape, np.float16) for shape in ((64, 128), (128, 256), (256,)))
    y, dw = machine.poisoned((64, 256), np.float16), machine.put(np.zeros((128, 256), np.float32))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        gemm.matmul(y, x, w, bias=b)  # chooses their algorithms
        gemm.matmul(dw, x, y, trans_a=True, accumulate=True)
        dw[...] = 0
        cupy.cuda.runtime.deviceSynchronize()
        stream.begin_capture()
        gemm.matmul(y, x, w, bias=b)
        gemm.matmul(dw, x, y, trans_a=True, accumulate=True)
        graph = stream.end_capture()
        want = np.zeros((128, 256))
        for _ in range(3):
            x[...] = machine.normal((64, 128), np.float16)
            graph.launch(stream)
            stream.synchronize()
            near(machine.host(y), machine.host(x) @ machine.host(w) + machine.host(b), TOLERANCE["float16"])
            want += machine.host(x).T @ machine.host(y)
            near(machine.host(dw), want, TOLERANCE["float32"])


def test_a_new_product_in_a_capture_is_an_error_unless_the_mode_is_deterministic(machine):
    machine.library.algorithms = THREE  # a single one would not be timed; the real library ignores this
    x, w, y = (machine.normal(shape, np.float32) for shape in ((16, 24), (24, 32), (16, 32)))
    timed, deterministic = machine.gemm(), machine.gemm(deterministic=True)
    stream = machine.cupy.cuda.Stream(non_blocking=True)
    with stream:
        deterministic.matmul(y, x, w)  # loads the kernel
        again = machine.gemm(deterministic=True)
        machine.cupy.cuda.runtime.deviceSynchronize()
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=r"run this product once before.*float32\(16, 32"):
            timed.matmul(y, x, w)
        again.matmul(y, x, w)
        stream.end_capture()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_deterministic_products_have_equal_bits_for_any_object_and_address(machine, name):
    # few and long sums: for these shapes cublasLt splits the sum along C
    dtype, n, c, k = type_of(name, machine), 64, 16384, 128
    x, dy = machine.normal((c, n), dtype), machine.normal((c, k), dtype)
    elsewhere = machine.cupy.empty((c * n + 8,), dtype)[8:].reshape(c, n)
    elsewhere[...] = x
    results = []
    for operand in (x, x, elsewhere):
        out = machine.poisoned((n, k), np.float32)
        machine.gemm(deterministic=True).matmul(out, operand, dy, trans_a=True)
        results.append(machine.cupy.asnumpy(out))
    near(results[0].astype(np.float64), machine.host(x).T @ machine.host(dy), 1e-3)  # tensor cores truncate
    assert_array_equal(results[0], results[1])
    if name != "float32":  # 8 of these are 16 bytes, the largest alignment that deterministic mode distinguishes
        assert_array_equal(results[0], results[2])


def test_choices_are_saved_and_not_timed_again(machine, tmp_path, monkeypatch):
    x, w, y = (machine.normal(shape, np.float16) for shape in ((64, 96), (96, 32), (64, 32)))
    first = machine.gemm(cache_dir=tmp_path / "new" / "directory")
    first.matmul(y, x, w)
    (file,) = (tmp_path / "new" / "directory").iterdir()
    assert len(first.tuner.tuned) == 1 and json.loads(file.read_text())["choices"] == first.tuner.tuned
    monkeypatch.setattr(CublasLt, "_candidates", None)
    second = machine.gemm(cache_dir=file.parent)
    y[...] = float("nan")
    second.matmul(y, x, w)
    assert second.tuner.tuned == first.tuner.tuned
    near(machine.host(y), machine.host(x) @ machine.host(w), TOLERANCE["float16"])
    adopted = machine.gemm()
    adopted.tuner.load_tuned(first.tuner.tuned)  # as another rank would
    adopted.matmul(y, x, w)


# -- without a GPU: the calls of the library ---------------------------------------------------------------------------


def operands(machine, n=16, c=24, k=32, dtype=np.float32):
    return machine.poisoned((n, k), dtype), machine.normal((n, c), dtype), machine.normal((c, k), dtype)


def test_the_fastest_candidate_is_chosen_once(fake):
    gemm, (out, a, b) = fake.gemm(), operands(fake)
    gemm.matmul(out, a, b)
    assert fake.library.ran[-1] == 8 and len(fake.library.asked) == 1  # 8 takes one millisecond, 7 three, 9 two
    gemm.matmul(out, a, b)
    assert fake.library.ran[-1] == 8 and len(fake.library.asked) == 1


def test_a_candidate_that_cannot_run_is_skipped(fake):
    fake.library.refused = {8}
    fake.gemm().matmul(*operands(fake))
    assert fake.library.ran[-1] == 9
    fake.library.refused = {7, 8, 9}
    with pytest.raises(RuntimeError, match="cublasLtMatmul returned CUBLAS_STATUS_NOT_SUPPORTED for float32"):
        fake.gemm().matmul(*operands(fake))


def test_deterministic_mode_uses_the_first_candidate_and_times_nothing(fake, tmp_path):
    fake.gemm(deterministic=True, cache_dir=tmp_path).matmul(*operands(fake))
    assert fake.library.ran == [7] and fake.cupy.waits == 0 and not list(tmp_path.iterdir())


def test_a_planned_product_neither_allocates_nor_synchronizes(fake):
    gemm, arrays = fake.gemm(), operands(fake)
    gemm.matmul(*arrays)
    before = fake.cupy.allocations, fake.cupy.waits, len(fake.library.objects)
    gemm.matmul(*arrays)
    assert (fake.cupy.allocations, fake.cupy.waits, len(fake.library.objects)) == before


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("out_type", [np.float16, np.float32])
def test_partial_sums_are_added_in_fp32_and_in_deterministic_mode_in_a_fixed_order(fake, deterministic, out_type):
    _, a, b = operands(fake, dtype=np.float16)
    fake.gemm(deterministic=deterministic).matmul(fake.poisoned((16, 32), out_type), a, b)
    (asked,) = fake.library.asked
    # CUBLASLT_MATMUL_PREF_: MAX_WORKSPACE_BYTES 1, REDUCTION_SCHEME_MASK 3; COMPUTE_TYPE is 2, all are 7
    assert asked[1] == 32 << 20
    assert asked[3] == (7 if out_type == np.float32 and not deterministic else 2)


@pytest.mark.parametrize("deterministic, widest", [(False, 256), (True, 16)])
def test_the_heuristic_gets_the_alignment_of_the_operands(fake, deterministic, widest):
    gemm, (out, a, b) = fake.gemm(deterministic=deterministic), operands(fake)
    flat = fake.normal((24 * 32 + 1,), np.float32)[1:]
    gemm.matmul(out, a, flat.reshape(24, 32))
    (asked,) = fake.library.asked
    # CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A, B, C, D: its A is our b
    assert [asked[number] for number in (5, 6, 7, 8)] == [4, widest, widest, widest]
    gemm.matmul(out, a, b)
    assert [asked[5] for asked in fake.library.asked] == [4, widest]


@pytest.mark.parametrize("choice", ["", "00ff", "no hexadecimal number"])
def test_a_recorded_choice_that_is_no_algorithm_is_ignored(fake, choice):
    gemm, arrays = fake.gemm(), operands(fake)
    gemm.matmul(*arrays)
    (what,), again = gemm.tuner.tuned, fake.gemm()
    again.tuner.load_tuned({what: choice})
    again.matmul(*arrays)
    assert fake.library.ran[-1] == 8 and again.tuner.tuned == gemm.tuner.tuned


def test_a_cached_algorithm_that_cublaslt_rejects_is_chosen_again(fake, tmp_path):
    fake.gemm(cache_dir=tmp_path).matmul(*operands(fake))
    fake.library.algorithms = ((5, 1.0),)
    fake.gemm(cache_dir=tmp_path).matmul(*operands(fake))
    assert fake.library.ran[-1] == 5 and len(fake.library.asked) == 2
    fake.library.needs = 65 << 20  # larger than the workspace
    fake.gemm(cache_dir=tmp_path).matmul(*operands(fake))
    assert len(fake.library.asked) == 3


def test_a_cache_that_cannot_be_written_is_a_warning(fake, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the autotune cache"):
        gemm = fake.gemm(cache_dir=tmp_path / "file")
        gemm.matmul(*operands(fake))
    assert fake.library.ran[-1] == 8


@pytest.mark.parametrize(
    "error, words, change",
    [
        (ShapeError, "do not match", dict(b=(25, 32))),
        (ShapeError, "do not match", dict(out=(16, 31))),
        (ShapeError, "do not match", dict(bias=(16,))),
        (ShapeError, "do not match", dict(activation="gelu", aux=(16, 24))),
        (ShapeError, "do not match", dict(k=30, activation="gelu", aux=(16, 30))),
        (ShapeError, "contiguous rows", dict(b=(24,))),
        (ShapeError, "contiguous rows", dict(out=(0, 32))),
        (TypeError, "one type of float32, float16, bfloat16", dict(b_type=np.float16)),
        (TypeError, "one type of float32, float16, bfloat16", dict(type=np.float64)),
        (TypeError, "out that type or float32", dict(out_type=np.float16)),
        (TypeError, "out's type", dict(bias=(32,), bias_type=np.float16)),
        (TypeError, "compute must be fp32", dict(compute="bf16")),
        (TypeError, "tf32", dict(type=np.float16, out_type=np.float16, compute="tf32")),
        (ValueError, "activation", dict(activation="tanh")),
        (ValueError, "activation", dict(activation="relu", aux=(16, 32))),
        (ValueError, "activation", dict(activation="dgelu")),
        (ValueError, "activation", dict(activation="dgelu", aux=(16, 32), bias=(32,))),
        (ValueError, "activation", dict(activation="gelu", accumulate=True)),
        (ValueError, "activation", dict(aux=(16, 32))),
    ],
)
def test_operands_that_do_not_match_are_an_error_that_names_them(fake, error, words, change):
    change, dtype, k = dict(change), change.get("type", np.float32), change.get("k", 32)
    out = fake.poisoned(change.pop("out", (16, k)), change.pop("out_type", dtype))
    a = fake.normal((16, 24), dtype)
    b = fake.normal(change.pop("b", (24, k)), change.pop("b_type", dtype))
    bias_type = change.pop("bias_type", out.dtype)
    extra = {name: fake.normal(change.pop(name), bias_type) for name in ("bias", "aux") if name in change}
    options = {name: change[name] for name in ("activation", "accumulate", "compute") if name in change}
    with pytest.raises(error, match=words) as caught:
        fake.gemm().matmul(out, a, b, **extra, **options)
    assert type(caught.value) is error and fake.library.ran == []


def test_a_transposed_view_is_an_error_that_names_the_option(fake):
    out, a, b = operands(fake, 24, 24, 24)
    with pytest.raises(ShapeError, match=r"\(24, 24\) with strides \(4, 96\).*trans_a"):
        fake.gemm().matmul(out, a.T, b)


def test_a_bias_of_another_type_is_refused_after_one_of_the_right_type(fake):
    gemm, (out, a, b) = fake.gemm(), operands(fake)
    gemm.matmul(out, a, b, bias=fake.normal((32,), np.float32))
    with pytest.raises(TypeError, match="out's type"):
        gemm.matmul(out, a, b, bias=fake.normal((32,), np.float16))


@pytest.mark.parametrize("function", sorted({*cublaslt.SIGNATURES} - {"cublasLtCreate", "cublasLtMatmulAlgoCheck"}))
def test_a_failure_of_the_library_names_function_and_status(fake, function):
    gemm = fake.gemm()
    fake.library.statuses = {function: 7}
    with pytest.raises(RuntimeError, match=f"{function} returned CUBLAS_STATUS_INVALID_VALUE") as caught:
        gemm.matmul(*operands(fake))
    if function in ("cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic"):
        assert "float32(16, 32; ld 32" in str(caught.value) and "fp32" in str(caught.value)


def test_no_algorithm_is_an_error_that_names_shapes_and_types(fake):
    fake.library.algorithms = ()
    with pytest.raises(RuntimeError, match=r"no algorithm for float32\(16, 32; .* = float32\(16, 24; .* @ float32\(24"):
        fake.gemm().matmul(*operands(fake))


# -- the header --------------------------------------------------------------------------------------------------------


def test_structures_and_numbers_equal_those_of_the_header():
    # cublasLt.h, cublas_api.h and library_types.h of CUDA 12.6 to 13.1
    assert ctypes.sizeof(cublaslt.Algorithm) == 64 and ctypes.sizeof(cublaslt.HeuristicResult) == 96
    offsets = [getattr(cublaslt.HeuristicResult, name).offset for name, _ in cublaslt.HeuristicResult._fields_]
    assert offsets == [0, 64, 72, 76, 80]
    epilogues = {
        "DEFAULT": (cublaslt.NO_EPILOGUE, 1),
        "BIAS": (cublaslt.BIAS, 4),
        "GELU": (cublaslt.GELU, 32),
        "GELU_AUX": (cublaslt.GELU | cublaslt.AUX, 160),
        "GELU_BIAS": (cublaslt.GELU | cublaslt.BIAS, 36),
        "GELU_AUX_BIAS": (cublaslt.GELU | cublaslt.AUX | cublaslt.BIAS, 164),
        "DGELU": (cublaslt.DGELU | cublaslt.AUX, 192),
    }
    assert all(ours == theirs for ours, theirs in epilogues.values())
    assert cublaslt.TYPES == {"float32": 0, "float16": 2, "bfloat16": 14}
    assert cublaslt.COMPUTE == {"fp32": 68, "tf32": 77}


def test_without_the_library_a_one_line_error_names_the_package(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ConfigError, match=r"no libcublasLt\.so\.13 .*pip install nvidia-cublas") as caught:
        load_library()
    assert "\n" not in str(caught.value)


@pytest.fixture
def real():
    """The real library; its descriptors need no GPU."""
    try:
        return load_library()
    except ConfigError as error:
        pytest.skip(str(error))


def test_the_size_of_every_attribute_equals_the_real_librarys(real):
    written = ctypes.c_size_t()
    groups = {
        "Desc": "TRANS_A TRANS_B EPILOGUE BIAS_TYPE BIAS_POINTER AUX_POINTER AUX_LD",
        "Preference": "WORKSPACE_BYTES REDUCTIONS ALIGNMENT_A ALIGNMENT_B ALIGNMENT_C ALIGNMENT_D",
    }
    for group, names in groups.items():
        target, arguments = ctypes.c_void_p(), (68, 0) if group == "Desc" else ()
        assert getattr(real, f"cublasLtMatmul{group}Create")(ctypes.byref(target), *arguments) == 0
        get = getattr(real, f"cublasLtMatmul{group}GetAttribute")
        get.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        for name in names.split():
            number, kind = getattr(cublaslt, name)
            assert get(target, number, None, 0, ctypes.byref(written)) == 0
            assert written.value == ctypes.sizeof(kind), name


def test_the_real_library_names_its_statuses(real):
    assert real.cublasLtGetStatusName(15) == b"CUBLAS_STATUS_NOT_SUPPORTED"
    assert real.cublasLtGetVersion() >= 120000
