"""Every kernel of gpt2core/backend.py as its textbook formula, in float64: the reference of `make parity`.

A function with the name of a kernel is its oracle: it returns {name of a result: (expected array, least norm)}, in the
order of the kernel's results. i: the inputs of the call, {parameter: float64 array or other argument}. forward: those
of the forward call that returned `aux`, for an oracle that needs them. The error of a result is compared with max(norm
of the expected array, least norm): sums whose terms cancel have the rounding errors of their terms. The formulas use
no code of a backend, so no error of a backend can be in both.
"""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, K columns, N = B*T rows

import math
from types import SimpleNamespace

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


def gelu(x):
    return x * (1 + np.tanh(GELU * (x + 0.044715 * x**3))) / 2


def gelu_slope(x):
    t = np.tanh(GELU * (x + 0.044715 * x**3))
    return (1 + t) / 2 + x * (1 - t * t) / 2 * GELU * (1 + 3 * 0.044715 * x * x)


def linear_forward(i):
    return of(y=linear(i.x, i.w, i.b))


def linear_backward(i):
    dx, dw, db = linear_gradients(i.dy, i.x, i.w)
    return of(dx=dx, dw=dw) | ({"db": (db, norm(i.dy))} if i.bias else {})


def bias_backward(i):
    return {"db": (rows(i.dy).sum(0), norm(i.dy))}


def linear_gelu_forward(i):
    return of(y=gelu(linear(i.x, i.w, i.b)))


def linear_gelu_backward(i, forward):
    h = linear(i.x, i.w, forward.b)
    dh = i.dy.reshape(h.shape) * gelu_slope(h)  # mlp_backward of stage 2 calls this kernel with the rows of dy
    dx, dw, db = linear_gradients(dh, i.x, i.w)
    return of(dx=dx, dw=dw) | {"db": (db, norm(dh))}


def mlp_forward(i):
    return of(y=gelu(linear(i.x, i.w, i.b)) @ i.w2)


def mlp_backward(i, forward):
    h = linear(i.x, i.w, forward.b)
    dh, dw2, _ = linear_gradients(i.dy, gelu(h), i.w2)
    dh = dh * gelu_slope(h)
    dx, dw, db = linear_gradients(dh, i.x, i.w)
    return of(dx=dx, dw=dw) | {"db": (db, norm(dh)), "dw2": (dw2, 0.0)}


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
    return {
        "dx": (dx, norm(r * g)),
        "dw": (rows(dy * h).sum(0), norm(dy * h)),
        "db": (rows(dy).sum(0), norm(dy)),
    }


def stream(i):
    """s = x + a + a_bias of a call of residual_layernorm_forward, or x of layernorm_forward."""
    return i.x if getattr(i, "a", None) is None else i.x + i.a + i.a_bias


def layernorm_forward(i):
    return of(y=layernorm(i.x, i.w, i.b, i.eps))


def layernorm_backward(i, forward):
    return layernorm_gradients(i.dy, stream(forward), i.w, forward.eps)


def residual_add_forward(i):
    return of(s=stream(i))


def residual_layernorm_forward(i):
    s = stream(i)
    return of(s=s, y=layernorm(s, i.w, i.b, i.eps))


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


def rotary_forward(i):
    return of(y=turned(i.qkv, i.n_head, i.position, 1))


def rotary_backward(i):
    return of(dqkv=turned(i.dy, i.n_head, i.position, -1))


def attention_forward(i):
    s = scores(i.qkv, i.n_head)[3]
    top = s.max(-1)
    logsumexp = LOG2E * (top + np.log(np.exp(s - top[..., None]).sum(-1)))  # in base 2, as the GPU's kernels keep it
    return of(y=attention(i.qkv, i.n_head)) | {"logsumexp": (logsumexp, math.sqrt(logsumexp.size))}


def attention_backward(i):
    return of(dqkv=attention_gradient(i.dy, i.qkv, i.n_head))


def rotary_attention_forward(i):
    return of(y=attention(turned(i.qkv, i.n_head, i.position, 1), i.n_head))


def rotary_attention_backward(i, forward):
    dqkv = attention_gradient(i.dy, turned(forward.qkv, i.n_head, i.position, 1), i.n_head)
    return of(dqkv=turned(dqkv, i.n_head, i.position, -1))


# -- embedding, logits, loss -------------------------------------------------------------------------------------------


def embedding_forward(i):
    i.ids = i.ids.reshape(-1, i.ids.shape[-1])  # the sequences of all micro-batches
    local = i.ids.astype(int) - i.first
    own = (local >= 0) & (local < len(i.wte))
    y = np.where(own[..., None], i.wte[np.clip(local, 0, len(i.wte) - 1)], 0.0)
    return of(y=y if i.wpe is None else y + i.wpe[i.position : i.position + i.ids.shape[1]])


