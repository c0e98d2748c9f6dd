"""One function per differentiable operation: it computes the result and defines how backward() computes gradients."""

from gpt2core import checks
from gpt2core.tensor import Tensor
from gpt2core.vocabulary import Vocabulary, gather_columns, own_slice

# -- operations that call kernels of the backend -----------------------------------------------------------------------
# B batch, T time, C channels, V vocabulary, K columns, N = B*T rows. An operation first checks shapes (checks.py). The
# graph keeps only the arrays that a backward kernel reads. Of a parameter w it keeps the tensor, and reads w.data in
# backward: with ZeRO-3 that is another array. Parameters are the first parents: their gradients are passed on first.
# The model calls fused operations, which stand after their parts: mlp for gelu, stream_layernorm and residual_layernorm
# for layernorm, unembed_cross_entropy for cross_entropy, and for rotary positions rotary_attention for attention.


def linear(x, w, b=None):
    """x (..., C) @ w (C, K) + b (K) -> (..., K)."""
    checks.linear(x, w, b)
    backend = x.backend
    y = backend.linear_forward(x.data, w.data, None if b is None else b.data)

    def backward(dy):
        dx, dw, db = backend.linear_backward(dy, x.data, w.data, b is not None)
        return dw, db, dx

    return Tensor.from_op(y, (w, b, x), backward)


def gelu(x):
    """GPT-2's activation: the tanh approximation of x * Phi(x), where Phi is the normal distribution function."""
    backend = x.backend
    return Tensor.from_op(backend.gelu_forward(x.data), (x,), lambda dy: (backend.gelu_backward(dy, x.data),))


def mlp(x, w, b, w2):
    """linear(gelu(linear(x, w, b)), w2), without a second bias: x (..., C), w (C, K), b (K), w2 (K, C) -> (..., C)."""
    checks.mlp(x, w, b, w2)
    backend = x.backend
    y, aux = backend.mlp_forward(x.data, w.data, b.data, w2.data)

    def backward(dy):
        dx, dw, db, dw2 = backend.mlp_backward(dy, x.data, w.data, b.data, w2.data, aux)
        return dw2, dw, db, dx

    return Tensor.from_op(y, (w2, w, b, x), backward)


def layernorm(x, w, b, eps=1e-5):
    """(x - mean) / sqrt(variance + eps) * w + b over the last axis."""
    checks.last_axis("layernorm", x, w, b)
    backend = x.backend
    y, aux = backend.layernorm_forward(x.data, w.data, b.data, eps)

    def backward(dy):
        dx, dw, db = backend.layernorm_backward(dy, w.data, aux)
        return dw, db, dx

    return Tensor.from_op(y, (w, b, x), backward)


def stream_layernorm(x, w, b, eps=1e-5):
    """Two outputs: x (the residual stream) and layernorm(x, w, b); backward adds the gradients of both."""
    checks.last_axis("stream_layernorm", x, w, b)
    backend = x.backend
    y, aux = backend.layernorm_forward(x.data, w.data, b.data, eps)

    def backward(dx, dy):
        if dy is None:
            return None, None, dx
        dx, _, dw, db = backend.residual_layernorm_backward(dx, dy, w.data, aux)
        return dw, db, dx

    return Tensor.from_op((x.data, y), (w, b, x), backward)


def residual_add(x, a, a_bias):
    """s = x + (a + a_bias): the residual stream after a branch (a, a_bias), where no LayerNorm reads it next."""
    checks.residual("residual_add", x, a, a_bias)
    backend = x.backend
    s = backend.residual_add_forward(x.data, a.data, a_bias.data)
    return Tensor.from_op(s, (a_bias, x, a), lambda ds: (backend.bias_backward(ds), ds, ds))


def residual_layernorm(x, a, a_bias, w, b, eps=1e-5):
    """Two outputs: s = residual_add(x, a, a_bias) and layernorm(s, w, b), fused."""
    checks.residual("residual_layernorm", x, a, a_bias, w, b)
    backend = x.backend
    s, y, aux = backend.residual_layernorm_forward(x.data, a.data, a_bias.data, w.data, b.data, eps)

    def backward(ds, dy):
        if dy is None:  # layernorm(s) was not used
            return None, None, backend.bias_backward(ds), ds, ds
        dx, da_bias, dw, db = backend.residual_layernorm_backward(ds, dy, w.data, aux)
        return dw, db, da_bias, dx, dx

    return Tensor.from_op((s, y), (w, b, a_bias, x, a), backward)


def dropout(x, mask, bias=None):
    """x (B, T, C) + bias (C) after dropout by a dropout.Mask -> (B, T, C); backward computes the mask again."""
    backend = x.backend
    y = backend.dropout(x.data, mask, None if bias is None else bias.data)

    def backward(dy):
        dx = backend.dropout(dy, mask)
        return (dx,) if bias is None else (backend.bias_backward(dx), dx)

    return Tensor.from_op(y, (x,) if bias is None else (bias, x), backward)


def attention(qkv, n_head):
    """Causal self-attention: q, k and v side by side, qkv (B, T, 3C) -> (B, T, C) (Vaswani et al. 2017)."""
    checks.attention(qkv, n_head)
    backend, x = qkv.backend, qkv.data
    y, aux = backend.attention_forward(x, n_head)
    return Tensor.from_op(y, (qkv,), lambda dy: (backend.attention_backward(dy, x, y, aux, n_head),))


