"""Launching Triton kernels: arguments, compiled variants, CuPy's stream, and one clear error without a GPU."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from gpt2core.errors import ConfigError  # noqa: E402
from stage2_cuda.runtime import compile_threads, triton_launch, triton_start  # noqa: E402
from stage2_cuda.runtime.compile_threads import CompileThreads  # noqa: E402
from stage2_cuda.runtime.triton_launch import (  # noqa: E402
    GpuLauncher,
    InterpreterLauncher,
    array_module,
    interpreted,
    launch,
)

ROOT = Path(__file__).resolve().parents[2]
gpu = pytest.mark.gpu
pytestmark = [] if interpreted() else [gpu]  # with a GPU every test needs it


@triton.jit
def axpy_kernel(y_ptr, x_ptr, bias_ptr, a, n, BLOCK: tl.constexpr, TWICE: tl.constexpr = False):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    y = tl.load(x_ptr + offs, mask, 0).to(tl.float32) * a
    if bias_ptr is not None:
        y += tl.load(bias_ptr)
    if TWICE:
        y *= 2
    tl.store(y_ptr + offs, y, mask)


def axpy(y, x, bias, a, **options):
    launch(axpy_kernel, (triton.cdiv(x.size, 16),), y, x, bias, a, x.size, BLOCK=16, **options)


def host(array):
    return array if isinstance(array, np.ndarray) else array.get()


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64"])
@pytest.mark.parametrize("n", [1, 15, 16, 33])
def test_arrays_are_passed_as_pointers_and_none_as_a_constant(dtype, n):
    xp = array_module()
    x, y, bias = xp.arange(n).astype(dtype), xp.zeros(n, np.float32), xp.ones(1, np.float32)
    axpy(y, x, None, 0.5)
    np.testing.assert_array_equal(host(y), np.arange(n) * 0.5)
    axpy(y, x, bias, 0.5, TWICE=True, num_warps=2)
    np.testing.assert_array_equal(host(y), np.arange(n) + 2)


def test_every_variant_is_right_after_any_other():
    """Pointers and sizes that are divisible by 16 or not, and the size 1, in turn."""
    xp = array_module()
    memory = xp.arange(200).astype(np.float32)
    for start, n in ((0, 64), (1, 64), (0, 63), (3, 1), (4, 16), (0, 1), (0, 64), (5, 37)):
        y = xp.full(200, -1, np.float32)
        axpy(y[start : start + n], memory[start : start + n], None, 2.0)
        want = np.where((np.arange(200) >= start) & (np.arange(200) < start + n), 2 * np.arange(200), -1)
        np.testing.assert_array_equal(host(y), want)


def test_an_array_that_is_not_contiguous_is_refused():
    x = array_module().zeros((8, 8), np.float32)
    with pytest.raises(TypeError, match=r"contiguous memory, not shape \(8, 4\) with strides \(32, 4\) bytes"):
        axpy(x, x[:, :4], None, 1.0)


@pytest.mark.parametrize("value", [np.float32(1), np.int64(3), True, [1.0], "1"])
def test_a_value_that_triton_would_misinterpret_is_refused(value):
    x = array_module().zeros(8, np.float32)
    with pytest.raises(TypeError, match="cannot be passed to a kernel"):
        axpy(x, x, None, value)


class Bfloat16(np.ndarray):
    """An array whose dtype has the name of ml_dtypes.bfloat16, which need not be installed."""

    dtype = SimpleNamespace(name="bfloat16")


def test_the_interpreter_refuses_bf16(monkeypatch):
    monkeypatch.setattr(triton_launch, "check_interpreter", lambda *_: None)  # the versions do not matter here
    x = np.zeros((8, 8), np.float32).view(Bfloat16)
    descriptor = SimpleNamespace(base=triton_launch.Pointer(x), block_shape=[8, 8])
    for argument in (x, descriptor):
        with pytest.raises(ConfigError, match="Triton's interpreter computes bf16 wrongly"):
            InterpreterLauncher().launch(axpy_kernel, (1,), (argument,), {})


# -- the cache of compiled variants ---------------------------------------------------------------------------


class Memory:
    """The attributes of a cupy.ndarray that a launch reads."""

    def __init__(self, address, dtype=np.float32, contiguous=True):
        self.data, self.dtype = SimpleNamespace(ptr=address), np.dtype(dtype)
        self.flags, self.shape, self.strides = SimpleNamespace(c_contiguous=contiguous), (), ()


class Kernel:
    """The attributes of a JITFunction that a launch reads; it lists what is compiled and what is launched."""

    arg_names, constexprs, __name__ = axpy_kernel.arg_names, [5, 6], "axpy"
    signature = SimpleNamespace(parameters={"TWICE": SimpleNamespace(default=False)})

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *arguments, grid, enable_fp_fusion, **options):
        assert enable_fp_fusion
        self.compiled.append((arguments, options))
        handle = {"TWICE": False} | options
        return CompiledKernel(lambda grid: lambda *values: self.launched.append((handle, grid, values)))


class CompiledKernel:
    run = None

    def __init__(self, item):
        self.item = item

    def __getitem__(self, key):
        return self.item(key)


class Devices:
    """cupy.cuda.runtime: the current device of each thread."""

    def __init__(self):
        self.of_thread = {}

    def getDevice(self):
        return self.of_thread.get(threading.get_ident(), 0)

    def setDevice(self, device):
        self.of_thread[threading.get_ident()] = device


def gpu_launcher():
    launcher, devices = GpuLauncher.__new__(GpuLauncher), Devices()
    launcher.xp, launcher.device = (
        SimpleNamespace(ndarray=Memory, cuda=SimpleNamespace(runtime=devices)),
        devices.getDevice,
    )
    launcher.compiled, launcher.only_compiles, launcher.notes = {}, False, []
    launcher.threads = CompileThreads(launcher.notes.append)
    return launcher


def test_the_second_launch_of_a_variant_does_not_compile():
    launcher, kernel, y, x = gpu_launcher(), Kernel(), Memory(256), Memory(1 << 40)
    for _ in range(3):
        launcher.launch(kernel, (4,), (y, x, None, 0.5, 64), {"BLOCK": 16, "num_warps": 4})
    ((arguments, options),) = kernel.compiled
    assert arguments[2:] == (None, 0.5, 64) and options == {"BLOCK": 16, "num_warps": 4}
    assert [pointer.data_ptr() for pointer in arguments[:2]] == [256, 1 << 40]
    assert [launched[1:] for launched in kernel.launched] == [((4, 1, 1), (256, 1 << 40, None, 0.5, 64, 16, False))] * 3


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
def test_an_argument_of_another_kind_compiles_another_variant(arguments, options):
    launcher, kernel, default = gpu_launcher(), Kernel(), {"BLOCK": 16, "num_warps": 4}
    launcher.launch(kernel, (4,), (Memory(256), Memory(512), None, 0.5, 64), default)
    for _ in range(2):
        launcher.launch(kernel, (4,), arguments, default | options)
    assert len(kernel.compiled) == 2 and len(kernel.launched) == 3
    launcher.launch(kernel, (4,), (Memory(1024), Memory(512), None, 0.7, 32), default)
    assert len(kernel.compiled) == 2
    assert kernel.launched[-1] == (default | {"TWICE": False}, (4, 1, 1), (1024, 512, None, 0.7, 32, 16, False))


INTEGERS = st.one_of(st.integers(-40, 40), st.integers(-(2**63), 2**63 - 1), st.integers(2**31 - 2, 2**31 + 2))


@given(INTEGERS, INTEGERS)
def test_two_integers_share_a_variant_exactly_if_triton_specialises_them_equally(a, b):
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    launcher, kernel = gpu_launcher(), Kernel()
    for n in (a, b):
        launcher.launch(kernel, (4,), (Memory(256), Memory(512), None, 0.5, n), {"BLOCK": 16})
    kinds = [specialize(backend, n, False, True, True) for n in (a, b)]
    assert (len(kernel.compiled) == 1) == (kinds[0] == kinds[1])


def test_constants_must_come_last():
    launcher, x = gpu_launcher(), Memory(256)
    with pytest.raises(TypeError, match=r"axpy: 4 arguments, but the constants are \[5, 6\]"):
        launcher.launch(Kernel(), (4,), (x, x, None, 0.5), {"BLOCK": 16, "n": 3})
    with pytest.raises(TypeError, match="contiguous"):
        launcher.launch(Kernel(), (4,), (x, Memory(256, contiguous=False), None, 0.5, 1), {"BLOCK": 16})
    with pytest.raises(TypeError, match="cannot be passed to a kernel"):
        launcher.launch(Kernel(), (4,), (x, np.zeros(3), None, 0.5, 1), {"BLOCK": 16})


def test_a_kernel_that_does_not_fit_the_gpu_is_a_one_line_error():
    class Large(Kernel):
        __module__ = "stage2_cuda.attention.forward"

        def warmup(self, *_, **__):
            raise triton.OutOfResources(212992, 166912, "shared memory")

    sentence = (
        r"attention\.forward\.axpy does not fit this GPU "
        r"\(shared memory: 212,992 needed, 166,912 available\): use --precision"
    )
    with pytest.raises(ConfigError, match=sentence):
        gpu_launcher().launch(Large(), (4,), (Memory(256), Memory(512), None, 0.5, 64), {"BLOCK": 16})


# -- compiling in threads ------------------------------------------------------------------------------------


class SlowKernel(Kernel):
    """Compiles only after `release` is set, and notes the thread and the device."""

    def __init__(self, launcher):
        super().__init__()
        self.launcher, self.release, self.places = launcher, threading.Event(), []

    def warmup(self, *arguments, **options):
        assert self.release.wait(10)
        self.places.append((threading.get_ident(), self.launcher.device()))
        return super().warmup(*arguments, **options)


def test_kernels_are_compiled_ahead_in_threads_and_launched_when_they_are_ready(monkeypatch):
    monkeypatch.setattr(compile_threads, "SILENT", 0.01)
    launcher = gpu_launcher()
    launcher.xp.cuda.runtime.setDevice(3)
    kernels, called = [SlowKernel(launcher) for _ in range(3)], []

    def step():
        called.append(None)
        for kernel in kernels:
            launcher.launch(kernel, (4,), (Memory(256), Memory(512), None, 0.5, 64), {"BLOCK": 16})

    launcher.compile_ahead(step)
    assert not any(kernel.launched or kernel.compiled for kernel in kernels) and not launcher.notes
    threading.Timer(0.1, lambda: [kernel.release.set() for kernel in kernels]).start()
    for _ in range(2):
        step()
    assert len(called) == 3 and len(launcher.notes) == 1 and "compiling 3 kernels" in launcher.notes[0]
    for kernel in kernels:
        ((thread, device),) = kernel.places
        assert thread != threading.get_ident() and device == 3
        assert len(kernel.compiled) == 1 and len(kernel.launched) == 2


def test_compiling_ahead_keeps_no_array_alive_and_waits_for_no_other_kernel():
    launcher = gpu_launcher()
    kernel, other = SlowKernel(launcher), Kernel()
    x = Memory(256)
    array = weakref.ref(x)
    launcher.compile_ahead(launcher.launch, kernel, (4,), (x, x, None, 0.5, 64), {"BLOCK": 16})
    del x
    assert array() is None
    launcher.launch(other, (4,), (Memory(256), Memory(512), None, 0.5, 64), {"BLOCK": 16})
    assert len(other.launched) == 1 and not kernel.compiled
    kernel.release.set()
    launcher.wait_for_threads()
    assert len(kernel.compiled) == 1 and not kernel.launched


def test_an_error_in_a_thread_is_raised_by_the_launch_and_not_before():
    class Fails(Kernel):
        def warmup(self, *arguments, **options):
            self.compiled.append(arguments)
            raise triton.OutOfResources(2, 1, "registers")

    launcher, kernel = gpu_launcher(), Fails()
    launch = launcher.launch, kernel, (4,), (Memory(256), Memory(512), None, 0.5, 64), {"BLOCK": 16}
    launcher.compile_ahead(*launch)
    with pytest.raises(ConfigError, match="does not fit this GPU"):
        launch[0](*launch[1:])
    with pytest.raises(ValueError, match="in the step"):
        launcher.compile_ahead(lambda: (_ for _ in ()).throw(ValueError("in the step")))
    assert not launcher.only_compiles


# -- PyTorch is not imported ---------------------------------------------------------------------------------


def test_triton_inspects_arguments_without_importing_pytorch():
    """Triton 3.6 would import it; where PyTorch is imported already, Triton still finds it."""
    code = (
        "import sys\nfrom stage2_cuda.runtime import triton_start\n"
        "triton_start.inspect_first_argument()\nassert 'torch' not in sys.modules\n"
        "import types\nsys.modules['torch'] = fake = types.ModuleType('torch')\n"
        "triton_start.inspect_first_argument()\nassert sys.modules['torch'] is fake"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_names_that_are_private_to_triton_exist():
    from triton.backends.compiler import BaseBackend

    native = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    assert native(BaseBackend, 1, False, True, True)
    from triton.backends.nvidia.compiler import get_ptxas_version

    get_ptxas_version.cache_clear()
    triton_start.read_compiler_version((9, 0))
    get_ptxas_version(90)
    assert get_ptxas_version.cache_info()[:2] == (1, 1)  # a hit: only the first call has asked


def test_the_names_of_compiled_kernels_depend_on_the_version_and_the_file_times_of_triton(monkeypatch, tmp_path):
    from triton.runtime import cache

    monkeypatch.setattr(cache, "triton_key", cache.triton_key)  # restored after the test
    triton_start.identify_by_file_times()
    assert cache.triton_key is triton_start.key_of_files
    assert cache.triton_key() == triton_start.key_of_files.__wrapped__()
    # Triton's own key has a hash directly after the version, so the two keys are never equal
    assert cache.triton_key().startswith(f"{triton.__version__} by file times ")

    file = tmp_path / "backends" / "compiler.so"
    file.parent.mkdir()
    file.write_text("one")
    monkeypatch.setattr(triton, "__file__", str(tmp_path / "__init__.py"))
    keys = {triton_start.key_of_files.__wrapped__()}
    file.write_text("more")
    keys.add(triton_start.key_of_files.__wrapped__())
    os.utime(file, ns=(1, 1))
    keys.add(triton_start.key_of_files.__wrapped__())
    assert len(keys) == 3


def test_a_triton_without_the_private_names_keeps_its_own_key(monkeypatch):
    from triton.runtime import cache

    other = lambda: "a key"  # noqa: E731  not a cached function
    monkeypatch.setattr(cache, "triton_key", other)
    triton_start.identify_by_file_times()
    assert cache.triton_key is other


# -- C modules of Triton -------------------------------------------------------------------------------------


C_MODULE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", "", -1, methods}};
PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModule_Create(&module); }}
"""


