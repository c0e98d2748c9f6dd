"""Every kernel of gpt2core/backend.py as its textbook formula, in float64: the reference of `make parity`.

ORACLES has an oracle for each kernel: it returns {name of a result: (expected array, least norm)}, in the order of the
kernel's results. i: the inputs of the call, {parameter: float64 array or other argument}. forward: those of the forward
call that returned `aux`, for an oracle that needs them. The error of a result is compared with max(norm of the expected
array, least norm): sums whose terms cancel have the rounding errors of their terms. The formulas use no code of a
backend, so no error of a backend can be in both.
"""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows

import math
from collections import defaultdict

import numpy as np

GELU = math.sqrt(2 / math.pi)
LOG2E = math.log2(math.e)
norm = np.linalg.norm


def rows(x):
    return x.reshape(-1, x.shape[-1])


def of(**results):
    """The results of an oracle without least norms."""
    return {name: (array, 0.0) for name, array in results.items()}


# -- products and gelu -------------------------------------------------------------------------------------------------


def linear(x, w, b=None):
    return x @ w + (0 if b is None else b)


def linear_gradients(dy, x, w):
    """dx, dw and db of linear(x, w, b)."""
    return dy @ w.T, rows(x).T @ rows(dy), rows(dy).sum(0)


def named_gradients(dy, x, w):
    """{"dx", "dw", "db"} of linear(x, w, b), with their least norms."""
    dx, dw, db = linear_gradients(dy, x, w)
    return of(dx=dx, dw=dw) | {"db": (db, norm(dy))}


def gelu(x):
    return x * (1 + np.tanh(GELU * (x + 0.044715 * x**3))) / 2


def gelu_slope(x):
    t = np.tanh(GELU * (x + 0.044715 * x**3))
    return (1 + t) / 2 + x * (1 - t * t) / 2 * GELU * (1 + 3 * 0.044715 * x * x)


def linear_backward(i):
    gradients = named_gradients(i.dy, i.x, i.w)
    return gradients if i.bias else {name: gradients[name] for name in ("dx", "dw")}


def linear_gelu_backward(i, forward):
    h = linear(i.x, i.w, forward.b)
    # mlp_backward of stage 2 calls this kernel with the rows of dy
    return named_gradients(i.dy.reshape(h.shape) * gelu_slope(h), i.x, i.w)


def mlp_backward(i, forward):
    h = linear(i.x, i.w, forward.b)
    dh, dw2, _ = linear_gradients(i.dy, gelu(h), i.w2)
    return named_gradients(dh * gelu_slope(h), i.x, i.w) | of(dw2=dw2)


# -- layernorm ---------------------------------------------------------------------------------------------------------


def normalise(s, eps):
    """(s - mean) r and r = 1 / sqrt(variance + eps) over the last axis."""
    centred = s - s.mean(-1, keepdims=True)
    r = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return centred * r, r


def layernorm(s, w, b, eps):
    return normalise(s, eps)[0] * w + b


def layernorm_gradients(dy, s, w, eps):
    """{"dx", "dw", "db"} of layernorm(s, w, b), with their least norms."""
    h, r = normalise(s, eps)
    g = dy * w
    dx = r * (g - g.mean(-1, keepdims=True) - h * (g * h).mean(-1, keepdims=True))
    dw, db = rows(dy * h).sum(0), rows(dy).sum(0)
    return {"dx": (dx, norm(r * g)), "dw": (dw, norm(dy * h)), "db": (db, norm(dy))}


def stream(i):
    """s = x + a + a_bias of a call of residual_layernorm_forward, or x of layernorm_forward."""
    return i.x if getattr(i, "a", None) is None else i.x + i.a + i.a_bias


def residual_layernorm_backward(i, forward):
    gradients = layernorm_gradients(i.dy, stream(forward), i.w, forward.eps)
    dx, least = gradients.pop("dx")
    dx = dx if i.ds is None else dx + i.ds
    return {"dx": (dx, least), "da_bias": (rows(dx).sum(0), least + norm(dx)), **gradients}


# -- attention ---------------------------------------------------------------------------------------------------------


def heads(x, H):
    """(B, T, C) as (B, H, T, D)."""
    return x.reshape(*x.shape[:2], H, -1).swapaxes(1, 2)


