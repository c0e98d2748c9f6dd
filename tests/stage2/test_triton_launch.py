"""What launches the Triton kernels: arguments, variants, CuPy's stream, and one sentence where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from gpt2core.errors import ConfigError  # noqa: E402
from stage2_cuda.runtime import triton_launch  # noqa: E402
from stage2_cuda.runtime.triton_launch import Gpu, Interpreter, array_module, interpreted, launch  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]  # where there is a GPU, all of this is about it


@triton.jit
def axpy_kernel(y, x, bias, a, n, BLOCK: tl.constexpr, TWICE: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, 0).to(tl.float32) * a
    if bias is not None:
        value += tl.load(bias)
    if TWICE:
        value *= 2
    tl.store(y + at, value, at < n)


def axpy(y, x, bias, a, **options):
    launch(axpy_kernel, (triton.cdiv(x.size, 16),), y, x, bias, a, x.size, BLOCK=16, **options)


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64"])
@pytest.mark.parametrize("n", [1, 15, 16, 33])
def test_arrays_are_pointers_and_none_is_a_constant(dtype, n):
    xp = array_module()
    x, y, bias = xp.arange(n).astype(dtype), xp.zeros(n, np.float32), xp.ones(1, np.float32)
    axpy(y, x, None, 0.5)
    np.testing.assert_array_equal(host(y), np.arange(n) * 0.5)
    axpy(y, x, bias, 0.5, TWICE=True, num_warps=2)
    np.testing.assert_array_equal(host(y), np.arange(n) + 2)


def test_every_variant_is_right_whatever_was_compiled_before():
    """Pointers and sizes that are divisible by 16 or not, and 1, one after another."""
    xp = array_module()
    memory = xp.arange(200).astype(np.float32)
    for start, n in ((0, 64), (1, 64), (0, 63), (3, 1), (4, 16), (0, 1), (0, 64), (5, 37)):
        y = xp.full(200, -1, np.float32)
        axpy(y[start : start + n], memory[start : start + n], None, 2.0)
        want = np.where((np.arange(200) >= start) & (np.arange(200) < start + n), 2 * np.arange(200), -1)
        np.testing.assert_array_equal(host(y), want)


def test_memory_with_gaps_is_refused():
    x = array_module().zeros((8, 8), np.float32)
    with pytest.raises(TypeError, match=r"contiguous memory, not shape \(8, 4\) with strides \(32, 4\) bytes"):
        axpy(x, x[:, :4], None, 1.0)


@pytest.mark.parametrize("value", [np.float32(1), np.int64(3), True, [1.0], "1"])
def test_what_triton_would_take_for_something_else_is_refused(value):
    x = array_module().zeros(8, np.float32)
    with pytest.raises(TypeError, match="no argument of a kernel"):
        axpy(x, x, None, value)


class Bfloat16(np.ndarray):
    """An array that says it is of ml_dtypes.bfloat16, which need not be installed."""

    dtype = SimpleNamespace(name="bfloat16")


def test_the_interpreter_refuses_bf16():
    x = np.zeros((8, 8), np.float32).view(Bfloat16)
    described = SimpleNamespace(base=triton_launch.Pointer(x), block_shape=[8, 8])
    for argument in (x, described):
        with pytest.raises(ConfigError, match="bf16 is silently wrong in Triton's interpreter"):
            Interpreter().launch(axpy_kernel, (1,), (argument,), {})


# -- what is compiled is kept --------------------------------------------------------------------------------


class Memory:
    """As much of a cupy.ndarray as a launch looks at."""

    def __init__(self, address, dtype=np.float32, contiguous=True):
        self.data, self.dtype = SimpleNamespace(ptr=address), np.dtype(dtype)
        self.flags, self.shape, self.strides = SimpleNamespace(c_contiguous=contiguous), (), ()


class Kernel:
    """As much of a JITFunction: it notes what is compiled, and its handles note what they launch."""

    arg_names, constexprs, __name__ = axpy_kernel.arg_names, [5, 6], "axpy"
    signature = SimpleNamespace(parameters={"TWICE": SimpleNamespace(default=False)})

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, enable_fp_fusion, **options):
            assert enable_fp_fusion
            self.compiled.append((grid, arguments, options))
            handle = {"TWICE": False} | options
            return Indexed(lambda grid: lambda *values: self.launched.append((handle, grid, values)))

        return compile_and_launch


class Indexed:
    def __init__(self, item):
        self.item = item

    def __getitem__(self, key):
        return self.item(key)


def fake_gpu():
    gpu = Gpu.__new__(Gpu)
    gpu.xp, gpu.device, gpu.compiled = SimpleNamespace(ndarray=Memory), lambda: 0, {}
    return gpu


def test_the_second_launch_is_a_look_up():
    gpu, kernel, y, x = fake_gpu(), Kernel(), Memory(256), Memory(1 << 40)
    for _ in range(3):
        gpu.launch(kernel, (4,), (y, x, None, 0.5, 64), {"BLOCK": 16, "num_warps": 4})
    ((grid, arguments, options),) = kernel.compiled
    assert grid == (4,) and arguments[2:] == (None, 0.5, 64) and options == {"BLOCK": 16, "num_warps": 4}
    assert [pointer.data_ptr() for pointer in arguments[:2]] == [256, 1 << 40]
    assert [launched[1:] for launched in kernel.launched] == [((4, 1, 1), (256, 1 << 40, None, 0.5, 64, 16, False))] * 2


@pytest.mark.parametrize(
    "arguments, options",
    [
        ((Memory(264), Memory(512), None, 0.5, 64), {}),  # an address that is not divisible by 16
        ((Memory(256), Memory(512, np.float16), None, 0.5, 64), {}),
        ((Memory(256), Memory(512), Memory(768), 0.5, 64), {}),
        ((Memory(256), Memory(512), None, 0.5, 63), {}),
        ((Memory(256), Memory(512), None, 0.5, 1), {}),
        ((Memory(256), Memory(512), None, 0.5, 1 << 40), {}),
        ((Memory(256), Memory(512), None, 2, 64), {}),
        ((Memory(256), Memory(512), None, 0.5, 64), {"TWICE": True}),
        ((Memory(256), Memory(512), None, 0.5, 64), {"BLOCK": 32}),
        ((Memory(256), Memory(512), None, 0.5, 64), {"num_warps": 2}),
    ],
)
def test_another_kind_of_argument_is_another_variant(arguments, options):
    gpu, kernel, default = fake_gpu(), Kernel(), {"BLOCK": 16, "num_warps": 4}
    gpu.launch(kernel, (4,), (Memory(256), Memory(512), None, 0.5, 64), default)
    for _ in range(2):
        gpu.launch(kernel, (4,), arguments, default | options)
    assert len(kernel.compiled) == 2 and len(kernel.launched) == 1
    gpu.launch(kernel, (4,), (Memory(1024), Memory(512), None, 0.7, 32), default)
    assert len(kernel.compiled) == 2
    assert kernel.launched[-1] == (default | {"TWICE": False}, (4, 1, 1), (1024, 512, None, 0.7, 32, 16, False))


INTEGERS = st.one_of(st.integers(-40, 40), st.integers(-(2**63), 2**63 - 1), st.integers(2**31 - 2, 2**31 + 2))


@given(INTEGERS, INTEGERS)
def test_integers_share_a_variant_just_where_triton_says_so(a, b):
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    gpu, kernel = fake_gpu(), Kernel()
    for n in (a, b):
        gpu.launch(kernel, (4,), (Memory(256), Memory(512), None, 0.5, n), {"BLOCK": 16})
    kinds = [specialize(backend, n, False, True, True) for n in (a, b)]
    assert (len(kernel.compiled) == 1) == (kinds[0] == kinds[1])


def test_constants_come_last():
    gpu, x = fake_gpu(), Memory(256)
    with pytest.raises(TypeError, match=r"axpy: 4 arguments, but the constants are \[5, 6\]"):
        gpu.launch(Kernel(), (4,), (x, x, None, 0.5), {"BLOCK": 16, "n": 3})
    with pytest.raises(TypeError, match="contiguous"):
        gpu.launch(Kernel(), (4,), (x, Memory(256, contiguous=False), None, 0.5, 1), {"BLOCK": 16})
    with pytest.raises(TypeError, match="no argument of a kernel"):
        gpu.launch(Kernel(), (4,), (x, np.zeros(3), None, 0.5, 1), {"BLOCK": 16})


def test_a_kernel_that_is_too_large_for_the_gpu_is_one_sentence():
    class Large(Kernel):
        __module__ = "stage2_cuda.kernels.attention"

        def __getitem__(self, grid):
            def refused(*_, **__):
                raise triton.OutOfResources(212992, 166912, "shared memory")

            return refused

    sentence = r"attention.axpy does not fit this GPU \(shared memory: 212,992 needed, 166,912 there\): use --precision"
    with pytest.raises(ConfigError, match=sentence):
        fake_gpu().launch(Large(), (4,), (Memory(256), Memory(512), None, 0.5, 64), {"BLOCK": 16})


# -- no GPU --------------------------------------------------------------------------------------------------


def fake_cupy(count=1, capability="90"):
    def device_count():
        if isinstance(count, Exception):
            raise count
        return count

    runtime = SimpleNamespace(getDeviceCount=device_count, getDevice=lambda: 0)
    return SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, Device=lambda device: SimpleNamespace(compute_capability=capability))
    )


@pytest.mark.parametrize(
    "module, says",
    [
        (None, "CuPy is needed, and cannot be imported"),
        (None, "no GPU was found, for there is no NVIDIA driver"),
        (fake_cupy(0), "no GPU was found"),
        (
            fake_cupy(RuntimeError("cudaErrorInsufficientDriver: too old\nmore")),
            "cudaErrorInsufficientDriver: too old)",
        ),
        (fake_cupy(1, "75"), "this GPU has compute capability 7.5, the kernels need 8.0"),
    ],
    ids=["no CuPy", "no CuPy and no driver", "no GPU", "too old a driver", "too old a GPU"],
)
def test_no_gpu_is_one_sentence_that_names_the_way_out(monkeypatch, module, says):
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(triton_launch, "has_driver", lambda: says != "no GPU was found, for there is no NVIDIA driver")
    with pytest.raises(ConfigError) as error:
        Gpu()
    assert says in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith(
        "with TRITON_INTERPRET=1 in the environment the same kernels run on the CPU, slowly"
    )


def test_no_triton_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for runtime in (Gpu, triton_launch.launcher.__wrapped__):
        with pytest.raises(ConfigError, match="Triton is needed, and cannot be imported"):
            runtime()


@pytest.mark.parametrize("value, want", [("1", True), ("true", True), ("ON", True), ("0", False), ("off", False)])
def test_the_environment_asks_for_the_interpreter(monkeypatch, value, want):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreted() is want
    monkeypatch.delenv("TRITON_INTERPRET")
    assert interpreted() is False


# -- compiled code -------------------------------------------------------------------------------------------

COMPILE = """
import json, math, sys
import triton
from triton.backends.compiler import GPUTarget
from stage2_cuda import triton_launch

