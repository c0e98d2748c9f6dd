"""Kernels that only generation uses: one row, attention to cached positions, and rows divided over threads.

Training divides the batch: each thread has its own micro-batches. Generation has one sequence, so the threads divide
the rows (positions) of each kernel, or its heads.
"""

import contextvars
import math

import numpy as np

from gpt2core.backend import Backend
from gpt2core.parallel.even_slices import even_slices
from gpt2core.tensor import is_recording
from stage0_serial.row_products import RowProducts

MIN_ROWS = 64  # fewer rows are not divided over threads


class GenerationKernels(Backend):
    """The part of NumpyBackend for generation. helpers: the backends of the other threads, made at the first use."""

    helpers, row_products, dividing = (), None, False

    def one_row(self, x, w, y):
        """Write x (1, C) @ w (C, K) to y (1, K) and return it."""
        if self.row_products is None:
            self.row_products = RowProducts(self.runtime)
        return self.row_products(x, w, y)

    def attention_cached(self, qkv, keys, values, position, n_head):
        B, t, C3 = qkv.shape
        D, end = C3 // 3 // n_head, position + t
        q3 = qkv.reshape(B, t, 3, n_head, D).transpose(0, 2, 3, 1, 4)  # (B, 3, H, t, D)
        keys[:, :, :, position:end] = q3[:, 1].transpose(0, 1, 3, 2)
        values[:, :, position:end] = q3[:, 2]
        if position == 0 and t > 1:  # no earlier positions: the attention of training
            return self.attention_forward(qkv, n_head)[0]
        s = np.matmul(q3[:, 0] * q3.dtype.type(D**-0.5), keys[:, :, :, :end])  # (B, H, t, end)
        if t > 1:
            s += np.triu(np.full((t, end), -np.inf, s.dtype), position + 1)
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(-1, keepdims=True)
        return np.matmul(s, values[:, :, :end]).transpose(0, 2, 1, 3).reshape(B, t, n_head * D)

    def layernorm_of_one_row(self, x, a, a_bias, w, b, eps):
        """residual_layernorm_forward of one row: fewer NumPy calls, each of which costs more than its arithmetic."""
        s = x if a is None else x + (a + a_bias)
        h = s - np.vdot(s, self.constant(1 / s.size, s.size, s.dtype))
        r = 1 / math.sqrt(float(np.vdot(h, h)) / h.size + eps)
        y = h * (w * r)
        y += b
        return s, y

    # -- threads -----------------------------------------------------------------------------------------------------

    def divides(self, n):
        """Whether the threads divide a kernel with n rows: if they are many, and no backward pass follows."""
        several = self.runtime.executor is not None and not self.dividing  # a part of a kernel is not divided again
        return several and n >= MIN_ROWS and not is_recording()

    def divide(self, kernel, n):
        """Call kernel(backend, slice of range(n)) in each thread, with a backend of its own."""
        if len(self.helpers) != self.runtime.threads - 1:
            self.helpers = [type(self)(self.precision) for _ in range(self.runtime.threads - 1)]
            for helper in self.helpers:
                helper.runtime.use_blas(self.runtime.blas)
        own, *parts = even_slices(n, self.runtime.threads)
        submit = self.runtime.executor.submit
        jobs = [
            submit(contextvars.copy_context().run, kernel, *each)  # the context has no_grad()
            for each in zip(self.helpers, parts, strict=True)
        ]
        self.dividing = True
        try:
            kernel(self, own)
        finally:
            self.dividing = False
        for job in jobs:
            job.result()

    def over_rows(self, kernel, n, parts=1):
        """Call kernel(backend, slice of range(n)): in each thread, or otherwise for `parts` equal slices in turn."""
        if self.divides(n):
            self.divide(kernel, n)
        else:
            for part in even_slices(n, parts):
                kernel(self, part)
