"""Matrix products by NVIDIA's cublasLt, called through ctypes on CuPy arrays, with fused epilogues, in CUDA graphs too.

    gemm = CublasLt(cupy, load_library(), tuner)
    gemm.matmul(y, x, w, bias=b)                                      # y (N,K) = x (N,C) w (C,K) + b (K)
    gemm.matmul(dx, dy, w, trans_b=True)                              # dx (N,C) = dy (N,K) w'
    gemm.matmul(dw, x, dy, trans_a=True, accumulate=True)             # dw (C,K) += x' dy, dw in fp32
    gemm.matmul(logits, x, wte, trans_b=True)                         # logits (N,V) = x (N,C) wte', wte (V,C)
    gemm.matmul(y, x, w, bias=b, activation="gelu", aux=h)            # y = gelu(h), h = x w + b, kept for
    gemm.matmul(dh, dy, w2, trans_b=True, activation="dgelu", aux=h)  # dh = (dy w2') * gelu'(h)

cublasLt stores matrices by columns, we by rows, and a (R, S) matrix by rows is, byte for byte, its transpose (S, R) by
columns. So out = a b is asked for as out' = b' a': b goes first, then a, and nothing is moved. cublasLt adds one bias
to each row of its result, which is one to each column of ours: just the bias of a linear layer.

CuPy's own matmul refuses to be captured; this one neither allocates nor waits: all is decided before, in a `Plan`.
"""

# N, K rows and columns of the result, C what is summed over, ld elements from one row to the next

import ctypes
from ctypes import byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from gpt2core.errors import ConfigError
from gpt2core.tensor import ShapeError
from stage2_cuda.tuning import tuner as autotune

# -- the library, in the words of cublasLt.h ---------------------------------------------------------------------------

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
# cublasComputeType_t: CUBLAS_COMPUTE_32F, and 32F_FAST_TF32, which rounds fp32 operands to 10 bits on the way in. A
# three-pass TF32 is not among them; the like of it, 32F_EMULATED_16BFX9, is for the generation after Hopper.
COMPUTE = {"fp32": 68, "tf32": 77}

# Attributes, their number and C type: of cublasLtMatmulDescAttributes_t, then of cublasLtMatmulPreferenceAttributes_t.
TRANS_A, TRANS_B, EPILOGUE, BIAS_TYPE = (3, c_int32), (4, c_int32), (7, c_uint32), (26, c_int32)
BIAS_POINTER, AUX_POINTER, AUX_LD = (8, c_void_p), (11, c_void_p), (12, c_int64)
WORKSPACE_BYTES, REDUCTIONS = (1, c_uint64), (3, c_uint32)
ALIGNMENT_A, ALIGNMENT_B, ALIGNMENT_C, ALIGNMENT_D = ((number, c_uint32) for number in (5, 6, 7, 8))

# cublasLtEpilogue_t is made of bits. GELU is the tanh approximation, GPT-2's own; DGELU its derivative at aux. There is
# a DGELU_BGRAD, which gives the bias gradient too, but at a third of the speed.
NO_EPILOGUE, BIAS, GELU, DGELU, AUX = 1, 4, 32, 64, 128
ACTIVATIONS = {None: 0, "gelu": GELU, "dgelu": DGELU}

# cublasLtReductionScheme_t: how the parts of a product split along C are added. COMPUTE_TYPE: as fp32 in the workspace,
# in a fixed order, so twice the same is the same. The others (INPLACE 1, OUTPUT_TYPE 4) add in the type of the result,
# which would round a 16-bit one once a part, and INPLACE promises no order.
COMPUTE_TYPE, ANY_REDUCTION = 2, 7

Algorithm = c_uint64 * 8  # cublasLtMatmulAlgo_t: opaque, and good for any process with this GPU and this library


class Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and what it takes."""

    _fields_ = [("algorithm", Algorithm), ("workspace_bytes", c_size_t), ("state", c_int)]
    _fields_ += [("waves", c_float), ("reserved", c_int * 4)]


def load_library():
    """libcublasLt, where cuda-pathfinder (which comes with CuPy) or the loader finds it; ConfigError where neither."""
    names = list(SONAMES)
    try:
        from cuda import pathfinder

        names.insert(0, pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path or SONAMES[0])
    except (ImportError, RuntimeError):  # no pathfinder, or it found nothing; the loader may know another place
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


# -- what is multiplied ------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """All of an array that matters for the choice of an algorithm, which is all but its address."""

    rows: int
    columns: int
    ld: int
    dtype: np.dtype
    alignment: int  # bytes: the largest power of two, up to a bound, that divides the address

    def __str__(self):
        return f"{self.dtype}({self.rows}, {self.columns}; ld {self.ld}, aligned to {self.alignment})"


def matrix(array, bound):
    """An array with contiguous rows as a Matrix; ShapeError where it is none. `bound` in bytes, a power of two."""
    if array.ndim == 2 and array.size:
        (rows, columns), (row_step, step), address = array.shape, array.strides, array.data.ptr | bound
        ld, rest = divmod(row_step, array.itemsize)
        if (columns == 1 or step == array.itemsize) and (rows == 1 or (ld >= columns and rest == 0)):
            return Matrix(rows, columns, max(ld, columns), array.dtype, address & -address)
    raise ShapeError(
        f"a matrix with contiguous rows is needed, not shape {array.shape} with strides {array.strides}: "
        "for the transpose of one give the array itself with trans_a or trans_b"
    )


class Problem(NamedTuple):
    """One kind of product, matmul()'s options last. As text it is the key of the cache, and what an error names."""

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
        """Raise ShapeError, TypeError or ValueError where the operands do not fit together."""
        out, a, b, bias, aux = self[:5]
        n, c = (a.columns, a.rows) if self.trans_a else (a.rows, a.columns)
        c2, k = (b.columns, b.rows) if self.trans_b else (b.rows, b.columns)
        if c != c2 or out[:2] != (n, k) or (bias and bias.columns != k) or (aux and (aux[:2] != (n, k) or aux.ld % 8)):
            raise ShapeError(f"the shapes do not fit, or 8 does not divide aux's ld: {self}")
        if a.dtype != b.dtype or a.dtype.name not in TYPES or out.dtype not in (a.dtype, np.dtype(np.float32)):
            raise TypeError(f"a and b must be of one type of {', '.join(TYPES)}, and out of that or float32: {self}")
        if any(other and other.dtype != out.dtype for other in (bias, aux)):
            raise TypeError(f"bias and aux must be of out's type: {self}")
        if self.compute not in COMPUTE or (self.compute == "tf32" and a.dtype != np.float32):
            raise TypeError(f"compute is fp32, or for float32 operands tf32: {self}")
        fits = {None: not aux, "gelu": not self.accumulate, "dgelu": aux and not bias and not self.accumulate}
        if not fits.get(self.activation):
            raise ValueError(f"activation: None has no aux, gelu no accumulate, dgelu an aux and no more: {self}")


@dataclass
class Plan:
    """What a Problem needs at each call: descriptors made once, and the algorithm chosen once."""

    operation: c_void_p
    out: c_void_p
    a: c_void_p
    b: c_void_p
    algorithm: Algorithm | None = None


# -- the products ------------------------------------------------------------------------------------------------------