def embedding_backward(i):
    i.ids, i.dy = i.ids.reshape(-1, i.ids.shape[-1]), i.dy.reshape(-1, *i.dy.shape[-2:])
    dwte = np.zeros_like(i.wte)
    local = i.ids.astype(int).ravel() - i.first
    own = (local >= 0) & (local < len(dwte))
    np.add.at(dwte, local[own], rows(i.dy)[own])
    if i.wpe is None:
        return {"dwte": (dwte, norm(i.dy))}
    dwpe = np.zeros_like(i.wpe)
    dwpe[i.position : i.position + i.dy.shape[1]] = i.dy.sum(0)
    return {"dwte": (dwte, norm(i.dy)), "dwpe": (dwpe, norm(i.dy))}


def unembed_forward(i):
    return of(y=i.x @ i.w.T)


def unembed_backward(i):
    return of(dx=i.dy @ i.w, dw=rows(i.dy).T @ rows(i.x))


def statistics(logits, targets, first):
    """maxima, sums, target_logits of cross_entropy_forward."""
    maxima, local = logits.max(1), targets.astype(int) - first
    own = np.flatnonzero((local >= 0) & (local < logits.shape[1]))
    target_logits = np.zeros(len(logits))
    target_logits[own] = logits[own, local[own]]
    return {
        "maxima": (maxima, math.sqrt(maxima.size)),
        "sums": (np.exp(logits - maxima[:, None]).sum(1), 0.0),
        "target_logits": (target_logits, math.sqrt(maxima.size)),
    }


def logit_gradient(i, logits):
    """dy * scale * (softmax - onehot); maxima and sums are over the whole vocabulary."""
    p, local = np.exp(logits - i.maxima[:, None]) / i.sums[:, None], i.targets.astype(int) - i.first
    own = np.flatnonzero((local >= 0) & (local < logits.shape[1]))
    p[own, local[own]] -= 1
    return p * (float(i.dy.reshape(())) * i.scale)


def cross_entropy_forward(i):
    return statistics(i.logits, i.targets, i.first)


def cross_entropy_backward(i, forward=None):
    # a backend that needs no logits in backward may pass another array in their place
    logits = rows(forward.x) @ forward.w.T if hasattr(forward, "w") else getattr(forward, "logits", i.logits)
    return of(dlogits=logit_gradient(i, logits))


def unembed_cross_entropy_forward(i):
    return statistics(rows(i.x) @ i.w.T, i.targets.ravel(), i.first)


def unembed_cross_entropy_backward(i):
    i.targets, i.maxima, i.sums = i.targets.ravel(), i.maxima.ravel(), i.sums.ravel()
    dlogits = logit_gradient(i, rows(i.x) @ i.w.T)
    return of(dx=dlogits @ i.w, dw=dlogits.T @ rows(i.x))


def loss_rows(i):
    return of(rows=np.stack([i.sums * np.exp(i.maxima - i.row_maxima), i.target_logits]))


def loss(i):
    return of(loss=i.scale * (np.log(i.sums) - (i.target_logits - i.row_maxima)).sum())


# -- flat buffers ------------------------------------------------------------------------------------------------------


def page_sums(i):
    return of(sums=(i.flat.reshape(-1, 1024) ** 2).sum(1))


def clip(i):
    size = math.sqrt(i.sums.sum())
    return of(norm=np.array(size), factor=np.array(min(1.0, i.clip / (size + 1e-6)) if i.clip else 1.0))