@pytest.fixture
def build(monkeypatch):
    """triton.runtime.build, which loads C modules as a GpuLauncher lets it."""
    from triton.runtime import build

    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)  # restored after the test
    return build


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="there is no C compiler")
@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="Python has no header files")
def test_a_c_module_keeps_its_functions_when_another_of_its_name_is_loaded_again(build, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton_launch.load_c_modules_one_at_a_time.__wrapped__()
    name = "launcher_of_a_test"
    modules = [build.compile_module_from_src(C_MODULE.format(number=i, name=name), name) for i in (1, 2, 1)]
    assert [module.launch() for module in modules] == [1, 2, 1]


def test_no_thread_changes_a_c_module_before_the_thread_that_loaded_it_has_its_functions(build):
    module, threads = SimpleNamespace(), []  # Python uses one module for all files of one name

    def load(name, path):
        module.path = path
        if not threads:
            threads.append(threading.Thread(target=build._load_module_from_path, args=(name, "second")))
            threads[0].start()
            threads[0].join(0.1)  # without the lock, this thread changes the module now
        return module

    build._load_module_from_path = load
    triton_launch.load_c_modules_one_at_a_time.__wrapped__()
    assert build._load_module_from_path("launcher", "first").path == "first"
    threads[0].join()
    assert module.path == "second"


# -- no GPU --------------------------------------------------------------------------------------------------


class FakeCupy:
    """CuPy with `count` GPUs, or an exception; GPU `full` has no free memory. opened: the numbers that use() saw."""

    def __init__(self, count=1, capability=(9, 0), full=None):
        class Device:
            def __init__(device, number):
                device.number = number

            def use(device):
                self.opened.append(device.number)
                if device.number == full:
                    raise OSError("cudaErrorMemoryAllocation: out of memory\nmore")

        self.opened = []
        runtime = SimpleNamespace(
            getDevice=lambda: 0,
            setDevice=self.opened.append,
            getDeviceCount=lambda: raised(count) if isinstance(count, Exception) else count,
            deviceGetAttribute=lambda number, device: capability[number - 75],
            memGetInfo=lambda: (1, 1),
            CUDARuntimeError=OSError,
        )  # fmt: skip
        self.cuda = SimpleNamespace(runtime=runtime, Device=Device)


def test_triton_asks_the_launcher_for_the_capability_of_a_device():
    cupy = FakeCupy(capability=(9, 0))
    launcher = SimpleNamespace(xp=cupy, device=cupy.cuda.runtime.getDevice)
    target = triton_launch.cupy_driver(launcher, SimpleNamespace()).get_current_target()
    assert (target.backend, target.arch) == ("cuda", 90) and cupy.opened == []


def raised(error):
    raise error


def test_the_utils_that_triton_has_created_are_used_again(monkeypatch):
    from triton.backends.nvidia.driver import CudaUtils

    existing, created = SimpleNamespace(load_binary=None), []
    monkeypatch.setattr(CudaUtils, "instance", existing, raising=False)
    monkeypatch.setattr(CudaUtils, "__init__", lambda self: created.append(self))
    assert triton_launch.triton_utils() is existing and not created
    monkeypatch.setattr(CudaUtils, "instance", object.__new__(CudaUtils))  # as after an error of __init__
    assert triton_launch.triton_utils() is CudaUtils.instance and created == [CudaUtils.instance]


@pytest.mark.parametrize(
    "module, says",
    [
        (None, "CuPy is needed but cannot be imported"),
        (None, "no GPU was found: this machine has no NVIDIA driver"),
        (FakeCupy(0), "no GPU was found"),
        (
            FakeCupy(RuntimeError("cudaErrorInsufficientDriver: too old\nmore")),
            "cudaErrorInsufficientDriver: too old)",
        ),
        (FakeCupy(1, (7, 5)), "this GPU has compute capability 7.5, the kernels need 8.0"),
    ],
    ids=["no CuPy", "no CuPy and no driver", "no GPU", "too old a driver", "too old a GPU"],
)
def test_without_a_gpu_one_line_names_the_reason_and_the_interpreter(monkeypatch, module, says):
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(
        triton_launch, "has_driver", lambda: says != "no GPU was found: this machine has no NVIDIA driver"
    )
    with pytest.raises(ConfigError) as error:
        GpuLauncher()
    assert says in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith(
        "set the environment variable TRITON_INTERPRET=1 and use a model of preset nano to run the same kernels on "
        "the CPU, slowly"
    )


def test_the_launcher_opens_no_gpu_and_a_full_one_is_named_in_one_line(monkeypatch):
    """A rank of stage 3 starts its launcher before it selects its GPU, and must take no memory of the first one."""
    cupy = FakeCupy(4, (7, 5), full=2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(ConfigError, match="compute capability 7.5"):
        GpuLauncher()
    assert cupy.opened == []
    triton_launch.open_gpu(cupy, 1)
    with pytest.raises(ConfigError) as error:
        triton_launch.open_gpu(cupy, 2)
    assert cupy.opened == [1, 2] and str(error.value) == (
        "GPU 2 has no free memory (cudaErrorMemoryAllocation: out of memory): end the programs that nvidia-smi lists, "
        "or select another GPU with CUDA_VISIBLE_DEVICES"
    )


def test_without_triton_the_error_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for make_launcher in (GpuLauncher, triton_launch.launcher.__wrapped__):
        with pytest.raises(ConfigError, match="Triton is needed but cannot be imported"):
            make_launcher()


@pytest.mark.parametrize("versions", [("3.6.0", "2.5.0"), ("3.8.1", "2.5.2"), ("3.6.0+git1", "3.0.0")])
def test_versions_with_which_the_interpreter_fails_are_one_line(monkeypatch, versions):
    monkeypatch.setattr(triton, "__version__", versions[0])
    monkeypatch.setattr(np, "__version__", versions[1])
    with pytest.raises(ConfigError) as error:
        InterpreterLauncher()
    assert str(error.value) == (
        f"the interpreter of Triton {versions[0]} does not work with NumPy {versions[1]}: "
        'pip install "numpy<2.5", or Triton 3.9'
    )


@pytest.mark.parametrize("versions", [("3.6.0", "2.4.6"), ("3.9.0", "2.5.0"), ("3.10.1", "3.0.0"), ("4.0.0", "2.5.1")])
def test_other_versions_may_use_the_interpreter(versions):
    triton_launch.check_interpreter(*versions)


@pytest.mark.skipif(not interpreted(), reason="a GPU was found, so the interpreter is not used")
def test_the_interpreter_replaces_functions_of_triton_language_only_during_a_launch():
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):
        pytest.skip("this version of Triton does not restore them")
    owners = tl, tl.math, tl.tensor
    before = [[member for _, member in inspect.getmembers(owner, tl.core.is_builtin)] for owner in owners]
    axpy(np.empty(5, np.float32), np.ones(5, np.float32), None, 2.0)
    assert before == [[member for _, member in inspect.getmembers(owner, tl.core.is_builtin)] for owner in owners]
    assert all(before)


@triton.jit
def square(x):
    return x * x


@triton.jit
def sum_of_squares_kernel(out_ptr, x_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + offs, offs < n, 0)
    tl.store(out_ptr + row, tl.sum(square(x) + square(x[:, None].reshape(BLOCK)), 0))


@pytest.mark.skipif(not interpreted(), reason="a GPU was found, so the interpreter is not used")
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_interpreter_replaces_functions_once_per_kernel_and_sums_as_numpy_does(monkeypatch, rng, dtype):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    triton_launch.launcher()
    scopes, patch_lang = [], interpreter._patch_lang
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: scopes.append(patch_lang(fn)) or scopes[-1])
    rows, n = (int(size) for size in rng.integers(1, 9, 2))
    x, out = rng.integers(-50_000, 50_000, (rows, n)).astype(dtype), np.empty(rows, dtype)
    launch(sum_of_squares_kernel, (rows,), out, x, n, BLOCK=8)
    with np.errstate(over="ignore"):
        want = (2 * (x * x)).sum(1, dtype=dtype)  # integers overflow alike
    np.testing.assert_allclose(out, want, rtol=1e-6)
    assert len(scopes) == 1 or not hasattr(interpreter, "_get_np_dtype")  # another version of Triton


