"""The logits of one new token with a KV cache, in NumPy calls without autograd: little more than reading the weights.

If each operation made a Tensor, a large part of the time of a token would be spent in Python.
"""

# C channels, H heads, D = C // H, K columns, V vocabulary; a row is an array (1, C)

import numpy as np

from gpt2core.communicator import Solo
from gpt2core.sampler import next_logits

MODULES = "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"  # of a layer


def token_step(model):
    """A function to use instead of sampler.next_logits, or None if ranks share the layers of the model."""
    return TokenStep(model) if isinstance(model.group, Solo) else None


class TokenStep:
    """Called as step(model, ids, cache) -> logits (V), like next_logits; it computes one token by itself."""

    def __init__(self, model):
        config, backend = model.config, model.head.backend
        self.backend, self.eps, self.n_head = backend, config.layer_norm_epsilon, config.n_head
        arrays = {name: tensor.data for name, tensor in model.parameters.items()}
        self.wte, self.wpe = arrays["transformer.wte.weight"], arrays["transformer.wpe.weight"]
        self.layers = [
            [self.module(arrays, f"transformer.h.{layer}.{name}") for name in MODULES]
            for layer in range(config.n_layer)
        ]
        self.ln_f, self.head = self.module(arrays, "transformer.ln_f"), model.head.data.T  # head (C, V)
        widths = {weight.shape[1] for layer in self.layers for weight, _ in layer if weight.ndim == 2}
        self.outputs = {width: np.empty((1, width), backend.dtype) for width in widths | {self.head.shape[1]}}

    @staticmethod
    def module(arrays, name):
        """(weight, bias) of a module."""
        return arrays[f"{name}.weight"], arrays[f"{name}.bias"]

    def __call__(self, model, ids, cache):
        if len(ids) > 1:
            return next_logits(model, ids, cache)
        position = cache.length
        x = (self.wte[ids[0]] + self.wpe[position])[None]
        branch, branch_bias = None, None  # what the next norm adds to x
        for (ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj), keys, values in zip(
            self.layers, cache.keys, cache.values, strict=True
        ):
            x, y = self.backend.layernorm_of_one_row(x, branch, branch_bias, *ln_1, self.eps)
            qkv = self.product(y, c_attn[0])
            qkv += c_attn[1]
            y = self.attention(qkv, keys[0], values[0], position)
            x, y = self.backend.layernorm_of_one_row(x, self.product(y, attn_proj[0]), attn_proj[1], *ln_2, self.eps)
            h = self.product(y, c_fc[0])
            self.backend.gelu(h, c_fc[1], h, None)
            branch, branch_bias = self.product(h, mlp_proj[0]), mlp_proj[1]
        y = self.backend.layernorm_of_one_row(x, branch, branch_bias, *self.ln_f, self.eps)[1]
        cache.length += 1
        return self.product(y, self.head)[0].copy()

    def product(self, x, w):
        """x (1, C), w (C, K) -> (1, K), an array that the next product of this width overwrites."""
        return self.backend.one_row(x, w, self.outputs[w.shape[1]])

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
