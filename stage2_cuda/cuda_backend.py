"""The Backend of one GPU: CuPy arrays, Triton kernels, and matrix products by cublasLt or, in fp32, by Triton."""

# B batch, T time, C channels, V vocabulary, K columns, N = B*T rows; out: see gpt2core/backend.py

import functools
from typing import NamedTuple

import numpy as np

from gpt2core.arena import PAGE, SEGMENTS
from gpt2core.backend import Backend
from gpt2core.errors import ConfigError
from gpt2core.kernel_arguments import Guard
from stage2_cuda.attention.launches import check_head_size
from stage2_cuda.cuda_runtime import PlannedRuntime, make_runtime
from stage2_cuda.decoding.batched import MAX_BATCH, tiling_for
from stage2_cuda.decoding.decode_stream import DecodeStream, EagerStream
from stage2_cuda.decoding.decoder import GpuDecoder, supports
from stage2_cuda.fused_attention import FusedAttention
from stage2_cuda.fused_head import FusedHead, rows
from stage2_cuda.gemm.products import Products
from stage2_cuda.kernels import adamw, column_sums, dropout, embedding, gelu, layernorm, rounding
from stage2_cuda.kernels.cast import cast
from stage2_cuda.kernels.codecs import FusedCodec
from stage2_cuda.kernels.segment_sum import segment_sum
from stage2_cuda.runtime import triton_launch

# --precision: (the dtype of activations and of the parameters that kernels read, the input_precision of tl.dot).
# For fp32, tf32x3 (three tf32 products) is accurate enough and faster than ieee.
PRECISIONS = {
    "fp32": ("float32", "tf32x3"),
    "tf32": ("float32", "tf32"),
    "bf16": ("bfloat16", "ieee"),
    "fp16": ("float16", "ieee"),
}
# the precisions of Triton's interpreter, which computes bf16 wrongly and tf32 as fp32
INTERPRETER_PRECISIONS = "fp32", "fp16"


class PreparedTokens(NamedTuple):
    """Token ids (B, T) int32, and the rows of the batch sorted by token, which embedding_backward() reads."""

    ids: object
    sorted_tokens: embedding.SortedTokens

    @property
    def shape(self):
        return self.ids.shape