@pytest.mark.parametrize("value, want", [("1", True), ("true", True), ("ON", True), ("0", False), ("off", False)])
def test_the_environment_variable_selects_the_interpreter(monkeypatch, value, want):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert interpreted() is want
    monkeypatch.delenv("TRITON_INTERPRET")
    assert interpreted() is False


# -- compiled code -------------------------------------------------------------------------------------------

COMPILE = """
import json, math, sys
import triton
from triton.backends.compiler import GPUTarget
from stage2_cuda.runtime import triton_launch

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
    def reshape(self, *shape):
        return self
    def __getitem__(self, part):
        return self

class Compiler:
    def gpu_model(self):
        return (8, 0), "a GPU that has only Triton kernels"
    def launch(self, kernel, grid, arguments, options):
        ptx = kernel.run(*arguments, grid=grid, warmup=True, **options).asm["ptx"]
        name = kernel.__module__.split(".")[-1] + "." + kernel.__name__
        wide = "ld.global.v4" in ptx or "cp.async.cg" in ptx  # to registers; or to shared memory, ahead of its use
        print(json.dumps([name, wide, ".local" in ptx, "atom" in ptx]))

triton.runtime.driver.set_active(Driver())
triton_launch.launcher = Compiler
from stage2_cuda.kernels import adamw, cast, column_sums, cross_entropy, embedding, gelu, layernorm, rounding
from stage2_cuda.kernels.segment_sum import segment_sum
f, N, C, V, W = Array, 4096, 768, 50257, 50304
for dtype in ("bfloat16", "float16", "float32"):
    h = lambda *shape: Array(*shape, dtype=dtype)
    i = lambda *shape: Array(*shape, dtype="int32")
    x, b, d, r = h(N, C), h(C), f(C), f(N)
    layernorm.residual_layernorm_forward(x, x, r, r, x, x, b, b, b, 1e-5)
    partials = f(*layernorm.layernorm_partials_shape(N, C, x.dtype))
    layernorm.residual_layernorm_backward(x, partials, x, x, x, b, r, r)
    layernorm.residual_add(x, x, x, b)
    layernorm.residual_bias_gradient(d, f(*partials.shape[1:]), x)
    gelu.bias_gelu_forward(x, x, b)
    partials = f(*gelu.gelu_partials_shape(N, C))
    gelu.bias_gelu_backward(x, partials, x, x, b)
    partials = f(*column_sums.partials_shape(N, C))
    column_sums.column_sums(d, partials, x)
    embedding.embedding_forward(h(4, 1024, C), i(4, 1024), h(V, C), h(1024, C))
    sorted_tokens = embedding.SortedTokens(i(N), i(V + 1), i(V + 1), i(N // 64))
    for accumulate in (False, True):
        chunk_sums, dy = f(N // 64, C), h(4, 1024, C)
        embedding.token_gradient(f(V, C), chunk_sums, sorted_tokens, dy, accumulate)
    embedding.position_gradient(f(1024, C), dy)
    logits = h(N, W)
    cross_entropy.cross_entropy_forward(r, r, r, logits, i(N), V)
    cross_entropy.cross_entropy_backward(logits, logits, i(N), r, r, 0.1, V, dy=Array(1, dtype="float64"))
    cross_entropy.cross_entropy_forward_backward(logits, r, r, r, logits, i(N), 0.1, V)
    p = f(1 << 20)
    adamw.adamw_step(p, p, p, h(1 << 20), p, f(3), f(1), Array(1024, dtype="int8"), 0.9, 0.95)
    bits, key = Array(1 << 20, dtype="uint16"), Array(1, dtype="int64")
    adamw.adamw_step(p, p, p, bits, p, f(3), f(1), Array(1024, dtype="int8"), 0.9, 0.95, key, 1 << 32)
    rounding.round_to_bf16(bits, p, key)
    adamw.page_sums(f(1024), p)
    segment_sum(Array(64, dtype="float64"), f(1024))
    adamw.clip_scale(f(1), f(1), Array(64, dtype="float64"), 1.0, f(1))
    cast.cast(h(1 << 20), p)
"""
SMALL_READS = {"segment_sum.segment_sum_kernel", "adamw.clip_kernel"}  # they read a thousandth of the data


