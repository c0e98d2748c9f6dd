"""One function per differentiable operation: it computes the result and defines how backward() computes gradients."""

import numpy as np

from gpt2core.communicator import Solo
from gpt2core.errors import ConfigError
from gpt2core.tensor import AutogradError, ShapeError, Tensor, is_recording, no_grad

SOLO = Solo()

# -- operations that call kernels of the backend -----------------------------------------------------------------------
# B batch, T time, C channels, V vocabulary, K columns, N = B*T rows. A group of p ranks divides the vocabulary: the
# tokens of rank r are [r V/p, (r+1) V/p). Rank r holds their rows of an embedding (V, C) and computes their logits.


def linear(x, w, b=None):
    """x (..., C) @ w (C, K) + b (K) -> (..., K)."""
    require(x.shape[-1] == w.shape[0], "linear", x, w)
    require(b is None or b.shape == w.shape[1:], "linear", w, b)
    backend, has_bias = x.backend, b is not None
    parents = (x, w, b) if has_bias else (x, w)
    y = backend.linear_forward(x.data, w.data, b.data if has_bias else None)

    def backward(dy):
        return backend.linear_backward(dy, x.data, w.data, has_bias, buffers(w, b))[: len(parents)]

    return Tensor.from_op(y, parents, backward)


def gelu(x):
    """GPT-2's activation: the tanh approximation of x * Phi(x), where Phi is the normal distribution function."""
    backend = x.backend
    return Tensor.from_op(backend.gelu_forward(x.data), (x,), lambda dy: (backend.gelu_backward(dy, x.data),))


def linear_gelu(x, w, b):
    """gelu(linear(x, w, b)) by one fused kernel: x (..., C), w (C, K), b (K) -> (..., K)."""
    require(x.shape[-1] == w.shape[0] and b.shape == w.shape[1:], "linear_gelu", x, w, b)
    backend = x.backend
    y, aux = backend.linear_gelu_forward(x.data, w.data, b.data)
    return Tensor.from_op(y, (x, w, b), lambda dy: backend.linear_gelu_backward(dy, x.data, w.data, aux, buffers(w, b)))


def mlp(x, w, b, w2):
    """linear(linear_gelu(x, w, b), w2), without a second bias: x (..., C), w (C, K), b (K), w2 (K, C) -> (..., C)."""
    require(x.shape[-1] == w.shape[0] and b.shape == w.shape[1:] == w2.shape[:1], "mlp", x, w, b, w2)
    backend = x.backend
    y, aux = backend.mlp_forward(x.data, w.data, b.data, w2.data)
    return Tensor.from_op(
        y, (x, w, b, w2), lambda dy: backend.mlp_backward(dy, x.data, w.data, w2.data, aux, buffers(w, b, w2))
    )


def layernorm(x, w, b, eps=1e-5):
    """(x - mean) / sqrt(variance + eps) * w + b over the last axis."""
    require(x.shape[-1:] == w.shape == b.shape, "layernorm", x, w, b)
    backend = x.backend
    y, aux = backend.layernorm_forward(x.data, w.data, b.data, eps)
    return Tensor.from_op(y, (x, w, b), lambda dy: backend.layernorm_backward(dy, w.data, aux, buffers(w, b)))


def stream_layernorm(x, w, b, eps=1e-5):
    """Two outputs: x (the start of the residual stream) and layernorm(x, w, b); backward adds the gradients of both."""
    require(x.shape[-1:] == w.shape == b.shape, "stream_layernorm", x, w, b)
    backend = x.backend
    y, aux = backend.layernorm_forward(x.data, w.data, b.data, eps)

    def backward(dx, dy):
        if dy is None:
            return dx, None, None
        dx, _, dw, db = backend.residual_layernorm_backward(dx, dy, w.data, aux, (None, *buffers(w, b)))
        return dx, dw, db

    return Tensor.from_op((x.data, y), (x, w, b), backward)


def residual_layernorm(x, a, a_bias, w, b, eps=1e-5):
    """Two outputs: s = x + a + a_bias, the residual stream after a branch (a, a_bias), and layernorm(s, w, b)."""
    require(x.shape == a.shape and x.shape[-1:] == a_bias.shape == w.shape == b.shape, "residual_layernorm", x, a, w, b)
    backend = x.backend
    s, y, aux = backend.residual_layernorm_forward(x.data, a.data, a_bias.data, w.data, b.data, eps)

    def backward(ds, dy):
        if dy is None:  # layernorm(s) was not used: the gradient is that of an addition
            return ds, ds, ds.reshape(-1, ds.shape[-1]).sum(0), None, None
        dx, da_bias, dw, db = backend.residual_layernorm_backward(ds, dy, w.data, aux, buffers(a_bias, w, b))
        return dx, dx, da_bias, dw, db

    return Tensor.from_op((s, y), (x, a, a_bias, w, b), backward)


