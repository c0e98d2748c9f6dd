"""The checks of stage 0: kernels against float64, and three training steps against the repository's own backend."""

# B batch, T time, C channels, H heads, D = C // H, N = B*T rows

import numpy as np

from exercises.checks.common import expect_curve, random, real
from exercises.compare import Mismatch, expect

FP64 = 1e-12  # relative norm: a few roundings of 1e-16, more in a sum
FP32 = 1e-5  # relative norm: a few roundings of 6e-8, more in a sum


# -- 0.1 softmax -------------------------------------------------------------------------------------------------------


def softmax_with_gradient(x, axis, dy):
    """(softmax(x), gradient of x) of the student's function, for the gradient dy of the result."""
    from gpt2core import primitives
    from gpt2core.tensor import Tensor
    from stage0_serial.numpy_backend import NumpyBackend

    leaf = Tensor(x.copy(), NumpyBackend("fp64"), requires_grad=True)
    result = primitives.softmax(leaf, axis)
    if not isinstance(result, Tensor):
        raise Mismatch("the result is not a Tensor", "Return Tensor.from_op(y, (x,), backward).")
    if not result.requires_grad:
        raise Mismatch("the result has no gradient", "Create the result by Tensor.from_op(y, (x,), backward).")
    result.backward(dy.copy())
    return result.data, leaf.grad


def softmax_rows():
    x, dy = random().standard_normal((3, 5)), np.ones((3, 5))
    for axis in (-1, 0):
        e, e2 = np.exp(x), np.exp(x - x.max(axis, keepdims=True))
        want = e / e.sum(axis, keepdims=True)
        wrong = [
            (e, "The result is exp(x): it is not divided by the sum of the exponentials along `axis`."),
            (e2, "The result is not divided by the sum along `axis`."),
            (e / e.sum(-1 - axis, keepdims=True), "The sum runs along the wrong axis: use the argument `axis`."),
            (e2 / e2.sum(-1 - axis, keepdims=True), "The sum runs along the wrong axis: use the argument `axis`."),
            (e / e.sum(), "The sum runs over the whole array: sum along `axis`, with keepdims=True."),
        ]
        got, _ = softmax_with_gradient(x, axis, dy)
        expect(f"softmax(x, axis={axis})", got, want, FP64, wrong, "y = e / e.sum(axis, keepdims=True) in softmax")


def softmax_large():
    x = random().standard_normal((3, 5)) + 1000
    e = np.exp(x - 1000)
    wrong = [
        (np.full((3, 5), np.nan), "exp(1000) is infinite: subtract the maximum along `axis` from x before exp."),
    ]
    with np.errstate(all="ignore"):
        got, _ = softmax_with_gradient(x, -1, np.ones((3, 5)))
    want = e / e.sum(-1, keepdims=True)
    expect("softmax of numbers near 1000", got, want, 1e-10, wrong, "the subtraction of the maximum in softmax")


def softmax_gradient():
    x, dy = random().standard_normal((3, 5)), random(1).standard_normal((3, 5))
    for axis in (-1, 0):
        e = np.exp(x)
        y = e / e.sum(axis, keepdims=True)
        total = (dy * y).sum(axis, keepdims=True)
        wrong = [
            (y * dy, "The gradient lacks the term sum(dy * y): every element of y depends on every element of x."),
            (y * (1 - y) * dy, "y * (1 - y) is only the diagonal of the Jacobian: use dy - sum(dy * y)."),
            (y * (dy + total), "The sign of sum(dy * y) is wrong: it is subtracted from dy."),
            (y * (dy - dy.sum(axis, keepdims=True)), "The sum lacks y: it is sum(dy * y), not sum(dy)."),
            (dy - total, "The gradient lacks the factor y in front of (dy - sum(dy * y))."),
            (y * (dy - (dy * y).sum(-1 - axis, keepdims=True)), "sum(dy * y) runs along the wrong axis: use `axis`."),
        ]
        _, got = softmax_with_gradient(x, axis, dy)
        expect(f"the gradient of softmax(x, axis={axis})", got, y * (dy - total), FP64, wrong, "backward in softmax")