@pytest.fixture(scope="module")
def compiled():
    """[kernel, whether it loads 16 bytes at a time, spills, uses atomics] of each launch, compiled for an H200."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.long  # make test compiles most kernels in test_triton_compile.py
def test_every_kernel_compiles_for_a_gpu_and_none_spills_or_uses_atomics(compiled):
    names = {name for name, *_ in compiled}
    modules = "adamw cast column_sums cross_entropy embedding gelu layernorm rounding segment_sum".split()
    files = [ROOT / "stage2_cuda" / "kernels" / f"{module}.py" for module in modules]
    launches = sum(
        len(re.findall(r"(?<![\w.])launch\(", file.read_text())) for file in files
    )  # not cuda_launch.launch()
    assert len(names) == launches
    assert not [name for name, _, spills, atomics in compiled if spills or atomics]


@pytest.mark.long
def test_every_kernel_loads_16_bytes_at_a_time(compiled):
    """The compiler loads element by element if a mask ends at a number that may not be divisible by 16."""
    assert not [name for name, wide, _, _ in compiled if not wide and name not in SMALL_READS]


# -- on a GPU -----------------------------------------------------------------------------------------------


@gpu
def test_a_launch_runs_on_cupys_current_stream_and_is_captured_in_its_graph():
    import cupy

    y, x = cupy.zeros(1000, np.float32), cupy.ones(1000, np.float32)
    axpy(y, x, None, 2.0)  # compile before the capture
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


def test_the_launcher_is_created_once():
    assert triton_launch.launcher() is triton_launch.launcher()
    assert (array_module() is np) == interpreted()
