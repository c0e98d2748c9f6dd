"""Launch Triton kernels without PyTorch: on CuPy arrays, or with Triton's interpreter on NumPy arrays.

A kernel file needs only `launch(kernel, grid, *arguments, **options)`. If the environment variable TRITON_INTERPRET is
1, Triton's interpreter runs the same kernels on the CPU. This is slow, but learning and testing need no GPU.

Triton gets the device and the stream from a driver object. Triton's own driver uses PyTorch; the one here uses CuPy.
Triton compiles a kernel once per variant: per combination of argument types, of pointers and integers that are
divisible by 16, of integers that are 1, and of constants. `kernel[grid](...)` inspects every argument to find the
variant, which takes about 10 us. launch() finds it by one dictionary look-up, whose key contains these properties.

Triton 3.6 and 3.9 were tried; comments say where they differ.
"""

import contextlib
import ctypes
import functools
import importlib
import sys
import threading
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from gpt2core.errors import ConfigError
from stage2_cuda.runtime import faster_interpreter, triton_start
from stage2_cuda.runtime.compile_threads import CompileThreads

COMPUTE_CAPABILITY = 75, 76  # CUDA's cudaDevAttrComputeCapabilityMajor and ...Minor, which CuPy does not name
USE_INTERPRETER = (
    "set the environment variable TRITON_INTERPRET=1 and use a model of preset nano to run the same kernels on the "
    "CPU, slowly"
)
PIP_INSTALL = "pip install cupy-cuda13x[ctk], or cupy-cuda12x[ctk] for a driver of CUDA 12"
MIN_CAPABILITY = (8, 0)  # the lowest compute capability (major, minor) with bf16 tensor cores
PDL_CAPABILITY = (9, 0)  # the lowest one with programmatic dependent launch: see can_overlap()


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
    """Whether kernels run in Triton's interpreter. Triton itself reads TRITON_INTERPRET, so "1", "true" and "on" work.

    Raises ConfigError if Triton cannot be imported.
    """
    return import_module("triton", "Triton", "pip install triton").knobs.runtime.interpret


def array_module():
    """The module whose arrays launch() takes: numpy with the interpreter, otherwise cupy.

    Raises ConfigError if Triton is missing or, without the interpreter, CuPy, the driver or a GPU that is new enough.
    """
    return launcher().xp


def open_gpu(cupy, device):
    """Make a GPU the current device of this thread, and open it. Raises ConfigError if another program fills it."""
    try:
        cupy.cuda.Device(device).use()
        cupy.cuda.runtime.memGetInfo()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if "MemoryAllocation" not in str(error):
            raise
        raise ConfigError(
            f"GPU {device} has no free memory ({first_line(error)}): end the programs that nvidia-smi lists, or select "
            "another GPU with CUDA_VISIBLE_DEVICES"
        ) from error


def launch(kernel, grid, *arguments, **options):
    """Run `kernel` on CuPy's current stream. grid: 1 to 3 integers, the number of programs per axis.

    arguments: the parameters of the kernel that are not constants. Each is a contiguous array, which is passed as a
    pointer to its first element, an int, a float, None or a descriptor(); for anything else TypeError is raised.
    options: the constants by name (the parameters annotated with tl.constexpr, which must be last), and Triton's
    num_warps, num_stages, enable_fp_fusion and launch_pdl. Raises ConfigError if the kernel does not fit this GPU.
    """
    launcher().launch(kernel, grid, arguments, options)


def compile_ahead(function, *args):
    """Start to compile the kernels of function(*args) in threads, on a GPU, and do not wait for them.

    This calls function(*args), and launch() launches nothing meanwhile; everything else in the function is executed.
    A CUDA graph must be able to capture the function: no device value may determine what it launches.
    """
    launcher().compile_ahead(function, *args)


def can_overlap():
    """Whether the GPU can start a kernel before the previous one has ended (programmatic dependent launch).

    If so, kernels may be launched with launch_pdl=True.
    """
    return launcher().can_overlap()


def gpu_model():
    """((major, minor), name) of the current GPU: its compute capability, (0, 0) in the interpreter, and its name."""
    return launcher().gpu_model()


def multiprocessors():
    """The number of multiprocessors of the current GPU; 1 in the interpreter."""
    return launcher().multiprocessors()