def attention(qkv, n_head):
    """Causal self-attention: q, k and v side by side, qkv (B, T, 3C) -> (B, T, C) (Vaswani et al. 2017)."""
    if qkv.ndim != 3 or qkv.shape[2] % (3 * n_head):
        raise ShapeError(f"attention: qkv {qkv.shape} is not (B, T, 3C) with C divisible by {n_head} heads")
    backend = qkv.backend
    y, aux = backend.attention_forward(qkv.data, n_head)
    return Tensor.from_op(y, (qkv,), lambda dy: (backend.attention_backward(dy, qkv.data, y, aux, n_head),))


def embedding(ids, wte, wpe, position=0, group=SOLO, tied=False):
    """ids (B, T), integers or the result of prepare_tokens -> wte[ids] + wpe[position : position + T] (B, T, C).

    wte (V/p, C) has the rows of this rank's tokens; other tokens give 0, and the all-reduce adds the rows of all ranks.
    tied: wte is also the matrix of the logits, whose gradient is computed first: dwte is added to wte.grad_buffer.
    """
    require(wte.shape[1:] == wpe.shape[1:], "embedding", wte, wpe)
    if len(ids.shape) != 2 or position + ids.shape[1] > wpe.shape[0]:
        raise ShapeError(f"embedding: ids {ids.shape} from position {position} do not fit {wpe.shape[0]} positions")
    require_tokens("embedding", ids, wte.shape[0] * group.size)
    backend, first = wte.backend, group.rank * wte.shape[0]
    added_wpe = wpe.data if group.is_root else None  # on one rank only, or the sum would contain it p times
    y = backend.embedding_forward(ids, wte.data, added_wpe, position, first)
    y = group.all_reduce(y, out=y)

    def backward(dy):
        out = wte.destination(adds=tied), wpe.destination()
        accumulate = tied and out[0] is not None
        return backend.embedding_backward(dy, ids, wte.data, wpe.data, position, first, out, accumulate)

    return Tensor.from_op(y, (wte, wpe), backward)


def unembed(x, w):
    """x (..., C), w (V, C) -> logits (..., V); w may be the token embedding itself."""
    require(x.shape[-1] == w.shape[1], "unembed", x, w)
    backend = x.backend
    y = backend.unembed_forward(x.data, w.data)
    return Tensor.from_op(y, (x, w), lambda dy: backend.unembed_backward(dy, x.data, w.data, *buffers(w)))


def cross_entropy(logits, targets, scale=None, group=SOLO):
    """scale * sum over N rows of -log softmax(logits)[target], a float64 scalar; the default scale 1/N gives the mean.

    logits (..., V/p): this rank's columns; targets (...). The loss includes all ranks' columns and is equal on all
    ranks. For each row the ranks exchange three numbers instead of V logits (Shoeybi et al. 2019).
    """
    V = logits.shape[-1] * group.size
    logits2, targets, scale = flat_targets("cross_entropy", logits, targets, scale, V)
    backend, first = logits.backend, group.rank * logits.shape[-1]
    *stats, aux = backend.cross_entropy_forward(logits2, targets, first)
    loss, maxima, sums = loss_of_rows(*stats, scale, group, backend)

    def backward(dy):
        dlogits = backend.cross_entropy_backward(dy, logits2, targets, scale, maxima, sums, aux, first)
        return (dlogits.reshape(logits.shape),)

    return Tensor.from_op(loss, (logits,), backward)


def unembed_cross_entropy(x, w, targets, scale=None, group=SOLO, dloss=None):
    """cross_entropy(unembed(x, w), targets, scale, group), fused: not all logits (N, V/p) are in memory at once.

    dloss: the array with which backward() of this loss will be called, or None if it is not known. If dloss is given,
    forward may already compute the gradients; backward() raises AutogradError for any other array.
    """
    require(x.shape[-1] == w.shape[1], "unembed_cross_entropy", x, w)
    V = w.shape[0] * group.size
    x2, targets, scale = flat_targets("unembed_cross_entropy", x, targets, scale, V)
    backend, first = x.backend, group.rank * w.shape[0]
    forward_scale = scale if is_recording() and w.shape[0] == V else None  # gradients in forward need all V columns
    out, own = None, object()
    if forward_scale is not None:
        out = w.destination(writer=own)
    *stats, aux = backend.unembed_cross_entropy_forward(x2, w.data, targets, first, forward_scale, dloss, out)
    loss, maxima, sums = loss_of_rows(*stats, scale, group, backend)

    def backward(dy):
        if dloss is not None and dy is not dloss:
            raise AutogradError("unembed_cross_entropy: call backward() with the dloss array that forward was given")
        if out is not None and w.in_buffer != (own,):
            raise AutogradError(
                "unembed_cross_entropy: the gradient that forward may have written to w.grad_buffer was used or "
                "overwritten: call backward() once, before another operation writes to this buffer"
            )
        dw = w.destination() if out is None else out
        dx, dw = backend.unembed_cross_entropy_backward(dy, x2, w.data, targets, scale, maxima, sums, aux, first, dw)
        return dx.reshape(x.shape), dw

    return Tensor.from_op(loss, (x, w), backward)


