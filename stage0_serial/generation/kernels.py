"""Kernels that only generation uses: products of one row, and attention to cached positions."""

import math

import numpy as np

from gpt2core.plain_backend import PlainBackend
from stage0_serial.generation.batch_decoder import BatchDecoder
from stage0_serial.generation.row_products import RowProducts
from stage0_serial.generation.token_step import token_step


class GenerationKernels(PlainBackend):
    """The part of NumpyBackend for generation."""

    decoder_batch = 32  # more prompts need more memory for their caches
    row_products = None  # made at the first use

    def decoder(self, model, batch):
        step = token_step(model)
        return BatchDecoder(model, step) if step else None

    def one_row(self, x, w, y):
        """Write x (1, C) @ w (C, K) to y (1, K) and return it."""
        if self.row_products is None:
            self.row_products = RowProducts(self.runtime)
        return self.row_products(x, w, y)

    def attention_cached(self, qkv, keys, values, position, n_head):
        B, t, C3 = qkv.shape
        D, end = C3 // 3 // n_head, position + t
        q3 = qkv.reshape(B, t, 3, n_head, D).transpose(0, 2, 3, 1, 4)  # (B, 3, H, t, D)
        self.store_cached(qkv, keys, values, position)
        if position == 0 and t > 1:  # no earlier positions: the attention of training
            return self.attention_forward(qkv, n_head)[0]
        s = np.matmul(q3[:, 0] * q3.dtype.type(D**-0.5), keys[:, :, :, :end])  # (B, H, t, end)
        if t > 1:
            s += np.triu(np.full((t, end), -np.inf, s.dtype), position + 1)
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(-1, keepdims=True)
        return np.matmul(s, values[:, :, :end]).transpose(0, 2, 1, 3).reshape(B, t, n_head * D)

    def store_cached(self, qkv, keys, values, position):
        """Write k and v of qkv (B, t, 3C) to keys (B, H, D, block) and values (B, H, block, D), from `position` on."""
        (B, t, _), (H, D) = qkv.shape, keys.shape[1:3]
        _, k, v = qkv.reshape(B, t, 3, H, D).transpose(2, 0, 3, 1, 4)  # each (B, H, t, D)
        keys[..., position : position + t], values[:, :, position : position + t] = k.transpose(0, 1, 3, 2), v

    def layernorm_of_one_row(self, x, a, a_bias, w, b, eps):
        """residual_layernorm_forward of one row (1, C), without aux: fewer NumPy calls, which dominate the time."""
        s = x if a is None else x + (a + a_bias)
        h = s - np.vdot(s, self.constant(1 / s.size, s.size, s.dtype))
        r = 1 / math.sqrt(float(np.vdot(h, h)) / h.size + eps)
        y = h * (w * r)
        y += b
        return s, y