class CudaBackend(FusedAttention, FusedHead, Backend):
    """The kernels of one GPU, on CuPy arrays. gpt2core/backend.py documents the methods.

    With TRITON_INTERPRET=1, the same Triton kernels run on NumPy arrays, and NumPy computes the matrix products.
    """

    deterministic = False
    decoder_batch = MAX_BATCH
    decode_tiling = staticmethod(tiling_for)  # batch size -> tile sizes of the decoder's kernels

    @classmethod
    def planned(cls, precision, deterministic):
        if triton_launch.interpreted():
            return cls(precision, deterministic)
        backend = cls.__new__(cls)
        backend.check_precision(precision)
        backend.set_precision(precision)
        backend.xp, backend.runtime = None, PlannedRuntime()
        backend.name = backend.runtime.name
        return backend

    def __init__(self, precision="fp32", deterministic=True):
        self.check_precision(precision)
        self.runtime = make_runtime(precision, deterministic)  # first: without a GPU the error is about the GPU
        self.set_precision(precision)
        self.xp, self.name = self.runtime.xp, self.runtime.name
        self.products = Products(self.xp, precision, self.runtime.gemm)

    def check_precision(self, precision):
        if precision not in PRECISIONS:
            raise ConfigError(f"`precision={precision}` is unknown in this stage: use {', '.join(PRECISIONS)}")
        if triton_launch.interpreted() and precision not in INTERPRETER_PRECISIONS:
            why = ", which computes bf16 wrongly" if precision == "bf16" else ", which has no tensor cores"
            raise ConfigError(f"`precision={precision}` cannot be used in Triton's interpreter{why}: use fp32 or fp16")

    def set_precision(self, precision):
        compute, self.dot_precision = PRECISIONS[precision]
        self.precision, self.dtype, self.compute_dtype = precision, np.dtype(np.float32), dtype_of(compute)
        self.scales_loss, self.rounds_stochastically = precision == "fp16", precision == "bf16"

    # -- arrays, models, generation ----------------------------------------------------------------------------------

    def empty(self, shape, dtype):
        return self.xp.empty(shape, dtype)

    def asarray(self, array, dtype=None):
        return self.xp.asarray(array, dtype)

    def to_host(self, array):
        if isinstance(array, self.xp.ndarray) and not self.on_host:
            self.runtime.synchronize()
            array = array.get()
        host = np.asarray(array)
        return host.astype(np.float32) if host.dtype.name == "bfloat16" else host  # NumPy has no bfloat16

    def like(self, array):
        """An uninitialised array of the same shape and dtype."""
        return self.xp.empty(array.shape, array.dtype)

    def floats(self, *shape):
        """An uninitialised float32 array. Statistics, sums and scratch are float32 in every --precision."""
        return self.xp.empty(shape, np.float32)

    def cast(self, x, out, key=None, offset=0):
        if key is None:
            cast(out, x)
        else:
            rounding.round_to_bf16(out.view(np.uint16), x, self.asarray(key), offset)

    def prepare_tokens(self, ids, vocabulary=None):
        ids = np.ascontiguousarray(ids, np.int32)
        return ids if vocabulary is None else PreparedTokens(ids, embedding.sort_tokens(ids, vocabulary))

    def token_ids(self, tokens):
        return self.to_host(tokens.ids)

    def check_tokens(self, operation, tokens, vocabulary):
        if isinstance(tokens, np.ndarray):  # arrays on the device were checked before the copy
            super().check_tokens(operation, tokens, vocabulary)

    def check_model(self, config):
        check_head_size(config.n_embd, config.n_head)

    def codec(self, kind):
        return FusedCodec(kind, self.xp)

    @functools.cached_property
    def decode_stream(self):
        """The stream of all decoders: only one, because the products of two streams cannot share a workspace."""
        if not self.runtime.uses_graphs:
            return EagerStream()
        stream = DecodeStream(self.xp)
        self.runtime.decoding_memories.append(stream.graph_memory)
        return stream

    def decoder(self, model, batch):
        if not supports(model, batch):
            return None
        return GpuDecoder(model, batch, self.decode_stream, self.decode_tiling(batch))

    # -- products and gradients of parameters --------------------------------------------------------------------------

    def product(self, a, b, **options):
        """a @ b as a new array (N, K). options: dtype (by default a.dtype), and those of Products.multiply()."""
        n = a.shape[1] if options.get("trans_a") else a.shape[0]
        k = b.shape[0] if options.get("trans_b") else b.shape[1]
        out = self.xp.empty((n, k), options.pop("dtype", a.dtype))
        self.products.multiply(out, a, b, **options)
        return out

    def gradient(self, shape, compute, *operands, add=None, side=True):
        """The float32 gradient of `shape` that compute(array) writes, as a function of its Destination.

        With a Destination the kernels run on the side stream, and the gradient is complete after runtime.join().
        operands: the arrays that compute() reads, for which all kernels are launched before this method is called.
        add(array), if given, adds the gradient, faster than by a new array. side=False: the main stream has no other
        work, so it computes a gradient that is written to, not added.
        """
        ready = self.runtime.side.record()  # now, because autograd may launch other kernels before it calls gradient()

        def gradient(out):
            if out is None:
                compute(array := self.floats(*shape))
                return array
            if side or out.accumulate:  # it is added on the side stream, where later gradients are
                stream = self.runtime.on_side_stream(*operands, ready=ready)
            else:
                stream = self.runtime.side.ahead()
            with stream:
                if out.accumulate and add:
                    add(out.array)
                elif out.accumulate:
                    compute(array := self.floats(*shape))
                    self.xp.add(out.array, array, out=out.array)
                else:
                    compute(out.array)
            return out.array

        return gradient

    def put(self, gradient, out):
        with self.runtime.on_side_stream(gradient):  # where other kernels read and write gradients
            super().put(gradient, out)

    def weight_gradient(self, x, dy):
        """The gradient x.T @ dy (C, K) of a weight, for x (N, C) and dy (N, K)."""
        shape = x.shape[1], dy.shape[1]
        return self.gradient(shape, lambda dw: self.products.multiply(dw, x, dy, trans_a=True), x, dy)

    def bias_gradient(self, dy):
        """The gradient (K) of a bias: the sum of the rows of dy (N, K)."""

        def compute(db):
            column_sums.column_sums(db, self.floats(*column_sums.partials_shape(*dy.shape)), dy)

        return self.gradient(dy.shape[1:], compute, dy)

    def sums_of_partials(self, partials):
        """partials (n, P, K), float32 -> n gradients (K) of parameters, the sums over P. One launch writes those that
        autograd calls for in order, the first, the second, ...; therefore it is postponed.
        """
        written = {}  # {index of a gradient: the array of its Destination}, of the gradients that are not launched yet
        ready = self.runtime.side.record()  # see gradient()

        def launch():
            arrays = [written.pop(i) for i in sorted(written)]
            with self.runtime.on_side_stream(partials, ready=ready):
                column_sums.add_partials(partials, *arrays)

        def gradient(i, out):
            if out is None or out.accumulate or i != len(written):
                add = functools.partial(column_sums.add_partials, partials[i])
                return self.gradient(partials.shape[2:], add, partials)(out)
            if not written:
                self.runtime.side.postpone(launch)
            written[i] = out.array
            return out.array

        return [functools.partial(gradient, i) for i in range(len(partials))]

    # -- linear ------------------------------------------------------------------------------------------------------

    def linear_forward(self, x, w, b=None):
        return self.product(rows(x), w, bias=b).reshape(*x.shape[:-1], w.shape[1])

    def linear_backward(self, dy, x, w, bias=True):
        """dx is a function too, so that autograd launches the other gradients first, on the side stream."""
        operand = self.products.operand(rows(dy))  # both products of dy use it
        db = self.bias_gradient(rows(dy)) if bias else None

        def dx(out):
            return self.product(operand, w, trans_b=True).reshape(x.shape)

        return dx, self.weight_gradient(rows(x), operand), db

    # -- gelu --------------------------------------------------------------------------------------------------------

    def gelu_forward(self, x):
        y = self.like(x)
        gelu.gelu_forward(rows(y), rows(x))
        return y

    def gelu_backward(self, dy, x):
        dx = self.like(x)
        gelu.gelu_backward(rows(dx), rows(dy), rows(x))
        return dx

    def linear_gelu_forward(self, x, w, b):
        h = self.product(rows(x), w)  # without the bias: the next kernel adds it
        y = self.like(h)
        gelu.bias_gelu_forward(y, h, b)
        return y.reshape(*x.shape[:-1], w.shape[1]), h

    def linear_gelu_backward(self, dy, x, w, b, aux):
        dh = self.like(aux)
        partials = self.floats(*gelu.gelu_partials_shape(*aux.shape))
        gelu.bias_gelu_backward(dh, partials, rows(dy), aux, b)
        dx, dw, _ = self.linear_backward(dh, x, w, bias=False)
        return dx, dw, *self.sums_of_partials(partials[None])

    def mlp_forward(self, x, w, b, w2):
        shape = x.size // x.shape[-1], w.shape[1]
        if not self.products.fuses_gelu(*shape):
            h, aux = self.linear_gelu_forward(x, w, b)
            return self.linear_forward(h, w2), (h, aux)
        h, y = self.xp.empty(shape, x.dtype), self.xp.empty(shape, x.dtype)
        self.products.gelu_product(y, h, rows(x), w, b)
        return self.product(y, w2).reshape(*x.shape[:-1], w2.shape[1]), (h, y)

    def mlp_backward(self, dy, x, w, b, w2, aux):
        if not self.products.fuses_gelu(x.size // x.shape[-1], w.shape[1]):
            (h, aux), operand = aux, self.products.operand(rows(dy))
            dw2 = self.weight_gradient(rows(h), operand)  # first: it need not wait for dh
            dh = self.product(operand, w2, trans_b=True)
            return *self.linear_gelu_backward(dh, x, w, b, aux), dw2
        (h, y), dy = aux, rows(dy)
        dh = self.like(h)
        partials = self.products.gelu_backward_product(dh, dy, w2, h)
        dx, dw, db = self.linear_backward(dh, x, w, bias=partials is None)
        if partials is not None:
            (db,) = self.sums_of_partials(partials[None])
        return dx, dw, db, self.weight_gradient(y, dy)

    # -- layernorm ---------------------------------------------------------------------------------------------------

    def layernorm_forward(self, x, w, b, eps):
        _, y, aux = self.residual_layernorm_forward(x, None, None, w, b, eps)
        return y, aux

    def layernorm_backward(self, dy, w, aux):
        dx, _, dw, db = self.residual_layernorm_backward(None, dy, w, aux)
        return dx, dw, db

    def residual_add_forward(self, x, a, a_bias):
        x_rows, a_rows = rows(x), rows(a)
        s = self.like(x_rows)
        layernorm.residual_add(s, x_rows, a_rows, a_bias)
        return s.reshape(x.shape)

    def dropout(self, x, mask, bias=None):
        x = self.xp.ascontiguousarray(x)
        y = self.like(x)
        dropout.dropout(y, x, bias, mask)
        return y

    def bias_backward(self, dy):
        ds = rows(dy)

        def compute(da_bias):
            shape = layernorm.layernorm_partials_shape(*ds.shape, ds.dtype)[1:]
            layernorm.residual_bias_gradient(da_bias, self.floats(*shape), ds)

        return self.gradient(ds.shape[1:], compute, ds)

    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        x_rows = rows(x)
        y, mean, rstd = self.like(x_rows), self.floats(len(x_rows)), self.floats(len(x_rows))
        a_rows = None if a is None else rows(a)
        s = None if a is None else self.like(x_rows)  # without a, s is x
        layernorm.residual_layernorm_forward(s, y, mean, rstd, x_rows, a_rows, a_bias, w, b, eps)
        s = x_rows if s is None else s
        return s.reshape(x.shape), y.reshape(x.shape), (s, mean, rstd)

    def residual_layernorm_backward(self, ds, dy, w, aux):
        s, mean, rstd = aux
        dx, partials = self.like(s), self.floats(*layernorm.layernorm_partials_shape(*s.shape, s.dtype))
        ds = None if ds is None else rows(ds)
        layernorm.residual_layernorm_backward(dx, partials, ds, rows(dy), s, w, mean, rstd)
        dw, db, da_bias = self.sums_of_partials(partials)
        return dx.reshape(dy.shape), da_bias, dw, db

    # -- embedding ---------------------------------------------------------------------------------------------------

    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        ids = self.asarray(ids.ids if isinstance(ids, PreparedTokens) else ids, np.int32)
        y = self.xp.empty((*ids.shape, wte.shape[1]), wte.dtype)
        embedding.embedding_forward(y, ids, wte, wpe, position, first)
        return y

    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0):
        if not isinstance(ids, PreparedTokens):
            ids = self.prepare_tokens(self.to_host(ids), first + wte.shape[0])
        tokens, dy = embedding.SortedTokens(*map(self.asarray, ids.sorted_tokens)), self.xp.ascontiguousarray(dy)

        def compute(dwte, accumulate=False):
            chunk_sums = self.floats(*embedding.chunk_sums_shape(dy.size // dy.shape[-1], dy.shape[-1]))
            embedding.token_gradient(dwte, chunk_sums, tokens, dy, accumulate, first)

        add = functools.partial(compute, accumulate=True)
        dwte = self.gradient(wte.shape, compute, tokens, dy, add=add, side=False)
        if wpe is None:
            return dwte, None
        return dwte, self.gradient(
            wpe.shape, lambda dwpe: embedding.position_gradient(dwpe, dy, position), dy, side=False
        )

    # -- flat buffers ------------------------------------------------------------------------------------------------

    def page_sums(self, flat):
        sums = self.floats(flat.size // PAGE)
        adamw.page_sums(sums, flat)
        return sums

    def clip(self, sums, clip, guard=None):
        squares, norm, factor = self.xp.empty(SEGMENTS, np.float64), self.floats(1), self.floats(1)
        segment_sum(squares, sums)
        if guard is None:  # the norm of the parameters, for a checkpoint
            # A stop of 0 does not change the result. With it the kernel is the variant that training steps use; without
            # it the first checkpoint would wait until another variant is compiled.
            guard = Guard(stop=self.zeros(1, "float32"))
        adamw.clip_scale(factor, norm, squares, clip, guard.loss_scale, guard.interval, guard.stop)
        return norm, factor

    def adamw_step(self, p, m, v, g, coefficients, factor, decays, betas, copy=None):
        array, rounding_arguments = None if copy is None else copy.array, ()
        if copy is not None and copy.key is not None:  # stochastic rounding
            array, rounding_arguments = array.view(np.uint16), (self.asarray(copy.key), copy.offset)
        adamw.adamw_step(p, m, v, array, g, self.asarray(coefficients), factor, decays, *betas, *rounding_arguments)


def dtype_of(name):
    """The NumPy dtype with this name. NumPy has no bfloat16, so that is the dtype of ml_dtypes, which CuPy accepts.

    Raises ConfigError if ml_dtypes is needed and missing.
    """
    if name == "bfloat16":
        return np.dtype(triton_launch.import_module("ml_dtypes", "ml_dtypes", "pip install ml_dtypes").bfloat16)
    return np.dtype(name)