# -- 0.2 LayerNorm -----------------------------------------------------------------------------------------------------

LAYERNORM = "residual_layernorm_backward"


def layernorm_case(ds=False):
    """(the student's dx, da_bias, dw, db; float64 arrays x, r, h, g, dy, ds by name) for 6 rows of 8 channels."""
    from stage0_serial.numpy_backend import NumpyBackend

    rng, backend = random(), NumpyBackend("fp64")
    x, dy = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 3, 8))
    w, residual = rng.standard_normal(8) + 1, rng.standard_normal((2, 3, 8)) if ds else None
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    r = 1 / np.sqrt(variance + 1e-5)
    h = (x - mean) * r
    aux = h.copy(), r.reshape(-1).copy()
    got = backend.residual_layernorm_backward(residual, dy.copy(), w.copy(), aux)
    if not isinstance(got, tuple | list) or len(got) != 4:
        raise Mismatch(f"{LAYERNORM} must return 4 arrays", "Return dx, da_bias, dw, db, in this order.")
    return got, dict(x=x, dy=dy, w=w, r=r, h=h, g=dy * w, ds=residual)


def mean(array):
    return array.mean(-1, keepdims=True)


def layernorm_dx():
    (dx, *_), case = layernorm_case()
    r, h, g, dy = (case[name] for name in ("r", "h", "g", "dy"))
    want = r * (g - mean(g) - h * mean(g * h))
    wrong = [
        (r * (g - h * mean(g * h)), "dx lacks the term mean(g): the mean of the row also depends on x."),
        (r * (g - mean(g)), "dx lacks the term h * mean(g * h): the variance of the row also depends on x."),
        (r * g, "dx lacks the terms mean(g) and h * mean(g * h)."),
        (r * (g - mean(g) + h * mean(g * h)), "The sign of h * mean(g * h) is wrong: both terms are subtracted from g."),
        (r * (g + mean(g) - h * mean(g * h)), "The sign of mean(g) is wrong: both terms are subtracted from g."),
        (r * (g - mean(g) - mean(g * h)), "The term mean(g * h) lacks its factor h."),
        (g - mean(g) - h * mean(g * h), "dx lacks the factor r = rstd."),
        ((g - mean(g) - h * mean(g * h)) / r, "dx is divided by r = rstd: multiply by it."),
        (r * (dy - mean(dy) - h * mean(dy * h)), "dx lacks the weight: use g = dy * w in place of dy."),
        (r * (g - mean(g) - h * mean(dy * h)), "The second term lacks the weight: it is h * mean(g * h) with g = dy * w."),
        (
            r * (g - g.sum(-1, keepdims=True) - h * (g * h).sum(-1, keepdims=True)),
            "The two terms are means over the C channels, not sums: divide by C.",
        ),
    ]
    expect("dx", dx, want, FP64, wrong, f"the lines of {LAYERNORM} that compute dx")


def layernorm_parameters():
    (_, _, dw, db), case = layernorm_case()
    dy, h, g, x = (case[name].reshape(6, 8) for name in ("dy", "h", "g", "x"))
    wrong_dw = [
        (dy.sum(0), "dw lacks the factor h: it is the sum over the rows of dy * h."),
        ((g * h).sum(0), "dw contains the weight: it is the sum over the rows of dy * h, with dy, not with g = dy * w."),
        ((dy * x).sum(0), "dw uses x in place of the normalised h."),
    ]
    wrong_db = [
        (g.sum(0), "db contains the weight: it is the sum over the rows of dy, not of g = dy * w."),
        ((dy * h).sum(0), "db is the sum over the rows of dy, without h: are dw and db in the wrong order?"),
    ]
    rows = [(1 / 6, "{} is a mean over the rows: use a sum over the rows.")]
    look = f"the sums over the rows in {LAYERNORM}"
    expect("dw", dw, (dy * h).sum(0), FP64, wrong_dw, look, [(f, hint.format("dw")) for f, hint in rows])
    expect("db", db, dy.sum(0), FP64, wrong_db, look, [(f, hint.format("db")) for f, hint in rows])


