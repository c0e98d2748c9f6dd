"""Matrix products of CuPy arrays by NVIDIA's library cublasLt, called through ctypes; a CUDA graph can contain them.

    gemm = CublasLt(cupy, load_library(), tuner)
    gemm.matmul(y, x, w, bias=b)                                      # y (N,K) = x (N,C) w (C,K) + b (K)
    gemm.matmul(dx, dy, w, trans_b=True)                              # dx (N,C) = dy (N,K) w'
    gemm.matmul(dw, x, dy, trans_a=True, accumulate=True)             # dw (C,K) += x' dy, dw in fp32
    gemm.matmul(logits, x, wte, trans_b=True)                         # logits (N,V) = x (N,C) wte', wte (V,C)
    gemm.matmul(y, x, w, bias=b, activation="gelu", aux=h)            # y = gelu(h), h = x w + b, stored in h
    gemm.matmul(dh, dy, w2, trans_b=True, activation="dgelu", aux=h)  # dh = (dy w2') * gelu'(h)

An epilogue is an operation that cublasLt applies to the result before it stores it: here the bias, GELU ("gelu"), or
the multiplication by the derivative of GELU ("dgelu").

cublasLt uses the column-major layout, CuPy the row-major layout. A row-major (R, S) matrix has the same bytes as its
column-major transpose (S, R). Therefore out = a b is computed as out' = b' a': b is the first operand, a the second,
and no data is moved. cublasLt adds element i of the bias to row i of its result; this row is column i of `out`, as a
linear layer requires.

CuPy's own matmul cannot be captured in a CUDA graph. This matmul can, because it neither allocates memory nor
synchronizes: descriptors and the algorithm are prepared once per kind of product, in a MatmulPlan.

nvmath-python 1.0 was tried in the place of ctypes (H200, products of GPT-2 124M): equal bits, also captured, and 2 to 4
us less for a launch, but its import takes 0.37 s after CuPy's, and it would replace 95 lines of this file. Its class
Matmul allocates `aux` at each call, so a GELU product takes 59 instead of 33 us of the host.
"""

# N rows and K columns of the result; C terms of each sum; ld (leading dimension): elements from one row to the next

import ctypes
from ctypes import byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from gpt2core.errors import ConfigError, ShapeError
from stage2_cuda.runtime import triton_launch
from stage2_cuda.tuning.tuner import capture_calls, time_usable, timing_stream

# -- the library, with the names of cublasLt.h -------------------------------------------------------------------------

SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
SIGNATURES = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmulAlgoCheck": (c_void_p,) * 8,
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}

TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
# cublasComputeType_t: CUBLAS_COMPUTE_32F, and 32F_FAST_TF32, which rounds the mantissas of fp32 operands to 10 bits.
# cublasLt has no mode that computes an fp32 product as three TF32 products. The similar mode 32F_EMULATED_16BFX9 needs
# a GPU newer than Hopper.
COMPUTE = {"fp32": 68, "tf32": 77}

# Attributes of a product as (number, C type), from cublasLtMatmulDescAttributes_t
TRANS_A, TRANS_B, EPILOGUE, BIAS_TYPE = (3, c_int32), (4, c_int32), (7, c_uint32), (26, c_int32)
BIAS_POINTER, AUX_POINTER, AUX_LD = (8, c_void_p), (11, c_void_p), (12, c_int64)
# Attributes of the search for algorithms, from cublasLtMatmulPreferenceAttributes_t
WORKSPACE_BYTES, REDUCTIONS = (1, c_uint64), (3, c_uint32)
ALIGNMENT_A, ALIGNMENT_B, ALIGNMENT_C, ALIGNMENT_D = ((number, c_uint32) for number in (5, 6, 7, 8))

# Bits of cublasLtEpilogue_t. GELU is the tanh approximation, as in GPT-2; DGELU multiplies by its derivative at aux;
# AUX stores or reads aux. DGELU_BGRAD, which also computes the bias gradient, is not used: it is three times slower.
NO_EPILOGUE, RELU, BIAS, GELU, DGELU, AUX = 1, 2, 4, 32, 64, 128
ACTIVATIONS = {None: 0, "relu": RELU, "gelu": GELU, "dgelu": DGELU}