def merged(x):
    """(B, H, T, D) as (B, T, C)."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def scores(qkv, H):
    """q, k, v (B, H, T, D) and s = q k' / sqrt(D) (B, H, T, T), -inf above the diagonal."""
    q, k, v = (heads(part, H) for part in np.split(qkv, 3, -1))
    T, D = q.shape[2:]
    s = q @ k.swapaxes(2, 3) / math.sqrt(D)
    return q, k, v, np.where(np.tri(T, dtype=bool), s, -np.inf)


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(qkv, H):
    _, _, v, s = scores(qkv, H)
    return merged(softmax(s) @ v)


def attention_gradient(dy, qkv, H):
    q, k, v, s = scores(qkv, H)
    p, dy = softmax(s), heads(dy, H)
    dp = dy @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(q.shape[3])
    gradients = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dy
    return np.concatenate([merged(part) for part in gradients], -1)


def turned(qkv, H, position, sign):
    """qkv (B, T, 3C), with each q and k times exp(sign i angle), as complex numbers: see Backend.rotary_forward."""
    x = np.stack([heads(part, H) for part in np.split(qkv, 3, -1)])  # (3, B, H, T, D)
    T, half = x.shape[3], x.shape[4] // 2
    angles = np.outer(position + np.arange(T), 10000.0 ** (-np.arange(half) / half))  # (T, D / 2)
    z = (x[:2, ..., :half] + 1j * x[:2, ..., half:]) * np.exp(sign * 1j * angles)
    x[:2] = np.concatenate([z.real, z.imag], -1)
    return np.concatenate([merged(part) for part in x], -1)


def logsumexp(qkv, H):
    """In base 2, as the GPU's kernels keep it."""
    s = scores(qkv, H)[3]
    top = s.max(-1)
    return LOG2E * (top + np.log(np.exp(s - top[..., None]).sum(-1)))


def attention_forward(i):
    found = logsumexp(i.qkv, i.n_head)
    return of(y=attention(i.qkv, i.n_head)) | {"logsumexp": (found, math.sqrt(found.size))}


def rotary_attention_backward(i, forward):
    dqkv = attention_gradient(i.dy, turned(forward.qkv, i.n_head, i.position, 1), i.n_head)
    return of(dqkv=turned(dqkv, i.n_head, i.position, -1))


# -- embedding, logits, loss -------------------------------------------------------------------------------------------


def own_rows(ids, first, count):
    """(the indices in the flat `ids` of those from `first` on, of `count`; their rows)."""
    local = ids.astype(int).ravel() - first
    own = np.flatnonzero((local >= 0) & (local < count))
    return own, local[own]


def embedding_forward(i):
    ids = i.ids.reshape(-1, i.ids.shape[-1])  # the sequences of all micro-batches
    y, (own, local) = np.zeros((ids.size, i.wte.shape[1])), own_rows(ids, i.first, len(i.wte))
    y[own] = i.wte[local]
    y = y.reshape(*ids.shape, -1)
    return of(y=y if i.wpe is None else y + i.wpe[i.position : i.position + ids.shape[1]])


def embedding_backward(i):
    dy, (own, local) = i.dy.reshape(-1, *i.dy.shape[-2:]), own_rows(i.ids, i.first, len(i.wte))
    gradients = {"dwte": np.zeros_like(i.wte)}
    np.add.at(gradients["dwte"], local, rows(dy)[own])
    if i.wpe is not None:
        gradients["dwpe"] = np.zeros_like(i.wpe)
        gradients["dwpe"][i.position : i.position + dy.shape[1]] = dy.sum(0)
    return {name: (array, norm(dy)) for name, array in gradients.items()}


def statistics(logits, targets, first):
    """maxima, sums, target_logits of cross_entropy_forward."""
    maxima, (own, local) = logits.max(1), own_rows(targets, first, logits.shape[1])
    target_logits, least = np.zeros(len(logits)), math.sqrt(maxima.size)
    target_logits[own] = logits[own, local]
    sums = np.exp(logits - maxima[:, None]).sum(1)
    return {"maxima": (maxima, least), "sums": (sums, 0.0), "target_logits": (target_logits, least)}


