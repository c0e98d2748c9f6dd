"""The logits of one new token with a KV cache, in NumPy calls without autograd: little more than reading the weights.

If each operation made a Tensor, a large part of the time of a token would be spent in Python.
"""

# C channels, H heads, D = C // H, K columns, V vocabulary; a row is an array (1, C)

import math

import numpy as np

from gpt2core.communicator import Solo
from gpt2core.sampler import next_logits

GELU_A, GELU_B = math.sqrt(2 / math.pi), 0.044715


def token_step(model):
    """A function to use instead of sampler.next_logits, or None if ranks share the layers of the model."""
    return TokenStep(model) if isinstance(model.group, Solo) else None


class TokenStep:
    """Called as step(model, ids, cache) -> logits (V), like next_logits; it computes one token by itself."""

    def __init__(self, model):
        config, backend = model.config, model.head.backend
        self.one_row, self.eps, self.n_head = backend.one_row, config.layer_norm_epsilon, config.n_head
        self.mean_of = np.full(config.n_embd, 1 / config.n_embd, backend.dtype)
        arrays = {name: tensor.data for name, tensor in model.parameters.items()}
        self.wte, self.wpe = arrays["transformer.wte.weight"], arrays["transformer.wpe.weight"]
        self.layers = [
            [self.module(arrays, f"transformer.h.{layer}.{name}") for name in ("ln_1", "attn.c_attn", "attn.c_proj")]
            + [self.module(arrays, f"transformer.h.{layer}.{name}") for name in ("ln_2", "mlp.c_fc", "mlp.c_proj")]
            for layer in range(config.n_layer)
        ]
        self.ln_f, self.head = self.module(arrays, "transformer.ln_f"), model.head.data.T  # head (C, V)
        widths = {weight.shape[1] for layer in self.layers for weight, _ in layer if weight.ndim == 2}
        self.outputs = {width: np.empty((1, width), backend.dtype) for width in widths | {self.head.shape[1]}}
        self.scratch = np.empty((1, max(widths)), backend.dtype)

    @staticmethod
    def module(arrays, name):
        return arrays[f"{name}.weight"], arrays[f"{name}.bias"]

    def __call__(self, model, ids, cache):
        if len(ids) > 1:
            return next_logits(model, ids, cache)
        position = cache.length
        x = (self.wte[ids[0]] + self.wpe[position])[None]
        for (ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj), keys, values in zip(
            self.layers, cache.keys, cache.values, strict=True
        ):
            a = self.attention(self.linear(self.layernorm(x, *ln_1), *c_attn), keys[0], values[0], position)
            x = x + self.linear(a, *attn_proj)
            h = self.gelu(self.linear(self.layernorm(x, *ln_2), *c_fc))
            x = x + self.linear(h, *mlp_proj)
        cache.length += 1
        return self.one_row(self.layernorm(x, *self.ln_f), self.head, self.outputs[self.head.shape[1]])[0].copy()

    def linear(self, x, w, b):
        """x (1, C), w (C, K), b (K) -> (1, K), an array that the next product of this width overwrites."""
        y = self.one_row(x, w, self.outputs[w.shape[1]])
        y += b
        return y

    def layernorm(self, x, w, b):
        h = x - np.vdot(x, self.mean_of)
        h *= w * (1 / math.sqrt(float(np.vdot(h, h)) / h.size + self.eps))
        h += b
        return h

    def attention(self, qkv, keys, values, position):
        """qkv (1, 3C) of this position, keys (H, D, block), values (H, block, D) -> (1, C); stores k and v."""
        q, k, v = qkv.reshape(3, self.n_head, -1)  # each (H, D)
        keys[:, :, position], values[:, position] = k, v
        q *= q.shape[1] ** -0.5
        s = np.matmul(q[:, None], keys[:, :, : position + 1])  # (H, 1, position + 1)
        s -= np.maximum.reduce(s, axis=2, keepdims=True)
        np.exp(s, out=s)
        y = np.matmul(s, values[:, : position + 1])  # (H, 1, D)
        y /= np.add.reduce(s, axis=2, keepdims=True)
        return y.reshape(1, -1)

    def gelu(self, x):
        """x (1 + tanh(A (x + B x^3))) / 2, written to x."""
        s = self.scratch[:, : x.shape[1]]
        np.multiply(x, x, out=s)
        s *= GELU_A * GELU_B
        s += GELU_A
        s *= x
        np.tanh(s, out=s)
        s += 1
        s *= 0.5
        x *= s
        return x