def layernorm_residual():
    (dx, da_bias, *_), case = layernorm_case(ds=True)
    r, h, g, ds = (case[name] for name in ("r", "h", "g", "ds"))
    through = r * (g - mean(g) - h * mean(g * h))
    wrong = [
        (through, "dx lacks ds: the gradient of the residual stream is added to the gradient through LayerNorm."),
        (through + r * ds, "ds is multiplied by rstd: add it after the multiplication."),
    ]
    expect("dx", dx, through + ds, FP64, wrong, f"the place of {LAYERNORM} where ds is added")
    total = (through + ds).reshape(6, 8)
    wrong = [
        (through.reshape(6, 8).sum(0), "da_bias is the sum over the rows of the complete dx, ds included."),
        (ds.reshape(6, 8).sum(0), "da_bias is the sum over the rows of the complete dx, not only of ds."),
    ]
    expect("da_bias", da_bias, total.sum(0), FP64, wrong, "the column sums of dx", [(1 / 6, "da_bias is a mean.")])


def layernorm_model():
    from stage0_serial.numpy_backend import NumpyBackend

    expect_curve(NumpyBackend, "the argument `out` and the sums over micro-batches: use self.column_sums(..., out[i])")


# -- 0.3 attention -----------------------------------------------------------------------------------------------------


def attention_case(T):
    """(the student's backend, qkv (2, T, 24), dy (2, T, 8), heads H = 2): more than one block of queries, D = 4."""
    from stage0_serial.numpy_backend import NumpyBackend

    rng = random()
    return NumpyBackend("fp64"), rng.standard_normal((2, T, 24)), rng.standard_normal((2, T, 8)), 2


def heads_of(array, parts, H):
    """(B, T, parts C) as (parts, B, H, T, D)."""
    B, T, columns = array.shape
    return array.reshape(B, T, parts, H, -1).transpose(2, 0, 3, 1, 4)


def joined(array):
    """(B, H, T, D) as (B, T, C)."""
    B, H, T, D = array.shape
    return array.transpose(0, 2, 1, 3).reshape(B, T, H * D)


def probabilities(q, k, scale, mask=0):
    """softmax(scale q k') with the keys up to query + mask; mask None: all keys."""
    s = scale * q @ k.swapaxes(-1, -2)
    if mask is not None:
        s = np.where(np.tri(*s.shape[-2:], mask, dtype=bool), s, -np.inf)
    with np.errstate(all="ignore"):
        e = np.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)


def attention_output(backend, qkv, H):
    got = backend.attention_forward(qkv.copy(), H)
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Mismatch("attention_forward must return two values", "Return y, aux; aux is what your backward needs.")
    return got


def attention_values():
    for T in (6, 70):
        expect_attention(T)


def expect_attention(T):
    backend, qkv, _, H = attention_case(T)
    y, _ = attention_output(backend, qkv, H)
    q, k, v = heads_of(qkv, 3, H)
    D = q.shape[-1]
    p = probabilities(q, k, D**-0.5)
    raw = np.where(np.tri(T, dtype=bool), np.exp(q @ k.swapaxes(-1, -2) * D**-0.5), 0)
    columns = raw / raw.sum(-2, keepdims=True)
    want = joined(p @ v)
    wrong = [
        (joined(probabilities(q, k, 1.0) @ v), "The scores lack the factor 1/sqrt(D)."),
        (joined(probabilities(q, k, 1 / D) @ v), "The scores are divided by D: the factor is 1/sqrt(D)."),
        (
            joined(probabilities(q, k, qkv.shape[2] ** -0.5 * 3**0.5) @ v),
            "The scores are divided by sqrt(C): the factor is 1/sqrt(D), with D = C / n_head.",
        ),
        (joined(probabilities(q, k, D**-0.5, None) @ v), "The causal mask is missing: query i attends to keys 0 to i."),
        (
            joined(probabilities(q, k, D**-0.5, 1) @ v),
            "The causal mask is off by one: query i also attends to key i + 1. It attends to the keys 0 to i.",
        ),
        (
            joined(probabilities(q, k, D**-0.5, -1) @ v),
            "The causal mask is off by one: query i does not attend to its own key i. It attends to the keys 0 to i.",
        ),
        (joined(raw @ v), "The result is not divided by the sum of the exponentials of each row."),
        (joined(columns @ v), "The softmax runs along the queries: it runs along the keys, the last axis of the scores."),
        ((p @ v).reshape(want.shape), "The heads are not moved back: transpose (H, T, D) to (T, H, D) before reshape."),
    ]
    expect(f"y of {T} positions", y, want, FP64, wrong, "attention_forward: the scores, the mask, the softmax and the product with v")


