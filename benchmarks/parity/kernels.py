"""Calls every kernel pair of a backend on random arrays, and compares each result with its oracle."""

# B batch, T time, C channels, H heads, D = C // H, V vocabulary, N = B*T rows

import math

import numpy as np

from benchmarks.parity.checks import TOLERANCE, KernelChecker
from gpt2core.arena import PAGE, SEGMENTS
from gpt2core.kernel_arguments import ParameterCopy
from gpt2core.optimizer import AdamW
from gpt2core.parallel.parameter import Destination
from gpt2core.tracing.hooks import Hooks, Modules

SHAPES = [(2, 33, 2, 16, 37), (1, 130, 3, 8, 172)]  # (B, T, H, D, V); T and V are no multiples of a tile


def first_difference(backend, shapes=SHAPES, seed=0):
    """The first Difference of all kernels of `backend` in its precision, or None."""
    checker = KernelChecker(backend, Modules({}), TOLERANCE[backend.precision])
    hooks, rng = Hooks(), np.random.default_rng(seed)
    hooks.around_kernels(backend, checker.around)
    try:
        for shape in shapes:
            for call_kernels in (call_layers, call_embedding_and_loss, call_optimizer):
                call_kernels(backend, rng, *shape)
                if checker.found:
                    return checker.found
    finally:
        hooks.remove()
    return None


def normal(backend, rng, *shape, scale=1.0):
    """Normally distributed numbers in the dtype of activations."""
    return backend.asarray((scale * rng.standard_normal(shape)).astype(np.float32)).astype(backend.compute_dtype)


def compute(gradients):
    """Compute the gradients of parameters in all ways: in new arrays, written to arrays, and added to arrays."""
    for gradient in filter(callable, gradients):
        array = gradient(None)
        for accumulate in (False, True):
            gradient(Destination(array.copy(), accumulate))


def call_layers(backend, rng, B, T, H, D, V):
    """Products, GELU, LayerNorm and attention, forward and backward."""
    C = H * D

    def weight(*shape):
        return normal(backend, rng, *shape, scale=1 / math.sqrt(shape[0]))

    def activation(columns):
        return normal(backend, rng, B, T, columns)

    x, dy = activation(C), activation(C)
    for columns in (3 * C, C):  # a square weight too, which could be transposed without an error
        w, b, dy_wide = weight(C, columns), normal(backend, rng, columns), activation(columns)
        backend.linear_forward(x, w, b)
        compute(backend.linear_backward(dy_wide, x, w))
    w, b, w2 = weight(C, 4 * C), normal(backend, rng, 4 * C), weight(4 * C, C)
    backend.gelu_backward(dy, backend.gelu_forward(x))
    _, aux = backend.linear_gelu_forward(x, w, b)
    compute(backend.linear_gelu_backward(activation(4 * C), x, w, b, aux))
    _, aux = backend.mlp_forward(x, w, b, w2)
    compute(backend.mlp_backward(dy, x, w, b, w2, aux))
    w, b, bias = (normal(backend, rng, C) for _ in range(3))
    _, aux = backend.layernorm_forward(x, w, b, 1e-5)
    compute(backend.layernorm_backward(dy, w, aux))
    _, _, aux = backend.residual_layernorm_forward(x, activation(C), bias, w, b, 1e-5)
    compute(backend.residual_layernorm_backward(activation(C), dy, w, aux))
    qkv = activation(3 * C)
    backend.rotary_backward(backend.rotary_forward(qkv, H, 5), H, 5)
    y, aux = backend.attention_forward(qkv, H)
    backend.attention_backward(dy, qkv, y, aux, H)
    y, aux = backend.rotary_attention_forward(qkv, H, 5)
    backend.rotary_attention_backward(dy, y, aux, H, 5)
    backend.add(x, dy)
    backend.residual_add_forward(x, dy, bias)
    compute([backend.bias_backward(dy)])


def call_embedding_and_loss(backend, rng, B, T, H, D, V):
    """Embedding, logits and cross-entropy, forward and backward; also of half of the vocabulary."""
    C, N = H * D, B * T
    ids, targets = rng.integers(0, V, (B, T)), rng.integers(0, V, N)
    wte, wpe, x = (
        normal(backend, rng, *shape, scale=C**-0.25) for shape in ((V, C), (T, C), (N, C))
    )  # logits of size 1
    dloss, scale = backend.asarray(np.array(0.75)), 1 / N
    for first, rows in ((0, V), (V // 2, V - V // 2)):
        own = wte[first : first + rows].copy()
        backend.embedding_forward(ids, own, wpe, 0, first)
        compute(backend.embedding_backward(normal(backend, rng, B, T, C), ids, own, wpe, 0, first))
        maxima, sums, target_logits, aux = backend.unembed_cross_entropy_forward(x, own, targets, first)
        row_maxima = backend.xp.array(maxima)
        rescaled = backend.loss_rows(maxima, sums, target_logits, row_maxima)
        backend.loss(row_maxima, rescaled[0], rescaled[1], scale)
        statistics = row_maxima, rescaled[0]
        compute(backend.unembed_cross_entropy_backward(dloss, x, own, targets, scale, *statistics, aux, first))
    logits = backend.unembed_forward(x, wte)
    *statistics, _, aux = backend.cross_entropy_forward(logits, targets)
    dlogits = backend.cross_entropy_backward(dloss, logits, targets, scale, *statistics, aux)
    compute(backend.unembed_backward(dlogits, x, wte))


def call_optimizer(backend, rng, B, T, H, D, V):
    """The norm, clipping and AdamW, on 64 blocks of the arena, half of them with weight decay."""
    n = SEGMENTS * PAGE
    p, m, g = (backend.asarray(rng.standard_normal(n).astype(np.float32)) for _ in range(3))
    v, copy = backend.asarray(rng.random(n).astype(np.float32)), None
    if backend.compute_dtype != backend.dtype:
        copy = ParameterCopy(backend.zeros((n,), backend.compute_dtype))
    _, factor = backend.clip(backend.page_sums(g), 0.5)
    decays = backend.asarray(np.array([1, 0, 0, 1] * (n // PAGE // 4), np.int32))
    coefficients = backend.asarray(AdamW(0.9, 0.95, 1e-8, 0.1).coefficients(3, 1e-2))
    backend.adamw_step(p, m, v, g, coefficients, factor, decays, (0.9, 0.95), copy)