# Bits of cublasLtReductionScheme_t. An algorithm may divide the sum over C into parts; the scheme says how the parts
# are added. COMPUTE_TYPE (2) adds fp32 numbers in the workspace in a fixed order, so equal inputs give equal bits. The
# others, INPLACE (1) and OUTPUT_TYPE (4), add in the type of the result, so a 16-bit result is rounded after each part.
# INPLACE has no fixed order.
REDUCE_IN_COMPUTE_TYPE, ANY_REDUCTION = 2, 7

Algorithm = c_uint64 * 8  # cublasLtMatmulAlgo_t: opaque; valid in any process with the same GPU and library version


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and the size of the workspace that it needs."""

    _fields_ = [("algorithm", Algorithm), ("workspace_bytes", c_size_t), ("state", c_int)]
    _fields_ += [("waves", c_float), ("reserved", c_int * 4)]


def load_library():
    """libcublasLt as a ctypes library. cuda-pathfinder (a dependency of CuPy) or the dynamic loader finds it.

    Raises ConfigError if neither finds it.
    """
    names = list(SONAMES)
    try:
        from cuda import pathfinder

        names.insert(0, pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path or SONAMES[0])
    except (ImportError, RuntimeError):  # there is no cuda-pathfinder, or it found nothing: try the loader
        pass
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        for function, types in SIGNATURES.items():
            getattr(library, function).argtypes = types
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtGetStatusName.restype = c_char_p
        return library
    raise ConfigError(
        f"no {' or '.join(SONAMES)} was found: pip install nvidia-cublas (CUDA 13) or nvidia-cublas-cu12 (CUDA 12)"
    )


# -- kinds of products -------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """The properties of an array on which the choice of an algorithm depends."""

    rows: int
    columns: int
    ld: int
    dtype: np.dtype
    alignment: int  # bytes: the largest power of two that divides the address, limited to max_alignment

    def __str__(self):
        return f"{self.dtype}({self.rows}, {self.columns}; ld {self.ld}, aligned to {self.alignment})"


def matrix(array, max_alignment):
    """The Matrix of a 2-D array; raises ShapeError unless its rows are contiguous. max_alignment: a power of two."""
    if array.ndim == 2 and array.size:
        (rows, columns), (row_stride, column_stride) = array.shape, array.strides
        ld, remainder = divmod(row_stride, array.itemsize)
        if (columns == 1 or column_stride == array.itemsize) and (rows == 1 or (ld >= columns and remainder == 0)):
            bits = array.data.ptr | max_alignment
            return Matrix(rows, columns, max(ld, columns), array.dtype, bits & -bits)  # the lowest bit that is set
    raise ShapeError(
        f"a matrix with contiguous rows is needed, not shape {array.shape} with strides {array.strides}: "
        "to multiply by a transpose pass the array itself with trans_a or trans_b"
    )


class Problem(NamedTuple):
    """One kind of product: its matrices and the options of matmul(). str(problem) is the key in the tuning cache."""

    out: Matrix
    a: Matrix
    b: Matrix
    bias: Matrix | None
    aux: Matrix | None
    trans_a: bool = False
    trans_b: bool = False
    activation: str | None = None
    accumulate: bool = False
    compute: str = "fp32"

    def __str__(self):
        words = [f"{self.out} {'+' * self.accumulate}= {self.a}{'^T' * self.trans_a} @ {self.b}{'^T' * self.trans_b}"]
        words += [f"{name} {value}" for name, value in (("bias", self.bias), ("aux", self.aux)) if value]
        return ", ".join([*words, *[self.activation] * bool(self.activation), self.compute])

    def check(self):
        """Raise ShapeError, TypeError or ValueError unless the matrices and the options match."""
        out, a, b, bias, aux = self[:5]
        n, c = (a.columns, a.rows) if self.trans_a else (a.rows, a.columns)
        c2, k = (b.columns, b.rows) if self.trans_b else (b.rows, b.columns)  # c2 must equal c
        if c != c2 or out[:2] != (n, k) or (bias and bias.columns != k) or (aux and (aux[:2] != (n, k) or aux.ld % 8)):
            raise ShapeError(f"the shapes do not match, or aux's ld is not a multiple of 8: {self}")
        if a.dtype != b.dtype or a.dtype.name not in TYPES or out.dtype not in (a.dtype, np.dtype(np.float32)):
            raise TypeError(f"a and b must have one type of {', '.join(TYPES)}, and out that type or float32: {self}")
        if any(argument and argument.dtype != out.dtype for argument in (bias, aux)):
            raise TypeError(f"bias and aux must have out's type: {self}")
        if self.compute not in COMPUTE or (self.compute == "tf32" and a.dtype != np.float32):
            raise TypeError(f"compute must be fp32, or tf32 for float32 operands: {self}")
        overwrites = not self.accumulate
        allowed = {None: not aux, "relu": not aux, "gelu": overwrites, "dgelu": aux and not bias and overwrites}
        if not allowed.get(self.activation):
            raise ValueError(
                "activation must be None or relu without aux, gelu without accumulate, or dgelu with aux but without "
                f"bias and accumulate: {self}"
            )


@dataclass
class MatmulPlan:
    """The cublasLt descriptors and the algorithm of a Problem, prepared once and used at every call."""

    operation: c_void_p
    out: c_void_p
    a: c_void_p
    b: c_void_p
    algorithm: Algorithm | None = None


# -- the products ------------------------------------------------------------------------------------------------------


class CublasLt:
    """Matrix products on the current device and CuPy's current stream.

    library: from load_library(). tuner: a Tuner, which stores {str(Problem): algorithm in hexadecimal}. If the tuner
    times nothing (tuned_for is None), the first algorithm that cublasLt proposes is used, so that every run and every
    rank computes the same bits. All streams share one workspace of workspace_bytes, except that each stream given to
    add_workspace() has its own.
    """

    def __init__(self, cupy, library, tuner, *, workspace_bytes=32 << 20):
        self._cupy, self._library, self.tuner = cupy, library, tuner
        self._deterministic = tuner.tuned_for is None
        # cublasLt may have more algorithms for addresses with a higher alignment than 16 bytes. Then the bits of a
        # product depend on the addresses of its operands.
        self._max_alignment = 16 if self._deterministic else 256
        self._handle = self._create("cublasLtCreate")  # lives as long as the process
        self._workspace = cupy.empty(workspace_bytes, np.uint8)
        self._workspaces = {}  # {address of a stream: its own workspace}
        self._plans = {}
        # cublasLt computes alpha a b + beta out; alpha and beta are fp32 for all types of a and b
        self._one, self._zero = c_float(1), c_float(0)

    def add_workspace(self, stream):
        """Give this stream its own workspace, so that its products may run concurrently with those of other streams."""
        self._workspaces[stream.ptr] = self._cupy.empty_like(self._workspace)

    def matmul(self, out, a, b, **options):
        """out (N, K) = activation(op(a) (N, C) @ op(b) (C, K) + bias (K)); op is the transpose if trans_a or trans_b.

        a, b: float32, float16 or bfloat16 arrays with contiguous rows (views into wider arrays are allowed). out has
        their type, or float32. Sums are float32. options: bias; aux; trans_a; trans_b; accumulate: add to the contents
        of out before the activation; compute: "fp32", or "tf32" for float32 operands; activation: "relu"; "gelu", which
        also stores its input in aux (N, K) if given; or "dgelu", which multiplies the product by gelu'(aux). bias and
        aux have out's type.

        Raises ShapeError, TypeError or ValueError if these do not match. Raises RuntimeError if cublasLt fails, or if a
        new kind of product must be timed while the stream is captured: run the product once before the capture.
        Computes nothing during triton_launch.compile_ahead().
        """
        if triton_launch.launcher().only_compiles:
            return
        problem, plan, addresses = self._plan(out, a, b, **options)
        self._launch(problem, plan, addresses, plan.algorithm)

    def clear_plans(self):
        """Forget all algorithms, after the tuner has loaded other choices; the next call looks up or chooses again."""
        self._plans.clear()

    def _plan(self, out, a, b, bias=None, aux=None, **options):
        """(Problem, MatmulPlan, addresses of out, a, b, bias and aux) of a product; the plan is new or from a cache."""
        bound = self._max_alignment
        arrays = (out, a, b, None if bias is None else bias[None], aux)
        problem = Problem(*(None if array is None else matrix(array, bound) for array in arrays), **options)
        addresses = [None if array is None else array.data.ptr for array in arrays]
        plan = self._plans.get(problem)
        if plan is None:
            problem.check()
            plan = self._create_plan(problem)
            self._set_pointers(plan, addresses)  # cublasLt's heuristic reads the alignment of bias and aux
            plan.algorithm = self._recorded_algorithm(problem, plan) or self._choose_algorithm(problem, plan)
            self._plans[problem] = plan
        return problem, plan, addresses

    def _launch(self, problem, plan, addresses, algorithm):
        self._set_pointers(plan, addresses)
        out, a, b, *_ = addresses
        beta = self._one if problem.accumulate else self._zero  # with beta 0 cublasLt does not read out
        stream = self._cupy.cuda.get_current_stream().ptr
        workspace = self._workspaces.get(stream, self._workspace)
        self._call(
            "cublasLtMatmul",
            *(self._handle, plan.operation, byref(self._one), b, plan.b, a, plan.a, byref(beta)),
            *(out, plan.out, out, plan.out, algorithm, workspace.data.ptr, workspace.nbytes, stream),
            about=problem,
        )

    # -- descriptors ---------------------------------------------------------------------------------------------------

    def _create_plan(self, problem):
        """A MatmulPlan without its algorithm. a and b are swapped: see the docstring of this file."""
        operation = self._create("cublasLtMatmulDescCreate", COMPUTE[problem.compute], TYPES["float32"])
        epilogue = ACTIVATIONS[problem.activation] | BIAS * bool(problem.bias) | AUX * bool(problem.aux)
        attributes = {TRANS_A: problem.trans_b, TRANS_B: problem.trans_a, EPILOGUE: epilogue or NO_EPILOGUE}
        if problem.bias:
            attributes[BIAS_TYPE] = TYPES[problem.out.dtype.name]
        if problem.aux:
            attributes[AUX_LD] = problem.aux.ld
        self._set("cublasLtMatmulDescSetAttribute", operation, attributes)
        return MatmulPlan(operation, *(self._layout(operand) for operand in problem[:3]))

    def _layout(self, m):
        """The layout descriptor of a Matrix m."""
        return self._create("cublasLtMatrixLayoutCreate", TYPES[m.dtype.name], m.columns, m.rows, m.ld)

    def _set_pointers(self, plan, addresses):
        """Set the addresses of bias and aux, which cublasLt reads from the descriptor, not from the call."""
        pointers = zip((BIAS_POINTER, AUX_POINTER), addresses[3:], strict=True)
        given = {attribute: address for attribute, address in pointers if address}
        self._set("cublasLtMatmulDescSetAttribute", plan.operation, given)

    # -- algorithms ----------------------------------------------------------------------------------------------------

    def _recorded_algorithm(self, problem, plan):
        """The algorithm that the tuner has stored for this problem; None if there is none or if cublasLt rejects it."""
        try:
            chosen = bytes.fromhex(self.tuner.tuned.get(str(problem), ""))
        except ValueError:
            return None
        if len(chosen) != sizeof(Algorithm):
            return None
        algorithm, result = Algorithm.from_buffer_copy(chosen), HeuristicResult()
        operands = (self._handle, plan.operation, plan.b, plan.a, plan.out, plan.out)
        status = self._library.cublasLtMatmulAlgoCheck(*operands, algorithm, byref(result))
        return algorithm if status == 0 and result.workspace_bytes <= self._workspace.nbytes else None

    def _choose_algorithm(self, problem, plan):
        """Choose an algorithm, store it in the tuner and return it. It is chosen by timing unless timing is off."""
        candidates = self._candidates(problem, plan)
        if self._deterministic or len(candidates) == 1:
            algorithm = candidates[0]
        elif self.tuner.capturing():
            raise RuntimeError(f"no timing during a stream capture: run this product once before: {problem}")
        else:
            self.tuner.announce()
            triton_launch.launcher().wait_for_threads()  # they would slow the launches that are timed
            algorithm = self._fastest(problem, plan, candidates)
        self.tuner.keep(str(problem), bytes(algorithm).hex())
        return algorithm

    def _candidates(self, problem, plan, count=16):
        """Up to `count` algorithms. cublasLt sorts them: it expects the first algorithm to be the fastest."""
        needs_order = self._deterministic or problem.out.dtype.itemsize < 4
        preference = self._create("cublasLtMatmulPreferenceCreate")
        attributes = {
            WORKSPACE_BYTES: self._workspace.nbytes,
            REDUCTIONS: REDUCE_IN_COMPUTE_TYPE if needs_order else ANY_REDUCTION,
            ALIGNMENT_A: problem.b.alignment,
            ALIGNMENT_B: problem.a.alignment,
            ALIGNMENT_C: problem.out.alignment,
            ALIGNMENT_D: problem.out.alignment,
        }
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, attributes)
        results, found = (HeuristicResult * count)(), c_int()
        operands = (self._handle, plan.operation, plan.b, plan.a, plan.out, plan.out, preference)
        self._call("cublasLtMatmulAlgoGetHeuristic", *operands, count, results, byref(found), about=problem)
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [Algorithm.from_buffer_copy(result.algorithm) for result in results[: found.value] if not result.state]
        if not usable:
            raise RuntimeError(f"cublasLt has no algorithm for {problem}")
        return usable

    def _fastest(self, problem, plan, candidates):
        """The candidate that takes the shortest time, measured with scratch memory as operands and result."""
        # calls per CUDA graph: about 1e12 floating-point operations, at most 20 calls
        calls = int(min(max(1e12 // (2 * problem.a.rows * problem.a.columns * problem.out.columns), 1), 20))

        def graph_of(algorithm):
            launch = partial(self._launch, problem, plan, addresses, algorithm)
            launch()  # also loads the kernel; fails if cublasLt proposed the algorithm but cannot run it
            return capture_calls(stream, launch, calls)

        with timing_stream(self._cupy) as stream:
            scratch = [operand and self._scratch(operand) for operand in problem[:5]]
            addresses = [None if memory is None else memory.data.ptr for memory in scratch]
            usable, times = time_usable(self._cupy, stream, candidates, graph_of)
        return usable[int(times.argmin())]

    def _scratch(self, m):
        """Device memory for the Matrix m, filled with random numbers, because a GPU multiplies zeros faster."""
        numbers = np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32).astype(m.dtype)
        block = self._cupy.asarray(numbers.view(np.uint8))
        memory = self._cupy.empty(m.rows * m.ld * m.dtype.itemsize, np.uint8)
        for start in range(0, memory.size, block.size):
            memory[start : start + block.size] = block[: memory.size - start]
        return memory

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(self, function, *arguments, about=""):
        """Call a function of the library; raises RuntimeError, with `about` in the message, if it returns an error."""
        status = getattr(self._library, function)(*arguments)
        if status:
            name = self._library.cublasLtGetStatusName(status).decode()
            raise RuntimeError(f"{function} returned {name}{' for ' * bool(about)}{about}")

    def _create(self, function, *arguments):
        """The handle of a new object of the library."""
        handle = c_void_p()
        self._call(function, byref(handle), *arguments)
        return handle

    def _set(self, function, target, attributes):
        """Set the attributes {(number, C type): value} of an object of the library."""
        for (number, kind), value in attributes.items():
            self._call(function, target, number, byref(kind(value)), sizeof(kind), about=f"attribute {number}")
