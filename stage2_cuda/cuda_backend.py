"""The kernels on a GPU: Triton for all that is ours to fuse, cublasLt for the large products, CuPy for memory."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows

import functools
from pathlib import Path

import numpy as np

from gpt2core.arena import BLOCK as ARENA_BLOCK
from gpt2core.backend import Backend
from gpt2core.errors import ConfigError
from stage2_cuda import engine, triton_driver
from stage2_cuda.graph import Recorded
from stage2_cuda.kernels import adamw, column_sums, cross_entropy, embedding, gelu, layernorm
from stage2_cuda.kernels import attention as flash
from stage2_cuda.kernels.cast import cast, scale_in_place
from stage2_cuda.kernels.decode import ROWS, Tiles

LOGITS = 1 << 29  # elements of logits that exist at once
ALIGNED = 64  # columns: logits are padded to a multiple, because a row must begin where the GPU can read it at once
# --precision: the type of activations and of the parameters that kernels read, and what tl.dot makes of fp32 operands;
# three passes of tf32 keep the bounds of fp32, and are faster
PRECISIONS = {"fp32": ("float32", "tf32x3"), "tf32": ("float32", "tf32"), "bf16": ("bfloat16", "ieee")}


class CudaBackend(Backend):
    """CuPy arrays on one GPU; under TRITON_INTERPRET=1 NumPy arrays, the same kernels, and NumPy's matrix products."""

    deterministic = False
    uses_threads = False
    decoder_batch = ROWS
    tiles = Tiles()  # of the engine's kernels

    def __init__(self, precision="fp32", deterministic=True):
        if precision not in PRECISIONS:
            raise ConfigError(f"--precision {precision} is not built yet in this stage: use {', '.join(PRECISIONS)}")
        self.xp = triton_driver.array_module()
        compute, self.products = PRECISIONS[precision]
        self.precision, self.dtype = precision, np.dtype(np.float32)
        if triton_driver.interpreted():
            if precision != "fp32":
                raise ConfigError(
                    f"--precision {precision} has no meaning in Triton's interpreter, where bf16 is silently wrong: "
                    f"use fp32 there"
                )
            self.compute = self.dtype
            self.name, self.gemm, self.record = "the Triton interpreter", NumpyGemm(), lambda function: function
        else:
            self.compute = dtype_of(compute)
            self.name, self.gemm, self.record = gpu_name(self.xp), cublaslt(self.xp, deterministic), Recorded
        self.kept, self.runs, self.decays = {}, {}, {}  # what has to stay where it is: see compile_step

    # -- arrays ------------------------------------------------------------------------------------------------------

    def empty(self, shape, dtype):
        return self.xp.empty(shape, dtype)

    def asarray(self, array, dtype=None):
        return self.xp.asarray(array, dtype)

    def to_host(self, array):
        host = array.get() if hasattr(array, "get") else np.asarray(array)
        return host.astype(np.float32) if host.dtype.name == "bfloat16" else host  # NumPy knows no such type

    def like(self, array):
        return self.xp.empty(array.shape, array.dtype)

    def floats(self, *shape):
        """Uninitialised float32: statistics, sums and scratch, in every precision."""
        return self.xp.empty(shape, np.float32)

    def product(self, a, b, **options):
        """a @ b (N, K), with transposes, bias and the rest as cublaslt.matmul has them."""
        n = a.shape[1] if options.get("trans_a") else a.shape[0]
        k = b.shape[0] if options.get("trans_b") else b.shape[1]
        out = self.xp.empty((n, k), options.pop("dtype", a.dtype))
        self.multiply(out, a, b, **options)
        return out

    def multiply(self, out, a, b, **options):
        self.gemm.matmul(out, a, b, compute="tf32" if self.precision == "tf32" else "fp32", **options)

    def column_sums(self, x):
        sums = self.floats(x.shape[1])
        column_sums.column_sums(sums, self.floats(*column_sums.partials_shape(*x.shape)), x)
        return sums

    # -- linear ------------------------------------------------------------------------------------------------------

    def linear_forward(self, x, w, b=None):
        return self.product(rows(x), w, bias=b).reshape(*x.shape[:-1], w.shape[1])

    def linear_backward(self, dy, x, w, bias=True):
        dy, x2 = rows(dy), rows(x)
        dx = self.product(dy, w, trans_b=True).reshape(x.shape)
        dw = self.product(x2, dy, trans_a=True, dtype=np.float32)
        return (dx, dw, self.column_sums(dy)) if bias else (dx, dw)

    # -- gelu --------------------------------------------------------------------------------------------------------

    def gelu_forward(self, x):
        y = self.like(x)
        gelu.gelu_forward(rows(y), rows(x))
        return y

    def gelu_backward(self, dy, x):
        dx = self.like(x)
        gelu.gelu_backward(rows(dx), rows(contiguous(self.xp, dy)), rows(x))
        return dx

    def linear_gelu_forward(self, x, w, b):
        h = self.product(rows(x), w)  # without its bias, which the next kernel adds
        y = self.like(h)
        gelu.bias_gelu_forward(y, h, b)
        return y.reshape(*x.shape[:-1], w.shape[1]), (h, b)

    def linear_gelu_backward(self, dy, x, w, aux):
        h, b = aux
        dh, db = self.like(h), self.floats(h.shape[1])
        gelu.bias_gelu_backward(dh, db, self.floats(*gelu.gelu_partials_shape(*h.shape)), rows(dy), h, b)
        return *self.linear_backward(dh, x, w, bias=False), db

    # -- layernorm ---------------------------------------------------------------------------------------------------

    def layernorm_forward(self, x, w, b, eps):
        _, y, aux = self.residual_layernorm_forward(x, None, None, w, b, eps)
        return y, aux

    def layernorm_backward(self, dy, w, aux):
        dx, _, dw, db = self.residual_layernorm_backward(None, dy, w, aux)
        return dx, dw, db

    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        x2 = rows(contiguous(self.xp, x))
        y, mean, rstd = self.like(x2), self.floats(len(x2)), self.floats(len(x2))
        s = x2 if a is None else self.like(x2)
        a2 = None if a is None else rows(contiguous(self.xp, a))
        layernorm.residual_layernorm_forward(
            None if a is None else s, y, mean, rstd, x2, a2, a_bias, w, b, eps
        )  # fmt: skip
        return s.reshape(x.shape), y.reshape(x.shape), (s, mean, rstd)

    def residual_layernorm_backward(self, ds, dy, w, aux):
        s, mean, rstd = aux
        dx, C = self.like(s), s.shape[1]
        da_bias, dw, db = (self.floats(C) for _ in range(3))
        scratch = self.floats(*layernorm.layernorm_partials_shape(len(s), C))
        ds = None if ds is None else rows(contiguous(self.xp, ds))
        layernorm.residual_layernorm_backward(dx, da_bias, dw, db, scratch, ds, rows(dy), s, w, mean, rstd)
        return dx.reshape(dy.shape), da_bias, dw, db

    # -- attention ---------------------------------------------------------------------------------------------------

    def attention_forward(self, qkv, n_head):
        B, T, C3 = qkv.shape
        y, lse = self.xp.empty((B, T, C3 // 3), qkv.dtype), self.floats(B, n_head, T)
        flash.attention_forward(y, lse, qkv, n_head, precision=self.products)
        return y, lse

    def attention_backward(self, dy, qkv, y, aux, n_head):
        dqkv, delta = self.like(qkv), self.like(aux)
        flash.attention_backward(dqkv, delta, contiguous(self.xp, dy), qkv, y, aux, n_head, precision=self.products)
        return dqkv

    def attention_cached(self, qkv, keys, values, position, n_head):
        B, t, C3 = qkv.shape
        y = self.xp.empty((B, t, C3 // 3), qkv.dtype)
        flash.attention_cached(y, qkv, keys, values, position, n_head)
        return y

    # -- embedding ---------------------------------------------------------------------------------------------------

    def embedding_forward(self, ids, wte, wpe, position=0, first=0):
        ids = self.asarray(ids, np.int32)
        y = self.xp.empty((*ids.shape, wte.shape[1]), wte.dtype)
        embedding.embedding_forward(y, ids, wte, wpe, position, first)
        return y

    def embedding_backward(self, dy, ids, wte, wpe, position=0, first=0):
        ids, dy = self.asarray(ids, np.int32), contiguous(self.xp, dy)
        dwte, dwpe = self.floats(*wte.shape), self.floats(*wpe.shape)
        pieces = self.floats(*embedding.pieces_shape(ids.size, wte.shape[1]))
        runs = self.sorted_rows(ids, wte.shape[0], first)
        embedding.embedding_backward(dwte, dwpe, pieces, runs, dy, position)
        return dwte, dwpe

    # -- unembedding and cross-entropy ---------------------------------------------------------------------------------

    def unembed_forward(self, x, w):
        return self.product(rows(contiguous(self.xp, x)), w, trans_b=True).reshape(*x.shape[:-1], w.shape[0])

    def unembed_backward(self, dy, x, w):
        dy, x2 = rows(dy), rows(contiguous(self.xp, x))
        return self.product(dy, w).reshape(x.shape), self.product(dy, x2, trans_a=True, dtype=np.float32)

    def cross_entropy_forward(self, logits, targets, first=0):
        maxima, sums, picked = (self.floats(len(logits)) for _ in range(3))
        cross_entropy.cross_entropy_forward(
            maxima, sums, picked, logits, self.asarray(targets, np.int32), logits.shape[1], first
        )
        return maxima, sums, picked, None

    def cross_entropy_backward(self, dy, logits, targets, scale, maxima, sums, aux, first=0):
        dlogits, dy = self.like(logits), self.asarray(dy, np.float32).reshape(1)
        targets = self.asarray(targets, np.int32)
        cross_entropy.cross_entropy_backward(
            dlogits, logits, targets, maxima, sums, scale, logits.shape[1], first, dy
        )  # fmt: skip
        return dlogits

    def unembed_cross_entropy_forward(self, x, w, targets, first=0, scale=None):
        targets, statistics, V = self.asarray(targets, np.int32), self.floats(3, len(x)), len(w)
        w = self.whole_rows(w)
        dx, dw = (None, None) if scale is None else (self.like(x), self.floats(*w.shape))
        for number, chunk in enumerate(logit_chunks(x, w)):
            logits = self.padded_logits(x[chunk], w)
            if scale is None:
                cross_entropy.cross_entropy_forward(*statistics[:, chunk], logits, targets[chunk], V, first)
            else:  # at once, in the place of the logits, which nobody needs again
                own = targets[chunk], scale, V, first
                cross_entropy.cross_entropy_forward_backward(logits, *statistics[:, chunk], logits, *own)
                self.gradients_of(logits, x[chunk], w, dx[chunk], dw, number > 0)
        return *statistics, None if scale is None else (dx, dw[:V])

    def unembed_cross_entropy_backward(self, dy, x, w, targets, scale, maxima, sums, aux, first=0):
        if aux is not None:
            for gradient in aux:
                scale_in_place(gradient, self.asarray(dy, np.float32).reshape(1))
            return aux
        targets, dy, V = self.asarray(targets, np.int32), self.asarray(dy, np.float32).reshape(1), len(w)
        w = self.whole_rows(w)
        dx, dw = self.like(x), self.floats(*w.shape)
        for number, chunk in enumerate(logit_chunks(x, w)):  # computed again: to keep them would take too much memory
            logits = self.padded_logits(x[chunk], w)
            own = targets[chunk], maxima[chunk], sums[chunk], scale, V, first, dy
            cross_entropy.cross_entropy_backward(logits, logits, *own)
            self.gradients_of(logits, x[chunk], w, dx[chunk], dw, number > 0)
        return dx, dw[:V]

    def padded_logits(self, x, w):
        """x @ w' in the first columns of an array (N, multiple of ALIGNED)."""
        logits = self.xp.empty((len(x), -(-len(w) // ALIGNED) * ALIGNED), x.dtype)
        self.multiply(logits[:, : len(w)], x, w, trans_b=True)
        return logits

    def gradients_of(self, dlogits, x, w, dx, dw, accumulate):
        dlogits = dlogits[:, : len(w)]
        self.multiply(dx, dlogits, w)
        self.multiply(dw, dlogits, x, trans_a=True, accumulate=accumulate)

    def whole_rows(self, w):
        """w (V, C) with the rows behind it in its arena that make V a multiple of ALIGNED; w where there are none.

        An odd V would have no aligned product: at V = 50257 each takes five times as long. What these rows make of
        logits is padding, which counts for nothing, and whose gradient is 0.
        """
        rows, base = -(-len(w) // ALIGNED) * ALIGNED, w.base
        if isinstance(w, np.ndarray) or base is None:
            return w
        if w.data.ptr + rows * w.strides[0] > base.data.ptr + base.nbytes:
            return w
        return self.xp.ndarray((rows, w.shape[1]), w.dtype, w.data)

    # -- flat buffers ------------------------------------------------------------------------------------------------

    def sum_of_squares(self, flat, segments):
        out = self.xp.empty(segments, np.float64)
        adamw.sum_of_squares(out, self.floats(flat.size // ARENA_BLOCK), flat)
        return out

    def clip(self, squares, bound):
        norm, scale = self.floats(1), self.floats(1)
        adamw.clip_scale(scale, norm, squares, bound)
        return norm, scale

    def adamw_rates(self, step, lr, beta1, beta2, eps, weight_decay):
        self.overwrite("rates", adamw.adamw_scalars(step, lr, beta1, beta2, eps, weight_decay))
        return self.kept["rates"], beta1, beta2

    def adamw_step(self, p, m, v, copy, g, rates, scale, runs):
        scalars, beta1, beta2 = rates
        if (flags := tuple((run.start, run.stop, decays) for run, decays in runs)) not in self.decays:
            blocks = np.zeros(p.size // ARENA_BLOCK, np.int32)
            for start, stop, decays in flags:
                blocks[start // ARENA_BLOCK : stop // ARENA_BLOCK] = decays
            self.decays[flags] = self.asarray(blocks)
        adamw.adamw_step(p, m, v, copy, g, scalars, scale, self.decays[flags], beta1, beta2)

    # -- a step that is recorded ---------------------------------------------------------------------------------------

    def overwrite(self, name, array):
        """Keep a host array on this device, in the same memory as the last one of that name."""
        kept = self.kept.get(name)
        if kept is None or kept.shape != array.shape:
            self.kept[name] = self.xp.array(array)
        elif isinstance(kept, np.ndarray):
            kept[...] = array
        else:
            kept.set(array)

    def tokens(self, array, slot):
        self.overwrite(slot, np.ascontiguousarray(array, np.int32))
        for key, runs in self.runs.items():
            if key[0] == self.address(self.kept[slot]):
                for old, new in zip(runs, self.runs_of(self.kept[slot], *key[1:]), strict=True):
                    old[...] = new
        return self.kept[slot]

    def address(self, array):
        return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr

    def runs_of(self, ids, count, first):
        return embedding.runs_of_tokens(self.xp, ids, count, first)

    def sorted_rows(self, ids, count, first):
        """The rows of ids (B, T) sorted by token; of an array of tokens() they are renewed with it."""
        if all(kept is not ids for kept in self.kept.values()):
            return self.runs_of(ids, count, first)
        key = self.address(ids), count, first
        if key not in self.runs:
            self.runs[key] = self.runs_of(ids, count, first)
        return self.runs[key]

    def compute_copy(self, parameters):
        if self.compute == self.dtype:
            return parameters
        return self.zeros(parameters.shape, self.compute)

    def refresh(self, copy, parameters):
        if copy is not parameters:
            cast(copy, parameters)

    def compile_step(self, function):
        return self.record(function)

    # -- generation ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def queue(self):
        """The order of all that generation launches and copies; one, because the products share a workspace."""
        return engine.Eager() if triton_driver.interpreted() else engine.Queue(self.xp)

    def decoder(self, model, batch):
        return engine.Engine(model, batch, self.queue, self.tiles) if engine.fits(model, batch) else None


class NumpyGemm:
    """What CublasLt is on a GPU: under the interpreter the matrix products alone are NumPy's."""

    def matmul(self, out, a, b, *, bias=None, trans_a=False, trans_b=False, accumulate=False, compute="fp32"):
        product = np.matmul(a.T if trans_a else a, b.T if trans_b else b)
        np.add(out, product, out=out) if accumulate else np.copyto(out, product)
        if bias is not None:
            out += bias


def cublaslt(cupy, deterministic):
    from stage2_cuda.cublaslt import CublasLt, load_library

    try:
        cache = Path.home() / ".cache" / "staged-gpt2"  # which of its algorithms was the fastest for a shape
    except RuntimeError:  # a user without a home, as in some containers: chosen anew in every run
        cache = None
    return CublasLt(cupy, load_library(), cache_dir=cache, deterministic=deterministic)


def dtype_of(name):
    """The NumPy dtype of this name; of bfloat16 it is ml_dtypes', which CuPy takes for its own."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def gpu_name(cupy):
    return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()


def rows(x):
    """(..., C) as (N, C), a view."""
    return x.reshape(-1, x.shape[-1])


def contiguous(xp, x):
    return xp.ascontiguousarray(x)


def logit_chunks(x, w):
    """Slices of rows of x (N, C) whose logits (rows, V) stay below LOGITS elements."""
    step = max(1, LOGITS // w.shape[0])
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]
