"""The kernels in NumPy: elementwise operations are ufuncs with `out=`, large products use BLAS, memory is reused."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows

import math

import numpy as np

from gpt2core.arena import PAGE, SEGMENTS
from gpt2core.codecs import Codec
from gpt2core.data import even_slices
from gpt2core.errors import ConfigError
from gpt2core.recording import is_recording
from gpt2core.tree_sum import tree_reduce, tree_sum
from stage0_serial.buffer_pool import BufferPool
from stage0_serial.cpu_runtime import CpuRuntime
from stage0_serial.generation.kernels import GenerationKernels
from stage0_serial.rows import BLOCK, block_rows, blocks, micro_batches, rows, sequences, slices
from stage0_serial.vocabulary import VocabularyKernels

QUERIES = 64  # query rows of one tile of attention; tiles above the diagonal are skipped
# Of the exponentials of a row of scores; the smallest sum is 1 / LARGEST_SUM. So E v and dy / rowsum(E) stay far inside
# the range of float32.
LARGEST_SUM = 1e20
GELU_A, GELU_B = math.sqrt(2 / math.pi), 0.044715  # Python floats: with np.float64, NumPy would compute in float64
DTYPES = {"fp32": np.float32, "fp64": np.float64, "bf16": np.float32}  # bf16: see bf16_products.py


class NumpyBackend(VocabularyKernels, GenerationKernels):
    """PlainBackend with faster kernels; one instance per thread, because its buffers are reused without locks.

    The kernels have the same arguments and results, except for `aux`.

    What each override gains over the formula (forward and backward, one thread, 2 x 256 tokens of preset paper):

        memory pool, out=       no page faults, no temporary arrays: all kernels      (BufferPool)
        adamw_step              5.8 x: one pass over the cache instead of 14 over memory
        page_sums               4.1 x: vecdot instead of an array of squares
        attention               3.5 x: tiles above the diagonal are skipped; the softmax is divided after its product
        embedding               2.6 x: rows are sorted by token, then added in one call, instead of np.add.at
        mlp                     1.5 x: the forward pass keeps gelu'(x), so backward is one multiplication
        residual_layernorm      1.3 x: one pass per cache block, sums as products with a vector
        linear                  1.2 x: the bias is added in place
        unembed_cross_entropy   1.0 x: BLAS computes both; chunks of logits only limit memory

    The numbers are from `python -m benchmarks.cpu.choices` on an AMD EPYC.
    """

    name = "numpy"
    uses_threads = True
    merges_micro_batches = True

    def __init__(self, precision="fp32", deterministic=True):
        if precision not in DTYPES:
            raise ConfigError(
                f"`precision={precision}` is not available on the CPU: use `precision=fp32` or bf16, or a GPU stage"
            )
        self.precision, self.dtype = precision, np.dtype(DTYPES[precision])
        self.compute_dtype = self.dtype
        self.pool, self.constants, self.runtime = BufferPool(), {}, CpuRuntime(precision)

    # -- arrays ------------------------------------------------------------------------------------------------------

    def empty(self, shape, dtype):
        return self.pool.empty(shape, dtype)

    def like(self, array):
        """An uninitialised array of the same shape and dtype."""
        return self.pool.empty(array.shape, array.dtype)

    def add(self, a, b):
        return np.add(a, b, out=self.like(a))

    def codec(self, kind):
        return Codec(kind)

    # -- products and sums over rows ---------------------------------------------------------------------------------

    def matmul(self, a, b, out=None):
        """a (N, C) @ b (C, K) -> (N, K), written to `out` unless it is None. a may be a result of runtime.rounded()."""
        y = self.empty((a.shape[0], b.shape[1]), b.dtype) if out is None else out
        if len(a) == 1 and not is_recording():
            return self.one_row(a, b, y)
        return self.runtime.product(a, b, out=y)

    def add_product(self, a, b, out):
        """Add a @ b to `out`: one call of BLAS reads and writes `out` less often than a product and an addition."""
        if not self.runtime.add_product(a, b, out):
            np.add(out, self.matmul(a, b, self.like(out)), out=out)

    def constant(self, value, n, dtype):
        """A cached vector (n) filled with `value`: a product with it is the fastest sum in NumPy."""
        key = (value, n, dtype)
        if key not in self.constants:
            self.constants[key] = np.full(n, value, dtype)
        return self.constants[key]

    def weight_gradient(self, write, n, shape, dtype, count=1, add=None):
        """The gradient of a parameter of this shape, a sum over n rows, as a function of its Destination.

        write(part, array) writes the sum of the rows `part` to the array; a part is the rows of one of `count`
        micro-batches. add(part, array), if given, adds it, faster than by a new array. The functions must not refer to
        a parameter: they may be called when its memory should be free (Graph.backward).
        """
        parts = even_slices(n, count)

        def gradient(out):
            if out is None:
                return self.canonical_sum(write, parts, self.empty(shape, dtype), add)
            if out.array.ndim > len(shape):  # one gradient for each micro-batch
                for part, array in zip(parts, out.array, strict=True):
                    self.put_sum(write, [part], array, out.accumulate, add)
            else:
                self.put_sum(write, parts, out.array, out.accumulate, add)
            return out.array

        return gradient

    def put_sum(self, write, parts, array, accumulate, add):
        """Write the sum of these parts to `array`, or add it."""
        if not accumulate:
            self.canonical_sum(write, parts, array, add)
        elif add and len(parts) == 1:
            add(parts[0], array)
        else:
            np.add(array, self.canonical_sum(write, parts, self.like(array), add), out=array)

    def canonical_sum(self, write, parts, total, add=None):
        """Write the sum of the parts to `total`, in the canonical order, and return it."""
        width = 2 if add else 1  # the leaves of the tree: two parts, of which the second is added to the first

        def sums():
            for i in range(0, len(parts), width):
                array = total if i == 0 else self.like(total)  # the first array becomes the sum
                write(parts[i], array)
                for part in parts[i + 1 : i + width]:
                    add(part, array)
                yield array
                del array  # otherwise it would stay in memory while the next one is computed

        return tree_reduce(sums(), add_in_place)

    def vector_gradient(self, sums):
        """The gradient of a vector (C), as a function of its Destination. sums(): (M, C), that of each micro-batch."""

        def gradient(out):
            if out is None:
                return tree_sum(sums())
            self.put(tree_sum(sums()) if out.array.ndim == 1 else sums(), out)
            return out.array

        return gradient

    def column_sums(self, x, count):
        """The sum over the rows of x (N, C), divided into `count` micro-batches, as vector_gradient()."""
        ones = self.constant(1, len(x) // count, x.dtype)  # a product is faster than np.sum
        return self.vector_gradient(lambda: np.matmul(ones, x.reshape(count, -1, x.shape[1])))

    def bias_backward(self, dy):
        return self.column_sums(rows(dy), micro_batches(dy))

    def residual_add_forward(self, x, a, a_bias):
        s = self.like(x)
        return np.add(np.add(a, a_bias, out=s), x, out=s)

    # -- linear ------------------------------------------------------------------------------------------------------

    def linear_forward(self, x, w, b=None):
        y = self.matmul(rows(x), w)
        if b is not None:
            np.add(y, b, out=y)
        return y.reshape(*x.shape[:-1], w.shape[1])

    def linear_backward(self, dy, x, w, bias=True):
        count, dy, x2 = micro_batches(dy), rows(dy), rows(x)
        operand = self.runtime.rounded(dy)
        dx = self.matmul(operand, w.T).reshape(x.shape)

        def write(part, dw):
            self.matmul(x2[part].T, operand[part], dw)

        def add(part, dw):
            self.add_product(x2[part].T, operand[part], dw)

        dw = self.weight_gradient(write, len(dy), w.shape, w.dtype, count, add)
        return dx, dw, self.column_sums(dy, count) if bias else None

    # -- gelu: u = A (x + B x^3); y = x (1 + tanh u) / 2 = x s, s = 1 / (1 + exp(-2 u)); dy/dx = s + 2 y (1 - s) du/dx
    #    a training step uses linear_gelu_forward, which keeps dy/dx, and mlp_backward

    def gelu_forward(self, x):
        y = self.like(x)
        self.gelu(x, None, y, None)
        return y

    def gelu_backward(self, dy, x):
        dx = self.like(x)
        self.gelu(x, None, self.like(x), dx)
        return np.multiply(dx, dy, out=dx)

    def gelu(self, x, bias, y, derivative):
        """Write gelu(x + bias) to y, which may be x, and gelu'(x + bias) to `derivative` unless it is None."""
        if derivative is None and x.size == x.shape[-1]:
            return gelu_of_one_row(x, bias, y)
        x, y, derivative = rows(x), rows(y), None if derivative is None else rows(derivative)
        square, sigmoid = (self.empty((min(len(x), block_rows(x)), x.shape[1]), x.dtype) for _ in range(2))
        for block in blocks(x):
            xb, yb = x[block], y[block]
            a, s = square[: len(xb)], sigmoid[: len(xb)]
            if bias is not None:
                xb = np.add(xb, bias, out=yb)
            np.multiply(xb, xb, out=a)  # never x**3: np.power takes hundreds of times as long
            np.multiply(a, -2 * GELU_A * GELU_B, out=s)
            np.subtract(s, 2 * GELU_A, out=s)
            np.multiply(s, xb, out=s)
            with np.errstate(over="ignore"):  # if x is below about -10, exp is infinite in float32, and y is -0
                np.exp(s, out=s)
            np.add(s, 1, out=s)
            np.divide(xb, s, out=yb)
            if derivative is not None:
                d = derivative[block]
                np.divide(1, s, out=s)
                np.multiply(a, 6 * GELU_A * GELU_B, out=a)
                np.add(a, 2 * GELU_A, out=a)
                np.multiply(a, yb, out=a)
                np.subtract(1, s, out=d)
                np.multiply(d, a, out=d)
                np.add(d, s, out=d)

    def linear_gelu_forward(self, x, w, b):
        y = self.linear_forward(x, w)
        slope = self.like(y) if is_recording() else None  # backward needs only the slope, so gelu overwrites its input
        self.gelu(y, b, y, slope)
        return y, slope

    def linear_gelu_backward(self, dy, x, w, b, aux):
        return self.linear_backward(np.multiply(dy, aux, out=self.like(dy)), x, w)

    def mlp_backward(self, dy, x, w, b, w2, aux):
        h, slope = aux
        dh, dw2, _ = self.linear_backward(dy, h, w2, False)
        np.multiply(dh, slope, out=dh)  # in place: writing a new array would load its memory into the cache first
        return *self.linear_backward(dh, x, w), dw2

    # -- layernorm: h = (x - mean) r, r = 1 / sqrt(var + eps); dx = r (g - mean(g) - h mean(g h)), g = dy w ------------

    def layernorm_forward(self, x, w, b, eps):
        return self.residual_layernorm_forward(x, None, None, w, b, eps)[1:]

    def layernorm_backward(self, dy, w, aux):
        dx, _, dw, db = self.residual_layernorm_backward(None, dy, w, aux)
        return dx, dw, db

    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        if x.size == x.shape[-1] and not is_recording():
            return *self.layernorm_of_one_row(x, a, a_bias, w, b, eps), None
        s = x if a is None else self.like(x)
        normalised, y = self.like(x), self.like(x)
        rstd = np.empty(rows(x).shape[0], x.dtype)
        mean_of = self.constant(1 / x.shape[-1], x.shape[-1], x.dtype)
        x2, a2, s2, h2, y2 = rows(x), None if a is None else rows(a), rows(s), rows(normalised), rows(y)
        for block in self.blocks_of_micro_batches(x2, micro_batches(x)):
            sb, h, r = s2[block], h2[block], rstd[block]
            if a is not None:
                np.add(a2[block], a_bias, out=sb)
                np.add(sb, x2[block], out=sb)
            np.subtract(sb, np.matmul(sb, mean_of)[:, None], out=h)
            np.vecdot(h, h, out=r)
            np.multiply(r, 1 / x.shape[-1], out=r)
            np.add(r, eps, out=r)
            np.sqrt(r, out=r)
            np.divide(1, r, out=r)
            np.multiply(h, r[:, None], out=h)
            np.multiply(h, w, out=y2[block])
            np.add(y2[block], b, out=y2[block])
        return s, y, (normalised, rstd)

    def blocks_of_micro_batches(self, x, count):
        """Cache-sized slices of the rows of x (N, C), none of which has rows of two of the `count` micro-batches.

        In a matrix-vector product, the bits of a row can depend on its place in the matrix.
        """
        parts = even_slices(len(x), count)
        return [block for part in parts for block in blocks(x[part], part.start)]

    def residual_layernorm_backward(self, ds, dy, w, aux):
        normalised, rstd = aux
        dx = self.like(dy)
        dy2, h2, dx2, ds2 = rows(dy), rows(normalised), rows(dx), None if ds is None else rows(ds)
        mean_of = self.constant(1 / dy.shape[-1], dy.shape[-1], dy.dtype)
        scratch = self.empty((block_rows(dy2), dy2.shape[1]), dy.dtype)
        count = micro_batches(dy)
        sums = np.zeros((count, dy.shape[-1]), dy.dtype)  # the gradient of w of each micro-batch
        for dw, part in zip(sums, even_slices(len(dy2), count), strict=True):
            for block in blocks(dy2[part], part.start):
                h, g, t = h2[block], dx2[block], scratch[: block.stop - block.start]
                np.multiply(dy2[block], h, out=t)
                dw += np.matmul(self.constant(1, len(t), t.dtype), t)
                mean_gh = np.matmul(t, w / dy.shape[-1])
                np.multiply(dy2[block], w, out=g)
                np.multiply(h, mean_gh[:, None], out=t)
                np.subtract(g, np.matmul(g, mean_of)[:, None], out=g)
                np.subtract(g, t, out=g)
                np.multiply(g, rstd[block][:, None], out=g)
                if ds is not None:
                    np.add(g, ds2[block], out=g)
        dw = self.vector_gradient(lambda: sums)
        return dx, self.column_sums(dx2, count), dw, self.column_sums(dy2, count)

    # -- attention: E = exp(S - c), S = scale q k', causal; y = E v / rowsum(E); c: see exp_of_scores() ---------------
    #    backward: dS = E (dy v' - rowsum(dy y)) / rowsum(E), so E is kept, and E / rowsum(E) is never computed

    def attention_forward(self, qkv, n_head):
        shape, qkv = qkv.shape, sequences(qkv)
        q3, B, T, D = split_heads(qkv, n_head)
        y = self.empty((B, T, n_head * D), qkv.dtype)
        exps = self.empty((B, n_head, T, T), qkv.dtype)  # tiles above the diagonal are never written
        inverse_sums = self.empty((B, n_head, T), qkv.dtype)
        k, factors = self.empty((n_head, D, T), qkv.dtype), self.empty((T, n_head * D), qkv.dtype)
        columns, position = columns_of_heads(n_head, D, qkv.dtype), np.arange(QUERIES)
        later = position > position[:, None]  # (queries, keys): True for keys after the query
        for b in range(B):
            q, v, sums, out = q3[b, 0], q3[b, 2], inverse_sums[b], heads(y[b], n_head)
            copy_transposed(q3[b, 1], k)  # otherwise BLAS transposes k for every tile of queries
            np.multiply(k, D**-0.5, out=k)
            for i in range(0, T, QUERIES):
                j = min(i + QUERIES, T)
                e = exps[b, :, i:j, :j]
                self.exp_of_scores(q[:, i:j], k[:, :, :j], later[: j - i, : j - i], e, sums[:, i:j])
                np.matmul(e, v[:, :j], out=out[:, i:j])
            np.divide(1, sums, out=sums)
            np.multiply(y[b], np.matmul(sums.T, columns, out=factors), out=y[b])
        return y.reshape(*shape[:-1], -1), (exps, inverse_sums)

    def exp_of_scores(self, q, k, later, e, sums):
        """q (H, n, D), k (H, D, m), later (n, n) of the last n keys -> e (H, n, m) = exp(q k), sums of its rows (H, n).

        exp(s - c) / rowsum(exp(s - c)) is the same for any c. So the maximum is subtracted only in rows whose sum would
        be too large or too small.
        """
        ones = np.ones(k.shape[2], e.dtype)
        with np.errstate(over="ignore"):
            np.exp(causal_scores(q, k, later, e), out=e)
            np.matmul(e, ones, out=sums)
        if not (1 / LARGEST_SUM < sums.min() and sums.max() < LARGEST_SUM):
            extreme = ~((sums > 1 / LARGEST_SUM) & (sums < LARGEST_SUM))
            maxima = np.maximum.reduce(causal_scores(q, k, later, e), axis=2)
            np.subtract(e, np.where(extreme, maxima, 0)[:, :, None], out=e)
            np.matmul(np.exp(e, out=e), ones, out=sums)

    def attention_backward(self, dy, qkv, y, aux, n_head):
        exps, inverse_sums = aux
        shape, dy, qkv, y = qkv.shape, sequences(dy), sequences(qkv), sequences(y)
        q3, B, T, D = split_heads(qkv, n_head)
        dqkv = self.like(qkv)
        d3 = split_heads(dqkv, n_head)[0]
        v, ds = self.empty((n_head, D + 1, T), qkv.dtype), self.empty((n_head, T, T), qkv.dtype)
        dys, scaled = self.empty((n_head, T, D + 1), qkv.dtype), self.empty((T, n_head * D), qkv.dtype)
        columns = columns_of_heads(n_head, D, qkv.dtype)
        for b in range(B):
            q, k = q3[b, 0], q3[b, 1]
            # dys = dy / rowsum(E); scale (dys v' - rowsum(dys y)) is (dys, -rowsum(dys y)) times scale (v, 1)'
            copy_transposed(q3[b, 2], v[:, :D])
            v[:, D] = 1
            np.multiply(v, D**-0.5, out=v)
            np.multiply(dy[b], np.matmul(inverse_sums[b].T, columns, out=scaled), out=scaled)
            np.copyto(dys[:, :, :D], heads(scaled, n_head))
            np.negative(np.vecdot(heads(scaled, n_head), heads(y[b], n_head)), out=dys[:, :, D])
            for i in range(0, T, QUERIES):
                j = min(i + QUERIES, T)
                g = ds[:, i:j, :j]
                np.matmul(dys[:, i:j], v[:, :, :j], out=g)
                np.multiply(g, exps[b, :, i:j, :j], out=g)
                np.matmul(g, k[:, :j], out=d3[b, 0, :, i:j])
            for i in range(0, T, QUERIES):
                j = min(i + QUERIES, T)
                np.matmul(exps[b, :, i:, i:j].transpose(0, 2, 1), dys[:, i:, :D], out=d3[b, 2, :, i:j])
                np.matmul(ds[:, i:, i:j].transpose(0, 2, 1), q[:, i:], out=d3[b, 1, :, i:j])
        return dqkv.reshape(shape)

    # -- flat buffers ------------------------------------------------------------------------------------------------

    def page_sums(self, flat):
        pages = flat.reshape(-1, PAGE)
        return np.vecdot(pages, pages)  # the pages are short enough to add in the dtype of flat

    def clip(self, sums, clip, guard=None):
        segments = sums.reshape(SEGMENTS, -1).sum(1, dtype=np.float64)
        return super().clip(np.array([tree_sum(segments.tolist())]), clip)

    def adamw_step(self, p, m, v, g, coefficients, factor, decays, betas, copy=None):
        if math.isnan(factor):
            return
        # p -= lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p), c = 1 - beta^step, with c2 moved out of the root
        (rate, eps, shrink), (beta1, beta2), factor = coefficients.tolist(), betas, float(factor)
        width = BLOCK // 2
        t, u = (self.empty((width,), p.dtype) for _ in range(2))
        for block, decay in decay_slices(decays, width):
            pb, gb, mb, vb = p[block], g[block], m[block], v[block]
            a, b = t[: len(pb)], u[: len(pb)]
            if factor != 1.0:
                gb = np.multiply(gb, factor, out=b)
            np.multiply(mb, beta1, out=mb)
            np.multiply(gb, 1 - beta1, out=a)
            np.add(mb, a, out=mb)
            np.multiply(gb, gb, out=a)
            np.multiply(a, 1 - beta2, out=a)
            np.multiply(vb, beta2, out=vb)
            np.add(vb, a, out=vb)
            np.sqrt(vb, out=a)
            np.add(a, eps, out=a)
            np.divide(mb, a, out=a)
            np.multiply(a, rate, out=a)
            if decay and shrink != 1.0:
                np.multiply(pb, shrink, out=pb)
            np.subtract(pb, a, out=pb)


