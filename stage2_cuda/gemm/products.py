"""The matrix products of each precision: fp16x3 for fp32, cublasLt for the others, NumPy in Triton's interpreter.

On a Hopper GPU in bf16 and fp16, gluon_gelu.py computes the products with GELU or its derivative, if it supports their
sizes.
"""

import functools
import importlib

import numpy as np

from gpt2core.memory.gpu_sizes import MIN_FUSED_GELU, WORKSPACE
from gpt2core.tuned_choices import cache_directory
from stage2_cuda.gemm import fp16x3
from stage2_cuda.runtime.gluon_launch import gluon_kind
from stage2_cuda.runtime.triton_launch import Pointer, gpu_model
from stage2_cuda.tuning.tuner import Tuner


class Products:
    """Matrix products in the precision of a backend.

    multiply(out, a, b, ...) has the arguments of CublasLt.matmul, without `compute`, which follows from the precision.
    xp: cupy or numpy; precision: "fp32", "tf32", "bf16" or "fp16"; gemm: a CublasLt or a NumpyGemm.
    """

    def __init__(self, xp, precision, gemm):
        self.xp, self.precision, self.gemm = xp, precision, gemm
        self.multiply = self.multiply_fp16x3 if precision == "fp32" else self.multiply_gemm

    def fuses_gelu(self, n, k):
        """Whether the kernel that computes an (N, K) product should also apply GELU, or its derivative, to it.

        True only in bf16 and fp16, and for large products; for small ones a separate GELU kernel is faster.
        """
        return self.precision in ("bf16", "fp16") and n * k >= MIN_FUSED_GELU

    @functools.cached_property
    def gluon_gelu(self):
        """The module gluon_gelu, or None if the precision, the GPU or Triton has no such kernels."""
        if self.precision not in ("bf16", "fp16") or gluon_kind(*gpu_model()) is None:
            return None
        return importlib.import_module("stage2_cuda.gemm.gluon_gelu")

    def gluon_gelu_for(self, a, b, columns):
        """The module gluon_gelu if it supports the product of a and b, whose result has `columns` columns, or None."""
        gluon = self.gluon_gelu
        if gluon is None or not gluon.serves(a.itemsize, len(a), columns, a.shape[1]):
            return None
        aligned = all(x.flags.c_contiguous and Pointer(x).address % 16 == 0 for x in (a, b))  # for the TMA unit
        return gluon if aligned else None

    def gelu_product(self, y, h, x, w, b):
        """h (N, K) = x (N, C) w (C, K) + b (K), y (N, K) = gelu(h). Call it only if fuses_gelu(N, K)."""
        gluon = self.gluon_gelu_for(x, w, w.shape[1])
        if gluon is None:
            self.multiply(y, x, w, bias=b, activation="gelu", aux=h)
        else:
            gluon.gelu_product(y, h, x, w, b)

    def gelu_backward_product(self, dh, dy, w2, h):
        """dh (N, K) = (dy (N, C) w2') * gelu'(h (N, K)), w2 (K, C). Call it only if fuses_gelu(N, K).

        Returns partial sums of the rows of dh for column_sums.add_partials(), float32, or None if there are none.
        """
        gluon = self.gluon_gelu_for(dy, w2, w2.shape[0])
        if gluon is None:
            self.multiply(dh, dy, w2, trans_b=True, activation="dgelu", aux=h)
            return None
        partials = self.xp.empty(gluon.partials_shape(*dh.shape), np.float32)
        gluon.gelu_backward_product(dh, partials, dy, w2, h)
        return partials

    def operand(self, x):
        """x (R, C) as an operand of multiply(). In fp32 it is a SplitOperand: x is split once for several products."""
        if self.precision != "fp32" or isinstance(x, fp16x3.SplitOperand):
            return x
        halves, scales = fp16x3.split_shapes(x)
        return fp16x3.split(self.xp.empty(halves, np.float16), self.xp.empty(scales, np.float32), x)

    def refresh(self, operand, x):
        """Make operand, an earlier result of operand(x), equal to x again after x has changed."""
        if operand is not x:
            fp16x3.split(operand.halves, operand.scales, x)

    def multiply_gemm(self, out, a, b, **options):
        self.gemm.matmul(out, a, b, compute="tf32" if self.precision == "tf32" else "fp32", **options)

    def multiply_fp16x3(self, out, a, b, bias=None, trans_a=False, trans_b=False, accumulate=False):
        a, b = self.operand(a), self.operand(b)
        shape = fp16x3.partials_shape(*out.shape, a.shape[0 if trans_a else 1])
        can_use_partials = bias is None and not accumulate and out.flags.c_contiguous
        partials = self.xp.empty(shape, np.float32) if shape and can_use_partials else None
        fp16x3.product(out, partials, a, b, bias, trans_a, trans_b, accumulate)


class NumpyGemm:
    """The methods of CublasLt, without activations, computed by NumPy: for Triton's interpreter."""

    def clear_plans(self):
        pass

    def matmul(self, out, a, b, *, bias=None, trans_a=False, trans_b=False, accumulate=False, compute="fp32"):
        a, b = (x.astype(np.float32, copy=False) for x in (a, b))  # 16-bit operands are summed in fp32
        product = np.matmul(a.T if trans_a else a, b.T if trans_b else b)
        if bias is not None:
            product += bias
        np.add(out, product, out=out) if accumulate else np.copyto(out, product, casting="same_kind")


def make_gemm_and_tuner(cupy, name, deterministic, side_stream, notify):
    """(CublasLt, Tuner). The products may run on the current stream and on side_stream at the same time.

    The Triton kernels use the same Tuner. name: the GPU's name. deterministic: time nothing. notify(text): called
    before the first timing, because timing takes a while.
    """
    import triton

    from stage2_cuda.gemm.cublaslt import CublasLt, load_library

    library, tuner = load_library(), Tuner(cupy)
    if not deterministic:
        tuned_for = f"{name}, cublasLt {library.cublasLtGetVersion()}, Triton {triton.__version__}"
        tuner = Tuner(cupy, tuned_for, cache_directory(), notify)
    gemm = CublasLt(cupy, library, tuner, workspace_bytes=WORKSPACE // 2)  # half for each stream
    gemm.add_workspace(side_stream)
    return gemm, tuner