class CublasLt:
    """Products on the current device and CuPy's current stream. Those of one stream share a workspace; see serve().

    library: from load_library(). tuner: an autotune.Tuner, whose choices are {str(Problem): algorithm in hex}. One that
    is made for nothing times nothing: then cublasLt's first proposal is taken, so that every run and every rank
    computes the same bits.
    """

    def __init__(self, cupy, library, tuner, *, workspace_bytes=32 << 20):
        self._cupy, self._library, self.tuner = cupy, library, tuner
        self._deterministic = tuner.tuned_for is None
        # The widest alignment to be told apart. More than 16 bytes may allow more algorithms, but then the bits of a
        # product depend on where in memory its operands lie.
        self._alignment = 16 if self._deterministic else 256
        self._handle = self._create("cublasLtCreate")  # lives as long as the process
        self._workspace = cupy.empty(workspace_bytes, np.uint8)
        self._workspaces = {}  # of streams whose products run beside the others
        self._plans = {}
        self._one, self._zero = c_float(1), c_float(0)  # fp32 whatever the operands are

    def serve(self, stream):
        """Give the products of this stream a workspace of their own, so that they may run beside those of others."""
        self._workspaces[stream.ptr] = self._cupy.empty_like(self._workspace)

    def matmul(self, out, a, b, **options):
        """out (N, K) = activation(op(a) (N, C) @ op(b) (C, K) + bias (K)), op the transpose where trans_a or trans_b.

        Arrays of fp32, fp16 or bf16 with contiguous rows (views into wider ones are fine); 16-bit operands are summed
        in fp32, and out is of their type or fp32. options: bias; trans_a, trans_b; accumulate, for out += ...; compute,
        "fp32" or for fp32 operands "tf32"; activation: "gelu", which leaves its input in aux (N, K) if there is one, or
        "dgelu", which multiplies by gelu'(aux). bias and aux are of out's type.

        Raises ShapeError, TypeError or ValueError where these do not fit; RuntimeError where cublasLt cannot, and where
        a stream is being captured and the product is new, as nothing can be timed then: run it once before.
        """
        problem, plan, addresses = self._plan(out, a, b, **options)
        self._launch(problem, plan, addresses, plan.algorithm)

    def plan_anew(self):
        """Compute by what the tuner has adopted, also what has been computed by its own choices before."""
        self._plans.clear()

    def _plan(self, out, a, b, bias=None, aux=None, **options):
        arrays = (out, a, b, None if bias is None else bias[None], aux)
        problem = Problem(*(None if array is None else matrix(array, self._alignment) for array in arrays), **options)
        addresses = [None if array is None else array.data.ptr for array in arrays]
        plan = self._plans.get(problem)
        if plan is None:
            problem.check()
            plan = self._describe(problem)
            self._point(plan, addresses)  # the heuristic looks at their alignment
            plan.algorithm = self._chosen_before(problem, plan) or self._choose(problem, plan)
            self._plans[problem] = plan
        return problem, plan, addresses

    def _launch(self, problem, plan, addresses, algorithm):
        self._point(plan, addresses)
        out, a, b, *_ = addresses
        beta = self._one if problem.accumulate else self._zero  # with 0 the old values are not even read
        stream = self._cupy.cuda.get_current_stream().ptr
        workspace = self._workspaces.get(stream, self._workspace)
        self._call(
            "cublasLtMatmul",
            *(self._handle, plan.operation, byref(self._one), b, plan.b, a, plan.a, byref(beta)),
            *(out, plan.out, out, plan.out, algorithm, workspace.data.ptr, workspace.nbytes, stream),
            about=problem,
        )

    # -- descriptors ---------------------------------------------------------------------------------------------------

    def _describe(self, problem):
        """Plan without an algorithm. a and b change places here, see the head of this file."""
        operation = self._create("cublasLtMatmulDescCreate", COMPUTE[problem.compute], TYPES["float32"])
        epilogue = ACTIVATIONS[problem.activation] | BIAS * bool(problem.bias) | AUX * bool(problem.aux)
        attributes = {TRANS_A: problem.trans_b, TRANS_B: problem.trans_a, EPILOGUE: epilogue or NO_EPILOGUE}
        if problem.bias:
            attributes[BIAS_TYPE] = TYPES[problem.out.dtype.name]
        if problem.aux:
            attributes[AUX_LD] = problem.aux.ld
        self._set("cublasLtMatmulDescSetAttribute", operation, attributes)
        return Plan(operation, *(self._layout(operand) for operand in problem[:3]))

    def _layout(self, m):
        return self._create("cublasLtMatrixLayoutCreate", TYPES[m.dtype.name], m.columns, m.rows, m.ld)

    def _point(self, plan, addresses):
        """Say where bias and aux are: cublasLt takes these two addresses with the descriptor, not with the call."""
        given = {attribute: at for attribute, at in zip((BIAS_POINTER, AUX_POINTER), addresses[3:], strict=True) if at}
        self._set("cublasLtMatmulDescSetAttribute", plan.operation, given)

    # -- algorithms ----------------------------------------------------------------------------------------------------

    def _chosen_before(self, problem, plan):
        """The algorithm that the tuner's choices have for this problem, if cublasLt still accepts it."""
        try:
            chosen = bytes.fromhex(self.tuner.tuned.get(str(problem), ""))
        except ValueError:
            return None
        if len(chosen) != sizeof(Algorithm):
            return None
        algorithm, result = Algorithm.from_buffer_copy(chosen), Result()
        operands = (self._handle, plan.operation, plan.b, plan.a, plan.out, plan.out)
        status = self._library.cublasLtMatmulAlgoCheck(*operands, algorithm, byref(result))
        return algorithm if status == 0 and result.workspace_bytes <= self._workspace.nbytes else None

    def _choose(self, problem, plan):
        candidates = self._candidates(problem, plan)
        if self._deterministic or len(candidates) == 1:
            algorithm = candidates[0]
        elif self.tuner.capturing():
            raise RuntimeError(f"in a stream capture nothing can be timed: run this product once before: {problem}")
        else:
            self.tuner.announce()
            algorithm = self._fastest(problem, plan, candidates)
        self.tuner.keep(str(problem), bytes(algorithm).hex())
        return algorithm

    def _candidates(self, problem, plan, count=16):
        """Up to `count` algorithms, the one that cublasLt expects to be fastest first."""
        ordered = self._deterministic or problem.out.dtype.itemsize < 4
        preference = self._create("cublasLtMatmulPreferenceCreate")
        attributes = {
            WORKSPACE_BYTES: self._workspace.nbytes,
            REDUCTIONS: COMPUTE_TYPE if ordered else ANY_REDUCTION,
            ALIGNMENT_A: problem.b.alignment,
            ALIGNMENT_B: problem.a.alignment,
            ALIGNMENT_C: problem.out.alignment,
            ALIGNMENT_D: problem.out.alignment,
        }
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, attributes)
        results, found = (Result * count)(), c_int()
        operands = (self._handle, plan.operation, plan.b, plan.a, plan.out, plan.out, preference)
        self._call("cublasLtMatmulAlgoGetHeuristic", *operands, count, results, byref(found), about=problem)
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [Algorithm.from_buffer_copy(result.algorithm) for result in results[: found.value] if not result.state]
        if not usable:
            raise RuntimeError(f"cublasLt has no algorithm for {problem}")
        return usable

    def _fastest(self, problem, plan, candidates):
        """The candidate that runs shortest, on scratch memory."""
        cuda = self._cupy.cuda
        cuda.runtime.deviceSynchronize()  # the workspace may be at work on another stream
        calls = int(min(max(1e12 // (2 * problem.a.rows * problem.a.columns * problem.out.columns), 1), 20))
        stream, graphs, ready = cuda.Stream(non_blocking=True), [], []
        with cuda.using_allocator(None), stream:  # not out of the pool, whose peak is shown to the user
            scratch = [operand and self._scratch(operand) for operand in problem[:5]]
            addresses = [None if memory is None else memory.data.ptr for memory in scratch]
            for algorithm in candidates:
                launch = partial(self._launch, problem, plan, addresses, algorithm)
                try:
                    launch()  # loads the kernel, too
                except RuntimeError as error:  # proposed, yet refused
                    refusal = error
                    continue
                graphs.append(autotune.recorded(stream, launch, calls))
                ready.append(algorithm)
            if not ready:
                raise refusal
            return ready[int(autotune.medians(self._cupy, stream, graphs).argmin())]

    def _scratch(self, m):
        """Device memory as large as `m`, full of random numbers: on zeros a GPU draws less power and runs faster."""
        numbers = np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32).astype(m.dtype)
        block = self._cupy.asarray(numbers.view(np.uint8))
        memory = self._cupy.empty(m.rows * m.ld * m.dtype.itemsize, np.uint8)
        for start in range(0, memory.size, block.size):
            memory[start : start + block.size] = block[: memory.size - start]
        return memory

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _call(self, function, *arguments, about=""):
        status = getattr(self._library, function)(*arguments)
        if status:
            name = self._library.cublasLtGetStatusName(status).decode()
            raise RuntimeError(f"{function} returned {name}{' for ' * bool(about)}{about}")

    def _create(self, function, *arguments):
        handle = c_void_p()
        self._call(function, byref(handle), *arguments)
        return handle

    def _set(self, function, target, attributes):
        for (number, kind), value in attributes.items():
            self._call(function, target, number, byref(kind(value)), sizeof(kind), about=f"attribute {number}")