def add_in_place(a, b):
    return np.add(a, b, out=a)


def decay_slices(decays, width):
    """Yield (slice of up to `width` elements, whether weight decay applies), from one flag for each page."""
    edges = [0, *(np.flatnonzero(np.diff(decays)) + 1).tolist(), len(decays)]
    for first, last in zip(edges, edges[1:], strict=False):
        for start in range(first * PAGE, last * PAGE, width):
            yield slice(start, min(start + width, last * PAGE)), decays[first]


def gelu_of_one_row(x, bias, y):
    """Write gelu(x + bias) to y, which may be x: fewer NumPy calls, which dominate the time of one row."""
    x = x if bias is None else np.add(x, bias, out=y)
    u = x * x
    u *= -2 * GELU_A * GELU_B
    u -= 2 * GELU_A
    u *= x
    with np.errstate(over="ignore"):
        np.exp(u, out=u)
    u += 1
    np.divide(x, u, out=y)


def heads(x, n_head):
    """(T, C) as (H, T, D), a view."""
    return x.reshape(x.shape[0], n_head, -1).transpose(1, 0, 2)


def split_heads(qkv, n_head):
    """(B, T, 3C) as a view (B, 3, H, T, D), and B, T, D."""
    B, T, C3 = qkv.shape
    return qkv.reshape(B, T, 3, n_head, -1).transpose(0, 2, 3, 1, 4), B, T, C3 // 3 // n_head


def columns_of_heads(n_head, D, dtype):
    """A matrix (H, C) of ones and zeros: x (T, H) @ matrix is (T, C), with x[:, h] in all D columns of head h."""
    return np.repeat(np.eye(n_head, dtype=dtype), D, axis=1)


def copy_transposed(x, out):
    """Copy x (H, T, D) to out (H, D, T) in blocks of rows, which stay in the cache until all columns are copied."""
    for part in slices(0, x.shape[1], QUERIES):
        np.copyto(out[:, :, part], x[:, part].transpose(0, 2, 1))


def causal_scores(q, k, later, s):
    """Write q (H, n, D) @ k (H, D, m) to s (H, n, m), and -inf where `later` (n, n) is True in the last n columns."""
    np.matmul(q, k, out=s)
    np.copyto(s[:, :, s.shape[2] - s.shape[1] :], -np.inf, where=later)
    return s