def logit_gradient(i, logits):
    """dy * scale * (softmax - onehot); maxima and sums are over the whole vocabulary."""
    p = np.exp(logits - i.maxima.reshape(-1, 1)) / i.sums.reshape(-1, 1)
    p[own_rows(i.targets, i.first, logits.shape[1])] -= 1
    return p * (float(i.dy.reshape(())) * i.scale)


def cross_entropy_backward(i, forward=None):
    # a backend that needs no logits in backward may pass another array in their place
    logits = rows(forward.x) @ forward.w.T if hasattr(forward, "w") else getattr(forward, "logits", i.logits)
    return of(dlogits=logit_gradient(i, logits))


def unembed_cross_entropy_backward(i):
    dlogits = logit_gradient(i, rows(i.x) @ i.w.T)
    return of(dx=dlogits @ i.w, dw=dlogits.T @ rows(i.x))


# -- flat buffers ------------------------------------------------------------------------------------------------------


def clip(i):
    size = math.sqrt(i.sums.sum())
    return of(norm=np.array(size), factor=np.array(min(1.0, i.clip / (size + 1e-6)) if i.clip else 1.0))


def adamw_step(i):
    (rate, eps, shrink), (beta1, beta2) = i.coefficients, i.betas
    g = i.g * float(np.reshape(i.factor, ()))
    m, v = beta1 * i.m + (1 - beta1) * g, beta2 * i.v + (1 - beta2) * g * g
    decay = np.repeat(np.asarray(i.decays, bool), len(i.p) // len(i.decays))
    return of(m=m, v=v, p=np.where(decay, shrink, 1.0) * i.p - rate * m / (np.sqrt(v) + eps))


# -- all kernels -------------------------------------------------------------------------------------------------------

ORACLES = {  # {name of a kernel: its oracle}
    "linear_forward": lambda i: of(y=linear(i.x, i.w, i.b)),
    "linear_backward": linear_backward,
    "bias_backward": lambda i: {"db": (rows(i.dy).sum(0), norm(i.dy))},
    "linear_gelu_forward": lambda i: of(y=gelu(linear(i.x, i.w, i.b))),
    "linear_gelu_backward": linear_gelu_backward,
    "mlp_forward": lambda i: of(y=gelu(linear(i.x, i.w, i.b)) @ i.w2),
    "mlp_backward": mlp_backward,
    "gelu_forward": lambda i: of(y=gelu(i.x)),
    "gelu_backward": lambda i: {"dx": (i.dy * gelu_slope(i.x), norm(i.dy))},
    "layernorm_forward": lambda i: of(y=layernorm(i.x, i.w, i.b, i.eps)),
    "layernorm_backward": lambda i, forward: layernorm_gradients(i.dy, stream(forward), i.w, forward.eps),
    "residual_add_forward": lambda i: of(s=stream(i)),
    "residual_layernorm_forward": lambda i: of(s=stream(i), y=layernorm(stream(i), i.w, i.b, i.eps)),
    "residual_layernorm_backward": residual_layernorm_backward,
    "rotary_forward": lambda i: of(y=turned(i.qkv, i.n_head, i.position, 1)),
    "rotary_backward": lambda i: of(dqkv=turned(i.dy, i.n_head, i.position, -1)),
    "attention_forward": attention_forward,
    "attention_backward": lambda i: of(dqkv=attention_gradient(i.dy, i.qkv, i.n_head)),
    "rotary_attention_forward": lambda i: of(y=attention(turned(i.qkv, i.n_head, i.position, 1), i.n_head)),
    "rotary_attention_backward": rotary_attention_backward,
    "embedding_forward": embedding_forward,
    "embedding_backward": embedding_backward,
    "unembed_forward": lambda i: of(y=i.x @ i.w.T),
    "unembed_backward": lambda i: of(dx=i.dy @ i.w, dw=rows(i.dy).T @ rows(i.x)),
    "cross_entropy_forward": lambda i: statistics(i.logits, i.targets, i.first),
    "cross_entropy_backward": cross_entropy_backward,
    "unembed_cross_entropy_forward": lambda i: statistics(rows(i.x) @ i.w.T, i.targets, i.first),
    "unembed_cross_entropy_backward": unembed_cross_entropy_backward,
    "loss_rows": lambda i: of(rows=np.stack([i.sums * np.exp(i.maxima - i.row_maxima), i.target_logits])),
    "loss": lambda i: of(loss=i.scale * (np.log(i.sums) - (i.target_logits - i.row_maxima)).sum()),
    "page_sums": lambda i: of(sums=(i.flat.reshape(-1, 1024) ** 2).sum(1)),
    "clip": clip,
    "adamw_step": adamw_step,
    "add": lambda i: {"sum": (i.a + i.b, norm(i.a))},
}


# -- the whole model ---------------------------------------------------------------------------------------------------


def reference(config, parameters, ids, targets, scale):
    """(activations, gradients) of one batch, from float64 parameters {Hugging Face name: array}.

    activations: {(module, forward kernel): result}, in the order of the forward pass. gradients: {name: array} of
    scale * the sum of the losses of all targets.
    """
    P = {name.removeprefix("transformer."): array for name, array in parameters.items()}
    d, y_of, H, head = defaultdict(float), {}, config.n_head, "wte.weight" if config.tied else "lm_head.weight"

    # A layer returns its result, without the bias of a product, and a function of dy, which returns dx and sets d.
    def product(name, x):
        def backward(dy):
            dx, d[f"{name}.weight"], d[f"{name}.bias"] = linear_gradients(dy, x, P[f"{name}.weight"])
            return dx

        return x @ P[f"{name}.weight"], backward

    def normed(name, x):
        w, b = P[f"{name}.weight"], P[f"{name}.bias"]

        def backward(dy):
            dx, d[f"{name}.weight"], d[f"{name}.bias"] = (
                array for array, _ in layernorm_gradients(dy, x, w, config.layer_norm_epsilon).values()
            )
            return dx

        return layernorm(x, w, b, config.layer_norm_epsilon), backward

    def block(name, x):
        n1, through_ln_1 = normed(f"{name}.ln_1", x)
        qkv, through_c_attn = product(f"{name}.attn.c_attn", n1)
        qkv = y_of[f"{name}.attn.c_attn", "linear_forward"] = qkv + P[f"{name}.attn.c_attn.bias"]
        a = y_of[f"{name}.attn", "attention_forward"] = attention(qkv, H)
        o, through_c_proj = product(f"{name}.attn.c_proj", a)
        y_of[f"{name}.attn.c_proj", "linear_forward"] = o
        x1 = x + o + P[f"{name}.attn.c_proj.bias"]
        n2, through_ln_2 = normed(f"{name}.ln_2", x1)
        h, through_c_fc = product(f"{name}.mlp.c_fc", n2)
        h = h + P[f"{name}.mlp.c_fc.bias"]
        m, through_mlp = product(f"{name}.mlp.c_proj", gelu(h))
        y_of[f"{name}.mlp", "mlp_forward"] = m

        def backward(dx):
            dx = dx + through_ln_2(through_c_fc(through_mlp(dx) * gelu_slope(h)))
            return dx + through_ln_1(through_c_attn(attention_gradient(through_c_proj(dx), qkv, H)))

        return x1 + m + P[f"{name}.mlp.c_proj.bias"], backward

    x = y_of["wte", "embedding_forward"] = P["wte.weight"][ids] + P["wpe.weight"][: ids.shape[1]]
    blocks = []
    for layer in range(config.n_layer):
        x, backward = block(f"h.{layer}", x)
        blocks.append(backward)
    y, through_ln_f = normed("ln_f", x)
    dlogits = rows(softmax(y @ P[head].T))
    dlogits[np.arange(targets.size), targets.astype(int).ravel()] -= 1
    dlogits *= scale
    dx = through_ln_f((dlogits @ P[head]).reshape(x.shape))
    for backward in reversed(blocks):
        dx = backward(dx)
    d["wpe.weight"] = np.zeros_like(P["wpe.weight"])
    d["wpe.weight"][: ids.shape[1]] = dx.sum(0)
    d["wte.weight"] = np.zeros_like(P["wte.weight"])
    np.add.at(d["wte.weight"], ids.astype(int).ravel(), rows(dx))
    d[head] += dlogits.T @ rows(y)
    return y_of, {name: d[name.removeprefix("transformer.")] for name in parameters}
