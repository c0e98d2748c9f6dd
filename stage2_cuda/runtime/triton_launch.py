"""Launch Triton kernels without PyTorch: on CuPy arrays and CuPy's current stream, or on NumPy arrays (interpreter).

A kernel file needs only `launch(kernel, grid, *arguments, **options)`. With TRITON_INTERPRET=1 in the environment the
same kernels run on the CPU, slowly: one can learn and test without a GPU.

Triton gets the device and the stream from a driver object. The standard driver uses PyTorch; the one here uses CuPy. A
launch through `kernel[grid](...)` inspects every argument to find the compiled variant, which takes about 10 us. Here
one dictionary look-up finds the variant. The key holds everything that Triton specialises on: the types, which pointers
and integers are divisible by 16, which integers are 1, and every constant.
"""

import ctypes
import functools
import importlib
import threading
from typing import NamedTuple

import numpy as np

from gpt2core.errors import ConfigError
from stage2_cuda.runtime import faster_interpreter

USE_INTERPRETER = "with TRITON_INTERPRET=1 in the environment the same kernels run on the CPU, slowly"
PIP_INSTALL = "pip install cupy-cuda13x[ctk], or cupy-cuda12x[ctk] for a driver of CUDA 12"
MIN_CAPABILITY = (8, 0)  # bf16 tensor cores
PDL_CAPABILITY = (9, 0)  # programmatic dependent launch


class KernelLaunch(NamedTuple):
    """The arguments of one launch(), for a caller that may launch with CuPy or with PyTorch (torch_bridge)."""

    kernel: object
    grid: tuple
    arguments: tuple
    options: dict

    def run(self):
        """Launch with CuPy, or in the interpreter on NumPy arrays."""
        launch(self.kernel, self.grid, *self.arguments, **self.options)


def interpreted():
    """Whether kernels run in Triton's interpreter, as Triton itself reads TRITON_INTERPRET.

    Raises ConfigError if Triton cannot be imported.
    """
    return imported("triton", "Triton", "pip install triton").knobs.runtime.interpret


def array_module():
    """The module whose arrays launch() takes: numpy under the interpreter, otherwise cupy.

    Raises ConfigError if there is no usable GPU, no driver, no CuPy or no Triton.
    """
    return launcher().xp


def launch(kernel, grid, *arguments, **options):
    """Run kernel[grid] on CuPy's current stream. grid: 1 to 3 integers.

    arguments: arrays (passed as pointers to their first elements), int, float, None or descriptor() objects, for all
    parameters of the kernel except its constants. options: the constants (annotated tl.constexpr, last in the
    signature), num_warps, num_stages, enable_fp_fusion, launch_pdl. Raises TypeError for any other argument.
    """
    launcher().launch(kernel, grid, arguments, options)


def can_overlap():
    """Whether a kernel may start before the previous one has ended (programmatic dependent launch, launch_pdl)."""
    return launcher().can_overlap()


@functools.cache
def launcher():
    """The process's InterpreterLauncher or GpuLauncher, created at the first call."""
    return InterpreterLauncher() if interpreted() else GpuLauncher()


class InterpreterLauncher:
    """Runs kernels on the CPU, one program after another."""

    xp = np

    def __init__(self):
        self.lock = threading.Lock()  # the interpreter keeps the current program's index in a global variable
        faster_interpreter.install()

    def can_overlap(self):
        return False

    def launch(self, kernel, grid, arguments, options):
        arguments = [self.argument(value) for value in arguments]
        with self.lock:
            kernel[grid](*arguments, **options)

    def argument(self, value):
        if type(value) in (int, float, type(None)):
            return value
        if not (isinstance(value, np.ndarray) or hasattr(value, "block_shape")):
            raise not_an_argument(value)
        pointer = Pointer(value) if isinstance(value, np.ndarray) else value.base
        if pointer.dtype.name == "bfloat16":
            raise ConfigError("bf16 is silently wrong in Triton's interpreter: use fp32 there, or a GPU")
        return pointer if isinstance(value, np.ndarray) else value