@functools.cache
def launcher():
    """The InterpreterLauncher or GpuLauncher of this process, created at the first call."""
    return InterpreterLauncher() if interpreted() else GpuLauncher()


class InterpreterLauncher:
    """Runs kernels on the CPU, one program after another."""

    xp = np
    only_compiles = False

    def __init__(self):
        check_interpreter(import_module("triton", "Triton", "pip install triton").__version__, np.__version__)
        # one kernel at a time, because the interpreter keeps the index of the current program in a global variable
        self.lock = threading.Lock()
        faster_interpreter.install()

    def can_overlap(self):
        return False

    def compile_ahead(self, function, *args):
        """Do nothing: nothing is compiled."""

    def wait_for_threads(self):
        pass

    def gpu_model(self):
        return (0, 0), "the interpreter"

    def multiprocessors(self):
        return 1

    def launch(self, kernel, grid, arguments, options):
        arguments = [self.argument(value) for value in arguments]
        with self.lock:
            kernel[grid](*arguments, **options)

    def argument(self, value):
        """`value` as an argument for the interpreter; an array becomes a Pointer."""
        if type(value) in (int, float, type(None)):
            return value
        if not (isinstance(value, np.ndarray) or hasattr(value, "block_shape")):
            raise not_an_argument(value)
        pointer = Pointer(value) if isinstance(value, np.ndarray) else value.base
        if pointer.dtype.name == "bfloat16":
            raise ConfigError("Triton's interpreter computes bf16 wrongly: use fp32, or a GPU")
        return pointer if isinstance(value, np.ndarray) else value


