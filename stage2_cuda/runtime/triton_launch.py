"""Triton kernels on CuPy's arrays and current stream, without PyTorch; on NumPy's arrays under the interpreter.

`launch(kernel, grid, *arguments, **options)` is all that a kernel file needs. With TRITON_INTERPRET=1 in the
environment the same kernels run on the CPU, slowly, so that one can learn and test without a GPU.

Triton asks a driver object for its device and its stream, and the stock one asks PyTorch: ours asks CuPy. A launch
through `kernel[grid](...)` looks at every argument to find the compiled variant, about 10 us of Python; here one
dictionary look-up finds it. Its key holds all that Triton specialises on: the types, which pointers and integers are
divisible by 16, which integers are 1, and every constant.
"""

import ctypes
import functools
import importlib
import threading

import numpy as np

from gpt2core.errors import ConfigError

WAY_OUT = "with TRITON_INTERPRET=1 in the environment the same kernels run on the CPU, slowly"
PIP_INSTALL = "pip install cupy-cuda13x[ctk], or cupy-cuda12x[ctk] for a driver of CUDA 12"
CAPABILITY = (8, 0)  # the oldest GPU with bf16 tensor cores
OVERLAPS = (9, 0)  # the oldest with programmatic dependent launch


def interpreted():
    """Whether TRITON_INTERPRET asks for Triton's interpreter: as Triton itself understood it.

    Raises ConfigError where there is no Triton.
    """
    return imported("triton", "Triton", "pip install triton").knobs.runtime.interpret


def array_module():
    """The module whose arrays `launch` takes: numpy under the interpreter, else cupy with a GPU that works.

    Raises ConfigError where there is no GPU, no driver, no CuPy or no Triton.
    """
    return runtime().xp


def launch(kernel, grid, *arguments, **options):
    """Run kernel[grid] on CuPy's current stream; an array stands for the pointer to its first element.

    arguments: arrays, integers, floats, None and descriptors, for all parameters of the kernel but its constants.
    options: the constants (annotated tl.constexpr, last in the signature), num_warps, num_stages, enable_fp_fusion.
    grid: 1-3 integers.
    """
    runtime().launch(kernel, grid, arguments, options)


def can_overlap():
    """Whether a kernel can start while the one before it ends: the option launch_pdl, and what kernels do with it."""
    return runtime().can_overlap()


@functools.cache
def runtime():
    """What launches kernels in this process, made at the first call."""
    return Interpreter() if interpreted() else Gpu()


class Interpreter:
    """Runs kernels on the CPU, one program after another."""

    xp = np

    def __init__(self):
        self.one_at_a_time = threading.Lock()  # the interpreter keeps which program it is at for the whole process

    def can_overlap(self):
        return False

    def launch(self, kernel, grid, arguments, options):
        arguments = [self.argument(value) for value in arguments]
        with self.one_at_a_time:
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