def rotary_attention(x, w, b, n_head, position=0):
    """attention(linear(x, w, b), n_head), with each q and k rotated by its position, position + t (Su et al. 2021).

    The q of position m times the k of position n depends on m - n only, so attention learns relative positions.
    """
    checks.rotary_attention(x, w, b, n_head)
    backend = x.backend
    y, aux = backend.rotary_attention_forward(backend.linear_forward(x.data, w.data, b.data), n_head, position)

    def backward(dy):
        dqkv = backend.rotary_attention_backward(dy, y, aux, n_head, position)
        dx, dw, db = backend.linear_backward(dqkv, x.data, w.data)
        return dw, db, dx

    return Tensor.from_op(y, (w, b, x), backward)


def unembed(x, w):
    """x (..., C), w (V, C) -> logits (..., V); w may be the token embedding itself."""
    checks.unembed("unembed", x, w)
    backend = x.backend
    y = backend.unembed_forward(x.data, w.data)
    return Tensor.from_op(y, (w, x), lambda dy: backend.unembed_backward(dy, x.data, w.data)[::-1])


# -- operations with tokens, whose vocabulary several ranks can divide -------------------------------------------------
# `vocabulary`, a Vocabulary (vocabulary.py), says which of the V tokens this rank has if p ranks divide them: V/p rows
# of an embedding, and V/p logits. By default one rank has all tokens, and collectives of its group return their input.


def embedding(ids, wte, wpe=None, position=0, vocabulary=None):
    """ids (B, T), integers or the result of prepare_tokens -> wte[ids] + wpe[position : position + T] (B, T, C).

    wpe: (block_size, C), or None to add no position embedding. wte (V/p, C) has the rows of this rank's tokens; other
    tokens give 0, and the all-reduce adds the rows of all ranks.
    """
    vocabulary = vocabulary or Vocabulary(wte.shape[0])
    backend, group, first = wte.backend, vocabulary.group, vocabulary.first
    checks.embedding(backend, ids, wte, wpe, position, vocabulary)
    added = None if wpe is None or not group.is_root else wpe.data  # on one rank, or the sum would contain it p times
    y = backend.embedding_forward(ids, wte.data, added, position, first)
    y = group.all_reduce(y, out=y)

    def backward(dy):
        positions = None if wpe is None else wpe.data
        return backend.embedding_backward(dy, ids, wte.data, positions, position, first)

    return Tensor.from_op(y, (wte, wpe), backward)


def cross_entropy(logits, targets, scale=None, vocabulary=None):
    """scale * sum over N rows of -log softmax(logits)[target], a float64 scalar; the default scale 1/N gives the mean.

    logits (..., V/p): this rank's columns; targets (...). The loss includes all ranks' columns and is equal on all
    ranks. For each row the ranks exchange three numbers instead of V logits (Shoeybi et al. 2019).
    """
    vocabulary = vocabulary or Vocabulary(logits.shape[-1])
    checks.cross_entropy(logits, targets, vocabulary)
    scale = 1 / targets.size if scale is None else scale
    backend, first, shape = logits.backend, vocabulary.first, logits.shape
    targets, logits2 = targets.reshape(-1), logits.data.reshape(-1, shape[-1])  # (N), (N, V/p)
    *statistics, aux = backend.cross_entropy_forward(logits2, targets, first)
    loss, maxima, sums = loss_of_rows(*statistics, scale, vocabulary.group, backend)

    def backward(dy):
        dlogits = backend.cross_entropy_backward(dy, logits2, targets, scale, maxima, sums, aux, first)
        return (dlogits.reshape(shape),)

    return Tensor.from_op(loss, (logits,), backward)


def unembed_cross_entropy(x, w, targets, scale=None, vocabulary=None, gradient=None):
    """cross_entropy(unembed(x, w), targets, scale, vocabulary), fused: not all logits are in memory at once.

    gradient: see ForwardArguments.
    """
    vocabulary = vocabulary or Vocabulary(w.shape[0])
    checks.unembed_cross_entropy(x, w, targets, vocabulary)
    scale = 1 / targets.size if scale is None else scale
    backend, first, targets = x.backend, vocabulary.first, targets.reshape(-1)
    *statistics, aux = backend.unembed_cross_entropy_forward(x.data, w.data, targets, first, gradient)
    loss, maxima, sums = loss_of_rows(*statistics, scale, vocabulary.group, backend)

    def backward(dy):
        known = targets, scale, maxima, sums, aux, first
        dx, dw = backend.unembed_cross_entropy_backward(dy, x.data, w.data, *known)
        return dw, dx

    return Tensor.from_op(loss, (w, x), backward)


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


def gather_from_group(x, group, total=None):
    """Forward: all ranks' columns x (..., K) side by side, (..., total). Backward: this rank's columns of the gradient.

    total: pK by default; the last rank may have fewer than K columns (vocabulary.own_slice).
    """
    total = total or group.size * x.shape[-1]
    own = own_slice(total, group.rank, group.size)
    return Tensor.from_op(gather_columns(x.data, group, total, x.backend), (x,), lambda dy: (dy[..., own],))