class GpuLauncher:
    """Launches kernels on CuPy's current device and current stream, and caches the compiled variants."""

    def __init__(self):
        triton = import_module("triton", "Triton", "pip install triton")
        self.threads = CompileThreads(lambda text: print(text, file=sys.stderr))
        triton_start.identify_by_file_times()
        load_c_modules_one_at_a_time()
        self.threads.pool.submit(start_driver)  # during the imports, as the next one
        utils = self.threads.pool.submit(triton_utils)
        try:
            self.xp = import_module("cupy", "CuPy", f"{PIP_INSTALL}; without a GPU, {USE_INTERPRETER}")
        except ConfigError:
            if not has_driver():  # then the advice to install CuPy would not help
                raise ConfigError(f"no GPU was found: this machine has no NVIDIA driver; {USE_INTERPRETER}") from None
            raise
        triton_start.inspect_first_argument()
        self.device = self.xp.cuda.runtime.getDevice  # a function: it returns the number of the current device
        try:
            count = self.xp.cuda.runtime.getDeviceCount()
        except Exception as error:  # there is no driver, or it is too old for the CUDA version of this CuPy
            raise ConfigError(f"no GPU can be used ({first_line(error)}): {USE_INTERPRETER}") from error
        if count == 0:
            raise ConfigError(f"no GPU was found: {USE_INTERPRETER}")
        if self.capability() < MIN_CAPABILITY:
            has, needs = (".".join(map(str, pair)) for pair in (self.capability(), MIN_CAPABILITY))
            raise ConfigError(f"this GPU has compute capability {has}, the kernels need {needs}: {USE_INTERPRETER}")
        self.threads.pool.submit(triton_start.read_compiler_version, self.capability())
        triton.runtime.driver.set_active(cupy_driver(self, utils.result()))
        # Triton calls this allocator for a kernel that creates descriptors. Python frees the array right after the
        # launch. This is safe: CuPy's pool gives the memory only to arrays of the same stream, which later kernels use.
        triton.set_allocator(lambda size, alignment, stream: Pointer(self.xp.empty(size, np.int8)))
        self.compiled = {}  # {key of a variant: (the compiled kernel, its constants)}
        self.only_compiles = False  # whether launch() starts to compile in threads, and launches nothing

    def capability(self):
        """The compute capability (major, minor) of the current device."""
        return capability_of(self.xp, self.device())

    def can_overlap(self):
        return self.capability() >= PDL_CAPABILITY

    def compile_ahead(self, function, *args):
        self.only_compiles = True
        try:
            function(*args)
        finally:
            self.only_compiles = False

    def wait_for_threads(self):
        """Wait until no thread compiles a kernel."""
        self.threads.wait_for_all()

    def gpu_model(self):
        return model_of(self.xp, self.device())

    def multiprocessors(self):
        return multiprocessors_of(self.xp, self.device())

    def launch(self, kernel, grid, arguments, options):
        # id(kernel), because hashing a kernel is slow; ids stay unique, because modules keep their kernels alive
        key, values = [id(kernel), self.device(), *options.items()], []
        for value in arguments:
            value_type = type(value)
            if value_type is int:
                key.append(1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31))
            elif value_type is float or value is None:
                key.append(value_type)
            elif value_type is self.xp.ndarray:
                if not value.flags.c_contiguous:
                    raise not_contiguous(value)
                key.append((value.dtype, value.data.ptr % 16 == 0))
                value = value.data.ptr
            elif hasattr(value, "block_shape"):
                key.append((value.base.dtype, *value.block_shape))
            else:
                raise not_an_argument(value)
            values.append(value)
        variant = self.compiled.get(key := tuple(key))
        if variant is None:
            variant = self.new_variant(key, kernel, arguments, options)
        if not self.only_compiles:
            compiled, constants = variant
            compiled[(*grid, 1, 1)[:3]](*values, *constants)

    def new_variant(self, key, kernel, arguments, options):
        """The value of self.compiled[key], which is compiled now or was compiled by a thread.

        If self.only_compiles is true, a thread starts to compile it, and None is returned.
        """
        constant_numbers = list(range(len(arguments), len(kernel.arg_names)))  # of the parameters of the kernel
        if kernel.constexprs != constant_numbers:
            raise TypeError(f"{kernel.__name__}: {len(arguments)} arguments, but the constants are {kernel.constexprs}")
        arguments = [Pointer(value) if isinstance(value, self.xp.ndarray) else value for value in arguments]
        if self.only_compiles:
            arguments = [without_array(value) for value in arguments]  # or the thread would keep device memory
            compile = functools.partial(self.compile, kernel, arguments, options)
            return self.start_thread(key, compile)
        variant = self.threads.result(key) or self.compile(kernel, arguments, options)
        self.compiled[key] = variant
        return variant

    def start_thread(self, key, compile):
        """Call compile() in a thread, on the current device, unless a call with this key was started before."""
        self.threads.start(key, functools.partial(self.compile_in_thread, self.device(), compile))

    def compile_in_thread(self, device, compile):
        """Call compile() on a device. In a new thread, CUDA's current device is 0."""
        self.xp.cuda.runtime.setDevice(device)
        return compile()

    def compile(self, kernel, arguments, options):
        """(the compiled kernel, its constants in the order of its signature) of a new variant of the kernel."""
        compiled, defaults = self.load(kernel, arguments, options), kernel.signature.parameters
        names = kernel.arg_names[len(arguments) :]
        return compiled, [options[name] if name in options else defaults[name].default for name in names]

    def load(self, kernel, arguments, options):
        """Compile a variant of the kernel, or read it from Triton's cache, and load it on the current device.

        Raises ConfigError if the kernel needs more registers or shared memory than the GPU has.
        """
        from triton import OutOfResources

        try:
            # True is Triton's default; it is passed because Triton 3.9 prints a warning without it
            compiled = kernel.warmup(*arguments, grid=(1,), **{"enable_fp_fusion": True} | options)
            compiled.run  # noqa: B018  this property loads the kernel; Triton 3.6 also compiles its launcher in C
        except OutOfResources as error:
            raise does_not_fit(kernel, error) from error
        return compiled


@functools.cache
def model_of(cupy, device):
    """((major, minor), name) of a device."""
    return capability_of(cupy, device), cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()


@functools.cache
def capability_of(cupy, device):
    """The compute capability (major, minor). CuPy's own property opens the device, which takes some of its memory."""
    return tuple(cupy.cuda.runtime.deviceGetAttribute(number, device) for number in COMPUTE_CAPABILITY)


@functools.cache
def multiprocessors_of(cupy, device):
    return cupy.cuda.runtime.getDeviceProperties(device)["multiProcessorCount"]


