"""The kernels in NumPy: elementwise operations are ufuncs with `out=`, large products use BLAS, memory is reused."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows

import math

import numpy as np

from gpt2core.arena import BLOCK as ARENA_BLOCK
from gpt2core.errors import ConfigError
from gpt2core.parallel.codecs import Codec
from gpt2core.parallel.even_slices import even_slices
from gpt2core.parallel.tree_sum import tree_sum
from gpt2core.tensor import is_recording
from stage0_serial.buffer_pool import BufferPool
from stage0_serial.cpu_runtime import CpuRuntime
from stage0_serial.generation import GenerationKernels
from stage0_serial.rows import BLOCK, block_rows, blocks, rows, slices
from stage0_serial.vocabulary import VocabularyKernels

QUERIES = 64  # query rows of one attention block; blocks above the diagonal are skipped
# Of the exponentials of a row of scores; the smallest sum is 1 / LARGEST_SUM. So E v and dy / rowsum(E) stay far inside
# the range of float32.
LARGEST_SUM = 1e20
GELU_A, GELU_B = math.sqrt(2 / math.pi), 0.044715  # Python floats: with np.float64, NumPy would compute in float64
DTYPES = {"fp32": np.float32, "fp64": np.float64, "bf16": np.float32}  # bf16: see bf16_products.py


class NumpyBackend(VocabularyKernels, GenerationKernels):
    """NumPy arrays on the host; one instance per thread, because its buffers are reused without locks."""

    name = "numpy"
    xp = np
    many_ranks = "stage 1"
    merges_micro_batches = True

    def __init__(self, precision="fp32", deterministic=True):
        if precision not in DTYPES:
            raise ConfigError(
                f"--precision {precision} is not available on the CPU: use --precision fp32 or bf16, or a GPU stage"
            )
        self.precision, self.dtype = precision, np.dtype(DTYPES[precision])
        self.compute_dtype = self.dtype
        self.pool, self.constants, self.runtime = BufferPool(), {}, CpuRuntime(precision)
        self.window_pools = {}  # {sizes of a model: the WorkerPool that computes its windows}, see token_step.py

    # -- arrays ------------------------------------------------------------------------------------------------------

    def empty(self, shape, dtype):
        return self.pool.empty(shape, dtype)

    def asarray(self, array, dtype=None):
        return np.asarray(array, dtype)

    def to_host(self, array):
        return np.asarray(array)

    def like(self, array):
        """An uninitialised array of the same shape and dtype."""
        return self.pool.empty(array.shape, array.dtype)

    def add(self, a, b):
        return np.add(a, b, out=self.like(a))

    def codec(self, kind):
        return Codec(kind)

    # -- linear ------------------------------------------------------------------------------------------------------

    def matmul(self, a, b, out=None):
        """a (N, C) @ b (C, K) -> (N, K), written to `out` unless it is None. a may be a result of runtime.rounded()."""
        y = self.empty((a.shape[0], b.shape[1]), b.dtype) if out is None else out
        if len(a) == 1 and not is_recording():
            return self.one_row(a, b, y)
        return self.runtime.product(a, b, out=y)

    def constant(self, value, n, dtype):
        """A cached vector (n) filled with `value`: a product with it is the fastest sum in NumPy."""
        key = (value, n, dtype)
        if key not in self.constants:
            self.constants[key] = np.full(n, value, dtype)
        return self.constants[key]

    def sum_over_rows(self, sum_of, n, template, out=None):
        """The sum over n rows, of the shape of `template`; sum_of(part, array) writes the sum of the rows `part`.

        A part is the slice of the rows of one micro-batch. The sums of all micro-batches are added in the canonical
        order. out: an array for the result, or one array for each micro-batch (micro-batches, ...); then the first one
        is the result.
        """
        parts = even_slices(n, self.micro_batches)
        if out is None:
            return self.sum_of_parts(sum_of, parts, self.like(template), None)
        if out.ndim == template.ndim:
            return self.sum_of_parts(sum_of, parts, out, None)
        return self.sum_of_parts(sum_of, parts, out[0], out)

    def sum_of_parts(self, sum_of, parts, total, scratch):
        """Write the sum over `parts` to `total` and return it. scratch: an array for each part, or None.

        A method, because a nested function that calls itself keeps its arrays until the garbage collector runs.
        """
        if len(parts) == 1:
            sum_of(parts[0], total)
            return total
        middle = len(parts) // 2
        first, second = (None, None) if scratch is None else (scratch[:middle], scratch[middle:])
        self.sum_of_parts(sum_of, parts[:middle], total, first)
        other = self.like(total) if scratch is None else second[0]
        return np.add(total, self.sum_of_parts(sum_of, parts[middle:], other, second), out=total)

    def column_sums(self, x, template, out=None):
        """x (N, C) -> its sum over rows (C), of the shape of `template`; out: as in sum_over_rows()."""

        def sum_of(part, total):
            np.matmul(self.constant(1, part.stop - part.start, x.dtype), x[part], out=total)  # faster than np.sum

        return self.sum_over_rows(sum_of, len(x), template, out)

    def linear_forward(self, x, w, b=None):
        y = self.matmul(rows(x), w)
        if b is not None:
            np.add(y, b, out=y)
        return y.reshape(*x.shape[:-1], w.shape[1])

    def linear_backward(self, dy, x, w, bias=True, out=(None, None)):
        dy, x2 = rows(dy), rows(x)
        operand = self.runtime.rounded(dy)
        dx = self.matmul(operand, w.T).reshape(x.shape)
        dw = self.sum_over_rows(lambda part, total: self.matmul(x2[part].T, operand[part], total), len(dy), w, out[0])
        return dx, dw, self.column_sums(dy, w[0], out[1]) if bias else None

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

    def linear_gelu_backward(self, dy, x, w, aux, out=(None, None)):
        return self.linear_backward(np.multiply(dy, aux, out=self.like(dy)), x, w, out=out)

    def mlp_backward(self, dy, x, w, w2, aux, out=(None, None, None)):
        h, slope = aux
        dh, dw2, _ = self.linear_backward(dy, h, w2, False, (out[2], None))
        np.multiply(dh, slope, out=dh)  # in place: writing a new array would load its memory into the cache first
        return *self.linear_backward(dh, x, w, out=out[:2]), dw2

    # -- layernorm: h = (x - mean) r, r = 1 / sqrt(var + eps); dx = r (g - mean(g) - h mean(g h)), g = dy w ------------

    def layernorm_forward(self, x, w, b, eps):
        return self.residual_layernorm_forward(x, None, None, w, b, eps)[1:]

    def layernorm_backward(self, dy, w, aux, out=(None, None)):
        dx, _, dw, db = self.residual_layernorm_backward(None, dy, w, aux, (None, *out))
        return dx, dw, db

    def residual_layernorm_forward(self, x, a, a_bias, w, b, eps):
        if x.size == x.shape[-1] and not is_recording():
            return *self.layernorm_of_one_row(x, a, a_bias, w, b, eps), None
        s = x if a is None else self.like(x)
        normalised, y = self.like(x), self.like(x)
        rstd = np.empty(rows(x).shape[0], x.dtype)
        mean_of = self.constant(1 / x.shape[-1], x.shape[-1], x.dtype)
        x2, a2, s2, h2, y2 = rows(x), None if a is None else rows(a), rows(s), rows(normalised), rows(y)
        for block in self.blocks_of_micro_batches(x2):
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

    def blocks_of_micro_batches(self, x):
        """Cache-sized slices of the rows of x (N, C), none of which has rows of two micro-batches.

        In a matrix-vector product, the bits of a row can depend on its place in the matrix.
        """
        parts = even_slices(len(x), self.micro_batches)
        return [block for part in parts for block in blocks(x[part], part.start)]

    def residual_layernorm_backward(self, ds, dy, w, aux, out=(None, None, None)):
        normalised, rstd = aux
        dx = self.like(dy)
        dy2, h2, dx2, ds2 = rows(dy), rows(normalised), rows(dx), None if ds is None else rows(ds)
        mean_of = self.constant(1 / dy.shape[-1], dy.shape[-1], dy.dtype)
        scratch = self.empty((block_rows(dy2), dy2.shape[1]), dy.dtype)

        def sum_of(part, dw):  # also writes the rows of dx
            dw[...] = 0
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

        dw = self.sum_over_rows(sum_of, len(dy2), w, out[1])
        return dx, self.column_sums(dx2, w, out[0]), dw, self.column_sums(dy2, w, out[2])

    # -- attention: E = exp(S - c), S = scale q k', causal; y = E v / rowsum(E); c: see exp_of_scores() ---------------
    #    backward: dS = E (dy v' - rowsum(dy y)) / rowsum(E), so E is kept, and E / rowsum(E) is never computed

    def attention_forward(self, qkv, n_head):
        q3, B, T, D = split_heads(qkv, n_head)
        y = self.empty((B, T, n_head * D), qkv.dtype)
        exps = self.empty((B, n_head, T, T), qkv.dtype)  # blocks above the diagonal are never written
        inverse_sums = self.empty((B, n_head, T), qkv.dtype)
        k, factors = self.empty((n_head, D, T), qkv.dtype), self.empty((T, n_head * D), qkv.dtype)
        columns, position = columns_of_heads(n_head, D, qkv.dtype), np.arange(QUERIES)
        later = position > position[:, None]  # (queries, keys): True for keys after the query
        for b in range(B):
            q, v, sums, out = q3[b, 0], q3[b, 2], inverse_sums[b], heads(y[b], n_head)
            copy_transposed(q3[b, 1], k)  # otherwise BLAS transposes k for every block of queries
            np.multiply(k, D**-0.5, out=k)
            for i in range(0, T, QUERIES):
                j = min(i + QUERIES, T)
                e = exps[b, :, i:j, :j]
                self.exp_of_scores(q[:, i:j], k[:, :, :j], later[: j - i, : j - i], e, sums[:, i:j])
                np.matmul(e, v[:, :j], out=out[:, i:j])
            np.divide(1, sums, out=sums)
            np.multiply(y[b], np.matmul(sums.T, columns, out=factors), out=y[b])
        return y, (exps, inverse_sums)

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
        return dqkv

    # -- flat buffers ------------------------------------------------------------------------------------------------

    def sum_of_squares(self, flat, segments):
        rows_each = len(flat) // ARENA_BLOCK // max(1, segments)  # rows are blocks, short enough to add in flat's dtype
        parts = flat.reshape(segments, rows_each, ARENA_BLOCK)
        return np.array([np.vecdot(part, part).sum(dtype=np.float64) for part in parts])

    def clip(self, squares, bound, loss_scale=None, interval=0, stop=None):
        norm = np.float64(math.sqrt(tree_sum(squares.tolist())))
        if stop is not None:
            stop += 0.0 * float(norm)  # NaN if norm is not finite; a NumPy scalar would cause a warning
        if not math.isfinite(norm) or (stop is not None and np.isnan(stop[0])):
            return norm, np.float64(math.nan)
        return norm, np.float64(min(1.0, bound / (norm + 1e-6)) if bound else 1.0)

    def adamw_step(self, p, m, v, compute_copy, g, hyper, grad_scale, decays, betas, offset=0):
        if math.isnan(grad_scale):
            return
        # p -= lr (m / c1 / (sqrt(v / c2) + eps) + weight_decay p), c = 1 - beta^step, with c2 moved out of the root
        (rate, eps, shrink), (beta1, beta2), grad_scale = hyper.scalars.tolist(), betas, float(grad_scale)
        width = BLOCK // 2
        t, u = (self.empty((width,), p.dtype) for _ in range(2))
        for block, decay in decay_blocks(decays, width):
            pb, gb, mb, vb = p[block], g[block], m[block], v[block]
            a, b = t[: len(pb)], u[: len(pb)]
            if grad_scale != 1.0:
                gb = np.multiply(gb, grad_scale, out=b)
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


def decay_blocks(decays, width):
    """Yield (slice of up to `width` elements, whether weight decay applies), from one flag per arena block."""
    edges = [0, *(np.flatnonzero(np.diff(decays)) + 1).tolist(), len(decays)]
    for first, last in zip(edges, edges[1:], strict=False):
        for start in range(first * ARENA_BLOCK, last * ARENA_BLOCK, width):
            yield slice(start, min(start + width, last * ARENA_BLOCK)), decays[first]


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
