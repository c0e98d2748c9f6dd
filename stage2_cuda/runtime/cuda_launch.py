"""Launch kernels that are written in CUDA C, compiled by CuPy (NVRTC).

A few kernels use parts of a Hopper GPU that Triton does not offer, such as clusters, or shared memory whose size is not
a power of two. launch() has the same place in a step as triton_launch.launch(): it uses CuPy's current stream, and
during triton_launch.compile_ahead() it only starts to compile. CuPy keeps compiled kernels in its cache directory.
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

from stage2_cuda.runtime.triton_launch import Pointer, gpu_model, launcher, not_an_argument, not_contiguous

HOPPER = 9, 0  # the compute capability of the GPUs that the kernels are for
ALIGNMENT = 16  # bytes: the kernels load and store vectors of this size
# The number of a launch attribute in CUDA's driver API: the kernel may start before the previous one has ended.
PROGRAMMATIC_STREAM_SERIALIZATION = 6
# The number of an attribute of a function: the most dynamic shared memory that a launch may ask for.
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

HEADERS = tuple(Path(__file__).with_name(name) for name in ("instructions.cuh", "vectors.cuh"))  # for all kernels


def serves(dtype, *arrays):
    """Whether kernels for 16 bits can be used: on a Hopper GPU, for this dtype, if the arrays are aligned or None."""
    if gpu_model()[0] != HOPPER or dtype.itemsize != 2:
        return False
    return all(array is None or Pointer(array).address % ALIGNMENT == 0 for array in arrays)


class CudaSource(NamedTuple):
    """Files of CUDA C, which are compiled as one text, and macros for the compiler: pairs (name, value)."""

    paths: tuple[Path, ...]
    macros: tuple


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of CUDA's driver API; the value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig of CUDA's driver API."""

    _fields_ = [
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


def launch(source, name, blocks, threads, *arguments, overlap=False, shared_bytes=0):
    """Launch the kernel `name` of a CudaSource, in `blocks` blocks of `threads` threads, on CuPy's current stream.

    arguments: contiguous arrays, None (a null pointer), int (32 bits) or float (32 bits); for anything else TypeError
    is raised. overlap: whether the kernel may start before the previous one has ended (programmatic dependent launch);
    the kernel must then wait itself for the previous one. shared_bytes: of dynamic_memory() in instructions.cuh.
    """
    gpu = launcher()
    key = source, gpu.device()
    compile = functools.partial(compiled, gpu.xp, *key)
    if gpu.only_compiles:
        gpu.start_thread(key, compile)
        return
    function = function_of(gpu.threads.result(key) or compile(), name)
    values = [argument(value, gpu.xp) for value in arguments]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    attribute = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))
    stream = gpu.xp.cuda.get_current_stream().ptr
    if shared_bytes:
        allow_shared_memory(function, shared_bytes)
    config = Config((blocks, 1, 1), (threads, 1, 1), shared_bytes, stream, ctypes.pointer(attribute), int(overlap))
    status = driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function.ptr), pointers, None)
    if status:
        raise RuntimeError(f"{name}: CUDA's driver did not launch the kernel: error {status}")


@functools.cache
def compiled(xp, source, device):
    """The cupy.RawModule of a CudaSource, compiled and loaded on the current device, which has the number `device`."""
    options = ("--std=c++17", *(f"-D{name}={value}" for name, value in source.macros))
    text = "\n".join(path.read_text() for path in source.paths)
    module = xp.RawModule(code=text, options=options)
    module.compile()
    return module


@functools.cache
def allow_shared_memory(function, shared_bytes):
    """Allow launches of this function with so much dynamic shared memory."""
    status = driver().cuFuncSetAttribute(ctypes.c_void_p(function.ptr), MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    if status:
        raise RuntimeError(f"CUDA's driver did not allow {shared_bytes} bytes of shared memory: error {status}")


@functools.cache
def function_of(module, name):
    """The kernel `name` of a compiled module, as a cupy.cuda.Function."""
    return module.get_function(name).kernel


def argument(value, xp):
    """`value` as a ctypes value for a kernel's argument."""
    if value is None:
        return ctypes.c_void_p()
    if type(value) is int:
        return ctypes.c_int(value)
    if type(value) is float:
        return ctypes.c_float(value)
    if type(value) is not xp.ndarray:
        raise not_an_argument(value)
    if not value.flags.c_contiguous:
        raise not_contiguous(value)
    return ctypes.c_void_p(value.data.ptr)


@functools.cache
def driver():
    """The library of CUDA's driver API."""
    return ctypes.CDLL("libcuda.so.1")
