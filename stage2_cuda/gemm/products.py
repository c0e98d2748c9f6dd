"""The matrix products of each precision: fp16x3 for fp32, cublasLt for the others, NumPy in the interpreter."""

import numpy as np

from gpt2core.parallel.tuned_choices import cache_directory
from stage2_cuda.gemm import fp16x3
from stage2_cuda.memory_model import WIDE, WORKSPACE
from stage2_cuda.tuning.tuner import Tuner


class Products:
    """multiply(out, a, b, ...): CublasLt.matmul without its option `compute`, which follows from the precision.

    xp: cupy or numpy; precision: "fp32", "tf32", "bf16" or "fp16"; gemm: a CublasLt or a NumpyGemm.
    """

    def __init__(self, xp, precision, gemm):
        self.xp, self.precision, self.gemm = xp, precision, gemm
        self.multiply = self.three_passes if precision == "fp32" else self.one_pass

    def fuses_gelu(self, n, k):
        """Whether GELU and its derivative should be epilogues of the product that computes their (N, K) input."""
        return self.precision in ("bf16", "fp16") and n * k >= WIDE

    def operand(self, x):
        """x (R, C) as multiply() reads it: for fp32 a SplitOperand, which several products of x can share."""
        if self.precision != "fp32" or isinstance(x, fp16x3.SplitOperand):
            return x
        halves, scales = fp16x3.split_shapes(x)
        return fp16x3.split(self.xp.empty(halves, np.float16), self.xp.empty(scales, np.float32), x)

    def one_pass(self, out, a, b, **options):
        self.gemm.matmul(out, a, b, compute="tf32" if self.precision == "tf32" else "fp32", **options)

    def three_passes(self, out, a, b, bias=None, trans_a=False, trans_b=False, accumulate=False):
        a, b = self.operand(a), self.operand(b)
        shape = fp16x3.partials_shape(*out.shape, a.shape[0 if trans_a else 1])
        split_k = shape and bias is None and not accumulate and out.flags.c_contiguous
        partials = self.xp.empty(shape, np.float32) if split_k else None
        fp16x3.product(out, partials, a, b, bias, trans_a, trans_b, accumulate)


class NumpyGemm:
    """CublasLt's interface in NumPy, without activations, for the interpreter; all other kernels there are Triton's."""

    def clear_plans(self):
        pass

    def matmul(self, out, a, b, *, bias=None, trans_a=False, trans_b=False, accumulate=False, compute="fp32"):
        a, b = (x.astype(np.float32, copy=False) for x in (a, b))  # 16-bit operands are summed in fp32
        product = np.matmul(a.T if trans_a else a, b.T if trans_b else b)
        if bias is not None:
            product += bias
        np.add(out, product, out=out) if accumulate else np.copyto(out, product, casting="same_kind")


def cublaslt(cupy, name, deterministic, side_stream, notify):
    """(CublasLt, Tuner) for products on the current stream and on side_stream; Triton kernels share the Tuner.

    name: the GPU's name. deterministic: time nothing. notify(text) prints that timing kernels takes time.
    """
    import triton

    from stage2_cuda.gemm.cublaslt import CublasLt, load_library

    library, tuner = load_library(), Tuner(cupy)
    if not deterministic:
        made_for = f"{name}, cublasLt {library.cublasLtGetVersion()}, Triton {triton.__version__}"
        tuner = Tuner(cupy, made_for, cache_directory(), notify)
    gemm = CublasLt(cupy, library, tuner, workspace_bytes=WORKSPACE // 2)
    gemm.add_workspace(side_stream)
    return gemm, tuner