class Driver:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0

class Array:
    def __init__(self, *shape, dtype="float32"):
        self.shape, self.size, self.dtype = shape, math.prod(shape), dtype
        self.itemsize = next(size for size in (1, 2, 4, 8) if dtype.endswith(str(8 * size)))
    def data_ptr(self):
        return 256

class Compiler:
    def launch(self, kernel, grid, arguments, options):
        ptx = kernel.run(*arguments, grid=grid, warmup=True, **options).asm["ptx"]
        name = kernel.__module__.split(".")[-1] + "." + kernel.__name__
        wide = "ld.global.v4" in ptx or "cp.async.cg" in ptx  # to registers; or to shared memory, ahead of its use
        print(json.dumps([name, wide, ".local" in ptx, "atom" in ptx]))

triton.runtime.driver.set_active(Driver())
triton_launch.launcher = Compiler
from stage2_cuda.kernels import adamw, cast, column_sums, cross_entropy, embedding, gelu, layernorm, rounding
f, N, C, V, W = Array, 4096, 768, 50257, 50304
for dtype in ("bfloat16", "float16", "float32"):
    h = lambda *shape: Array(*shape, dtype=dtype)
    i = lambda *shape: Array(*shape, dtype="int32")
    x, b, d, r = h(N, C), h(C), f(C), f(N)
    layernorm.residual_layernorm_forward(x, x, r, r, x, x, b, b, b, 1e-5)
    partials = f(*layernorm.layernorm_partials_shape(N, C))
    layernorm.residual_layernorm_backward(x, partials, x, x, x, b, r, r)
    gelu.bias_gelu_forward(x, x, b)
    partials = f(*gelu.gelu_partials_shape(N, C))
    gelu.bias_gelu_backward(x, partials, x, x, b)
    partials = f(*column_sums.partials_shape(N, C))
    column_sums.column_sums(d, partials, x)
    embedding.embedding_forward(h(4, 1024, C), i(4, 1024), h(V, C), h(1024, C))
    runs = embedding.SortedTokens(i(N), i(V + 1), i(V + 1), i(N // 64))
    for accumulate in (False, True):
        pieces = f(N // 64, C)
        embedding.embedding_backward(f(V, C), f(1024, C), pieces, runs, h(4, 1024, C), accumulate=accumulate)
    logits = h(N, W)
    cross_entropy.cross_entropy_forward(r, r, r, logits, i(N), V)
    cross_entropy.cross_entropy_backward(logits, logits, i(N), r, r, 0.1, V, dy=Array(1, dtype="float64"))
    cross_entropy.cross_entropy_forward_backward(logits, r, r, r, logits, i(N), 0.1, V)
    p = f(1 << 20)
    adamw.adamw_step(p, p, p, h(1 << 20), p, f(3), f(1), Array(1024, dtype="int8"), 0.9, 0.95)
    bits, key = Array(1 << 20, dtype="uint16"), Array(1, dtype="int64")
    adamw.adamw_step(p, p, p, bits, p, f(3), f(1), Array(1024, dtype="int8"), 0.9, 0.95, key, 1 << 32)
    rounding.round_to_bf16(bits, p, key)
    adamw.sum_of_squares(Array(64, dtype="float64"), f(1024), p)
    adamw.clip_scale(f(1), f(1), Array(64, dtype="float64"), 1.0, f(1))
    cast.cast(h(1 << 20), p)
    cast.scale_in_place(h(1 << 20), f(1))
"""
SMALL_READS = {"totals.totals_kernel", "adamw.clip_kernel"}  # a thousandth of what there is to read


@pytest.fixture(scope="module")
def compiled():
    """[kernel, whether it loads 16 bytes at a time, spills, uses atomics], compiled for an H200 without one."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_kernel_compiles_for_a_gpu_and_none_spills_or_adds_atomically(compiled):
    names = {name for name, *_ in compiled}
    mine = "adamw", "cast", "column_sums", "cross_entropy", "embedding", "gelu", "layernorm", "rounding", "totals"
    files = [ROOT / "stage2_cuda" / "kernels" / f"{file}.py" for file in mine]
    assert len(names) == sum(
        file.read_text().count("launch(") - file.read_text().count("def launch(") for file in files
    )
    assert not [name for name, _, spills, atomics in compiled if spills or atomics]


def test_every_kernel_reads_sixteen_bytes_at_a_time(compiled):
    """A mask whose edge is not known to be divisible by 16 makes the compiler load element by element."""
    assert not [name for name, wide, _, _ in compiled if not wide and name not in SMALL_READS]


# -- the real thing ------------------------------------------------------------------------------------------


@gpu
def test_a_launch_goes_to_cupys_current_stream_and_into_its_graph():
    import cupy

    y, x = cupy.zeros(1000, np.float32), cupy.ones(1000, np.float32)
    axpy(y, x, None, 2.0)  # compiled before the capture
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        axpy(y, y, None, 2.0)
        graph = stream.end_capture()
        assert float(y[0]) == 2  # captured, not run
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    assert float(y[0]) == 16


@gpu
def test_pytorch_is_not_needed():
    code = (
        "import sys\nsys.modules['torch'] = None  # importing it fails\nimport cupy\n"
        "from stage2_cuda.kernels.cast import cast\nx = cupy.ones(10, 'float32')\n"
        "y = cupy.zeros(10, 'float16')\ncast(y, x)\ncast(y, x)\nassert float(y.sum()) == 10"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_runtime_is_made_once():
    assert triton_launch.launcher() is triton_launch.launcher()
    assert (array_module() is np) == interpreted()