class GpuLauncher:
    """Launches kernels on CuPy's current device and current stream, and caches the compiled variants."""

    def __init__(self):
        triton = imported("triton", "Triton", "pip install triton")
        try:
            self.xp = imported("cupy", "CuPy", f"{PIP_INSTALL}; {USE_INTERPRETER}")
        except ConfigError:
            if not has_driver():  # then installing CuPy would not help
                raise ConfigError(f"no GPU was found: this machine has no NVIDIA driver; {USE_INTERPRETER}") from None
            raise
        self.device = self.xp.cuda.runtime.getDevice
        try:
            count = self.xp.cuda.runtime.getDeviceCount()
        except Exception as error:  # no driver, or one too old for this CuPy's CUDA
            raise ConfigError(f"no GPU can be used ({first_line(error)}): {USE_INTERPRETER}") from error
        if count == 0:
            raise ConfigError(f"no GPU was found: {USE_INTERPRETER}")
        if self.capability() < MIN_CAPABILITY:
            has, needs = (".".join(map(str, pair)) for pair in (self.capability(), MIN_CAPABILITY))
            raise ConfigError(f"this GPU has compute capability {has}, the kernels need {needs}: {USE_INTERPRETER}")
        triton.runtime.driver.set_active(cupy_driver(self))
        # scratch for descriptors that a kernel creates. It is freed at once: CuPy's pool reuses it in stream order.
        triton.set_allocator(lambda size, alignment, stream: Pointer(self.xp.empty(size, np.int8)))
        self.compiled = {}

    def capability(self, device=None):
        """(major, minor) compute capability."""
        return divmod(int(self.xp.cuda.Device(device).compute_capability), 10)

    def can_overlap(self):
        return self.capability() >= PDL_CAPABILITY

    def launch(self, kernel, grid, arguments, options):
        # id(kernel) because hashing a kernel is slow; modules keep their kernels alive, so the id stays unique
        key, values = [id(kernel), self.device(), *options.items()], []
        for value in arguments:
            kind = type(value)
            if kind is int:
                key.append(1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31))
            elif kind is float or value is None:
                key.append(kind)
            elif kind is self.xp.ndarray:
                if not value.flags.c_contiguous:
                    raise not_contiguous(value)
                key.append((value.dtype, value.data.ptr % 16 == 0))
                value = value.data.ptr
            elif hasattr(value, "block_shape"):
                key.append((value.base.dtype, *value.block_shape))
            else:
                raise not_an_argument(value)
            values.append(value)
        found = self.compiled.get(key := tuple(key))
        if found is None:
            self.compiled[key] = self.compile_and_launch(kernel, grid, arguments, options)
        else:
            compiled, constants = found
            compiled[(*grid, 1, 1)[:3]](*values, *constants)

    def compile_and_launch(self, kernel, grid, arguments, options):
        """Return the compiled kernel and its constants in the order of its signature."""
        from triton import OutOfResources

        constants = list(range(len(arguments), len(kernel.arg_names)))
        if kernel.constexprs != constants:
            raise TypeError(f"{kernel.__name__}: {len(arguments)} arguments, but the constants are {kernel.constexprs}")
        arguments = (Pointer(value) if isinstance(value, self.xp.ndarray) else value for value in arguments)
        try:
            # Triton 3.9 warns if enable_fp_fusion is not given
            compiled = kernel[grid](*arguments, **{"enable_fp_fusion": True} | options)
        except OutOfResources as error:
            raise does_not_fit(kernel, error) from error
        defaults = kernel.signature.parameters
        names = [kernel.arg_names[number] for number in constants]
        return compiled, [options[name] if name in options else defaults[name].default for name in names]


def has_driver():
    """Whether the user-mode library of NVIDIA's driver can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cupy_driver(gpu):
    """Triton's CUDA driver with CuPy's current device and stream. gpu: a GpuLauncher."""
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class CupyDriver(CudaDriver):
        def __init__(self):  # does not call the parent's, which imports PyTorch (3.6) or uses the default stream (3.9)
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_current_device = gpu.device
            self.set_current_device = gpu.xp.cuda.runtime.setDevice
            self.get_current_stream = lambda device: gpu.xp.cuda.get_current_stream().ptr
            self.get_device_capability = gpu.capability

    return CupyDriver()


# -- arrays as arguments -----------------------------------------------------------------------------------------------


class Pointer:
    """The address of a contiguous array plus `offset` bytes, as an argument for Triton. It keeps the array alive."""

    __slots__ = ("array", "dtype", "address")

    def __init__(self, array, offset=0):
        if not array.flags.c_contiguous:
            raise not_contiguous(array)
        self.array, self.dtype = array, array.dtype
        self.address = (array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr) + offset

    def data_ptr(self):
        return self.address

    def itself(self, *_, **__):
        return self

    # The interpreter calls these to copy a PyTorch tensor to the host and back; a NumPy array is on the host already.
    untyped_storage = cpu = new_empty = set_ = copy_ = storage_offset = size = stride = itself


def descriptor(array, block_shape):
    """A tensor descriptor for launch(): `array` in blocks of `block_shape`, copied by the GPU's TMA unit."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [stride // array.itemsize for stride in array.strides]
    return TensorDescriptor(Pointer(array), list(array.shape), strides, list(block_shape))


def not_an_argument(value):
    return TypeError(
        f"{type(value)} cannot be passed to a kernel: use a device array, int, float, None or a descriptor"
    )


def not_contiguous(array):
    return TypeError(f"a kernel needs contiguous memory, not shape {array.shape} with strides {array.strides} bytes")


# -- errors ------------------------------------------------------------------------------------------------------------


def imported(module, name, remedy):
    """The imported module; ConfigError with `remedy` if that fails. name: its name in the message."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a CuPy built for another CUDA version raises other errors than ImportError
        raise ConfigError(f"{name} is needed but cannot be imported ({first_line(error)}): {remedy}") from error


def does_not_fit(kernel, error):
    name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
    return ConfigError(
        f"{name} does not fit this GPU ({error.name}: {error.required:,} needed, {error.limit:,} available): "
        f"use --precision bf16, whose tiles are smaller, or a GPU of compute capability 9.0"
    )


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]