def has_driver():
    """Whether NVIDIA's driver is installed: whether its library libcuda can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def start_driver():
    """Initialize NVIDIA's driver, which takes several tenths of a second. CuPy reports the error if this fails."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)  # ctypes releases Python's global lock


@functools.cache
def load_c_modules_one_at_a_time():
    """Let the threads load one C module of Triton at a time, and take its functions before the next one is loaded.

    Triton 3.6 compiles a C module for each signature of a kernel; its function launch() launches the kernel. All these
    modules have the same name. When Python loads such a file again, it writes the functions of the file into the module
    of this name that is in sys.modules, which may be that of another signature. If a thread took launch() from it at
    this moment, its kernel would get the launch() of another kernel: an error, or wrong arguments.
    """
    from triton.runtime import build

    load, lock = getattr(build, "_load_module_from_path", None), threading.Lock()

    def load_functions(name, path):
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    if load:  # private to Triton; Triton 3.9 still has it, but no longer a C module for each signature
        build._load_module_from_path = load_functions


def triton_utils():
    """Triton's CudaUtils, a module in C. With an empty cache Triton first compiles it, which needs no GPU.

    Triton's own driver, which PyTorch uses, creates it too. A second CudaUtils() would load the C module again, and
    kernels that were loaded before would refuse descriptors of its new types.
    """
    from triton.backends.nvidia.driver import CudaUtils

    existing = getattr(CudaUtils, "instance", None)  # without its functions if an earlier call has failed
    return existing if hasattr(existing, "load_binary") else CudaUtils()


def cupy_driver(gpu, utils):
    """An instance of Triton's class CudaDriver that uses CuPy's current device and stream.

    gpu: a GpuLauncher. utils: from triton_utils().
    """
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher

    class CupyDriver(CudaDriver):
        def __init__(self):
            # no super().__init__(): in Triton 3.6 it imports PyTorch; in 3.9 it launches on the default stream
            self.utils, self.launcher_cls = utils, CudaLauncher
            self.get_current_device = gpu.device
            self.set_current_device = gpu.xp.cuda.runtime.setDevice
            self.get_current_stream = lambda device: gpu.xp.cuda.get_current_stream().ptr
            self.get_device_capability = functools.partial(capability_of, gpu.xp)

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

    # The interpreter calls these methods to copy a PyTorch tensor to the host and back. Here they do nothing, because
    # a NumPy array is on the host already.
    untyped_storage = cpu = new_empty = set_ = copy_ = storage_offset = size = stride = itself


def without_array(argument):
    """This argument of a launch, whose Pointer, or that of its descriptor, now no longer keeps an array alive."""
    pointer = getattr(argument, "base", argument)
    if isinstance(pointer, Pointer):
        pointer.array = None
    return argument


def descriptor(array, block_shape):
    """A tensor descriptor of `array` for launch(): the TMA unit of the GPU then copies blocks of `block_shape`."""
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


def import_module(module, name, remedy):
    """Import `module` and return it; raises ConfigError with `name` and `remedy` in the message if that fails."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # not only ImportError: a CuPy for another CUDA version raises other errors
        raise ConfigError(f"{name} is needed but cannot be imported ({first_line(error)}): {remedy}") from error


def check_interpreter(triton, numpy):
    """Raise ConfigError for versions of Triton and NumPy with which the interpreter fails: at a loop over a tensor."""
    if np.lib.NumpyVersion(numpy) >= "2.5.0" and tuple(map(int, triton.split(".")[:2])) < (3, 9):
        raise ConfigError(
            f"the interpreter of Triton {triton} does not work with NumPy {numpy}: "
            'pip install "numpy<2.5", or Triton 3.9'
        )


def does_not_fit(kernel, error):
    """A ConfigError for triton.OutOfResources: a kernel that needs too many registers or too much shared memory."""
    return ConfigError(
        f"{kernel_name(kernel)} does not fit this GPU ({error.name}: {error.required:,} needed, {error.limit:,} "
        f"available): use --precision bf16, whose tiles are smaller, or a GPU of compute capability 9.0"
    )


def kernel_name(function):
    """The name of a kernel with its file in its package, such as "attention.forward.forward_kernel"."""
    return f"{function.__module__.partition('.')[2] or function.__module__}.{function.__name__}"


def first_line(error):
    """The first line of the message of an exception, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