def loss_of_rows(maxima, sums, target_logits, scale, group, backend):
    """(loss, maxima, sums) over the whole vocabulary, from this rank's results of cross_entropy_forward."""
    row_maxima = group.all_reduce(maxima, "max")
    rescaled = backend.loss_rows(maxima, sums, target_logits, row_maxima)
    sums, target_logits = group.all_reduce(rescaled)  # a target's logit is 0 except on the rank that holds the target
    return backend.loss(row_maxima, sums, target_logits, scale), row_maxima, sums


# -- operations that call collectives: forward is a linear map of all ranks' x, and backward is its transpose ---------


def copy_to_group(x, group):
    """Megatron's f. Forward: x, equal on all ranks. Backward: all ranks' gradients, added (Shoeybi et al. 2019)."""
    return Tensor.from_op(x.data, (x,), lambda dy: (group.all_reduce(dy),))


def reduce_from_group(x, group):
    """Megatron's g. Forward: the sum of all ranks' x. Backward: the gradient, which is equal on all ranks."""
    return Tensor.from_op(group.all_reduce(x.data), (x,), lambda dy: (dy,))


def gather_from_group(x, group):
    """Forward: all ranks' columns x (..., K) side by side (..., pK). Backward: this rank's columns of the gradient."""
    K, p = x.shape[-1], group.size
    parts = group.all_gather(x.data.reshape(-1, K)).reshape(p, -1, K)  # (p, N, K)
    y = parts.swapaxes(0, 1).reshape(*x.shape[:-1], p * K)
    return Tensor.from_op(y, (x,), lambda dy: (dy[..., group.rank * K : (group.rank + 1) * K],))


def recompute(function, x):
    """function(x) without storing its activations: backward computes them again from x (Chen et al. 2016).

    For this, backward runs a nested backward pass, which calls on_gradient of the parameters that `function` uses.
    """
    if not x.requires_grad:
        raise AutogradError("recompute: x requires no gradient, so backward would never run this part again")
    with no_grad():
        y = function(x.detach())

    def backward(dy):
        x_leaf = x.detach(requires_grad=True)
        function(x_leaf).backward(dy)
        return (x_leaf.grad,)

    return Tensor.from_op(y.data, (x,), backward)


def buffers(*leaves):
    """The argument `out` of a backward kernel: where it writes the gradient of each parameter, or None: a new array."""
    return tuple(None if leaf is None else leaf.destination() for leaf in leaves)


def require(condition, operation, *tensors):
    """Raise ShapeError with the shapes of `tensors` unless `condition` holds."""
    if not condition:
        raise ShapeError(f"{operation}: shapes {', '.join(str(tensor.shape) for tensor in tensors)} do not fit")


def require_tokens(operation, tokens, vocabulary):
    """Raise ShapeError for tokens that are not integers, and for a token outside the vocabulary.

    Device arrays were checked before the copy to the device.
    """
    if isinstance(tokens, np.ndarray) and not np.issubdtype(tokens.dtype, np.integer):  # a copy would truncate floats
        raise ShapeError(f"{operation}: tokens have dtype {tokens.dtype}, but they must be integers")
    if isinstance(tokens, np.ndarray) and tokens.size:
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= vocabulary:
            token = lowest if lowest < 0 else highest
            raise ShapeError(f"{operation}: token {token} is outside the vocabulary of {vocabulary}")


def require_size(name, value):
    """Raise ConfigError with the flag of argument `name` unless `value` is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ConfigError(f"--{name.replace('_', '-')} {value!r} must be a positive whole number")


def flat_targets(operation, x, targets, scale, vocabulary):
    """(x (..., K) reshaped to (N, K), targets to (N), scale or its default 1/N); ShapeError for wrong targets."""
    if targets.shape != x.shape[:-1]:
        raise ShapeError(f"{operation}: targets {targets.shape} must have one element per row of {x.shape}")
    require_tokens(operation, targets, vocabulary)
    return x.data.reshape(-1, x.shape[-1]), targets.reshape(-1), 1 / targets.size if scale is None else scale