def attention_future():
    backend, qkv, _, H = attention_case(70)
    before = np.array(attention_output(backend, qkv, H)[0])
    changed = qkv.copy()
    changed[:, 40:] += 1
    after = attention_output(backend, changed, H)[0]
    expect(
        "y of the positions 0 to 39, after a change of the positions from 40 on", after[:, :40], before[:, :40], FP64,
        look="the causal mask in attention_forward: query i attends to the keys 0 to i",
    )  # fmt: skip
    if np.array_equal(after[:, 40:], before[:, 40:]):
        raise Mismatch("y does not depend on the input", "Look at attention_forward.")


def attention_gradient():
    for T in (6, 70):
        expect_attention_gradient(T)


def expect_attention_gradient(T):
    backend, qkv, dy, H = attention_case(T)
    y, aux = attention_output(backend, qkv, H)
    dqkv = backend.attention_backward(dy.copy(), qkv.copy(), y, aux, H)
    q, k, v = heads_of(qkv, 3, H)
    (g,) = heads_of(dy, 1, H)
    scale = q.shape[-1] ** -0.5
    p = probabilities(q, k, scale)
    dp = g @ v.swapaxes(-1, -2)
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta)
    if dqkv is None or np.shape(dqkv) != qkv.shape:
        raise Mismatch(f"attention_backward must return dqkv {qkv.shape}", "Return the gradients of q, k, v side by side.")
    got_q, got_k, got_v = np.split(np.asarray(dqkv), 3, axis=2)

    def dq(ds, scale=scale):
        return joined(ds @ k * scale)

    def dk(ds, scale=scale):
        return joined(ds.swapaxes(-1, -2) @ q * scale)

    without_delta = "ds lacks the term delta = sum(dp * p) of each row: ds = p * (dp - delta)."
    not_p = "ds lacks the factor p: ds = p * (dp - delta)."
    sign = "The sign of delta is wrong: ds = p * (dp - delta)."
    look = "attention_backward: "
    s = np.where(np.tri(T, dtype=bool), scale * q @ k.swapaxes(-1, -2), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    wrong = [
        (joined(e @ (g / e.sum(-1, keepdims=True))), "dv lacks a transpose: it is p' dy, with the transpose of p."),
        (joined(p @ g), "dv lacks a transpose: it is p' dy, with the transpose of p."),
        (joined(p.swapaxes(-1, -2) @ g * scale), "dv has a factor 1/sqrt(D) too many: only dq and dk have it."),
    ]
    expect("dv", got_v, joined(p.swapaxes(-1, -2) @ g), FP64, wrong, look + "the line that computes dv = p' dy")
    for name, got, gradient, other in (("dq", got_q, dq, k), ("dk", got_k, dk, q)):
        wrong = [
            (gradient(ds, 1.0), f"{name} lacks the factor 1/sqrt(D)."),
            (gradient(ds, scale**2), f"{name} has the factor 1/sqrt(D) twice."),
            (gradient(p * dp), without_delta),
            (gradient(dp - delta), not_p),
            (gradient(p * (dp + delta)), sign),
            (
                joined((ds.swapaxes(-1, -2) if name == "dq" else ds) @ other * scale),
                f"{name} uses {'the transpose of ds' if name == 'dq' else 'ds'}: dq = ds k, but dk = ds' q.",
            ),
        ]
        expect(name, got, gradient(ds), FP64, wrong, look + f"the line that computes {name}, and ds = p * (dp - delta)")


def attention_model():
    from stage0_serial.numpy_backend import NumpyBackend

    expect_curve(NumpyBackend, "attention_forward and attention_backward: are arrays reused that are still needed?")


# -- 0.4 AdamW ---------------------------------------------------------------------------------------------------------

LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.8, 0.95, 1e-3, 0.1


def adamw_scalars():
    from gpt2core.optimizer import adamw_scalars

    for step in (1, 3):
        c1, c2 = 1 - BETA1**step, 1 - BETA2**step
        after1, after2 = 1 - BETA1 ** (step + 1), 1 - BETA2 ** (step + 1)
        shrink, root = 1 - LR * DECAY, np.sqrt(c2)
        wrong = [
            ([LR, EPS, shrink], "The bias corrections c1 = 1 - beta1^step and c2 = 1 - beta2^step are missing."),
            ([LR / c1 * root, EPS, shrink], "eps is not multiplied by sqrt(c2): see the page for why it must be."),
            ([LR / c1, EPS * root, shrink], "rate lacks the factor sqrt(c2)."),
            ([LR / c1 * c2, EPS * c2, shrink], "c2 appears without its square root."),
            ([LR / after1 * np.sqrt(after2), EPS * np.sqrt(after2), shrink], "The exponent is off by one: it is `step`."),
            ([LR * c1 / root, EPS * root, shrink], "rate is multiplied by c1 and divided by sqrt(c2): it is lr / c1 * sqrt(c2)."),
            ([LR / c1 * root, EPS * root, LR * DECAY], "shrink is 1 - lr * weight_decay."),
            ([LR / c1 * root, EPS * root, 1 - DECAY], "shrink lacks the learning rate: it is 1 - lr * weight_decay."),
        ]
        want = np.array([LR / c1 * root, EPS * root, shrink])
        got = adamw_scalars(step, LR, BETA1, BETA2, EPS, DECAY)
        expect(f"adamw_scalars(step={step})", got, want, FP64, wrong, "the body of adamw_scalars")


def adamw_run(steps, grad_scale=1.0, decays=(1, 0)):
    """(p, m, v) of the student's adamw_step after some steps from p0, and the gradients; two arena blocks."""
    from gpt2core.optimizer import Hyperparameters
    from stage0_serial.numpy_backend import NumpyBackend

    scalars = real("gpt2core/optimizer.py").adamw_scalars
    rng = random(4)
    p, m, v = rng.standard_normal(2048), np.zeros(2048), np.zeros(2048)
    start, gradients = p.copy(), [rng.standard_normal(2048) * 0.1 for _ in range(steps)]
    backend = NumpyBackend("fp64")
    for number, g in enumerate(gradients, 1):
        hyper = Hyperparameters(scalars(number, LR, BETA1, BETA2, EPS, DECAY), None)
        flags = np.array(decays, np.int32)
        backend.adamw_step(p, m, v, None, g.copy(), hyper, np.float64(grad_scale), flags, (BETA1, BETA2))
    return (p, m, v), start, gradients


def adamw_moments():
    (_, m, v), _, (g,) = adamw_run(1)
    in_place = "The array is not changed: adamw_step must change p, m and v in place, as in m[...] = ..."
    wrong = [
        (np.zeros(2048), in_place),
        (BETA1 * g, "beta1 and 1 - beta1 are exchanged: m = beta1 m + (1 - beta1) g."),
        (g, "m is the gradient itself: m = beta1 m + (1 - beta1) g."),
        ((1 - BETA2) * g, "m uses beta2: betas is (beta1, beta2)."),
    ]
    expect("m", m, (1 - BETA1) * g, FP64, wrong, "the line of adamw_step that updates m")
    wrong = [
        (np.zeros(2048), in_place),
        (BETA2 * g * g, "beta2 and 1 - beta2 are exchanged: v = beta2 v + (1 - beta2) g^2."),
        ((1 - BETA2) * g, "v lacks the square: v = beta2 v + (1 - beta2) g^2."),
        ((1 - BETA1) * g * g, "v uses beta1: betas is (beta1, beta2)."),
    ]
    expect("v", v, (1 - BETA2) * g * g, FP64, wrong, "the line of adamw_step that updates v")


def textbook_adamw(p, gradients, decay, *, sign=1, where="p", root=True, power=0):
    """AdamW as in the paper, or with one mistake."""
    p, m, v = p.copy(), 0.0, 0.0
    for step, g in enumerate(gradients, 1):
        if where == "gradient":
            g = g + decay * p
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        mh, vh = m / (1 - BETA1**step), v / (1 - BETA2**step)
        if where == "p":
            p = p * (1 - LR * decay)
        p = p - sign * LR * mh / ((np.sqrt(vh) if root else vh) + EPS if not power else np.sqrt(vh + EPS))
    return p


def adamw_parameters():
    (p, *_), start, gradients = adamw_run(3)
    decay = np.repeat([DECAY, 0.0], 1024)  # the second block has no weight decay
    want = textbook_adamw(start, gradients, decay)
    wrong = [
        (start, "p is not changed: adamw_step must change p in place, as in p -= ..."),
        (textbook_adamw(start, gradients, decay, sign=-1), "The sign of the update is wrong: p -= rate m / (sqrt(v) + eps)."),
        (textbook_adamw(start, gradients, 0 * decay), "Weight decay is missing: p is multiplied by shrink where decays is 1."),
        (
            textbook_adamw(start, gradients, decay * 0 + DECAY),
            "Weight decay is applied to every block: `decays` has one flag for each block of 1024 elements.",
        ),
        (textbook_adamw(start, gradients, decay[::-1]), "The flags of `decays` are used the wrong way round."),
        (textbook_adamw(start, gradients, decay, where="gradient"), "Weight decay is added to the gradient: it shrinks p."),
        (textbook_adamw(start, gradients, decay, root=False), "The update divides by v: it divides by sqrt(v) + eps."),
        (textbook_adamw(start, gradients, decay, power=1), "eps is inside the square root: the update divides by sqrt(v) + eps."),
    ]
    expect("p", p, want, 1e-10, wrong, "the lines of adamw_step that update p")


def adamw_scale():
    (_, m, _), _, (g,) = adamw_run(1, grad_scale=0.5)
    wrong = [((1 - BETA1) * g, "grad_scale is ignored: the gradient is g * grad_scale.")]
    expect("m with grad_scale 0.5", m, (1 - BETA1) * 0.5 * g, FP64, wrong, "grad_scale in adamw_step")
    (p, m, v), start, _ = adamw_run(1, grad_scale=float("nan"))
    hint = "grad_scale is NaN after a gradient that is not finite: adamw_step must return before it changes anything"
    for name, got, want in (("p", p, start), ("m", m, 0 * start), ("v", v, 0 * start)):
        expect(f"{name} with a grad_scale of NaN", got, want, 0, [(np.full(2048, np.nan), hint + ".")], hint)


def adamw_model():
    from stage0_serial.numpy_backend import NumpyBackend

    expect_curve(NumpyBackend, "adamw_step: is g changed, although it belongs to the caller?")


# -- 0.5 KV cache ------------------------------------------------------------------------------------------------------

CACHED = "attention_cached"


class CacheCase:
    """A cache of 12 positions, filled with NaN, and qkv of 9 positions of 2 sequences; H = 2, D = 4."""

    def __init__(self):
        from stage0_serial.numpy_backend import NumpyBackend

        self.backend, self.qkv, self.H = NumpyBackend("fp64"), random().standard_normal((2, 9, 24)), 2
        self.keys, self.values = np.full((2, 2, 4, 12), np.nan), np.full((2, 2, 12, 4), np.nan)
        self.q, self.k, self.v = heads_of(self.qkv, 3, self.H)

    def run(self, position, t):
        part = self.qkv[:, position : position + t].copy()
        return self.backend.attention_cached(part, self.keys, self.values, position, self.H)

    def want(self, position, t, scale=0.5, mask=0, keys=slice(None)):
        """The expected output of the positions [position, position + t), or that of a mistake."""
        end = position + t
        rows, k, v = self.q[:, :, position:end], self.k[:, :, :end][:, :, keys], self.v[:, :, :end][:, :, keys]
        s = scale * rows @ k.swapaxes(-1, -2)
        if mask is not None:
            s = np.where(np.tri(t, k.shape[2], position + mask, dtype=bool), s, -np.inf)
        with np.errstate(all="ignore"):
            e = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
            return joined(e / e.sum(-1, keepdims=True) @ v)


def cache_contents():
    case = CacheCase()
    case.run(0, 5)
    case.run(5, 1)
    keys, values = np.full_like(case.keys, np.nan), np.full_like(case.values, np.nan)
    keys[..., :6], values[:, :, :6] = case.k[:, :, :6].swapaxes(-1, -2), case.v[:, :, :6]
    first_only = keys.copy()
    first_only[..., 5] = np.nan
    exchanged = values.swapaxes(-1, -2)
    for name, got, want, wrong in (
        ("keys", case.keys, keys, [(np.full_like(keys, np.nan), "k is not stored in the cache."), (exchanged, "v is stored as k.")]),
        ("values", case.values, values, [(np.full_like(values, np.nan), "v is not stored in the cache.")]),
    ):
        look = f"the line of {CACHED} that stores {name[0]} at the positions [position, position + t)"
        wrong = [*wrong, (first_only if name == "keys" else first_only * 0, f"Only the first call stores {name[0]}.")]
        written, expected = np.isfinite(got), np.isfinite(want)
        axis = 3 if name == "keys" else 2
        expect(f"which positions of the cache have {name}", written, expected, 0, look=look)
        kept = [slice(None)] * 4
        kept[axis] = slice(0, 6)
        expect(f"the cached {name}", got[tuple(kept)], want[tuple(kept)], FP64, [(a[tuple(kept)], h) for a, h in wrong], look)


def cache_wrong(case, position, t):
    """The typical mistakes for one call."""
    return [
        (case.want(position, t, scale=1.0), "The scores lack the factor 1/sqrt(D)."),
        (case.want(position, t, scale=0.25), "The scores are divided by D: the factor is 1/sqrt(D)."),
        (case.want(position, t, mask=None), "The new positions see each other's future: new position i attends to position + i."),
        (case.want(position, t, mask=1), "The mask is off by one: a new position attends to itself, not to the next one."),
        (case.want(position, t, mask=-1), "The mask is off by one: a new position also attends to its own key."),
        (
            case.want(position, t, mask=-position),
            "The mask is not shifted by `position`: every new position attends to all cached keys, too.",
        ),
        (case.want(position, t, mask=None, keys=slice(0, -1)), "The last key is missing: attend to keys[..., : position + t]."),
        (np.full((2, t, 8), np.nan), "The result is NaN: it reads positions of the cache that were never written."),
    ]


def cache_tokens():
    case = CacheCase()
    for position in range(5):
        got, wrong = case.run(position, 1), cache_wrong(case, position, 1)
        expect(f"y of position {position}", got, case.want(position, 1), FP64, wrong, CACHED)


def cache_several():
    case = CacheCase()
    case.run(0, 4)
    got, wrong = case.run(4, 3), cache_wrong(case, 4, 3)
    expect("y of the positions 4 to 6, after 4 cached positions", got, case.want(4, 3), FP64, wrong, f"the mask of {CACHED}")


def cache_model():
    from exercises.checks.common import CONFIG
    from gpt2core.model import parameter_shapes
    from gpt2core.parallel.tensor_parallel import load_model
    from gpt2core.sampler import KVCache, next_logits
    from stage0_serial.numpy_backend import NumpyBackend

    rng, backend = random(5), NumpyBackend()
    model = load_model(CONFIG, {n: rng.standard_normal(s).astype(np.float32) for n, s in parameter_shapes(CONFIG)}, backend)
    cache, tokens = KVCache(CONFIG, backend), [3, 1, 4]
    new = tokens
    for position in range(3, 12):
        got = next_logits(model, new, cache)
        want = model.logits(np.array([tokens])).numpy()[0, -1]
        expect(f"the logits after {position} tokens", got, want, 1e-4, look=f"{CACHED}, in a model with {position} positions")
        new = [int(want.argmax())]
        tokens = tokens + new