def adamw_step(i):
    (rate, eps, shrink), (beta1, beta2) = i.coefficients, i.betas
    g = i.g * float(np.reshape(i.factor, ()))
    m, v = beta1 * i.m + (1 - beta1) * g, beta2 * i.v + (1 - beta2) * g * g
    decay = np.repeat(np.asarray(i.decays, bool), len(i.p) // len(i.decays))
    return of(m=m, v=v, p=np.where(decay, shrink, 1.0) * i.p - rate * m / (np.sqrt(v) + eps))


def add(i):
    return {"sum": (i.a + i.b, norm(i.a))}


def gelu_forward(i):
    return of(y=gelu(i.x))


def gelu_backward(i):
    return {"dx": (i.dy * gelu_slope(i.x), norm(i.dy))}


# -- the whole model ---------------------------------------------------------------------------------------------------


def reference(config, parameters, ids, targets, scale):
    """(activations, gradients) of one batch, from float64 parameters {Hugging Face name: array}.

    activations: {(module, forward kernel): result}, in the order of the forward pass. gradients: {name: array} of
    scale * the sum of the losses of all targets.
    """
    P = {name.removeprefix("transformer."): array for name, array in parameters.items()}
    eps, H, y_of, blocks = config.layer_norm_epsilon, config.n_head, {}, []
    x = y_of["wte", "embedding_forward"] = P["wte.weight"][ids] + P["wpe.weight"][: ids.shape[1]]
    for layer in range(config.n_layer):
        w = {name.removeprefix(f"h.{layer}."): a for name, a in P.items() if name.startswith(f"h.{layer}.")}
        n1 = layernorm(x, w["ln_1.weight"], w["ln_1.bias"], eps)
        qkv = y_of[f"h.{layer}.attn.c_attn", "linear_forward"] = linear(
            n1, w["attn.c_attn.weight"], w["attn.c_attn.bias"]
        )
        a = y_of[f"h.{layer}.attn", "attention_forward"] = attention(qkv, H)
        o = y_of[f"h.{layer}.attn.c_proj", "linear_forward"] = a @ w["attn.c_proj.weight"]
        x1 = x + o + w["attn.c_proj.bias"]
        n2 = layernorm(x1, w["ln_2.weight"], w["ln_2.bias"], eps)
        h = linear(n2, w["mlp.c_fc.weight"], w["mlp.c_fc.bias"])
        m = y_of[f"h.{layer}.mlp", "mlp_forward"] = gelu(h) @ w["mlp.c_proj.weight"]
        blocks.append((layer, w, SimpleNamespace(x=x, n1=n1, qkv=qkv, a=a, x1=x1, n2=n2, h=h)))
        x = x1 + m + w["mlp.c_proj.bias"]
    y = layernorm(x, P["ln_f.weight"], P["ln_f.bias"], eps)
    head = "wte.weight" if config.tied else "lm_head.weight"
    dlogits = softmax(y @ P[head].T)
    np.put_along_axis(
        dlogits, targets[..., None].astype(int), np.take_along_axis(dlogits, targets[..., None], -1) - 1, -1
    )
    dlogits *= scale
    d = {head: rows(dlogits).T @ rows(y)}
    dx = add_norm(d, "ln_f", dlogits @ P[head], x, P["ln_f.weight"], eps)
    for layer, w, of_block in reversed(blocks):
        dx = block_backward(d, f"h.{layer}.", w, of_block, dx, H, eps)
    d["wpe.weight"] = np.zeros_like(P["wpe.weight"])
    d["wpe.weight"][: ids.shape[1]] = dx.sum(0)
    dwte = np.zeros_like(P["wte.weight"])
    np.add.at(dwte, ids.astype(int).ravel(), rows(dx))
    d["wte.weight"] = dwte + (d["wte.weight"] if config.tied else 0)
    return y_of, {name: d[name.removeprefix("transformer.")] for name in parameters}


def block_backward(d, name, w, saved, dx, H, eps):
    """Write the gradients of one block's parameters to d; return the gradient of the block's input."""
    d[f"{name}mlp.c_proj.bias"] = rows(dx).sum(0)
    dh, d[f"{name}mlp.c_proj.weight"], _ = linear_gradients(dx, gelu(saved.h), w["mlp.c_proj.weight"])
    dn, d[f"{name}mlp.c_fc.weight"], d[f"{name}mlp.c_fc.bias"] = linear_gradients(
        dh * gelu_slope(saved.h), saved.n2, w["mlp.c_fc.weight"]
    )
    dx = dx + add_norm(d, f"{name}ln_2", dn, saved.x1, w["ln_2.weight"], eps)
    d[f"{name}attn.c_proj.bias"] = rows(dx).sum(0)
    da, d[f"{name}attn.c_proj.weight"], _ = linear_gradients(dx, saved.a, w["attn.c_proj.weight"])
    dn, d[f"{name}attn.c_attn.weight"], d[f"{name}attn.c_attn.bias"] = linear_gradients(
        attention_gradient(da, saved.qkv, H), saved.n1, w["attn.c_attn.weight"]
    )
    return dx + add_norm(d, f"{name}ln_1", dn, saved.x, w["ln_1.weight"], eps)


def add_norm(d, name, dy, s, w, eps):
    """Write the gradients of a LayerNorm's parameters to d; return the gradient of its input s."""
    gradients = layernorm_gradients(dy, s, w, eps)
    d[f"{name}.weight"], d[f"{name}.bias"] = gradients["dw"][0], gradients["db"][0]
    return gradients["dx"][0]