class Gpu:
    """Launches kernels on the current device of CuPy, on its current stream, and keeps what was compiled."""

    def __init__(self):
        triton = imported("triton", "Triton", "pip install triton")
        try:
            self.xp = imported("cupy", "CuPy", f"{PIP_INSTALL}; {WAY_OUT}")
        except ConfigError:
            if not has_driver():  # then installing it would be in vain
                raise ConfigError(f"no GPU was found, for there is no NVIDIA driver here: {WAY_OUT}") from None
            raise
        self.device = self.xp.cuda.runtime.getDevice
        try:
            count = self.xp.cuda.runtime.getDeviceCount()
        except Exception as error:  # no driver, or one older than this CuPy's CUDA
            raise ConfigError(f"no GPU can be used ({first_line(error)}): {WAY_OUT}") from error
        if count == 0:
            raise ConfigError(f"no GPU was found: {WAY_OUT}")
        if self.capability() < CAPABILITY:
            has, needs = (".".join(map(str, pair)) for pair in (self.capability(), CAPABILITY))
            raise ConfigError(f"this GPU has compute capability {has}, the kernels need {needs}: {WAY_OUT}")
        triton.runtime.driver.set_active(cupy_driver(self))
        # scratch for descriptors that a kernel makes; freed on return, and used again in the order of the stream alone
        triton.set_allocator(lambda size, alignment, stream: Pointer(self.xp.empty(size, np.int8)))
        self.compiled = {}

    def capability(self, device=None):
        """(major, minor) compute capability."""
        return divmod(int(self.xp.cuda.Device(device).compute_capability), 10)

    def can_overlap(self):
        return self.capability() >= OVERLAPS

    def launch(self, kernel, grid, arguments, options):
        key, values = [id(kernel), self.device(), *options.items()], []  # hashing a kernel is slow; modules keep them
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
        """-> the compiled kernel, and its constants in the order of its signature."""
        from triton import OutOfResources

        constants = list(range(len(arguments), len(kernel.arg_names)))
        if kernel.constexprs != constants:
            raise TypeError(f"{kernel.__name__}: {len(arguments)} arguments, but the constants are {kernel.constexprs}")
        arguments = (Pointer(value) if isinstance(value, self.xp.ndarray) else value for value in arguments)
        try:
            compiled = kernel[grid](*arguments, **{"enable_fp_fusion": True} | options)  # 3.9 warns where nobody says
        except OutOfResources as error:
            raise too_small(kernel, error) from error
        defaults = kernel.signature.parameters
        names = [kernel.arg_names[number] for number in constants]
        return compiled, [options[name] if name in options else defaults[name].default for name in names]


def has_driver():
    """Whether the library is there by which programs talk to NVIDIA's driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cupy_driver(gpu):
    """Triton's CUDA driver, with the device and the stream that CuPy has current."""
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class CupyDriver(CudaDriver):
        def __init__(self):  # not the parent's, which imports PyTorch (3.6) or takes the default stream (3.9)
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_current_device = gpu.device
            self.set_current_device = gpu.xp.cuda.runtime.setDevice
            self.get_current_stream = lambda device: gpu.xp.cuda.get_current_stream().ptr
            self.get_device_capability = gpu.capability

    return CupyDriver()


# -- arrays as arguments -----------------------------------------------------------------------------------------------


class Pointer:
    """An array as Triton wants it: the address and the type of its elements."""

    __slots__ = ("array", "dtype", "address")

    def __init__(self, array):
        if not array.flags.c_contiguous:
            raise not_contiguous(array)
        self.array, self.dtype = array, array.dtype  # the memory lives as long as this
        self.address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr

    def data_ptr(self):
        return self.address

    def itself(self, *_, **__):
        return self

    # what the interpreter does to bring a PyTorch tensor to the host, and its results back: this one is there already
    untyped_storage = cpu = new_empty = set_ = copy_ = storage_offset = size = stride = itself


def descriptor(array, block_shape):
    """An argument of `launch`: `array`, read and written in blocks of `block_shape` by the TMA unit of the GPU."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [stride // array.itemsize for stride in array.strides]
    return TensorDescriptor(Pointer(array), list(array.shape), strides, list(block_shape))


def not_an_argument(value):
    return TypeError(
        f"{type(value)} is no argument of a kernel: arrays of the device, int, float, None, descriptors are"
    )


def not_contiguous(array):
    return TypeError(f"a kernel needs contiguous memory, not shape {array.shape} with strides {array.strides} bytes")


# -- errors ------------------------------------------------------------------------------------------------------------


def imported(module, name, way_out):
    try:
        return importlib.import_module(module)
    except Exception as error:  # a CuPy for another CUDA raises more than ImportError
        raise ConfigError(f"{name} is needed, and cannot be imported ({first_line(error)}): {way_out}") from error


def too_small(kernel, error):
    name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
    return ConfigError(
        f"{name} does not fit this GPU ({error.name}: {error.required:,} needed, {error.limit:,} there): "
        f"use --precision bf16, whose tiles are smaller, or a GPU of compute capability 9.0"
    )


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]
